//! Transforms against the same work by plain Rust.
//!
//! Each case is carried out on one thread, the transform through the whole
//! executor (plan, gather, sandbox, leaf hashes), the baseline by a plain loop
//! over the same file that moves or computes the same bytes and hashes the same
//! leaves. Both are checked to give the same digest before they are timed.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;
use weightmill_guest::abi::Tp;
use weightmill_guest::kernels::{BF16, F32, cast};

use super::checkpoint::write_tensors;
use crate::checkpoint::Checkpoint;
use crate::digest::{LeafHasher, TensorDigest};
use crate::error::{Code, Error, Result};
use crate::execute::{Engines, Graph, Inputs, NoFacts, Outline, SpillRoom, TILE_BYTES, Workshop, arrange, hash_all};
use crate::modules::Library;
use crate::progress::Silent;
use crate::recipe::Recipe;
use crate::sandbox::{EngineName, engine};
use crate::tensor::{Dtype, TensorName};

/// A row of the table.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The module.
    pub module: String,
    /// `view` or `tiles`.
    pub how: &'static str,
    /// Input bytes a second through weightmill, in 10⁹.
    pub gb_per_s: f64,
    /// Input bytes a second of the baseline, in 10⁹.
    pub baseline_gb_per_s: f64,
    /// Baseline time over weightmill's.
    pub ratio: f64,
    /// What the baseline does.
    pub baseline: &'static str,
}

struct Case {
    module: &'static str,
    how: &'static str,
    baseline: &'static str,
    recipe: String,
    input: (Dtype, Vec<u64>),
    /// Reads the tensor that begins at this byte of the file, and hashes what
    /// it makes of it.
    plain: Box<dyn Fn(&File, u64) -> std::io::Result<TensorDigest>>,
}

/// Runs every case on `bytes` of input and compares the medians of `runs`.
///
/// # Errors
/// `io_error`; `identity_collision` if a transform and its baseline differ.
pub fn run(bytes: u64, runs: usize) -> Result<Vec<Row>> {
    let folder = std::env::temp_dir().join(format!("weightmill-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|e| Error::io("making a folder for the benchmark", e))?;
    let rows = cases(bytes).iter().map(|case| measure(case, &folder, runs.max(1))).collect();
    // What stays is in the temporary folder.
    let _ = std::fs::remove_dir_all(&folder);
    rows
}

fn cases(bytes: u64) -> Vec<Case> {
    const COLUMNS: u64 = 4096;
    // Groups of 3 × 128 rows of BF16.
    let groups = (bytes / (3 * 128 * COLUMNS * 2)).max(1);
    let row = COLUMNS * 2;
    let regroup = move |file: &File, start: u64| {
        let mut hasher = LeafHasher::default();
        let mut buffer = vec![0; (128 * row) as usize];
        for part in 0..3 {
            for group in 0..groups {
                file.read_exact_at(&mut buffer, start + (group * 3 + part) * 128 * row)?;
                hasher.update(&buffer);
            }
        }
        Ok(hasher.finish().0)
    };
    let elements = (bytes / 4).next_multiple_of(1 << 18);
    let cast_to_bf16 = move |file: &File, start: u64| {
        let mut hasher = LeafHasher::default();
        let (mut from, mut input, mut output) = (vec![0; 1 << 20], vec![0.0_f32; 1 << 18], vec![0_u16; 1 << 18]);
        let mut bytes = vec![0; 1 << 19];
        for piece in 0..elements >> 18 {
            file.read_exact_at(&mut from, start + (piece << 20))?;
            for (value, raw) in input.iter_mut().zip(from.chunks_exact(4)) {
                *value = f32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]);
            }
            cast::convert::<F32, BF16>(&input, &mut output);
            for (raw, value) in bytes.chunks_exact_mut(2).zip(&output) {
                raw.copy_from_slice(&value.to_le_bytes());
            }
            hasher.update(&bytes);
        }
        Ok(hasher.finish().0)
    };
    vec![
        Case {
            module: "qkv-regroup",
            how: "view",
            baseline: "pread each part, hash",
            recipe: step("qkv-regroup", "qkv", &format!("groups = {groups}, q_per_group = 1, head_dim = 128")),
            input: (Dtype::BF16, vec![groups * 3 * 128, COLUMNS]),
            plain: Box::new(regroup),
        },
        Case {
            module: "cast",
            how: "tiles",
            baseline: "pread, native kernel, hash",
            recipe: step("cast", "w", "dtype = \"BF16\""),
            input: (Dtype::F32, vec![elements]),
            plain: Box::new(cast_to_bf16),
        },
    ]
}

fn step(module: &str, role: &str, params: &str) -> String {
    format!(
        "recipe = 1\nname = \"bench\"\n[[step]]\nmodule = \"{module}\"\ninputs = {{ {role} = \"t\" }}\noutputs = {{ {role} = \"t\" }}\nparams = {{ {params} }}\n"
    )
}

fn measure(case: &Case, folder: &Path, runs: usize) -> Result<Row> {
    let path = folder.join(format!("{}.safetensors", case.module));
    let (dtype, shape) = &case.input;
    write_tensors(&path, &[("t".into(), *dtype, shape.clone())])?;
    let checkpoint = Arc::new(Checkpoint::open(&path)?);
    let name = TensorName::new("t")?;
    let source = &checkpoint.tensors()[&name];
    let (offset, len) = (source.offset, source.tensor.len_bytes());
    let file = File::open(&path).map_err(|e| Error::io("opening the benchmark's file", e))?;
    let plain = || (case.plain)(&file, offset).map_err(|e| Error::io("reading the benchmark's file", e));
    let recipe = Recipe::parse(&case.recipe, Path::new("bench.toml"))?;
    let through = Through::new(&recipe, checkpoint.clone())?;

    let (ours, theirs) = (through.digest(&name)?, plain()?);
    if ours != theirs {
        let message = format!("{} gives {ours}, its baseline {theirs}", case.module);
        return Err(Error::new(Code::IdentityCollision, message));
    }
    let (mut our_times, mut their_times) = (Vec::new(), Vec::new());
    for _ in 0..runs {
        our_times.push(timed(|| through.digest(&name))?);
        their_times.push(timed(plain)?);
    }
    let (ours, theirs) = (median(our_times), median(their_times));
    std::fs::remove_file(&path).map_err(|e| Error::io("removing the benchmark's file", e))?;
    Ok(Row {
        module: case.module.into(),
        how: case.how,
        gb_per_s: len as f64 / ours / 1e9,
        baseline_gb_per_s: len as f64 / theirs / 1e9,
        ratio: theirs / ours,
        baseline: case.baseline,
    })
}

/// A transform through the executor, on one thread.
struct Through<'a> {
    recipe: &'a Recipe,
    checkpoint: Arc<Checkpoint>,
    library: Library,
    engine: Engines,
    pool: rayon::ThreadPool,
}

impl<'a> Through<'a> {
    fn new(recipe: &'a Recipe, checkpoint: Arc<Checkpoint>) -> Result<Self> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build();
        Ok(Through {
            recipe,
            checkpoint,
            library: Library::new(None),
            engine: Engines::one(|| engine(EngineName::Wasmtime)),
            pool: pool.map_err(|e| Error::io("starting a thread", e))?,
        })
    }

    fn digest(&self, name: &TensorName) -> Result<TensorDigest> {
        let outline = Outline::new(Inputs {
            recipe: self.recipe,
            checkpoint: self.checkpoint.clone(),
            tp: Tp::ONE,
            library: &self.library,
            engine: &self.engine,
            facts: &NoFacts,
            tile_bytes: TILE_BYTES,
        })?;
        let steps = outline.steps()?;
        let graph = Graph::new(self.checkpoint.clone(), steps);
        let shards = arrange(&graph, &outline.resolution)?;
        let room = SpillRoom::memory_only(1 << 30);
        let workshop = Workshop::new(&graph, &self.pool, 1, &room, &Silent);
        let table = hash_all(&workshop, &shards, 1)?;
        Ok(table.0[name].1)
    }
}

fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
