//! Operations on one array: another shape, another order, a part of it.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::ops::{Bound, Range, RangeBounds};

use super::body::Body;
use super::{Array, replaced};
use crate::error::{Result, separated};

impl Array {
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
}

fn product(extents: &[u64]) -> Option<u64> {
    if extents.contains(&0) {
        return Some(0);
    }
    extents.iter().try_fold(1_u64, |all, &extent| all.checked_mul(extent))
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
