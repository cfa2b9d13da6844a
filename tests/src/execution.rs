//! Recipes over checkpoints, carried out in this process on a named engine.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use weightmill::checkpoint::Checkpoint;
use weightmill::error::Result;
use weightmill::execute::{
    DigestTable, Engines, Graph, Inputs, NoFacts, Outline, SpillRoom, Workshop, arrange, hash_all,
};
use weightmill::modules::Library;
use weightmill::progress::Silent;
use weightmill::recipe::Recipe;
use weightmill::sandbox::{EngineName, engine};
use weightmill_guest::abi::Tp;

/// How work is done. None of it may change a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Threads that compute.
    pub jobs: usize,
    /// The tile size that modules are asked for.
    pub tile_bytes: u64,
    /// Tiles in an order that this seeds, or in their own.
    pub seed: Option<u64>,
}

impl Setting {
    /// 1, 2 and 8 jobs, each with three tile sizes, of which two are shuffled.
    /// The smallest tile is smaller than any row.
    pub const ALL: [Setting; 9] = [
        Setting::new(1, 1 << 20, None),
        Setting::new(1, 4096, Some(1)),
        Setting::new(1, 16, Some(2)),
        Setting::new(2, 1 << 20, Some(3)),
        Setting::new(2, 4096, None),
        Setting::new(2, 16, Some(4)),
        Setting::new(8, 1 << 20, Some(5)),
        Setting::new(8, 4096, Some(6)),
        Setting::new(8, 16, None),
    ];

    const fn new(jobs: usize, tile_bytes: u64, seed: Option<u64>) -> Self {
        Setting { jobs, tile_bytes, seed }
    }
}

/// An engine with the modules that it has compiled.
pub struct Host {
    name: EngineName,
    modules: Library,
    engines: Engines,
    pools: Mutex<BTreeMap<usize, Arc<rayon::ThreadPool>>>,
}

impl Host {
    /// Everything, plans included, on one engine.
    pub fn new(name: EngineName) -> Self {
        let engines = Engines::one(move || engine(name));
        Host { name, modules: Library::new(None), engines, pools: Mutex::default() }
    }

    /// The engine.
    pub fn name(&self) -> EngineName {
        self.name
    }

    /// The recipe, resolved.
    ///
    /// # Errors
    /// What is wrong with the recipe, or a module.
    pub fn outline<'a>(
        &'a self,
        recipe: &'a Recipe,
        checkpoint: &Arc<Checkpoint>,
        tp: Tp,
        tile_bytes: u64,
    ) -> Result<Outline<'a>> {
        Outline::new(Inputs {
            recipe,
            checkpoint: checkpoint.clone(),
            tp,
            modules: &self.modules,
            engine: &self.engines,
            facts: &NoFacts,
            tile_bytes,
        })
    }

    /// Carries the recipe out; the table of what comes of it.
    ///
    /// # Errors
    /// What is wrong with the recipe, the checkpoint, or a module.
    pub fn table(
        &self,
        recipe: &Recipe,
        checkpoint: &Arc<Checkpoint>,
        tp: Tp,
        setting: Setting,
    ) -> Result<DigestTable> {
        let outline = self.outline(recipe, checkpoint, tp, setting.tile_bytes)?;
        let graph = Graph::new(outline.checkpoint().clone(), outline.steps()?);
        let shards = arrange(&graph, &outline.resolution)?;
        let room = SpillRoom::memory_only(1 << 30);
        let pool = self.pool(setting.jobs);
        let mut workshop = Workshop::new(&graph, &pool, setting.jobs, &room, &Silent);
        workshop.shuffle = setting.seed;
        let mut table = hash_all(&workshop, &shards, setting.jobs)?;
        table.add_aliases(&outline.resolution.aliases);
        Ok(table)
    }

    fn pool(&self, jobs: usize) -> Arc<rayon::ThreadPool> {
        let mut pools = self.pools.lock().expect("no pool is made twice");
        let make = || rayon::ThreadPoolBuilder::new().num_threads(jobs).stack_size(4 << 20).build();
        pools.entry(jobs).or_insert_with(|| Arc::new(make().expect("threads can be started"))).clone()
    }
}
