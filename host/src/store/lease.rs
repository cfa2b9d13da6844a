//! A lease: a process's hold on an entry.
//!
//! The shared lock on `locks/<key>.lease` is taken *before* the entry record
//! is read. Whoever evicts the entry takes the same lock exclusively, without
//! waiting, before it removes the record. So either the evictor finds the lock
//! held and leaves the entry alone, or the reader finds no record.
//!
//! The lease keeps the descriptors that it opened. What happens to the names
//! afterwards (a corrupt blob that another process moves aside, a store that
//! is deleted) does not change what they read.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::blobs::OpenShard;
use super::document::EntryDocument;
use super::locks::{Lock, lock};
use super::shard::ShardLayout;
use super::storage::{Sharing, failed, read_whole};
use super::structure::malformed;
use super::verify::Verify;
use super::{Inner, Store};
use crate::digest::{ActionKey, BlobDigest, TensorDigest};
use crate::error::{Code, Error, Result};
use crate::mapping::FileMap;
use crate::progress::Progress;

/// A hold on an entry. The entry is not evicted while it lives.
#[derive(Debug)]
pub struct Lease {
    store: Store,
    key: ActionKey,
    record: EntryRecord,
    document: EntryDocument,
    shards: Vec<OpenShard>,
    _lock: Lock,
}

/// What `entries/<key>` holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryRecord {
    /// The entry document.
    pub(crate) digest: BlobDigest,
    /// Its size.
    pub(crate) size_bytes: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct EntryRecordText {
    digest: String,
    size: u64,
}

impl EntryRecord {
    pub(crate) fn to_bytes(self) -> Result<Vec<u8>> {
        let text = EntryRecordText { digest: format!("sha256:{}", self.digest), size: self.size_bytes };
        crate::canonical::to_canonical(&text)
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let text: EntryRecordText = serde_json::from_slice(bytes).ok()?;
        Some(EntryRecord { digest: text.digest.strip_prefix("sha256:")?.parse().ok()?, size_bytes: text.size })
    }
}

/// An entry whose blobs are open.
pub(crate) struct OpenEntry {
    pub(crate) document: EntryDocument,
    pub(crate) shards: Vec<OpenShard>,
}

impl Store {
    /// Takes a lease on an entry: `None` if there is no whole one.
    ///
    /// The structure is always checked: the document's digest and tables, and
    /// every shard's owner, mode, size and header. `verify` says whether the
    /// bytes are. A blob that is found corrupt is moved into quarantine; the
    /// next call then finds no entry, and the caller builds it.
    ///
    /// # Errors
    /// `corrupt_blob`, `entry_not_trusted`, `lock_timeout`, `io_error`,
    /// `interrupted`.
    pub fn lease(
        &self,
        key: &ActionKey,
        verify: Verify,
        pool: &rayon::ThreadPool,
        progress: &dyn Progress,
    ) -> Result<Option<Lease>> {
        let inner = &*self.0;
        // Only saves making a lock file for every key that was ever asked for.
        if inner.entry_record(key)?.is_none() {
            return Ok(None);
        }
        let timeout = inner.options.lock_timeout;
        let lock = lock(&*inner.storage, &inner.paths.lease_lock(key), Sharing::Shared, timeout, progress)?;
        let Some(record) = inner.entry_record(key)? else { return Ok(None) };
        let Some(OpenEntry { document, shards }) = inner.open_entry(key, &record, progress)? else { return Ok(None) };
        if !inner.verify_shards(&shards, verify, pool, progress)? {
            return Ok(None);
        }
        inner.note_lease(key);
        Ok(Some(Lease { store: self.clone(), key: *key, record, document, shards, _lock: lock }))
    }
}

impl Inner {
    /// The entry record of a key: `None` if there is none, or a torn one.
    pub(crate) fn entry_record(&self, key: &ActionKey) -> Result<Option<EntryRecord>> {
        let path = self.paths.entry(key);
        let file = match self.storage.open_read(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => {
                if let Ok(metadata) = self.storage.metadata(&path) {
                    self.trust.check(&path, &metadata)?;
                }
                return Err(failed("open", &path, &e));
            }
        };
        let metadata = self.storage.file_metadata(&file).map_err(|e| failed("look at", &path, &e))?;
        self.trust.check(&path, &metadata)?;
        let bytes = read_whole(&*self.storage, &file, 4096).map_err(|e| failed("read", &path, &e))?;
        Ok(bytes.as_deref().and_then(EntryRecord::from_bytes))
    }

    /// The document that a record names: `None` if it is not there.
    pub(crate) fn document(
        &self,
        key: &ActionKey,
        record: &EntryRecord,
        progress: &dyn Progress,
    ) -> Result<Option<(EntryDocument, Vec<ShardLayout>)>> {
        let Some(bytes) = self.read_blob(&record.digest, progress)? else { return Ok(None) };
        self.parse_document(key, record, &bytes).map(Some)
    }

    /// The document in its blob's bytes.
    pub(crate) fn parse_document(
        &self,
        key: &ActionKey,
        record: &EntryRecord,
        bytes: &[u8],
    ) -> Result<(EntryDocument, Vec<ShardLayout>)> {
        if bytes.len() as u64 != record.size_bytes {
            return Err(malformed(format!(
                "it has {} bytes, where its record says {}",
                bytes.len(),
                record.size_bytes
            )));
        }
        let document: EntryDocument = serde_json::from_slice(bytes).map_err(malformed)?;
        if document.key != *key {
            return Err(malformed(format!("it is of the key {}, not {key}", document.key)));
        }
        let layouts = document.layouts()?;
        Ok((document, layouts))
    }

    /// Opens everything that an entry is made of and checks its structure:
    /// `None` if something is not there.
    pub(crate) fn open_entry(
        &self,
        key: &ActionKey,
        record: &EntryRecord,
        progress: &dyn Progress,
    ) -> Result<Option<OpenEntry>> {
        let Some((document, layouts)) = self.document(key, record, progress)? else { return Ok(None) };
        let mut digests: Vec<Vec<TensorDigest>> = vec![Vec::new(); document.shards.len()];
        for tensor in &document.tensors {
            digests[tensor.shard as usize].push(tensor.digest);
        }
        let mut shards = Vec::with_capacity(layouts.len());
        for ((record, layout), digests) in document.shards.iter().zip(layouts).zip(digests) {
            let Some(shard) = self.open_shard(record, layout, digests, progress)? else { return Ok(None) };
            shards.push(shard);
        }
        Ok(Some(OpenEntry { document, shards }))
    }

    /// Remembers that an entry was leased now. Where that cannot be written,
    /// the entry counts as leased when it was published.
    fn note_lease(&self, key: &ActionKey) {
        let path = self.paths.leased(key);
        match self.storage.touch(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => drop(self.storage.create_new(&path, 0o644)),
            _ => {}
        }
    }
}

impl Lease {
    /// The entry's key.
    pub fn key(&self) -> &ActionKey {
        &self.key
    }

    /// The root of the store that it is in.
    pub fn store_root(&self) -> &Path {
        self.store.root()
    }

    /// The entry's document.
    pub fn document(&self) -> &EntryDocument {
        &self.document
    }

    /// The SHA-256 of the document.
    pub fn document_digest(&self) -> &BlobDigest {
        &self.record.digest
    }

    /// How many shards there are.
    pub fn shards(&self) -> usize {
        self.shards.len()
    }

    /// The open file of a shard. Read it with `pread`.
    ///
    /// # Panics
    /// If there is no such shard; so do the other methods that take one.
    pub fn shard_file(&self, shard: usize) -> &Arc<File> {
        &self.shards[shard].file
    }

    /// The shard's name in the store, for messages.
    pub fn shard_path(&self, shard: usize) -> &Path {
        &self.shards[shard].path
    }

    /// Where everything is in a shard.
    pub fn shard_layout(&self, shard: usize) -> &ShardLayout {
        &self.shards[shard].layout
    }

    /// The leaf hashes of a shard's tensors, in the order of their offsets,
    /// checked against their digest.
    ///
    /// # Errors
    /// `corrupt_blob`, `io_error`.
    pub fn leaf_list(&self, shard: usize, progress: &dyn Progress) -> Result<Vec<u8>> {
        let record = &self.shards[shard].record;
        let bytes = self.store.0.read_blob(&record.leaves, progress)?;
        bytes.ok_or_else(|| {
            Error::new(Code::CorruptBlob, format!("the leaf list {} is gone", record.leaves))
                .hint("another process moved it aside: run it again, and the entry will be rebuilt")
        })
    }

    /// Maps a shard shared and read-only, for a device to read.
    ///
    /// # Errors
    /// `io_error`.
    pub fn map_shard(&self, shard: usize) -> Result<FileMap> {
        FileMap::read_only(self.shards[shard].file.clone(), self.shards[shard].path.clone())
    }
}
