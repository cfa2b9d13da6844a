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
use core::marker::PhantomData;

use super::{F32, Float, canonical, cast};

use super::lanes::*;

/// Codes in a word.
pub(super) const PER_WORD: usize = 8;

/// The scales and zero points of one group, decoded.
pub(super) struct Group {
    pub(super) scales: Vec<f32>,
    pub(super) zeros: Vec<f32>,
}

impl Group {
    pub(super) fn of_columns(columns: usize) -> Self {
        Group { scales: vec![0.0; columns], zeros: vec![0.0; columns] }
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
                store::<f32, 4>(to_low, f32x4_convert_i32x4(i32x4_add(low, i32x4_splat(plus))));
                store::<f32, 4>(to_high, f32x4_convert_i32x4(i32x4_add(high, i32x4_splat(plus))));
            } else {
                *to = order.map(|nibble| ((word >> (4 * nibble) & 15) as i32 + plus) as f32);
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

/// The definition of one value: a difference of small integers is exact.
#[inline(always)]
pub(super) fn value<D: Float>(code: u32, zero: f32, scale: f32) -> D::Element {
    D::encode(canonical(scale * (code as f32 - zero)))
}

/// Eight values of a row from their codes.
#[inline(always)]
pub(super) fn values8(codes: [v128; 2], zeros: &[f32; 8], scales: &[f32; 8]) -> [v128; 2] {
    let (zeros, scales) = (halves(zeros), halves(scales));
    let value = |codes: v128, zeros: &[f32; 4], scales: &[f32; 4]| {
        f32x4_mul(load::<f32, 4>(scales), f32x4_sub(f32x4_convert_i32x4(codes), load::<f32, 4>(zeros)))
    };
    [value(codes[0], zeros[0], scales[0]), value(codes[1], zeros[1], scales[1])]
}

/// Calls `each` for eight columns of a row after the other, from column `from`
/// on, with the words, zeros and scales that belong to them; four times in a
/// loop's turn, because a turn has costs of its own.
#[inline(always)]
pub(super) fn each_eight<D, F, const WORDS: usize>(
    words: &[u32],
    group: &Group,
    from: usize,
    to: &mut [D::Element],
    each: F,
) where
    D: Float,
    F: Fn(&[u32; WORDS], &[f32; 8], &[f32; 8], &mut [D::Element; 8]),
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

/// Columns whose tables are held at once: two cache lines of each row.
pub(super) const WIDE: usize = 64;

/// The 16 values of each of eight columns, as planes of bytes.
pub(super) type Tables = [[[u8; 16]; 2]; 8];

/// Tables for eight columns of a group.
#[inline(always)]
fn set_tables<D: Float>(tables: &mut Tables, zeros: &[f32; 8], scales: &[f32; 8]) {
    // A difference is at most 16, so with magnitudes from 2^-14 to 2^11 every
    // value is 0 or normal in all formats.
    let beyond = halves(scales).map(|scales| {
        let magnitude = v128_and(load::<f32, 4>(scales), u32x4_splat(0x7fff_ffff));
        let nearest = i32x4_min(i32x4_max(magnitude, i32x4_splat(113 << 23)), i32x4_splat((138 << 23) - 1));
        i32x4_sub(magnitude, nearest)
    });
    if !v128_any_true(v128_or(beyond[0], beyond[1])) {
        fill_tables(tables, |code| D::pack8_normal(values8([code, code], zeros, scales)));
    } else {
        fill_tables(tables, |code| D::pack8_canonical(values8([code, code], zeros, scales)));
    }
}

/// Tables from the eight columns' values for a code, which is in all lanes.
#[inline(always)]
fn fill_tables(tables: &mut Tables, values: impl Fn(v128) -> v128) {
    let of_code = |code: usize| values(i32x4_splat(code as i32));
    let low = transpose(eight!(i => of_code(i)));
    let high = transpose(eight!(i => of_code(8 + i)));
    let mask = u16x8_splat(0xff);
    for (table, (low, high)) in tables.iter_mut().zip(low.into_iter().zip(high)) {
        store(&mut table[0], u8x16_narrow_i16x8(v128_and(low, mask), v128_and(high, mask)));
        store(&mut table[1], u8x16_narrow_i16x8(u16x8_shr(low, 8), u16x8_shr(high, 8)));
    }
}

/// Looks up sixteen rows of `8 * BLOCKS` columns at a time.
///
/// What was looked up goes through memory, because all that belongs to eight
/// columns is more than the registers hold: columns one by one into `looked_up`,
/// and from there eight rows of eight columns to the result.
pub(super) struct LookUp<D: Float, const BLOCKS: usize> {
    tables: [Tables; BLOCKS],
    /// For the first and the last eight rows the columns' values.
    looked_up: [[[[u16; 8]; 8]; BLOCKS]; 2],
    format: PhantomData<D>,
}

impl<D: Float, const BLOCKS: usize> LookUp<D, BLOCKS> {
    pub(super) fn new() -> Self {
        LookUp { tables: [[[[0; 16]; 2]; 8]; BLOCKS], looked_up: [[[[0; 8]; 8]; BLOCKS]; 2], format: PhantomData }
    }

    /// Takes a group's columns from `column` on.
    pub(super) fn set_group(&mut self, group: &Group, column: usize) {
        let (zeros, scales) = (group.zeros[column..].as_chunks::<8>().0, group.scales[column..].as_chunks::<8>().0);
        for ((tables, zeros), scales) in self.tables.iter_mut().zip(zeros).zip(scales) {
            set_tables::<D>(tables, zeros, scales);
        }
    }

    /// Eight columns' tables, and where their values belong.
    #[inline(always)]
    pub(super) fn blocks(&mut self) -> impl Iterator<Item = Block<'_>> {
        let [first, last] = &mut self.looked_up;
        let rows = first.iter_mut().zip(last);
        self.tables.iter().zip(rows).map(|(tables, (first, last))| Block { tables, first, last })
    }

    /// Writes the sixteen rows, `stride` elements from one to the next.
    #[inline(always)]
    pub(super) fn write(&self, to: &mut [D::Element], stride: usize) {
        assert!(stride >= 8 * BLOCKS, "a row is at least as long as the blocks");
        let mut rest = to;
        // Not as an iterator over rows, which costs more for a row than its
        // stores do.
        let mut row = |last: bool| {
            let len = if last { 8 * BLOCKS } else { stride };
            let (row, others) = core::mem::take(&mut rest).split_at_mut(len);
            rest = others;
            row.as_chunks_mut::<8>().0.first_chunk_mut().expect("the columns of all blocks")
        };
        write_rows::<D, BLOCKS>(&self.looked_up[0], eight!(_i => row(false)));
        write_rows::<D, BLOCKS>(&self.looked_up[1], eight!(i => row(i == 7)));
    }
}

/// Eight rows. Not sixteen: a row's lines are often a power of two apart, and
/// no more than twelve such fit the first-level cache.
#[inline(never)]
fn write_rows<D: Float, const BLOCKS: usize>(
    blocks: &[[[u16; 8]; 8]; BLOCKS],
    mut rows: [&mut [[D::Element; 8]; BLOCKS]; 8],
) {
    let mut block = |number: usize| {
        let values = transpose(eight!(i => load(&blocks[number][i])));
        let _ = eight!(i => D::store_packed8(&mut rows[i][number], values[i]));
    };
    if BLOCKS == 8 {
        // Written out: a turn of a loop would work out eight addresses.
        let _ = eight!(number => block(number));
    } else {
        (0..BLOCKS).for_each(block);
    }
}

/// Eight columns of a [`LookUp`].
pub(super) struct Block<'a> {
    tables: &'a Tables,
    first: &'a mut [[u16; 8]; 8],
    last: &'a mut [[u16; 8]; 8],
}

impl Block<'_> {
    /// Takes the sixteen codes of a column.
    #[inline(always)]
    pub(super) fn set(&mut self, column: usize, codes: v128) {
        let [plane0, plane1] = &self.tables[column];
        let (low, high) = (i8x16_swizzle(load(plane0), codes), i8x16_swizzle(load(plane1), codes));
        store(&mut self.first[column], zip8_low(low, high));
        store(&mut self.last[column], zip8_high(low, high));
    }
}

/// Eight vectors of eight 16-bit lanes, rows for columns.
#[inline(always)]
fn transpose(rows: [v128; 8]) -> [v128; 8] {
    interleave(rows, zip16_low, zip16_high)
}

/// Three rounds of interleaving the first half of eight vectors with the
/// second, where `low` and `high` interleave the halves of two: it gathers
/// what is at one place in all eight.
#[inline(always)]
pub(super) fn interleave(
    rows: [v128; 8],
    low: impl Fn(v128, v128) -> v128,
    high: impl Fn(v128, v128) -> v128,
) -> [v128; 8] {
    let round = |[a, b, c, d, e, f, g, h]: [v128; 8]| {
        [low(a, e), high(a, e), low(b, f), high(b, f), low(c, g), high(c, g), low(d, h), high(d, h)]
    };
    round(round(round(rows)))
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
                let zeros: [f32; 8] = core::array::from_fn(|column| ((column * 5 + 3) % 16 + plus) as f32);
                let all_codes = load(&core::array::from_fn::<u8, 16, _>(|code| code as u8));
                let mut look_up = LookUp::<D, 1>::new();
                look_up.set_group(&Group { scales: scales.to_vec(), zeros: zeros.to_vec() }, 0);
                look_up.blocks().for_each(|mut block| (0..8).for_each(|column| block.set(column, all_codes)));
                let mut found = vec![0; 16 * 8];
                look_up.write(&mut found, 8);
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
        // 8 · odd rows, columns beyond and below 64, groups of 3, 8, 16, 40.
        for (rows, columns) in [(8, 8), (16, 40), (40, 8), (120, 72), (80, 40), (80, 104), (80, 128)] {
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
