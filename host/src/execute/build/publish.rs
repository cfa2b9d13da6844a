//! Making an entry in the store: known blocks are taken, the others made.

use super::memory::layout_of;
use super::{BuildOptions, Done, check_sources, plan};
use crate::digest::ContentDigest;
use crate::error::Result;
use crate::execute::arrange::{ShardPlan, arrange};
use crate::execute::lanes;
use crate::execute::outline::Outline;
use crate::execute::produce::{Sink, Workshop, interrupted};
use crate::execute::spill::SpillRoom;
use crate::lineage;
use crate::plan::action::Action;
use crate::store::document::{AliasRecord, BlockRecord, EntryDocument, SCHEMA, ShardRecord, TensorRecord};
use crate::store::{FinishedShard, Publication, ShardWriter, Store, StoredBlock};

/// Makes what is missing and commits the entry.
pub(super) fn publish(
    outline: &Outline<'_>,
    store: &Store,
    action: &Action,
    publication: Publication,
    options: &BuildOptions<'_>,
    done: &mut Done,
) -> Result<()> {
    let graph = plan(outline, done)?;
    let shards = arrange(&graph, &outline.resolution)?;
    let known = known_blocks(store, action, &publication, options)?;
    let missing: Vec<usize> = (0..shards.len()).filter(|&s| known[shards[s].block].is_none()).collect();
    let layouts = missing.iter().map(|&s| layout_of(&shards[s])).collect::<Result<Vec<_>>>()?;
    let to_write: u64 = layouts.iter().map(|l| l.size_bytes() + l.leaf_list_bytes()).sum();
    publication.reserve(to_write)?;

    let made = done.timed("transform", |done| {
        let publication = &publication;
        let room = SpillRoom::new(options.memory_budget_bytes, || publication.scratch_file());
        let count = options.pool.current_num_threads().min(missing.len());
        let workshop = Workshop::new(&graph, options.pool, count, &room, options.progress);
        let wanted = || missing.iter().flat_map(|&s| &shards[s].tensors);
        wanted().for_each(|w| graph.retain(w.source));
        options.progress.stage("transform", wanted().map(|w| w.tensor.len_bytes()).sum());
        let made = lanes::run(missing.len(), count, |position, give_up| {
            let writer = publication.create_shard(&layouts[position])?;
            write_shard(&workshop, &shards[missing[position]], writer, give_up)
        })?;
        check_sources(outline)?;
        done.source_bytes_read += graph.source_bytes_read();
        done.fuel += graph.fuel();
        Ok(made)
    })?;
    done.bytes_hashed += 2 * to_write;
    done.bytes_written += to_write;
    done.blocks_reused = known.iter().flatten().count();

    let (records, tensors) = tables(&shards, &known, made);
    let document = document(outline, action, &shards, tensors, records);
    let mut provenance = (options.provenance)()?;
    if let Some(fields) = provenance.as_object_mut() {
        fields.insert("fuel".into(), done.fuel.into());
        fields.insert("blocks_reused".into(), done.blocks_reused.into());
        fields.insert("lineage".into(), lineage::record(&outline.resolution, action, &outline.modules)?);
    }
    let published =
        done.timed("publish", |_| publication.commit(document, &provenance, options.pool, options.progress))?;
    done.bytes_deduplicated = published.bytes_deduplicated;
    Ok(())
}

/// The blocks that are in the store already and can be had, by position.
fn known_blocks(
    store: &Store,
    action: &Action,
    publication: &Publication,
    options: &BuildOptions<'_>,
) -> Result<Vec<Option<StoredBlock>>> {
    let take = |key| match store.block(key) {
        Some(block) => Ok(publication.reuse_block(&block, options.pool, options.progress)?.then_some(block)),
        None => Ok(None),
    };
    action.blocks.iter().map(take).collect()
}

struct ToShard<'a> {
    writer: &'a mut ShardWriter,
    tensor: usize,
}

impl Sink for ToShard<'_> {
    fn piece(&mut self, bytes: &[u8], leaves: Option<&[u8]>) -> Result<()> {
        self.writer.tensor(self.tensor, bytes, leaves)
    }

    fn works(&self) -> bool {
        true
    }
}

fn write_shard(
    workshop: &Workshop<'_>,
    shard: &ShardPlan,
    mut writer: ShardWriter,
    give_up: &dyn Fn() -> bool,
) -> Result<FinishedShard> {
    for (tensor, wanted) in shard.tensors.iter().enumerate() {
        if give_up() {
            return Err(interrupted());
        }
        workshop.make(wanted.source, wanted.tensor.len_bytes(), &mut ToShard { writer: &mut writer, tensor })?;
        workshop.graph.release(wanted.source);
    }
    writer.finish()
}

/// The shard and tensor tables of the document, from what was taken and made.
fn tables(
    shards: &[ShardPlan],
    known: &[Option<StoredBlock>],
    made: Vec<FinishedShard>,
) -> (Vec<ShardRecord>, Vec<TensorRecord>) {
    let mut made = made.into_iter();
    let mut records = Vec::new();
    let mut tensors = Vec::new();
    let mut in_block = 0;
    for (position, shard) in shards.iter().enumerate() {
        in_block = if position > 0 && shards[position - 1].block == shard.block { in_block + 1 } else { 0 };
        let stored = known[shard.block].as_ref().and_then(|block| block.shards.get(in_block));
        let (record, digests) = match stored {
            Some(stored) => (stored.record.clone(), stored.tensors.iter().map(|t| (t.digest, t.offset)).collect()),
            None => match made.next() {
                Some(finished) => {
                    let digests: Vec<_> = finished.tensors.iter().map(|t| (t.digest, t.offset)).collect();
                    (finished.record, digests)
                }
                None => continue,
            },
        };
        records.push(record);
        tensors.extend(shard.tensors.iter().zip(digests).map(|(wanted, (digest, offset))| TensorRecord {
            name: wanted.name.clone(),
            dtype: wanted.tensor.dtype(),
            shape: wanted.tensor.shape().to_vec(),
            digest,
            // In range: the number of shards is at most that of tensors.
            shard: position as u32,
            offset,
        }));
    }
    (records, tensors)
}

/// The entry document.
pub(super) fn document(
    outline: &Outline<'_>,
    action: &Action,
    shards: &[ShardPlan],
    mut tensors: Vec<TensorRecord>,
    records: Vec<ShardRecord>,
) -> EntryDocument {
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let resolution = &outline.resolution;
    let blocks = resolution.blocks.iter().zip(&action.blocks).enumerate().map(|(position, (block, key))| BlockRecord {
        name: block.name.clone(),
        action: *key,
        shards: (0..shards.len()).filter(|&s| shards[s].block == position).map(|s| s as u32).collect(),
    });
    let aliases = resolution.aliases.iter().map(|(name, of)| AliasRecord { name: name.clone(), of: of.clone() });
    let mut document = EntryDocument {
        schema: SCHEMA.to_string(),
        key: action.key,
        content_digest: ContentDigest::from_bytes([0; 32]),
        tensors,
        aliases: aliases.collect(),
        blocks: blocks.collect(),
        shards: records,
    };
    document.content_digest = document.compute_content_digest();
    document
}
