//! From results to blocks that can be streamed.
//!
//! A block's segments are the data regions of its shards, whichever of the
//! three places they are in: files of a leased entry, shards in memory, or
//! nowhere yet, computed while they are packed into the staging buffers.

use std::sync::Arc;

use rayon::prelude::*;

use crate::error::{Code, Error, Result};
use crate::execute::build::{Entry, MemoryEntry};
use crate::execute::{Graph, Packer, ShardPlan, Wanted};
use crate::offload::{BlockSpec, Content, LeafHashes, Pack, PlacedTensor, SEGMENT_ALIGN, Segment};
use crate::progress::Progress;
use crate::recipe::Resolution;
use crate::store::document::EntryDocument;
use crate::store::{Lease, ShardLayout};

/// The blocks of a result. `leaf_hashes` says whether they get the hashes that
/// verification on the device needs; reading those costs a start-up some
/// milliseconds a gigabyte.
///
/// # Errors
/// What opening the leaf lists says.
pub fn blocks_of_entry(entry: &Entry, leaf_hashes: bool, progress: &dyn Progress) -> Result<Vec<BlockSpec>> {
    match entry {
        Entry::Stored(lease) => blocks_of_lease(lease, leaf_hashes, progress),
        Entry::Memory(entry) => blocks_of_memory(entry),
    }
}

/// The blocks of a leased entry, with or without leaf hashes. The lease must
/// outlive what streams them.
///
/// # Errors
/// `corrupt_blob` if a leaf list is not what its digest says.
pub fn blocks_of_lease(lease: &Lease, leaf_hashes: bool, progress: &dyn Progress) -> Result<Vec<BlockSpec>> {
    let layouts: Vec<&ShardLayout> = (0..lease.shards()).map(|shard| lease.shard_layout(shard)).collect();
    let leaves: Vec<Option<Arc<[u8]>>> = match leaf_hashes {
        true => (0..lease.shards())
            .into_par_iter()
            .map(|s| Ok(Some(lease.leaf_list(s, progress)?.into())))
            .collect::<Result<_>>()?,
        false => vec![None; lease.shards()],
    };
    let contents = (0..lease.shards()).map(|shard| Content::File {
        file: lease.shard_file(shard).clone(),
        path: lease.shard_path(shard).to_path_buf(),
        offset: lease.shard_layout(shard).data_start(),
    });
    specs(&blocks_of_document(lease.document()), &layouts, contents.collect(), &leaves)
}

fn blocks_of_memory(entry: &MemoryEntry) -> Result<Vec<BlockSpec>> {
    let layouts = entry.document.layouts()?;
    let leaves: Vec<Option<Arc<[u8]>>> = entry.shards.iter().map(|s| Some(s.leaves.as_slice().into())).collect();
    let contents = entry.shards.iter().zip(&layouts).map(|(shard, layout)| {
        let data = InMemory { file: shard.bytes.clone(), start: layout.data_start() };
        Content::Packed(Arc::new(data) as Arc<dyn Pack>)
    });
    let contents = contents.collect();
    specs(&blocks_of_document(&entry.document), &layouts.iter().collect::<Vec<_>>(), contents, &leaves)
}

/// The blocks of a graph whose tensors have been prepared: computed while they
/// are streamed, without a store and without leaf hashes.
///
/// # Errors
/// `recipe_invalid` if a shard's header would be too long.
pub fn blocks_of_graph(graph: &Arc<Graph>, resolution: &Resolution, shards: &[ShardPlan]) -> Result<Vec<BlockSpec>> {
    let layout = |shard: &ShardPlan| ShardLayout::new(shard.tensors.iter().map(|w| (w.name.clone(), w.tensor.clone())));
    let layouts = shards.iter().map(layout).collect::<Result<Vec<_>>>()?;
    let contents = shards.iter().zip(&layouts).map(|(shard, layout)| {
        let placed = |(w, t): (&Wanted, &crate::store::PlacedTensor)| (t.offset - layout.data_start(), w.clone());
        let tensors = shard.tensors.iter().zip(layout.tensors()).map(placed).collect();
        Content::Packed(Arc::new(OnTheFly(Packer::new(graph.clone(), tensors))) as Arc<dyn Pack>)
    });
    let blocks: Vec<(String, Vec<usize>)> = resolution
        .blocks
        .iter()
        .enumerate()
        .map(|(position, block)| {
            (block.name.clone(), (0..shards.len()).filter(|&s| shards[s].block == position).collect())
        })
        .collect();
    specs(&blocks, &layouts.iter().collect::<Vec<_>>(), contents.collect(), &vec![None; shards.len()])
}

fn blocks_of_document(document: &EntryDocument) -> Vec<(String, Vec<usize>)> {
    document.blocks.iter().map(|b| (b.name.clone(), b.shards.iter().map(|&s| s as usize).collect())).collect()
}

/// Puts blocks together from their shards.
fn specs(
    blocks: &[(String, Vec<usize>)],
    layouts: &[&ShardLayout],
    contents: Vec<Content>,
    leaves: &[Option<Arc<[u8]>>],
) -> Result<Vec<BlockSpec>> {
    blocks
        .iter()
        .map(|(name, shards)| {
            let mut spec = BlockSpec { name: name.clone(), segments: Vec::new(), tensors: Vec::new() };
            let mut start = 0_u64;
            for &shard in shards {
                let layout = layouts[shard];
                start = start.next_multiple_of(SEGMENT_ALIGN);
                for tensor in layout.tensors() {
                    let leaf_hashes = leaves[shard].as_ref().map(|list| leaf_hashes(list, tensor)).transpose()?;
                    spec.tensors.push(PlacedTensor {
                        name: tensor.name.clone(),
                        ty: tensor.ty.clone(),
                        offset: start + tensor.offset - layout.data_start(),
                        leaf_hashes,
                    });
                }
                let len = layout.size_bytes() - layout.data_start();
                spec.segments.push(Segment { content: contents[shard].clone(), len });
                start += len;
            }
            Ok(spec)
        })
        .collect()
}

fn leaf_hashes(list: &Arc<[u8]>, tensor: &crate::store::PlacedTensor) -> Result<LeafHashes> {
    let hash = crate::digest::HASH_BYTES as u64;
    let first = tensor.first_leaf * hash;
    let end = first + crate::digest::leaf_count(tensor.ty.len_bytes()) * hash;
    LeafHashes::new(list.clone(), first as usize..end as usize)
        .ok_or_else(|| Error::new(Code::CorruptBlob, format!("the leaf list ends before tensor {}", tensor.name)))
}

struct InMemory {
    file: Arc<Vec<u8>>,
    /// Where the data begins.
    start: u64,
}

impl Pack for InMemory {
    fn pack(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        // In range: segments have the length of their data.
        let from = (self.start + offset) as usize;
        out.copy_from_slice(&self.file[from..from + out.len()]);
        Ok(())
    }
}

struct OnTheFly(Packer);

impl Pack for OnTheFly {
    fn pack(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.0.fill(offset, out)
    }
}
