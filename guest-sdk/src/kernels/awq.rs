//! From AWQ's 4-bit weights.
//!
//! `[K, N]` codes lie in `[K, N/8]` words, and zero points in `[groups, N/8]`
//! words: nibble `i` of word `j` is column `8j + [0, 2, 4, 6, 1, 3, 5, 7][i]`.
//! `w = scale · f32(code − zero)`, rounded to f32, then to the result.

use super::Float;
use super::int4::{Group, PER_WORD, by_group, value};

use super::{int4, lanes::*};

/// Nibble by column: the inverse of the order above.
const ORDER: [u32; PER_WORD] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Some rows of a quantised matrix and the groups that they use.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a, S: Float> {
    /// Codes: `[rows, columns / 8]`.
    pub words: &'a [u32],
    /// Zero points: `[groups, columns / 8]`.
    pub zeros: &'a [u32],
    /// Scales: `[groups, columns]`.
    pub scales: &'a [S::Element],
    /// Columns, a multiple of 8.
    pub columns: usize,
}

impl<S: Float> Weights<'_, S> {
    /// All values, row by row; row `k` uses group `groups[k]` of `zeros` and
    /// `scales`.
    ///
    /// # Panics
    /// If the slices' lengths do not fit together, or a group is out of range.
    ///
    /// ```
    /// use weightmill_guest::kernels::{F32, awq};
    ///
    /// let w = awq::Weights::<F32> { words: &[0x30], zeros: &[0], scales: &[2.0; 8], columns: 8 };
    /// let mut to = [0.0; 8];
    /// w.dequantize::<F32>(&[0], &mut to);
    /// assert_eq!(to, [0.0, 0.0, 6.0, 0.0, 0.0, 0.0, 0.0, 0.0]); // nibble 1 is column 2
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
            group.set::<S>(scales, &self.zeros[number * width..][..width], ORDER, 0);
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
    /// Words in a row.
    fn width(&self) -> usize {
        self.columns / PER_WORD
    }

    fn rows_scalar<D: Float>(&self, group: &Group, rows: &[usize], to: &mut [D::Element]) {
        for &row in rows {
            let words = &self.words[row * self.width()..][..self.width()];
            let to = to[row * self.columns..][..self.columns].as_chunks_mut::<PER_WORD>().0;
            let (zeros, scales) = (group.zeros.as_chunks::<PER_WORD>().0, group.scales.as_chunks::<PER_WORD>().0);
            for (((to, word), zeros), scales) in to.iter_mut().zip(words).zip(zeros).zip(scales) {
                for column in 0..PER_WORD {
                    to[column] = value::<D>(word >> (4 * ORDER[column]) & 15, zeros[column], scales[column]);
                }
            }
        }
    }

    #[inline(never)]
    fn rows_simd<D: Float>(&self, group: &Group, rows: &[usize], to: &mut [D::Element]) {
        let (sixteens, others) = int4::sixteens::<D>(rows, 1);
        // Tables are looked up for four words at a time; a row's last words
        // may be fewer, and are done one by one with the other rows.
        let looked_up = if sixteens.is_empty() { 0 } else { self.width() / 4 * 4 };
        self.look_up::<D>(group, &sixteens, to);
        for row in others {
            self.row::<D>(group, row, 0, to);
        }
        if looked_up < self.width() {
            for row in sixteens.iter().flat_map(|row| *row..row + 16) {
                self.row::<D>(group, row, looked_up, to);
            }
        }
    }

    /// The words of a row from number `from` on.
    fn row<D: Float>(&self, group: &Group, row: usize, from: usize, to: &mut [D::Element]) {
        let words = &self.words[row * self.width()..][from..self.width()];
        let to = &mut to[row * self.columns..][from * PER_WORD..self.columns];
        let spread = int4::Spread::new(ORDER);
        int4::each_eight::<D, _, 1>(words, group, from * PER_WORD, to, |&[word], zeros, scales, to| {
            D::store8_canonical(to, int4::values8(spread.codes8(word), zeros, scales));
        });
    }

    /// Sixteen rows from each of `starts`, but for a last part of less than 32
    /// columns.
    fn look_up<D: Float>(&self, group: &Group, starts: &[usize], to: &mut [D::Element]) {
        if starts.is_empty() {
            return;
        }
        let (zeros, scales) = (group.zeros.as_chunks::<8>().0, group.scales.as_chunks::<8>().0);
        let blocks = zeros.chunks_exact(4).zip(scales.chunks_exact(4));
        let mut values = int4::Rows::<D>::new();
        for (number, (zeros, scales)) in blocks.enumerate() {
            let tables: [_; 4] = core::array::from_fn(|block| int4::tables::<D>(&zeros[block], &scales[block]));
            for &row in starts {
                let bytes = self.bytes16(row, number * 4);
                // Written out: then where a block goes is a constant.
                let mut block = |block: usize| {
                    let bytes = bytes[4 * block..][..4].try_into().expect("four bytes of a word");
                    values.set(block, int4::look_up(&tables[block], &codes(bytes)));
                };
                block(0);
                block(1);
                block(2);
                block(3);
                values.write(4, &mut to[row * self.columns + number * 32..], self.columns);
            }
        }
    }

    /// Each of the 16 bytes of four words, of 16 rows: a transpose by four
    /// rounds of interleaving the first half with the second.
    #[inline(always)]
    fn bytes16(&self, row: usize, word: usize) -> [v128; 16] {
        let words = |number: usize| {
            let words = &self.words[(row + number) * self.width() + word..][..4];
            load::<u32, 4>(words.try_into().expect("four words"))
        };
        let mut low = eight!(i => words(i));
        let mut high = eight!(i => words(8 + i));
        // Written out four times, so that no vector goes through memory for
        // the sake of a loop.
        (low, high) = interleave(low, high);
        (low, high) = interleave(low, high);
        (low, high) = interleave(low, high);
        (low, high) = interleave(low, high);
        [
            low[0], low[1], low[2], low[3], low[4], low[5], low[6], low[7], high[0], high[1], high[2], high[3],
            high[4], high[5], high[6], high[7],
        ]
    }
}

/// The bytes of the first of `low`, alternating with those of the first of
/// `high`, and so on.
#[inline(always)]
fn interleave(low: [v128; 8], high: [v128; 8]) -> ([v128; 8], [v128; 8]) {
    let pair = |i: usize| {
        if i.is_multiple_of(2) { zip8_low(low[i / 2], high[i / 2]) } else { zip8_high(low[i / 2], high[i / 2]) }
    };
    (eight!(i => pair(i)), eight!(i => pair(8 + i)))
}

/// The codes of eight columns from the four bytes of their words.
#[inline(always)]
fn codes(bytes: &[v128; 4]) -> [v128; 8] {
    eight!(column => {
        let nibble = ORDER[column] as usize;
        let byte = bytes[nibble / 2];
        let byte = if nibble.is_multiple_of(2) { byte } else { u16x8_shr(byte, 4) };
        v128_and(byte, u8x16_splat(15))
    })
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
