//! Between F32, F16 and BF16.
//!
//! Operation order: decode ([`Float::decode`], exact), then encode
//! ([`Float::encode`], one rounding to nearest even). BF16 to F16 and back so
//! go through f32. Nothing is computed, so NaNs keep what fits of their bits.

use super::Float;
use super::lanes::SIMD;

/// Every element of `from`, rounded to the format `D`.
///
/// # Panics
/// If the slices differ in length.
///
/// ```
/// use weightmill_guest::kernels::{BF16, F32, cast};
///
/// let mut to = [0; 2];
/// cast::convert::<F32, BF16>(&[1.0, -2.5], &mut to);
/// assert_eq!(to, [0x3f80, 0xc020]);
/// ```
#[inline(never)]
pub fn convert<S: Float, D: Float>(from: &[S::Element], to: &mut [D::Element]) {
    assert_eq!(from.len(), to.len(), "a cast keeps the number of elements");
    let done = if SIMD { simd::<S, D>(from, to) } else { 0 };
    scalar::<S, D>(&from[done..], &mut to[done..]);
}

fn scalar<S: Float, D: Float>(from: &[S::Element], to: &mut [D::Element]) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to = D::encode(S::decode(from));
    }
}

/// Casts whole groups of 32; answers how many elements that were.
fn simd<S: Float, D: Float>(from: &[S::Element], to: &mut [D::Element]) -> usize {
    let (from, _) = from.as_chunks::<32>();
    let (to, _) = to.as_chunks_mut::<32>();
    for (to, from) in to.iter_mut().zip(from) {
        let (from, to) = (from.as_chunks::<8>().0, to.as_chunks_mut::<8>().0);
        D::store8(&mut to[0], S::load8(&from[0]));
        D::store8(&mut to[1], S::load8(&from[1]));
        D::store8(&mut to[2], S::load8(&from[2]));
        D::store8(&mut to[3], S::load8(&from[3]));
    }
    from.len() * 32
}

#[cfg(test)]
mod tests {
    use super::super::testdata::{self, assert_same_bits};
    use super::super::{BF16, F16, F32};
    use super::*;

    /// The scalar form against the reference, the SIMD form against both.
    fn check<S: Float, D: Float>(from: &[S::Element], expected: &[D::Element]) {
        let mut to = vec![D::Element::default(); from.len()];
        convert::<S, D>(from, &mut to);
        assert_same_bits(&to, expected, "scalar");
        to.fill(D::Element::default());
        assert_eq!(simd::<S, D>(from, &mut to), from.len(), "the reference comes in groups of 32");
        assert_same_bits(&to, expected, "simd");
    }

    #[test]
    fn every_class_of_f32_becomes_bf16_and_f16() {
        let x = testdata::f32().all::<f32>();
        check::<F32, BF16>(&x, &testdata::f32_to_bf16().all());
        check::<F32, F16>(&x, &testdata::f32_to_f16().all());
        check::<F32, F32>(&x, &x);
    }

    #[test]
    fn every_16_bit_pattern_becomes_every_format() {
        let every = testdata::every_u16();
        let shifted: Vec<f32> = every.iter().map(|&u| f32::from_bits(u32::from(u) << 16)).collect();
        check::<BF16, F32>(&every, &shifted);
        check::<BF16, F16>(&every, &testdata::bf16_to_f16().all());
        check::<F16, F32>(&every, &testdata::f16_to_f32().all());
        check::<F16, BF16>(&every, &testdata::f16_to_bf16().all());
    }

    #[test]
    fn canonical_nan_rounds_like_any_nan() {
        let mut x = testdata::f32().all::<f32>();
        x.iter_mut().for_each(|x| *x = super::super::canonical(*x));
        let (from, mut to) = (x.as_chunks::<8>().0, [0; 8]);
        for from in from {
            let values = <F32 as super::super::float::Lanes>::load8(from);
            <BF16 as super::super::float::Lanes>::store8_canonical(&mut to, values);
            assert_eq!(to, from.map(BF16::encode));
        }
    }

    #[test]
    fn what_vectors_leave_is_done_one_by_one() {
        let x: Vec<f32> = (0..67).map(|i| i as f32).collect();
        let mut to = [0; 67];
        convert::<F32, BF16>(&x, &mut to);
        assert_eq!(to[66], BF16::encode(66.0));
        assert_eq!(simd::<F32, BF16>(&x, &mut to), 64);
        convert::<F32, F32>(&[], &mut []);
    }
}
