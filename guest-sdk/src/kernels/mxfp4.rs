//! From MXFP4 (OCP microscaling): blocks of 32 values of 4 bits (E2M1) with
//! one scale, a power of two (E8M0).
//!
//! Element `2i` of a block is the low nibble of byte `i`, element `2i + 1` the
//! high one. A nibble is a sign and one of 0, ½, 1, 1½, 2, 3, 4, 6. The value
//! is that times `2^(scale − 127)` in f32, rounded to BF16: exact unless it
//! overflows, to infinity. Scale 255 is NaN and is refused before.

use super::{BF16, Float};

use super::lanes::*;

/// Bytes of a block's values.
pub const BLOCK: usize = 16;
/// The scale that is no number.
const NAN_SCALE: u8 = 255;
/// Scales for which every value, zero aside, is a normal BF16.
const NORMAL: core::ops::RangeInclusive<u8> = 2..=252;
/// BF16 of the non-negative nibbles.
const HALVES: [u16; 8] = [0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0];

/// The index of the first scale that is NaN.
///
/// ```
/// assert_eq!(weightmill_guest::kernels::mxfp4::find_nan(&[0, 254, 255]), Some(2));
/// ```
pub fn find_nan(scales: &[u8]) -> Option<usize> {
    scales.iter().position(|&scale| scale == NAN_SCALE)
}

/// Every block's 32 values times its scale, as BF16.
///
/// # Panics
/// If there are not [`BLOCK`] bytes and 32 results a scale.
///
/// ```
/// use weightmill_guest::kernels::mxfp4;
///
/// let mut to = [0; 32];
/// mxfp4::dequantize(&[0xf2; 16], &[128], &mut to);
/// assert_eq!(to[..2], [0x4000, 0xc140]); // 1·2 and −6·2
/// ```
pub fn dequantize(blocks: &[u8], scales: &[u8], to: &mut [u16]) {
    let (blocks, rest) = blocks.as_chunks::<BLOCK>();
    let (to, rest_to) = to.as_chunks_mut::<{ 2 * BLOCK }>();
    assert!(rest.is_empty() && rest_to.is_empty(), "whole blocks");
    assert!(blocks.len() == scales.len() && to.len() == scales.len(), "a block and its values for every scale");
    for ((to, block), &scale) in to.iter_mut().zip(blocks).zip(scales) {
        if SIMD {
            simd(block, scale, to);
        } else {
            scalar(block, scale, to);
        }
    }
}

/// The definition of one value.
fn value(nibble: u8, scale: u8) -> u16 {
    let power = if scale == 0 { 1 << 22 } else { u32::from(scale) << 23 };
    let magnitude = BF16::decode(HALVES[usize::from(nibble & 7)]) * f32::from_bits(power);
    BF16::encode(magnitude) | u16::from(nibble & 8) << 12
}

/// The block's 16 possible values, and then a look-up for each nibble.
fn scalar(block: &[u8; BLOCK], scale: u8, to: &mut [u16; 2 * BLOCK]) {
    let values: [u16; 16] = if NORMAL.contains(&scale) {
        let exponent = u16::from(scale).wrapping_sub(127) << 7;
        core::array::from_fn(|nibble| {
            let half = HALVES[nibble & 7];
            let scaled = if half == 0 { 0 } else { half.wrapping_add(exponent) };
            scaled | (nibble as u16 & 8) << 12
        })
    } else {
        core::array::from_fn(|nibble| value(nibble as u8, scale))
    };
    for (to, byte) in to.as_chunks_mut::<2>().0.iter_mut().zip(block) {
        *to = [values[usize::from(byte & 15)], values[usize::from(byte >> 4)]];
    }
}

/// One block: the 16 possible values as two planes of bytes, which the nibbles
/// index.
#[inline(always)]
fn simd(block: &[u8; BLOCK], scale: u8, to: &mut [u16; 2 * BLOCK]) {
    let positive = if NORMAL.contains(&scale) {
        let exponent = u16x8_splat(u16::from(scale).wrapping_sub(127) << 7);
        // Not for zero.
        let exponent = v128_and(exponent, u32x4(0xffff_0000, u32::MAX, u32::MAX, u32::MAX));
        i16x8_add(load(&HALVES), exponent)
    } else {
        load(&[0, 1, 2, 3, 4, 5, 6, 7].map(|nibble| value(nibble, scale)))
    };
    let low_bytes = |values: v128| v128_and(values, u16x8_splat(0xff));
    let high_bytes = |values: v128| u16x8_shr(values, 8);
    let negative = v128_or(positive, u16x8_splat(0x8000));
    let plane0 = u8x16_narrow_i16x8(low_bytes(positive), low_bytes(negative));
    let plane1 = u8x16_narrow_i16x8(high_bytes(positive), high_bytes(negative));
    let bytes = load(block);
    let even = v128_and(bytes, u8x16_splat(15));
    let odd = v128_and(u16x8_shr(bytes, 4), u8x16_splat(15));
    let (to, _) = to.as_chunks_mut::<8>();
    let values = |index: v128| (i8x16_swizzle(plane0, index), i8x16_swizzle(plane1, index));
    let (b0, b1) = values(zip8_low(even, odd));
    store(&mut to[0], zip8_low(b0, b1));
    store(&mut to[1], zip8_high(b0, b1));
    let (b0, b1) = values(zip8_high(even, odd));
    store(&mut to[2], zip8_low(b0, b1));
    store(&mut to[3], zip8_high(b0, b1));
}

#[cfg(test)]
mod tests {
    use super::super::testdata::{self, assert_same_bits};
    use super::*;

    #[test]
    fn every_nibble_with_every_scale() {
        let reference = testdata::mxfp4().all::<u16>();
        // Every nibble as a low and as a high one.
        let block: [u8; 16] = core::array::from_fn(|i| (i | (15 - i) << 4) as u8);
        for scale in 0..NAN_SCALE {
            let values = &reference[usize::from(scale) * 16..][..16];
            let expected: Vec<u16> = (0..16).flat_map(|i| [values[i], values[15 - i]]).collect();
            let mut to = [0; 32];
            scalar(&block, scale, &mut to);
            assert_same_bits(&to, &expected, &format!("scalar, scale {scale}"));
            to.fill(0);
            simd(&block, scale, &mut to);
            assert_same_bits(&to, &expected, &format!("simd, scale {scale}"));
        }
    }

    #[test]
    fn blocks_take_their_own_scales() {
        let mut to = [0; 64];
        dequantize(&[0x22; 32], &[127, 128], &mut to);
        assert_eq!((to[0], to[31], to[32], to[63]), (0x3f80, 0x3f80, 0x4000, 0x4000));
        dequantize(&[], &[], &mut []);
    }
}
