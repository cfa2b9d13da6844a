//! The build of one entry, from the claim to the commit.
//!
//! A [`Publication`] owns the store's lock (shared: gc stays away), the key's
//! build lock (exclusive: nobody else builds it) and a folder of its own under
//! `tmp/`. Shard writers share that ownership, so the locks are not released
//! while one of them is alive. Dropped before the commit, it removes its folder
//! and leaves no trace that matters.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::blobs::OpenShard;
use super::blocks::{StoredBlock, StoredTensor};
use super::locks::{Lock, lock};
use super::paths::key_of_work;
use super::provenance::BuiltWith;
use super::shard::ShardLayout;
use super::storage::{Sharing, failed, write_full};
use super::verify::Verify;
use super::writer::{BLOB_MODE, FinishedShard, ShardWriter};
use super::{Inner, Store};
use crate::digest::{ActionKey, BlobDigest, BlockKey};
use crate::error::{Code, Error, Result};
use crate::progress::Progress;

/// What came of claiming a key.
#[derive(Debug)]
pub enum Claim {
    /// Somebody has published it: lease it.
    Found,
    /// It is the caller's to build.
    Build(Publication),
}

/// The right and the duty to build an entry. See the module's text.
#[derive(Debug)]
pub struct Publication {
    pub(crate) work: Arc<Workspace>,
    pub(crate) key: ActionKey,
    pub(crate) action: Vec<u8>,
    /// Shards that are taken from the store, by their digest: open, verified.
    pub(crate) reused: Mutex<BTreeMap<BlobDigest, (OpenShard, Vec<StoredTensor>)>>,
    /// The blocks that they are of, and the engines that made them.
    pub(crate) reused_blocks: Mutex<BTreeMap<BlockKey, Option<Vec<BuiltWith>>>>,
}

/// A folder under `tmp/`, with the locks that make it this process's.
#[derive(Debug)]
pub(crate) struct Workspace {
    pub(crate) inner: Arc<Inner>,
    dir: PathBuf,
    /// Shards that are written and synced.
    finished: Mutex<Vec<Finished>>,
    _build: Lock,
    _store: Lock,
}

/// A finished shard's files.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) shard: FinishedShard,
    pub(crate) layout: ShardLayout,
    pub(crate) path: PathBuf,
    pub(crate) leaves_path: PathBuf,
}

impl Store {
    /// Claims a key for building, waiting for whoever builds it now. `action`
    /// is the canonical JSON whose SHA-256 is the key.
    ///
    /// # Errors
    /// `lock_timeout`, `io_error`, `insufficient_disk`, `interrupted`;
    /// `digest_mismatch` if the action is not that of the key.
    pub fn claim(&self, key: &ActionKey, action: &[u8], progress: &dyn Progress) -> Result<Claim> {
        let inner = &*self.0;
        if ActionKey::of(action) != *key {
            let message = format!("the action hashes to {}, expected the key {key}", ActionKey::of(action));
            return Err(Error::new(Code::DigestMismatch, message));
        }
        let start = Instant::now();
        let left = || inner.options.lock_timeout.saturating_sub(start.elapsed());
        let store = lock(&*inner.storage, &inner.paths.store_lock(), Sharing::Shared, left(), progress)?;
        let build = lock(&*inner.storage, &inner.paths.build_lock(key), Sharing::Exclusive, left(), progress)?;
        inner.remove_stale_work(key)?;
        if inner.is_whole(key, progress) {
            return Ok(Claim::Found);
        }
        // Users of a store that they may only read need the file to exist.
        let lease_lock = inner.paths.lease_lock(key);
        inner.storage.open_lock(&lease_lock).map_err(|e| failed("create the lock file", &lease_lock, &e))?;
        let dir = inner.create_work(key)?;
        let work = Workspace { inner: self.0.clone(), dir, finished: Mutex::default(), _build: build, _store: store };
        Ok(Claim::Build(Publication {
            work: Arc::new(work),
            key: *key,
            action: action.to_vec(),
            reused: Mutex::default(),
            reused_blocks: Mutex::default(),
        }))
    }
}

impl Inner {
    /// Whether an entry has everything that it is made of. What is wrong with
    /// it otherwise is of no interest here: it is about to be rebuilt.
    fn is_whole(&self, key: &ActionKey, progress: &dyn Progress) -> bool {
        let open = |record| self.open_entry(key, &record, progress).is_ok_and(|entry| entry.is_some());
        self.entry_record(key).is_ok_and(|record| record.is_some_and(open))
    }

    /// Removes what a dead builder of this key left. The build lock is held,
    /// so no builder of it is alive.
    pub(crate) fn remove_stale_work(&self, key: &ActionKey) -> Result<()> {
        for name in self.names(&self.paths.tmp())? {
            if key_of_work(&name) == Some(*key) {
                let dir = self.paths.tmp().join(name);
                self.remove_work(&dir).map_err(|e| failed("remove", &dir, &e))?;
            }
        }
        let new_entry = self.paths.new_entry(key);
        match self.storage.unlink(&new_entry) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(failed("remove", &new_entry, &e)),
            _ => Ok(()),
        }
    }

    /// Removes a folder under `tmp/` and the files in it.
    pub(crate) fn remove_work(&self, dir: &Path) -> std::io::Result<()> {
        let gone = |result: std::io::Result<()>| match result {
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
            other => other,
        };
        match self.storage.read_dir(dir) {
            Ok(names) => names.iter().try_for_each(|name| gone(self.storage.unlink(&dir.join(name))))?,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(e),
        }
        gone(self.storage.remove_dir(dir))
    }

    fn create_work(&self, key: &ActionKey) -> Result<PathBuf> {
        loop {
            let dir = self.paths.temporary(&key.to_string(), self.next());
            match self.storage.create_dir(&dir) {
                Ok(()) => return Ok(dir),
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => return Err(failed("create the folder", &dir, &e)),
            }
        }
    }
}

impl Publication {
    /// The key that is being built.
    pub fn key(&self) -> &ActionKey {
        &self.key
    }

    /// Checks that there is room for so many bytes, before any is written.
    /// Others write too, so a disk may still fill up afterwards.
    ///
    /// # Errors
    /// `insufficient_disk`, `io_error`.
    pub fn reserve(&self, total_bytes: u64) -> Result<()> {
        let inner = &self.work.inner;
        let root = &inner.paths.root;
        let free_bytes = inner.storage.space(root).map_err(|e| failed("look at the space of", root, &e))?.free_bytes;
        if free_bytes >= total_bytes {
            return Ok(());
        }
        let message =
            format!("the build needs {total_bytes} bytes, the store {} has {free_bytes} free", root.display());
        Err(Error::new(Code::InsufficientDisk, message)
            .hint("free some space, run `weightmill store gc`, or choose a store on a larger filesystem with --store"))
    }

    /// A file for intermediate results. It has no name, so it is gone when it
    /// is closed, whatever happens.
    ///
    /// # Errors
    /// `io_error`, `insufficient_disk`.
    pub fn scratch_file(&self) -> Result<File> {
        let (path, file) = self.work.create("scratch")?;
        self.work.inner.storage.unlink(&path).map_err(|e| failed("unlink", &path, &e))?;
        Ok(file)
    }

    /// Begins a shard.
    ///
    /// # Errors
    /// `io_error`, `insufficient_disk`.
    pub fn create_shard(&self, layout: &ShardLayout) -> Result<ShardWriter> {
        ShardWriter::create(self.work.clone(), layout.clone())
    }

    /// Takes a known block into this entry: opens its shards, checks and
    /// verifies them (once a boot), and holds them until the commit. `false` if
    /// it cannot be had, because it is gone or was found corrupt (and moved
    /// aside): then the block is to be computed.
    ///
    /// # Errors
    /// `interrupted`.
    pub fn reuse_block(&self, block: &StoredBlock, pool: &rayon::ThreadPool, progress: &dyn Progress) -> Result<bool> {
        match self.open_block(block, pool, progress) {
            Ok(Some(shards)) => {
                let mut reused = self.reused.lock().unwrap_or_else(PoisonError::into_inner);
                for (shard, stored) in shards.into_iter().zip(&block.shards) {
                    reused.insert(shard.record.digest, (shard, stored.tensors.clone()));
                }
                let mut blocks = self.reused_blocks.lock().unwrap_or_else(PoisonError::into_inner);
                blocks.insert(block.key, block.engines.clone());
                Ok(true)
            }
            Ok(None) => Ok(false),
            Err(e) if e.code() == Code::Interrupted => Err(e),
            Err(_) => Ok(false),
        }
    }

    fn open_block(
        &self,
        block: &StoredBlock,
        pool: &rayon::ThreadPool,
        progress: &dyn Progress,
    ) -> Result<Option<Vec<OpenShard>>> {
        let inner = &self.work.inner;
        let mut shards = Vec::with_capacity(block.shards.len());
        for stored in &block.shards {
            let digests = stored.tensors.iter().map(|t| t.digest).collect();
            let Some(shard) = inner.open_shard(&stored.record, stored.layout()?, digests, progress)? else {
                return Ok(None);
            };
            shards.push(shard);
        }
        let verified = inner.verify_shards(&shards, Verify::First, pool, progress)?;
        Ok(verified.then_some(shards))
    }
}

impl Workspace {
    /// Creates a file in the folder.
    pub(crate) fn create(&self, stem: &str) -> Result<(PathBuf, File)> {
        let path = self.dir.join(format!("{stem}.{}", self.inner.next()));
        let file = self.inner.storage.create_new(&path, 0o600).map_err(|e| failed("create", &path, &e))?;
        Ok((path, file))
    }

    /// Makes a written file read-only and puts it on the disk. The mode comes
    /// first: it is an attribute that the sync covers.
    pub(crate) fn seal(&self, file: &File, path: &Path) -> Result<()> {
        self.inner.storage.set_mode(file, BLOB_MODE).map_err(|e| failed("make read-only", path, &e))?;
        self.inner.storage.sync_file(file).map_err(|e| failed("sync", path, &e))
    }

    /// Writes a whole small file and puts it on the disk.
    pub(crate) fn write(&self, stem: &str, bytes: &[u8]) -> Result<PathBuf> {
        let (path, file) = self.create(stem)?;
        write_full(&*self.inner.storage, &file, bytes, 0).map_err(|e| failed("write", &path, &e))?;
        self.seal(&file, &path)?;
        Ok(path)
    }

    pub(crate) fn finished(&self, shard: FinishedShard, layout: ShardLayout, path: PathBuf, leaves_path: PathBuf) {
        let finished = Finished { shard, layout, path, leaves_path };
        self.finished.lock().unwrap_or_else(PoisonError::into_inner).push(finished);
    }

    /// The finished shards, for the commit.
    pub(crate) fn take_finished(&self) -> Vec<Finished> {
        std::mem::take(&mut self.finished.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Removes the folder.
    pub(crate) fn remove(&self) -> Result<()> {
        self.inner.remove_work(&self.dir).map_err(|e| failed("remove", &self.dir, &e))
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // What stays is removed by the next builder of the key, or by gc.
        let _ = self.remove();
    }
}
