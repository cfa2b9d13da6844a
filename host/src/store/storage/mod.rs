//! The file operations that the store uses, behind a trait.
//!
//! The store talks to the operating system through [`Storage`] alone, so that
//! one implementation can be the system ([`SystemStorage`]) and another can
//! lie like a real disk does ([`FaultyStorage`](model::FaultyStorage)): answer
//! short, fail, and forget at a crash what was never synced.
//!
//! Files are ordinary [`File`] handles in both: a consumer of the store maps
//! and reads them like any other file. The trait adds nothing to what POSIX
//! promises; where the system may do less than asked ([`Storage::read_at`],
//! [`Storage::write_at`]) the loops are in this file, under test with short
//! answers.

mod disk;
pub mod model;
mod system;

use std::ffi::OsString;
use std::fmt;
use std::fs::{File, Metadata};
use std::io;
use std::path::Path;

pub use system::SystemStorage;

use crate::error::{Code, Error};

/// How a lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Together with other shared holders.
    Shared,
    /// Alone.
    Exclusive,
}

/// What kind of filesystem a path is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilesystemKind {
    /// A local one, or one that nothing is known against.
    Local,
    /// One whose locks, links and syncs cannot be relied on; its name.
    Foreign(&'static str),
}

/// Space of a filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Bytes that this user may still write.
    pub free_bytes: u64,
}

/// The file operations of the store.
///
/// Paths are absolute or relative to the working directory, as the store's
/// root was given. No operation follows a symbolic link in the last component
/// of a path, except [`Storage::kind`] and [`Storage::space`].
pub trait Storage: Send + Sync + fmt::Debug {
    /// Opens a file for reading; a pipe or a device does not block.
    fn open_read(&self, path: &Path) -> io::Result<File>;
    /// Creates a file that must not exist, for reading and writing.
    fn create_new(&self, path: &Path, mode: u32) -> io::Result<File>;
    /// Opens a lock file, creating it where it is missing. Where it may not
    /// be written to, it is opened for reading, which is enough to lock it.
    fn open_lock(&self, path: &Path) -> io::Result<File>;
    /// Locks an open file without waiting: `false` if others hold it. Closing
    /// the file releases it, and so does the process's death.
    fn try_lock(&self, file: &File, sharing: Sharing) -> io::Result<bool>;
    /// Reads at most `buffer.len()` bytes; 0 at the end of the file.
    fn read_at(&self, file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Writes at most `bytes.len()` bytes.
    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<usize>;
    /// Changes an open file's permission bits.
    fn set_mode(&self, file: &File, mode: u32) -> io::Result<()>;
    /// Returns when the file's bytes and attributes are on the disk. Says
    /// nothing about its names.
    fn sync_file(&self, file: &File) -> io::Result<()>;
    /// Returns when the folder's names are on the disk.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Gives a file a second name, which must not exist.
    fn link(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Gives a file another name, replacing what has it.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a name of a file.
    fn unlink(&self, path: &Path) -> io::Result<()>;
    /// Creates a folder that must not exist.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Removes an empty folder.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
    /// Sets a file's times to now.
    fn touch(&self, path: &Path) -> io::Result<()>;
    /// Attributes of what a path names, itself and not what it points to.
    fn metadata(&self, path: &Path) -> io::Result<Metadata>;
    /// Attributes of an open file.
    fn file_metadata(&self, file: &File) -> io::Result<Metadata>;
    /// The names in a folder, ascending.
    fn read_dir(&self, path: &Path) -> io::Result<Vec<OsString>>;
    /// What kind of filesystem a path is on.
    fn kind(&self, path: &Path) -> io::Result<FilesystemKind>;
    /// Space of the filesystem that a path is on.
    fn space(&self, path: &Path) -> io::Result<Space>;
}

/// Fills `buffer` from `offset`: how many bytes there were before the end of
/// the file.
pub(crate) fn read_full(storage: &dyn Storage, file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match storage.read_at(file, &mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

/// Like [`read_full`]; a read that fails is tried once more, so that what is
/// called unreadable was so twice.
pub(crate) fn read_twice(storage: &dyn Storage, file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    read_full(storage, file, buffer, offset).or_else(|_| read_full(storage, file, buffer, offset))
}

/// Writes all of `bytes` at `offset`.
pub(crate) fn write_full(storage: &dyn Storage, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match storage.write_at(file, &bytes[done..], offset + done as u64) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// All of an open file, up to `limit_bytes`: `None` if it is longer.
pub(crate) fn read_whole(storage: &dyn Storage, file: &File, limit_bytes: u64) -> io::Result<Option<Vec<u8>>> {
    let len = storage.file_metadata(file)?.len();
    if len > limit_bytes {
        return Ok(None);
    }
    let mut bytes = vec![0; len as usize];
    let read = read_twice(storage, file, &mut bytes, 0)?;
    bytes.truncate(read);
    Ok(Some(bytes))
}

/// The error for a refused operation: `insufficient_disk` where there is no
/// room, else `io_error`, with the path and what to do.
pub(crate) fn failed(doing: &str, path: &Path, cause: &io::Error) -> Error {
    let text = format!("cannot {doing} {}", path.display());
    match cause.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            Error::new(Code::InsufficientDisk, format!("{text}: {cause}")).hint(
                "free some space, run `weightmill store gc`, or choose a store on a larger filesystem with --store",
            )
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            Error::io(text, cause).hint("give this user write access to the store, or choose another one with --store")
        }
        io::ErrorKind::NotFound => {
            Error::io(text, cause).hint("something outside weightmill removed it; run `weightmill store doctor`")
        }
        _ => Error::io(text, cause).hint("the disk or the filesystem may be failing; look at the kernel's log"),
    }
}
