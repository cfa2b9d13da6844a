//! Opening blobs, and shards among them.

use std::fs::{File, Metadata};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;

use super::Inner;
use super::document::ShardRecord;
use super::shard::ShardLayout;
use super::storage::{failed, read_whole};
use super::structure::{digest_from_leaves, malformed};
use super::verify::{Suspect, Verify, find_damage, header_damage};
use crate::digest::{BlobDigest, TensorDigest, sha256};
use crate::error::Result;
use crate::progress::Progress;

/// The largest blob that is read into memory: a document or a leaf list (of a
/// shard of 2 TiB). Larger ones are not what weightmill writes.
const WHOLE_LIMIT_BYTES: u64 = 1 << 32;
/// Leaf lists that are in memory together while shards are verified.
const LEAVES_AT_ONCE_BYTES: u64 = 64 << 20;

/// An open blob that may be trusted as far as its owner and mode go.
#[derive(Debug)]
pub(crate) struct OpenBlob {
    pub(crate) file: File,
    pub(crate) metadata: Metadata,
    pub(crate) path: PathBuf,
}

/// An open shard with the right size and header.
#[derive(Debug)]
pub(crate) struct OpenShard {
    pub(crate) record: ShardRecord,
    pub(crate) layout: ShardLayout,
    /// What the document gives for the layout's tensors.
    pub(crate) digests: Vec<TensorDigest>,
    pub(crate) file: Arc<File>,
    pub(crate) metadata: Metadata,
    pub(crate) path: PathBuf,
}

impl Inner {
    /// Opens a blob: `None` if there is none.
    pub(crate) fn open_blob(&self, digest: &BlobDigest) -> Result<Option<OpenBlob>> {
        let path = self.paths.blob(digest);
        let file = match self.storage.open_read(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            // A symbolic link is not opened at all: say what it is.
            Err(e) => {
                if let Ok(metadata) = self.storage.metadata(&path) {
                    self.trust.check(&path, &metadata)?;
                }
                return Err(failed("open", &path, &e));
            }
        };
        let metadata = self.storage.file_metadata(&file).map_err(|e| failed("look at", &path, &e))?;
        self.trust.check(&path, &metadata)?;
        Ok(Some(OpenBlob { file, metadata, path }))
    }

    /// What is wrong with a small blob's bytes, or the bytes.
    pub(crate) fn sound_bytes(&self, blob: &OpenBlob, digest: &BlobDigest) -> Result<Vec<u8>, String> {
        match read_whole(&*self.storage, &blob.file, WHOLE_LIMIT_BYTES) {
            Err(e) => Err(format!("it cannot be read ({e})")),
            Ok(None) => Err(format!("it has {} bytes, more than {WHOLE_LIMIT_BYTES}", blob.metadata.len())),
            Ok(Some(bytes)) if sha256(&bytes) != *digest.as_bytes() => {
                Err(format!("its {} bytes hash to {}", bytes.len(), BlobDigest::of(&bytes)))
            }
            Ok(Some(bytes)) => Ok(bytes),
        }
    }

    /// Reads a small blob and checks its digest: `None` if there is none.
    ///
    /// # Errors
    /// `corrupt_blob`, once it has been moved aside; `entry_not_trusted`.
    pub(crate) fn read_blob(&self, digest: &BlobDigest, progress: &dyn Progress) -> Result<Option<Vec<u8>>> {
        let Some(blob) = self.open_blob(digest)? else { return Ok(None) };
        match self.sound_bytes(&blob, digest) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(what) => Err(self.condemn(digest, &blob.metadata, &what, progress)),
        }
    }

    /// Opens a shard and compares size and header with its layout: `None` if
    /// it, or its leaf list, is not there.
    ///
    /// # Errors
    /// `corrupt_blob`, once it has been moved aside; `entry_not_trusted`.
    pub(crate) fn open_shard(
        &self,
        record: &ShardRecord,
        layout: ShardLayout,
        digests: Vec<TensorDigest>,
        progress: &dyn Progress,
    ) -> Result<Option<OpenShard>> {
        if !self.has_blob(&record.leaves, record.leaves_size) {
            // Missing, or not what it should be: the second is found here.
            return self.read_blob(&record.leaves, progress).map(|_| None);
        }
        let Some(OpenBlob { file, metadata, path }) = self.open_blob(&record.digest)? else { return Ok(None) };
        let wrong_size = (metadata.len() != record.size)
            .then(|| format!("it has {} bytes, expected {}", metadata.len(), record.size));
        if let Some(what) = wrong_size.or_else(|| header_damage(&*self.storage, &file, &layout)) {
            return Err(self.doubt(&record.digest, &file, &metadata, &what, progress));
        }
        let file = Arc::new(file);
        Ok(Some(OpenShard { record: record.clone(), layout, digests, file, metadata, path }))
    }

    /// Verifies the bytes of open shards as `verify` says: `false` if a leaf
    /// list that is needed for it is not there any more.
    ///
    /// # Errors
    /// `corrupt_blob`, naming what differs, once it has been moved aside;
    /// `interrupted`.
    pub(crate) fn verify_shards(
        &self,
        shards: &[OpenShard],
        verify: Verify,
        pool: &rayon::ThreadPool,
        progress: &dyn Progress,
    ) -> Result<bool> {
        let mut due: &[&OpenShard] = &shards
            .iter()
            .filter(|shard| match verify {
                Verify::Always => true,
                Verify::First => !self.is_verified(&shard.record, &shard.metadata),
                Verify::Never => false,
            })
            .collect::<Vec<_>>();
        while !due.is_empty() {
            let mut leaves_bytes = 0;
            let fits = |shard: &&&OpenShard| {
                leaves_bytes += shard.record.leaves_size;
                leaves_bytes <= LEAVES_AT_ONCE_BYTES
            };
            let (now, later) = due.split_at(due.iter().take_while(fits).count().max(1));
            if !self.verify_some(now, pool, progress)? {
                return Ok(false);
            }
            due = later;
        }
        Ok(true)
    }

    fn verify_some(&self, shards: &[&OpenShard], pool: &rayon::ThreadPool, progress: &dyn Progress) -> Result<bool> {
        let mut lists = Vec::with_capacity(shards.len());
        for shard in shards {
            let Some(list) = self.read_blob(&shard.record.leaves, progress)? else { return Ok(false) };
            shard.check_leaf_list(&list)?;
            lists.push(list);
        }
        let suspects: Vec<Suspect<'_>> = shards
            .iter()
            .zip(&lists)
            .map(|(shard, list)| Suspect { file: &shard.file, layout: &shard.layout, leaf_list: list })
            .collect();
        if let Some(damage) = find_damage(&*self.storage, &suspects, pool, progress)? {
            let shard = shards[damage.shard];
            return Err(self.doubt(&shard.record.digest, &shard.file, &shard.metadata, &damage.what, progress));
        }
        for shard in shards {
            self.set_verified(&shard.record, &shard.file, &shard.metadata);
        }
        Ok(true)
    }
}

impl OpenShard {
    /// Checks that a leaf list gives the tensor digests of the document.
    pub(crate) fn check_leaf_list(&self, list: &[u8]) -> Result<()> {
        if list.len() as u64 != self.layout.leaf_list_bytes() {
            return Err(malformed(format!("the leaf list {} has {} bytes", self.record.leaves, list.len())));
        }
        for (index, (tensor, digest)) in self.layout.tensors().iter().zip(&self.digests).enumerate() {
            if digest_from_leaves(&self.layout, index, list) != Some(*digest) {
                return Err(malformed(format!(
                    "the leaf list {} is not that of '{}'",
                    self.record.leaves, tensor.name
                )));
            }
        }
        Ok(())
    }
}
