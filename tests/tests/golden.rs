//! Every golden case and every shipped recipe, in this process: checkpoints,
//! recipes, and the tensors or the error that they must give.

use std::sync::Arc;

use weightmill::checkpoint::Checkpoint;
use weightmill::error::Result;
use weightmill::execute::build::{BuildOptions, Mode, build};
use weightmill::execute::{DigestTable, Engines, Inputs, NoFacts, Outline};
use weightmill::modules::Library;
use weightmill::progress::Silent;
use weightmill::recipe::Recipe;
use weightmill::sandbox::{EngineName, engine};
use weightmill::store::{Store, StoreOptions, Verify};
use weightmill_tests::execution::{Host, Setting};
use weightmill_tests::golden::{Row, rows};

/// Builds into a store, plans and tiles on the engines that the program uses.
struct Bench {
    modules: Library,
    engines: Engines,
    store: Store,
    pool: rayon::ThreadPool,
    _folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path(), StoreOptions::default()).unwrap();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).stack_size(4 << 20).build().unwrap();
        let engines = Engines::two(|| engine(EngineName::Wasmi), || engine(EngineName::Wasmtime));
        Bench { modules: Library::new(Some(store.clone())), engines, store, pool, _folder: folder }
    }

    /// Builds into the store; the table of the entry's document.
    fn build(&self, row: &Row) -> Result<DigestTable> {
        let recipe = Recipe::load(&row.recipe)?;
        let outline = Outline::new(Inputs {
            recipe: &recipe,
            checkpoint: Arc::new(Checkpoint::open(&row.checkpoint)?),
            tp: row.tp,
            modules: &self.modules,
            engine: &self.engines,
            facts: &NoFacts,
            tile_bytes: 1 << 20,
        })?;
        let options = BuildOptions {
            mode: Mode::Required,
            verify: Verify::First,
            pool: &self.pool,
            memory_budget_bytes: 1 << 30,
            check_source: false,
            remote: None,
            progress: &Silent,
            provenance: &|| Ok(serde_json::json!({})),
        };
        let built = build(&outline, Ok(self.store.clone()), &options)?;
        let document = built.entry.document();
        let table = DigestTable::of_document(document);
        assert_eq!(document.content_digest, table.content_digest());
        Ok(table)
    }
}

fn check(faults: Vec<String>) {
    assert!(faults.is_empty(), "{} cases fail:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn golden_cases() {
    let bench = Bench::new();
    check(rows("tests/golden/cases").iter().filter_map(|row| row.fault(bench.build(row))).collect());
}

#[test]
fn recipes_for_real_models() {
    let bench = Bench::new();
    check(rows("tests/models/cases").iter().filter_map(|row| row.fault(bench.build(row))).collect());
}

/// Every case at 1, 2 and 8 jobs, with three tile sizes, in order and shuffled.
fn unmoved(name: EngineName) {
    let host = Host::new(name);
    let mut faults = Vec::new();
    for row in rows("tests/golden/cases") {
        let table = |setting| {
            host.table(&Recipe::load(&row.recipe)?, &Arc::new(Checkpoint::open(&row.checkpoint)?), row.tp, setting)
        };
        for setting in Setting::ALL {
            faults.extend(row.fault(table(setting)).map(|fault| format!("{setting:?} {fault}")));
        }
    }
    check(faults);
}

#[test]
fn jobs_tile_sizes_and_order_change_no_byte_on_wasmtime() {
    unmoved(EngineName::Wasmtime);
}

#[test]
fn jobs_tile_sizes_and_order_change_no_byte_on_wasmi() {
    unmoved(EngineName::Wasmi);
}

#[test]
fn jobs_tile_sizes_and_order_change_no_byte_on_pulley() {
    unmoved(EngineName::Pulley);
}
