//! To FP8: the largest magnitude, the scale, the codes.

use super::super::{Float, canonical};
use super::MAX;

use super::super::lanes::*;

/// Everything but the sign.
const ABS: u32 = 0x7fff_ffff;
/// Exponent field of f32.
const EXPONENT: u32 = 0x7f80_0000;
/// 448 as f32.
const LARGEST: u32 = 0x43e0_0000;
/// 2^-6 as f32: magnitudes below are subnormal in E4M3 and share its step.
const NORMAL: u32 = 121 << 23;
/// From a magnitude's exponent to that of the number whose addition rounds the
/// magnitude to 3 bits of mantissa: 20 binades, 23 bits less 3.
const ROUNDER: u32 = 20 << 23;
/// `NORMAL`'s exponent and mantissa as an E4M3 code counts them.
const BIAS: u32 = NORMAL >> 20;

/// The largest magnitude of `x`, 0 if it is empty; or the index of the first
/// NaN or infinity.
///
/// The maximum is taken over the bits without the sign, which order like the
/// magnitudes do, so neither order nor cutting can change it.
///
/// # Errors
/// The lowest index at which `x` is not finite.
///
/// ```
/// use weightmill_guest::kernels::{F32, fp8};
///
/// assert_eq!(fp8::amax::<F32>(&[1.0, -3.0, 2.0]), Ok(3.0));
/// assert_eq!(fp8::amax::<F32>(&[1.0, f32::INFINITY, f32::NAN]), Err(1));
/// ```
pub fn amax<F: Float>(x: &[F::Element]) -> Result<f32, usize> {
    let (simd, done) = if SIMD { F::max_magnitude_simd(x) } else { (0, 0) };
    let largest = F::max_magnitude(&x[done..]).max(simd);
    if largest < F::INFINITE {
        return Ok(F::from_magnitude(largest));
    }
    let first = x.iter().position(|&e| F::magnitude(e) >= F::INFINITE);
    Err(first.unwrap_or(0))
}

/// The scale of values whose largest magnitude is `amax`, as f32:
/// `max(amax / 448, 2⁻¹²⁶)`, one division.
///
/// ```
/// use weightmill_guest::kernels::fp8;
///
/// assert_eq!(fp8::scale_for(896.0), 2.0);
/// assert_eq!(fp8::scale_for(0.0), f32::MIN_POSITIVE);
/// ```
pub fn scale_for(amax: f32) -> f32 {
    let scale = amax / MAX;
    if scale < f32::MIN_POSITIVE { f32::MIN_POSITIVE } else { scale }
}

/// The smallest power of two that is at least `scale`, which must be normal
/// and positive; an exact power stays.
///
/// ```
/// use weightmill_guest::kernels::fp8;
///
/// assert_eq!(fp8::power_of_two_at_least(0.25), 0.25);
/// assert_eq!(fp8::power_of_two_at_least(0.26), 0.5);
/// ```
pub fn power_of_two_at_least(scale: f32) -> f32 {
    f32::from_bits((scale.to_bits() + 0x007f_ffff) & EXPONENT)
}

/// The code nearest to `x`, ties to even, saturating at ±448; a NaN saturates
/// too.
///
/// ```
/// use weightmill_guest::kernels::fp8;
///
/// assert_eq!(fp8::encode(448.0), 0x7e);
/// assert_eq!(fp8::encode(-1e9), 0xfe);
/// assert_eq!(fp8::encode(1.0625), 0x38); // a tie between 1 and 1.125
/// ```
#[inline(always)]
pub fn encode(x: f32) -> u8 {
    let u = x.to_bits();
    let a = (u & ABS) as i32;
    let a = if a > LARGEST as i32 { LARGEST } else { a as u32 };
    let binade = a & EXPONENT;
    let binade = if (binade as i32) < NORMAL as i32 { NORMAL } else { binade };
    // At `rounder`'s size the sum's last bit is the code's step, so the
    // addition rounds, and leaves the number of steps in the low bits.
    let rounder = binade + ROUNDER;
    let steps = (f32::from_bits(a) + f32::from_bits(rounder)).to_bits().wrapping_sub(rounder);
    let code = steps.wrapping_add((binade >> 20) - BIAS);
    sign(x) | code as u8
}

/// The sign as a code has it.
#[inline(always)]
fn sign(x: f32) -> u8 {
    (x.to_bits() >> 24 & 0x80) as u8
}

/// Quantises by one scale: `q = encode(x · (1 / scale))`, the reciprocal
/// rounded once, the product rounded to f32, with the sign of `x`.
///
/// Values have been found finite by [`amax`], and the scale is at least 2⁻¹²⁶.
///
/// ```
/// use weightmill_guest::kernels::{F32, fp8};
///
/// let mut q = [0; 2];
/// fp8::Quantizer::new(2.0).run::<F32>(&[4.0, -2.0], &mut q);
/// assert_eq!(q, [0x40, 0xb8]);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Quantizer {
    reciprocal: f32,
}

impl Quantizer {
    /// For `scale`.
    pub fn new(scale: f32) -> Self {
        Quantizer { reciprocal: canonical(1.0 / scale) }
    }

    /// A code for every value.
    ///
    /// # Panics
    /// If the slices differ in length.
    #[inline]
    pub fn run<F: Float>(&self, x: &[F::Element], q: &mut [u8]) {
        assert_eq!(x.len(), q.len(), "a code for every value");
        let done = if SIMD { self.simd::<F>(x, q) } else { 0 };
        self.scalar::<F>(&x[done..], &mut q[done..]);
    }

    fn scalar<F: Float>(&self, x: &[F::Element], q: &mut [u8]) {
        for (q, &x) in q.iter_mut().zip(x) {
            let x = F::decode(x);
            *q = encode(canonical(x * self.reciprocal)) & 0x7f | sign(x);
        }
    }

    /// Quantises whole groups of 16; answers how many elements that were.
    #[inline(always)]
    fn simd<F: Float>(&self, x: &[F::Element], q: &mut [u8]) -> usize {
        let factor = f32x4_splat(self.reciprocal);
        let (x, _) = x.as_chunks::<16>();
        let (q, _) = q.as_chunks_mut::<16>();
        for (q, x) in q.iter_mut().zip(x) {
            let [low, high] = [F::load8(&x.as_chunks().0[0]), F::load8(&x.as_chunks().0[1])];
            let magnitudes = [low[0], low[1], high[0], high[1]].map(|x| doubled_magnitude(f32x4_mul(x, factor)));
            let codes = codes16(magnitudes.map(normal_code));
            // What does not round to 0 and is not normal is from -24 to 7.
            let from = v128_and(i8x16_add(codes, i8x16_splat(24)), i8x16_splat(!31));
            let codes = if v128_any_true(i8x16_eq(from, i8x16_splat(0))) {
                codes16(magnitudes.map(|doubled| code(u32x4_shr(doubled, 1))))
            } else {
                i8x16_max(codes, i8x16_splat(0))
            };
            // The factor is positive.
            store(q, v128_or(codes, v128_and(F::signs16(x), u8x16_splat(0x80))));
        }
        x.len() * 16
    }
}

/// Twice the bits of the magnitude, which is at most 448.
#[inline(always)]
fn doubled_magnitude(x: v128) -> v128 {
    u32x4_min(u32x4_shl(x, 1), u32x4_splat(LARGEST << 1))
}

/// Codes from four vectors of them.
#[inline(always)]
fn codes16([a, b, c, d]: [v128; 4]) -> v128 {
    i8x16_narrow_i16x8(i16x8_narrow_i32x4(a, b), i16x8_narrow_i32x4(c, d))
}

/// As [`encode`], four at a time, from magnitudes of at most 448.
#[inline(always)]
fn code(a: v128) -> v128 {
    let binade = i32x4_max(v128_and(a, u32x4_splat(EXPONENT)), u32x4_splat(NORMAL));
    let rounder = i32x4_add(binade, u32x4_splat(ROUNDER));
    let steps = i32x4_sub(f32x4_add(a, rounder), rounder);
    i32x4_sub(i32x4_add(steps, u32x4_shr(binade, 20)), u32x4_splat(BIAS))
}

/// The code of a magnitude that is normal in E4M3, or would be with a larger
/// range of exponents: then it is at most 7, and at most -24 for those up to
/// 2^-10, which round to 0.
#[inline(always)]
fn normal_code(doubled: v128) -> v128 {
    // The code of `NORMAL` is 8.
    const ROUND: u32 = 0xf_fffe_u32.wrapping_sub((BIAS - 8) << 21);
    let odd = v128_and(u32x4_shr(doubled, 20), u32x4_splat(2));
    i32x4_shr(i32x4_add(i32x4_add(doubled, u32x4_splat(ROUND)), odd), 21)
}

#[cfg(test)]
mod tests {
    use super::super::super::testdata::{self, assert_same_bits};
    use super::super::super::{BF16, F16, F32};
    use super::super::decode;
    use super::*;

    #[test]
    fn every_class_of_f32_becomes_codes() {
        let x: Vec<f32> = testdata::f32().all::<f32>().into_iter().filter(|x| x.is_finite()).collect();
        let mut reference = testdata::fp8_quantize();
        for scale in reference.take::<f32>(6) {
            let expected = reference.take::<u8>(x.len());
            let mut q = vec![0; x.len()];
            Quantizer::new(scale).run::<F32>(&x, &mut q);
            assert_same_bits(&q, &expected, "scalar");
            q.fill(0);
            let done = Quantizer::new(scale).simd::<F32>(&x, &mut q);
            assert_same_bits(&q[..done], &expected[..done], "simd");
        }
        assert!(reference.all::<u8>().is_empty());
    }

    #[test]
    fn sixteen_bit_inputs_are_the_same_values() {
        let every = testdata::every_u16();
        fn check<F: Float<Element = u16>>(every: &[u16]) {
            let wide: Vec<f32> = every.iter().map(|&x| F::decode(x)).collect();
            let (mut narrow, mut q) = (vec![0; wide.len()], vec![0; wide.len()]);
            let quantizer = Quantizer::new(0.37);
            quantizer.run::<F32>(&wide, &mut q);
            quantizer.run::<F>(every, &mut narrow);
            assert_same_bits(&narrow, &q, "scalar");
            assert_eq!(quantizer.simd::<F>(every, &mut narrow), every.len());
            assert_same_bits(&narrow, &q, "simd");
        }
        check::<BF16>(&every);
        check::<F16>(&every);
    }

    #[test]
    fn one_magnitude_of_a_group_decides_which_way_it_is_taken() {
        // All codes' values, the midpoints between them, and their neighbours;
        // the least of them are where codes begin, 2^-10, and become normal, 2^-6.
        let around = |x: f32| [-1, 0, 1].map(|step: i32| f32::from_bits(x.to_bits().wrapping_add_signed(step)));
        let values = (1..0x7e).flat_map(|code| {
            let (value, next) = (decode(code), decode(code + 1));
            [value, (value + next) / 2.0].into_iter().flat_map(around)
        });
        let values: Vec<f32> = values.chain(around(2.0_f32.powi(-10))).chain([f32::MIN_POSITIVE, 0.0, 1e9]).collect();
        for other in [0.0, 1.0, 448.0, 2.0_f32.powi(-11)] {
            for (at, &value) in values.iter().flat_map(|value| [value, value]).enumerate() {
                let value = if at % 2 == 0 { value } else { -value };
                let mut x = [other; 16];
                x[at / 2 % 16] = value;
                let mut q = [0; 16];
                assert_eq!(Quantizer::new(1.0).simd::<F32>(&x, &mut q), 16);
                assert_eq!(q, x.map(encode), "{value:e} among {other:e}");
            }
        }
    }

    #[test]
    fn a_codes_value_has_that_code_and_midpoints_go_to_even() {
        for code in (0..=0xff).filter(|code| code & 0x7f != 0x7f) {
            assert_eq!(encode(decode(code)), code);
            if code & 0x7f < 0x7e {
                let middle = (decode(code) + decode(code + 1)) / 2.0;
                assert_eq!(encode(middle), code + (code & 1), "{code:#x}");
                assert_eq!(encode(f32::from_bits(middle.to_bits() - 1)), code);
                assert_eq!(encode(f32::from_bits(middle.to_bits() + 1)), code + 1);
            }
        }
        assert_eq!((encode(f32::INFINITY), encode(f32::NEG_INFINITY), encode(464.0)), (0x7e, 0xfe, 0x7e));
    }

    #[test]
    fn amax_finds_the_largest_and_the_first_that_is_not_finite() {
        fn check<F: Float>(name: &str) {
            for len in [0_usize, 1, 7, 31, 32, 33, 100] {
                let mut x: Vec<F::Element> = (0..len).map(|i| F::encode(i as f32 * -0.5)).collect();
                let largest = len.max(1) as f32 * 0.5 - 0.5;
                assert_eq!(amax::<F>(&x), Ok(largest), "{name} {len}");
                let (simd, done) = F::max_magnitude_simd(&x);
                assert_eq!(F::max_magnitude(&x), simd.max(F::max_magnitude(&x[done..])), "{name} {len}");
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN] {
                    for at in [len / 3, len.saturating_sub(1)].into_iter().filter(|_| len > 0) {
                        let good = core::mem::replace(&mut x[at], F::encode(bad));
                        x[len - 1] = if at < len - 1 { F::encode(f32::NAN) } else { x[len - 1] };
                        assert_eq!(amax::<F>(&x), Err(at), "{name} {len}");
                        x[at] = good;
                        x[len - 1] = F::encode((len - 1) as f32 * -0.5);
                    }
                }
            }
        }
        check::<F32>("f32");
        check::<F16>("f16");
        check::<BF16>("bf16");
    }

    #[test]
    fn scales_are_floored_and_rounded_up_to_powers() {
        assert_eq!(scale_for(1e-38), f32::MIN_POSITIVE);
        assert_eq!(scale_for(448.0 * 3.0), 3.0);
        for scale in [f32::MIN_POSITIVE, 1.0, 2.0_f32.powi(100)] {
            assert_eq!(power_of_two_at_least(scale), scale);
            assert_eq!(power_of_two_at_least(f32::from_bits(scale.to_bits() + 1)), scale * 2.0);
        }
    }
}
