//! A module, a checkpoint and a recipe in a temporary folder.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use weightmill::checkpoint::{Checkpoint, NoCache, source_digests};
use weightmill::digest::{leaf_hashes, tensor_digest};
use weightmill::error::Result;
use weightmill::execute::build::{BuildOptions, Mode, build};
use weightmill::execute::{Engines, Inputs, NoFacts, Outline};
use weightmill::modules::Library;
use weightmill::progress::{Progress, Silent};
use weightmill::recipe::Recipe;
use weightmill::sandbox::{EngineName, Limits, Module, Program, RunReply, TileIo, TileRequest, engine, engine_with};
use weightmill::store::{Store, StoreOptions, Verify};
use weightmill_guest::abi::Tp;
use weightmill_tests::execution::{Host, Setting};
use weightmill_tests::{Tensor, write_safetensors};

/// Every engine.
pub(crate) const ENGINES: [EngineName; 3] = [EngineName::Wasmtime, EngineName::Wasmi, EngineName::Pulley];

/// A module that answers `plan` and whose `wm_run` is `run`, with the locals
/// $b (the run block), $out, $in (the windows) and $n.
pub(crate) fn module(plan: &str, run: &str, more: &str) -> Vec<u8> {
    let metadata = r#"{\22abi\22:1,\22name\22:\22hazard\22,\22version\22:\221.0.0\22}"#;
    let packed = (2048_i64 << 32) | plan.len().max(1) as i64;
    let wat = format!(
        r#"(module
            (@custom "weightmill" "{metadata}")
            (memory (export "memory") 4)
            (global (export "wm_panic") i32 (i32.const 1024))
            (func (export "wm_abi_v1"))
            (func (export "wm_alloc") (param i32) (result i32) (i32.const 65536))
            (func (export "wm_plan") (param i32 i32) (result i64) (i64.const {packed}))
            (func (export "wm_run") (param $b i32) (result i64) (local $out i32) (local $in i32) (local $n i32)
              (local.set $out (i32.load offset=24 (local.get $b)))
              (if (i32.load offset=36 (local.get $b)) (then (local.set $in (i32.load (i32.load offset=32 (local.get $b))))))
              {run}
              (i64.const 0))
            (data (i32.const 2048) "{}")
            {more})"#,
        plan.replace('"', "\\22")
    );
    wat::parse_str(&wat).unwrap_or_else(|error| panic!("{error}"))
}

/// A plan of one tile of `len` bytes over a window of `window` bytes.
pub(crate) fn one_tile(window: u64, len: u64) -> String {
    format!(
        r#"{{"outputs":[{{"role":"w","dtype":"U8","shape":[{len}],"tiles":[{{"len":{len},"inputs":[[{{"copy":0,"len":{window}}}]]}}]}}]}}"#
    )
}

/// One tile outside any plan.
pub(crate) struct Tile<'a> {
    input: &'a [u8],
    len: usize,
}

impl<'a> Tile<'a> {
    pub(crate) fn of(input: &'a [u8], len: usize) -> Self {
        Tile { input, len }
    }

    pub(crate) fn run(&self, program: &dyn Program) -> Result<Vec<u8>> {
        let windows = [self.input.len() as u32];
        let request = TileRequest {
            target: 0,
            group: 0,
            turn: 0,
            tile: 0,
            offset: 0,
            out_len: self.len as u32,
            windows: &windows,
            args: &[],
            params: b"{}",
        };
        let mut io = Io { input: self.input, output: Vec::new() };
        match program.run(&request, &mut io)? {
            RunReply::Done { .. } => Ok(io.output),
            RunReply::Refused { error, .. } => panic!("{error:?}"),
        }
    }
}

struct Io<'a> {
    input: &'a [u8],
    output: Vec<u8>,
}

impl TileIo for Io<'_> {
    fn fill(&mut self, _: usize, memory: &mut [u8]) -> Result<()> {
        memory.copy_from_slice(self.input);
        Ok(())
    }

    fn take(&mut self, output: &[u8]) -> Result<()> {
        self.output = output.to_vec();
        Ok(())
    }
}

/// The tile's bytes, which every engine agrees on.
pub(crate) fn compute(module: &[u8], tile: &Tile<'_>) -> Vec<u8> {
    let module = Module::parse(module).unwrap();
    let on = |name| tile.run(engine(name).unwrap().compile(&module).unwrap().as_ref()).unwrap();
    let outputs = ENGINES.map(on);
    assert!(outputs.iter().all(|output| *output == outputs[0]), "{ENGINES:?}: {outputs:02x?}");
    outputs[0].clone()
}

/// A folder with `m.wasm`, a recipe that makes `o` of `t`, and a checkpoint.
pub(crate) struct Bench {
    folder: tempfile::TempDir,
    inputs: String,
}

impl Bench {
    pub(crate) fn new(module: &[u8]) -> Self {
        let bench = Bench { folder: tempfile::tempdir().unwrap(), inputs: "a = \"t\"".into() };
        std::fs::write(bench.at("m.wasm"), module).unwrap();
        bench
    }

    /// With other inputs than `a = "t"`.
    pub(crate) fn with_inputs(mut self, inputs: &str) -> Self {
        self.inputs = inputs.into();
        self
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn recipe(&self) -> Recipe {
        let text = format!(
            "recipe = 1\nname = \"hazard\"\n[[step]]\nmodule = \"./m.wasm\"\ninputs = {{ {} }}\noutputs = {{ w = \"o\" }}\n\
             [names]\ndrop = [\"*.dropped\"]\n",
            self.inputs
        );
        Recipe::parse(&text, &self.at("recipe.toml")).unwrap()
    }

    /// Writes the checkpoint: U8 tensors, in the file in this order.
    pub(crate) fn write(&self, tensors: &[(&str, Vec<u8>)]) {
        let tensors: Vec<Tensor<'_>> = tensors
            .iter()
            .map(|(name, bytes)| (*name, safetensors::Dtype::U8, vec![bytes.len()], bytes.clone()))
            .collect();
        write_safetensors(&self.at("model.safetensors"), &tensors);
    }

    /// Writes a checkpoint in which the tensor `t` begins at byte `offset`.
    pub(crate) fn write_at(&self, offset: usize, tensor: &[u8]) {
        const HEADER_BYTES: usize = 512;
        let before = offset - 8 - HEADER_BYTES;
        let header = format!(
            r#"{{"a.dropped":{{"dtype":"U8","shape":[{before}],"data_offsets":[0,{before}]}},"t":{{"dtype":"U8","shape":[{}],"data_offsets":[{before},{}]}}}}"#,
            tensor.len(),
            before + tensor.len()
        );
        let mut file = (HEADER_BYTES as u64).to_le_bytes().to_vec();
        file.extend_from_slice(format!("{header:HEADER_BYTES$}").as_bytes());
        file.resize(offset, 0xA5);
        file.extend_from_slice(tensor);
        std::fs::write(self.at("model.safetensors"), file).unwrap();
    }

    /// Changes the file's last byte in place.
    pub(crate) fn change_a_byte(&self) {
        let file = std::fs::File::options().read(true).write(true).open(self.at("model.safetensors")).unwrap();
        let at = file.metadata().unwrap().len() - 1;
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x55], at).unwrap();
    }

    fn checkpoint(&self) -> Arc<Checkpoint> {
        Arc::new(Checkpoint::open(&self.at("model.safetensors")).unwrap())
    }

    /// The key.
    pub(crate) fn key(&self) -> String {
        let (recipe, checkpoint) = (self.recipe(), self.checkpoint());
        let host = Host::new(EngineName::Wasmi);
        let outline = host.outline(&recipe, &checkpoint, Tp::ONE, 1 << 20).unwrap();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let digests = source_digests(&checkpoint, &NoCache, &pool, &Silent).unwrap();
        outline.action(&digests).unwrap().key.to_string()
    }

    /// The digest of `o`: the same on every engine and in every setting.
    pub(crate) fn same_everywhere(&self) -> String {
        let (recipe, checkpoint) = (self.recipe(), self.checkpoint());
        let mut seen = Vec::new();
        for name in ENGINES {
            let host = Host::new(name);
            for setting in Setting::ALL {
                let table = host.table(&recipe, &checkpoint, Tp::ONE, setting).unwrap();
                seen.push((table.0["o"].1.to_string(), name, setting));
            }
        }
        assert!(seen.iter().all(|(digest, ..)| *digest == seen[0].0), "{seen:#?}");
        seen.swap_remove(0).0
    }

    /// The tensor digest of bytes.
    pub(crate) fn digest_of(&self, bytes: &[u8]) -> String {
        tensor_digest(bytes.len() as u64, &leaf_hashes(bytes)).to_string()
    }

    /// Builds into the bench's store, within limits that end soon.
    pub(crate) fn build(&self, name: EngineName, progress: &dyn Progress) -> Result<String> {
        let store = Store::open(&self.at("store"), StoreOptions::default())?;
        let (recipe, library) = (self.recipe(), Library::new(Some(store.clone())));
        let mut limits = Limits::default();
        limits.run_fuel_base = 5_000_000;
        limits.memory_bytes = 16 << 20;
        let engines = Engines::one(move || engine_with(name, limits));
        let outline = Outline::new(Inputs {
            recipe: &recipe,
            checkpoint: self.checkpoint(),
            tp: Tp::ONE,
            modules: &library,
            engine: &engines,
            facts: &NoFacts,
            tile_bytes: 1 << 20,
        })?;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).stack_size(4 << 20).build().unwrap();
        let options = BuildOptions {
            mode: Mode::Required,
            verify: Verify::Always,
            pool: &pool,
            memory_budget_bytes: 1 << 20,
            check_source: false,
            remote: None,
            progress,
            provenance: &|| Ok(serde_json::json!({})),
        };
        Ok(build(&outline, Ok(store), &options)?.content_digest().to_string())
    }

    /// Entries, and work in progress.
    pub(crate) fn left_in_store(&self) -> usize {
        let count = |folder: &str| std::fs::read_dir(self.at("store").join(folder)).map_or(0, Iterator::count);
        count("entries") + count("tmp")
    }
}
