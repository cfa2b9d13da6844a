//! Made-up modules through the whole host: rules, compilers, calls on two
//! engines, and a build into a store.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use arbitrary::Unstructured;
use weightmill::checkpoint::Checkpoint;
use weightmill::error::{Code, Error, Fault, Result};
use weightmill::execute::build::{BuildOptions, Mode, build};
use weightmill::execute::{Engines, Inputs, NoFacts, Outline};
use weightmill::modules::Library;
use weightmill::progress::Silent;
use weightmill::recipe::Recipe;
use weightmill::sandbox::{Engine, EngineName, Limits, Module, Program, RunReply, TileIo, TileRequest, engine_with};
use weightmill::store::{Store, StoreOptions, Verify};
use weightmill_guest::abi::{RunError, Tp};

use super::{check_error, smith};
use crate::write_safetensors;

const RECIPE: &str = "recipe = 1\nname = \"made up\"\n[[step]]\nmodule = \"./made-up.wasm\"\ninputs = { a = \"t\" }\noutputs = { w = \"w\" }\n";
const INPUT_BYTES: usize = 256;

/// Plans for an input of 256 bytes: one tile; tiles over a scratch tensor; a
/// view beside tiles; one that is wrong.
const PLANS: [&str; 4] = [
    r#"{"outputs":[{"role":"w","dtype":"U8","shape":[64],"tiles":[{"len":64,"inputs":[[{"copy":0,"len":64}]],"args":[7]}]}]}"#,
    r#"{"outputs":[{"role":"w","dtype":"F32","shape":[4,16],"tiles":[{"count":4,"len":64,"inputs":[[{"copy":0,"len":64,"strides":[64]}],[{"copy":2,"len":32}]],"args":[-1,2]}]}],"scratch":[{"dtype":"U8","shape":[32],"tiles":[{"count":2,"len":16,"inputs":[[{"copy":0,"len":128,"strides":[128]}]]}]}]}"#,
    r#"{"outputs":[{"role":"extra","dtype":"U8","shape":[4],"view":[{"repeat":4,"parts":[{"copy":0,"len":1,"strides":[3]}]}]},{"role":"w","dtype":"BF16","shape":[128],"tiles":[{"len":1},{"count":3,"len":85}]}]}"#,
    r#"{"outputs":[{"role":"w","dtype":"U8","shape":[65],"tiles":[{"len":64}]}]}"#,
];

/// The first byte says whether the module plans itself, or which of the plans
/// above it is given.
pub(super) fn run(input: &[u8]) {
    let mut input = Unstructured::new(input);
    let Ok(choice) = input.arbitrary::<u8>() else { return };
    let Some(mut bytes) = smith::module(&mut input) else { return };
    if let Some(plan) = PLANS.get(usize::from(choice % 8)) {
        bytes = smith::with_plan(&bytes, plan.as_bytes());
    }
    let module = match Module::parse(bytes.as_slice()) {
        Ok(module) => module,
        Err(error) => return check_error(&error, Fault::Module),
    };
    let programs = engines().iter().map(|engine| engine.compile(&module)).collect::<Result<Vec<_>>>();
    let programs = match programs {
        Ok(programs) => programs,
        Err(error) => return check_error(&error, Fault::Module),
    };
    let plans: Vec<Result<Vec<u8>>> =
        programs.iter().map(|program| program.plan(b"{}").map(|reply| reply.answer)).collect();
    compare(&plans);
    let tiles: Vec<Result<Tile>> = programs.iter().map(|program| run_tile(program.as_ref())).collect();
    compare(&tiles);
    if plans.iter().any(Result::is_ok) {
        whole_build(&bytes);
    }
}

/// The two engines that do not share a line of execution code.
fn engines() -> &'static [Arc<dyn Engine>; 2] {
    static ENGINES: OnceLock<[Arc<dyn Engine>; 2]> = OnceLock::new();
    let make = |name| engine_with(name, small_limits()).expect("the engine works here");
    ENGINES.get_or_init(|| [make(EngineName::Wasmtime), make(EngineName::Wasmi)])
}

fn small_limits() -> Limits {
    let mut limits = Limits::default();
    limits.memory_bytes = 1 << 20;
    limits.table_elements = 2000;
    limits.plan_fuel = 100_000;
    limits.run_fuel_base = 100_000;
    limits
}

/// Engines agree, but for limits: they fall at other points.
fn compare<T: PartialEq + std::fmt::Debug>(outcomes: &[Result<T>]) {
    for outcome in outcomes {
        if let Err(error) = outcome {
            check_error(error, Fault::Module);
        }
    }
    let limited = |outcome: &Result<T>| outcome.as_ref().is_err_and(is_limit);
    if outcomes.iter().any(limited) {
        return;
    }
    let [first, rest @ ..] = outcomes else { return };
    for other in rest {
        assert_eq!(first, other, "engines differ");
    }
}

fn is_limit(error: &Error) -> bool {
    error.code() == Code::ModuleOutOfFuel || error.message().contains("nest deeper")
}

/// What became of a tile: its bytes, or what the module has against it.
#[derive(Debug, PartialEq)]
enum Tile {
    Done(Vec<u8>),
    Refused(RunError),
}

fn run_tile(program: &dyn Program) -> Result<Tile> {
    let request = TileRequest {
        target: 0,
        group: 0,
        turn: 3,
        tile: 3,
        offset: 192,
        out_len: 64,
        windows: &[64, 8],
        args: &[7, -1],
        params: b"{}",
    };
    let mut io = Bytes { output: Vec::new() };
    Ok(match program.run(&request, &mut io)? {
        RunReply::Done { .. } => Tile::Done(io.output),
        RunReply::Refused { error, .. } => Tile::Refused(error),
    })
}

struct Bytes {
    output: Vec<u8>,
}

impl TileIo for Bytes {
    fn fill(&mut self, window: usize, memory: &mut [u8]) -> Result<()> {
        memory.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 7 + window * 131) as u8);
        Ok(())
    }

    fn take(&mut self, output: &[u8]) -> Result<()> {
        self.output = output.to_vec();
        Ok(())
    }
}

/// Builds on each engine into a store of its own: an error leaves no entry and
/// nothing half-made; results are equal.
fn whole_build(module: &[u8]) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tensor: Vec<u8> = (0..INPUT_BYTES).map(|i| (i * 31 + 7) as u8).collect();
    let checkpoint = folder.path().join("model.safetensors");
    write_safetensors(&checkpoint, &[("t", safetensors::Dtype::U8, vec![INPUT_BYTES], tensor)]);
    std::fs::write(folder.path().join("made-up.wasm"), module).expect("the module can be written");
    let outcomes: Vec<Result<String>> = [EngineName::Wasmtime, EngineName::Wasmi]
        .into_iter()
        .map(|name| {
            let root = folder.path().join(name.as_str());
            let built = build_one(name, folder.path(), &checkpoint, &root);
            let count = |part: &str| std::fs::read_dir(root.join(part)).map_or(0, Iterator::count);
            assert_eq!(count("tmp"), 0, "work in progress is left");
            assert_eq!(count("entries"), usize::from(built.is_ok()), "{built:?}");
            built
        })
        .collect();
    for error in outcomes.iter().filter_map(|outcome| outcome.as_ref().err()) {
        // A module refuses its input with a code that is the input's fault.
        let fault = if matches!(error.code().fault(), Fault::Input) { Fault::Input } else { Fault::Module };
        check_error(error, fault);
    }
    if outcomes.iter().all(Result::is_ok) {
        compare(&outcomes);
    }
}

/// Builds; the content digest.
fn build_one(name: EngineName, folder: &Path, checkpoint: &Path, root: &Path) -> Result<String> {
    let recipe = Recipe::parse(RECIPE, &folder.join("recipe.toml"))?;
    let store = Store::open(root, StoreOptions::default())?;
    let library = Library::new(Some(store.clone()));
    let engines = Engines::one(move || engine_with(name, small_limits()));
    let outline = Outline::new(Inputs {
        recipe: &recipe,
        checkpoint: Arc::new(Checkpoint::open(checkpoint)?),
        tp: Tp::ONE,
        modules: &library,
        engine: &engines,
        facts: &NoFacts,
        tile_bytes: 1 << 20,
    })?;
    let options = BuildOptions {
        mode: Mode::Required,
        verify: Verify::Always,
        pool: pool(),
        memory_budget_bytes: 1 << 20,
        check_source: false,
        remote: None,
        progress: &Silent,
        provenance: &|| Ok(serde_json::json!({})),
    };
    Ok(build(&outline, Ok(store), &options)?.content_digest().to_string())
}

fn pool() -> &'static rayon::ThreadPool {
    static POOL: OnceLock<rayon::ThreadPool> = OnceLock::new();
    POOL.get_or_init(|| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).stack_size(4 << 20).build();
        pool.expect("a thread can be started")
    })
}
