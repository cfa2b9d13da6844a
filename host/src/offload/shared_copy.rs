//! Rung B: a copy of a file in tmpfs that all processes of a node share.
//!
//! Devices that cannot register read-only memory can register writable shared
//! memory, but a writable shared mapping of a file on disk is refused by the
//! driver. A copy in tmpfs is made once per node and file; its name says which
//! file, by device, inode, size and times, so that a changed file gets a new
//! copy. It appears under its name only when it is complete.

use std::fs::{File, Permissions};
use std::io::Write;
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
    let target = root.join(RecordDigest::of(identity.as_bytes()).to_string());
    if let Some(copy) = open_copy(&target, stat.len()) {
        return FileMap::writable(Arc::new(copy), target);
    }
    // One process copies, the others wait for it.
    let _copying = NodeLock { path: root.join("lock"), timeout: COPY_TIMEOUT }.take("copying into tmpfs")?;
    if let Some(copy) = open_copy(&target, stat.len()) {
        return FileMap::writable(Arc::new(copy), target);
    }
    let temporary = root.join(format!("tmp.{}", std::process::id()));
    let made = copy_bytes(file, stat.len(), &temporary).and_then(|()| std::fs::rename(&temporary, &target));
    if let Err(e) = made {
        std::fs::remove_file(&temporary).ok();
        return Err(match e.kind() {
            std::io::ErrorKind::StorageFull => Error::new(
                Code::InsufficientMemory,
                format!("{} has no room for a copy of {} bytes", root.display(), stat.len()),
            ),
            _ => failed(&target)(e),
        });
    }
    let copy = open_copy(&target, stat.len())
        .ok_or_else(|| Error::io(format_args!("opening {}", target.display()), "it is not the copy just made"))?;
    FileMap::writable(Arc::new(copy), target)
}

/// An existing copy: a regular file of ours, of the right size.
fn open_copy(path: &Path, len: u64) -> Option<File> {
    let file = File::options().read(true).write(true).open(path).ok()?;
    let stat = file.metadata().ok()?;
    let ours = stat.is_file() && stat.uid() == rustix::process::geteuid().as_raw() && stat.mode() & 0o022 == 0;
    (ours && stat.len() == len).then_some(file)
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
