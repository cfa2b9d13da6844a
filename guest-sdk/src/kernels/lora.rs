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
/// of `a` stays in the first cache: at most this many, fewer for a large rank.
/// Not too few either: rows lie far apart, and short pieces of them are found
/// late.
const STRIP: usize = 512;
/// Entries of `a` in a strip, where that is at least [`STRIP_MIN`] columns.
const STRIP_ENTRIES: usize = 4096;
const STRIP_MIN: usize = 64;
/// Entries of the rank that are added in one go over a strip.
const GROUP: usize = 8;

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
        let mut sums = [[0.0; 4]; STRIP / 4];
        let strip_columns = (STRIP_ENTRIES / self.rank.max(1) / 8 * 8).clamp(STRIP_MIN, STRIP);
        let mut strip = Strip { a: vec![[0.0; 4]; self.rank * strip_columns / 4], rank: self.rank, quads: 0 };
        for first in (0..self.columns).step_by(strip_columns) {
            let width = strip_columns.min(self.columns - first);
            self.decode(first, width, &mut strip);
            for row in 0..rows {
                let b = &b[row * self.rank..][..self.rank];
                let columns = row * self.columns + first..row * self.columns + first + width;
                let (w, to) = (&w[columns.clone()], &mut to[columns]);
                let sums = &mut sums[..strip.quads];
                if simd {
                    strip.sums_simd(b, sums);
                    merge_simd::<W>(sums.as_flattened(), self.scale, w, to);
                } else {
                    strip.sums(b, sums);
                    merge::<W>(sums.as_flattened(), self.scale, w, to);
                }
            }
        }
    }

    /// Columns of `a` from `first` on.
    fn decode(&self, first: usize, width: usize, strip: &mut Strip) {
        strip.quads = width.div_ceil(8) * 2;
        let mut row = [[0.0; 4]; STRIP / 4];
        for k in 0..self.rank {
            let a = &self.a[k * self.columns + first..][..width];
            cast::convert::<A, F32>(a, &mut row.as_flattened_mut()[..width]);
            strip.set(k, &row);
        }
    }
}

/// A strip of columns of `a`, decoded, for a group of the rank after the other:
/// `[columns / 4, group, 4]`. Columns come in eights; those that are too many
/// hold anything.
struct Strip {
    a: Vec<[f32; 4]>,
    rank: usize,
    /// Fours of columns.
    quads: usize,
}

impl Strip {
    fn set(&mut self, k: usize, row: &[[f32; 4]]) {
        let first = k / GROUP * GROUP;
        let group = GROUP.min(self.rank - first);
        let a = &mut self.a[first * self.quads..];
        for (a, quad) in a.chunks_exact_mut(group).zip(&row[..self.quads]) {
            a[k - first] = *quad;
        }
    }

    /// `b · a`: the definition.
    fn sums(&self, b: &[f32], sums: &mut [[f32; 4]]) {
        sums.fill([0.0; 4]);
        for (number, b) in b.chunks(GROUP).enumerate() {
            for (sums, a) in sums.iter_mut().zip(self.group(number).chunks_exact(b.len())) {
                for (b, a) in b.iter().zip(a) {
                    for (sum, a) in sums.iter_mut().zip(a) {
                        *sum += b * a;
                    }
                }
            }
        }
    }

    fn group(&self, number: usize) -> &[[f32; 4]] {
        &self.a[number * GROUP * self.quads..]
    }

    fn sums_simd(&self, b: &[f32], sums: &mut [[f32; 4]]) {
        let (groups, rest) = b.as_chunks::<GROUP>();
        for (number, b) in groups.iter().enumerate() {
            let a = self.group(number).as_chunks::<GROUP>().0;
            if number == 0 { add_group::<true>(a, b, sums) } else { add_group::<false>(a, b, sums) }
        }
        if groups.is_empty() {
            sums.fill([0.0; 4]);
        }
        if !rest.is_empty() {
            for (sum, a) in sums.iter_mut().zip(self.group(groups.len()).chunks_exact(rest.len())) {
                let added = rest.iter().zip(a).fold(load::<f32, 4>(sum), |sum, (&b, a)| {
                    f32x4_add(sum, f32x4_mul(f32x4_splat(b), load::<f32, 4>(a)))
                });
                store::<f32, 4>(sum, added);
            }
        }
    }
}

/// Adds a whole group, the first one to zero. Only the factors stay in
/// registers from turn to turn, and no sum does: a compiler that spills those
/// would have them on the critical path.
#[inline(never)]
fn add_group<const FIRST: bool>(a: &[[[f32; 4]; GROUP]], b: &[f32; GROUP], sums: &mut [[f32; 4]]) {
    let b = eight!(k => f32x4_splat(b[k]));
    for (sum, a) in sums.iter_mut().zip(a) {
        let add = |sum: v128, k: usize| f32x4_add(sum, f32x4_mul(b[k], load::<f32, 4>(&a[k])));
        let begin = if FIRST { f32x4_splat(0.0) } else { load::<f32, 4>(sum) };
        let low = add(add(add(add(begin, 0), 1), 2), 3);
        store::<f32, 4>(sum, add(add(add(add(low, 4), 5), 6), 7));
    }
}

/// `w + scale · sums`, rounded: the definition.
fn merge<W: Float>(sums: &[f32], scale: f32, w: &[W::Element], to: &mut [W::Element]) {
    for ((to, &w), &sum) in to.iter_mut().zip(w).zip(sums) {
        *to = W::encode(canonical(W::decode(w) + scale * sum));
    }
}

fn merge_simd<W: Float>(sums: &[f32], scale: f32, w: &[W::Element], to: &mut [W::Element]) {
    let splat = f32x4_splat(scale);
    let ((w, last_w), (to, last_to)) = (w.as_chunks::<8>(), to.as_chunks_mut::<8>());
    let (eights, last) = sums.split_at(8 * w.len());
    for ((to, w), sums) in to.iter_mut().zip(w).zip(eights.as_chunks::<8>().0) {
        let ([low, high], [low_sums, high_sums]) = (W::load8(w), halves(sums));
        let merged = |w: v128, sums: &[f32; 4]| f32x4_add(w, f32x4_mul(splat, load::<f32, 4>(sums)));
        W::store8_canonical(to, [merged(low, low_sums), merged(high, high_sums)]);
    }
    merge::<W>(last, scale, last_w, last_to);
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
        fn check<W: Float, A: Float, B: Float>(rank: usize, columns: usize) {
            let rows = 5;
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
        // Ranks below, of and beyond whole groups; columns below and beyond a
        // strip, whose width depends on the rank.
        for (rank, columns) in [(3, 150), (8, 9), (16, 530), (19, 700), (80, 70)] {
            check::<F32, BF16, F16>(rank, columns);
            check::<F16, F32, BF16>(rank, columns);
            check::<BF16, F16, F32>(rank, columns);
        }
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
