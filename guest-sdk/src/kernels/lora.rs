//! Merging a low-rank update: `W + scale · (B · A)`.
//!
//! Operation order, in f32: each element of `B · A` is summed over the rank
//! from 0 on, in one accumulator that begins at 0 (a product, then a sum, each
//! rounded, never fused); one product by the scale; one sum with the weight;
//! one rounding to the weight's format.

use super::{Float, canonical};

use super::lanes::*;

/// Columns that are done for all rows before the next ones, so that their part
/// of `a` stays in the first cache.
const STRIP: usize = 64;
/// Rows that share what is loaded of `a`.
const ROWS: usize = 4;

/// Some rows (or columns of them) of a merge.
#[derive(Clone, Copy, Debug)]
pub struct Merge<'a> {
    /// `[rank, columns]`, row-major.
    pub a: &'a [f32],
    /// `[rows, rank]`, row-major.
    pub b: &'a [f32],
    /// Inner extent.
    pub rank: usize,
    /// Columns.
    pub columns: usize,
    /// Factor of the update.
    pub scale: f32,
}

impl Merge<'_> {
    /// `w` with the update, `[rows, columns]`.
    ///
    /// # Panics
    /// If the slices' lengths do not fit together.
    ///
    /// ```
    /// use weightmill_guest::kernels::{F32, lora::Merge};
    ///
    /// let merge = Merge { a: &[1.0, 2.0], b: &[3.0], rank: 1, columns: 2, scale: 0.5 };
    /// let mut to = [0.0; 2];
    /// merge.run::<F32>(&[10.0, 20.0], &mut to);
    /// assert_eq!(to, [11.5, 23.0]);
    /// ```
    pub fn run<F: Float>(&self, w: &[F::Element], to: &mut [F::Element]) {
        let rows = w.len().checked_div(self.columns).unwrap_or(0);
        assert_eq!(w.len(), to.len(), "a result for every weight");
        assert_eq!(rows * self.columns, w.len(), "whole rows");
        assert_eq!(self.a.len(), self.rank * self.columns, "a is [rank, columns]");
        assert_eq!(self.b.len(), rows * self.rank, "b is [rows, rank]");
        for first in (0..self.columns).step_by(STRIP) {
            let strip = first..self.columns.min(first + STRIP);
            for row in (0..rows).step_by(ROWS) {
                let rows = row..rows.min(row + ROWS);
                if SIMD {
                    self.block_simd::<F>(rows, strip.clone(), w, to);
                } else {
                    self.block::<F>(rows, strip.clone(), w, to);
                }
            }
        }
    }

    /// The definition, for a few rows of a strip of columns.
    fn block<F: Float>(&self, rows: Range, strip: Range, w: &[F::Element], to: &mut [F::Element]) {
        for row in rows {
            let mut sums = [0.0; STRIP];
            let sums = &mut sums[..strip.len()];
            for k in 0..self.rank {
                let b = self.b[row * self.rank + k];
                let a = &self.a[k * self.columns..][strip.clone()];
                for (sum, a) in sums.iter_mut().zip(a) {
                    *sum += b * a;
                }
            }
            let at = row * self.columns;
            let (w, to) = (&w[at..][strip.clone()], &mut to[at..][strip.clone()]);
            for ((to, &w), &sum) in to.iter_mut().zip(w).zip(&*sums) {
                *to = F::encode(canonical(F::decode(w) + self.scale * sum));
            }
        }
    }

    fn block_simd<F: Float>(&self, rows: Range, strip: Range, w: &[F::Element], to: &mut [F::Element]) {
        let whole = if rows.len() == ROWS { strip.len() / 8 * 8 } else { 0 };
        for first in (strip.start..strip.start + whole).step_by(8) {
            let mut sums = [[f32x4_splat(0.0); 2]; ROWS];
            let b: [&[f32]; ROWS] = core::array::from_fn(|i| &self.b[(rows.start + i) * self.rank..][..self.rank]);
            for k in 0..self.rank {
                let a = &self.a[k * self.columns + first..][..8];
                let a = halves::<f32>(a.try_into().expect("eight columns")).map(load::<f32, 4>);
                for (sums, b) in sums.iter_mut().zip(b) {
                    let b = f32x4_splat(b[k]);
                    for (sum, a) in sums.iter_mut().zip(a) {
                        *sum = f32x4_add(*sum, f32x4_mul(b, a));
                    }
                }
            }
            let scale = f32x4_splat(self.scale);
            for (row, sums) in rows.clone().zip(sums) {
                let at = row * self.columns + first;
                let weights = F::load8(w[at..][..8].try_into().expect("eight columns"));
                let merged = [0, 1].map(|half| f32x4_add(weights[half], f32x4_mul(scale, sums[half])));
                F::store8_canonical((&mut to[at..][..8]).try_into().expect("eight columns"), merged);
            }
        }
        if whole < strip.len() {
            self.block::<F>(rows, strip.start + whole..strip.end, w, to);
        }
    }
}

type Range = core::ops::Range<usize>;

#[cfg(test)]
mod tests {
    use super::super::testdata::{self, assert_same_bits, encoded};
    use super::super::{BF16, F16, F32};
    use super::*;

    #[test]
    fn both_forms_merge_as_the_reference_does() {
        let mut reference = testdata::lora();
        let (w, a, b) = (reference.take::<f32>(13 * 43), reference.take::<f32>(5 * 43), reference.take::<f32>(13 * 5));
        let expected = reference.all::<f32>();
        let merge = Merge { a: &a, b: &b, rank: 5, columns: 43, scale: 0.3 };
        let mut to = vec![0.0; w.len()];
        merge.run::<F32>(&w, &mut to);
        assert_same_bits(&to, &expected, "scalar");
        to.fill(0.0);
        for row in (0..13).step_by(ROWS) {
            merge.block_simd::<F32>(row..13.min(row + ROWS), 0..43, &w, &mut to);
        }
        assert_same_bits(&to, &expected, "simd");
    }

    #[test]
    fn sixteen_bit_weights_are_rounded_once() {
        fn check<F: Float>() {
            let (columns, rank) = (150, 3);
            let w = encoded::<F>(&(0..8 * columns).map(|i| i as f32 * 0.01 - 3.0).collect::<Vec<_>>());
            let a: Vec<f32> = (0..rank * columns).map(|i| (i % 7) as f32 * 0.3).collect();
            let b: Vec<f32> = (0..8 * rank).map(|i| 1.0 / (i + 1) as f32).collect();
            let merge = Merge { a: &a, b: &b, rank, columns, scale: -0.7 };
            let (mut scalar, mut simd) = (vec![F::Element::default(); w.len()], vec![F::Element::default(); w.len()]);
            merge.run::<F>(&w, &mut scalar);
            for strip in [0..64, 64..128, 128..150] {
                merge.block_simd::<F>(0..4, strip.clone(), &w, &mut simd);
                merge.block_simd::<F>(4..8, strip, &w, &mut simd);
            }
            assert_same_bits(&simd, &scalar, "simd");
            let i = 3 * columns + 77;
            let sum = (0..rank).fold(0.0, |sum, k| sum + b[3 * rank + k] * a[k * columns + 77]);
            assert_eq!(F::encode(F::decode(w[i]) + -0.7 * sum), scalar[i]);
        }
        check::<F32>();
        check::<F16>();
        check::<BF16>();
    }

    #[test]
    fn rank_zero_and_no_columns_are_fine() {
        let mut to = [0.0; 2];
        Merge { a: &[], b: &[], rank: 0, columns: 2, scale: 1.0 }.run::<F32>(&[1.0, 2.0], &mut to);
        assert_eq!(to, [1.0, 2.0]);
        Merge { a: &[], b: &[], rank: 3, columns: 0, scale: 1.0 }.run::<F32>(&[], &mut []);
    }
}
