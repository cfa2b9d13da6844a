//! Files mapped for a device to read.
//!
//! A [`FileMap`] is an address range that the driver can register; it never
//! hands out a slice. The CPU reads files with `pread`, so that a file that is
//! truncated under us is an error and not a SIGBUS. Because no reference into
//! the mapping is ever made, this file needs no `unsafe`.
//!
//! Files are mapped `MAP_SHARED` and `PROT_READ`, never `MAP_PRIVATE`:
//! registering a private, read-only file mapping with
//! `CU_MEMHOSTREGISTER_READ_ONLY` did not return within a minute on an H200
//! machine (driver 580, kernel 6.18), and a private, writable mapping makes a
//! copy of every page that it pins. A shared, read-only mapping pins the page
//! cache itself, which all processes of a node share. The one writable mapping
//! is [`FileMap::writable`], for copies in tmpfs that this program made
//! itself, on devices that cannot register read-only memory.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};

use crate::error::{Error, Result};

/// A whole file, mapped shared. Unmapped on drop.
#[derive(Debug)]
pub struct FileMap {
    map: MmapRaw,
    file: Arc<File>,
    path: PathBuf,
    len_bytes: u64,
    writable: bool,
}

impl FileMap {
    /// Maps `file` shared and read-only; `path` is for messages.
    ///
    /// # Errors
    /// `io_error`.
    pub fn read_only(file: Arc<File>, path: impl Into<PathBuf>) -> Result<Self> {
        Self::new(file, path.into(), false)
    }

    /// Maps `file`, which must be open for reading and writing, shared and
    /// writable. Only for copies that this program made itself.
    ///
    /// # Errors
    /// `io_error`.
    pub fn writable(file: Arc<File>, path: impl Into<PathBuf>) -> Result<Self> {
        Self::new(file, path.into(), true)
    }

    fn new(file: Arc<File>, path: PathBuf, writable: bool) -> Result<Self> {
        let failed = |e| Error::io(format_args!("mapping {}", path.display()), e);
        let len_bytes = file.metadata().map_err(failed)?.len();
        // memmap2's read-only map of a file is MAP_SHARED | PROT_READ, and its
        // raw map MAP_SHARED | PROT_READ | PROT_WRITE; a test below holds it to
        // that, as /proc/self/maps shows it.
        let map = match writable {
            false => MmapOptions::new().map_raw_read_only(&*file).map_err(failed)?,
            true => MmapOptions::new().map_raw(&*file).map_err(failed)?,
        };
        Ok(FileMap { map, file, path, len_bytes, writable })
    }

    /// The address of the file's first byte.
    pub fn address(&self) -> usize {
        self.map.as_ptr().addr()
    }

    /// The address of the file's first byte, as a pointer. Reading through it
    /// raises SIGBUS where the file has become shorter.
    pub fn as_ptr(&self) -> *const u8 {
        self.map.as_ptr()
    }

    /// The file's length when it was mapped.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Whether the mapping is writable.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// The mapped file.
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// The file's path, as given.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn flags_of(map: &FileMap) -> String {
        let start = format!("{:x}-", map.address());
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let line = maps.lines().find(|l| l.starts_with(&start)).expect("the mapping is listed");
        line.split_whitespace().nth(1).unwrap().to_string()
    }

    fn file_of(bytes: &[u8]) -> Arc<File> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        Arc::new(file)
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn files_are_mapped_shared_and_read_only() {
        let map = FileMap::read_only(file_of(&[7; 5000]), "x").unwrap();
        assert_eq!(flags_of(&map), "r--s");
        assert_eq!((map.len_bytes(), map.is_writable()), (5000, false));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_copy_of_our_own_is_shared_and_writable() {
        let map = FileMap::writable(file_of(&[7; 5000]), "x").unwrap();
        assert_eq!(flags_of(&map), "rw-s");
    }

    #[test]
    fn an_empty_file_can_be_mapped() {
        let map = FileMap::read_only(file_of(&[]), "x").unwrap();
        assert_eq!(map.len_bytes(), 0);
    }
}
