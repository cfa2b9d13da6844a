//! `weightmill store show` and `store path`.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::cli::args::Global;
use crate::cli::{output, session};
use crate::digest::ActionKey;
use crate::error::Result;
use crate::progress::Silent;
use crate::store::{Lease, Store, Verify};

pub(super) fn show(global: &Global, text: &str) -> Result<ExitCode> {
    let store = session::wanted_store(global)?;
    let key = session::find_key(&store, text)?;
    let lease = lease(&store, &key)?;
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
        if built["pulled_from"].is_string() {
            output::line(format!("pulled   from {} ({}) on {}", field("pulled_from"), field("trusted"), field("host")));
            continue;
        }
        output::line(format!(
            "built    by {} with {} {} on {}",
            field("program"),
            field("engine"),
            field("engine_version"),
            field("host")
        ));
    }
    let rows: Vec<Vec<String>> = document
        .blocks
        .iter()
        .flat_map(|b| b.shards.iter().map(move |s| (b, *s as usize)))
        .map(|(block, s)| {
            let shard = &document.shards[s];
            let tensors = document.tensors.iter().filter(|t| t.shard as usize == s).count();
            vec![block.name.clone(), tensors.to_string(), output::bytes(shard.size), shard.digest.to_string()]
        })
        .collect();
    output::line(output::table(&["block", "tensors", "size", "shard"], &[1, 2], &rows));
    let rows: Vec<Vec<String>> = document
        .tensors
        .iter()
        .map(|t| vec![t.name.to_string(), format!("{} {:?}", t.dtype, t.shape), t.digest.short()])
        .collect();
    output::line("");
    output::line(output::table(&["tensor", "type", "digest"], &[], &rows));
    for alias in &document.aliases {
        output::line(format!("{} is {}", alias.name, alias.of));
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn path(global: &Global, key: Option<&str>) -> Result<ExitCode> {
    let store = session::wanted_store(global)?;
    let paths: Vec<PathBuf> = match key {
        None => vec![store.root().to_path_buf()],
        Some(text) => {
            let key = session::find_key(&store, text)?;
            let lease = lease(&store, &key)?;
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

fn lease(store: &Store, key: &ActionKey) -> Result<Lease> {
    let lease = store.lease(key, Verify::Never, &session::pool(None)?, &Silent)?;
    lease.ok_or_else(|| super::missing(key))
}
