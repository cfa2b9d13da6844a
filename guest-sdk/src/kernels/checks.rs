//! What the plans of arithmetic transforms check before a kernel runs.

use alloc::format;

use crate::abi::Dtype;
use crate::error::{PlanError, Result};
use crate::plan::Plan;
use crate::view::Array;

/// Whether kernels can read and write `dtype` as a [`Float`](super::Float).
pub const fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16)
}

/// The input in `role`, which must be F32, F16 or BF16.
///
/// # Errors
/// If there is none, or it is of another dtype.
///
/// ```
/// use weightmill_guest::abi::{PlanInput, PlanRequest};
/// use weightmill_guest::kernels::float_input;
/// use weightmill_guest::prelude::*;
///
/// let request = PlanRequest { abi: 1, inputs: vec![PlanInput { dtype: Dtype::I32, index: 0, role: "w".into(),
///     shape: vec![8] }], outputs: vec![], params: Default::default(), tile_bytes: 1 << 20, tp: Tp::ONE };
/// let error = float_input(&Plan::new(&request), "w").unwrap_err();
/// assert_eq!(error.message(), "w must be F32, F16 or BF16, found I32 [8]");
/// ```
pub fn float_input(cx: &Plan<'_>, role: &str) -> Result<Array> {
    let array = cx.input(role)?;
    if is_float(array.dtype()) {
        return Ok(array);
    }
    let hint = match array.dtype() {
        Dtype::F8_E4M3 => "use fp8-dequantize first, or leave the tensor out with where = { dtype = [...] }",
        _ => "leave the tensor out of the step, for instance with where = { dtype = [\"F32\", \"F16\", \"BF16\"] }",
    };
    let (dtype, shape) = (array.dtype(), array.shape());
    Err(array.refuse(format!("{role} must be F32, F16 or BF16, found {dtype} {shape:?}")).hint(hint))
}

/// The input in `role`, which must be of `dtype`.
///
/// # Errors
/// If there is none, or it is of another dtype.
pub fn input_of(cx: &Plan<'_>, role: &str, dtype: Dtype) -> Result<Array> {
    let array = cx.input(role)?;
    if array.dtype() == dtype {
        return Ok(array);
    }
    Err(array
        .refuse(format!("{role} must be {dtype}, found {} {:?}", array.dtype(), array.shape()))
        .hint(format!("check that {role} names the right tensor")))
}

/// Refuses a parameter that must be F32, F16 or BF16 and is not.
///
/// # Errors
/// If it is another dtype.
///
/// ```
/// use weightmill_guest::kernels::check_float_param;
/// use weightmill_guest::prelude::*;
///
/// assert!(check_float_param("dtype", Dtype::BF16).is_ok());
/// let error = check_float_param("dtype", Dtype::F64).unwrap_err();
/// assert_eq!(error.message(), "the parameter dtype must be F32, F16 or BF16, found F64");
/// ```
pub fn check_float_param(name: &str, dtype: Dtype) -> Result<()> {
    if is_float(dtype) {
        return Ok(());
    }
    Err(PlanError::param(name, format!("the parameter {name} must be F32, F16 or BF16, found {dtype}")))
}

/// Refuses an array that does not have the shape `expected`.
///
/// # Errors
/// If it has another one; `why` says where the expectation comes from.
pub fn check_shape(array: &Array, expected: &[u64], why: &str) -> Result<()> {
    if array.shape() == expected {
        return Ok(());
    }
    let role = array.role();
    Err(array
        .refuse(format!("{role} must be of shape {expected:?} ({why}), found {:?}", array.shape()))
        .hint(format!("check that {role} belongs to the same layer and scheme")))
}

/// Refuses an array that does not have `expected` dimensions.
///
/// # Errors
/// If it has another number.
pub fn check_ndim(array: &Array, expected: usize, what: &str) -> Result<()> {
    if array.ndim() == expected {
        return Ok(());
    }
    let (role, shape) = (array.role(), array.shape());
    Err(array
        .refuse(format!("{role} must have {expected} dimensions {what}, found {} {shape:?}", array.ndim()))
        .hint("use permute with reshape first"))
}
