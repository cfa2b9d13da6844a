//! Which final tensor goes into which shard.

use super::graph::{Graph, Source};
use crate::error::Result;
use crate::recipe::Resolution;
use crate::store::shard::TENSOR_ALIGNMENT_BYTES;
use crate::tensor::{TensorName, TensorType};

/// A tensor that is wanted, and where its bytes come from.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Final name.
    pub name: TensorName,
    /// What it is.
    pub tensor: TensorType,
    /// What it is made from.
    pub source: Source,
}

/// A shard: part of a block, or all of it.
#[derive(Clone, Debug)]
pub struct ShardPlan {
    /// Position of the block.
    pub block: usize,
    /// Ascending by name.
    pub tensors: Vec<Wanted>,
}

/// The shards of every block, in stream order. A block larger than the
/// layout's limit becomes several; a tensor is never split.
///
/// # Errors
/// Those of [`Graph::locate`].
pub fn arrange(graph: &Graph, resolution: &Resolution) -> Result<Vec<ShardPlan>> {
    let mut shards: Vec<ShardPlan> = Vec::new();
    for (block, described) in resolution.blocks.iter().enumerate() {
        let mut filled = 0_u64;
        for name in &described.tensors {
            let (source, tensor) = graph.locate(&resolution.tensors[name])?;
            let len = tensor.len_bytes();
            let wanted = Wanted { name: name.clone(), tensor, source };
            let grown = filled.next_multiple_of(TENSOR_ALIGNMENT_BYTES).saturating_add(len);
            match shards.last_mut() {
                Some(shard) if shard.block == block && grown <= resolution.layout.max_shard_bytes => {
                    shard.tensors.push(wanted);
                    filled = grown;
                }
                _ => {
                    shards.push(ShardPlan { block, tensors: vec![wanted] });
                    filled = len;
                }
            }
        }
    }
    Ok(shards)
}
