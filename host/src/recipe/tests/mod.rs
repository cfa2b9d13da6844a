//! Recipes as a whole: text in, resolution or error out.

mod mutation;
mod naming;
mod parsing;
mod steps;

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::{Application, Facts, Origin, Recipe, Resolution, resolve};
use crate::error::{Code, Error, Result};
use crate::tensor::{Dtype, TensorName, TensorType};

const HEAD: &str = "recipe = 1\nname = \"t\"\n";

/// Says that every output is F32 [4], and counts how often it is asked.
#[derive(Default)]
struct Flat {
    asked: usize,
}

impl Facts for Flat {
    fn outputs(&mut self, application: &Application, so_far: &Resolution) -> Result<BTreeMap<String, TensorType>> {
        self.asked += 1;
        for input in &application.inputs {
            if let Origin::Output { application, .. } = &input.origin {
                assert!(*application < so_far.applications.len(), "inputs are known before they are asked for");
            }
        }
        let tensor = TensorType::new(Dtype::F32, vec![4]).unwrap();
        Ok(application.outputs.iter().map(|output| (output.role.clone(), tensor.clone())).collect())
    }
}

fn parse(body: &str) -> Result<Recipe> {
    Recipe::parse(&format!("{HEAD}{body}"), Path::new("r.toml"))
}

/// Names, as BF16 [2, 2]; `name:F32` and `name:F32:1` give dtype and number of
/// dimensions.
fn sources(names: &[&str]) -> BTreeMap<TensorName, TensorType> {
    let source = |text: &&str| {
        let mut parts = text.split(':');
        let name = TensorName::new(parts.next().unwrap()).unwrap();
        let dtype = parts.next().unwrap_or("BF16");
        let dtype = Dtype::ALL.iter().copied().find(|d| d.as_str() == dtype).unwrap();
        let ndim = parts.next().map_or(2, |n| n.parse().unwrap());
        (name, TensorType::new(dtype, vec![2; ndim]).unwrap())
    };
    names.iter().map(source).collect()
}

fn run_with(body: &str, names: &[&str], config: Option<&Value>) -> Result<Resolution> {
    resolve(&parse(body)?, &sources(names), config, &mut Flat::default())
}

fn run(body: &str, names: &[&str]) -> Result<Resolution> {
    run_with(body, names, None)
}

/// The error's code, line and column; lines are counted after [`HEAD`].
#[track_caller]
fn expect_error<T>(result: Result<T>, code: Code, place: (u32, u32)) -> Error {
    let error = match result {
        Ok(_) => panic!("expected {code}"),
        Err(error) => error,
    };
    assert_eq!(error.code(), code, "{error}");
    let at = error.location().unwrap_or_else(|| panic!("no location: {error}"));
    assert_eq!((at.line - 2, at.column), place, "{error}");
    error
}

fn names(resolution: &Resolution) -> Vec<&str> {
    resolution.tensors.keys().map(TensorName::as_str).collect()
}

/// `role[index]=name` for every input of an application.
fn inputs(application: &Application) -> Vec<String> {
    application
        .inputs
        .iter()
        .map(|input| match input.list {
            true => format!("{}[{}]={}", input.role, input.index, input.name),
            false => format!("{}={}", input.role, input.name),
        })
        .collect()
}

fn outputs(resolution: &Resolution) -> Vec<&str> {
    resolution.applications.iter().flat_map(|a| &a.outputs).map(|output| output.name.as_str()).collect()
}
