//! E4M3 "fn" to E4M3 "fnuz", the format of some accelerators.
//!
//! The formats differ in the bias (7 and 8) and in what 0x80 is (−0 and NaN).
//! So the same byte is half the value, and a scale twice as large makes up for
//! it; only −0 changes its byte. No product is rounded.

use super::super::lanes::*;
use super::super::{Float, canonical};
use super::{ABS, find_nan};

/// The code of E4M3's -0, which is fnuz's NaN.
const MINUS_ZERO: u8 = 0x80;

/// Every code of `from` as the fnuz code of half its value: 0x80 becomes 0,
/// all others stay.
///
/// # Errors
/// The index of the first NaN code; what `to` holds is then of no use.
///
/// # Panics
/// If the slices differ in length.
///
/// ```
/// use weightmill_guest::kernels::fp8::fnuz;
///
/// let mut to = [1; 3];
/// fnuz::codes(&[0x80, 0x38, 0xfe], &mut to).unwrap();
/// assert_eq!(to, [0, 0x38, 0xfe]);
/// assert_eq!(fnuz::codes(&[0x80, 0x38, 0x7f], &mut to), Err(2));
/// ```
pub fn codes(from: &[u8], to: &mut [u8]) -> Result<(), usize> {
    assert_eq!(from.len(), to.len(), "a code for every code");
    let done = if SIMD { codes_simd(from, to) } else { 0 };
    let pieces = from[done..].chunks(PIECE).zip(to[done..].chunks_mut(PIECE));
    for ((piece, to), first) in pieces.zip((done..).step_by(PIECE)) {
        if let Some(at) = find_nan(piece) {
            return Err(first + at);
        }
        for (to, &code) in to.iter_mut().zip(piece) {
            *to = if code == MINUS_ZERO { 0 } else { code };
        }
    }
    Ok(())
}

/// Codes that are looked at before it is asked whether there was a NaN.
const PIECE: usize = 4096;

/// Does whole pieces, up to one with a NaN; answers how many codes that were.
fn codes_simd(from: &[u8], to: &mut [u8]) -> usize {
    let (from, _) = from.as_chunks::<PIECE>();
    let (to, _) = to.as_chunks_mut::<PIECE>();
    let (magnitude, minus_zero) = (u8x16_splat(ABS), u8x16_splat(MINUS_ZERO));
    for (number, (to, from)) in to.iter_mut().zip(from).enumerate() {
        let mut found = u8x16_splat(0);
        // Eight vectors in a loop's turn, because a turn has costs of its own.
        for (to, from) in to.as_chunks_mut::<128>().0.iter_mut().zip(from.as_chunks::<128>().0) {
            let (from, to) = (from.as_chunks::<16>().0, to.as_chunks_mut::<16>().0);
            let codes = eight!(i => load(&from[i]));
            let nans = eight!(i => i8x16_eq(v128_and(codes[i], magnitude), magnitude));
            let _ = eight!(i => store(&mut to[i], v128_andnot(codes[i], i8x16_eq(codes[i], minus_zero))));
            let [a, b, c, d, e, f, g, h] = nans;
            let nans = v128_or(v128_or(v128_or(a, b), v128_or(c, d)), v128_or(v128_or(e, f), v128_or(g, h)));
            found = v128_or(found, nans);
        }
        if v128_any_true(found) {
            return number * PIECE;
        }
    }
    from.len() * PIECE
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
        let from: Vec<u8> = (0..=0xff).filter(|code| code & ABS != ABS).cycle().take(2 * PIECE + 77).collect();
        let simd = |from: &[u8], to: &mut [u8]| {
            let done = codes_simd(from, to);
            assert_eq!(done, 2 * PIECE);
            codes(&from[done..], &mut to[done..])
        };
        for form in [codes, simd] {
            let mut to = vec![7; from.len()];
            form(&from, &mut to).unwrap();
            for (&code, &to) in from.iter().zip(&to) {
                assert_eq!(to, if code == 0x80 { 0 } else { code });
            }
        }
    }

    #[test]
    fn the_first_nan_is_found_in_both_forms() {
        for at in [0, 1, 15, 16, 4095, 4096, 9000] {
            for nan in [0x7f, 0xff] {
                let mut from = vec![0x80; 9001];
                (from[at], from[9000]) = (nan, nan);
                let mut to = vec![0; from.len()];
                assert_eq!(codes(&from, &mut to), Err(at));
                let done = codes_simd(&from, &mut to);
                assert_eq!(done, at.min(8192) / PIECE * PIECE);
                assert_eq!(codes(&from[done..], &mut to[done..]), Err(at - done));
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
