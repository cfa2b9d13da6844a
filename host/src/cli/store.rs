//! `weightmill store`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Subcommand;

use super::args::Global;
use super::output;
use super::session;
use crate::error::{Code, Error, Result};
use crate::execute::build::Entry;
use crate::progress::Silent;
use crate::store::Verify;

/// The store.
#[derive(Subcommand)]
pub(super) enum StoreCommand {
    /// Entries: size, model, tensor parallel rank
    Ls,
    /// An entry: blocks, shards, tensors, who built it
    #[command(after_help = "Examples:\n  weightmill store show 9f3c1d2a\n  weightmill store show 9f3c1d2a --json")]
    Show {
        /// The key, or the beginning of it
        key: String,
    },
    /// The store's folder, or an entry's shards
    Path {
        /// The key, or the beginning of it
        key: Option<String>,
    },
}

pub(super) fn run(global: &Global, command: &StoreCommand) -> Result<ExitCode> {
    match command {
        StoreCommand::Ls => list(global),
        StoreCommand::Show { key } => show(global, key),
        StoreCommand::Path { key } => path(global, key.as_deref()),
    }
}

fn list(global: &Global) -> Result<ExitCode> {
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
        let header = ["key", "content", "size", "shared", "tensors", "blocks", "tp rank/size", "recipe", "model", "used"];
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

fn show(global: &Global, text: &str) -> Result<ExitCode> {
    let store = session::wanted_store(global)?;
    let key = session::find_key(&store, text)?;
    let lease = store.lease(&key, Verify::Never, &session::pool(None)?, &Silent)?;
    let lease = lease.ok_or_else(|| missing(text))?;
    let document = lease.document();
    let provenance = store.provenance(&key)?;
    if global.json {
        let paths: Vec<_> = (0..lease.shards()).map(|s| lease.shard_path(s).to_string_lossy().into_owned()).collect();
        output::json(&serde_json::json!({ "entry": document, "paths": paths, "provenance": provenance }));
        return Ok(ExitCode::SUCCESS);
    }
    output::line(format!("key      {key}\ncontent  {}\ndocument {}", document.content_digest, lease.document_digest()));
    for built in &provenance {
        let field = |name: &str| built[name].as_str().unwrap_or("?").to_string();
        output::line(format!("built    by {} with {} {} on {}", field("program"), field("engine"), field("engine_version"), field("host")));
    }
    let rows: Vec<Vec<String>> = document.blocks.iter().flat_map(|b| b.shards.iter().map(move |s| (b, *s as usize))).map(|(block, s)| {
        let shard = &document.shards[s];
        let tensors = document.tensors.iter().filter(|t| t.shard as usize == s).count();
        vec![block.name.clone(), tensors.to_string(), output::bytes(shard.size), shard.digest.to_string()]
    }).collect();
    output::line(output::table(&["block", "tensors", "size", "shard"], &[1, 2], &rows));
    let rows: Vec<Vec<String>> = document.tensors.iter().map(|t| {
        vec![t.name.to_string(), format!("{} {:?}", t.dtype, t.shape), t.digest.short()]
    }).collect();
    output::line("");
    output::line(output::table(&["tensor", "type", "digest"], &[], &rows));
    for alias in &document.aliases {
        output::line(format!("{} is {}", alias.name, alias.of));
    }
    Ok(ExitCode::SUCCESS)
}

fn missing(text: &str) -> Error {
    Error::new(Code::SourceUnavailable, format!("the store has no entry {text}")).hint("`weightmill store ls` lists the keys")
}

fn path(global: &Global, key: Option<&str>) -> Result<ExitCode> {
    let store = session::wanted_store(global)?;
    let paths: Vec<PathBuf> = match key {
        None => vec![store.root().to_path_buf()],
        Some(text) => {
            let key = session::find_key(&store, text)?;
            let lease = store.lease(&key, Verify::Never, &session::pool(None)?, &Silent)?.ok_or_else(|| missing(text))?;
            (0..lease.shards()).map(|s| lease.shard_path(s).to_path_buf()).collect()
        }
    };
    if global.json {
        let paths: Vec<_> = paths.iter().map(|p| p.to_string_lossy()).collect();
        output::json(&serde_json::json!({ "paths": paths }));
    } else {
        paths.iter().for_each(|p| output::line(p.display()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes a result's shards and an index into a folder: a checkpoint.
pub(super) fn export(entry: &Entry, folder: &Path) -> Result<()> {
    let io = |what: &Path| {
        let what = what.display().to_string();
        move |e: std::io::Error| Error::io(format!("writing {what}"), e)
    };
    std::fs::create_dir_all(folder).map_err(io(folder))?;
    let document = entry.document();
    let count = document.shards.len();
    let name = |shard: usize| format!("model-{:05}-of-{count:05}.safetensors", shard + 1);
    for shard in 0..count {
        let path = folder.join(name(shard));
        let temporary = folder.join(format!(".{}.partial", name(shard)));
        match entry {
            Entry::Stored(lease) => {
                std::fs::copy(lease.shard_path(shard), &temporary).map_err(io(&temporary))?;
                make_writable(&temporary).map_err(io(&temporary))?;
            }
            Entry::Memory(entry) => std::fs::write(&temporary, &entry.shards[shard].bytes).map_err(io(&temporary))?,
        }
        std::fs::rename(&temporary, &path).map_err(io(&path))?;
    }
    let map: serde_json::Map<String, serde_json::Value> =
        document.tensors.iter().map(|t| (t.name.to_string(), name(t.shard as usize).into())).collect();
    let total: u64 = document.shards.iter().map(|s| s.size).sum();
    let index = serde_json::json!({ "metadata": { "total_size": total }, "weight_map": map });
    let path = folder.join("model.safetensors.index.json");
    let temporary = folder.join(".model.safetensors.index.json.partial");
    std::fs::write(&temporary, format!("{index:#}\n")).map_err(io(&temporary))?;
    std::fs::rename(&temporary, &path).map_err(io(&path))
}

/// Copies take the blobs' read-only mode along.
fn make_writable(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644))
}
