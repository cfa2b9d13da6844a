//! What a transform is, and how the ABI's calls reach it.

use alloc::format;
use alloc::string::String;

use crate::abi::{ABI_VERSION, PlanAnswer, RunError};
use crate::error::{DataError, PlanError, Result};
use crate::json::Value;
use crate::outputs::Outputs;
use crate::params::Params;
use crate::plan::Plan;
use crate::tile::Tile;
use crate::wire::Request;

/// The part of a module that the attribute macro
/// [`transform`](weightmill_guest_macros::transform) writes.
///
/// ```
/// use weightmill_guest::abi::Metadata;
/// use weightmill_guest::prelude::*;
///
/// #[transform(name = "first-rows", version = "1.2.0", uses_tp)]
/// struct FirstRows {
///     rows: u64,
/// }
/// let metadata: Metadata = serde_json::from_str(FirstRows::METADATA).unwrap();
/// assert_eq!((metadata.name.as_str(), metadata.uses_tp, FirstRows::PARAMS), ("first-rows", true, &["rows"][..]));
/// ```
pub trait Module: Sized {
    /// The metadata section: the JSON text of [`Metadata`](crate::abi::Metadata).
    const METADATA: &'static str;
    /// The names of all parameters.
    const PARAMS: &'static [&'static str];

    /// The transform with these parameters.
    ///
    /// # Errors
    /// If one is missing or of another type.
    fn from_params(params: &Params<'_>) -> Result<Self>;
}

/// A transform: a struct of parameters that plans, and computes tiles if its
/// plan has any.
///
/// ```
/// use weightmill_guest::prelude::*;
///
/// /// Turns a matrix.
/// #[transform(name = "turn", version = "1.0.0", summary = "turns a matrix")]
/// pub struct Turn {}
///
/// impl Transform for Turn {
///     fn plan(&self, cx: &Plan) -> Result<Outputs> {
///         let w = cx.input("w")?;
///         cx.outputs().view("w", w.permute(&[1, 0])?)
///     }
/// }
/// # use weightmill_guest::native::{Case, Tensor};
/// let turned = Case::new().input("w", Tensor::of(&[2, 3], &[1_u8, 2, 3, 4, 5, 6])).run::<Turn>().unwrap();
/// assert_eq!(turned["w"].bytes, [1, 4, 2, 5, 3, 6]);
/// ```
pub trait Transform: Module {
    /// What is made of the inputs, from their dtypes and shapes alone.
    ///
    /// # Errors
    /// If the parameters, the inputs or the tensor parallel size do not fit.
    fn plan(&self, cx: &Plan) -> Result<Outputs>;

    /// Computes one tile. A view needs none.
    ///
    /// # Errors
    /// If the data holds a value that the transform cannot take.
    fn run(&self, tile: &mut Tile) -> Result<(), DataError> {
        Err(DataError::new(format!("this transform computes no tiles, but was given one of tensor {}", tile.target())))
    }
}

/// Answers a plan request.
pub fn plan<T: Transform>(request: &Request) -> PlanAnswer {
    match try_plan::<T>(request) {
        Ok(outputs) => outputs.finish(),
        Err(error) => PlanAnswer::Error { error: error.into_body() },
    }
}

fn try_plan<T: Transform>(request: &Request) -> Result<Outputs> {
    if request.abi != ABI_VERSION {
        return Err(PlanError::param("", format!("this module speaks ABI {ABI_VERSION}, not {}", request.abi)));
    }
    let transform = parse::<T>(&request.params)?;
    let cx = Plan::new(request);
    let outputs = transform.plan(&cx)?;
    cx.check(&outputs)?;
    Ok(outputs)
}

/// Computes a tile.
///
/// # Errors
/// What the transform says of the data.
pub fn run<T: Transform>(params: &Value, tile: &mut Tile<'_>) -> Result<(), RunError> {
    let transform = parse::<T>(params).map_err(|error| DataError::new(String::from(error.message())).into_body())?;
    transform.run(tile).map_err(DataError::into_body)
}

fn parse<T: Module>(params: &Value) -> Result<T> {
    T::from_params(&Params::new(params, T::PARAMS)?)
}
