//! An entry as a checkpoint in a folder: `weightmill build --export`.

use std::path::Path;

use crate::error::{Error, Result};
use crate::execute::build::Entry;

/// Writes a result's shards and an index into a folder: a checkpoint.
pub(in crate::cli) fn export(entry: &Entry, folder: &Path) -> Result<()> {
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
            Entry::Memory(entry) => {
                std::fs::write(&temporary, entry.shards[shard].bytes.as_slice()).map_err(io(&temporary))?
            }
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
