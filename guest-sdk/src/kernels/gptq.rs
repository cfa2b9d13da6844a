//! From GPTQ's 4-bit weights.
//!
//! `[K, N]` codes lie in `[K/8, N]` words: row `k` is nibble `k mod 8`, least
//! first, of word row `k / 8`. Zero points are `[groups, N/8]` words, column
//! `n` nibble `n mod 8` of word `n / 8`. In the first version of the format
//! the stored zero is one less than the zero, and 15 means 16: it does not
//! wrap. `w = scale · f32(code − zero)`, rounded to f32, then to the result.

use core::ops::Range;

use super::Float;
use super::int4::{Block, Group, LookUp, PER_WORD, WIDE, by_group, value};

use super::{int4, lanes::*};

/// Nibble of a zero point by column: in order.
const ORDER: [u32; PER_WORD] = [0, 1, 2, 3, 4, 5, 6, 7];

/// Some rows of a quantised matrix and the groups that they use.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a, S: Float> {
    /// Codes: `[rows / 8, columns]`.
    pub words: &'a [u32],
    /// Zero points: `[groups, columns / 8]`.
    pub zeros: &'a [u32],
    /// Scales: `[groups, columns]`.
    pub scales: &'a [S::Element],
    /// Columns, a multiple of 8.
    pub columns: usize,
    /// Whether stored zero points are one less than they mean.
    pub v1: bool,
}

impl<S: Float> Weights<'_, S> {
    /// All values, row by row; row `k` uses group `groups[k]` of `zeros` and
    /// `scales`.
    ///
    /// # Panics
    /// If the slices' lengths do not fit together, or a group is out of range.
    ///
    /// ```
    /// use weightmill_guest::kernels::{F32, gptq};
    ///
    /// let w = gptq::Weights::<F32> { words: &[0x2; 8], zeros: &[0x0], scales: &[0.5; 8], columns: 8, v1: true };
    /// let mut to = [0.0; 64];
    /// w.dequantize::<F32>(&[0; 8], &mut to);
    /// assert_eq!((to[0], to[8]), (0.5, -0.5)); // ½·(2 − 1), ½·(0 − 1)
    /// ```
    pub fn dequantize<D: Float>(&self, groups: &[u32], to: &mut [D::Element]) {
        assert!(self.columns > 0 && self.columns.is_multiple_of(PER_WORD), "columns come in eights");
        assert_eq!(self.words.len() * PER_WORD, to.len(), "a code for every value");
        assert_eq!(groups.len() * self.columns, to.len(), "a group for every row");
        let codes = Codes { words: self.words, columns: self.columns };
        if SIMD {
            self.each_group(groups, |group, rows| codes.rows_simd::<D>(group, rows, to));
        } else {
            self.each_group(groups, |group, rows| codes.rows_scalar::<D>(group, rows, to));
        }
    }

    fn each_group(&self, groups: &[u32], mut each: impl FnMut(&Group, &[usize])) {
        let mut group = Group::of_columns(self.columns);
        let width = self.columns / PER_WORD;
        by_group(groups, |number, rows| {
            let scales = &self.scales[number * self.columns..][..self.columns];
            group.set::<S>(scales, &self.zeros[number * width..][..width], ORDER, self.v1.into());
            each(&group, rows);
        });
    }
}

/// The part of [`Weights`] that does not depend on the scales' format.
struct Codes<'a> {
    words: &'a [u32],
    columns: usize,
}

impl Codes<'_> {
    fn rows_scalar<D: Float>(&self, group: &Group, rows: &[usize], to: &mut [D::Element]) {
        for &row in rows {
            let words = &self.words[row / PER_WORD * self.columns..][..self.columns];
            let shift = 4 * (row % PER_WORD) as u32;
            let to = &mut to[row * self.columns..][..self.columns];
            for (((to, word), zero), scale) in to.iter_mut().zip(words).zip(&group.zeros).zip(&group.scales) {
                *to = value::<D>(word >> shift & 15, *zero, *scale);
            }
        }
    }

    #[inline(never)]
    fn rows_simd<D: Float>(&self, group: &Group, rows: &[usize], to: &mut [D::Element]) {
        let (sixteens, others) = int4::sixteens::<D>(rows, PER_WORD);
        self.look_up::<D>(group, &sixteens, to);
        for row in others {
            let words = &self.words[row / PER_WORD * self.columns..][..self.columns];
            let shift = 4 * (row % PER_WORD) as u32;
            let eight = |words: &[u32; 8], zeros: &[f32; 8], scales: &[f32; 8], to: &mut [D::Element; 8]| {
                let [low, high] = halves(words);
                let code = |words: &[u32; 4]| v128_and(u32x4_shr(load::<u32, 4>(words), shift), u32x4_splat(15));
                D::store8_canonical(to, int4::values8([code(low), code(high)], zeros, scales));
            };
            int4::each_eight::<D, _, 8>(words, group, 0, &mut to[row * self.columns..][..self.columns], eight);
        }
    }

    /// Sixteen rows from each of `starts`.
    fn look_up<D: Float>(&self, group: &Group, starts: &[usize], to: &mut [D::Element]) {
        if starts.is_empty() {
            return;
        }
        let wide = self.columns / WIDE * WIDE;
        self.look_up_blocks::<D, { WIDE / 8 }>(group, 0..wide, starts, to);
        self.look_up_blocks::<D, 1>(group, wide..self.columns, starts, to);
    }

    fn look_up_blocks<D: Float, const BLOCKS: usize>(
        &self,
        group: &Group,
        columns: Range<usize>,
        starts: &[usize],
        to: &mut [D::Element],
    ) {
        let mut look_up = LookUp::<D, BLOCKS>::new();
        for column in columns.step_by(8 * BLOCKS) {
            look_up.set_group(group, column);
            for &row in starts {
                let words = |number: usize| {
                    let words = &self.words[(row / PER_WORD + number) * self.columns + column..];
                    words.as_chunks::<8>().0.first_chunk::<BLOCKS>().expect("the columns of all blocks")
                };
                for ((mut block, upper), lower) in look_up.blocks().zip(words(0)).zip(words(1)) {
                    set_codes(&mut block, upper, lower);
                }
                look_up.write(&mut to[row * self.columns + column..], self.columns);
            }
        }
    }
}

/// Sixteen rows of eight columns.
#[inline(always)]
fn set_codes(block: &mut Block<'_>, upper: &[u32; 8], lower: &[u32; 8]) {
    let mut set_pair = |column: usize, words: v128| {
        // Eight bytes of a column's 16 rows, then those of the next column.
        let even = v128_and(words, u8x16_splat(15));
        let odd = v128_and(u16x8_shr(words, 4), u8x16_splat(15));
        block.set(column, zip8_low(even, odd));
        block.set(column + 1, zip8_high(even, odd));
    };
    let ([a, b], [c, d]) = (halves(upper), halves(lower));
    let (a, c) = (load::<u32, 4>(a), load::<u32, 4>(c));
    set_pair(0, zip32_low(a, c));
    set_pair(2, zip32_high(a, c));
    let (b, d) = (load::<u32, 4>(b), load::<u32, 4>(d));
    set_pair(4, zip32_low(b, d));
    set_pair(6, zip32_high(b, d));
}

#[cfg(test)]
impl<S: Float> Weights<'_, S> {
    pub(super) fn scalar<D: Float>(&self, groups: &[u32]) -> Vec<D::Element> {
        let mut to = vec![D::Element::default(); groups.len() * self.columns];
        let codes = Codes { words: self.words, columns: self.columns };
        self.each_group(groups, |group, rows| codes.rows_scalar::<D>(group, rows, &mut to));
        to
    }

    pub(super) fn simd<D: Float>(&self, groups: &[u32]) -> Vec<D::Element> {
        let mut to = vec![D::Element::default(); groups.len() * self.columns];
        let codes = Codes { words: self.words, columns: self.columns };
        self.each_group(groups, |group, rows| codes.rows_simd::<D>(group, rows, &mut to));
        to
    }
}
