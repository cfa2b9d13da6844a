//! Blobs that come from elsewhere: received in pieces, continued after an
//! interruption, and verified before they have a name in `blobs/`.
//!
//! A blob arrives in `tmp/<hex>.partial`. Whoever writes to it holds an
//! exclusive lock on that very file, so two processes never mix their bytes,
//! and a killed one leaves its bytes for the next. What is found there is
//! hashed again before it is continued: after a crash of the machine it may be
//! anything. Once the whole has the right digest, it takes the way of every
//! blob (see [`publish`](super::publish), steps 1 to 3): mode, sync, link
//! without replacing. So whole blobs survive a kill too: nothing reaches them
//! yet, but the next attempt finds them. gc removes both kinds.
//!
//! A shard's bytes are also compared with its leaf list, and that with the
//! tensor digests of the document, before the link. A document whose content
//! digest is trusted then says the truth about every byte, whoever wrote it.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::PoisonError;
use std::time::Instant;

use sha2::{Digest as _, Sha256};

use super::blobs::OpenShard;
use super::blocks::StoredTensor;
use super::document::{EntryDocument, ShardRecord};
use super::publication::Publication;
use super::shard::ShardLayout;
use super::storage::{Sharing, failed, read_full, write_full};
use super::structure::digest_from_leaves;
use super::verify::{Suspect, Verify, find_damage};
use super::writer::BLOB_MODE;
use super::{Inner, Store};
use crate::digest::{BlobDigest, TensorDigest};
use crate::error::{Code, Error, Result};
use crate::progress::{Progress, Quiet};

/// What is read at once to hash what has arrived already.
const PIECE_BYTES: usize = 1 << 20;

/// A blob that is being received.
#[derive(Debug)]
pub struct Reception<'a> {
    publication: &'a Publication,
    digest: BlobDigest,
    size_bytes: u64,
    path: PathBuf,
    file: File,
    hash: Sha256,
    received_bytes: u64,
    continued: bool,
}

impl Store {
    /// Whether a blob of this size is here. It may be corrupt, or not there any
    /// more in a moment.
    pub fn has_blob(&self, digest: &BlobDigest, size_bytes: u64) -> bool {
        self.0.has_blob(digest, size_bytes)
    }
}

impl Publication {
    /// Begins to receive a blob, or goes on: `None` if the store has it by
    /// now. Waits while another process receives the same blob.
    ///
    /// # Errors
    /// `lock_timeout`, `io_error`, `insufficient_disk`, `interrupted`.
    pub fn receive(
        &self,
        digest: &BlobDigest,
        size_bytes: u64,
        progress: &dyn Progress,
    ) -> Result<Option<Reception<'_>>> {
        let inner = &self.work.inner;
        let Some((path, file)) = inner.open_partial(digest, size_bytes, progress)? else { return Ok(None) };
        let mut reception = Reception {
            publication: self,
            digest: *digest,
            size_bytes,
            path,
            file,
            hash: Sha256::new(),
            received_bytes: 0,
            continued: false,
        };
        reception.take_what_is_there(progress)?;
        Ok(Some(reception))
    }

    /// Takes a shard of `document` that is in the store into this entry, like
    /// a block that is reused: checks and verifies it and holds it until the
    /// commit. `false` if it is not there, or was found corrupt (and was moved
    /// aside).
    ///
    /// # Errors
    /// `digest_mismatch` if it is whole, but not what the document says;
    /// `interrupted`, `io_error`.
    pub fn take_shard(
        &self,
        document: &EntryDocument,
        shard: usize,
        layout: &ShardLayout,
        pool: &rayon::ThreadPool,
        progress: &dyn Progress,
    ) -> Result<bool> {
        let inner = &self.work.inner;
        let record = &document.shards[shard];
        let digests = digests_of(document, shard);
        let open = || -> Result<Option<OpenShard>> {
            let Some(open) = inner.open_shard(record, layout.clone(), digests.clone(), progress)? else {
                return Ok(None);
            };
            // The document came from elsewhere, so that the shard was verified
            // says nothing about what the document calls it.
            let Some(list) = inner.read_blob(&record.leaves, progress)? else { return Ok(None) };
            open.check_leaf_list(&list)?;
            let whole = inner.verify_shards(std::slice::from_ref(&open), Verify::First, pool, progress)?;
            Ok(whole.then_some(open))
        };
        match open() {
            Ok(Some(open)) => {
                let tensors = document.tensors.iter().filter(|t| t.shard as usize == shard).map(|t| StoredTensor {
                    name: t.name.clone(),
                    dtype: t.dtype,
                    shape: t.shape.clone(),
                    digest: t.digest,
                    offset: t.offset,
                });
                let mut reused = self.reused.lock().unwrap_or_else(PoisonError::into_inner);
                reused.insert(record.digest, (open, tensors.collect()));
                Ok(true)
            }
            Ok(None) => Ok(false),
            Err(e) if e.code() == Code::CorruptBlob => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// A small blob of the store, if it is here and whole.
    ///
    /// # Errors
    /// `interrupted`, `io_error`.
    pub fn small_blob(&self, digest: &BlobDigest, progress: &dyn Progress) -> Result<Option<Vec<u8>>> {
        match self.work.inner.read_blob(digest, progress) {
            Err(e) if e.code() == Code::CorruptBlob => Ok(None),
            found => found,
        }
    }

    /// Puts a small blob that came from elsewhere.
    ///
    /// # Errors
    /// `digest_mismatch`, `io_error`, `insufficient_disk`.
    pub fn put_small(&self, digest: &BlobDigest, bytes: &[u8], progress: &dyn Progress) -> Result<()> {
        if BlobDigest::of(bytes) != *digest {
            return Err(mismatch(digest, &BlobDigest::of(bytes)));
        }
        let path = self.work.write("small", bytes)?;
        self.work.inner.link_small(&path, digest, progress).map(drop)
    }
}

/// The digests of a shard's tensors, as its layout orders them.
fn digests_of(document: &EntryDocument, shard: usize) -> Vec<TensorDigest> {
    document.tensors.iter().filter(|t| t.shard as usize == shard).map(|t| t.digest).collect()
}

/// Whether a leaf list is that of a shard of a document.
///
/// # Errors
/// `digest_mismatch`, naming the first tensor that it does not fit.
pub fn check_leaves(document: &EntryDocument, shard: usize, layout: &ShardLayout, leaf_list: &[u8]) -> Result<()> {
    let digests = digests_of(document, shard);
    for (index, (tensor, digest)) in layout.tensors().iter().zip(&digests).enumerate() {
        if digest_from_leaves(layout, index, leaf_list) != Some(*digest) {
            return Err(Error::new(
                Code::DigestMismatch,
                format!("the leaf hashes of '{}' do not give its digest {digest}", tensor.name),
            )
            .hint("whoever published the entry did not build it with weightmill: nothing was kept"));
        }
    }
    Ok(())
}

impl Inner {
    /// Opens and locks the file that a blob arrives in: `None` if the blob is
    /// there already.
    fn open_partial(
        &self,
        digest: &BlobDigest,
        size_bytes: u64,
        progress: &dyn Progress,
    ) -> Result<Option<(PathBuf, File)>> {
        let path = self.paths.tmp().join(format!("{digest}.partial"));
        let start = Instant::now();
        loop {
            if self.has_blob(digest, size_bytes) {
                return Ok(None);
            }
            let file = self.storage.open_lock(&path).map_err(|e| failed("open", &path, &e))?;
            let locked = self.storage.try_lock(&file, Sharing::Exclusive).map_err(|e| failed("lock", &path, &e))?;
            // If the name is another file's by now, whoever held the lock has
            // finished, or the file is not to be used.
            if locked && self.is_named(&path, &file) {
                return Ok(Some((path, file)));
            }
            if progress.cancelled() {
                return Err(Error::new(Code::Interrupted, "stopped while waiting for another download"));
            }
            if start.elapsed() > self.options.lock_timeout {
                return Err(Error::new(
                    Code::LockTimeout,
                    format!("another process has been receiving the blob {digest} for too long"),
                )
                .hint(format!("`fuser -v {}` shows which; wait for it, or end it", path.display())));
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    /// Whether an open file is what its path names now, and may be used. One
    /// that belongs to a stranger is removed.
    fn is_named(&self, path: &std::path::Path, file: &File) -> bool {
        let (Ok(open), Ok(named)) = (self.storage.file_metadata(file), self.storage.metadata(path)) else {
            return false;
        };
        if self.trust.check(path, &named).is_err() {
            let _ = self.storage.unlink(path);
            return false;
        }
        (open.dev(), open.ino()) == (named.dev(), named.ino())
    }
}

impl Reception<'_> {
    /// How many bytes have arrived.
    pub fn received_bytes(&self) -> u64 {
        self.received_bytes
    }

    /// How many bytes there will be.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Whether some of the bytes arrived in an earlier attempt.
    pub fn is_continued(&self) -> bool {
        self.continued
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// `digest_mismatch` if there are more than there should be; `io_error`,
    /// `insufficient_disk`.
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        if self.received_bytes + bytes.len() as u64 > self.size_bytes {
            return Err(Error::new(
                Code::DigestMismatch,
                format!("the blob sha256:{} has more than its {} bytes", self.digest, self.size_bytes),
            )
            .hint("the registry gives something else than its manifest says: nothing was kept"));
        }
        let storage = &*self.publication.work.inner.storage;
        write_full(storage, &self.file, bytes, self.received_bytes).map_err(|e| failed("write", &self.path, &e))?;
        self.hash.update(bytes);
        self.received_bytes += bytes.len() as u64;
        Ok(())
    }

    /// Forgets what has arrived.
    ///
    /// # Errors
    /// `io_error`.
    pub fn restart(&mut self) -> Result<()> {
        let inner = &self.publication.work.inner;
        let taken = || {
            Error::new(Code::LockTimeout, format!("another process receives the blob {} too", self.digest))
                .hint("run it again")
        };
        inner.remove_file(&self.path)?;
        // From here on another process may make the name, and have it.
        let file = inner.storage.create_new(&self.path, 0o600).map_err(|e| match e.kind() {
            ErrorKind::AlreadyExists => taken(),
            _ => failed("create", &self.path, &e),
        })?;
        if !inner.storage.try_lock(&file, Sharing::Exclusive).map_err(|e| failed("lock", &self.path, &e))? {
            return Err(taken());
        }
        self.file = file;
        self.hash = Sha256::new();
        self.received_bytes = 0;
        self.continued = false;
        Ok(())
    }

    /// The digest of what has arrived.
    pub fn digest_so_far(&self) -> BlobDigest {
        BlobDigest::from_bytes(self.hash.clone().finalize().into())
    }

    /// Ends the reception of a shard: compares its bytes with the digest and
    /// with its leaf list, which is that of the document, and gives it its
    /// name.
    ///
    /// # Errors
    /// `digest_mismatch`, and what has arrived is forgotten; `io_error`,
    /// `insufficient_disk`, `interrupted`.
    pub fn finish_shard(
        self,
        record: &ShardRecord,
        layout: &ShardLayout,
        leaf_list: &[u8],
        pool: &rayon::ThreadPool,
        progress: &dyn Progress,
    ) -> Result<()> {
        let inner = self.publication.work.inner.clone();
        let found = self.digest_so_far();
        if self.received_bytes != self.size_bytes || found != record.digest {
            inner.remove_file(&self.path)?;
            return Err(mismatch(&record.digest, &found));
        }
        let suspect = Suspect { file: &self.file, layout, leaf_list };
        if let Some(damage) = find_damage(&*inner.storage, &[suspect], pool, &Quiet(progress))? {
            inner.remove_file(&self.path)?;
            return Err(Error::new(
                Code::DigestMismatch,
                format!("the shard {} is not what the entry document says: {}", record.digest, damage.what),
            )
            .hint("whoever published the entry did not build it with weightmill: nothing was kept"));
        }
        // Before the sync, which covers it.
        inner.storage.set_mode(&self.file, BLOB_MODE).map_err(|e| failed("make read-only", &self.path, &e))?;
        inner.storage.sync_file(&self.file).map_err(|e| failed("sync", &self.path, &e))?;
        // Where the name is taken by now, that blob is verified when it is
        // taken into the entry.
        match inner.storage.link(&self.path, &inner.paths.blob(&record.digest)) {
            Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(failed("link", &self.path, &e)),
            _ => {}
        }
        inner.remove_file(&self.path)?;
        // After the names have changed: that moves the change time.
        let metadata = inner.storage.file_metadata(&self.file).map_err(|e| failed("look at", &self.path, &e))?;
        inner.set_verified(record, &self.file, &metadata);
        Ok(())
    }

    fn take_what_is_there(&mut self, progress: &dyn Progress) -> Result<()> {
        let storage = self.publication.work.inner.storage.clone();
        let metadata = storage.file_metadata(&self.file).map_err(|e| failed("look at", &self.path, &e))?;
        let len = metadata.len();
        // A crash while it was made read-only can leave it so, and short: then
        // nothing can be added to it.
        let read_only = metadata.mode() & 0o200 == 0;
        if len > self.size_bytes || (read_only && len < self.size_bytes) {
            return self.restart();
        }
        let mut buffer = vec![0; PIECE_BYTES];
        while self.received_bytes < len {
            if progress.cancelled() {
                return Err(Error::new(Code::Interrupted, "stopped while reading an unfinished download"));
            }
            let want = ((len - self.received_bytes) as usize).min(PIECE_BYTES);
            match read_full(&*storage, &self.file, &mut buffer[..want], self.received_bytes) {
                Ok(read) if read == want => {}
                // What cannot be read is received again.
                _ => return self.restart(),
            }
            self.hash.update(&buffer[..want]);
            self.received_bytes += want as u64;
        }
        self.continued = self.received_bytes > 0;
        Ok(())
    }
}

fn mismatch(expected: &BlobDigest, found: &BlobDigest) -> Error {
    Error::new(Code::DigestMismatch, format!("the blob sha256:{expected} arrived as sha256:{found}"))
        .hint("the registry, a mirror or the network altered it: nothing was kept; try another mirror")
}
