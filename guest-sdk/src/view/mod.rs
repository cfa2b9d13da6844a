//! The view algebra: bytes moved, without strides.
//!
//! An [`Array`] is the metadata of a tensor whose bytes lie somewhere in the
//! inputs: a dtype, a shape, and a description of where each element is. The
//! operations are those of any array library, cost nothing (no data is there
//! while a transform plans), and compose without limits of structure: a
//! concatenation of slices of permutations can be reshaped again. What comes
//! out is *lowered* to the few affine parts that the host executes: contiguous
//! axes become one run, equal turns one repeat, and the identity one copy.
//!
//! ```text
//!   Array = dtype + shape + Body        shape.rs: the elements of one array
//!                            │          join.rs: several arrays, zeros, repetition
//!            Strided | Fill | Pieces    body.rs: a tree over the axes
//!                            │
//!                          Part         lower.rs: runs, fills and repeats
//! ```
//!
//! Every operation answers a [`PlanError`] that names the tensor when it does
//! not fit; none panics.
//!
//! ```
//! use weightmill_guest::prelude::*;
//!
//! // Four groups of one query, one key and one value head of 8 rows.
//! let qkv = Array::input(0, "qkv", Dtype::BF16, &[96, 24])?;
//! let groups = qkv.split(0, &[4, 3, 8])?;
//! let q = groups.slice(1, ..1)?.merge(0..3)?;
//! let k = groups.slice(1, 1..2)?.merge(0..3)?;
//! let v = groups.slice(1, 2..)?.merge(0..3)?;
//! let fused = Array::concat(0, &[q, k, v])?;
//! assert_eq!(fused.shape(), [96, 24]);
//! assert_eq!(fused.parts()?.len(), 3);
//! # Ok::<(), PlanError>(())
//! ```

mod body;
mod join;
mod lower;
mod shape;
#[cfg(test)]
mod tests;

use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use crate::abi::{Dtype, Part, limits};
use crate::error::{PlanError, Result};
use body::Body;

/// A tensor's metadata: dtype, shape, and where each element's bytes are.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    role: String,
    dtype: Dtype,
    shape: Vec<u64>,
    body: Body,
}

impl Array {
    /// The dense row-major tensor with source number `source`, as a plan's
    /// context hands it out; `role` is what errors call it.
    ///
    /// # Errors
    /// If its size is not a whole number of bytes below 2⁵³.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// assert!(Array::input(0, "w", Dtype::F4, &[3]).is_err());
    /// ```
    pub fn input(source: u64, role: &str, dtype: Dtype, shape: &[u64]) -> Result<Array> {
        let mut array = Array { role: role.into(), dtype, shape: shape.to_vec(), body: Body::Fill { byte: 0 } };
        if dtype.tensor_bytes(shape).is_none() {
            return Err(array.refuse(format!("{dtype} {shape:?} is not a whole number of bytes below 2^53")));
        }
        let mut stride = dtype.bits();
        let mut strides = vec![0; shape.len()];
        for (slot, &extent) in strides.iter_mut().zip(shape).rev() {
            *slot = stride;
            stride = stride.wrapping_mul(extent);
        }
        array.body = Body::Strided { source, offset: 0, strides };
        Ok(array.normal())
    }

    /// An array of zero bytes.
    ///
    /// # Errors
    /// If its size is not a whole number of bytes below 2⁵³.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// let parts = Array::zeros(Dtype::F32, &[2, 3])?.parts()?;
    /// assert_eq!(parts, [weightmill_guest::abi::Part::Fill { fill: 0, len: 24 }]);
    /// # Ok::<(), PlanError>(())
    /// ```
    pub fn zeros(dtype: Dtype, shape: &[u64]) -> Result<Array> {
        let mut array = Array::input(0, "zeros", dtype, shape)?;
        array.body = Body::Fill { byte: 0 };
        Ok(array)
    }

    /// The role of the input that this began as.
    pub fn role(&self) -> &str {
        &self.role
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Extents, outermost first.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// How many dimensions.
    pub fn ndim(&self) -> usize {
        self.shape.len()
    }

    /// The extent of dimension `axis`.
    ///
    /// # Errors
    /// If there is no such dimension.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// let w = Array::input(0, "w", Dtype::F32, &[2, 3])?;
    /// assert_eq!(w.extent(1)?, 3);
    /// let error = w.extent(2).unwrap_err();
    /// assert_eq!(error.message(), "w has no dimension 2: its shape is [2, 3]");
    /// # Ok::<(), PlanError>(())
    /// ```
    pub fn extent(&self, axis: usize) -> Result<u64> {
        match self.shape.get(axis) {
            Some(&extent) => Ok(extent),
            None => Err(self.refuse(format!("{} has no dimension {axis}: its shape is {:?}", self.role, self.shape))),
        }
    }

    /// How many elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// How many bytes.
    pub fn len_bytes(&self) -> u64 {
        self.dtype.tensor_bytes(&self.shape).unwrap_or(0)
    }

    /// An error of kind `input` about this array.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// let w = Array::input(0, "w", Dtype::F32, &[2])?;
    /// assert_eq!(w.refuse("w must be BF16").body().role.as_deref(), Some("w"));
    /// # Ok::<(), PlanError>(())
    /// ```
    pub fn refuse(&self, message: impl Into<String>) -> PlanError {
        PlanError::input(self.role.clone(), message)
    }

    /// The parts that the host executes, few and fused.
    ///
    /// # Errors
    /// If elements smaller than a byte would move apart from each other, or
    /// the parts are more than a plan may have.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// use weightmill_guest::abi::Part;
    ///
    /// let w = Array::input(0, "w", Dtype::F32, &[4, 6])?;
    /// let same = w.reshape(&[2, 2, 2, 3])?.merge(1..3)?.reshape(&[24])?;
    /// assert_eq!(same.parts()?, [Part::Copy { copy: 0, offset: 0, len: 96, strides: vec![] }]);
    /// # Ok::<(), PlanError>(())
    /// ```
    pub fn parts(&self) -> Result<Vec<Part>> {
        lower::view(&self.body, &self.shape, self.dtype.bits()).map_err(|why| self.unlowered(why))
    }

    /// The parts of the windows of equal tiles, of which the first dimension
    /// counts the tiles.
    pub(crate) fn window_parts(&self) -> Result<Vec<Part>> {
        lower::window(&self.body, &self.shape, self.dtype.bits()).map_err(|why| self.unlowered(why))
    }

    fn unlowered(&self, why: lower::LowerError) -> PlanError {
        self.refuse(format!("{} ({} {:?}): {}", self.role, self.dtype, self.shape, why.message())).hint(why.hint())
    }

    fn with(&self, shape: Vec<u64>, body: Body) -> Array {
        Array { role: self.role.clone(), dtype: self.dtype, shape, body }.normal()
    }

    /// An array without elements is a fill, so that no extent in a body is 0.
    fn normal(mut self) -> Array {
        if self.shape.contains(&0) {
            self.body = Body::Fill { byte: 0 };
        }
        self
    }

    fn check_size(&self, shape: &[u64]) -> Result<()> {
        let bits = shape.iter().try_fold(self.dtype.bits(), |bits, &extent| bits.checked_mul(extent));
        match bits {
            Some(bits) if bits / 8 <= limits::SIZE => Ok(()),
            _ => Err(self.refuse(format!("{} would become {} {shape:?}, more than 2^53 bytes", self.role, self.dtype))),
        }
    }
}

/// `list` with `own` in the place of `range`.
fn replaced(list: &[u64], range: Range<usize>, own: &[u64]) -> Vec<u64> {
    let mut all = Vec::with_capacity(list.len() + own.len());
    all.extend_from_slice(&list[..range.start]);
    all.extend_from_slice(own);
    all.extend_from_slice(&list[range.end..]);
    all
}
