//! Transforms against the same work without weightmill.
//!
//! Every case runs on one thread, from a file in the page cache, in turn with
//! its baseline: for bytes moved, a plain loop over the same file; for bytes
//! computed, the module's own code compiled natively, through the same
//! executor. Both are checked to give the same digests before they are timed.
//! Each is timed with the leaf hashes, which every use needs, and without, and
//! the latter held against SHA-256 on the same thread, timed right after it.
//! For bytes computed the time inside the module's own code is told apart.
//! Ratios are taken turn by turn, and the median reported: on a machine whose
//! speed changes, medians of times could be from different moments.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use sha2::{Digest as _, Sha256};
use weightmill_guest::abi::Tp;

use super::cases::{Case, all};
use super::checkpoint::write_tensors;
use super::native;
use super::plain::Moves;
use crate::checkpoint::Checkpoint;
use crate::digest::TensorDigest;
use crate::error::{Code, Error, Result};
use crate::execute::{
    Engines, Graph, Inputs, NoFacts, Outline, Sink, Source, SpillRoom, TILE_BYTES, Workshop, arrange, hash_all,
};
use crate::modules::Library;
use crate::plan::{Body, View};
use crate::progress::Silent;
use crate::recipe::Recipe;
use crate::sandbox::{Engine, EngineName, Module, Program, engine};

/// A row of the table. Rates are input bytes a second, in 10⁹.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The module, and which of its forms.
    pub module: String,
    /// `moved` or `computed`.
    pub how: &'static str,
    /// With leaf hashes.
    pub gb_per_s: f64,
    /// The baseline's time over weightmill's, with leaf hashes.
    pub ratio: f64,
    /// Without hashing.
    pub unhashed_gb_per_s: f64,
    /// The baseline's time over weightmill's, without hashing.
    pub unhashed_ratio: f64,
    /// The unhashed rate over that of SHA-256.
    pub of_sha256: f64,
    /// The module's own code alone; `None` where bytes are moved.
    pub kernel: Option<Kernel>,
}

/// The time inside a module's own code, over all its tiles and passes.
#[derive(Clone, Debug, Serialize)]
pub struct Kernel {
    /// Input bytes a second, in 10⁹.
    pub gb_per_s: f64,
    /// The natively compiled code's time over the module's.
    pub ratio: f64,
    /// The rate over that of SHA-256.
    pub of_sha256: f64,
}

/// Carries a case out, hashing or not: the digests, and the time inside modules.
type CarryOut = Box<dyn Fn(bool) -> Result<(Vec<TensorDigest>, Duration)>>;
/// First byte and length of each source in the file.
type Regions = Vec<(u64, u64)>;

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// SHA-256 on one thread of this machine, in 10⁹ bytes a second.
    pub sha256_gb_per_s: f64,
    /// One row for each case.
    pub transforms: Vec<Row>,
}

/// Runs cases on about `bytes` of input, each and its baseline `runs` times.
/// `only` names modules; none means all.
///
/// # Errors
/// `io_error`; `identity_collision` if a transform and its baseline differ.
pub fn run(bytes: u64, runs: usize, only: &[String]) -> Result<Report> {
    let folder = std::env::temp_dir().join(format!("weightmill-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|e| Error::io("making a folder for the benchmark", e))?;
    let to_hash = vec![0x5A; 1 << 20];
    let wanted = |case: &Case| only.is_empty() || only.iter().any(|name| name == case.module);
    let cases = all(bytes);
    let measured = cases.iter().filter(|c| wanted(c)).map(|c| measure(c, &folder, runs.max(1), &to_hash));
    let measured: Result<Vec<(Row, f64)>> = measured.collect();
    // What stays is in the temporary folder.
    let _ = std::fs::remove_dir_all(&folder);
    let (transforms, mut sha256): (Vec<Row>, Vec<f64>) = measured?.into_iter().unzip();
    if sha256.is_empty() {
        sha256.push(sha256_rate(&to_hash));
    }
    Ok(Report { sha256_gb_per_s: median(sha256), transforms })
}

/// The rate of SHA-256, now: of a megabyte that stays in the cache.
fn sha256_rate(bytes: &[u8]) -> f64 {
    const TIMES: usize = 16;
    let start = Instant::now();
    for _ in 0..TIMES {
        std::hint::black_box(Sha256::digest(bytes));
    }
    (TIMES * bytes.len()) as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// The row, and the rate of SHA-256 in its runs.
fn measure(case: &Case, folder: &Path, runs: usize, to_hash: &[u8]) -> Result<(Row, f64)> {
    let path = folder.join("bench.safetensors");
    write_tensors(&path, &case.inputs)?;
    let checkpoint = Arc::new(Checkpoint::open(&path)?);
    let len = checkpoint.tensor_bytes();
    let recipe = Recipe::parse(&case.recipe(), Path::new("bench.toml"))?;
    let ours = Carrier::new(&recipe, checkpoint.clone(), Engines::one(|| engine(EngineName::Wasmtime)))?;
    let name = case.name();
    let theirs: CarryOut = match native::program(case.module) {
        Some(_) => {
            let native =
                Carrier::new(&recipe, checkpoint, Engines::one(|| Ok(Arc::new(NativeEngine) as Arc<dyn Engine>)))?;
            Box::new(move |hash| native.carry_out(hash))
        }
        None => plain(&ours, &path)?,
    };
    let how = if native::program(case.module).is_some() { "computed" } else { "moved" };
    if ours.carry_out(true)?.0 != theirs(true)?.0 {
        return Err(Error::new(Code::IdentityCollision, format!("{name} and its baseline give different bytes")));
    }
    let take_turns = |hash: bool| -> Result<Vec<Turn>> {
        (0..runs)
            .map(|_| {
                Ok(Turn {
                    ours: Times::of(|| ours.carry_out(hash))?,
                    theirs: Times::of(|| theirs(hash))?,
                    sha256: sha256_rate(to_hash),
                })
            })
            .collect()
    };
    let (hashed, unhashed) = (take_turns(true)?, take_turns(false)?);
    let rate = |seconds: f64| len as f64 / seconds / 1e9;
    let kernel = (how == "computed").then(|| Kernel {
        gb_per_s: median_of(&unhashed, |t| rate(t.ours.inside)),
        ratio: median_of(&unhashed, |t| t.theirs.inside / t.ours.inside),
        of_sha256: median_of(&unhashed, |t| rate(t.ours.inside) / t.sha256),
    });
    std::fs::remove_file(&path).map_err(|e| Error::io("removing the benchmark's file", e))?;
    let row = Row {
        module: name,
        how,
        gb_per_s: median_of(&hashed, |t| rate(t.ours.all)),
        ratio: median_of(&hashed, |t| t.theirs.all / t.ours.all),
        unhashed_gb_per_s: median_of(&unhashed, |t| rate(t.ours.all)),
        unhashed_ratio: median_of(&unhashed, |t| t.theirs.all / t.ours.all),
        of_sha256: median_of(&unhashed, |t| rate(t.ours.all) / t.sha256),
        kernel,
    };
    Ok((row, median_of(&unhashed, |t| t.sha256)))
}

/// The baseline for moved bytes.
fn plain(ours: &Carrier, path: &Path) -> Result<CarryOut> {
    let file = File::open(path).map_err(|e| Error::io("opening the benchmark's file", e))?;
    let mut tensors = Vec::new();
    for (view, starts) in ours.views()? {
        let moves = Moves::of(view);
        let moves = moves.ok_or_else(|| Error::new(Code::BadParams, "a view has too many runs to list"))?;
        tensors.push((moves, starts));
    }
    Ok(Box::new(move |hash| {
        let digests = tensors.iter().map(|(moves, starts)| moves.carry_out(&file, starts, hash));
        Ok((digests.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect(), Duration::ZERO))
    }))
}

struct NativeEngine;

impl Engine for NativeEngine {
    fn name(&self) -> &'static str {
        "native"
    }

    fn version(&self) -> String {
        env!("CARGO_PKG_VERSION").into()
    }

    fn compile(&self, module: &Module) -> Result<Arc<dyn Program>> {
        let name = &module.metadata().name;
        native::program(name).ok_or_else(|| Error::new(Code::ModuleNotFound, format!("{name} has no native form")))
    }
}

/// A recipe, ready to be carried out on one thread.
struct Carrier {
    graph: Graph,
    shards: Vec<crate::execute::ShardPlan>,
    pool: rayon::ThreadPool,
}

struct Discard;

impl Sink for Discard {
    fn piece(&mut self, bytes: &[u8], _: Option<&[u8]>) -> Result<()> {
        std::hint::black_box(bytes);
        Ok(())
    }
}

impl Carrier {
    fn new(recipe: &Recipe, checkpoint: Arc<Checkpoint>, engines: Engines) -> Result<Self> {
        let library = Library::new(None);
        let outline = Outline::new(Inputs {
            recipe,
            checkpoint: checkpoint.clone(),
            tp: Tp::ONE,
            modules: &library,
            engine: &engines,
            facts: &NoFacts,
            tile_bytes: TILE_BYTES,
        })?;
        let graph = Graph::new(checkpoint, outline.steps()?);
        let shards = arrange(&graph, &outline.resolution)?;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).stack_size(4 << 20).build();
        Ok(Carrier { graph, shards, pool: pool.map_err(|e| Error::io("starting a thread", e))? })
    }

    /// The digests in order of names, none where nothing is hashed, and the
    /// time inside modules.
    fn carry_out(&self, hash: bool) -> Result<(Vec<TensorDigest>, Duration)> {
        let before = self.graph.time_inside_modules();
        let digests = self.digests(hash)?;
        Ok((digests, self.graph.time_inside_modules() - before))
    }

    fn digests(&self, hash: bool) -> Result<Vec<TensorDigest>> {
        let room = SpillRoom::memory_only(1 << 30);
        let mut workshop = Workshop::new(&self.graph, &self.pool, 1, &room, &Silent);
        if hash {
            let table = hash_all(&workshop, &self.shards, 1)?;
            return Ok(table.0.into_values().map(|(_, digest)| digest).collect());
        }
        workshop.hash_leaves = false;
        let wanted = || self.shards.iter().flat_map(|s| &s.tensors);
        wanted().for_each(|w| self.graph.retain(w.source));
        for wanted in wanted() {
            workshop.make(wanted.source, wanted.tensor.len_bytes(), &mut Discard)?;
            self.graph.release(wanted.source);
        }
        Ok(Vec::new())
    }

    /// The outputs' views in order of names, with first byte and length of
    /// their sources in the file.
    fn views(&self) -> Result<Vec<(&View, Regions)>> {
        let wanted = self.shards.iter().flat_map(|s| &s.tensors);
        wanted
            .map(|w| {
                let Source::Target(id) = w.source else {
                    return Err(Error::new(Code::BadParams, "a benchmark's output is made by a step"));
                };
                let step = self.graph.step(id);
                let Body::View(view) = &self.graph.target(id).body else {
                    return Err(Error::new(Code::BadParams, "the output is computed"));
                };
                let starts = step.inputs.iter().filter_map(|input| match input {
                    Source::File { offset, len, .. } => Some((*offset, *len)),
                    Source::Target(_) => None,
                });
                Ok((view, starts.collect()))
            })
            .collect()
    }
}

/// Seconds.
struct Times {
    all: f64,
    inside: f64,
}

impl Times {
    fn of<T>(work: impl FnOnce() -> Result<(T, Duration)>) -> Result<Self> {
        let start = Instant::now();
        let (_, inside) = work()?;
        Ok(Times { all: start.elapsed().as_secs_f64(), inside: inside.as_secs_f64() })
    }
}

/// What is compared, one right after the other.
struct Turn {
    ours: Times,
    theirs: Times,
    /// In 10⁹ bytes a second.
    sha256: f64,
}

fn median_of(turns: &[Turn], figure: impl Fn(&Turn) -> f64) -> f64 {
    median(turns.iter().map(figure).collect())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
