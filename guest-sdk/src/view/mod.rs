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
//!   Array = dtype + shape + Body        operations
//!                            │
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
mod lower;
#[cfg(test)]
mod tests;

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;
use core::ops::{Bound, Range, RangeBounds};

use crate::abi::{Dtype, Part, limits};
use crate::error::{PlanError, Result, separated};
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

    /// The same elements in row-major order, in another shape.
    ///
    /// # Errors
    /// If the number of elements differs.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// let w = Array::input(0, "w", Dtype::F32, &[4, 6])?;
    /// assert_eq!(w.reshape(&[2, 2, 6])?.shape(), [2, 2, 6]);
    /// assert!(w.reshape(&[5, 5]).is_err());
    /// # Ok::<(), PlanError>(())
    /// ```
    pub fn reshape(&self, shape: &[u64]) -> Result<Array> {
        if product(shape) != Some(self.elements()) {
            return Err(self.refuse(format!(
                "{} of shape {:?} cannot be reshaped to {shape:?}: the number of elements differs",
                self.role, self.shape
            )));
        }
        if self.elements() == 0 {
            return Ok(self.with(shape.to_vec(), Body::Fill { byte: 0 }));
        }
        let mut body = self.body.clone();
        let mut old = Vec::new();
        for &extent in &self.shape {
            if extent == 1 {
                body = body.remove_unit(old.len());
            } else {
                old.push(extent);
            }
        }
        let new: Vec<u64> = shape.iter().copied().filter(|&extent| extent > 1).collect();
        for (from, to) in segments(&old, &new).into_iter().rev() {
            let (from_dims, to_dims) = (&old[from.clone()], &new[to]);
            if from_dims != to_dims {
                body = body.merge(from.start, from_dims);
                body = body.split(from.start, to_dims).map_err(|_| {
                    self.refuse(format!("reshaping {} to {shape:?} would cut it into too many pieces", self.role))
                })?;
            }
        }
        for (axis, &extent) in shape.iter().enumerate() {
            if extent == 1 {
                body = body.insert(axis);
            }
        }
        Ok(self.with(shape.to_vec(), body))
    }

    /// Dimension `axis` as the dimensions `into`, outermost first.
    ///
    /// # Errors
    /// If the extents do not multiply to that of `axis`.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// let w = Array::input(0, "w", Dtype::F32, &[12, 6])?;
    /// assert_eq!(w.split(0, &[3, 4])?.shape(), [3, 4, 6]);
    /// let error = w.split(0, &[5, 2]).unwrap_err();
    /// assert_eq!(error.message(), "dimension 0 of w has 12 entries, not 5 x 2 = 10");
    /// # Ok::<(), PlanError>(())
    /// ```
    pub fn split(&self, axis: usize, into: &[u64]) -> Result<Array> {
        let extent = self.extent(axis)?;
        if product(into) != Some(extent) {
            let whole = product(into).map_or_else(|| String::from("more than 2^53"), |n| n.to_string());
            return Err(self.refuse(format!(
                "dimension {axis} of {} has {extent} entries, not {} = {whole}",
                self.role,
                separated(into, " x ")
            )));
        }
        self.reshape(&replaced(&self.shape, axis..axis + 1, into))
    }

    /// The dimensions `axes` as one.
    ///
    /// # Errors
    /// If there are no such dimensions, or none at all in the range.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// let w = Array::input(0, "w", Dtype::F32, &[3, 4, 6])?;
    /// assert_eq!(w.merge(0..2)?.shape(), [12, 6]);
    /// # Ok::<(), PlanError>(())
    /// ```
    pub fn merge(&self, axes: Range<usize>) -> Result<Array> {
        if axes.start >= axes.end || axes.end > self.ndim() {
            return Err(self.refuse(format!(
                "{} of shape {:?} has no dimensions {}..{} to merge",
                self.role, self.shape, axes.start, axes.end
            )));
        }
        let merged = self.shape[axes.clone()].iter().product();
        self.reshape(&replaced(&self.shape, axes, &[merged]))
    }

    /// Dimension `i` of the result is dimension `order[i]`.
    ///
    /// # Errors
    /// If `order` does not name every dimension once.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// let w = Array::input(0, "w", Dtype::F32, &[2, 3])?;
    /// assert_eq!(w.permute(&[1, 0])?.shape(), [3, 2]);
    /// assert!(w.permute(&[0, 0]).is_err());
    /// # Ok::<(), PlanError>(())
    /// ```
    pub fn permute(&self, order: &[usize]) -> Result<Array> {
        if order.len() != self.ndim() || (0..self.ndim()).any(|axis| !order.contains(&axis)) {
            return Err(self.refuse(format!(
                "{order:?} does not name each of the {} dimensions of {} once",
                self.ndim(),
                self.role
            )));
        }
        let shape = order.iter().map(|&from| self.shape[from]).collect();
        Ok(self.with(shape, self.body.clone().permute(order)))
    }

    /// The entries `range` of dimension `axis`.
    ///
    /// # Errors
    /// If the range is reversed or goes past the end.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// let w = Array::input(0, "w", Dtype::F32, &[4, 6])?;
    /// assert_eq!(w.slice(0, 1..)?.shape(), [3, 6]);
    /// let error = w.slice(1, 2..9).unwrap_err();
    /// assert_eq!(error.message(), "2..9 is not a range of dimension 1 of w, which has 6 entries");
    /// # Ok::<(), PlanError>(())
    /// ```
    pub fn slice(&self, axis: usize, range: impl RangeBounds<u64>) -> Result<Array> {
        let extent = self.extent(axis)?;
        let start = match range.start_bound() {
            Bound::Included(&n) => n,
            Bound::Excluded(&n) => n.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(&n) => n.saturating_add(1),
            Bound::Excluded(&n) => n,
            Bound::Unbounded => extent,
        };
        self.slice_range(axis, start..end)
    }

    fn slice_range(&self, axis: usize, range: Range<u64>) -> Result<Array> {
        let (extent, Range { start, end }) = (self.extent(axis)?, range);
        if start > end || end > extent {
            return Err(self.refuse(format!(
                "{start}..{end} is not a range of dimension {axis} of {}, which has {extent} entries",
                self.role
            )));
        }
        let mut shape = self.shape.clone();
        shape[axis] = end - start;
        if self.elements() == 0 || start == end || end - start == extent {
            return Ok(self.with(shape, self.body.clone()));
        }
        Ok(self.with(shape, self.body.slice(axis, start..end)))
    }

    /// The arrays one after the other along `axis`.
    ///
    /// # Errors
    /// If there is none, or a dtype or another dimension differs.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// let a = Array::input(0, "a", Dtype::F32, &[2, 3])?;
    /// let b = Array::input(1, "b", Dtype::F32, &[4, 3])?;
    /// assert_eq!(Array::concat(0, &[a.clone(), b.clone()])?.shape(), [6, 3]);
    /// assert!(Array::concat(1, &[a, b]).is_err());
    /// # Ok::<(), PlanError>(())
    /// ```
    pub fn concat(axis: usize, arrays: &[Array]) -> Result<Array> {
        let Some(first) = arrays.first() else {
            return Err(PlanError::input("", "there is no array to concatenate"));
        };
        first.extent(axis)?;
        let mut shape = first.shape.clone();
        shape[axis] = 0;
        let mut parts = Vec::with_capacity(arrays.len());
        for array in arrays {
            let same = array.ndim() == first.ndim()
                && (0..first.ndim()).all(|k| k == axis || array.shape[k] == first.shape[k]);
            if !same || array.dtype != first.dtype {
                return Err(array.refuse(format!(
                    "{} {} {:?} cannot follow {} {} {:?} along dimension {axis}",
                    array.role, array.dtype, array.shape, first.role, first.dtype, first.shape
                )));
            }
            let extent = array.shape[axis];
            shape[axis] = shape[axis].saturating_add(extent);
            if extent > 0 {
                parts.push((vec![extent], array.body.clone()));
            }
        }
        first.check_size(&shape)?;
        let body = if shape.contains(&0) { Body::Fill { byte: 0 } } else { Body::from_pieces(axis, parts) };
        Ok(first.with(shape, body))
    }

    /// The arrays, all of one shape, along a new dimension `axis`.
    ///
    /// # Errors
    /// If there is none, or they differ in shape or dtype.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// let a = Array::input(0, "w", Dtype::F32, &[2, 3])?;
    /// let b = Array::input(1, "w", Dtype::F32, &[2, 3])?;
    /// assert_eq!(Array::stack(0, &[a, b])?.shape(), [2, 2, 3]);
    /// # Ok::<(), PlanError>(())
    /// ```
    pub fn stack(axis: usize, arrays: &[Array]) -> Result<Array> {
        let rows: Result<Vec<Array>> = arrays.iter().map(|array| array.broadcast(axis, 1)).collect();
        Array::concat(axis, &rows?)
    }

    /// `before` and `after` zero entries around those of dimension `axis`.
    ///
    /// # Errors
    /// If there is no such dimension, or the size passes 2⁵³ bytes.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// let w = Array::input(0, "w", Dtype::F32, &[3, 2])?;
    /// assert_eq!(w.pad(0, 0, 5)?.shape(), [8, 2]);
    /// # Ok::<(), PlanError>(())
    /// ```
    pub fn pad(&self, axis: usize, before: u64, after: u64) -> Result<Array> {
        self.extent(axis)?;
        let zeros = |extent: u64| {
            let mut shape = self.shape.clone();
            shape[axis] = extent;
            self.check_size(&shape)?;
            Ok(self.with(shape, Body::Fill { byte: 0 }))
        };
        Array::concat(axis, &[zeros(before)?, self.clone(), zeros(after)?])
    }

    /// A new dimension `axis` of `count` entries that are all this array.
    ///
    /// # Errors
    /// If `axis` is past the end, or the size passes 2⁵³ bytes.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// let w = Array::input(0, "w", Dtype::F32, &[3, 2])?;
    /// assert_eq!(w.broadcast(1, 4)?.shape(), [3, 4, 2]);
    /// # Ok::<(), PlanError>(())
    /// ```
    pub fn broadcast(&self, axis: usize, count: u64) -> Result<Array> {
        if axis > self.ndim() {
            return Err(
                self.refuse(format!("a dimension of {} of shape {:?} cannot be put at {axis}", self.role, self.shape))
            );
        }
        let mut shape = self.shape.clone();
        shape.insert(axis, count);
        self.check_size(&shape)?;
        Ok(self.with(shape, self.body.clone().insert(axis)))
    }

    /// Each entry of dimension `axis`, `count` times in a row.
    ///
    /// # Errors
    /// If there is no such dimension, or the size passes 2⁵³ bytes.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// // Two key heads for four query heads.
    /// let k = Array::input(0, "k", Dtype::F32, &[2, 8])?;
    /// assert_eq!(k.repeat(0, 2)?.shape(), [4, 8]);
    /// # Ok::<(), PlanError>(())
    /// ```
    pub fn repeat(&self, axis: usize, count: u64) -> Result<Array> {
        self.extent(axis)?;
        self.broadcast(axis + 1, count)?.merge(axis..axis + 2)
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

fn product(extents: &[u64]) -> Option<u64> {
    if extents.contains(&0) {
        return Some(0);
    }
    extents.iter().try_fold(1_u64, |all, &extent| all.checked_mul(extent))
}

/// `list` with `own` in the place of `range`.
fn replaced(list: &[u64], range: Range<usize>, own: &[u64]) -> Vec<u64> {
    let mut all = Vec::with_capacity(list.len() + own.len());
    all.extend_from_slice(&list[..range.start]);
    all.extend_from_slice(own);
    all.extend_from_slice(&list[range.end..]);
    all
}

/// The shortest runs of two lists of extents that have equal products.
fn segments(old: &[u64], new: &[u64]) -> Vec<(Range<usize>, Range<usize>)> {
    let mut runs = Vec::new();
    let (mut i, mut j) = (0, 0);
    while i < old.len() && j < new.len() {
        let (from, to) = (i, j);
        let (mut a, mut b) = (old[i], new[j]);
        (i, j) = (i + 1, j + 1);
        while a != b {
            if a < b && i < old.len() {
                a *= old[i];
                i += 1;
            } else if j < new.len() {
                b *= new[j];
                j += 1;
            } else {
                break;
            }
        }
        runs.push((from..i, to..j));
    }
    runs
}
