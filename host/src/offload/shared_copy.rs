//! Rung B: a copy of a file in tmpfs that all processes of a node share.
//!
//! Devices that cannot register read-only memory can register writable shared
//! memory, but a writable shared mapping of a file on disk is refused by the
//! driver. A copy in tmpfs is made once per node and file; its name says which
//! file, by device, inode, size and times, so that a changed file gets a new
//! copy. It appears under its name only when it is complete.
//!
//! Copies take memory, so they are not kept for ever. A process holds a shared
//! lock on each copy that it has mapped; [`sweep_shared_copies`] removes those
//! that nobody holds and whose file is gone, and one that finds no room for a
//! new copy first removes all that nobody holds.

use std::collections::BTreeSet;
use std::fs::{File, Metadata, Permissions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::digest::RecordDigest;
use crate::error::{Code, Error, Result};
use crate::mapping::FileMap;

use super::node_lock::NodeLock;

/// `f_type` of tmpfs.
const TMPFS_MAGIC: u64 = 0x0102_1994;
const BUFFER_BYTES: usize = 4 << 20;
/// The lock of a folder of copies.
const LOCK: &str = "lock";
/// What names of unfinished copies begin with.
const TEMPORARY: &str = "tmp.";
/// How long another process may take to make its copies.
const COPY_TIMEOUT: Duration = Duration::from_secs(600);

/// The shared copy of `file` under `root`, made if it is not there, mapped
/// writable. A file that is in tmpfs itself and that this process may write to
/// is mapped as it is.
///
/// # Errors
/// `unsupported_filesystem` if `root` is not tmpfs; `insufficient_memory` if
/// the copy does not fit; `lock_timeout`; `io_error`.
pub(super) fn map_shared_copy(root: &Path, file: &File, path: &Path) -> Result<FileMap> {
    let failed = |what: &Path| {
        let what = what.display().to_string();
        move |e: std::io::Error| Error::io(format_args!("copying into {what}"), e)
    };
    if is_tmpfs(file)
        && let Ok(own) = File::options().read(true).write(true).open(path)
        && same_file(&own, file)
    {
        return FileMap::writable(Arc::new(own), path);
    }
    std::fs::create_dir_all(root).map_err(failed(root))?;
    if !is_tmpfs(&File::open(root).map_err(failed(root))?) {
        return Err(Error::new(Code::UnsupportedFilesystem, format!("{} is not in tmpfs", root.display()))
            .hint("give a folder under /dev/shm"));
    }
    let stat = file.metadata().map_err(failed(path))?;
    let target = root.join(copy_name(&stat));
    if let Some(copy) = open_copy(&target, stat.len()) {
        return FileMap::writable(Arc::new(copy), target);
    }
    // One process copies, the others wait for it.
    let _copying = NodeLock { path: root.join(LOCK), timeout: COPY_TIMEOUT }.take("copying into tmpfs")?;
    if let Some(copy) = open_copy(&target, stat.len()) {
        return FileMap::writable(Arc::new(copy), target);
    }
    let temporary = root.join(format!("{TEMPORARY}{}", std::process::id()));
    let make = || copy_bytes(file, stat.len(), &temporary).and_then(|()| std::fs::rename(&temporary, &target));
    let no_room = |e: &std::io::Error| e.kind() == ErrorKind::StorageFull;
    let mut made = make();
    if made.as_ref().is_err_and(no_room) {
        std::fs::remove_file(&temporary).ok();
        sweep(root, &BTreeSet::new(), false).map_err(failed(root))?;
        made = make();
    }
    if let Err(e) = made {
        std::fs::remove_file(&temporary).ok();
        return Err(match no_room(&e) {
            true => Error::new(
                Code::InsufficientMemory,
                format!("{} has no room for a copy of {} bytes", root.display(), stat.len()),
            )
            .hint("other processes use the copies that are there; end some, or make the tmpfs larger"),
            false => failed(&target)(e),
        });
    }
    let copy = open_copy(&target, stat.len())
        .ok_or_else(|| Error::io(format_args!("opening {}", target.display()), "it is not the copy just made"))?;
    FileMap::writable(Arc::new(copy), target)
}

/// The name of the copy of a file.
fn copy_name(stat: &Metadata) -> String {
    let identity = format!(
        "{} {} {} {}.{} {}.{}",
        stat.dev(),
        stat.ino(),
        stat.len(),
        stat.mtime(),
        stat.mtime_nsec(),
        stat.ctime(),
        stat.ctime_nsec()
    );
    RecordDigest::of(identity.as_bytes()).to_string()
}

/// An existing copy: a regular file of ours, of the right size. The lock that
/// keeps it from being swept goes with the descriptor.
fn open_copy(path: &Path, len: u64) -> Option<File> {
    let file = File::options().read(true).write(true).open(path).ok()?;
    let stat = file.metadata().ok()?;
    let ours = stat.is_file() && stat.uid() == rustix::process::geteuid().as_raw() && stat.mode() & 0o022 == 0;
    if !ours || stat.len() != len {
        return None;
    }
    file.try_lock_shared().ok()?;
    // A sweep may have removed it between opening and locking.
    let still = File::open(path).ok()?;
    same_file(&still, &file).then_some(file)
}

/// What a sweep removed, or would remove.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Copies.
    pub copies: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Removes the copies under `root` that no process has mapped, unless they are
/// of one of `files`, and what a dead process left half made. A `root` that is
/// not there has none.
///
/// # Errors
/// `io_error`.
pub fn sweep_shared_copies<'a>(
    root: &Path,
    files: impl IntoIterator<Item = &'a Metadata>,
    dry_run: bool,
) -> Result<Swept> {
    let keep = files.into_iter().map(copy_name).collect();
    let failed = |e| Error::io(format_args!("looking for copies in {}", root.display()), e);
    // Whoever copies holds this lock, and has its temporary file there.
    let lock = match File::options().append(true).open(root.join(LOCK)) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Swept::default()),
        lock => lock.map_err(failed)?,
    };
    if lock.try_lock().is_err() {
        return Ok(Swept::default());
    }
    sweep(root, &keep, dry_run).map_err(failed)
}

/// As above; the lock of `root` is held.
fn sweep(root: &Path, keep: &BTreeSet<String>, dry_run: bool) -> std::io::Result<Swept> {
    let mut swept = Swept::default();
    for item in std::fs::read_dir(root)? {
        let item = item?;
        let name = item.file_name().to_string_lossy().into_owned();
        let copy = name.len() == 64 && name.bytes().all(|b| b.is_ascii_hexdigit());
        if (!copy && !name.starts_with(TEMPORARY)) || keep.contains(&name) {
            continue;
        }
        let Ok(file) = File::open(item.path()) else { continue };
        // Held until the name is gone: one who opened it before looks again.
        if file.try_lock().is_err() {
            continue;
        }
        swept.copies += 1;
        swept.bytes += file.metadata()?.len();
        if !dry_run {
            std::fs::remove_file(item.path())?;
        }
    }
    Ok(swept)
}

fn copy_bytes(from: &File, len: u64, path: &Path) -> std::io::Result<()> {
    let mut to = File::options().create(true).truncate(true).write(true).open(path)?;
    to.set_permissions(Permissions::from_mode(0o600))?;
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut at = 0;
    while at < len {
        let take = BUFFER_BYTES.min(usize::try_from(len - at).unwrap_or(BUFFER_BYTES));
        from.read_exact_at(&mut buffer[..take], at)?;
        to.write_all(&buffer[..take])?;
        at += take as u64;
    }
    Ok(())
}

fn is_tmpfs(file: &File) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|s| s.f_type as u64 == TMPFS_MAGIC)
}

fn same_file(a: &File, b: &File) -> bool {
    match (a.metadata(), b.metadata()) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_share_one_copy_and_a_changed_file_gets_another() {
        let Ok(root) = tempfile::tempdir_in("/dev/shm") else { return };
        let source = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(source.path(), vec![3; 10_000]).unwrap();
        let map = |f: &File| map_shared_copy(root.path(), f, source.path());
        let file = File::open(source.path()).unwrap();
        let (first, second) = (map(&file).unwrap(), map(&file).unwrap());
        if is_tmpfs(&file) {
            return;
        }
        assert!(same_file(first.file(), second.file()) && !same_file(first.file(), &file));
        assert!(first.is_writable());
        let mut copied = vec![0; 10_000];
        first.file().read_exact_at(&mut copied, 0).unwrap();
        assert_eq!(copied, vec![3; 10_000]);
        std::fs::write(source.path(), vec![4; 10_001]).unwrap();
        assert!(!same_file(map(&file).unwrap().file(), first.file()));
    }

    #[test]
    fn a_copy_goes_when_nobody_has_it_and_its_file_is_gone() {
        let Ok(root) = tempfile::tempdir_in("/dev/shm") else { return };
        let sources: Vec<_> = (0..3).map(|_| tempfile::NamedTempFile::new().unwrap()).collect();
        sources.iter().for_each(|s| std::fs::write(s.path(), [9; 5000]).unwrap());
        let files: Vec<File> = sources.iter().map(|s| File::open(s.path()).unwrap()).collect();
        if is_tmpfs(&files[0]) {
            return;
        }
        let map = |i: usize| map_shared_copy(root.path(), &files[i], sources[i].path()).unwrap();
        let held = map(0);
        drop((map(1), map(2)));
        std::fs::write(root.path().join("tmp.1"), [0; 10]).unwrap();
        std::fs::write(root.path().join("somebody-elses"), [0; 10]).unwrap();
        let wanted = files[1].metadata().unwrap();
        let sweep = |dry_run| sweep_shared_copies(root.path(), [&wanted], dry_run).unwrap();
        assert_eq!(sweep(true), Swept { copies: 2, bytes: 5010 });
        assert_eq!(sweep(false), Swept { copies: 2, bytes: 5010 });
        assert_eq!(sweep(false), Swept::default());
        let there = |i: usize| root.path().join(copy_name(&files[i].metadata().unwrap())).exists();
        assert_eq!((there(0), there(1), there(2)), (true, true, false));
        assert!(root.path().join("somebody-elses").exists());
        drop(held);
        assert_eq!(sweep(false), Swept { copies: 1, bytes: 5000 });
        assert_eq!(sweep_shared_copies(&root.path().join("absent"), [], false).unwrap(), Swept::default());
    }

    #[test]
    fn a_root_on_disk_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let source = tempfile::NamedTempFile::new().unwrap();
        if is_tmpfs(source.as_file()) {
            return;
        }
        let error = map_shared_copy(root.path(), source.as_file(), source.path()).unwrap_err();
        assert_eq!(error.code(), Code::UnsupportedFilesystem);
    }
}
