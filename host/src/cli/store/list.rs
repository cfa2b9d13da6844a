//! `weightmill store ls`.

use std::process::ExitCode;

use super::built_by::{BuiltBy, Verdict};
use crate::cli::args::Global;
use crate::cli::{output, session};
use crate::error::Result;
use crate::store::engines;

const EXAMPLES: &str = "Examples:
  weightmill store ls
  weightmill store ls --json
  weightmill store ls --built-by 'wasmtime <48.0.9'
  weightmill store ls --built-by 'wasmi >=2.0.0, <2.0.2'

An entry was built by every engine that had a part in it: the one that ran its tiles, the one that
ran its plans, and those that made the blocks which it shares with earlier entries.";

/// Entries: size, what is shared, last use, model, tensor parallel rank
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Args {
    /// Only entries that this engine had a part in: its name and a range of versions
    /// (comparators joined by commas: <48.0.9, >=48.0.0, =48.0.8; none is any version)
    #[arg(long, value_name = "RANGE", value_parser = BuiltBy::parse)]
    built_by: Option<BuiltBy>,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let Some(store) = session::existing_store(global)? else {
        if global.json {
            output::json(&serde_json::json!({ "entries": [] }));
        } else {
            output::line("no store yet; `weightmill build` creates one");
        }
        return Ok(ExitCode::SUCCESS);
    };
    let mut rows = Vec::new();
    let mut documents = Vec::new();
    let mut unknown = Vec::new();
    for entry in store.entries()? {
        let builds = store.provenance(&entry.key)?;
        let engines = engines(&builds);
        match args.built_by.as_ref().map(|range| range.judge(&engines)) {
            None | Some(Verdict::Yes) => {}
            Some(Verdict::No) => continue,
            Some(Verdict::Unknown) => {
                unknown.push(entry.key);
                continue;
            }
        }
        let built_with: Vec<String> = engines.known.iter().map(|e| format!("{} {}", e.engine, e.version)).collect();
        let provenance = builds.into_iter().next().unwrap_or_default();
        let text = |field: &str| provenance[field].as_str().unwrap_or("").to_string();
        let number = |field: &str| provenance[field].as_u64().map_or_else(|| "?".into(), |n| n.to_string());
        let (content, tensors, blocks) = match &entry.document {
            Ok(d) => (d.content_digest.short(), d.tensors.len().to_string(), d.blocks.len().to_string()),
            Err(why) => (format!("broken: {why}"), String::new(), String::new()),
        };
        rows.push(vec![
            entry.key.short(),
            content,
            output::bytes(entry.size_bytes),
            output::bytes(entry.shared_bytes),
            tensors,
            blocks,
            format!("{}/{}", number("tp_rank"), number("tp_size")),
            text("recipe"),
            text("model"),
            ago(entry.last_used),
            built_with.join(", "),
        ]);
        documents.push(serde_json::json!({
            "key": entry.key,
            "content_digest": entry.document.as_ref().ok().map(|d| d.content_digest),
            "broken": entry.document.as_ref().err(),
            "bytes": entry.size_bytes,
            "shared_bytes": entry.shared_bytes,
            "tensors": entry.document.as_ref().map_or(0, |d| d.tensors.len()),
            "blocks": entry.document.as_ref().map_or(0, |d| d.blocks.len()),
            "last_used_unix_s": entry.last_used.duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            "engines": built_with,
            "engines_complete": engines.complete,
            "provenance": provenance,
        }));
    }
    if global.json {
        output::json(&serde_json::json!({ "entries": documents, "unknown": unknown }));
        return Ok(ExitCode::SUCCESS);
    }
    match (rows.is_empty(), &args.built_by) {
        (true, None) => output::line("no entries"),
        (true, Some(range)) => output::line(format!("no entry is known to be built by {range}")),
        (false, _) => {
            let header = [
                "key",
                "content",
                "size",
                "shared",
                "tensors",
                "blocks",
                "tp rank/size",
                "recipe",
                "model",
                "used",
                "built with",
            ];
            output::line(output::table(&header, &[2, 3, 4, 5], &rows));
        }
    }
    if !unknown.is_empty() {
        let keys: Vec<String> = unknown.iter().map(crate::digest::ActionKey::short).collect();
        output::line(format!(
            "of {} it is not known what built all of it: {}",
            output::count(unknown.len(), "entry").replace("entrys", "entries"),
            keys.join(", ")
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// How long ago, roughly.
fn ago(time: std::time::SystemTime) -> String {
    match time.elapsed().unwrap_or_default().as_secs() {
        s @ 0..=59 => format!("{s} s ago"),
        s @ 60..=3599 => format!("{} min ago", s / 60),
        s @ 3600..=86_399 => format!("{} h ago", s / 3600),
        s => format!("{} d ago", s / 86_400),
    }
}
