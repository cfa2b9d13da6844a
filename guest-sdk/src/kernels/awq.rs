//! From AWQ's 4-bit weights.
//!
//! `[K, N]` codes lie in `[K, N/8]` words, and zero points in `[groups, N/8]`
//! words: nibble `i` of word `j` is column `8j + [0, 2, 4, 6, 1, 3, 5, 7][i]`.
//! `w = scale · f32(code − zero)`, rounded to f32, then to the result.

use super::Float;
use super::int4::{Block, Group, LookUp, PER_WORD, WIDE, by_group, value};

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
        // Tables are looked up for some words at a time; a row's last words
        // may be fewer, and are done one by one with the other rows.
        let looked_up = if sixteens.is_empty() { 0 } else { self.columns / WIDE * WIDE / PER_WORD };
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

    /// Sixteen rows from each of `starts`, but for a last part of less than
    /// [`WIDE`] columns.
    fn look_up<D: Float>(&self, group: &Group, starts: &[usize], to: &mut [D::Element]) {
        if starts.is_empty() {
            return;
        }
        let mut look_up = LookUp::<D, { WIDE / 8 }>::new();
        let mut bytes = Bytes::default();
        for column in (0..self.columns / WIDE * WIDE).step_by(WIDE) {
            look_up.set_group(group, column);
            for &row in starts {
                self.transpose(row, column / PER_WORD, &mut bytes);
                for (mut block, [first, last]) in look_up.blocks().zip(&bytes) {
                    set_codes(&mut block, first, last);
                }
                look_up.write(&mut to[row * self.columns + column..], self.columns);
            }
        }
    }

    /// Sixteen rows of the words of [`WIDE`] columns.
    #[inline(always)]
    fn transpose(&self, row: usize, word: usize, to: &mut Bytes) {
        const WORDS: usize = WIDE / PER_WORD;
        assert!(self.width() >= WORDS, "a row is at least as long as the words");
        let mut rest = &self.words[row * self.width() + word..];
        let mut row = |last: bool| {
            let (row, others) = rest.split_at(if last { WORDS } else { self.width() });
            rest = others;
            halves::<u32>(row.first_chunk().expect("the words of all columns"))
        };
        let rows = eight!(_i => row(false));
        set_bytes(to, 0, 0, eight!(i => load::<u32, 4>(rows[i][0])));
        set_bytes(to, 4, 0, eight!(i => load::<u32, 4>(rows[i][1])));
        let rows = eight!(i => row(i == 7));
        set_bytes(to, 0, 1, eight!(i => load::<u32, 4>(rows[i][0])));
        set_bytes(to, 4, 1, eight!(i => load::<u32, 4>(rows[i][1])));
    }
}

/// For each of some words the first and the last eight of sixteen rows: every
/// byte of all rows together.
type Bytes = [[[[u8; 8]; 4]; 2]; WIDE / PER_WORD];

/// Takes eight rows of four words.
#[inline(always)]
fn set_bytes(to: &mut Bytes, word: usize, half: usize, rows: [v128; 8]) {
    let bytes = int4::interleave(rows, zip8_low, zip8_high);
    let _ = eight!(i => store(&mut to[word + i / 2][half].as_flattened_mut().as_chunks_mut::<16>().0[i % 2], bytes[i]));
}

/// Sixteen rows of eight columns, from each of their words' bytes in the first
/// and the last eight rows.
#[inline(always)]
fn set_codes(block: &mut Block<'_>, first: &[[u8; 8]; 4], last: &[[u8; 8]; 4]) {
    const COLUMN: [usize; PER_WORD] = inverse(ORDER);
    let mut set_byte = |byte: usize, rows: v128| {
        block.set(COLUMN[2 * byte], v128_and(rows, u8x16_splat(15)));
        block.set(COLUMN[2 * byte + 1], v128_and(u16x8_shr(rows, 4), u8x16_splat(15)));
    };
    let pair = |bytes: &[[u8; 8]; 4], number: usize| load(&bytes.as_flattened().as_chunks::<16>().0[number]);
    let (a, b) = (pair(first, 0), pair(last, 0));
    set_byte(0, zip64_low(a, b));
    set_byte(1, zip64_high(a, b));
    let (a, b) = (pair(first, 1), pair(last, 1));
    set_byte(2, zip64_low(a, b));
    set_byte(3, zip64_high(a, b));
}

/// Column by nibble from nibble by column.
const fn inverse(order: [u32; PER_WORD]) -> [usize; PER_WORD] {
    let (mut inverse, mut column) = ([0; PER_WORD], 0);
    while column < PER_WORD {
        inverse[order[column] as usize] = column;
        column += 1;
    }
    inverse
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
