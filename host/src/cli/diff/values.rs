//! Elements as people read them.
//!
//! Formats below 32 bits are widened exactly. Several elements of a sub-byte
//! dtype share bytes; the first is in the lowest bits.

use crate::tensor::Dtype;

/// The bits of an element, in the low bits. It must be inside `bytes`.
pub(super) fn element(bytes: &[u8], bits: u64, index: u64) -> u64 {
    let first_bit = index * bits;
    // In range: the element is inside the slice.
    let from = (first_bit / 8) as usize;
    let to = (first_bit + bits).div_ceil(8) as usize;
    let raw = bytes[from..to].iter().rev().fold(0_u128, |raw, byte| raw << 8 | u128::from(*byte));
    let mask = (1_u128 << bits) - 1;
    ((raw >> (first_bit % 8)) & mask) as u64
}

/// The bits in hexadecimal, as wide as the dtype.
pub(super) fn hexadecimal(dtype: Dtype, bits: u64) -> String {
    let width = dtype.bits().div_ceil(4) as usize + 2;
    format!("{bits:#0width$x}")
}

/// The value.
pub(super) fn text(dtype: Dtype, bits: u64) -> String {
    match dtype {
        Dtype::BOOL => match bits {
            0 => "false".into(),
            1 => "true".into(),
            other => format!("neither true nor false ({other})"),
        },
        Dtype::U8 | Dtype::U16 | Dtype::U32 | Dtype::U64 => bits.to_string(),
        Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64 => {
            let unused = 64 - dtype.bits();
            (((bits << unused) as i64) >> unused).to_string()
        }
        Dtype::F64 => format!("{:?}", f64::from_bits(bits)),
        Dtype::F32 => format!("{:?}", f32::from_bits(bits as u32)),
        Dtype::BF16 => format!("{:?}", f32::from_bits((bits as u32) << 16)),
        Dtype::C64 => {
            let (re, im) = (f32::from_bits(bits as u32), f32::from_bits((bits >> 32) as u32));
            format!("{re:?}{}{im:?}i", if im.is_sign_negative() { "" } else { "+" })
        }
        Dtype::F8_E8M0 => match bits {
            0xFF => "NaN".into(),
            exponent => format!("{:?}", 2_f64.powi(exponent as i32 - 127)),
        },
        Dtype::F16 => small(bits, Format::new(5, 10, 15, Specials::Ieee)),
        Dtype::F8_E5M2 => small(bits, Format::new(5, 2, 15, Specials::Ieee)),
        Dtype::F8_E4M3 => small(bits, Format::new(4, 3, 7, Specials::OneNan)),
        Dtype::F8_E4M3FNUZ => small(bits, Format::new(4, 3, 8, Specials::NegativeZeroIsNan)),
        Dtype::F8_E5M2FNUZ => small(bits, Format::new(5, 2, 16, Specials::NegativeZeroIsNan)),
        Dtype::F6_E2M3 => small(bits, Format::new(2, 3, 1, Specials::None)),
        Dtype::F6_E3M2 => small(bits, Format::new(3, 2, 3, Specials::None)),
        Dtype::F4 => small(bits, Format::new(2, 1, 1, Specials::None)),
    }
}

/// A float with sign, exponent and fraction.
struct Format {
    exponent_bits: u32,
    fraction_bits: u32,
    bias: i32,
    specials: Specials,
}

/// Which bit patterns are no numbers.
enum Specials {
    /// The largest exponent: infinity, NaN.
    Ieee,
    /// All ones: NaN. There is no infinity.
    OneNan,
    /// What would be −0: NaN. There is no infinity.
    NegativeZeroIsNan,
    /// None.
    None,
}

impl Format {
    fn new(exponent_bits: u32, fraction_bits: u32, bias: i32, specials: Specials) -> Self {
        Format { exponent_bits, fraction_bits, bias, specials }
    }
}

/// Decodes a small float; every value fits a double exactly.
fn small(bits: u64, format: Format) -> String {
    let Format { exponent_bits, fraction_bits, bias, specials } = format;
    let negative = bits >> (exponent_bits + fraction_bits) & 1 == 1;
    let exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1);
    let fraction = bits & ((1 << fraction_bits) - 1);
    let (top, ones) = ((1 << exponent_bits) - 1, (1 << fraction_bits) - 1);
    let sign = if negative { -1.0 } else { 1.0 };
    match specials {
        Specials::Ieee if exponent == top => {
            return if fraction == 0 { format!("{:?}", sign * f64::INFINITY) } else { "NaN".into() };
        }
        Specials::OneNan if exponent == top && fraction == ones => return "NaN".into(),
        Specials::NegativeZeroIsNan if negative && exponent == 0 && fraction == 0 => return "NaN".into(),
        _ => {}
    }
    let scale = |power: i32| 2_f64.powi(power);
    let part = fraction as f64 * scale(-(fraction_bits as i32));
    let magnitude = match exponent {
        0 => part * scale(1 - bias),
        _ => (1.0 + part) * scale(exponent as i32 - bias),
    };
    format!("{:?}", sign * magnitude)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_the_formats() {
        for (dtype, bits, value) in [
            (Dtype::BOOL, 1, "true"),
            (Dtype::BOOL, 2, "neither true nor false (2)"),
            (Dtype::U8, 255, "255"),
            (Dtype::I8, 255, "-1"),
            (Dtype::I16, 0x8000, "-32768"),
            (Dtype::I64, u64::MAX, "-1"),
            (Dtype::U64, u64::MAX, "18446744073709551615"),
            (Dtype::F32, 0x3DCC_CCCD, "0.1"),
            (Dtype::F32, 0x8000_0000, "-0.0"),
            (Dtype::F32, 0x7FC0_0000, "NaN"),
            (Dtype::F64, 0x3FB9_9999_9999_999A, "0.1"),
            (Dtype::BF16, 0x3FC0, "1.5"),
            (Dtype::F16, 0x3E00, "1.5"),
            (Dtype::F16, 0xFC00, "-inf"),
            (Dtype::F16, 0x0001, "5.960464477539063e-8"),
            (Dtype::F8_E4M3, 0x7E, "448.0"),
            (Dtype::F8_E4M3, 0xFF, "NaN"),
            (Dtype::F8_E4M3, 0x01, "0.001953125"),
            (Dtype::F8_E5M2, 0x7B, "57344.0"),
            (Dtype::F8_E5M2, 0x7C, "inf"),
            (Dtype::F8_E4M3FNUZ, 0x7F, "240.0"),
            (Dtype::F8_E4M3FNUZ, 0x80, "NaN"),
            (Dtype::F8_E5M2FNUZ, 0x7F, "57344.0"),
            (Dtype::F8_E8M0, 127, "1.0"),
            (Dtype::F8_E8M0, 255, "NaN"),
            (Dtype::F6_E2M3, 0x1F, "7.5"),
            (Dtype::F6_E3M2, 0x3F, "-28.0"),
            (Dtype::F4, 0x7, "6.0"),
            (Dtype::F4, 0x9, "-0.5"),
            (Dtype::C64, 0xBF80_0000_3F80_0000, "1.0-1.0i"),
        ] {
            assert_eq!(text(dtype, bits), value, "{dtype} {bits:#x}");
        }
    }

    #[test]
    fn every_half_and_fp8_agrees_with_the_kernels() {
        for bits in 0..=0xFF_u8 {
            let ours = text(Dtype::F8_E4M3, bits.into());
            let theirs = f64::from(weightmill_guest::kernels::fp8::decode(bits));
            assert_eq!(ours, format!("{theirs:?}"), "{bits:#x}");
        }
    }

    #[test]
    fn elements_are_cut_out_from_the_low_bits_up() {
        let bytes = [0x21, 0x43, 0x65, 0x87, 0xA9, 0xCB, 0xED, 0x0F];
        let all = |bits| (0..64 / bits).map(|i| element(&bytes, bits, i)).collect::<Vec<u64>>();
        assert_eq!(all(4), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0]);
        assert_eq!(all(16), [0x4321, 0x8765, 0xCBA9, 0x0FED]);
        assert_eq!(all(64), [0x0FED_CBA9_8765_4321]);
        assert_eq!(all(6)[..4], [0x21, 0x0C, 0x14, 0x19]);
        assert_eq!(hexadecimal(Dtype::F6_E2M3, 0x0D), "0x0d");
        assert_eq!(hexadecimal(Dtype::F4, 0), "0x0");
        assert_eq!(hexadecimal(Dtype::BF16, 0x3FC0), "0x3fc0");
    }
}
