//! Every golden case and every shipped recipe, in this process: checkpoints,
//! recipes, and the tensors or the error that they must give.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use weightmill::checkpoint::Checkpoint;
use weightmill::digest::{leaf_hashes, tensor_digest};
use weightmill::error::Result;
use weightmill::execute::build::{BuildOptions, Mode, build};
use weightmill::execute::{
    DigestTable, Engines, Graph, Inputs, NoFacts, Outline, SpillRoom, Workshop, arrange, hash_all,
};
use weightmill::modules::Library;
use weightmill::progress::Silent;
use weightmill::recipe::Recipe;
use weightmill::sandbox::{EngineName, engine};
use weightmill::store::{Store, StoreOptions, Verify};
use weightmill::tensor::TensorName;
use weightmill_guest::abi::Tp;
use weightmill_tests::repository;

struct Bench {
    library: Library,
    engines: Engines,
    store: Store,
    pool: rayon::ThreadPool,
    _folder: tempfile::TempDir,
}

impl Bench {
    fn new(engines: Engines, jobs: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path(), StoreOptions::default()).unwrap();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(jobs).stack_size(4 << 20).build().unwrap();
        Bench { library: Library::new(Some(store.clone())), engines, store, pool, _folder: folder }
    }

    fn outline<'a>(&'a self, recipe: &'a Recipe, checkpoint: &Path, tp: Tp, tile_bytes: u64) -> Result<Outline<'a>> {
        Outline::new(Inputs {
            recipe,
            checkpoint: Arc::new(Checkpoint::open(checkpoint)?),
            tp,
            library: &self.library,
            engine: &self.engines,
            facts: &NoFacts,
            tile_bytes,
        })
    }

    /// Builds into the store; the table of the entry's document.
    fn build(&self, recipe: &Path, checkpoint: &Path, tp: Tp) -> Result<DigestTable> {
        let recipe = Recipe::load(recipe)?;
        let outline = self.outline(&recipe, checkpoint, tp, 1 << 20)?;
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

    /// Executes without a store.
    fn execute(&self, recipe: &Path, checkpoint: &Path, tp: Tp, tile_bytes: u64) -> Result<DigestTable> {
        let recipe = Recipe::load(recipe)?;
        let outline = self.outline(&recipe, checkpoint, tp, tile_bytes)?;
        let graph = Graph::new(outline.checkpoint().clone(), outline.steps()?);
        let shards = arrange(&graph, &outline.resolution)?;
        let room = SpillRoom::memory_only(1 << 30);
        let lanes = self.pool.current_num_threads();
        let workshop = Workshop::new(&graph, &self.pool, lanes, &room, &Silent);
        let mut table = hash_all(&workshop, &shards, lanes)?;
        table.add_aliases(&outline.resolution.aliases);
        Ok(table)
    }
}

struct Row {
    case: String,
    recipe: PathBuf,
    checkpoint: PathBuf,
    tp: Tp,
    expected: std::result::Result<PathBuf, String>,
}

/// The rows of every case under `folder`, which is in the repository.
fn rows(folder: &str) -> Vec<Row> {
    let folder = repository().join(folder);
    let mut cases: Vec<PathBuf> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
    cases.sort();
    let mut rows = Vec::new();
    for case in cases.iter().filter(|c| c.join("cases.json").exists()) {
        let listed: Vec<Value> = serde_json::from_slice(&std::fs::read(case.join("cases.json")).unwrap()).unwrap();
        for row in listed {
            let recipe = row["recipe"].as_str().unwrap_or("recipe.toml");
            let size = row["tp_size"].as_u64().unwrap_or(1);
            rows.push(Row {
                case: case.file_name().unwrap().to_string_lossy().into_owned(),
                recipe: case.join(recipe),
                checkpoint: case.join(row["checkpoint"].as_str().unwrap_or("checkpoint")),
                tp: Tp { rank: row["tp_rank"].as_u64().unwrap_or(0), size },
                expected: match row["error"].as_str() {
                    Some(code) => Err(code.to_string()),
                    None => Ok(case.join(row["expected"].as_str().unwrap())),
                },
            });
        }
    }
    assert!(rows.len() > 20, "{} has only {} rows", folder.display(), rows.len());
    rows
}

/// The table of a file, read by the stock reader and hashed by the book.
fn table_of(path: &Path) -> BTreeMap<String, (String, String)> {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let row = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let digest = tensor_digest(view.data().len() as u64, &leaf_hashes(view.data()));
        let kind = format!("{} {:?}", serde_json::to_value(view.dtype()).unwrap().as_str().unwrap(), view.shape());
        (name, (kind, digest.to_string()))
    };
    file.tensors().into_iter().map(row).collect()
}

/// What is wrong with a result, if anything.
fn fault(row: &Row, got: Result<DigestTable>) -> Option<String> {
    let place = format!("{} tp {}/{}", row.case, row.tp.rank, row.tp.size);
    match (got, &row.expected) {
        (Ok(_), Err(code)) => Some(format!("{place}: no error, expected {code}")),
        (Err(e), Err(code)) if e.code().as_str() == code => None,
        (Err(e), Err(code)) => Some(format!("{place}: expected {code}, got {e}")),
        (Err(e), Ok(_)) => Some(format!("{place}: {e}")),
        (Ok(table), Ok(expected)) => {
            let of = |(name, (tensor, digest)): (&TensorName, &(weightmill::tensor::TensorType, _))| {
                (name.to_string(), (tensor.to_string(), format!("{digest}")))
            };
            let got: BTreeMap<_, _> = table.0.iter().map(of).collect();
            let want = table_of(expected);
            (got != want).then(|| format!("{place}: got {got:#?}, expected {want:#?}"))
        }
    }
}

fn check(faults: Vec<String>) {
    assert!(faults.is_empty(), "{} cases fail:\n{}", faults.len(), faults.join("\n"));
}

fn default_engines() -> Engines {
    Engines::two(|| engine(EngineName::Wasmi), || engine(EngineName::Wasmtime))
}

#[test]
fn golden_cases() {
    let bench = Bench::new(default_engines(), 2);
    let build = |row: &Row| fault(row, bench.build(&row.recipe, &row.checkpoint, row.tp));
    check(rows("tests/golden/cases").iter().filter_map(build).collect());
}

#[test]
fn recipes_for_real_models() {
    let bench = Bench::new(default_engines(), 2);
    let build = |row: &Row| fault(row, bench.build(&row.recipe, &row.checkpoint, row.tp));
    check(rows("tests/models/cases").iter().filter_map(build).collect());
}

#[test]
fn engines_jobs_and_tile_sizes_change_no_byte() {
    for (name, jobs, tile_bytes) in [
        (EngineName::Wasmi, 1, 1 << 20),
        (EngineName::Wasmtime, 1, 256 << 10),
        (EngineName::Wasmtime, 8, 4 << 20),
        (EngineName::Pulley, 2, 64 << 10),
    ] {
        let bench = Bench::new(Engines::one(move || engine(name)), jobs);
        let execute = |row: &Row| fault(row, bench.execute(&row.recipe, &row.checkpoint, row.tp, tile_bytes));
        check(rows("tests/golden/cases").iter().filter_map(execute).collect());
    }
}
