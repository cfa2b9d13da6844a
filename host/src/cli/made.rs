//! What a recipe makes of a checkpoint, executed here and kept nowhere.

use std::collections::BTreeMap;

use super::progress::Bar;
use super::session::{self, Session};
use crate::error::{Code, Error, Result};
use crate::execute::{DigestTable, Graph, ShardPlan, Sink, SpillRoom, Wanted, Workshop, arrange, hash_all};
use crate::progress::Progress;
use crate::tensor::TensorName;

/// A transform that is planned, and ready to be executed in part or as a whole.
pub(super) struct Made {
    graph: Graph,
    shards: Vec<ShardPlan>,
    aliases: BTreeMap<TensorName, TensorName>,
    pool: rayon::ThreadPool,
    budget_bytes: u64,
}

impl Made {
    /// Plans a session's recipe over its checkpoint.
    ///
    /// # Errors
    /// What is wrong with the recipe, the checkpoint or a module.
    pub(super) fn plan(session: &Session, jobs: Option<u16>, budget_bytes: u64) -> Result<Self> {
        let outline = session.outline()?;
        let steps = outline.steps()?;
        let graph = Graph::new(outline.checkpoint().clone(), steps);
        let shards = arrange(&graph, &outline.resolution)?;
        let aliases = outline.resolution.aliases.clone();
        Ok(Made { graph, shards, aliases, pool: session::pool(jobs)?, budget_bytes })
    }

    /// Executes everything, and keeps the digests.
    ///
    /// # Errors
    /// What executing says; `source_changed`.
    pub(super) fn table(&self, bar: &Bar) -> Result<DigestTable> {
        let room = SpillRoom::memory_only(self.budget_bytes);
        let lanes = self.pool.current_num_threads();
        let workshop = Workshop::new(&self.graph, &self.pool, lanes, &room, bar);
        bar.stage("transform", self.wanted().map(|w| w.tensor.len_bytes()).sum());
        let mut table = hash_all(&workshop, &self.shards, lanes)?;
        self.check_sources()?;
        table.add_aliases(&self.aliases);
        Ok(table)
    }

    /// A tensor of the result, by its name or an alias.
    pub(super) fn find(&self, name: &TensorName) -> Option<&Wanted> {
        let name = self.aliases.get(name).unwrap_or(name);
        self.wanted().find(|wanted| wanted.name == *name)
    }

    /// The bytes of a tensor of the result.
    ///
    /// # Errors
    /// `insufficient_memory` if they do not fit the budget; what executing
    /// says; `source_changed`.
    pub(super) fn bytes(&self, wanted: &Wanted, progress: &dyn Progress) -> Result<Vec<u8>> {
        let len = wanted.tensor.len_bytes();
        if len > self.budget_bytes {
            let message = format!("{} has {len} bytes, the memory budget is {}", wanted.name, self.budget_bytes);
            return Err(Error::new(Code::InsufficientMemory, message).hint("raise --memory-budget"));
        }
        let room = SpillRoom::memory_only(self.budget_bytes - len);
        let mut workshop = Workshop::new(&self.graph, &self.pool, 1, &room, progress);
        workshop.hash_leaves = false;
        // In range: it fits the memory.
        let mut kept = Kept(Vec::with_capacity(len as usize));
        self.graph.retain(wanted.source);
        let made = workshop.make(wanted.source, len, &mut kept);
        self.graph.release(wanted.source);
        made?;
        self.check_sources()?;
        Ok(kept.0)
    }

    fn wanted(&self) -> impl Iterator<Item = &Wanted> {
        self.shards.iter().flat_map(|shard| &shard.tensors)
    }

    fn check_sources(&self) -> Result<()> {
        self.graph.checkpoint().files().iter().try_for_each(|file| file.check_unchanged())
    }
}

struct Kept(Vec<u8>);

impl Sink for Kept {
    fn piece(&mut self, bytes: &[u8], _: Option<&[u8]>) -> Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }
}
