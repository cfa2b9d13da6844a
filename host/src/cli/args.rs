//! Arguments that several subcommands share.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use weightmill_guest::abi::Tp;

use crate::attest::read_file;
use crate::digest::ContentDigest;
use crate::error::{Code, Error, Result};
use crate::publish::client::{RegistryOptions, Tls};
use crate::publish::entry::Demand;
use crate::publish::trust::Trust;
use crate::recipe::parse_size;

/// Arguments of every command.
#[derive(Args)]
pub(super) struct Global {
    /// The store's folder [default: $WEIGHTMILL_STORE, $XDG_CACHE_HOME/weightmill or ~/.cache/weightmill]
    #[arg(long, global = true, value_name = "DIR")]
    pub(super) store: Option<PathBuf>,
    /// Print one JSON document on standard output
    #[arg(long, global = true)]
    pub(super) json: bool,
    /// Accept a store on a network or FUSE filesystem, where locks may not hold
    #[arg(long, global = true)]
    pub(super) allow_network_filesystem: bool,
    /// Seconds to wait for a lock
    #[arg(long, global = true, value_name = "SECONDS", default_value_t = 600)]
    pub(super) lock_timeout: u64,
}

/// A recipe over a checkpoint.
#[derive(Args)]
pub(super) struct RecipeArgs {
    /// The recipe (TOML)
    #[arg(long, value_name = "FILE")]
    pub(super) recipe: PathBuf,
    /// The checkpoint: a .safetensors file or a folder
    #[arg(long, value_name = "PATH")]
    pub(super) checkpoint: PathBuf,
    #[command(flatten)]
    pub(super) tp: TpArgs,
    #[command(flatten)]
    pub(super) remote: RemoteArgs,
}

/// How modules that are in registries are found.
#[derive(Args, Clone, Default)]
pub(super) struct RemoteArgs {
    /// Resolve no tag of a remote module that weightmill.lock does not have
    #[arg(long, help_heading = "Registries")]
    pub(super) locked: bool,
    #[command(flatten)]
    pub(super) registry: RegistryArgs,
}

/// How registries are talked to.
#[derive(Args, Clone)]
pub(super) struct RegistryArgs {
    /// Use plain HTTP for registries that are not on this machine
    #[arg(long, help_heading = "Registries")]
    plain_http: bool,
    /// Use TLS for registries on this machine too
    #[arg(long, conflicts_with = "plain_http", help_heading = "Registries")]
    tls: bool,
    /// The longest silence of a registry
    #[arg(long, value_name = "SECONDS", default_value_t = 60, help_heading = "Registries",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    registry_timeout: u64,
    /// How often a request that failed for now is tried again
    #[arg(long, value_name = "N", default_value_t = 5, help_heading = "Registries")]
    registry_retries: u32,
    /// Blobs that are transferred at once
    #[arg(long, value_name = "N", default_value_t = 4, help_heading = "Registries",
          value_parser = clap::value_parser!(u16).range(1..=64))]
    connections: u16,
    /// Ask this host for blobs before the registry: a cache, a peer. It need not be trusted. May be
    /// repeated [default: $WEIGHTMILL_MIRRORS, separated by commas]
    #[arg(long, value_name = "HOST", help_heading = "Registries")]
    mirror: Vec<String>,
}

impl Default for RegistryArgs {
    fn default() -> Self {
        RegistryArgs {
            plain_http: false,
            tls: false,
            registry_timeout: 60,
            registry_retries: 5,
            connections: 4,
            mirror: Vec::new(),
        }
    }
}

impl RegistryArgs {
    pub(super) fn options(&self) -> RegistryOptions {
        RegistryOptions {
            tls: match (self.tls, self.plain_http) {
                (true, _) => Tls::Always,
                (_, true) => Tls::Never,
                _ => Tls::Elsewhere,
            },
            timeout: Duration::from_secs(self.registry_timeout),
            retries: self.registry_retries,
            connections: usize::from(self.connections),
            mirrors: match std::env::var("WEIGHTMILL_MIRRORS") {
                Ok(hosts) if self.mirror.is_empty() => {
                    hosts.split(',').map(str::trim).filter(|host| !host.is_empty()).map(str::to_owned).collect()
                }
                _ => self.mirror.clone(),
            },
        }
    }
}

/// Whether an entry from elsewhere is used.
#[derive(Args, Clone)]
pub(super) struct DemandArgs {
    /// Believe the registry: use what it has for the key, whoever put it there
    #[arg(long, help_heading = "Registries")]
    trust_registry: bool,
    /// The content digest that the entry must have; then nothing else has to vouch for it
    #[arg(long, value_name = "DIGEST", help_heading = "Registries")]
    content: Option<ContentDigest>,
    /// A signed statement about the entry that is at hand; may be repeated
    #[arg(long, value_name = "FILE", help_heading = "Registries")]
    attestation: Vec<PathBuf>,
}

impl DemandArgs {
    pub(super) fn demand(&self) -> Result<Demand> {
        let attestations = self.attestation.iter().map(|path| read_file(path)).collect::<Result<_>>()?;
        Ok(Demand {
            trust: Trust::load()?,
            content: self.content,
            believe_registry: self.trust_registry,
            attestations,
            ..Demand::default()
        })
    }
}

/// Tensor parallel size and rank.
#[derive(Args, Clone, Copy)]
pub(super) struct TpArgs {
    /// Tensor parallel size
    #[arg(long, value_name = "N", default_value_t = 1)]
    tp_size: u64,
    /// This process's tensor parallel rank, from 0
    #[arg(long, value_name = "K", default_value_t = 0)]
    tp_rank: u64,
}

impl TpArgs {
    pub(super) fn tp(self) -> Tp {
        Tp { rank: self.tp_rank, size: self.tp_size }
    }
}

/// How work is done; none of it changes a byte.
#[derive(Args)]
pub(super) struct WorkArgs {
    /// Threads that compute [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(super) jobs: Option<u16>,
    /// Bytes of intermediate and fallback results in memory [default: half of what is free]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(super) memory_budget: Option<u64>,
}

/// What a store's failure means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Mode {
    /// The store must work
    Required,
    /// Without a working store, transform into memory
    Preferred,
    /// Do not touch the store
    Disabled,
}

/// A size such as `4GiB`.
pub(super) fn size(text: &str) -> Result<u64> {
    parse_size(text)
        .ok_or_else(|| Error::new(Code::BadParams, format!("'{text}' is no size; write 512MiB, 4GiB or bytes")))
}
