//! E4M3 "fn" to E4M3 "fnuz", the format of some accelerators.
//!
//! The formats differ in the bias (7 and 8) and in what 0x80 is (−0 and NaN).
//! So the same byte is half the value, and a scale twice as large makes up for
//! it; only −0 changes its byte. No product is rounded.

use super::super::lanes::*;
use super::super::{Float, canonical};

/// The code of E4M3's -0, which is fnuz's NaN.
const MINUS_ZERO: u8 = 0x80;

/// Every code of `from` as the fnuz code of half its value: 0x80 becomes 0,
/// all others stay. The codes have been found free of NaNs by
/// [`find_nan`](super::find_nan).
///
/// # Panics
/// If the slices differ in length.
///
/// ```
/// use weightmill_guest::kernels::fp8::fnuz;
///
/// let mut to = [1; 3];
/// fnuz::codes(&[0x80, 0x38, 0xfe], &mut to);
/// assert_eq!(to, [0, 0x38, 0xfe]);
/// ```
pub fn codes(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len(), "a code for every code");
    let done = if SIMD { codes_simd(from, to) } else { 0 };
    for (to, &code) in to[done..].iter_mut().zip(&from[done..]) {
        *to = if code == MINUS_ZERO { 0 } else { code };
    }
}

/// Does whole groups of 64; answers how many codes that were.
fn codes_simd(from: &[u8], to: &mut [u8]) -> usize {
    let (from, _) = from.as_chunks::<64>();
    let (to, _) = to.as_chunks_mut::<64>();
    for (to, from) in to.iter_mut().zip(from) {
        let (from, to) = (from.as_chunks::<16>().0, to.as_chunks_mut::<16>().0);
        let code = |number: usize| {
            let codes = load(&from[number]);
            v128_andnot(codes, i8x16_eq(codes, u8x16_splat(MINUS_ZERO)))
        };
        store(&mut to[0], code(0));
        store(&mut to[1], code(1));
        store(&mut to[2], code(2));
        store(&mut to[3], code(3));
    }
    from.len() * 64
}

/// Every scale times 2, rounded to its own format.
///
/// # Panics
/// If the slices differ in length.
///
/// ```
/// use weightmill_guest::kernels::{F32, fp8::fnuz};
///
/// let mut to = [0.0];
/// fnuz::scales::<F32>(&[0.37], &mut to);
/// assert_eq!(to, [0.74]);
/// ```
pub fn scales<F: Float>(from: &[F::Element], to: &mut [F::Element]) {
    assert_eq!(from.len(), to.len(), "a scale for every scale");
    for (to, &scale) in to.iter_mut().zip(from) {
        *to = F::encode(canonical(F::decode(scale) * 2.0));
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::{BF16, F16};
    use super::*;

    #[test]
    fn only_minus_zero_changes() {
        let from: Vec<u8> = (0..=0xff).collect();
        for form in [codes, |from: &[u8], to: &mut [u8]| assert_eq!(codes_simd(from, to), 256)] {
            let mut to = vec![7; 256];
            form(&from, &mut to);
            for (&code, &to) in from.iter().zip(&to) {
                assert_eq!(to, if code == 0x80 { 0 } else { code });
            }
        }
    }

    #[test]
    fn scales_double_in_their_own_format() {
        let mut to = [0; 4];
        scales::<BF16>(&[0x3f80, 0x7f7f, 0x0001, 0x7f81], &mut to);
        assert_eq!(to, [0x4000, 0x7f80, 0x0002, 0x7fc0]);
        scales::<F16>(&[0x3c00, 0x7bff, 0x0001, 0xfc01], &mut to);
        assert_eq!(to, [0x4000, 0x7c00, 0x0002, 0x7e00]);
    }
}
