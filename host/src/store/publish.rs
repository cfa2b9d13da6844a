//! The publish protocol: how an entry comes to be there whole, or not at all.
//!
//! What is believed of the filesystem (ext4, XFS, btrfs, tmpfs; POSIX where it
//! says anything):
//! - After `fsync(file)` returns, the file's bytes, size and mode survive a
//!   crash. Its *names* need not: a name is data of the folder, and POSIX lets
//!   the two reach the disk in any order.
//! - After `fsync(folder)` returns, the names in it survive. Without it, each
//!   link, rename and unlink since is kept or lost on its own.
//! - `rename` is atomic for whoever looks: a name is the old file or the new
//!   one, also after a crash. It does not wait for the new file's bytes (ext4
//!   does that in one special case, which is not relied on), so these are
//!   synced first.
//! - `link` fails if the name exists, so it never replaces a blob that others
//!   have mapped.
//! - After an `fsync` that failed, the bytes may be lost even if a later one
//!   succeeds: the kernel marks pages clean that it could not write. So a failed
//!   sync ends the publication, and its files are never synced again, but
//!   removed.
//!
//! The order, with what a crash *after* each step leaves:
//!
//! | step | what | a crash after it leaves |
//! | --- | --- | --- |
//! | 1 | shard and leaf list files in `tmp/`: written, mode 0444, synced, each when its writer finishes | stale work |
//! | 2 | the entry document likewise | stale work |
//! | 3 | every file linked into `blobs/` without replacing; where the name exists, that file is verified and ours dropped | stale work, some blobs that nothing reaches |
//! | 4 | `blobs/` synced: now all names of this entry's blobs are on the disk, those that another process made included | the same |
//! | 5 | action and provenance: temporary, synced, renamed, folder synced | the same, and an action without an entry |
//! | 6 | the work folder removed | blobs that nothing reaches |
//! | 7 | the entry record `entries/.<key>.new`: written, synced | the same, and a file that the next builder removes |
//! | 8 | renamed to `entries/<key>`: **the commit point** | the old state or the whole entry: everything that it reaches was on the disk before |
//! | 9 | `entries/` synced | the whole entry, certainly |
//! | 10 | block records (weak) | the same |
//!
//! Everything that a crash can leave besides is removed by the next builder of
//! the key (it holds the build lock, so no live builder is robbed), or by gc
//! (alone in the store).
//!
//! A blob's name is only made in steps 3, after its bytes are synced (step 1
//! and 2). So whoever finds a name in `blobs/` knows that the bytes behind it
//! are on the disk, and syncing the folder in step 4 is enough to rely on blobs
//! that another process linked a moment ago and has not synced yet.
//!
//! The name of a blob that was found is verified before it is relied on, as
//! for a lease (once a boot): it may have rotted since it was written. A corrupt
//! one is moved aside, and the link is tried again.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::PoisonError;

use super::blobs::OpenShard;
use super::document::{EntryDocument, ShardRecord};
use super::lease::EntryRecord;
use super::provenance;
use super::publication::{Finished, Publication};
use super::storage::{failed, write_full};
use super::structure::malformed;
use super::verify::Verify;
use super::{Durability, Inner};
use crate::canonical::to_canonical;
use crate::digest::{ActionKey, BlobDigest, TensorDigest};
use crate::error::{Code, Error, Result};
use crate::progress::Progress;
use crate::tensor::TensorName;

/// How often a link is tried again after a corrupt blob was moved aside.
const LINK_TRIES: u32 = 4;

/// What a commit did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// The SHA-256 of the entry document.
    pub document_digest: BlobDigest,
    /// Shards that were written and are new in the store.
    pub shards_new: usize,
    /// Shards that were written, but were in the store already.
    pub shards_deduplicated: usize,
    /// Shards of blocks that were taken from the store, not computed.
    pub shards_reused: usize,
    /// Bytes of the new shards.
    pub bytes_new: u64,
    /// Bytes of this entry's other shards: it shares them.
    pub bytes_deduplicated: u64,
}

/// Whether a link made a blob, or found one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Linked {
    New,
    Found,
}

/// A shard's tensors as its writer, or its block's record, gives them.
type Rows<'a> = Vec<(&'a TensorName, TensorDigest, u64)>;

impl Publication {
    /// Publishes the entry that `document` describes, of shards that were
    /// finished and blocks that were reused here. `built_by` says who built it
    /// and how; it is kept beside and never hashed. Its member `lineage`, which
    /// may be long, becomes a file of its own, of which it keeps the digest;
    /// and if it says `engine` and `engine_version`, a member `engines` is added
    /// for these and for what made the reused blocks.
    ///
    /// # Errors
    /// `identity_collision` if the key has an entry of other content, which
    /// stays; `insufficient_disk`, `io_error`, `corrupt_blob`,
    /// `entry_not_trusted`, `interrupted`. Then nothing is published.
    pub fn commit(
        self,
        document: EntryDocument,
        built_by: &serde_json::Value,
        pool: &rayon::ThreadPool,
        progress: &dyn Progress,
    ) -> Result<Published> {
        self.commit_as(document, built_by, true, pool, progress)
    }

    /// [`commit`](Self::commit) for an entry that was received. Its blocks are
    /// offered to other builds only if somebody whom the user trusts `vouched`
    /// for the whole document: which block an action stands for is said by the
    /// document alone.
    ///
    /// # Errors
    /// Those of `commit`.
    pub fn commit_received(
        self,
        document: EntryDocument,
        built_by: &serde_json::Value,
        vouched: bool,
        pool: &rayon::ThreadPool,
        progress: &dyn Progress,
    ) -> Result<Published> {
        self.commit_as(document, built_by, vouched, pool, progress)
    }

    fn commit_as(
        self,
        document: EntryDocument,
        built_by: &serde_json::Value,
        offer_blocks: bool,
        pool: &rayon::ThreadPool,
        progress: &dyn Progress,
    ) -> Result<Published> {
        let inner = self.work.inner.clone();
        let finished = self.work.take_finished();
        self.check(&document, &finished)?;
        let bytes = to_canonical(&document)?;
        let record = EntryRecord { digest: BlobDigest::of(&bytes), size_bytes: bytes.len() as u64 };
        inner.refuse_collision(&self.key, &record, &document, progress)?;

        // Step 2. Step 1 was done by the writers.
        let document_path = self.work.write("document", &bytes)?;

        // Step 3.
        let mut published = Published::of(&document, record.digest);
        for shard in &finished {
            let linked = inner.link_shard(shard, pool, progress)?;
            published.count(linked, shard.shard.record.size);
        }
        inner.link_small(&document_path, &record.digest, progress)?;
        self.check_reused()?;

        // Step 4.
        inner.sync_dir(&inner.paths.blobs())?;

        // Step 5.
        inner.replace(&inner.paths.action(&self.key), &self.action, 0o644, Durability::Synced)?;
        let own = provenance::own(built_by);
        let reused = std::mem::take(&mut *self.reused_blocks.lock().unwrap_or_else(PoisonError::into_inner));
        inner.put_provenance(&self.key, provenance::with_all_engines(built_by, own.as_deref(), reused.values()))?;

        // Step 6.
        self.work.remove()?;

        // Steps 7 to 9.
        inner.put_entry(&self.key, &record)?;

        // Step 10. Without them the blocks are computed again.
        if offer_blocks {
            let _ = inner.put_blocks(&document, |block| reused.get(block).cloned().unwrap_or_else(|| own.clone()));
        }
        Ok(published)
    }

    /// Checks that the document holds together, and that it says of every
    /// shard what was written or reused here.
    fn check(&self, document: &EntryDocument, finished: &[Finished]) -> Result<()> {
        if document.key != self.key {
            return Err(malformed(format!("it is of the key {}, not {}", document.key, self.key)));
        }
        document.layouts()?;
        let reused = self.reused.lock().unwrap_or_else(PoisonError::into_inner);
        let mut known: BTreeMap<BlobDigest, (&ShardRecord, Rows<'_>)> = BTreeMap::new();
        for Finished { shard, .. } in finished {
            let rows = shard.tensors.iter().map(|t| (&t.name, t.digest, t.offset)).collect();
            known.insert(shard.record.digest, (&shard.record, rows));
        }
        for (digest, (shard, tensors)) in &*reused {
            known.insert(*digest, (&shard.record, tensors.iter().map(|t| (&t.name, t.digest, t.offset)).collect()));
        }
        for (index, record) in document.shards.iter().enumerate() {
            let of_shard = document.tensors.iter().filter(|t| t.shard as usize == index);
            let rows: Rows<'_> = of_shard.map(|t| (&t.name, t.digest, t.offset)).collect();
            if known.get(&record.digest) != Some(&(record, rows)) {
                return Err(malformed(format!("the shard {} was not written as it says", record.digest)));
            }
        }
        Ok(())
    }

    /// Checks that nobody has moved a reused blob aside in the meantime.
    fn check_reused(&self) -> Result<()> {
        let inner = &self.work.inner;
        let reused = self.reused.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = reused.values().map(|(shard, _)| &shard.record).find(|record| {
            !inner.has_blob(&record.digest, record.size) || !inner.has_blob(&record.leaves, record.leaves_size)
        });
        gone.map_or(Ok(()), |record| {
            Err(Error::new(
                Code::CorruptBlob,
                format!("the reused shard {} was moved aside during the build", record.digest),
            )
            .hint("run it again: its block will be computed"))
        })
    }
}

impl Published {
    /// With all shards counted as reused.
    fn of(document: &EntryDocument, document_digest: BlobDigest) -> Self {
        Published {
            document_digest,
            shards_new: 0,
            shards_deduplicated: 0,
            shards_reused: document.shards.len(),
            bytes_new: 0,
            bytes_deduplicated: document.shards.iter().map(|s| s.size).sum(),
        }
    }

    fn count(&mut self, linked: Linked, size_bytes: u64) {
        self.shards_reused = self.shards_reused.saturating_sub(1);
        match linked {
            Linked::Found => self.shards_deduplicated += 1,
            Linked::New => {
                self.shards_new += 1;
                self.bytes_new += size_bytes;
                self.bytes_deduplicated = self.bytes_deduplicated.saturating_sub(size_bytes);
            }
        }
    }
}

impl Inner {
    /// Refuses to give a key other content than it has. The build lock is
    /// held, so the record does not change before the rename.
    fn refuse_collision(
        &self,
        key: &ActionKey,
        new: &EntryRecord,
        document: &EntryDocument,
        progress: &dyn Progress,
    ) -> Result<()> {
        let Some(old) = self.entry_record(key)?.filter(|old| old != new) else { return Ok(()) };
        let content = match self.document(key, &old, progress) {
            Ok(Some((old, _))) => format!("content {}", old.content_digest),
            _ => "its content is not readable".to_owned(),
        };
        Err(Error::new(
            Code::IdentityCollision,
            format!(
                "the key {key} has an entry already, of document {} ({content}); this build gave document {} (content {})",
                old.digest, new.digest, document.content_digest
            ),
        )
        .hint("one of the two builds was wrong, or the transform is not deterministic: nothing was replaced; compare them, then remove the entry with `weightmill store rm` to build it anew"))
    }

    /// Links a file into `blobs/`. Where the name exists, `accept` says
    /// whether that blob is good, after moving it aside if it is not.
    fn link_blob(&self, path: &Path, digest: &BlobDigest, accept: impl Fn() -> Result<bool>) -> Result<Linked> {
        let name = self.paths.blob(digest);
        for _ in 0..LINK_TRIES {
            match self.storage.link(path, &name) {
                Ok(()) => return Ok(Linked::New),
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => return Err(failed("link", &name, &e)),
            }
            match accept() {
                Ok(true) => return Ok(Linked::Found),
                Ok(false) => {}
                // It was moved aside, unless that failed: then the name is
                // still taken, and the next round ends the same way.
                Err(e) if e.code() == Code::CorruptBlob => {}
                Err(e) => return Err(e),
            }
        }
        Err(Error::new(Code::CorruptBlob, format!("the blob {digest} is corrupt and cannot be replaced"))
            .hint("let the owner of the store run `weightmill store doctor --fix`"))
    }

    /// Links a file that is small enough to be read again.
    pub(crate) fn link_small(&self, path: &Path, digest: &BlobDigest, progress: &dyn Progress) -> Result<Linked> {
        self.link_blob(path, digest, || self.read_blob(digest, progress).map(|found| found.is_some()))
    }

    fn link_shard(&self, shard: &Finished, pool: &rayon::ThreadPool, progress: &dyn Progress) -> Result<Linked> {
        let record = &shard.shard.record;
        // The leaf list goes first: with it the shard that is found can be
        // verified.
        self.link_small(&shard.leaves_path, &record.leaves, progress)?;
        self.link_blob(&shard.path, &record.digest, || {
            let digests = shard.shard.tensors.iter().map(|t| t.digest).collect();
            let found: Option<OpenShard> = self.open_shard(record, shard.layout.clone(), digests, progress)?;
            found.map_or(Ok(false), |found| self.verify_shards(&[found], Verify::First, pool, progress))
        })
    }

    fn put_provenance(&self, key: &ActionKey, mut provenance: serde_json::Value) -> Result<()> {
        let dir = self.paths.provenance(key);
        match self.storage.create_dir(&dir) {
            Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(failed("create the folder", &dir, &e)),
            _ => self.sync_dir(&self.paths.provenances())?,
        }
        if let Some(lineage) = provenance.get_mut("lineage").filter(|lineage| lineage.is_object()) {
            let bytes = serde_json::to_vec(lineage).map_err(|e| Error::io("writing the lineage", e))?;
            let digest = BlobDigest::of(&bytes);
            self.replace(&self.paths.lineage(key, &digest), &bytes, 0o644, Durability::Synced)?;
            *lineage = digest.to_string().into();
        }
        let bytes = serde_json::to_vec_pretty(&provenance).map_err(|e| Error::io("writing the provenance", e))?;
        let name = format!("{}.json", BlobDigest::of(&bytes));
        self.replace(&dir.join(name), &bytes, 0o644, Durability::Synced)
    }

    fn put_entry(&self, key: &ActionKey, record: &EntryRecord) -> Result<()> {
        let (new, entry) = (self.paths.new_entry(key), self.paths.entry(key));
        let bytes = record.to_bytes()?;
        let file = self.storage.create_new(&new, 0o644).map_err(|e| failed("create", &new, &e))?;
        write_full(&*self.storage, &file, &bytes, 0)
            .and_then(|()| self.storage.sync_file(&file))
            .and_then(|()| self.storage.rename(&new, &entry))
            .map_err(|e| {
                let _ = self.storage.unlink(&new);
                failed("write", &entry, &e)
            })?;
        self.sync_dir(&self.paths.entries())
    }
}
