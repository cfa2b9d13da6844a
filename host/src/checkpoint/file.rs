//! Source files: what makes one the same file, and reading it.
//!
//! A [`FileIdentity`] stands for a file's content: whatever was learnt about
//! the content holds as long as the identity does. That needs care, because
//! the kernel's timestamps are coarse: a write that follows another within the
//! same tick leaves no trace. So a file whose timestamps are younger than
//! [`TICK`] is not looked at yet. Once it has settled, the identity is taken,
//! and only then anything is read: every later write gets a later timestamp,
//! and [`SourceFile::check_unchanged`] sees it.
//!
//! What no timestamp shows (a raw write to the disk below, a writer that maps
//! the file and whose pages were dirty before) is not seen here either; reading
//! and hashing the file without a digest cache is the remedy.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::error::{Code, Error, Result};

/// Several ticks of the kernel's coarse clock (at most 10 ms each).
const TICK: Duration = Duration::from_millis(50);
/// The tick of filesystems that keep no nanoseconds; FAT keeps even seconds.
const COARSE_TICK: Duration = Duration::from_secs(2);
/// How often a file may change while it is waited for.
const SETTLE_TRIES: u32 = 10;

/// What makes a file the same file with the same content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileIdentity {
    /// The device that holds it.
    pub device: u64,
    /// Its number there.
    pub inode: u64,
    /// Its size.
    pub size_bytes: u64,
    /// Time of the last change of content, in seconds and nanoseconds.
    pub modified: (i64, u32),
    /// Time of the last change of content or attributes.
    pub changed: (i64, u32),
}

impl FileIdentity {
    fn of(metadata: &Metadata) -> Self {
        // Nanoseconds are below 10^9 on every filesystem; a wild value saturates.
        let nanos = |n: i64| u32::try_from(n).unwrap_or(u32::MAX);
        FileIdentity {
            device: metadata.dev(),
            inode: metadata.ino(),
            size_bytes: metadata.size(),
            modified: (metadata.mtime(), nanos(metadata.mtime_nsec())),
            changed: (metadata.ctime(), nanos(metadata.ctime_nsec())),
        }
    }

    /// How long until a change would be seen, if the clock says `now`: `None`
    /// if a timestamp is in the future, so that there is no telling.
    fn unsettled_for(&self, now: SystemTime) -> Option<Duration> {
        let now = now.duration_since(SystemTime::UNIX_EPOCH).ok()?;
        let tick = if self.changed.1 == 0 { COARSE_TICK } else { TICK };
        let mut wait = Duration::ZERO;
        for (seconds, nanos) in [self.modified, self.changed] {
            // Before 1970: long settled.
            let Ok(seconds) = u64::try_from(seconds) else { continue };
            let age = now.checked_sub(Duration::from_secs(seconds).checked_add(Duration::from_nanos(nanos.into()))?)?;
            wait = wait.max(tick.saturating_sub(age));
        }
        Some(wait)
    }

    /// What is different about `later`, for a message.
    fn difference(&self, later: &FileIdentity) -> Option<String> {
        if self == later {
            return None;
        }
        let (was, is) = (self.size_bytes, later.size_bytes);
        Some(if (self.device, self.inode) != (later.device, later.inode) {
            "was replaced by another file".into()
        } else if is < was {
            format!("shrank from {was} to {is} bytes")
        } else if is > was {
            format!("grew from {was} to {is} bytes")
        } else {
            "was written to, or its attributes were changed".into()
        })
    }
}

/// An open file of a checkpoint.
#[derive(Debug)]
pub struct SourceFile {
    path: PathBuf,
    file: File,
    identity: FileIdentity,
    settled: bool,
}

impl SourceFile {
    /// Opens a regular file without ever blocking on something else, and takes
    /// its identity once it has settled.
    pub(super) fn open(path: PathBuf) -> Result<Self> {
        let file = open_regular(&path)?;
        let (identity, settled) = settle(&path, &file)?;
        Ok(SourceFile { path, file, identity, settled })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it was when it was opened.
    pub fn identity(&self) -> &FileIdentity {
        &self.identity
    }

    /// Whether its identity stands for its content. Not so for a file with
    /// timestamps in the future: nothing about it may be remembered.
    pub fn is_cacheable(&self) -> bool {
        self.settled
    }

    /// Fills `buf` with the bytes from `offset` on.
    ///
    /// # Errors
    /// `source_changed` if the file ends before that; `io_error`.
    pub fn read_exact_at(&self, mut buf: &mut [u8], mut offset: u64) -> Result<()> {
        while !buf.is_empty() {
            match self.file.read_at(buf, offset) {
                Ok(0) => return Err(self.changed(format_args!("ends at or before byte {offset}"))),
                Ok(n) => {
                    buf = &mut buf[n..];
                    offset = offset.saturating_add(n as u64);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if errno(&e) == Some(Errno::STALE) => return Err(self.changed("was removed on its server")),
                Err(e) => return Err(Error::io(format_args!("cannot read {:?} at byte {offset}", self.path), e)),
            }
        }
        Ok(())
    }

    /// Looks whether the open file, and the file that its path names now, are
    /// still what was opened.
    ///
    /// # Errors
    /// `source_changed` if it was replaced, grew, shrank or was touched;
    /// `io_error`.
    pub fn check_unchanged(&self) -> Result<()> {
        let named = match std::fs::metadata(&self.path) {
            Ok(metadata) => FileIdentity::of(&metadata),
            Err(e) if matches!(errno(&e), Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::STALE)) => {
                return Err(self.changed("was removed"));
            }
            Err(e) => return Err(Error::io(format_args!("cannot look at {:?}", self.path), e)),
        };
        let open = self.file.metadata().map_err(|e| Error::io(format_args!("cannot look at {:?}", self.path), e))?;
        for found in [named, FileIdentity::of(&open)] {
            if let Some(difference) = self.identity.difference(&found) {
                return Err(self.changed(difference));
            }
        }
        Ok(())
    }

    fn changed(&self, how: impl std::fmt::Display) -> Error {
        changed(&self.path, how)
    }
}

fn changed(path: &Path, how: impl std::fmt::Display) -> Error {
    Error::new(Code::SourceChanged, format!("the file {path:?} changed while it was used: it {how}"))
        .hint("wait until whatever writes it has finished, then start again")
}

/// Waits until a change of the file would be seen, and takes its identity.
/// The second value says whether that is known to be so.
fn settle(path: &Path, file: &File) -> Result<(FileIdentity, bool)> {
    for _ in 0..SETTLE_TRIES {
        let metadata = file.metadata().map_err(|e| Error::io(format_args!("cannot look at {path:?}"), e))?;
        let identity = FileIdentity::of(&metadata);
        match identity.unsettled_for(SystemTime::now()) {
            Some(Duration::ZERO) => return Ok((identity, true)),
            Some(wait) => std::thread::sleep(wait),
            None => return Ok((identity, false)),
        }
    }
    Err(changed(path, "is being written to"))
}

/// Reads the whole of a small file: `None` if there is none of that name.
///
/// # Errors
/// `checkpoint_invalid` if it is not a regular file or has more than
/// `limit_bytes`; `io_error`.
pub(super) fn read_small(path: &Path, limit_bytes: u64) -> Result<Option<Vec<u8>>> {
    use io::Read as _;
    if matches!(std::fs::symlink_metadata(path), Err(e) if errno(&e) == Some(Errno::NOENT)) {
        return Ok(None);
    }
    let file = open_regular(path)?;
    let mut bytes = Vec::new();
    file.take(limit_bytes + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| Error::io(format_args!("cannot read {path:?}"), e))?;
    if bytes.len() as u64 > limit_bytes {
        return Err(Error::new(Code::CheckpointInvalid, format!("{path:?} has more than {limit_bytes} bytes"))
            .hint("it is not what its name says"));
    }
    Ok(Some(bytes))
}

/// Opens a regular file for reading.
///
/// It is looked at first, since opening a device can do something, and again
/// once it is open, since it may be another one by then. `O_NONBLOCK` keeps a
/// FIFO that got there in between from blocking; reads of regular files do not
/// care.
fn open_regular(path: &Path) -> Result<File> {
    let refuse_others = |metadata: io::Result<Metadata>| {
        let kind = metadata.map_err(|e| cannot_open(path, e))?.file_type();
        if kind.is_file() {
            return Ok(());
        }
        let found = match () {
            () if kind.is_dir() => "a directory",
            () if kind.is_fifo() => "a FIFO",
            () if kind.is_socket() => "a socket",
            () if kind.is_char_device() || kind.is_block_device() => "a device",
            () => "something else",
        };
        Err(Error::new(Code::CheckpointInvalid, format!("{path:?} is {found}, expected a regular file")))
    };
    refuse_others(std::fs::metadata(path))?;
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC).bits() as i32;
    let file =
        std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|e| cannot_open(path, e))?;
    refuse_others(file.metadata())?;
    Ok(file)
}

/// Why something cannot be opened: a path that leads nowhere is the
/// checkpoint's fault, the rest is the machine's.
pub(super) fn cannot_open(path: &Path, cause: io::Error) -> Error {
    let invalid = |what: &str| Error::new(Code::CheckpointInvalid, format!("{path:?} {what}"));
    match errno(&cause) {
        Some(Errno::NOENT) if std::fs::symlink_metadata(path).is_ok() => {
            invalid("is a symbolic link to something that is not there").hint("fetch the checkpoint again")
        }
        Some(Errno::NOENT) => invalid("does not exist"),
        Some(Errno::NOTDIR) => invalid("leads through something that is not a directory"),
        Some(Errno::LOOP) => invalid("is a loop of symbolic links"),
        Some(Errno::NAMETOOLONG) => invalid("is too long for a file name"),
        None if cause.kind() == io::ErrorKind::InvalidInput => invalid("is not a file name: it holds a NUL"),
        Some(Errno::MFILE | Errno::NFILE) => Error::io(format_args!("cannot open {path:?}"), cause)
            .hint("raise the limit of open files (ulimit -n) above the checkpoint's number of files"),
        _ => Error::io(format_args!("cannot open {path:?}"), cause),
    }
}

fn errno(error: &io::Error) -> Option<Errno> {
    Errno::from_io_error(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(modified: (i64, u32), changed: (i64, u32)) -> FileIdentity {
        FileIdentity { device: 1, inode: 2, size_bytes: 3, modified, changed }
    }

    #[test]
    fn young_timestamps_are_waited_for_and_future_ones_are_not() {
        let now = SystemTime::UNIX_EPOCH + Duration::new(1_000, 500_000_000);
        let wait = |modified, changed| identity(modified, changed).unsettled_for(now);
        let old = (900, 1);
        assert_eq!(wait(old, old), Some(Duration::ZERO));
        assert_eq!(wait(old, (1_000, 450_000_000)), Some(Duration::ZERO));
        assert_eq!(wait(old, (1_000, 490_000_000)), Some(Duration::from_millis(40)));
        assert_eq!(wait((1_000, 480_000_000), old), Some(Duration::from_millis(30)));
        assert_eq!(wait((1_000, 500_000_001), old), None);
        assert_eq!(wait(old, (i64::MAX, u32::MAX)), None);
        assert_eq!(wait((-5, 1), (i64::MIN, 1)), Some(Duration::ZERO));
        // Whole seconds: the filesystem may keep no more than that.
        assert_eq!(wait(old, (1_000, 0)), Some(Duration::from_millis(1_500)));
        assert_eq!(wait(old, (998, 0)), Some(Duration::ZERO));
    }

    #[test]
    fn an_identity_survives_json() {
        let identity = identity((-1, 999_999_999), (i64::MAX, 0));
        let text = serde_json::to_string(&identity).unwrap();
        assert_eq!(serde_json::from_str::<FileIdentity>(&text).unwrap(), identity);
    }
}
