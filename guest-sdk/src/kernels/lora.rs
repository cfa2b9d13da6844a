//! Merging a low-rank update: `W + scale · (B · A)`.
//!
//! Operation order, in f32: each element of `B · A` is summed over the rank
//! from 0 on, in one accumulator that begins at 0 (a product, then a sum, each
//! rounded, never fused); one product by the scale; one sum with the weight;
//! one rounding to the weight's format.

use alloc::vec;
use alloc::vec::Vec;

use super::{F32, Float, canonical, cast};

use super::lanes::*;

/// Columns that are done for all rows before the next ones, so that their part
/// of `a` stays in the first cache.
const STRIP: usize = 64;
/// Rows that share what is loaded of `a`.
const ROWS: usize = 4;

/// Some rows (or columns of them) of a merge, with the formats of `a` and `b`.
#[derive(Clone, Copy, Debug)]
pub struct Merge<'a, A: Float, B: Float> {
    /// `[rank, columns]`, row-major.
    pub a: &'a [A::Element],
    /// `[rows, rank]`, row-major.
    pub b: &'a [B::Element],
    /// Inner extent.
    pub rank: usize,
    /// Columns.
    pub columns: usize,
    /// Factor of the update.
    pub scale: f32,
}

impl<A: Float, B: Float> Merge<'_, A, B> {
    /// `w` with the update, `[rows, columns]`.
    ///
    /// # Panics
    /// If the slices' lengths do not fit together.
    ///
    /// ```
    /// use weightmill_guest::kernels::{F32, lora::Merge};
    ///
    /// let merge = Merge::<F32, F32> { a: &[1.0, 2.0], b: &[3.0], rank: 1, columns: 2, scale: 0.5 };
    /// let mut to = [0.0; 2];
    /// merge.run::<F32>(&[10.0, 20.0], &mut to);
    /// assert_eq!(to, [11.5, 23.0]);
    /// ```
    pub fn run<W: Float>(&self, w: &[W::Element], to: &mut [W::Element]) {
        self.strips::<W>(w, to, SIMD);
    }

    fn strips<W: Float>(&self, w: &[W::Element], to: &mut [W::Element], simd: bool) {
        let rows = w.len().checked_div(self.columns).unwrap_or(0);
        assert_eq!(w.len(), to.len(), "a result for every weight");
        assert_eq!(rows * self.columns, w.len(), "whole rows");
        assert_eq!(self.a.len(), self.rank * self.columns, "a is [rank, columns]");
        assert_eq!(self.b.len(), rows * self.rank, "b is [rows, rank]");
        let mut b = vec![0.0; self.b.len()];
        cast::convert::<B, F32>(self.b, &mut b);
        let mut a = vec![0.0; self.rank * STRIP];
        for first in (0..self.columns).step_by(STRIP) {
            let width = STRIP.min(self.columns - first);
            let a = &mut a[..self.rank * width];
            for (k, a) in a.chunks_mut(width).enumerate() {
                cast::convert::<A, F32>(&self.a[k * self.columns + first..][..width], a);
            }
            for row in (0..rows).step_by(ROWS) {
                let rows = ROWS.min(rows - row);
                let block = Block {
                    a,
                    b: &b[row * self.rank..][..rows * self.rank],
                    rows,
                    rank: self.rank,
                    width,
                    at: row * self.columns + first,
                    stride: self.columns,
                    scale: self.scale,
                };
                if simd { block.simd::<W>(w, to) } else { block.scalar::<W>(0, w, to) }
            }
        }
    }
}

/// A few rows of a strip of columns, decoded.
struct Block<'a> {
    /// `[rank, width]`.
    a: &'a [f32],
    /// `[rows, rank]`.
    b: &'a [f32],
    /// At most `ROWS`.
    rows: usize,
    rank: usize,
    width: usize,
    /// Index of the first weight.
    at: usize,
    /// From a row's weights to the next row's.
    stride: usize,
    scale: f32,
}

impl Block<'_> {
    /// The definition, for the columns from number `from` on.
    #[inline(never)]
    fn scalar<W: Float>(&self, from: usize, w: &[W::Element], to: &mut [W::Element]) {
        for row in 0..self.rows {
            let b = &self.b[row * self.rank..][..self.rank];
            let mut sums = [0.0; STRIP];
            let sums = &mut sums[from..self.width];
            for (b, a) in b.iter().zip(self.a.chunks(self.width)) {
                for (sum, a) in sums.iter_mut().zip(&a[from..]) {
                    *sum += b * a;
                }
            }
            let first = self.at + row * self.stride + from;
            let (w, to) = (&w[first..][..sums.len()], &mut to[first..][..sums.len()]);
            for ((to, &w), &sum) in to.iter_mut().zip(w).zip(&*sums) {
                *to = W::encode(canonical(W::decode(w) + self.scale * sum));
            }
        }
    }

    #[inline(never)]
    fn simd<W: Float>(&self, w: &[W::Element], to: &mut [W::Element]) {
        let whole = if self.rows == ROWS { self.width / 8 * 8 } else { 0 };
        // Every entry of b four times, so that it is loaded as a vector.
        let b: Vec<[[f32; 4]; ROWS]> = if whole == 0 {
            Vec::new()
        } else {
            let of_row = |row: usize, k: usize| [self.b[row * self.rank + k]; 4];
            (0..self.rank).map(|k| [of_row(0, k), of_row(1, k), of_row(2, k), of_row(3, k)]).collect()
        };
        let scale = f32x4_splat(self.scale);
        for column in (0..whole).step_by(8) {
            let sums = self.sums(&b, column);
            let mut merge = |row: usize, sums: [v128; 2]| {
                let at = self.at + row * self.stride + column;
                let [low, high] = W::load8(w[at..][..8].try_into().expect("eight columns"));
                let merged = [f32x4_add(low, f32x4_mul(scale, sums[0])), f32x4_add(high, f32x4_mul(scale, sums[1]))];
                W::store8_canonical((&mut to[at..][..8]).try_into().expect("eight columns"), merged);
            };
            merge(0, sums[0]);
            merge(1, sums[1]);
            merge(2, sums[2]);
            merge(3, sums[3]);
        }
        if whole < self.width {
            self.scalar::<W>(whole, w, to);
        }
    }

    /// `b · a` for eight columns of every row.
    #[inline(always)]
    fn sums(&self, b: &[[[f32; 4]; ROWS]], column: usize) -> [[v128; 2]; ROWS] {
        let zero = f32x4_splat(0.0);
        let [mut s0, mut s1, mut s2, mut s3] = [[zero, zero]; ROWS];
        for (a, b) in self.a.chunks_exact(self.width).zip(b) {
            let [low, high] = halves::<f32>(a[column..][..8].try_into().expect("eight columns"));
            let (low, high) = (load::<f32, 4>(low), load::<f32, 4>(high));
            let add = |sum: [v128; 2], b: &[f32; 4]| {
                let b = load::<f32, 4>(b);
                [f32x4_add(sum[0], f32x4_mul(b, low)), f32x4_add(sum[1], f32x4_mul(b, high))]
            };
            (s0, s1) = (add(s0, &b[0]), add(s1, &b[1]));
            (s2, s3) = (add(s2, &b[2]), add(s3, &b[3]));
        }
        [s0, s1, s2, s3]
    }
}

#[cfg(test)]
mod tests {
    use super::super::testdata::{self, assert_same_bits, encoded};
    use super::super::{BF16, F16};
    use super::*;

    #[test]
    fn both_forms_merge_as_the_reference_does() {
        let mut reference = testdata::lora();
        let (w, a, b) = (reference.take::<f32>(13 * 43), reference.take::<f32>(5 * 43), reference.take::<f32>(13 * 5));
        let expected = reference.all::<f32>();
        let merge = Merge::<F32, F32> { a: &a, b: &b, rank: 5, columns: 43, scale: 0.3 };
        for simd in [false, true] {
            let mut to = vec![0.0; w.len()];
            merge.strips::<F32>(&w, &mut to, simd);
            assert_same_bits(&to, &expected, &format!("simd {simd}"));
        }
    }

    #[test]
    fn sixteen_bit_weights_are_rounded_once() {
        fn check<W: Float, A: Float, B: Float>() {
            let (rows, columns, rank) = (10, 150, 3);
            let w = encoded::<W>(&(0..rows * columns).map(|i| i as f32 * 0.01 - 3.0).collect::<Vec<_>>());
            let a = encoded::<A>(&(0..rank * columns).map(|i| (i % 7) as f32 * 0.3).collect::<Vec<_>>());
            let b = encoded::<B>(&(0..rows * rank).map(|i| 1.0 / (i + 1) as f32).collect::<Vec<_>>());
            let merge = Merge::<A, B> { a: &a, b: &b, rank, columns, scale: -0.7 };
            for simd in [false, true] {
                let mut to = vec![W::Element::default(); w.len()];
                merge.strips::<W>(&w, &mut to, simd);
                let expected: Vec<W::Element> = (0..rows * columns)
                    .map(|i| {
                        let (row, column) = (i / columns, i % columns);
                        let product = |k| B::decode(b[row * rank + k]) * A::decode(a[k * columns + column]);
                        let sum = (0..rank).fold(0.0, |sum, k| sum + product(k));
                        W::encode(W::decode(w[i]) + -0.7 * sum)
                    })
                    .collect();
                assert_same_bits(&to, &expected, &format!("simd {simd}"));
            }
        }
        check::<F32, BF16, F16>();
        check::<F16, F32, BF16>();
        check::<BF16, F16, F32>();
    }

    #[test]
    fn rank_zero_and_no_columns_are_fine() {
        for simd in [false, true] {
            let mut to = [0.0; 2];
            let merge = Merge::<F32, F32> { a: &[], b: &[], rank: 0, columns: 2, scale: 1.0 };
            merge.strips::<F32>(&[1.0, 2.0], &mut to, simd);
            assert_eq!(to, [1.0, 2.0]);
        }
        Merge::<F32, F32> { a: &[], b: &[], rank: 3, columns: 0, scale: 1.0 }.run::<F32>(&[], &mut []);
    }
}
