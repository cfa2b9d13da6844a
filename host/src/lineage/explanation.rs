//! How a tensor came about.

use weightmill_guest::abi::Tp;

use super::ranges::Ranges;
use crate::attest::ModuleRow;
use crate::digest::{ApplicationDigest, TensorDigest};
use crate::tensor::{TensorName, TensorType};

/// How a tensor came about.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// What the tensor is.
    pub from: Link,
    /// The applications that it comes from, the last one first.
    pub steps: Vec<StepUse>,
    /// The source tensors that it comes from.
    pub sources: Vec<SourceUse>,
    /// Whether the sources' names are known.
    pub named: bool,
}

/// What something comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Link {
    /// Position in [`Explanation::sources`].
    Source(usize),
    /// An output of an application.
    Output {
        /// Position in [`Explanation::steps`].
        step: usize,
        /// The output's role.
        role: String,
    },
}

/// An application.
#[derive(Clone, Debug)]
pub struct StepUse {
    /// Its digest in the action.
    pub application: ApplicationDigest,
    /// The module. Its name and version are what it says itself, or what the
    /// build recorded.
    pub module: ModuleRow,
    /// Whether the module was at hand.
    pub planned: bool,
    /// Its parameters.
    pub params: serde_json::Value,
    /// Tensor parallel size and rank, if they reached the module.
    pub tp: Option<Tp>,
    /// The recipe's step, from 1, and the values of its captures.
    pub recipe_step: Option<(usize, Vec<(String, String)>)>,
    /// The outputs that the tensor comes from.
    pub outputs: Vec<OutputUse>,
    /// All inputs.
    pub inputs: Vec<InputUse>,
}

/// An output of an application.
#[derive(Clone, Debug)]
pub struct OutputUse {
    /// Its role.
    pub role: String,
    /// What the recipe's step called it.
    pub name: Option<TensorName>,
    /// What it is, and how it is made.
    pub planned: Option<(TensorType, How)>,
}

/// How bytes are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// The host moved them.
    Moved,
    /// The module computed them.
    Computed,
}

/// An input of an application.
#[derive(Clone, Debug)]
pub struct InputUse {
    /// Its role.
    pub role: String,
    /// Its position in a list of inputs.
    pub index: u64,
    /// Where it comes from.
    pub link: Link,
    /// What it is, as far as is known.
    pub tensor: Option<TensorType>,
    /// Its bytes that the tensor comes from, as far as is known.
    pub ranges: Option<Ranges>,
}

/// A source tensor.
#[derive(Clone, Debug)]
pub struct SourceUse {
    /// The name that it had in the checkpoint.
    pub name: Option<TensorName>,
    /// What it is.
    pub tensor: TensorType,
    /// Its digest.
    pub digest: TensorDigest,
    /// Its bytes that the tensor comes from, as far as is known.
    pub ranges: Option<Ranges>,
}
