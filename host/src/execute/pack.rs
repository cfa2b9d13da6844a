//! A shard's data computed on the fly, for streaming without a store.

use std::sync::Arc;

use super::arrange::Wanted;
use super::graph::{Graph, Source};
use crate::error::Result;
use crate::plan::Body;

/// The data of one shard: its tensors at the offsets that the shard's layout
/// gives them, zeros between. Any range can be asked for, from any thread.
///
/// What the tensors read that has to be whole must have been
/// [prepared](super::Workshop::prepare), and stays as long as the graph.
pub struct Packer {
    graph: Arc<Graph>,
    /// Ascending by first byte.
    tensors: Vec<(u64, Wanted)>,
}

impl Packer {
    /// Packs `tensors`, which lie at these first bytes, ascending.
    pub fn new(graph: Arc<Graph>, tensors: Vec<(u64, Wanted)>) -> Self {
        Packer { graph, tensors }
    }

    /// Fills `out` with the bytes from `offset` on.
    ///
    /// # Errors
    /// What reading and running tiles say.
    pub fn fill(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let end = offset + out.len() as u64;
        let first = self.tensors.partition_point(|(start, w)| start + w.tensor.len_bytes() <= offset);
        let mut filled = 0;
        for (start, wanted) in self.tensors[first..].iter().take_while(|(start, _)| *start < end) {
            let from = offset.max(*start);
            let to = end.min(start + wanted.tensor.len_bytes());
            let (at, stop) = ((from - offset) as usize, (to - offset) as usize);
            out[filled..at].fill(0);
            self.read(wanted.source, from - start, &mut out[at..stop])?;
            filled = stop;
        }
        out[filled..].fill(0);
        Ok(())
    }

    fn read(&self, source: Source, offset: u64, out: &mut [u8]) -> Result<()> {
        if let Source::Target(id) = source
            && self.graph.spilled(id).is_none()
            && let Body::Tiles(groups) = &self.graph.target(id).body
        {
            let end = offset + out.len() as u64;
            for (index, group) in groups.iter().enumerate() {
                let len = u64::from(group.len);
                let group_end = group.offset + len * group.count;
                if group_end <= offset || group.offset >= end {
                    continue;
                }
                let first = offset.saturating_sub(group.offset) / len;
                let last = (end.min(group_end) - group.offset).div_ceil(len);
                for turn in first..last {
                    let mut tile = self.graph.buffers.take(group.len as usize);
                    self.graph.run_tile(id, index, turn, &mut tile)?;
                    let start = group.offset + turn * len;
                    let (from, to) = (offset.max(start), end.min(start + len));
                    let piece = &tile[(from - start) as usize..(to - start) as usize];
                    out[(from - offset) as usize..(to - offset) as usize].copy_from_slice(piece);
                }
            }
            return Ok(());
        }
        self.graph.read(source, offset, out)
    }
}
