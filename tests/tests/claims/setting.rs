//! A small checkpoint, a recipe with a chain of steps, and a store.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use safetensors::Dtype;
use serde_json::Value;
use weightmill_tests::{Ran, Tensor, run, run_recipe, seeded_bytes, write_safetensors};

/// Two layers: `up` is sharded, then cast; `qkv` is regrouped; `norm` passes
/// through; `head` is tied to `embed`.
const RECIPE: &str = r#"
recipe = 1
name = "small"

[[step]]
module  = "qkv-regroup"
inputs  = { qkv = "h.{i}.qkv" }
outputs = { qkv = "h.{i}.qkv" }
params  = { groups = 4, q_per_group = 1, head_dim = 8 }

[[step]]
module  = "tp-shard"
inputs  = { w = "h.{i}.up" }
outputs = { w = "h.{i}.shard" }
params  = { dim = 0 }

[[step]]
module  = "cast"
inputs  = { w = "h.{i}.shard" }
outputs = { w = "h.{i}.up" }
params  = { dtype = "BF16" }

[[tie]]
alias = "head"
of    = "embed"

[blocks]
patterns = ["h.{i}."]
"#;

pub(crate) struct Setting {
    folder: tempfile::TempDir,
}

pub(crate) fn tensors() -> Vec<Tensor<'static>> {
    let layers = [("h.0.qkv", "h.0.up", "h.0.norm"), ("h.1.qkv", "h.1.up", "h.1.norm")];
    let mut tensors = vec![("embed", Dtype::BF16, vec![20, 24], seeded_bytes(9, 20 * 24 * 2))];
    for (i, (qkv, up, norm)) in layers.into_iter().enumerate() {
        let seed = 10 * i as u64;
        tensors.push((qkv, Dtype::BF16, vec![96, 24], seeded_bytes(seed, 96 * 24 * 2)));
        let values = (0..64 * 16).map(|v| (seed as f32 + v as f32) / 8.0);
        tensors.push((up, Dtype::F32, vec![64, 16], values.flat_map(f32::to_le_bytes).collect()));
        tensors.push((norm, Dtype::F32, vec![24], seeded_bytes(seed + 2, 24 * 4)));
    }
    tensors
}

impl Setting {
    pub(crate) fn new() -> Self {
        let setting = Setting { folder: tempfile::tempdir().unwrap() };
        fs::write(setting.recipe(), RECIPE).unwrap();
        write_safetensors(&setting.checkpoint(), &tensors());
        setting
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A path as an argument.
    pub(crate) fn arg(&self, name: &str) -> String {
        self.at(name).to_str().unwrap().to_string()
    }

    pub(crate) fn recipe(&self) -> PathBuf {
        self.at("small.toml")
    }

    pub(crate) fn checkpoint(&self) -> PathBuf {
        self.at("base.safetensors")
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.at("store")
    }

    /// The key of a new entry.
    pub(crate) fn build(&self, checkpoint: &Path, more: &[&str]) -> String {
        text(&run_recipe("build", &self.recipe(), checkpoint, &self.store(), more).ok()["key"])
    }

    /// A command about the store.
    pub(crate) fn ask(&self, words: &[&str]) -> Ran {
        run(words.iter().map(OsStr::new).chain([OsStr::new("--store"), self.store().as_os_str()]))
    }

    /// The checkpoint, with one tensor changed by `change`.
    pub(crate) fn changed(&self, name: &str, tensor: &str, change: impl Fn(&mut Vec<u8>)) -> PathBuf {
        let mut tensors = tensors();
        change(&mut tensors.iter_mut().find(|t| t.0 == tensor).unwrap().3);
        let path = self.at(name);
        write_safetensors(&path, &tensors);
        path
    }
}

pub(crate) fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("expected a text, found {value}")).to_string()
}

pub(crate) fn parse(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Whether a program is there; says so if it is not.
pub(crate) fn is_there(program: &str, argument: &str) -> bool {
    let found = Command::new(program).arg(argument).output().is_ok_and(|output| output.status.success());
    if !found {
        eprintln!("skipped: no {program}");
    }
    found
}
