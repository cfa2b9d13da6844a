//! A recipe's text, alone and met with a checkpoint's names.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::OnceLock;

use serde_json::{Value, json};
use weightmill::error::{Error, Fault, Result};
use weightmill::recipe::{Application, Facts, Origin, Recipe, Resolution, resolve};
use weightmill::tensor::{Dtype, TensorName, TensorType};

use super::check_error;

const FILE: &str = "r.toml";

/// The input is the text.
pub(super) fn run(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let recipe = match Recipe::parse(text, Path::new(FILE)) {
        Ok(recipe) => recipe,
        Err(error) => return check_place(&error, text),
    };
    for config in [Some(config()), None] {
        match resolve(&recipe, sources(), config, &mut Flat) {
            Ok(resolution) => resolved(&resolution),
            Err(error) => check_place(&error, text),
        }
    }
}

/// An error names a place that the text has.
fn check_place(error: &Error, text: &str) {
    check_error(error, Fault::Input);
    let Some(at) = error.location() else { return };
    assert_eq!(at.file, Path::new(FILE));
    let lines = text.split('\n').count() as u32;
    assert!((1..=lines).contains(&at.line), "{error}: there are {lines} lines");
    let line = text.split('\n').nth(at.line as usize - 1).unwrap_or_default();
    assert!((1..=line.chars().count() as u32 + 1).contains(&at.column), "{error}: beyond its line");
}

/// Every name is final and in its place.
fn resolved(resolution: &Resolution) {
    for (index, application) in resolution.applications.iter().enumerate() {
        assert!(application.params.is_object());
        for input in &application.inputs {
            assert!(origin_is_there(&input.origin, resolution, index), "{:?}", input.origin);
        }
        let roles: Vec<_> = application.inputs.iter().map(|input| (&input.role, input.index)).collect();
        assert!(roles.windows(2).all(|pair| pair[0] < pair[1]), "inputs are sorted: {roles:?}");
    }
    let all = resolution.applications.len();
    assert!(resolution.tensors.values().all(|origin| origin_is_there(origin, resolution, all)));
    for (alias, of) in &resolution.aliases {
        assert!(resolution.tensors.contains_key(of) && !resolution.tensors.contains_key(alias));
    }
    let in_blocks: Vec<&TensorName> = resolution.blocks.iter().flat_map(|block| &block.tensors).collect();
    let distinct: BTreeSet<&TensorName> = in_blocks.iter().copied().collect();
    assert_eq!(in_blocks.len(), distinct.len(), "a tensor is in one block");
    assert!(distinct.into_iter().eq(resolution.tensors.keys()), "every tensor is in a block");
}

fn origin_is_there(origin: &Origin, resolution: &Resolution, before: usize) -> bool {
    match origin {
        Origin::Source(name) => sources().contains_key(name),
        Origin::Output { application, role } => {
            *application < before && resolution.applications[*application].outputs.iter().any(|o| o.role == *role)
        }
    }
}

/// Says that every output is F32 [4].
struct Flat;

impl Facts for Flat {
    fn outputs(&mut self, application: &Application, _: &Resolution) -> Result<BTreeMap<String, TensorType>> {
        let tensor = TensorType::new(Dtype::F32, vec![4]).expect("a small tensor");
        Ok(application.outputs.iter().map(|output| (output.role.clone(), tensor.clone())).collect())
    }
}

/// Names of the shapes that recipes meet.
fn sources() -> &'static BTreeMap<TensorName, TensorType> {
    static SOURCES: OnceLock<BTreeMap<TensorName, TensorType>> = OnceLock::new();
    SOURCES.get_or_init(|| {
        let mut names: Vec<(String, Dtype, Vec<u64>)> = vec![
            ("w".into(), Dtype::F32, vec![4, 4]),
            ("wte".into(), Dtype::BF16, vec![8, 4]),
            ("lm_head.weight".into(), Dtype::BF16, vec![8, 4]),
            ("model.norm.weight".into(), Dtype::F32, vec![4]),
            ("a.rotary_emb.inv_freq".into(), Dtype::F32, vec![2]),
            ("scalar".into(), Dtype::F32, vec![]),
        ];
        for layer in [0, 1, 2, 10] {
            names.push((format!("h.{layer}.qkv"), Dtype::BF16, vec![12, 4]));
            names.push((format!("h.{layer}.mlp.weight"), Dtype::F32, vec![4, 4]));
            for expert in 0..2 {
                names.push((format!("h.{layer}.experts.{expert}.w1.weight"), Dtype::BF16, vec![4, 4]));
            }
        }
        let typed = |(name, dtype, shape): (String, Dtype, Vec<u64>)| {
            (TensorName::new(&name).expect("a good name"), TensorType::new(dtype, shape).expect("a small tensor"))
        };
        names.into_iter().map(typed).collect()
    })
}

fn config() -> &'static Value {
    static CONFIG: OnceLock<Value> = OnceLock::new();
    CONFIG.get_or_init(|| json!({ "hidden_size": 12, "num_attention_heads": 4, "a": { "b": [1, null], "c": "text" } }))
}
