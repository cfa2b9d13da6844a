//! Known blocks: which shards a block action gave.
//!
//! The record is weak. It is written by every publication for all blocks of
//! its entry, and whoever takes a block from it opens, checks and verifies the
//! shards first; see [`Publication::reuse_block`](super::Publication).

use serde::{Deserialize, Serialize};

use super::document::{EntryDocument, ShardRecord};
use super::provenance::BuiltWith;
use super::records::Kind;
use super::shard::ShardLayout;
use super::structure::{Row, shard_layout};
use super::{Inner, Store};
use crate::digest::{BlobDigest, BlockKey, TensorDigest};
use crate::error::Result;
use crate::tensor::{Dtype, TensorName};

/// A block whose shards are in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredBlock {
    /// What determines its bytes.
    pub key: BlockKey,
    /// Its shards, in stream order.
    pub shards: Vec<StoredShard>,
    /// The engines that had a part in it; `None` if that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engines: Option<Vec<BuiltWith>>,
}

/// A shard of a known block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredShard {
    /// The shard as entry documents list it.
    pub record: ShardRecord,
    /// Its tensors, ascending by name.
    pub tensors: Vec<StoredTensor>,
}

/// A tensor of a known block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredTensor {
    /// Final name.
    pub name: TensorName,
    /// Element type.
    pub dtype: Dtype,
    /// Extents, outermost first.
    pub shape: Vec<u64>,
    /// Two-level digest of its bytes.
    pub digest: TensorDigest,
    /// First byte in the shard's file.
    pub offset: u64,
}

impl StoredShard {
    /// Its layout.
    ///
    /// # Errors
    /// `corrupt_blob` if its tables contradict each other.
    pub fn layout(&self) -> Result<ShardLayout> {
        shard_layout(
            &self.record,
            self.tensors.iter().map(|t| Row { name: &t.name, dtype: t.dtype, shape: &t.shape, offset: t.offset }),
        )
    }
}

impl Store {
    /// A block that was built before, if its record is whole and all its
    /// blobs exist with the right sizes. Nothing keeps it there: take it with
    /// [`Publication::reuse_block`](super::Publication::reuse_block).
    pub fn block(&self, key: &BlockKey) -> Option<StoredBlock> {
        let block: StoredBlock = self.0.read_record(&self.0.paths.block(key), Kind::Block)?;
        let whole = block.key == *key
            && block.shards.iter().all(|shard| {
                shard.layout().is_ok()
                    && self.0.has_blob(&shard.record.digest, shard.record.size)
                    && self.0.has_blob(&shard.record.leaves, shard.record.leaves_size)
            });
        whole.then_some(block)
    }
}

impl Inner {
    /// Whether a blob exists, may be trusted, and has this size.
    pub(crate) fn has_blob(&self, digest: &BlobDigest, size_bytes: u64) -> bool {
        let path = self.paths.blob(digest);
        self.storage.metadata(&path).is_ok_and(|m| m.len() == size_bytes && self.trust.check(&path, &m).is_ok())
    }

    /// Writes the records of an entry's blocks, each with the engines that
    /// had a part in it.
    pub(crate) fn put_blocks(
        &self,
        document: &EntryDocument,
        engines: impl Fn(&BlockKey) -> Option<Vec<BuiltWith>>,
    ) -> Result<()> {
        for mut block in blocks_of(document) {
            block.engines = engines(&block.key);
            self.write_record(&self.paths.block(&block.key), Kind::Block, &block)?;
        }
        Ok(())
    }

    /// Whether a block's record is not whole, or one of its blobs is gone.
    pub(crate) fn is_stale_block(&self, key: &BlockKey) -> bool {
        let record: Option<StoredBlock> = self.read_record(&self.paths.block(key), Kind::Block);
        record.is_none_or(|block| {
            block.shards.iter().any(|s| {
                !self.has_blob(&s.record.digest, s.record.size)
                    || !self.has_blob(&s.record.leaves, s.record.leaves_size)
            })
        })
    }
}

/// An entry's blocks, each with the tensors of its shards.
fn blocks_of(document: &EntryDocument) -> Vec<StoredBlock> {
    let mut shards: Vec<StoredShard> =
        document.shards.iter().map(|record| StoredShard { record: record.clone(), tensors: Vec::new() }).collect();
    for tensor in &document.tensors {
        if let Some(shard) = shards.get_mut(tensor.shard as usize) {
            shard.tensors.push(StoredTensor {
                name: tensor.name.clone(),
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                digest: tensor.digest,
                offset: tensor.offset,
            });
        }
    }
    let of_block = |indices: &[u32]| indices.iter().filter_map(|i| shards.get(*i as usize).cloned()).collect();
    document.blocks.iter().map(|b| StoredBlock { key: b.action, shards: of_block(&b.shards), engines: None }).collect()
}
