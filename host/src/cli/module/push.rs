//! `weightmill module push`.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::attest::SigningKey;
use crate::cli::args::{Global, RegistryArgs};
use crate::cli::output;
use crate::cli::progress::Bar;
use crate::error::{Code, Error, Result};
use crate::publish::client::Registry;
use crate::publish::module::push_module;
use crate::publish::reference::Reference;

const EXAMPLES: &str = "Examples:
  weightmill module push ./regroup.wasm oci://ghcr.io/acme/regroup:1.0.0
  weightmill module push ./regroup.wasm oci://ghcr.io/acme/regroup:1.0.0 --sign release.pem

Pushing the same module again gives the same manifest digest. Log in with `docker login`.";

/// Push a module to an OCI registry.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Args {
    /// A shipped name, a path, or sha256:<hex>
    module: String,
    /// oci://registry/repository:tag
    #[arg(value_parser = Reference::parse)]
    to: Reference,
    /// Attach a signature by this ed25519 key (PKCS#8 PEM)
    #[arg(long, value_name = "FILE")]
    sign: Option<PathBuf>,
    #[command(flatten)]
    registry: RegistryArgs,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let key = args.sign.as_deref().map(SigningKey::load).transpose()?;
    let (Some(tag), None) = (&args.to.tag, args.to.digest) else {
        return Err(Error::new(Code::BadParams, format!("'{}' is no place for a module", args.to))
            .hint("write oci://registry/repository:tag; the digest is what comes out"));
    };
    let module = super::load(global, &args.module)?;
    let bar = Bar::new();
    let registry = Registry::open(&args.to.repository, &args.registry.options())?;
    let pushed = push_module(&registry, tag, &module, key.as_ref(), &bar)?;
    bar.clear();
    let pinned = args.to.pinned(pushed.manifest);
    if global.json {
        output::json(&serde_json::json!({
            "reference": args.to.to_string(),
            "pinned": pinned.to_string(),
            "manifest": format!("sha256:{}", pushed.manifest),
            "module": format!("sha256:{}", pushed.module),
            "signature": pushed.signature.map(|digest| format!("sha256:{digest}")),
            "signed_by": key.map(|key| key.public().id()),
        }));
    } else {
        let signed = key.map_or_else(String::new, |key| format!(", signed by {}", key.public().id()));
        output::line(format!("module sha256:{}{signed}\nfor a recipe:\nmodule = \"{pinned}\"", pushed.module));
    }
    Ok(ExitCode::SUCCESS)
}
