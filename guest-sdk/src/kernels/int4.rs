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
        let spread = if SIMD { Some(Spread::new(order)) } else { None };
        for (to, &word) in self.zeros.as_chunks_mut::<PER_WORD>().0.iter_mut().zip(zeros) {
            if let Some(spread) = &spread {
                let [low, high] = spread.codes8(word);
                let [to_low, to_high] = halves_mut(to);
                store::<i32, 4>(to_low, i32x4_add(low, i32x4_splat(plus)));
                store::<i32, 4>(to_high, i32x4_add(high, i32x4_splat(plus)));
            } else {
                *to = order.map(|nibble| (word >> (4 * nibble) & 15) as i32 + plus);
            }
        }
    }
}

/// Takes a word's nibbles to 32-bit lanes, in an order.
#[derive(Clone, Copy)]
pub(super) struct Spread([v128; 2]);

impl Spread {
    /// For an order: column `c` is nibble `order[c]`.
    pub(super) fn new(order: [u32; PER_WORD]) -> Self {
        // A byte index, and three that give 0.
        let lane = |nibble: u32| nibble | 0x8080_8000;
        let [a, b, c, d, e, f, g, h] = order.map(lane);
        Spread([u32x4(a, b, c, d), u32x4(e, f, g, h)])
    }

    /// The eight codes of a word.
    #[inline(always)]
    pub(super) fn codes8(&self, word: u32) -> [v128; 2] {
        let word = u32x4_splat(word);
        let even = v128_and(word, u8x16_splat(15));
        let odd = v128_and(u16x8_shr(word, 4), u8x16_splat(15));
        let nibbles = zip8_low(even, odd);
        [i8x16_swizzle(nibbles, self.0[0]), i8x16_swizzle(nibbles, self.0[1])]
    }
}

/// Calls `each` for every group that occurs, with its rows in ascending order.
pub(super) fn by_group(groups: &[u32], mut each: impl FnMut(usize, &[usize])) {
    for rows in in_order(groups).chunk_by(|&a, &b| groups[a] == groups[b]) {
        each(groups[rows[0]] as usize, rows);
    }
}

/// All rows by group, then row.
fn in_order(groups: &[u32]) -> Vec<usize> {
    let mut rows: Vec<usize> = (0..groups.len()).collect();
    if !groups.is_sorted() {
        rows.sort_unstable_by_key(|&row| (groups[row], row));
    }
    rows
}

/// Splits a group's rows into the first rows of sixteens that begin at a
/// multiple of `align`, if there are enough of them to pay for tables, and all
/// the others.
pub(super) fn sixteens<D: Float>(rows: &[usize], align: usize) -> (Vec<usize>, Vec<usize>) {
    const PAYS: usize = 2;
    let (mut sixteens, mut others, mut at) = (Vec::new(), Vec::new(), 0);
    while at < rows.len() && size_of::<D::Element>() == 2 {
        let row = rows[at];
        if row.is_multiple_of(align) && rows.get(at + 15) == Some(&(row + 15)) {
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
    let value = |codes: v128, zeros: &[i32; 4], scales: &[f32; 4]| {
        f32x4_mul(load::<f32, 4>(scales), f32x4_convert_i32x4(i32x4_sub(codes, load::<i32, 4>(zeros))))
    };
    [value(codes[0], zeros[0], scales[0]), value(codes[1], zeros[1], scales[1])]
}

/// Calls `each` for eight columns of a row after the other, from column `from`
/// on, with the words, zeros and scales that belong to them; four times in a loop's turn, because a turn has costs of its own.
#[inline(always)]
pub(super) fn each_eight<D, F, const WORDS: usize>(
    words: &[u32],
    group: &Group,
    from: usize,
    to: &mut [D::Element],
    each: F,
) where
    D: Float,
    F: Fn(&[u32; WORDS], &[i32; 8], &[f32; 8], &mut [D::Element; 8]),
{
    let (codes, to) = (words.as_chunks::<WORDS>().0, to.as_chunks_mut::<8>().0);
    let (zeros, scales) = (group.zeros[from..].as_chunks::<8>().0, group.scales[from..].as_chunks::<8>().0);
    let whole = to.len() / 4 * 4;
    let fours = codes.as_chunks::<4>().0.iter().zip(zeros.as_chunks::<4>().0).zip(scales.as_chunks::<4>().0);
    for (((codes, zeros), scales), to) in fours.zip(to.as_chunks_mut::<4>().0) {
        each(&codes[0], &zeros[0], &scales[0], &mut to[0]);
        each(&codes[1], &zeros[1], &scales[1], &mut to[1]);
        each(&codes[2], &zeros[2], &scales[2], &mut to[2]);
        each(&codes[3], &zeros[3], &scales[3], &mut to[3]);
    }
    for (((codes, zeros), scales), to) in codes.iter().zip(zeros).zip(scales).zip(to).skip(whole) {
        each(codes, zeros, scales, to);
    }
}

/// The 16 values of each of eight columns, as planes of bytes.
pub(super) type Tables = [[v128; 2]; 8];

/// Tables for eight columns of a group.
#[inline(always)]
pub(super) fn tables<D: Float>(zeros: &[i32; 8], scales: &[f32; 8]) -> Tables {
    // A difference is at most 16, so with magnitudes from 2^-14 to 2^11 every
    // value is 0 or normal in all formats.
    const NORMAL: core::ops::Range<u32> = (113 << 23)..(138 << 23);
    if scales.iter().all(|scale| NORMAL.contains(&(scale.to_bits() & 0x7fff_ffff))) {
        tables_of(|code| D::pack8_normal(values8([code, code], zeros, scales)))
    } else {
        tables_of(|code| D::pack8_canonical(values8([code, code], zeros, scales)))
    }
}

/// Tables from the eight columns' values for a code, which is in all lanes.
#[inline(always)]
fn tables_of(values: impl Fn(v128) -> v128) -> Tables {
    let of_code = |code: usize| values(i32x4_splat(code as i32));
    let low = transpose(eight!(i => of_code(i)));
    let high = transpose(eight!(i => of_code(8 + i)));
    let mask = u16x8_splat(0xff);
    eight!(column => [
        u8x16_narrow_i16x8(v128_and(low[column], mask), v128_and(high[column], mask)),
        u8x16_narrow_i16x8(u16x8_shr(low[column], 8), u16x8_shr(high[column], 8)),
    ])
}

/// Sixteen rows of eight columns: `codes[c]` are the 16 codes of column `c`.
#[inline(always)]
pub(super) fn look_up(tables: &Tables, codes: &[v128; 8]) -> [[v128; 8]; 2] {
    let bytes = eight!(column => {
        let [plane0, plane1] = tables[column];
        (i8x16_swizzle(plane0, codes[column]), i8x16_swizzle(plane1, codes[column]))
    });
    [
        transpose(eight!(column => zip8_low(bytes[column].0, bytes[column].1))),
        transpose(eight!(column => zip8_high(bytes[column].0, bytes[column].1))),
    ]
}

/// Eight vectors of eight 16-bit lanes, rows for columns: three rounds of
/// interleaving the first half with the second.
#[inline(always)]
fn transpose(rows: [v128; 8]) -> [v128; 8] {
    let round = |[a, b, c, d, e, f, g, h]: [v128; 8]| {
        [
            zip16_low(a, e),
            zip16_high(a, e),
            zip16_low(b, f),
            zip16_high(b, f),
            zip16_low(c, g),
            zip16_high(c, g),
            zip16_low(d, h),
            zip16_high(d, h),
        ]
    };
    round(round(round(rows)))
}

/// Sixteen rows of up to four times eight columns, on their way to the result:
/// stores into it need no bounds checks, and whole cache lines leave it.
pub(super) struct Rows<D: Float>([[[D::Element; 8]; 4]; 16]);

impl<D: Float> Rows<D> {
    pub(super) fn new() -> Self {
        Rows([[[D::Element::default(); 8]; 4]; 16])
    }

    /// Takes eight columns.
    #[inline(always)]
    pub(super) fn set(&mut self, block: usize, [top, bottom]: [[v128; 8]; 2]) {
        assert!(block < 4, "four times eight columns");
        let _ = eight!(row => D::store_packed8(&mut self.0[row][block], top[row]));
        let _ = eight!(row => D::store_packed8(&mut self.0[8 + row][block], bottom[row]));
    }

    /// Writes the first `blocks` times eight columns to `to[0]` on, `stride`
    /// elements a row.
    #[inline(always)]
    pub(super) fn write(&self, blocks: usize, to: &mut [D::Element], stride: usize) {
        if blocks < 4 {
            return self.write_fewer(blocks, to, stride);
        }
        // Written out, because a loop's turn costs as much as a row.
        let mut line = |row: usize| {
            let (to, _) = to[row * stride..][..32].as_chunks_mut::<8>();
            let row = &self.0[row];
            D::store_packed8(&mut to[0], D::load_packed8(&row[0]));
            D::store_packed8(&mut to[1], D::load_packed8(&row[1]));
            D::store_packed8(&mut to[2], D::load_packed8(&row[2]));
            D::store_packed8(&mut to[3], D::load_packed8(&row[3]));
        };
        let _ = (eight!(row => line(row)), eight!(row => line(8 + row)));
    }

    #[inline(never)]
    fn write_fewer(&self, blocks: usize, to: &mut [D::Element], stride: usize) {
        for (to, row) in to.chunks_mut(stride).zip(&self.0) {
            to[..8 * blocks].copy_from_slice(row[..blocks].as_flattened());
        }
    }
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
        let weights =
            |v1| gptq::Weights::<S> { words: &gptq_words, zeros: &gptq_zeros, scales: &scales, columns: N, v1 };
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
    fn tables_hold_what_the_definition_says() {
        fn check<D: Float<Element = u16>>(scales: &[f32; 8]) {
            for plus in [0, 1] {
                let zeros: [i32; 8] = core::array::from_fn(|column| (column as i32 * 5 + 3) % 16 + plus);
                let all_codes = load(&core::array::from_fn::<u8, 16, _>(|code| code as u8));
                let mut rows = Rows::<D>::new();
                rows.set(0, look_up(&tables::<D>(&zeros, scales), &[all_codes; 8]));
                let mut found = vec![0; 16 * 8];
                rows.write(1, &mut found, 8);
                let expected: Vec<u16> =
                    (0..16 * 8).map(|i| value::<D>(i as u32 / 8, zeros[i % 8], scales[i % 8])).collect();
                assert_same_bits(&found, &expected, &format!("{} {scales:?}", D::DTYPE));
            }
        }
        let least = 2.0_f32.powi(-14);
        for scales in [
            [0.1, -0.1, 1.0, least, -least, 2047.9, 0.333, 1e-3],
            [0.0, -0.0, f32::INFINITY, f32::NAN, 1e-7, 3e38, -1e-40, 65504.0],
            [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, least / 2.0],
            [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 4096.0],
        ] {
            check::<F16>(&scales);
            check::<BF16>(&scales);
        }
    }

    #[test]
    fn nibbles_are_spread_in_their_order() {
        for order in [[0, 1, 2, 3, 4, 5, 6, 7], [0, 4, 1, 5, 2, 6, 3, 7]] {
            let mut codes = [0_u32; 8];
            let [low, high] = Spread::new(order).codes8(0xfedc_ba98);
            let [to_low, to_high] = halves_mut(&mut codes);
            store::<u32, 4>(to_low, low);
            store::<u32, 4>(to_high, high);
            assert_eq!(codes, order.map(|nibble| 8 + nibble));
        }
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
