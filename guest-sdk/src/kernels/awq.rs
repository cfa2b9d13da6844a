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
        assert!(self.columns > 0 && self.columns % PER_WORD == 0, "columns come in eights");
        assert_eq!(self.words.len() * PER_WORD, to.len(), "a code for every value");
        assert_eq!(groups.len() * self.columns, to.len(), "a group for every row");
        if SIMD {
            self.each_group(groups, |group, rows| self.rows_simd::<D>(group, rows, to));
        } else {
            self.each_group(groups, |group, rows| self.rows_scalar::<D>(group, rows, to));
        }
    }

    fn each_group(&self, groups: &[u32], mut each: impl FnMut(&Group, &[usize])) {
        let mut group = Group::of_columns(self.columns);
        let width = self.width();
        by_group(groups, |number, rows| {
            let scales = &self.scales[number * self.columns..][..self.columns];
            group.set::<S>(scales, &self.zeros[number * width..][..width], ORDER, 0);
            each(&group, rows);
        });
    }

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
        let to = to[row * self.columns..][from * PER_WORD..self.columns].as_chunks_mut::<8>().0;
        let zeros = group.zeros[from * PER_WORD..].as_chunks::<8>().0;
        let scales = group.scales[from * PER_WORD..].as_chunks::<8>().0;
        // Nibbles 0 4 1 5 and 2 6 3 7, each a byte, to 32-bit lanes.
        let columns = [0x80_u32 << 8 | 0x80 << 16 | 0x80 << 24; 4];
        let lanes = |nibbles: [u32; 4]| {
            let [a, b, c, d] = core::array::from_fn(|i| columns[i] | nibbles[i]);
            u32x4(a, b, c, d)
        };
        let (first, second) = (lanes([0, 4, 1, 5]), lanes([2, 6, 3, 7]));
        for (((to, word), zeros), scales) in to.iter_mut().zip(words).zip(zeros).zip(scales) {
            let word = u32x4_splat(*word);
            let even = v128_and(word, u8x16_splat(15));
            let odd = v128_and(u16x8_shr(word, 4), u8x16_splat(15));
            let nibbles = zip8_low(even, odd);
            let codes = [i8x16_swizzle(nibbles, first), i8x16_swizzle(nibbles, second)];
            D::store8_canonical(to, int4::values8(codes, zeros, scales));
        }
    }

    /// Sixteen rows from each of `starts`, but for a last part of less than 32
    /// columns.
    fn look_up<D: Float>(&self, group: &Group, starts: &[usize], to: &mut [D::Element]) {
        if starts.is_empty() {
            return;
        }
        let (zeros, scales) = (group.zeros.as_chunks::<8>().0, group.scales.as_chunks::<8>().0);
        let blocks = zeros.chunks_exact(4).zip(scales.chunks_exact(4));
        for (number, (zeros, scales)) in blocks.enumerate() {
            let tables: [_; 4] = core::array::from_fn(|block| int4::tables::<D>(&zeros[block], &scales[block]));
            for &row in starts {
                let bytes = self.bytes16(row, number * 4);
                for (block, tables) in tables.iter().enumerate() {
                    let column = number * 32 + block * 8;
                    let codes = codes(&bytes[4 * block..]);
                    let values = int4::look_up(tables, &codes);
                    for (i, values) in values.into_iter().flatten().enumerate() {
                        let to = &mut to[(row + i) * self.columns + column..][..8];
                        D::store_packed8(to.try_into().expect("eight columns"), values);
                    }
                }
            }
        }
    }

    /// Each of the 16 bytes of four words, of 16 rows: a transpose by four
    /// rounds of interleaving the first half with the second.
    #[inline(always)]
    fn bytes16(&self, row: usize, word: usize) -> [v128; 16] {
        let mut rows: [v128; 16] = core::array::from_fn(|i| {
            let words = &self.words[(row + i) * self.width() + word..][..4];
            load::<u32, 4>(words.try_into().expect("four words"))
        });
        for _ in 0..4 {
            rows = core::array::from_fn(|i| {
                let (a, b) = (rows[i / 2], rows[i / 2 + 8]);
                if i % 2 == 0 { zip8_low(a, b) } else { zip8_high(a, b) }
            });
        }
        rows
    }
}

/// The codes of eight columns from the four bytes of their words.
#[inline(always)]
fn codes(bytes: &[v128]) -> [v128; 8] {
    core::array::from_fn(|column| {
        let nibble = ORDER[column] as usize;
        let byte = bytes[nibble / 2];
        let byte = if nibble % 2 == 0 { byte } else { u16x8_shr(byte, 4) };
        v128_and(byte, u8x16_splat(15))
    })
}

#[cfg(test)]
impl<S: Float> Weights<'_, S> {
    pub(super) fn scalar<D: Float>(&self, groups: &[u32]) -> Vec<D::Element> {
        let mut to = vec![D::Element::default(); groups.len() * self.columns];
        self.each_group(groups, |group, rows| self.rows_scalar::<D>(group, rows, &mut to));
        to
    }

    pub(super) fn simd<D: Float>(&self, groups: &[u32]) -> Vec<D::Element> {
        let mut to = vec![D::Element::default(); groups.len() * self.columns];
        self.each_group(groups, |group, rows| self.rows_simd::<D>(group, rows, &mut to));
        to
    }
}
