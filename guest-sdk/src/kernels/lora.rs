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
/// Columns whose sums are in registers at a time.
const BLOCK: usize = 16;

/// What a block of columns has in a row of `a`, or as sums.
type Block = [[f32; 4]; BLOCK / 4];

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
        let b = |row: usize| &b[row * self.rank..][..self.rank];
        let strip_columns = (STRIP_ENTRIES / self.rank.max(1) / BLOCK * BLOCK).clamp(STRIP_MIN, STRIP);
        let mut strip = Strip { a: vec![Block::default(); self.rank * strip_columns / BLOCK], rank: self.rank };
        let mut two = vec![[[0.0; 4]; 2]; self.rank];
        let mut one = vec![[[0.0; 4]; 1]; self.rank];
        for first in (0..self.columns).step_by(strip_columns) {
            let width = strip_columns.min(self.columns - first);
            self.decode(first, width, &mut strip);
            let rows = w.chunks(self.columns).zip(to.chunks_mut(self.columns)).enumerate();
            let mut rows = rows.map(|(row, (w, to))| (b(row), &w[first..][..width], &mut to[first..][..width]));
            while let Some((b, w, to)) = rows.next() {
                if !simd {
                    strip.merge::<W>(b, self.scale, w, to);
                } else if let Some((lower_b, lower_w, lower_to)) = rows.next() {
                    splat([b, lower_b], &mut two);
                    strip.merge_simd::<W, 2>(&two, self.scale, [w, lower_w], [to, lower_to]);
                } else {
                    splat([b], &mut one);
                    strip.merge_simd::<W, 1>(&one, self.scale, [w], [to]);
                }
            }
        }
    }

    /// Columns of `a` from `first` on.
    fn decode(&self, first: usize, width: usize, strip: &mut Strip) {
        let mut row = [Block::default(); STRIP / BLOCK];
        for k in 0..self.rank {
            let a = &self.a[k * self.columns + first..][..width];
            cast::convert::<A, F32>(a, &mut row.as_flattened_mut().as_flattened_mut()[..width]);
            for (a, block) in strip.a.chunks_exact_mut(self.rank).zip(&row[..width.div_ceil(BLOCK)]) {
                a[k] = *block;
            }
        }
    }
}

/// A strip of columns of `a`, decoded: `[blocks, rank, BLOCK]`. In the last
/// block of a row, columns that are too many hold anything.
struct Strip {
    a: Vec<Block>,
    rank: usize,
}

impl Strip {
    /// `w + scale · (b · a)`, rounded: the definition.
    fn merge<W: Float>(&self, b: &[f32], scale: f32, w: &[W::Element], to: &mut [W::Element]) {
        for ((number, w), to) in w.chunks(BLOCK).enumerate().zip(to.chunks_mut(BLOCK)) {
            let mut sums = Block::default();
            for (b, a) in b.iter().zip(self.block(number)) {
                for (sum, a) in sums.as_flattened_mut().iter_mut().zip(a.as_flattened()) {
                    *sum += b * a;
                }
            }
            merge::<W>(&sums, scale, w, to);
        }
    }

    /// The same for some rows at once, which share what is loaded of `a`.
    fn merge_simd<W: Float, const ROWS: usize>(
        &self,
        b: &[[[f32; 4]; ROWS]],
        scale: f32,
        w: [&[W::Element]; ROWS],
        to: [&mut [W::Element]; ROWS],
    ) {
        let w = w.map(|w| w.as_chunks::<BLOCK>());
        let mut to = to.map(|to| to.as_chunks_mut::<BLOCK>());
        let blocks = w[0].0.len();
        for number in 0..blocks {
            let sums = sums_simd(self.block(number), b);
            let mut finish = |row: usize| {
                merge_simd::<W>(sums[row], scale, &w[row].0[number], &mut to[row].0[number]);
            };
            // Not a loop, which would keep the sums in memory.
            finish(0);
            if ROWS == 2 {
                finish(1);
            }
        }
        if !w[0].1.is_empty() {
            for ((w, to), from) in w.iter().zip(to).zip(sums_simd(self.block(blocks), b)) {
                let mut sums = Block::default();
                sums.iter_mut().zip(from).for_each(|(to, sum)| store::<f32, 4>(to, sum));
                merge::<W>(&sums, scale, w.1, to.1);
            }
        }
    }

    #[inline(always)]
    fn block(&self, number: usize) -> &[Block] {
        &self.a[number * self.rank..][..self.rank]
    }
}

/// Rows of `b`, every entry in all lanes.
fn splat<const ROWS: usize>(b: [&[f32]; ROWS], to: &mut [[[f32; 4]; ROWS]]) {
    for (k, to) in to.iter_mut().enumerate() {
        *to = b.map(|b| [b[k]; 4]);
    }
}

/// `b · a` of a block, for some rows. With two rows the sums, and what a turn
/// loads, just fit the registers.
#[inline(always)]
fn sums_simd<const ROWS: usize>(a: &[Block], b: &[[[f32; 4]; ROWS]]) -> [[v128; 4]; ROWS] {
    let mut sums = [[f32x4_splat(0.0); 4]; ROWS];
    let mut b = b.iter();
    for a in a {
        let Some(b) = b.next() else { break };
        for (sums, b) in sums.iter_mut().zip(b) {
            let b = load::<f32, 4>(b);
            let add = |sum: v128, a: &[f32; 4]| f32x4_add(sum, f32x4_mul(b, load::<f32, 4>(a)));
            *sums = [add(sums[0], &a[0]), add(sums[1], &a[1]), add(sums[2], &a[2]), add(sums[3], &a[3])];
        }
    }
    sums
}

fn merge<W: Float>(sums: &Block, scale: f32, w: &[W::Element], to: &mut [W::Element]) {
    for ((to, &w), &sum) in to.iter_mut().zip(w).zip(sums.as_flattened()) {
        *to = W::encode(canonical(W::decode(w) + scale * sum));
    }
}

#[inline(always)]
fn merge_simd<W: Float>(sums: [v128; 4], scale: f32, w: &[W::Element; BLOCK], to: &mut [W::Element; BLOCK]) {
    let scale = f32x4_splat(scale);
    let mut merge8 = |number: usize, sums: [v128; 2]| {
        let [low, high] = W::load8(&w.as_chunks().0[number]);
        let merged = |w: v128, sum: v128| f32x4_add(w, f32x4_mul(scale, sum));
        W::store8_canonical(&mut to.as_chunks_mut().0[number], [merged(low, sums[0]), merged(high, sums[1])]);
    };
    merge8(0, [sums[0], sums[1]]);
    merge8(1, [sums[2], sums[3]]);
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
        for (rank, columns) in [(3, 150), (8, 9), (16, 530), (19, 700), (80, 70), (1, 16), (2, 31), (7, 48)] {
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
