//! The store: transformed checkpoints by what determines them.
//!
//! ```text
//! root/
//!   format                  "weightmill store 1"
//!   blobs/sha256/<hex>      shards, leaf lists, entry documents, modules: 0444, never changed
//!   entries/<key>           digest and size of the entry document; its rename publishes
//!   actions/<key>.json      the action; its SHA-256 is the key
//!   blocks/<hash>           block action → shards              (weak)
//!   facts/<hash>            what plans said                    (weak)
//!   sources/<hash>          tensor digests of checkpoint files (weak)
//!   modules/<digest>        modules that were put here, which gc keeps
//!   remotes/<hash>          which module a registry's manifest is (weak)
//!   provenance/<key>/       who built an entry, and from what names; never hashed
//!   state/first/<hex>       blobs verified since this boot     (weak)
//!   state/leased/<key>      its time is when the entry was last leased
//!   locks/                  lock files, never removed
//!   tmp/<key>.<pid>.<n>/    work in progress
//!   tmp/<hex>.partial       a blob that is being received
//!   quarantine/             what failed verification
//! ```
//!
//! **Who owns what.** A [`Store`] is a path and a few numbers; it holds no
//! lock. A [`Publication`] holds the locks and the folder under `tmp/` of one
//! build and ends in [`Publication::commit`] or in nothing. A [`Lease`] holds
//! an entry: a shared lock that keeps it from being evicted, and open
//! descriptors, through which it reads the same bytes whatever happens to the
//! names.
//!
//! **Invariants.**
//! 1. A name in `blobs/` is made once its file is synced, and the file is
//!    never written again. It leaves `blobs/` only by gc or into quarantine.
//! 2. `entries/<key>` appears by a rename after everything that it reaches is
//!    on the disk, so an entry is there whole or not at all.
//! 3. What is weak carries its own checksum and may vanish; nothing but speed
//!    depends on it.
//! 4. Files are believed only as [`permissions`] says.
//!
//! The order of a publication, line by line, is in [`publish`]; the locks are
//! in `locks`; what is believed of disks and crashes is in `docs/store.md`.

pub mod document;
pub mod permissions;
pub mod publish;
pub mod shard;
pub mod storage;

mod audit;
mod blobs;
mod blocks;
mod catalog;
mod doctor;
mod gc;
mod lease;
mod locks;
mod modules;
mod paths;
mod provenance;
mod publication;
mod quarantine;
mod receive;
mod records;
mod remotes;
mod sources;
mod structure;
mod verify;
mod writer;

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod doctor_tests;
#[cfg(test)]
mod fixture;
#[cfg(test)]
mod receive_tests;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

pub use audit::{Audit, Root};
pub use blocks::{StoredBlock, StoredShard, StoredTensor};
pub use catalog::EntryInfo;
pub use doctor::Finding;
pub use gc::{GcPolicy, GcReport};
pub use lease::Lease;
pub use provenance::{BuiltWith, Engines, engines};
pub use publication::{Claim, Publication};
pub use publish::Published;
pub use quarantine::Quarantined;
pub use receive::{Reception, check_leaves};
pub use remotes::RemoteModule;
pub use shard::{PlacedTensor, ShardLayout};
pub use verify::Verify;
pub use writer::{FinishedShard, FinishedTensor, ShardWriter};

use self::paths::Paths;
use self::permissions::Trust;
use self::storage::{FilesystemKind, Storage, SystemStorage, failed, read_whole, write_full};
use crate::error::{Code, Error, Result};

/// What the marker of a store's root says.
const FORMAT: &str = "weightmill store 1\n";
/// What the marker of a store of another version begins with.
const FORMAT_PREFIX: &str = "weightmill store ";

/// How a store behaves.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Accept a network or FUSE filesystem, at the caller's own risk: locks
    /// and syncs may not hold there.
    pub allow_network_filesystem: bool,
    /// The longest wait for a lock.
    pub lock_timeout: Duration,
}

impl Default for StoreOptions {
    fn default() -> Self {
        StoreOptions { allow_network_filesystem: false, lock_timeout: Duration::from_secs(600) }
    }
}

/// A store. Cheap to clone; clones are one store.
#[derive(Clone, Debug)]
pub struct Store(pub(crate) Arc<Inner>);

/// What all parts of a store share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) paths: Paths,
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) options: StoreOptions,
    pub(crate) trust: Trust,
    sequence: AtomicU64,
    boot_id: OnceLock<Option<String>>,
}

/// Whether a file must survive a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Durability {
    /// It may be lost.
    Weak,
    /// It and its name are on the disk before the call returns.
    Synced,
}

impl Store {
    /// Where the store is unless said otherwise: `WEIGHTMILL_STORE`, else
    /// `$XDG_CACHE_HOME/weightmill`, else `~/.cache/weightmill`.
    ///
    /// # Errors
    /// `io_error` if none of the variables is set.
    pub fn default_root() -> Result<PathBuf> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(root) = variable("WEIGHTMILL_STORE") {
            return Ok(root);
        }
        let cache = variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")));
        cache.map(|cache| cache.join("weightmill")).ok_or_else(|| {
            Error::new(Code::IoError, "no place for the store: WEIGHTMILL_STORE, XDG_CACHE_HOME and HOME are all unset")
                .hint("name one with --store or WEIGHTMILL_STORE")
        })
    }

    /// Opens a store, creating it where there is none. Of one that exists it
    /// reads two attributes and a line.
    ///
    /// # Errors
    /// `unsupported_filesystem`, `entry_not_trusted` (its root is writable by
    /// others), `io_error`, `insufficient_disk`.
    pub fn open(root: &Path, options: StoreOptions) -> Result<Self> {
        Store::open_on(root, options, Arc::new(SystemStorage))
    }

    /// Opens a store if there is one, and writes nothing.
    ///
    /// # Errors
    /// Like [`Store::open`].
    pub fn open_existing(root: &Path, options: StoreOptions) -> Result<Option<Self>> {
        let storage = Arc::new(SystemStorage);
        match storage.metadata(&root.join("format")) {
            Ok(_) => Store::open_on(root, options, storage).map(Some),
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
            Err(e) => Err(failed("look at the store", root, &e)),
        }
    }

    /// Opens a store on other file operations than the system's.
    ///
    /// # Errors
    /// Like [`Store::open`].
    pub fn open_on(root: &Path, options: StoreOptions, storage: Arc<dyn Storage>) -> Result<Self> {
        create_all(&*storage, root)?;
        if !options.allow_network_filesystem {
            refuse_foreign(&*storage, root)?;
        }
        // The root itself may be reached through a symbolic link: it is the
        // user's own choice.
        let real = std::fs::canonicalize(root).map_err(|e| failed("open the store", root, &e))?;
        let metadata = storage.metadata(&real).map_err(|e| failed("look at the store", root, &e))?;
        let inner = Inner {
            trust: Trust::of_root(root, &metadata)?,
            paths: Paths::new(real),
            storage,
            options,
            sequence: AtomicU64::new(0),
            boot_id: OnceLock::new(),
        };
        if !inner.has_format()? {
            inner.create_layout()?;
        }
        Ok(Store(Arc::new(inner)))
    }

    /// The root folder, as an absolute path.
    pub fn root(&self) -> &Path {
        &self.0.paths.root
    }
}

/// Creates a folder and those above it. Their own durability is of no
/// account: without them there is simply no store.
fn create_all(storage: &dyn Storage, dir: &Path) -> Result<()> {
    if std::fs::metadata(dir).is_ok() {
        return Ok(());
    }
    if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        create_all(storage, parent)?;
    }
    match storage.create_dir(dir) {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => Err(failed("create the folder", dir, &e)),
        _ => Ok(()),
    }
}

fn refuse_foreign(storage: &dyn Storage, root: &Path) -> Result<()> {
    match storage.kind(root).map_err(|e| failed("look at the filesystem of", root, &e))? {
        FilesystemKind::Local => Ok(()),
        FilesystemKind::Foreign(name) => Err(Error::new(
            Code::UnsupportedFilesystem,
            format!("the store {} is on {name}, where locks and syncs cannot be relied on", root.display()),
        )
        .hint("put the store on a local disk with --store or WEIGHTMILL_STORE, or accept the risk with --allow-network-filesystem")),
    }
}

impl Inner {
    fn has_format(&self) -> Result<bool> {
        let path = self.paths.format();
        let read = |file| read_whole(&*self.storage, &file, 4096);
        let found = match self.storage.open_read(&path).and_then(read) {
            Ok(found) => found.unwrap_or_default(),
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
            Err(e) => return Err(failed("read", &path, &e)),
        };
        if found == FORMAT.as_bytes() {
            return Ok(true);
        }
        if found.starts_with(FORMAT_PREFIX.as_bytes()) {
            let message = format!(
                "{} was made by another version: expected '{}', found '{}'",
                self.paths.root.display(),
                FORMAT.trim_end(),
                String::from_utf8_lossy(&found).trim_end()
            );
            return Err(Error::new(Code::IoError, message).hint("use that version, or another store with --store"));
        }
        // Torn by a crash before the store was ever used.
        Ok(false)
    }

    /// Makes every folder that is missing, then the marker.
    pub(crate) fn create_layout(&self) -> Result<()> {
        for dir in self.paths.folders() {
            match self.storage.create_dir(&dir) {
                Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(failed("create the folder", &dir, &e)),
                _ => {}
            }
        }
        // Parents hold the names of the folders; they must be on the disk
        // before a publication relies on what is inside.
        for dir in self.paths.parents() {
            self.sync_dir(&dir)?;
        }
        self.replace(&self.paths.format(), FORMAT.as_bytes(), 0o644, Durability::Synced)
    }

    /// Writes a whole file beside, then renames it into place.
    pub(crate) fn replace(&self, path: &Path, bytes: &[u8], mode: u32, durability: Durability) -> Result<()> {
        let (temporary, file) = self.create_temporary("record", mode)?;
        let written = write_full(&*self.storage, &file, bytes, 0)
            .and_then(|()| if durability == Durability::Synced { self.storage.sync_file(&file) } else { Ok(()) })
            .and_then(|()| self.storage.rename(&temporary, path));
        if let Err(e) = written {
            let _ = self.storage.unlink(&temporary);
            return Err(failed("write", path, &e));
        }
        match path.parent() {
            Some(parent) if durability == Durability::Synced => self.sync_dir(parent),
            _ => Ok(()),
        }
    }

    /// Creates `tmp/<stem>.<pid>.<n>`. Another container may have this
    /// process's number, so a taken name is no error.
    fn create_temporary(&self, stem: &str, mode: u32) -> Result<(PathBuf, std::fs::File)> {
        loop {
            let path = self.paths.temporary(stem, self.next());
            match self.storage.create_new(&path, mode) {
                Ok(file) => return Ok((path, file)),
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => return Err(failed("create", &path, &e)),
            }
        }
    }

    /// A number that this process has not used yet.
    pub(crate) fn next(&self) -> u64 {
        self.sequence.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn sync_dir(&self, dir: &Path) -> Result<()> {
        self.storage.sync_dir(dir).map_err(|e| failed("sync the folder", dir, &e))
    }

    /// The names in a folder; none if it is missing.
    pub(crate) fn names(&self, dir: &Path) -> Result<Vec<OsString>> {
        match self.storage.read_dir(dir) {
            Ok(names) => Ok(names),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(failed("list the folder", dir, &e)),
        }
    }

    /// What tells this boot of the machine from others; `None` if unknown.
    pub(crate) fn boot_id(&self) -> Option<&str> {
        let read = || std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().map(|id| id.trim().to_owned());
        self.boot_id.get_or_init(read).as_deref()
    }
}
