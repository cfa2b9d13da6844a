//! What GPTQ's and AWQ's 4-bit weights have in common.
//!
//! Both store, for groups of rows, a scale and a zero point a column, and
//! `w = scale · f32(code − zero)`: the difference as an integer (exact), one
//! product rounded to f32, one rounding to the result's format. They differ in
//! how codes are packed into 32-bit words.
//!
//! The SIMD form for 16-bit results rests on this: in a group, a column has
//! only 16 possible values. It computes those, and then looks codes up, 16
//! rows of a column at a time, which is a byte shuffle of a vector. That takes
//! a fifth of the arithmetic. Everything else (32-bit results, groups that do
//! not come in sixteens) is computed row by row.

use alloc::vec;
use alloc::vec::Vec;

use super::{F32, Float, canonical, cast};

use super::lanes::*;

/// Codes in a word.
pub(super) const PER_WORD: usize = 8;

/// The scales and zero points of one group, decoded.
pub(super) struct Group {
    pub(super) scales: Vec<f32>,
    pub(super) zeros: Vec<i32>,
}

impl Group {
    pub(super) fn of_columns(columns: usize) -> Self {
        Group { scales: vec![0.0; columns], zeros: vec![0; columns] }
    }

    /// Takes a row of scales and of packed zero points, nibble `order[c]` of a
    /// word being column `c` of its eight; `plus` is added to every zero.
    pub(super) fn set<S: Float>(&mut self, scales: &[S::Element], zeros: &[u32], order: [u32; PER_WORD], plus: i32) {
        cast::convert::<S, F32>(scales, &mut self.scales);
        for (zeros, word) in self.zeros.as_chunks_mut::<PER_WORD>().0.iter_mut().zip(zeros) {
            for (zero, nibble) in zeros.iter_mut().zip(order) {
                *zero = (word >> (4 * nibble) & 15) as i32 + plus;
            }
        }
    }
}

/// Calls `each` for every group that occurs, with its rows in ascending order.
pub(super) fn by_group(groups: &[u32], mut each: impl FnMut(usize, &[usize])) {
    let mut rows: Vec<usize> = (0..groups.len()).collect();
    rows.sort_by_key(|&row| groups[row]);
    for rows in rows.chunk_by(|&a, &b| groups[a] == groups[b]) {
        each(groups[rows[0]] as usize, rows);
    }
}

/// Splits a group's rows into the first rows of sixteens that begin at a
/// multiple of `align`, if there are enough of them to pay for tables, and all
/// the others.
pub(super) fn sixteens<D: Float>(rows: &[usize], align: usize) -> (Vec<usize>, Vec<usize>) {
    const PAYS: usize = 2;
    let (mut sixteens, mut others, mut at) = (Vec::new(), Vec::new(), 0);
    while at < rows.len() && size_of::<D::Element>() == 2 {
        let row = rows[at];
        if row % align == 0 && rows.get(at + 15) == Some(&(row + 15)) {
            sixteens.push(row);
            at += 16;
        } else {
            others.push(row);
            at += 1;
        }
    }
    if sixteens.len() < PAYS { (Vec::new(), rows.to_vec()) } else { (sixteens, others) }
}

/// The definition of one value.
#[inline(always)]
pub(super) fn value<D: Float>(code: u32, zero: i32, scale: f32) -> D::Element {
    D::encode(canonical(scale * (code as i32 - zero) as f32))
}

/// Eight values of a row from their codes.
#[inline(always)]
pub(super) fn values8(codes: [v128; 2], zeros: &[i32; 8], scales: &[f32; 8]) -> [v128; 2] {
    let (zeros, scales) = (halves(zeros), halves(scales));
    let value = |half: usize| {
        let difference = f32x4_convert_i32x4(i32x4_sub(codes[half], load::<i32, 4>(zeros[half])));
        f32x4_mul(load::<f32, 4>(scales[half]), difference)
    };
    [value(0), value(1)]
}

/// The 16 values of each of eight columns, as planes of bytes.
pub(super) type Tables = [[v128; 2]; 8];

/// Tables for eight columns of a group.
#[inline(always)]
pub(super) fn tables<D: Float>(zeros: &[i32; 8], scales: &[f32; 8]) -> Tables {
    let of_codes = |first: i32| {
        let rows: [v128; 8] = core::array::from_fn(|i| {
            let code = i32x4_splat(first + i as i32);
            D::pack8_canonical(values8([code, code], zeros, scales))
        });
        transpose(rows)
    };
    let (low, high) = (of_codes(0), of_codes(8));
    core::array::from_fn(|column| {
        let (low, high) = (low[column], high[column]);
        let mask = u16x8_splat(0xff);
        [
            u8x16_narrow_i16x8(v128_and(low, mask), v128_and(high, mask)),
            u8x16_narrow_i16x8(u16x8_shr(low, 8), u16x8_shr(high, 8)),
        ]
    })
}

/// Sixteen rows of eight columns: `codes[c]` are the 16 codes of column `c`.
#[inline(always)]
pub(super) fn look_up(tables: &Tables, codes: &[v128; 8]) -> [[v128; 8]; 2] {
    let (mut top, mut bottom) = ([codes[0]; 8], [codes[0]; 8]);
    for column in 0..8 {
        let b0 = i8x16_swizzle(tables[column][0], codes[column]);
        let b1 = i8x16_swizzle(tables[column][1], codes[column]);
        top[column] = zip8_low(b0, b1);
        bottom[column] = zip8_high(b0, b1);
    }
    [transpose(top), transpose(bottom)]
}

/// Eight vectors of eight 16-bit lanes, rows for columns: three rounds of
/// interleaving the first half with the second.
#[inline(always)]
fn transpose(mut rows: [v128; 8]) -> [v128; 8] {
    for _ in 0..3 {
        rows = core::array::from_fn(|i| {
            let (a, b) = (rows[i / 2], rows[i / 2 + 4]);
            if i % 2 == 0 { zip16_low(a, b) } else { zip16_high(a, b) }
        });
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::super::testdata::{self, Reference, assert_same_bits};
    use super::super::{BF16, F16, awq, gptq};
    use super::*;

    const K: usize = 96;
    const N: usize = 24;
    const G: usize = 16;

    /// For one format of scales: all four ways, to all three formats.
    fn check<S: Float>(mut reference: Reference) {
        let mut codes = testdata::int4_codes();
        let (gptq_words, gptq_zeros) = (codes.take::<u32>(K / 8 * N), codes.take::<u32>(K / G * N / 8));
        let (awq_words, awq_zeros) = (codes.take::<u32>(K * N / 8), codes.take::<u32>(K / G * N / 8));
        let g_idx = codes.all::<u32>();
        let plain: Vec<u32> = (0..K).map(|k| (k / G) as u32).collect();
        let scales = reference.take::<S::Element>(K / G * N);
        let weights = |v1| gptq::Weights::<S> { words: &gptq_words, zeros: &gptq_zeros, scales: &scales, columns: N, v1 };
        let awq_weights = awq::Weights::<S> { words: &awq_words, zeros: &awq_zeros, scales: &scales, columns: N };

        fn all<S: Float, D: Float>(
            reference: &mut Reference,
            weights: &dyn Fn(bool) -> (Vec<D::Element>, Vec<D::Element>),
            shuffled: (Vec<D::Element>, Vec<D::Element>),
            awq: (Vec<D::Element>, Vec<D::Element>),
        ) {
            for (name, (scalar, simd)) in
                [("v1", weights(true)), ("v0", weights(false)), ("g_idx", shuffled), ("awq", awq)]
            {
                let expected = reference.take::<D::Element>(K * N);
                let name = format!("{name}, {} to {}", S::DTYPE, D::DTYPE);
                assert_same_bits(&scalar, &expected, &format!("{name}, scalar"));
                assert_same_bits(&simd, &expected, &format!("{name}, simd"));
            }
        }
        macro_rules! format {
            ($d:ty) => {
                all::<S, $d>(
                    &mut reference,
                    &|v1| (weights(v1).scalar::<$d>(&plain), weights(v1).simd::<$d>(&plain)),
                    (weights(true).scalar::<$d>(&g_idx), weights(true).simd::<$d>(&g_idx)),
                    (awq_weights.scalar::<$d>(&plain), awq_weights.simd::<$d>(&plain)),
                )
            };
        }
        format!(F32);
        format!(F16);
        format!(BF16);
        assert!(reference.all::<u8>().is_empty());
    }

    #[test]
    fn every_format_of_scales_and_results() {
        check::<F32>(testdata::int4_f32());
        check::<F16>(testdata::int4_f16());
        check::<BF16>(testdata::int4_bf16());
    }

    #[test]
    fn shapes_that_do_not_come_in_sixteens() {
        // 8 · odd rows, columns beyond and below 32, groups of 3, 8, 16, 40.
        for (rows, columns) in [(8, 8), (16, 40), (40, 8), (120, 72)] {
            let words: Vec<u32> = (0..rows * columns / 8).map(|i| (i as u32).wrapping_mul(0x9e37_79b9)).collect();
            for group in [3, 8, 16, 40] {
                let groups = usize::div_ceil(rows, group);
                let zeros: Vec<u32> = (0..groups * columns / 8).map(|i| (i as u32).wrapping_mul(0x85eb_ca6b)).collect();
                let scales: Vec<f32> = (0..groups * columns).map(|i| 1.0 / (i + 3) as f32).collect();
                let of_row: Vec<u32> = (0..rows).map(|k| (k / group) as u32).collect();
                let gptq = gptq::Weights::<F32> { words: &words, zeros: &zeros, scales: &scales, columns, v1: true };
                assert_same_bits(&gptq.simd::<F16>(&of_row), &gptq.scalar::<F16>(&of_row), "gptq");
                assert_same_bits(&gptq.simd::<F32>(&of_row), &gptq.scalar::<F32>(&of_row), "gptq");
                let awq = awq::Weights::<F32> { words: &words, zeros: &zeros, scales: &scales, columns };
                assert_same_bits(&awq.simd::<BF16>(&of_row), &awq.scalar::<BF16>(&of_row), "awq");
                assert_same_bits(&awq.simd::<F32>(&of_row), &awq.scalar::<F32>(&of_row), "awq");
            }
        }
    }
}
