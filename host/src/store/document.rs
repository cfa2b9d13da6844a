//! The entry document: what an entry is, as canonical JSON.
//!
//! It holds nothing that could differ between two hosts that build one key:
//! no time, no engine, no path.

use serde::{Deserialize, Serialize};

use crate::digest::{ActionKey, BlobDigest, BlockKey, ContentDigest, TensorDigest, content_digest};
use crate::tensor::{Dtype, TensorName};

/// The schema's name.
pub const SCHEMA: &str = "weightmill entry v1";
/// The name of the block that holds what no pattern matched; always first.
pub const REST: &str = "rest";

/// An entry's document. Field order is of no account: it is written as
/// canonical JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EntryDocument {
    /// [`SCHEMA`].
    pub schema: String,
    /// The action's key.
    pub key: ActionKey,
    /// Over all tensors and aliases.
    pub content_digest: ContentDigest,
    /// Ascending by name.
    pub tensors: Vec<TensorRecord>,
    /// Ascending by name.
    pub aliases: Vec<AliasRecord>,
    /// In stream order.
    pub blocks: Vec<BlockRecord>,
    /// Shards, in stream order; a block's shards are adjacent.
    pub shards: Vec<ShardRecord>,
}

/// A tensor of an entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorRecord {
    /// Final name.
    pub name: TensorName,
    /// Element type.
    pub dtype: Dtype,
    /// Extents, outermost first.
    pub shape: Vec<u64>,
    /// Two-level digest of its bytes.
    pub digest: TensorDigest,
    /// Position in `shards`.
    pub shard: u32,
    /// First byte in the shard's file.
    pub offset: u64,
}

/// A second name for a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AliasRecord {
    /// The alias.
    pub name: TensorName,
    /// The tensor.
    pub of: TensorName,
}

/// What is streamed as one unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockRecord {
    /// The text that the block's pattern matched, or [`REST`].
    pub name: String,
    /// What determines the block's bytes.
    pub action: BlockKey,
    /// Positions in `shards`, ascending.
    pub shards: Vec<u32>,
}

/// A shard file and its leaf list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardRecord {
    /// SHA-256 of the file.
    pub digest: BlobDigest,
    /// Bytes of the file.
    pub size: u64,
    /// SHA-256 of the leaf list: the raw leaf hashes of the shard's tensors,
    /// in the order of their offsets.
    pub leaves: BlobDigest,
    /// Bytes of the leaf list.
    pub leaves_size: u64,
}

impl EntryDocument {
    /// The content digest that the tables give.
    pub fn compute_content_digest(&self) -> ContentDigest {
        let by_name = |name: &TensorName| self.tensors.binary_search_by(|t| t.name.cmp(name)).map(|i| &self.tensors[i]);
        let mut rows: Vec<(&TensorName, &TensorRecord)> = self.tensors.iter().map(|t| (&t.name, t)).collect();
        for alias in &self.aliases {
            if let Ok(tensor) = by_name(&alias.of) {
                rows.push((&alias.name, tensor));
            }
        }
        rows.sort_by_key(|(name, _)| *name);
        content_digest(rows.into_iter().map(|(name, t)| (name.as_str(), t.dtype, t.shape.as_slice(), t.digest)))
    }
}
