//! A result in memory: the same bytes as in the store.

use std::sync::Arc;

use super::{BuildOptions, Done, check_sources, plan};
use crate::digest::{BlobDigest, LeafHasher, leaf_count};
use crate::error::{Code, Error, Result};
use crate::execute::arrange::{ShardPlan, arrange};
use crate::execute::lanes;
use crate::execute::outline::Outline;
use crate::execute::produce::{Sink, Workshop};
use crate::execute::spill::SpillRoom;
use crate::plan::action::Action;
use crate::store::ShardLayout;
use crate::store::document::{EntryDocument, ShardRecord, TensorRecord};

/// An entry that is in memory only.
pub struct MemoryEntry {
    /// What it is: the same document that the store would hold.
    pub document: EntryDocument,
    /// One for each shard.
    pub shards: Vec<MemoryShard>,
}

/// A shard's file and leaf list.
pub struct MemoryShard {
    /// The file, header included. Shared, so that streaming it copies nothing.
    pub bytes: Arc<Vec<u8>>,
    /// The raw leaf hashes of its tensors, in the order of their offsets.
    pub leaves: Vec<u8>,
}

/// Makes the entry within the memory budget.
pub(super) fn make(
    outline: &Outline<'_>,
    action: &Action,
    options: &BuildOptions<'_>,
    done: &mut Done,
) -> Result<MemoryEntry> {
    let graph = plan(outline, done)?;
    let shards = arrange(&graph, &outline.resolution)?;
    let layouts = shards.iter().map(layout_of).collect::<Result<Vec<_>>>()?;
    let total: u64 = layouts.iter().map(ShardLayout::size_bytes).sum();
    if total > options.memory_budget_bytes {
        return Err(Error::new(
            Code::InsufficientMemory,
            format!("the result has {total} bytes, more than the memory budget of {}", options.memory_budget_bytes),
        )
        .hint("raise --memory-budget, or make the store work: --mode required says what is wrong with it"));
    }
    let room = SpillRoom::memory_only(options.memory_budget_bytes - total);
    let count = options.pool.current_num_threads().min(shards.len());
    let workshop = Workshop::new(&graph, options.pool, count, &room, options.progress);
    shards.iter().flat_map(|s| &s.tensors).for_each(|w| graph.retain(w.source));
    options.progress.stage("transform", shards.iter().flat_map(|s| &s.tensors).map(|w| w.tensor.len_bytes()).sum());
    let made = lanes::run(shards.len(), count, |position, give_up| {
        fill(&workshop, &shards[position], &layouts[position], position, give_up)
    })?;
    check_sources(outline)?;
    done.source_bytes_read += graph.source_bytes_read();
    done.fuel += graph.fuel();
    done.bytes_hashed += 2 * total;
    let mut tensors = Vec::new();
    let mut records = Vec::new();
    let mut kept = Vec::new();
    for (shard, placed) in made {
        records.push(ShardRecord {
            digest: BlobDigest::of(&shard.bytes),
            size: shard.bytes.len() as u64,
            leaves: BlobDigest::of(&shard.leaves),
            leaves_size: shard.leaves.len() as u64,
        });
        tensors.extend(placed);
        kept.push(shard);
    }
    let document = super::publish::document(outline, action, &shards, tensors, records);
    Ok(MemoryEntry { document, shards: kept })
}

/// The layout of a planned shard.
pub(super) fn layout_of(shard: &ShardPlan) -> Result<ShardLayout> {
    ShardLayout::new(shard.tensors.iter().map(|w| (w.name.clone(), w.tensor.clone())))
}

struct InMemory<'a> {
    to: &'a mut [u8],
    filled: usize,
    hasher: LeafHasher,
}

impl Sink for InMemory<'_> {
    fn piece(&mut self, bytes: &[u8], leaves: Option<&[u8]>) -> Result<()> {
        self.to[self.filled..self.filled + bytes.len()].copy_from_slice(bytes);
        self.filled += bytes.len();
        if leaves.and_then(|leaves| self.hasher.append_leaves(bytes.len() as u64, leaves)).is_none() {
            self.hasher.update(bytes);
        }
        Ok(())
    }
}

fn fill(
    workshop: &Workshop<'_>,
    shard: &ShardPlan,
    layout: &ShardLayout,
    position: usize,
    give_up: &dyn Fn() -> bool,
) -> Result<(MemoryShard, Vec<TensorRecord>)> {
    // The total is within the budget, so each size is in range.
    let mut bytes = vec![0; layout.size_bytes() as usize];
    bytes[..layout.header().len()].copy_from_slice(layout.header());
    let mut leaves = Vec::new();
    let mut tensors = Vec::new();
    for (wanted, placed) in shard.tensors.iter().zip(layout.tensors()) {
        if give_up() {
            return Err(crate::execute::interrupted());
        }
        let to = &mut bytes[placed.offset as usize..placed.end() as usize];
        let mut sink = InMemory { to, filled: 0, hasher: LeafHasher::default() };
        workshop.make(wanted.source, wanted.tensor.len_bytes(), &mut sink)?;
        workshop.graph.release(wanted.source);
        let (digest, hashes) = sink.hasher.finish();
        debug_assert_eq!(hashes.len() as u64, 32 * leaf_count(wanted.tensor.len_bytes()));
        leaves.extend_from_slice(&hashes);
        tensors.push(TensorRecord {
            name: wanted.name.clone(),
            dtype: wanted.tensor.dtype(),
            shape: wanted.tensor.shape().to_vec(),
            digest,
            // In range: the number of shards is at most that of tensors.
            shard: position as u32,
            offset: placed.offset,
        });
    }
    Ok((MemoryShard { bytes: Arc::new(bytes), leaves }, tensors))
}
