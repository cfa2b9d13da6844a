//! What a recipe comes to for one checkpoint.

use std::collections::BTreeMap;

use super::layout::Layout;
use super::module_ref::ModuleRef;
use crate::error::{Location, Result};
use crate::tensor::{TensorName, TensorType};

/// Everything that a recipe says about a checkpoint, with all names final.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Resolution {
    /// In order of execution: an application reads only what earlier ones made.
    pub applications: Vec<Application>,
    /// Every tensor of the result by its final name, without aliases.
    pub tensors: BTreeMap<TensorName, Origin>,
    /// Second names, and the tensors that they stand for; both final.
    pub aliases: BTreeMap<TensorName, TensorName>,
    /// In stream order; every tensor is in one. The block `rest`, if there is
    /// one, is first.
    pub blocks: Vec<Block>,
    /// How blocks are cut into shards.
    pub layout: Layout,
    /// The recipe's free-form guards.
    pub guards: BTreeMap<String, String>,
    /// What became of the source tensors, for display.
    pub sources: SourceUse,
}

/// What became of source tensors; lists are sorted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SourceUse {
    /// Left out by `names.drop`.
    pub dropped: Vec<TensorName>,
    /// Taken by no step, and left out by `unmatched = "drop"`.
    pub unmatched_dropped: Vec<TensorName>,
    /// In the result unchanged.
    pub passed_through: Vec<TensorName>,
}

/// Where a tensor comes from.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// The checkpoint, by the name that it has there.
    Source(TensorName),
    /// An output.
    Output {
        /// Position in [`Resolution::applications`].
        application: usize,
        /// The output's role.
        role: String,
    },
}

/// One use of a step.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Application {
    /// Position in [`Recipe::steps`](super::Recipe::steps).
    pub step: usize,
    /// The step's captures and their values, for display.
    pub captures: Vec<(String, String)>,
    /// The module.
    pub module: ModuleRef,
    /// A JSON object; `$config` expressions are values by now.
    pub params: serde_json::Value,
    /// Whether the tensor parallel size and rank reach the module.
    pub tp: bool,
    /// Sorted by role (bytes), then index.
    pub inputs: Vec<Input>,
    /// Sorted by role (bytes).
    pub outputs: Vec<Output>,
    /// Where the step begins.
    pub at: Location,
}

/// A tensor that an application reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// The module's name for it.
    pub role: String,
    /// Position in its list; 0 for a plain role.
    pub index: u64,
    /// Whether the role is a list.
    pub list: bool,
    /// Its name when the step ran, before renaming.
    pub name: TensorName,
    /// Where it comes from.
    pub origin: Origin,
}

/// A tensor that an application makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// The module's name for it.
    pub role: String,
    /// The name that the step gives it, before renaming.
    pub name: TensorName,
}

/// What is streamed as one unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The text that its pattern matched, or `rest`.
    pub name: String,
    /// Ascending by name.
    pub tensors: Vec<TensorName>,
}

/// Knows what applications make.
///
/// It is asked only when a later step's `where` needs the dtype or the extents
/// of an application's outputs, at most once for each application.
pub trait Facts {
    /// Element types and extents of the outputs, by role. All earlier
    /// applications are in `so_far.applications`; the rest of `so_far` is
    /// unfinished.
    ///
    /// # Errors
    /// Whatever stands in the way of knowing.
    fn outputs(&mut self, application: &Application, so_far: &Resolution) -> Result<BTreeMap<String, TensorType>>;
}
