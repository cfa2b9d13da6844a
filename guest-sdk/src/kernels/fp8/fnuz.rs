//! E4M3 "fn" to E4M3 "fnuz", the format of some accelerators.
//!
//! The formats differ in the bias (7 and 8) and in what 0x80 is (−0 and NaN).
//! So the same byte is half the value, and a scale twice as large makes up for
//! it; only −0 changes its byte. No product is rounded.

use super::super::Float;
use super::super::canonical;

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
    // Bytes in lockstep: any compiler makes vectors of this loop.
    for (to, &code) in to.iter_mut().zip(from) {
        *to = if code == 0x80 { 0 } else { code };
    }
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
        let mut to = vec![7; 256];
        codes(&from, &mut to);
        for (&code, &to) in from.iter().zip(&to) {
            assert_eq!(to, if code == 0x80 { 0 } else { code });
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
