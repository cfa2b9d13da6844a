//! Operations that add entries: several arrays, zeros, repetition.

use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use super::Array;
use super::body::Body;
use crate::error::{PlanError, Result};

impl Array {
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
}
