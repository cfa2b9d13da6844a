//! `weightmill build`.

use std::path::PathBuf;
use std::process::ExitCode;

use super::args::{Global, Mode, RecipeArgs, WorkArgs};
use super::output::{self, Style};
use super::progress::Bar;
use super::publish::remote::{BuildRemoteArgs, Remote};
use super::session::{self, Session};
use crate::error::{Code, Error, Result};
use crate::execute::build::{self, BuildOptions, Built, Entry, Outcome};
use crate::store::Verify;

const EXAMPLES: &str = "Examples:
  weightmill build --recipe recipes/gpt-neox.toml --checkpoint pythia-160m
  weightmill build --recipe recipes/llama.toml --checkpoint llama-3-8b --tp-size 4 --tp-rank 2 --json
  weightmill build --recipe recipes/llama.toml --checkpoint llama-3-8b --export out/
  weightmill build --recipe recipes/llama.toml --checkpoint llama-3-8b --check-source
  weightmill build --recipe recipes/llama.toml --checkpoint llama-3-8b \\
      --remote oci://registry.example.com/weights/llama --push --sign release.pem

A second build with the same recipe and checkpoint finds the entry and reads no tensor.";

/// Make the entry, or find it.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    #[command(flatten)]
    work: WorkArgs,
    /// What a failing store means
    #[arg(long, value_enum, default_value_t = Mode::Required)]
    mode: Mode,
    /// Hash all source tensors again, although their files' size and times are those of an earlier
    /// hashing; after the transform, as always, check that no file changed meanwhile. It finds
    /// sources that were altered without a trace in their attributes
    #[arg(long)]
    check_source: bool,
    /// Also write the shards and an index into this folder, as a checkpoint
    #[arg(long, value_name = "DIR")]
    export: Option<PathBuf>,
    #[command(flatten)]
    remote: BuildRemoteArgs,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let mode = match args.mode {
        Mode::Required => build::Mode::Required,
        Mode::Preferred => build::Mode::Preferred,
        Mode::Disabled => {
            return Err(Error::new(Code::BadParams, "a build without a store would keep nothing")
                .hint("use `weightmill load --mode disabled` to stream without a store"));
        }
    };
    let store = session::store(global);
    let session = Session::open(&args.recipe, store.as_ref().ok(), None)?;
    let outline = session.outline()?;
    let bar = Bar::new();
    let pool = session::pool(args.work.jobs)?;
    let remote = Remote::new(&args.remote, &args.recipe.remote.registry, &session, &pool, &bar)?;
    let for_push = store.as_ref().ok().cloned();
    let options = BuildOptions {
        mode,
        verify: Verify::First,
        pool: &pool,
        memory_budget_bytes: session::memory_budget(&args.work),
        check_source: args.check_source || args.remote.push,
        remote: remote.as_ref().map(|remote| remote as _),
        progress: &bar,
        provenance: &|| session.provenance(),
    };
    if !global.json {
        output::line(super::plan::headline(&outline));
    }
    let built = build::build(&outline, store, &options)?;
    if let Some(folder) = &args.export {
        super::store::export(&built.entry, folder)?;
    }
    if let Some(remote) = &remote {
        remote.check(&built.content_digest())?;
    }
    let pushed = match &remote {
        Some(remote) => remote.push(&session, for_push.as_ref(), &built)?,
        None => None,
    };
    bar.clear();
    if global.json {
        let mut document = document(&built);
        if let Some(remote) = &remote {
            document["remote"] = remote.report();
            document["push"] = pushed.unwrap_or_default();
        }
        output::json(&document);
    } else {
        print(&built);
        if let Some(pushed) = pushed {
            let text = |field: &str| pushed[field].as_str().unwrap_or_default().to_owned();
            output::line(format!("{}  {}", text("outcome"), text("repository")));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The outcome's stable name.
pub(super) fn outcome_name(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Built => "built",
        Outcome::Hit => "hit",
        Outcome::Pulled => "pulled",
        Outcome::Fallback(_) => "fallback",
    }
}

/// The JSON document of a build.
pub(super) fn document(built: &Built) -> serde_json::Value {
    let document = built.entry.document();
    let block_of = |shard: usize| {
        let block = document.blocks.iter().find(|b| b.shards.contains(&(shard as u32)));
        block.map(|b| b.name.as_str())
    };
    let shards = document
        .shards
        .iter()
        .enumerate()
        .map(|(i, shard)| serde_json::json!({ "digest": shard.digest, "bytes": shard.size, "block": block_of(i) }));
    let code = match &built.outcome {
        Outcome::Fallback(error) => Some(error.code().as_str()),
        _ => None,
    };
    let done = &built.done;
    let timings: serde_json::Map<String, serde_json::Value> =
        done.timings.iter().map(|(stage, time)| ((*stage).into(), millis(*time))).collect();
    let bytes: u64 = document.shards.iter().map(|s| s.size).sum();
    serde_json::json!({
        "key": document.key,
        "content_digest": document.content_digest,
        "outcome": outcome_name(&built.outcome),
        "code": code,
        "tensors": document.tensors.len() + document.aliases.len(),
        "bytes": bytes,
        "source_bytes_read": done.source_bytes_read,
        "blocks": document.blocks.len(),
        "blocks_reused": done.blocks_reused,
        "bytes_deduplicated": done.bytes_deduplicated,
        "shards": shards.collect::<Vec<_>>(),
        "timings_ms": timings,
    })
}

/// Milliseconds with three decimals.
pub(super) fn millis(time: std::time::Duration) -> serde_json::Value {
    ((time.as_secs_f64() * 1e6).round() / 1e3).into()
}

/// The lines that people read.
pub(super) fn print(built: &Built) {
    let style = Style::stdout();
    let document = built.entry.document();
    let done = &built.done;
    let total = done.timings.get("total").copied().unwrap_or_default();
    let written: u64 = document.shards.iter().map(|s| s.size).sum();
    match &built.outcome {
        Outcome::Hit | Outcome::Pulled => {}
        _ => output::line(format!(
            "{}  {}  read {} · hashed {} · wrote {}",
            output::bytes(written),
            output::duration(total),
            output::bytes(done.source_bytes_read),
            output::bytes(done.bytes_hashed),
            output::bytes(done.bytes_written),
        )),
    }
    if done.blocks_reused > 0 {
        output::line(format!("{} of {} blocks were known already", done.blocks_reused, document.blocks.len()));
    }
    if let Outcome::Fallback(error) = &built.outcome {
        eprintln!("{}{} [{}]", style.red("the store could not be used: "), error.message(), error.code());
    }
    let tail = match &built.outcome {
        Outcome::Hit if done.source_bytes_read == 0 => format!("in {}, no tensor read", output::duration(total)),
        Outcome::Hit | Outcome::Pulled => format!("in {}", output::duration(total)),
        _ => output::count(document.shards.len(), "shard"),
    };
    output::line(format!(
        "{}  key {}…  content {}…  {tail}",
        style.bold(&format!("{:<6}", outcome_name(&built.outcome))),
        document.key.short(),
        document.content_digest.short(),
    ));
    if let Entry::Memory(_) = built.entry {
        output::line("nothing is kept: the result was in memory");
    }
}
