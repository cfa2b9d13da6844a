//! The folder of a store's node-shared copies in tmpfs, which `load` fills and
//! `store gc` sweeps.

use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::io::{ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::digest::RecordDigest;
use crate::error::{Error, Result};
use crate::offload::{Swept, sweep_shared_copies};

/// What the names of records of such folders begin with, in a store's `state/`.
const RECORD: &str = "tmpfs.";

/// Where copies of the blobs of the store at `root` go in the tmpfs folder
/// `dir`: a folder of this store, which is recorded in it for `gc`.
pub(super) fn folder_in(root: &Path, dir: &Path) -> Result<PathBuf> {
    let failed = |what: &Path, e| Error::io(format_args!("recording {}", what.display()), e);
    let root = root.canonicalize().map_err(|e| failed(root, e))?;
    let dir = std::path::absolute(dir).map_err(|e| failed(dir, e))?;
    let short = |path: &Path| RecordDigest::of(path.as_os_str().as_bytes()).to_string()[..16].to_string();
    let folder = dir.join(format!("weightmill-{}", short(&root)));
    let state = root.join("state");
    let record = state.join(format!("{RECORD}{}", short(&folder)));
    if fs::read(&record).ok().as_deref() != Some(folder.as_os_str().as_bytes()) {
        let temporary = state.join(format!(".{RECORD}{}", std::process::id()));
        let write = || {
            fs::File::create(&temporary)?.write_all(folder.as_os_str().as_bytes())?;
            fs::rename(&temporary, &record)
        };
        write().map_err(|e| failed(&record, e))?;
    }
    Ok(folder)
}

/// Removes the copies of blobs that the store at `root` no longer has and that
/// no process uses.
pub(super) fn sweep(root: &Path, dry_run: bool) -> Result<Swept> {
    let state = root.join("state");
    let io = |e| Error::io(format_args!("reading {}", state.display()), e);
    let mut folders = Vec::new();
    for item in fs::read_dir(&state).map_err(io)? {
        let item = item.map_err(io)?;
        if item.file_name().as_bytes().starts_with(RECORD.as_bytes()) {
            folders.push(PathBuf::from(OsStr::from_bytes(&fs::read(item.path()).map_err(io)?)));
        }
    }
    if folders.is_empty() {
        return Ok(Swept::default());
    }
    let blobs = blobs(&root.join("blobs/sha256"))?;
    folders.iter().try_fold(Swept::default(), |sum, folder| {
        let swept = sweep_shared_copies(folder, &blobs, dry_run)?;
        Ok(Swept { copies: sum.copies + swept.copies, bytes: sum.bytes + swept.bytes })
    })
}

fn blobs(folder: &Path) -> Result<Vec<Metadata>> {
    let io = |e| Error::io(format_args!("reading {}", folder.display()), e);
    let mut all = Vec::new();
    for item in fs::read_dir(folder).map_err(io)? {
        match item.map_err(io)?.metadata() {
            Ok(metadata) => all.push(metadata),
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(io(e)),
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offload::{BlockSpec, Content, HostDevice, Rung, Segment, StreamOptions, Streamer};
    use std::sync::Arc;

    #[test]
    fn a_store_finds_its_copies_again_and_keeps_those_of_its_blobs() {
        let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return };
        let root = tempfile::tempdir().unwrap();
        for folder in ["state", "blobs/sha256"] {
            fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        assert_eq!(sweep(root.path(), false).unwrap(), Swept::default());
        let folder = folder_in(root.path(), dir.path()).unwrap();
        assert_eq!(folder_in(root.path(), dir.path()).unwrap(), folder);
        assert!(folder.starts_with(dir.path()));
        let other = tempfile::tempdir().unwrap();
        fs::create_dir_all(other.path().join("state")).unwrap();
        assert_ne!(folder_in(other.path(), dir.path()).unwrap(), folder);

        // Two copies, made as streaming makes them.
        let blob = |name: &str| root.path().join("blobs/sha256").join(name);
        for name in ["a", "b"] {
            fs::write(blob(name), vec![7; 100_000]).unwrap();
            let file = Arc::new(fs::File::open(blob(name)).unwrap());
            let content = Content::File { file, path: blob(name), offset: 0 };
            let block =
                BlockSpec { name: name.into(), segments: vec![Segment { content, len: 100_000 }], tensors: Vec::new() };
            let options =
                StreamOptions { only: Some(Rung::B), tmpfs_root: Some(folder.clone()), ..StreamOptions::default() };
            let mut streamer = Streamer::open(Arc::new(HostDevice::default()), vec![block], options).unwrap();
            streamer.pass(|_| Ok(())).unwrap();
            assert_eq!(sweep(root.path(), false).unwrap(), Swept::default(), "it is in use, and its blob is there");
            streamer.close().unwrap();
        }
        assert_eq!(sweep(root.path(), false).unwrap(), Swept::default());
        fs::remove_file(blob("a")).unwrap();
        assert_eq!(sweep(root.path(), true).unwrap(), Swept { copies: 1, bytes: 100_000 });
        assert_eq!(sweep(root.path(), false).unwrap(), Swept { copies: 1, bytes: 100_000 });
        assert_eq!(sweep(root.path(), false).unwrap(), Swept::default());
    }
}
