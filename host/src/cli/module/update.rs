//! `weightmill module update`: moves the lock file to what tags point to now.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::cli::args::{Global, RegistryArgs};
use crate::cli::output;
use crate::cli::progress::{Bar, Signals};
use crate::cli::session;
use crate::error::{Code, Error, Result};
use crate::execute::folder_of;
use crate::publish::lock::{LockFile, Locked};
use crate::publish::reference::Reference;
use crate::publish::remotes::RemoteModules;
use crate::recipe::{ModuleRef, Recipe};

const EXAMPLES: &str = "Examples:
  weightmill module update --recipe recipes/mine.toml
  weightmill module update --recipe recipes/mine.toml --module oci://ghcr.io/acme/regroup:1

Writes weightmill.lock beside the recipe. What it may not run yet, it says.";

/// Resolve the tags in a recipe anew and record what they point to now.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Args {
    /// The recipe (TOML)
    #[arg(long, value_name = "FILE")]
    recipe: PathBuf,
    /// Only this reference, as the recipe writes it; may be repeated
    #[arg(long, value_name = "REFERENCE")]
    module: Vec<String>,
    #[command(flatten)]
    registry: RegistryArgs,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let recipe = Recipe::load(&args.recipe)?;
    let written: BTreeSet<&str> = recipe
        .steps()
        .iter()
        .filter_map(|step| match step.module() {
            ModuleRef::Oci(reference) => Some(reference.as_str()),
            _ => None,
        })
        .collect();
    if let Some(unknown) = args.module.iter().find(|text| !written.contains(text.as_str())) {
        return Err(Error::new(Code::ModuleNotFound, format!("the recipe has no step with the module '{unknown}'"))
            .hint("write the reference as the recipe does"));
    }
    let store = session::store(global)?;
    let bar = Bar::new();
    let remotes = RemoteModules::new(Some(store), args.registry.options(), false, Box::new(Signals));
    let mut lock = LockFile::load(folder_of(recipe.file()))?;
    let mut rows = Vec::new();
    let mut changed = false;
    let wanted = |text: &&str| args.module.is_empty() || args.module.iter().any(|only| only == text);
    for text in written.into_iter().filter(wanted) {
        let reference = Reference::parse(text)?;
        let manifest = match reference.digest {
            Some(digest) => digest,
            None => remotes.look_up(&reference, &bar)?,
        };
        let (remote, _) = remotes.pull(&reference, &manifest, &bar)?;
        let before = lock.get(&reference);
        let moved = lock.set(&reference, Locked { manifest, module: remote.module });
        changed |= moved;
        let judged = remotes.judge(&reference, &remote);
        rows.push(serde_json::json!({
            "reference": text,
            "moved": moved,
            "manifest": format!("sha256:{manifest}"),
            "module": format!("sha256:{}", remote.module),
            "before": before.map(|locked| format!("sha256:{}", locked.module)),
            "trusted": judged.as_ref().ok().map(ToString::to_string),
            "not_trusted": judged.as_ref().err().map(output::error_document),
        }));
    }
    if changed {
        lock.write()?;
    }
    bar.clear();
    if global.json {
        output::json(&serde_json::json!({ "lock": lock.path().to_string_lossy(), "modules": rows }));
        return Ok(ExitCode::SUCCESS);
    }
    for row in &rows {
        let text = |field: &str| row[field].as_str().unwrap_or("-").to_owned();
        let what = if row["moved"].as_bool() == Some(true) {
            format!("{} -> {}", text("before"), text("module"))
        } else {
            "as it was".into()
        };
        output::line(format!("{}  {what}", text("reference")));
        if let Some(message) = row["not_trusted"]["message"].as_str() {
            output::line(format!("  {message}\n  {}", row["not_trusted"]["hint"].as_str().unwrap_or_default()));
        }
    }
    if rows.is_empty() {
        output::line("the recipe names no remote module");
    }
    Ok(ExitCode::SUCCESS)
}
