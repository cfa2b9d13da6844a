use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use super::{Dtype, Part};

/// What the custom section `weightmill` says.
///
/// ```
/// use weightmill_guest::abi::Metadata;
///
/// let metadata: Metadata = serde_json::from_str(r#"{"abi":1,"name":"turn","version":"1.0.0"}"#).unwrap();
/// assert_eq!((metadata.uses_tp, metadata.fuel_per_byte), (false, 64));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metadata {
    /// ABI version, 1.
    pub abi: u32,
    /// The module's name: lower-case letters, digits and dashes.
    pub name: String,
    /// The module's own version, three numbers.
    pub version: String,
    /// What it does, in one line.
    #[serde(default)]
    pub summary: String,
    /// Whether plans depend on tensor parallel size and rank.
    #[serde(default)]
    pub uses_tp: bool,
    /// Fuel for each byte into or out of `wm_run`.
    #[serde(default = "Metadata::default_fuel_per_byte")]
    pub fuel_per_byte: u64,
    /// Where the source is.
    #[serde(default)]
    pub source: String,
    /// SPDX licence expression.
    #[serde(default)]
    pub licence: String,
}

impl Metadata {
    /// The fuel per byte of a module that does not say.
    pub const fn default_fuel_per_byte() -> u64 {
        64
    }
}

/// Tensor parallel size and this rank.
///
/// ```
/// use weightmill_guest::abi::Tp;
///
/// assert_eq!(Tp { rank: 1, size: 4 }.range(8, "heads").unwrap(), 2..4);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tp {
    /// This rank, below `size`.
    pub rank: u64,
    /// How many ranks share a tensor, at least 1.
    pub size: u64,
}

impl Tp {
    /// No tensor parallelism.
    pub const ONE: Tp = Tp { rank: 0, size: 1 };
}

/// One input tensor's metadata.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanInput {
    /// Element type.
    pub dtype: Dtype,
    /// Position in its list role; 0 for a plain role.
    pub index: u64,
    /// The module's name for this input.
    pub role: String,
    /// Extents, outermost first; empty for a scalar.
    pub shape: Vec<u64>,
}

/// The document that `wm_plan` gets. Fields are in canonical order. `P` is how
/// JSON values are held: the host's library and the SDK differ in that.
///
/// ```
/// use weightmill_guest::abi::{PlanRequest, Tp};
///
/// let request: PlanRequest = serde_json::from_str(
///     r#"{"abi":1,"inputs":[],"outputs":["w"],"params":{},"tile_bytes":1048576,"tp":{"rank":0,"size":1}}"#,
/// )
/// .unwrap();
/// assert_eq!(request.tp, Tp::ONE);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanRequest<P = serde_json::Value> {
    /// ABI version, 1.
    pub abi: u32,
    /// Inputs by role, then index.
    pub inputs: Vec<PlanInput>,
    /// The output roles that are wanted, sorted.
    pub outputs: Vec<String>,
    /// The recipe's parameters: a JSON object.
    pub params: P,
    /// The tile size that the host would like, in bytes.
    pub tile_bytes: u64,
    /// `{0, 1}` unless the module declares `uses_tp`.
    pub tp: Tp,
}

fn one() -> u64 {
    1
}

fn is_one(n: &u64) -> bool {
    *n == 1
}

/// Equal tiles, one after the other.
///
/// ```
/// use weightmill_guest::abi::TileGroup;
///
/// let group: TileGroup = serde_json::from_str(r#"{"len":16}"#).unwrap();
/// assert_eq!(group, TileGroup::new(1, 16));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TileGroup {
    /// How many.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub count: u64,
    /// Output bytes of each.
    pub len: u64,
    /// For each input window, what is gathered into it.
    #[serde(default)]
    pub inputs: Vec<Vec<Part>>,
    /// For the module's own use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<i64>,
}

/// One output of a plan: exactly one of `view` and `tiles` is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanOutput {
    /// The module's name for this output.
    pub role: String,
    /// Element type.
    pub dtype: Dtype,
    /// Extents, outermost first.
    pub shape: Vec<u64>,
    /// Bytes moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub view: Option<Vec<Part>>,
    /// Bytes computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tiles: Option<Vec<TileGroup>>,
}

/// A tensor that stays inside the plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scratch {
    /// Element type.
    pub dtype: Dtype,
    /// Extents, outermost first.
    pub shape: Vec<u64>,
    /// How it is computed.
    pub tiles: Vec<TileGroup>,
}

/// Who or what a plan error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlanErrorKind {
    /// A parameter is missing, unknown or wrong: the recipe's fault.
    Params,
    /// An input's dtype or shape does not fit.
    Input,
    /// The tensor parallel size does not fit.
    Tp,
}

/// Why a module does not plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanErrorBody {
    /// What it is about.
    pub kind: PlanErrorKind,
    /// The parameter, for kind `params`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub param: Option<String>,
    /// The role, for kind `input`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// What was expected and what was found.
    pub message: String,
    /// What to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// Why a tile cannot be computed.
///
/// ```
/// use weightmill_guest::abi::RunError;
///
/// let error: RunError = serde_json::from_str(r#"{"kind":"data","role":"w","index":9,"message":"NaN"}"#).unwrap();
/// assert_eq!(error.index, Some(9));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunError {
    /// `"data"`.
    pub kind: String,
    /// The input that holds the offending value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// Its flat index in that input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<u64>,
    /// What was found.
    pub message: String,
    /// What to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}
