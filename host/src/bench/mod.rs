//! Measurements, as ratios against a baseline in the same process.

mod cases;
pub mod checkpoint;
mod native;
mod plain;
pub mod registry;
pub mod store;
pub mod transform;

use crate::tensor::Dtype;

/// A recipe over generated tensors: a form of a shipped module.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The module, and which of its forms.
    pub name: String,
    /// The recipe's text.
    pub recipe: String,
    /// What [`checkpoint::write_tensors`] is to write: name, dtype, shape.
    pub tensors: Vec<(String, Dtype, Vec<u64>)>,
}

/// One sample for each form of every shipped module, of `columns` columns, a
/// multiple of 128.
pub fn samples(columns: u64) -> Vec<Sample> {
    let sample = |case: cases::Case| Sample { name: case.name(), recipe: case.recipe(), tensors: case.inputs };
    cases::sized(0, columns).into_iter().map(sample).collect()
}
