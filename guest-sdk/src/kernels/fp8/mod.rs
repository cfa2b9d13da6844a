//! FP8 E4M3 ("fn": finite, no infinities, largest 448).
//!
//! A code is a sign, 4 bits of exponent (bias 7) and 3 of mantissa; 0x7F and
//! 0xFF are NaN, 0x7E is 448, the smallest step is 2⁻⁹. See [`Quantizer`] and
//! [`Dequantizer`] for the operation order, [`fnuz`] for the other E4M3.

mod dequantize;
pub mod fnuz;
mod quantize;

pub use dequantize::{Dequantizer, Target, find_nan};
pub use quantize::{Quantizer, amax, encode, power_of_two_at_least, scale_for};

/// The largest value.
pub const MAX: f32 = 448.0;
/// The bits of a code that are not its sign; as a code, NaN.
const ABS: u8 = 0x7f;

/// A code's value; the two NaN codes give the canonical NaN.
///
/// ```
/// use weightmill_guest::kernels::fp8;
///
/// assert_eq!(fp8::decode(0x7e), 448.0);
/// assert_eq!(fp8::decode(0x81), -0.001953125);
/// assert!(fp8::decode(0xff).is_nan());
/// ```
pub fn decode(code: u8) -> f32 {
    if code & ABS == ABS { f32::from_bits(0x7fc0_0000) } else { value(code) }
}

/// The value of a code that is not NaN.
#[inline(always)]
fn value(code: u8) -> f32 {
    let a = u32::from(code & ABS);
    let normal = (a << 20) + (120 << 23);
    let subnormal = (a as f32 * (1.0 / 512.0)).to_bits();
    let sign = u32::from(code & 0x80) << 24;
    f32::from_bits(sign | if a < 8 { subnormal } else { normal })
}
