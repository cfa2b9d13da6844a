//! `weightmill digest`.

use std::path::PathBuf;
use std::process::ExitCode;

use super::args::{Global, RecipeArgs, RemoteArgs, TpArgs, WorkArgs};
use super::made::Made;
use super::output;
use super::progress::Bar;
use super::session::{self, Session};
use crate::checkpoint::{Checkpoint, DigestCache, NoCache, source_digests};
use crate::error::{Code, Error, Result};
use crate::execute::DigestTable;
use crate::sandbox::EngineName;
use crate::store::Verify;

const EXAMPLES: &str = "Examples:
  weightmill digest --checkpoint pythia-160m
  weightmill digest --entry 9f3c1d2a --json > a.json
  weightmill digest --recipe recipes/gpt-neox.toml --checkpoint pythia-160m --engine wasmi --json

With --recipe the transform is always executed; no entry is read or written.";

/// The table of tensor digests.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// A checkpoint: its own tensors, or with --recipe what becomes of them
    #[arg(long, value_name = "PATH", required_unless_present = "entry")]
    checkpoint: Option<PathBuf>,
    /// An entry of the store: its key, or the beginning of it
    #[arg(long, value_name = "KEY", conflicts_with_all = ["checkpoint", "recipe"])]
    entry: Option<String>,
    /// Run this recipe over the checkpoint
    #[arg(long, value_name = "FILE", requires = "checkpoint")]
    recipe: Option<PathBuf>,
    #[command(flatten)]
    tp: TpArgs,
    /// The engine that runs modules: wasmtime, wasmi or pulley
    #[arg(long, value_name = "ENGINE", value_parser = engine_name, requires = "recipe")]
    engine: Option<EngineName>,
    /// Ask modules for tiles of this size; it changes no digest
    #[arg(long, value_name = "SIZE", value_parser = super::args::size, requires = "recipe", hide = true)]
    tile_bytes: Option<u64>,
    #[command(flatten)]
    work: WorkArgs,
    #[command(flatten)]
    remote: RemoteArgs,
}

/// An engine by its name.
pub(super) fn engine_name(text: &str) -> Result<EngineName> {
    EngineName::from_name(text).ok_or_else(|| {
        let names: Vec<&str> = EngineName::ALL.iter().map(|e| e.as_str()).collect();
        Error::new(Code::BadParams, format!("'{text}' is no engine; there are {}", names.join(", ")))
    })
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let table = match (&args.entry, &args.recipe, &args.checkpoint) {
        (Some(entry), ..) => of_entry(global, entry)?,
        (None, Some(recipe), Some(checkpoint)) => of_recipe(global, args, recipe, checkpoint)?,
        (None, _, Some(checkpoint)) => of_checkpoint(global, args, checkpoint)?,
        (None, _, None) => {
            return Err(Error::new(Code::BadParams, "nothing to digest").hint("name --checkpoint or --entry"));
        }
    };
    if global.json {
        output::json(&document(&table));
    } else {
        print(&table);
    }
    Ok(ExitCode::SUCCESS)
}

fn of_entry(global: &Global, entry: &str) -> Result<DigestTable> {
    let store = session::wanted_store(global)?;
    let key = session::find_key(&store, entry)?;
    let lease = store.lease(&key, Verify::Never, &session::pool(None)?, &Bar::new())?;
    let lease = lease.ok_or_else(|| {
        Error::new(Code::SourceUnavailable, format!("the store has no entry {key}"))
            .hint("`weightmill store ls` lists the keys")
    })?;
    Ok(DigestTable::of_document(lease.document()))
}

fn of_checkpoint(global: &Global, args: &Args, path: &std::path::Path) -> Result<DigestTable> {
    let checkpoint = Checkpoint::open(path)?;
    let store = session::existing_store(global)?;
    let cache: &dyn DigestCache = store.as_ref().map_or(&NoCache, |store| store);
    let bar = Bar::new();
    let digests = source_digests(&checkpoint, cache, &session::pool(args.work.jobs)?, &bar)?;
    Ok(DigestTable::of_checkpoint(&checkpoint, &digests))
}

fn of_recipe(
    global: &Global,
    args: &Args,
    recipe: &std::path::Path,
    checkpoint: &std::path::Path,
) -> Result<DigestTable> {
    let recipe_args = RecipeArgs {
        recipe: recipe.to_path_buf(),
        checkpoint: checkpoint.to_path_buf(),
        tp: args.tp,
        remote: args.remote.clone(),
    };
    // Modules that were pulled are in the store; entries are not looked at.
    let store = session::existing_store(global)?;
    let mut session = Session::open(&recipe_args, store.as_ref(), args.engine)?;
    if let Some(tile_bytes) = args.tile_bytes {
        session.tile_bytes = tile_bytes;
    }
    Made::plan(&session, args.work.jobs, session::memory_budget(&args.work))?.table(&Bar::new())
}

/// The stable document.
pub(super) fn document(table: &DigestTable) -> serde_json::Value {
    let tensors: serde_json::Map<String, serde_json::Value> = table
        .0
        .iter()
        .map(|(name, (tensor, digest))| {
            let row = serde_json::json!({ "dtype": tensor.dtype(), "shape": tensor.shape(), "digest": digest });
            (name.to_string(), row)
        })
        .collect();
    serde_json::json!({ "content_digest": table.content_digest(), "tensors": tensors })
}

fn print(table: &DigestTable) {
    let rows: Vec<Vec<String>> = table
        .0
        .iter()
        .map(|(name, (tensor, digest))| vec![name.to_string(), tensor.to_string(), digest.to_string()])
        .collect();
    output::line(output::table(&["tensor", "type", "digest"], &[], &rows));
    output::line(format!("content {}", table.content_digest()));
}
