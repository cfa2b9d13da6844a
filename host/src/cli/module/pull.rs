//! `weightmill module pull`.

use std::process::ExitCode;

use crate::cli::args::{Global, RegistryArgs};
use crate::cli::output::{self, Style};
use crate::cli::progress::{Bar, Signals};
use crate::cli::session;
use crate::error::Result;
use crate::publish::reference::Reference;
use crate::publish::remotes::RemoteModules;

const EXAMPLES: &str = "Examples:
  weightmill module pull oci://ghcr.io/acme/regroup:1.0.0
  weightmill module pull oci://ghcr.io/acme/regroup@sha256:<hex> --json

The module is checked and kept in the store. Whether a recipe may run it is said by trust.toml.";

/// Pull a module from an OCI registry into the store.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Args {
    /// oci://registry/repository:tag or oci://registry/repository@sha256:<hex>
    #[arg(value_parser = Reference::parse)]
    from: Reference,
    #[command(flatten)]
    registry: RegistryArgs,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let store = session::store(global)?;
    let bar = Bar::new();
    let remotes = RemoteModules::new(Some(store), args.registry.options(), false, Box::new(Signals));
    let manifest = match args.from.digest {
        Some(digest) => digest,
        None => remotes.look_up(&args.from, &bar)?,
    };
    let (remote, module) = remotes.pull(&args.from, &manifest, &bar)?;
    bar.clear();
    let pinned = args.from.pinned(manifest);
    let judged = remotes.judge(&args.from, &remote);
    let metadata = module.metadata();
    if global.json {
        output::json(&serde_json::json!({
            "reference": args.from.to_string(),
            "pinned": pinned.to_string(),
            "manifest": format!("sha256:{manifest}"),
            "module": format!("sha256:{}", remote.module),
            "name": metadata.name,
            "version": metadata.version,
            "signatures": remote.signatures.len(),
            "trusted": judged.as_ref().ok().map(ToString::to_string),
            "not_trusted": judged.as_ref().err().map(output::error_document),
        }));
        return Ok(ExitCode::SUCCESS);
    }
    output::line(format!(
        "{} {}  {}\nmodule sha256:{}",
        metadata.name, metadata.version, metadata.summary, remote.module
    ));
    match judged {
        Ok(grounds) => output::line(format!("may run: {grounds}")),
        Err(refused) => {
            let style = Style::stdout();
            output::line(format!("may not run by its tag: {}", refused.message()));
            if let Some(hint) = refused.hint_text() {
                output::line(format!("{}{hint}", style.green("hint: ")));
            }
        }
    }
    output::line(format!("for a recipe:\nmodule = \"{pinned}\""));
    Ok(ExitCode::SUCCESS)
}
