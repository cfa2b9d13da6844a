//! The three float formats that kernels read and write, and the conversions
//! between them, which are defined here and nowhere else.

use crate::abi::Dtype;
use crate::pod::Pod;

use super::lanes::*;

/// The bits of the one NaN that arithmetic makes.
const NAN: u32 = 0x7fc0_0000;
/// Everything but the sign.
const ABS: u32 = 0x7fff_ffff;
/// Infinity: larger magnitudes are NaNs.
const INFINITY: u32 = 0x7f80_0000;
/// Exponent field of f32 minus that of f16, for the same normal number.
const F16_REBIAS: u32 = 112 << 23;
/// Magnitudes below are subnormal in f16: 2^-14.
const F16_NORMAL: u32 = 113 << 23;
/// Magnitudes from here on are infinite in f16, or NaN: 2^16.
const F16_OVERFLOW: u32 = 143 << 23;
/// Adding 0.5 to a magnitude below 2^-14 rounds it to a multiple of 2^-24, the
/// unit of f16's subnormals, and leaves the multiple in the low bits.
const F16_ROUNDER: u32 = 126 << 23;

/// A result of arithmetic with the NaN that it may be made canonical.
///
/// In WebAssembly this does nothing: there the host makes every NaN that an
/// operation gives `0x7FC00000`, and doing it twice would only be slow.
#[inline(always)]
pub fn canonical(x: f32) -> f32 {
    // On the bits: the compiler may take one NaN for another.
    let u = x.to_bits();
    if cfg!(not(target_arch = "wasm32")) && u & ABS > INFINITY { f32::from_bits(NAN) } else { x }
}

mod sealed {
    use super::v128;

    /// What SIMD kernels need of a format; it also seals [`Float`](super::Float).
    pub trait Lanes {
        /// The element: [`Float::Element`](super::Float::Element).
        type Packed;
        /// The bits of infinity; magnitudes from here on are not finite.
        const INFINITE: u32;

        /// The bits without the sign.
        fn magnitude(element: Self::Packed) -> u32;

        /// The value with these bits.
        fn from_magnitude(bits: u32) -> f32;

        /// The largest `magnitude`, 0 of none.
        fn max_magnitude(from: &[Self::Packed]) -> u32;

        /// The largest `magnitude` of whole groups of 32 or so, and of how
        /// many elements.
        fn max_magnitude_simd(from: &[Self::Packed]) -> (u32, usize);

        /// Eight elements as two vectors of f32.
        fn load8(from: &[Self::Packed; 8]) -> [v128; 2];

        /// The signs of 16 elements, in the highest bit of each byte.
        fn signs16(from: &[Self::Packed; 16]) -> v128;

        /// Eight f32 as elements, rounded as `encode` does.
        fn store8(to: &mut [Self::Packed; 8], values: [v128; 2]);

        /// As `store8`, for results of arithmetic: a NaN is the canonical one.
        fn store8_canonical(to: &mut [Self::Packed; 8], values: [v128; 2]) {
            Self::store8(to, values);
        }

        /// What `store8_canonical` would store: 16-bit formats only.
        fn pack8_canonical(values: [v128; 2]) -> v128;

        /// As `pack8_canonical`, for values that are 0 or normal in the format.
        fn pack8_normal(values: [v128; 2]) -> v128 {
            Self::pack8_canonical(values)
        }

        /// Stores what `pack8_canonical` gave: 16-bit formats only.
        fn store_packed8(to: &mut [Self::Packed; 8], packed: v128);
    }
}

pub(crate) use sealed::Lanes;

/// A float format of tensors, as a type: [`F32`], [`F16`] or [`BF16`].
///
/// ```
/// use weightmill_guest::kernels::{BF16, F16, Float};
///
/// assert_eq!(BF16::encode(f32::from_bits(0x3f80_8000)), 0x3f80); // a tie goes to even
/// assert_eq!(BF16::encode(f32::from_bits(0x3f81_8000)), 0x3f82);
/// assert_eq!(F16::decode(0x3c00), 1.0);
/// ```
pub trait Float: Lanes<Packed = <Self as Float>::Element> + 'static {
    /// An element in memory: `f32`, or the bits of a 16-bit float.
    type Element: Pod;
    /// The format's safetensors name.
    const DTYPE: Dtype;

    /// The element's value; exact. A NaN keeps its sign and payload (shifted).
    fn decode(element: Self::Element) -> f32;

    /// The nearest element, ties to even, overflow to infinity. A NaN stays a
    /// NaN: see the format.
    fn encode(value: f32) -> Self::Element;
}

/// IEEE 754 binary32. Nothing is rounded, NaNs keep their bits.
#[derive(Clone, Copy, Debug)]
pub struct F32;

impl Float for F32 {
    type Element = f32;
    const DTYPE: Dtype = Dtype::F32;

    #[inline(always)]
    fn decode(element: f32) -> f32 {
        element
    }

    #[inline(always)]
    fn encode(value: f32) -> f32 {
        value
    }
}

/// bfloat16: the high half of an f32.
///
/// With `u` the bits of the f32: `(u + 0x7FFF + ((u >> 16) & 1)) >> 16`; a NaN
/// is `(u >> 16) | 0x40`, that is, its payload is cut and it is made quiet.
#[derive(Clone, Copy, Debug)]
pub struct BF16;

impl Float for BF16 {
    type Element = u16;
    const DTYPE: Dtype = Dtype::BF16;

    #[inline(always)]
    fn decode(element: u16) -> f32 {
        f32::from_bits(u32::from(element) << 16)
    }

    #[inline(always)]
    fn encode(value: f32) -> u16 {
        let u = value.to_bits();
        let rounded = u.wrapping_add(0x7fff + (u >> 16 & 1)) >> 16;
        let nan = u >> 16 | 0x40;
        (if u & ABS > INFINITY { nan } else { rounded }) as u16
    }
}

/// IEEE 754 binary16, subnormals included.
///
/// From f32: nearest, ties to even; from 65520 on infinity; a NaN with sign
/// `s` and mantissa `m` is `s | 0x7E00 | (m >> 13)`. To f32: exact, a NaN's
/// mantissa is shifted left by 13.
#[derive(Clone, Copy, Debug)]
pub struct F16;

impl Float for F16 {
    type Element = u16;
    const DTYPE: Dtype = Dtype::F16;

    #[inline(always)]
    fn decode(element: u16) -> f32 {
        let sign = u32::from(element & 0x8000) << 16;
        let m = u32::from(element & 0x7fff) << 13;
        let normal = m + F16_REBIAS;
        let special = normal + F16_REBIAS;
        let subnormal = (f32::from_bits(m + F16_NORMAL) - f32::from_bits(F16_NORMAL)).to_bits();
        let magnitude = if m < 1 << 23 { subnormal } else { normal };
        f32::from_bits(sign | if m >= 31 << 23 { special } else { magnitude })
    }

    #[inline(always)]
    fn encode(value: f32) -> u16 {
        let u = value.to_bits();
        let a = u & ABS;
        let sign = u >> 16 & 0x8000;
        let normal = a.wrapping_sub(F16_REBIAS).wrapping_add(0xfff + (a >> 13 & 1)) >> 13;
        let subnormal = (f32::from_bits(a) + f32::from_bits(F16_ROUNDER)).to_bits().wrapping_sub(F16_ROUNDER);
        let finite = if a < F16_NORMAL { subnormal } else { normal };
        let nan = 0x7e00 | (u >> 13 & 0x3ff);
        let special = if a > INFINITY { nan } else { 0x7c00 };
        (sign | if a >= F16_OVERFLOW { special } else { finite }) as u16
    }
}

impl Lanes for F32 {
    type Packed = f32;
    const INFINITE: u32 = INFINITY;

    #[inline(always)]
    fn magnitude(element: f32) -> u32 {
        element.to_bits() & ABS
    }

    fn from_magnitude(bits: u32) -> f32 {
        f32::from_bits(bits)
    }

    fn max_magnitude(from: &[f32]) -> u32 {
        // Signed, because that is what vectors compare.
        from.iter().fold(0, |max, &x| max.max(Self::magnitude(x) as i32)) as u32
    }

    fn max_magnitude_simd(from: &[f32]) -> (u32, usize) {
        let (groups, _) = from.as_chunks::<8>();
        let mut max = [u32x4_splat(0); 2];
        for group in groups {
            for (max, bits) in max.iter_mut().zip(Self::load8(group)) {
                *max = i32x4_max(*max, v128_and(bits, u32x4_splat(ABS)));
            }
        }
        let mut lanes = [0_u32; 4];
        store(&mut lanes, i32x4_max(max[0], max[1]));
        (lanes.into_iter().fold(0, u32::max), groups.len() * 8)
    }

    fn pack8_canonical(_: [v128; 2]) -> v128 {
        unreachable!("eight f32 are two vectors")
    }

    fn store_packed8(_: &mut [f32; 8], _: v128) {
        unreachable!("eight f32 are two vectors")
    }

    #[inline(always)]
    fn signs16(from: &[f32; 16]) -> v128 {
        // Saturation keeps signs: 32 bits to 16 to 8.
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| load(&from.as_chunks::<4>().0[i]));
        i8x16_narrow_i16x8(i16x8_narrow_i32x4(a, b), i16x8_narrow_i32x4(c, d))
    }

    #[inline(always)]
    fn load8(from: &[f32; 8]) -> [v128; 2] {
        let [a, b] = super::lanes::halves(from);
        [load::<f32, 4>(a), load::<f32, 4>(b)]
    }

    #[inline(always)]
    fn store8(to: &mut [f32; 8], values: [v128; 2]) {
        let [a, b] = super::lanes::halves_mut(to);
        store::<f32, 4>(a, values[0]);
        store::<f32, 4>(b, values[1]);
    }
}

impl Lanes for BF16 {
    type Packed = u16;
    const INFINITE: u32 = 0x7f80;

    #[inline(always)]
    fn magnitude(element: u16) -> u32 {
        u32::from(element & 0x7fff)
    }

    fn from_magnitude(bits: u32) -> f32 {
        Self::decode(bits as u16)
    }

    fn max_magnitude(from: &[u16]) -> u32 {
        // Signed, because that is what vectors compare.
        from.iter().fold(0_i16, |max, &x| max.max((x & 0x7fff) as i16)) as u32
    }

    fn max_magnitude_simd(from: &[u16]) -> (u32, usize) {
        super::lanes::max_magnitude16(from)
    }

    #[inline(always)]
    fn store_packed8(to: &mut [u16; 8], packed: v128) {
        store(to, packed);
    }

    #[inline(always)]
    fn signs16(from: &[u16; 16]) -> v128 {
        let (eights, _) = from.as_chunks::<8>();
        i8x16_narrow_i16x8(load(&eights[0]), load(&eights[1]))
    }

    #[inline(always)]
    fn load8(from: &[u16; 8]) -> [v128; 2] {
        let (bits, zero) = (load(from), u16x8_splat(0));
        [zip16_low(zero, bits), zip16_high(zero, bits)]
    }

    #[inline(always)]
    fn store8(to: &mut [u16; 8], values: [v128; 2]) {
        let encode = |u: v128| {
            let nan = f32x4_ne(u, u);
            let odd = v128_and(u32x4_shr(u, 16), u32x4_splat(1));
            let round = v128_andnot(i32x4_add(odd, u32x4_splat(0x7fff)), nan);
            v128_or(u32x4_shr(i32x4_add(u, round), 16), v128_and(nan, u32x4_splat(0x40)))
        };
        store(to, u16x8_narrow_i32x4(encode(values[0]), encode(values[1])));
    }

    #[inline(always)]
    fn store8_canonical(to: &mut [u16; 8], values: [v128; 2]) {
        store(to, Self::pack8_canonical(values));
    }

    // The canonical NaN rounds like a number, to 0x7FC0.
    #[inline(always)]
    fn pack8_canonical(values: [v128; 2]) -> v128 {
        let encode = |u: v128| {
            let odd = v128_and(u32x4_shr(u, 16), u32x4_splat(1));
            u32x4_shr(i32x4_add(u, i32x4_add(odd, u32x4_splat(0x7fff))), 16)
        };
        u16x8_narrow_i32x4(encode(values[0]), encode(values[1]))
    }
}

impl Lanes for F16 {
    type Packed = u16;
    const INFINITE: u32 = 0x7c00;

    #[inline(always)]
    fn magnitude(element: u16) -> u32 {
        u32::from(element & 0x7fff)
    }

    fn from_magnitude(bits: u32) -> f32 {
        Self::decode(bits as u16)
    }

    fn max_magnitude(from: &[u16]) -> u32 {
        // Signed, because that is what vectors compare.
        from.iter().fold(0_i16, |max, &x| max.max((x & 0x7fff) as i16)) as u32
    }

    fn max_magnitude_simd(from: &[u16]) -> (u32, usize) {
        super::lanes::max_magnitude16(from)
    }

    #[inline(always)]
    fn store_packed8(to: &mut [u16; 8], packed: v128) {
        store(to, packed);
    }

    #[inline(always)]
    fn signs16(from: &[u16; 16]) -> v128 {
        let (eights, _) = from.as_chunks::<8>();
        i8x16_narrow_i16x8(load(&eights[0]), load(&eights[1]))
    }

    #[inline(always)]
    fn load8(from: &[u16; 8]) -> [v128; 2] {
        let (bits, zero) = (load(from), u16x8_splat(0));
        // The element in the high half of a lane: sign in place, the rest to
        // be shifted to f32's fields.
        let decode = |high: v128| {
            let m = u32x4_shr(v128_and(high, u32x4_splat(0x7fff_0000)), 3);
            let exponent = v128_and(m, u32x4_splat(31 << 23));
            let special = i32x4_eq(exponent, u32x4_splat(31 << 23));
            let normal = i32x4_add(m, u32x4_splat(F16_REBIAS));
            let normal = i32x4_add(normal, v128_and(special, u32x4_splat(F16_REBIAS)));
            let unit = u32x4_splat(F16_NORMAL);
            let subnormal = f32x4_sub(i32x4_add(m, unit), unit);
            let magnitude = v128_bitselect(subnormal, normal, i32x4_eq(exponent, u32x4_splat(0)));
            v128_or(magnitude, v128_and(high, u32x4_splat(0x8000_0000)))
        };
        [decode(zip16_low(zero, bits)), decode(zip16_high(zero, bits))]
    }

    #[inline(always)]
    fn store8(to: &mut [u16; 8], values: [v128; 2]) {
        let payload = |u: v128| v128_or(v128_and(u32x4_shr(u, 13), u32x4_splat(0x3ff)), u32x4_splat(0x200));
        store(to, f16_of(values, payload));
    }

    #[inline(always)]
    fn store8_canonical(to: &mut [u16; 8], values: [v128; 2]) {
        store(to, Self::pack8_canonical(values));
    }

    #[inline(always)]
    fn pack8_canonical(values: [v128; 2]) -> v128 {
        f16_of(values, |_| u32x4_splat(0x200))
    }

    #[inline(always)]
    fn pack8_normal(values: [v128; 2]) -> v128 {
        // 0 becomes negative, and narrowing saturates that to 0.
        let encode = |u: v128| {
            let a = v128_and(u, u32x4_splat(ABS));
            let odd = v128_and(u32x4_shr(a, 13), u32x4_splat(1));
            i32x4_shr(i32x4_add(i32x4_add(a, u32x4_splat(0xfff_u32.wrapping_sub(F16_REBIAS))), odd), 13)
        };
        with_signs(u16x8_narrow_i32x4(encode(values[0]), encode(values[1])), values)
    }
}

/// Eight magnitudes with the signs of `values`: narrowing keeps signs.
#[inline(always)]
fn with_signs(magnitudes: v128, values: [v128; 2]) -> v128 {
    v128_or(magnitudes, v128_and(i16x8_narrow_i32x4(values[0], values[1]), u16x8_splat(0x8000)))
}

/// Eight f32 as F16, with the mantissas of NaNs from `payload`.
#[inline(always)]
fn f16_of(values: [v128; 2], payload: impl Fn(v128) -> v128) -> v128 {
    // Magnitudes only; the sign is put in on the narrow lanes.
    let encode = |u: v128| {
        let a = v128_and(u, u32x4_splat(ABS));
        let odd = v128_and(u32x4_shr(a, 13), u32x4_splat(1));
        let bias = u32x4_splat(0xfff_u32.wrapping_sub(F16_REBIAS));
        let normal = u32x4_shr(i32x4_add(i32x4_add(a, bias), odd), 13);
        let rounder = u32x4_splat(F16_ROUNDER);
        let subnormal = i32x4_sub(f32x4_add(a, rounder), rounder);
        let finite = v128_bitselect(subnormal, normal, f32x4_lt(a, u32x4_splat(F16_NORMAL)));
        // All that is beyond infinity is infinity, and a NaN is more.
        v128_or(i32x4_min(finite, u32x4_splat(0x7c00)), v128_and(f32x4_ne(u, u), payload(u)))
    };
    with_signs(u16x8_narrow_i32x4(encode(values[0]), encode(values[1])), values)
}
