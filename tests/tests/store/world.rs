//! A small model with a recipe, and a store that the program works on.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde_json::Value;
use weightmill::progress::Silent;
use weightmill::store::{Lease, Store, StoreOptions, Verify};
use weightmill_tests::{Ran, Tensor, run, run_recipe, seeded_bytes, write_safetensors};

pub(crate) const LAYERS: usize = 8;
/// Every layer, and `rest`.
pub(crate) const BLOCKS: usize = LAYERS + 1;
/// Layers with an odd number have a tensor that the recipe shards.
pub(crate) const SHARDED: usize = LAYERS / 2;
const RECIPE: &str = r#"
recipe = 1
name = "small"

[[step]]
module  = "tp-shard"
inputs  = { w = "layers.{i}.up" }
outputs = { w = "layers.{i}.up" }
params  = { dim = 0 }

[[step]]
module  = "cast"
inputs  = { w = "embed" }
outputs = { w = "embed" }
params  = { dtype = "BF16" }

[blocks]
patterns = ["layers.{i}."]
"#;

/// A recipe, a checkpoint and a store that is not there yet.
pub(crate) struct World {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) recipe: PathBuf,
    pub(crate) checkpoint: PathBuf,
    pub(crate) store: PathBuf,
}

impl World {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let recipe = folder.path().join("small.toml");
        fs::write(&recipe, RECIPE).unwrap();
        let checkpoint = folder.path().join("base.safetensors");
        write_model(&checkpoint, 1, &[]);
        let store = folder.path().join("store");
        World { folder, recipe, checkpoint, store }
    }

    /// Another checkpoint, whose layers in `tuned` differ from those of `seed`.
    pub(crate) fn other_checkpoint(&self, seed: u64, tuned: &[usize]) -> PathBuf {
        let path = self.folder.path().join(format!("model-{seed}-{}.safetensors", tuned.len()));
        write_model(&path, seed, tuned);
        path
    }

    /// Builds the checkpoint's entry.
    pub(crate) fn build(&self, more: &[&str]) -> Value {
        self.build_of(&self.checkpoint, more)
    }

    pub(crate) fn build_of(&self, checkpoint: &Path, more: &[&str]) -> Value {
        run_recipe("build", &self.recipe, checkpoint, &self.store, more).ok()
    }

    /// A command about the store.
    pub(crate) fn ask(&self, words: &[&str]) -> Ran {
        run(words.iter().map(OsStr::new).chain([OsStr::new("--store"), self.store.as_os_str()]))
    }

    /// `verify --rebuild` of an entry.
    pub(crate) fn rebuild(&self, key: &str, checkpoint: &Path, more: &[&str]) -> Ran {
        let mut words = vec!["--entry", key, "--rebuild"];
        words.extend(more);
        run_recipe("verify", &self.recipe, checkpoint, &self.store, &words)
    }

    pub(crate) fn open(&self) -> Store {
        Store::open(&self.store, StoreOptions::default()).unwrap()
    }

    pub(crate) fn lease(&self, key: &str) -> Lease {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        self.open().lease(&key.parse().unwrap(), Verify::Never, &pool, &Silent).unwrap().expect("it is there")
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        let listed = self.ask(&["store", "ls"]).ok();
        listed["entries"].as_array().unwrap().iter().map(|e| text(&e["key"])).collect()
    }
}

pub(crate) fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("expected a text, found {value}")).to_string()
}

pub(crate) fn texts(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(text).collect()
}

fn write_model(path: &Path, seed: u64, tuned: &[usize]) {
    let embed: Vec<u8> = (0..64 * 64).flat_map(|i| (seed as f32 + i as f32 / 3.0).to_le_bytes()).collect();
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> =
        vec![("embed".into(), Dtype::F32, vec![64, 64], embed)];
    for layer in 0..LAYERS {
        let seed = seed * 100 + layer as u64 + if tuned.contains(&layer) { 50 } else { 0 };
        let mut add = |name: &str, rows: usize, salt: u64| {
            let bytes = seeded_bytes(seed * 10 + salt, rows * 128 * 2);
            tensors.push((format!("layers.{layer}.{name}"), Dtype::BF16, vec![rows, 128], bytes));
        };
        add("norm", 1, 1);
        add("down", 96, 2);
        if layer % 2 == 1 {
            add("up", 64, 3);
        }
    }
    let rows: Vec<Tensor<'_>> = tensors.iter().map(|(n, d, s, b)| (n.as_str(), *d, s.clone(), b.clone())).collect();
    write_safetensors(path, &rows);
}
