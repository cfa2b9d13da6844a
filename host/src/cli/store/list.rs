//! `weightmill store ls`.

use std::process::ExitCode;

use crate::cli::args::Global;
use crate::cli::{output, session};
use crate::error::Result;

pub(super) fn run(global: &Global) -> Result<ExitCode> {
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
    for entry in store.entries()? {
        let provenance = store.provenance(&entry.key)?.into_iter().next().unwrap_or_default();
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
            "provenance": provenance,
        }));
    }
    if global.json {
        output::json(&serde_json::json!({ "entries": documents }));
    } else if rows.is_empty() {
        output::line("no entries");
    } else {
        let header =
            ["key", "content", "size", "shared", "tensors", "blocks", "tp rank/size", "recipe", "model", "used"];
        output::line(output::table(&header, &[2, 3, 4, 5], &rows));
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
