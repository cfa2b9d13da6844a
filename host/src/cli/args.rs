//! Arguments that several subcommands share.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use weightmill_guest::abi::Tp;

use crate::error::{Code, Error, Result};
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
