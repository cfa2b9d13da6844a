//! Numeric kernels: the only arithmetic that shipped transforms do.
//!
//! A kernel is a plain function from slices to a slice. Its documentation is
//! its definition: which operations, in which order, rounded how. Two forms of
//! the same float formula differ in bytes (`x·(1/s)` and `x/s` do), and the
//! result of a build is named by its bytes, so the order is part of the
//! contract and a change of it is a new version of every module that uses it.
//!
//! Every kernel has a **scalar** form, which defines the bits, and a **SIMD**
//! form for 128-bit WebAssembly vectors (the private `lanes`), which gives the
//! same bits and is what a module runs. Natively the scalar form is compiled,
//! written so that LLVM vectorises it where it can; the tests run both forms,
//! the SIMD one over an emulation of the lanes, and compare them bit for bit.
//!
//! # Rules that all kernels keep
//!
//! - Arithmetic is IEEE 754 binary32, round to nearest even, subnormals kept;
//!   no fused multiply-add, no relaxed SIMD, no reassociation.
//! - 16-bit floats are decoded exactly, computed with in f32 and rounded once
//!   at the end ([`Float::encode`]).
//! - A NaN that arithmetic makes is `0x7FC00000`. In WebAssembly the host
//!   guarantees that (NaN canonicalisation); natively [`canonical`] does it.
//!   Casts are not arithmetic: they move NaN bits, as [`Float`] says.
//! - Conversions, rounding to narrow formats and saturation are done on
//!   integers as far as possible: canonicalisation makes a float operation
//!   about three times as dear as an integer one.
//! - No kernel allocates more than a few rows' worth of scratch, and none
//!   looks at the length of a tile other than to cover it, so how a tensor is
//!   cut into tiles never changes a byte.

pub mod awq;
pub mod cast;
mod checks;
mod float;
pub mod fp8;
pub mod gptq;
mod int4;
mod lanes;
pub mod lora;
pub mod mxfp4;
pub mod scaled;
#[cfg(test)]
mod testdata;
pub mod weight_norm;

pub use checks::{check_float_param, check_ndim, check_shape, float_input, input_of, is_float};
pub use float::{BF16, F16, F32, Float, canonical};

/// Runs an expression with a type parameter chosen by a [`Dtype`](crate::abi::Dtype).
///
/// `F` names the chosen [`Float`] in the expression. The last arm is taken for
/// any other dtype: `plan` has normally refused it long before.
///
/// ```
/// use weightmill_guest::abi::Dtype;
/// use weightmill_guest::kernels::Float;
/// use weightmill_guest::with_float;
///
/// let bytes = with_float!(Dtype::BF16, F => size_of::<<F as Float>::Element>());
/// assert_eq!(bytes, 2);
/// ```
#[macro_export]
macro_rules! with_float {
    ($dtype:expr, $f:ident => $body:expr) => {
        match $dtype {
            $crate::abi::Dtype::F32 => {
                type $f = $crate::kernels::F32;
                $body
            }
            $crate::abi::Dtype::F16 => {
                type $f = $crate::kernels::F16;
                $body
            }
            $crate::abi::Dtype::BF16 => {
                type $f = $crate::kernels::BF16;
                $body
            }
            other => panic!("{other} is not a float that kernels work on"),
        }
    };
}
