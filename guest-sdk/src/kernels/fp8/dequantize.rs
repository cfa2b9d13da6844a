//! From FP8.

use core::marker::PhantomData;

use super::super::{BF16, F32, Float, canonical};
use super::{ABS, value};

use super::super::lanes::*;

/// The index of the first NaN code.
///
/// ```
/// use weightmill_guest::kernels::fp8;
///
/// assert_eq!(fp8::find_nan(&[0, 0x7e, 0xff, 0x7f]), Some(2));
/// ```
pub fn find_nan(codes: &[u8]) -> Option<usize> {
    let is_nan = |code: &u8| code & ABS == ABS;
    let clean = if SIMD { clean_simd(codes) } else { 0 };
    // One branch a page, so that compilers make vectors of the search.
    let page = codes[clean..].chunks(PAGE).position(|page| page.iter().fold(false, |any, code| any | is_nan(code)))?;
    let page = clean + page * PAGE;
    codes[page..].iter().position(is_nan).map(|at| page + at)
}

/// Codes that are searched before there is a branch.
const PAGE: usize = 4096;

/// How many codes, in whole pages, have no NaN before them or among them.
fn clean_simd(codes: &[u8]) -> usize {
    let mask = u8x16_splat(ABS);
    let mut clean = 0;
    for page in codes.as_chunks::<PAGE>().0 {
        let mut found = [u8x16_splat(0); 4];
        for codes in page.as_chunks::<64>().0 {
            let codes = codes.as_chunks::<16>().0;
            let nan = |number: usize| i8x16_eq(v128_and(load(&codes[number]), mask), mask);
            found = [
                v128_or(found[0], nan(0)),
                v128_or(found[1], nan(1)),
                v128_or(found[2], nan(2)),
                v128_or(found[3], nan(3)),
            ];
        }
        if v128_any_true(v128_or(v128_or(found[0], found[1]), v128_or(found[2], found[3]))) {
            break;
        }
        clean += PAGE;
    }
    clean
}

/// A format that FP8 is made into: [`F32`] or [`BF16`].
pub trait Target: Float + planes::Planes {}

impl Target for F32 {}
impl Target for BF16 {}

/// Multiplies codes by one scale: `encode(value(code) · scale)`, one product
/// rounded to f32, then one rounding to `D`.
///
/// The codes have been found free of NaNs by [`find_nan`].
///
/// The SIMD form makes no product of its own. In the middle of f32's range a
/// product's mantissa depends on the code's mantissa alone, so 8 products (and
/// 8 for the subnormal codes) give all 256: the rest is the code's exponent
/// and sign, added as integers. Scales outside [2⁻¹¹⁰, 2¹¹⁰] take the scalar
/// form.
///
/// ```
/// use weightmill_guest::kernels::{BF16, fp8};
///
/// let half = fp8::Dequantizer::<BF16>::new(0.5);
/// let mut to = [0; 2];
/// half.run(&[0x38, 0xc0], &mut to);
/// assert_eq!(to, [0x3f00, 0xbf80]);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Dequantizer<D> {
    scale: f32,
    planes: Option<[v128; 4]>,
    format: PhantomData<D>,
}

impl<D: Target> Dequantizer<D> {
    /// For `scale`, which may be any f32.
    pub fn new(scale: f32) -> Self {
        Dequantizer { scale, planes: if SIMD { vectors::<D>(scale) } else { None }, format: PhantomData }
    }

    /// Every code's product.
    ///
    /// # Panics
    /// If the slices differ in length.
    #[inline]
    pub fn run(&self, codes: &[u8], to: &mut [D::Element]) {
        assert_eq!(codes.len(), to.len(), "a value for every code");
        let done = if SIMD { self.simd(codes, to) } else { 0 };
        self.scalar(&codes[done..], &mut to[done..]);
    }

    fn scalar(&self, codes: &[u8], to: &mut [D::Element]) {
        for (to, &code) in to.iter_mut().zip(codes) {
            *to = D::encode(canonical(value(code) * self.scale));
        }
    }

    /// Does whole groups of 64; answers how many elements that were.
    #[inline(always)]
    fn simd(&self, codes: &[u8], to: &mut [D::Element]) -> usize {
        let Some(planes) = &self.planes else { return 0 };
        let (codes, _) = codes.as_chunks::<64>();
        let (to, _) = to.as_chunks_mut::<64>();
        for (to, codes) in to.iter_mut().zip(codes) {
            let (codes, to) = (codes.as_chunks::<16>().0, to.as_chunks_mut::<16>().0);
            values16::<D>(planes, &codes[0], &mut to[0]);
            values16::<D>(planes, &codes[1], &mut to[1]);
            values16::<D>(planes, &codes[2], &mut to[2]);
            values16::<D>(planes, &codes[3], &mut to[3]);
        }
        codes.len() * 64
    }
}

#[inline(always)]
fn values16<D: Target>(planes: &[v128; 4], codes: &[u8; 16], to: &mut [D::Element; 16]) {
    let codes = load(codes);
    let a = v128_and(codes, u8x16_splat(ABS));
    let index = u8x16_min(a, v128_or(v128_and(a, u8x16_splat(7)), u8x16_splat(8)));
    // Sign and exponent where the high half of an f32 has them.
    let high = |codes: v128| v128_and(i16x8_shr(codes, 4), u16x8_splat(0x8780));
    let zero = u8x16_splat(0);
    let high = [high(zip8_low(zero, codes)), high(zip8_high(zero, codes))];
    D::store16(to, planes, index, high);
}

/// What the SIMD form needs of a scale, if it can take it.
fn vectors<D: Target>(scale: f32) -> Option<[v128; 4]> {
    products(scale).map(D::planes)
}

/// `scale` times the values of the codes 0 … 7 and, as if their exponent were
/// 0, of the mantissas 0 … 7 of normal codes.
fn products(scale: f32) -> Option<[v128; 4]> {
    const LEAST: f32 = f32::from_bits((127 - 110) << 23);
    const MOST: f32 = f32::from_bits((127 + 110) << 23);
    const STEP: f32 = 1.0 / 512.0;
    (LEAST..=MOST).contains(&scale).then(|| {
        [
            f32x4(0.0, 1.0 * STEP, 2.0 * STEP, 3.0 * STEP),
            f32x4(4.0 * STEP, 5.0 * STEP, 6.0 * STEP, 7.0 * STEP),
            f32x4(4.0 * STEP, 4.5 * STEP, 5.0 * STEP, 5.5 * STEP),
            f32x4(6.0 * STEP, 6.5 * STEP, 7.0 * STEP, 7.5 * STEP),
        ]
        .map(|value| f32x4_mul(value, f32x4_splat(scale)))
    })
}

mod planes {
    use super::*;

    /// Sixteen products as planes of bytes, which a vector can be indexed in.
    pub trait Planes: Float {
        /// The bytes 0, 1 … of the products, rounded to the format.
        fn planes(products: [v128; 4]) -> [v128; 4];

        /// The products at `index`, with `high` added to their high 16 bits.
        fn store16(to: &mut [Self::Element; 16], planes: &[v128; 4], index: v128, high: [v128; 2]);
    }

    fn bytes(words: [v128; 4], number: u32) -> v128 {
        let [a, b, c, d] = words.map(|word| v128_and(u32x4_shr(word, 8 * number), u32x4_splat(0xff)));
        u8x16_narrow_i16x8(u16x8_narrow_i32x4(a, b), u16x8_narrow_i32x4(c, d))
    }

    impl Planes for BF16 {
        fn planes(products: [v128; 4]) -> [v128; 4] {
            let rounded = products.map(|u| {
                let odd = v128_and(u32x4_shr(u, 16), u32x4_splat(1));
                u32x4_shr(i32x4_add(u, i32x4_add(odd, u32x4_splat(0x7fff))), 16)
            });
            let zero = u8x16_splat(0);
            [bytes(rounded, 0), bytes(rounded, 1), zero, zero]
        }

        #[inline(always)]
        fn store16(to: &mut [u16; 16], planes: &[v128; 4], index: v128, high: [v128; 2]) {
            let (b0, b1) = (i8x16_swizzle(planes[0], index), i8x16_swizzle(planes[1], index));
            let (to, _) = to.as_chunks_mut::<8>();
            store(&mut to[0], i16x8_add(zip8_low(b0, b1), high[0]));
            store(&mut to[1], i16x8_add(zip8_high(b0, b1), high[1]));
        }
    }

    impl Planes for F32 {
        fn planes(products: [v128; 4]) -> [v128; 4] {
            [0, 1, 2, 3].map(|number| bytes(products, number))
        }

        #[inline(always)]
        fn store16(to: &mut [f32; 16], planes: &[v128; 4], index: v128, high: [v128; 2]) {
            let byte = |number: usize| i8x16_swizzle(planes[number], index);
            let (b0, b1, b2, b3) = (byte(0), byte(1), byte(2), byte(3));
            let low = [zip8_low(b0, b1), zip8_high(b0, b1)];
            let high = [i16x8_add(zip8_low(b2, b3), high[0]), i16x8_add(zip8_high(b2, b3), high[1])];
            let (to, _) = to.as_chunks_mut::<4>();
            store(&mut to[0], zip16_low(low[0], high[0]));
            store(&mut to[1], zip16_high(low[0], high[0]));
            store(&mut to[2], zip16_low(low[1], high[1]));
            store(&mut to[3], zip16_high(low[1], high[1]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testdata::{self, assert_same_bits};
    use super::*;

    fn check<D: Target>(codes: &[u8], scale: f32, expected: &[D::Element]) -> bool {
        let kernel = Dequantizer::<D> { planes: vectors::<D>(scale), ..Dequantizer::new(scale) };
        let mut to = vec![D::Element::default(); codes.len()];
        kernel.scalar(codes, &mut to);
        let compare = |to: &[D::Element], what: &str| {
            for (i, _) in codes.iter().enumerate().filter(|(_, code)| **code & ABS != ABS) {
                assert_same_bits(&to[i..=i], &expected[i..=i], &format!("{what}, scale {scale}, code {i:#x}"));
            }
        };
        compare(&to, "scalar");
        to.fill(D::Element::default());
        let done = kernel.simd(codes, &mut to);
        assert!(done == 0 || done == codes.len());
        if done > 0 {
            compare(&to, "simd");
        }
        done > 0
    }

    #[test]
    fn every_code_times_every_kind_of_scale() {
        let codes: Vec<u8> = (0..=0xff).collect();
        let mut reference = testdata::fp8_dequantize();
        let scales = reference.take::<f32>(16);
        let wide: Vec<Vec<f32>> = scales.iter().map(|_| reference.take(256)).collect();
        let mut fast = 0;
        for (scale, wide) in scales.iter().zip(&wide) {
            fast += usize::from(check::<F32>(&codes, *scale, wide));
            check::<BF16>(&codes, *scale, &reference.take::<u16>(256));
        }
        assert!(reference.all::<u8>().is_empty());
        assert_eq!(fast, 6, "the scales in the middle of the range take the SIMD form");
    }

    #[test]
    fn simd_and_scalar_agree_on_many_scales() {
        let codes: Vec<u8> = (0..=0xff).collect();
        for i in 0..2000_u32 {
            let scale = f32::from_bits((17 << 23) + i.wrapping_mul(0x9e37_79b9) % (220 << 23));
            let mut expected = vec![0.0; 256];
            Dequantizer::<F32>::new(scale).scalar(&codes, &mut expected);
            assert!(check::<F32>(&codes, scale, &expected), "{scale} is in range");
            let mut expected = vec![0; 256];
            Dequantizer::<BF16>::new(scale).scalar(&codes, &mut expected);
            check::<BF16>(&codes, scale, &expected);
        }
    }

    #[test]
    fn the_first_nan_is_found_wherever_it_is() {
        let mut codes = vec![0x7e; 10_000];
        assert_eq!(find_nan(&codes), None);
        assert_eq!(clean_simd(&codes), 8192);
        for at in [9_999, 8192, 4097, 4095, 0] {
            codes[at] = if at % 2 == 0 { 0x7f } else { 0xff };
            assert_eq!(find_nan(&codes), Some(at));
            assert_eq!(clean_simd(&codes), at.min(8192) / PAGE * PAGE);
        }
    }
}
