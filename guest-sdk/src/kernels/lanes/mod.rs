//! 128-bit lanes: WebAssembly's SIMD operations under their own names.
//!
//! In a module these are the `core::arch::wasm32` intrinsics themselves.
//! Elsewhere they are an emulation, for the tests: the very code that a module
//! runs is compared with the scalar kernels on every `cargo test`. Outside of
//! tests [`SIMD`] is false there, and the emulation is never called.
//! Memory is touched only through [`load`] and [`store`], which take arrays of
//! exactly 16 bytes: a vector access out of bounds cannot be written down.

/// Whether the lanes are real, so that kernels should use them.
pub(super) const SIMD: bool = cfg!(all(target_arch = "wasm32", target_feature = "simd128"));

#[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
mod emulated;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod memory;

#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
pub(super) use core::arch::wasm32::{
    f32x4, f32x4_add, f32x4_convert_i32x4, f32x4_lt, f32x4_mul, f32x4_ne, f32x4_splat, f32x4_sub, i8x16_add, i8x16_eq,
    i8x16_max, i8x16_narrow_i16x8, i8x16_shuffle, i8x16_splat, i8x16_swizzle, i16x8_add, i16x8_narrow_i32x4, i16x8_shr,
    i32x4_add, i32x4_eq, i32x4_max, i32x4_min, i32x4_shr, i32x4_splat, i32x4_sub, u8x16_min, u8x16_narrow_i16x8,
    u8x16_splat, u16x8_max, u16x8_narrow_i32x4, u16x8_shr, u16x8_splat, u32x4, u32x4_min, u32x4_shl, u32x4_shr,
    u32x4_splat, v128, v128_and, v128_andnot, v128_any_true, v128_bitselect, v128_or,
};
#[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
pub(super) use emulated::*;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
pub(super) use memory::{load, store};

/// An array of eight from its index, written out: a loop over an array of
/// vectors would keep the array in memory.
macro_rules! eight {
    ($i:ident => $value:expr) => {
        [
            eight!(@ $i 0 $value), eight!(@ $i 1 $value), eight!(@ $i 2 $value), eight!(@ $i 3 $value),
            eight!(@ $i 4 $value), eight!(@ $i 5 $value), eight!(@ $i 6 $value), eight!(@ $i 7 $value),
        ]
    };
    (@ $i:ident $number:literal $value:expr) => {{
        let $i: usize = $number;
        $value
    }};
}
pub(super) use eight;

/// The low 8 bytes of `a` and `b`, byte by byte: a0 b0 a1 b1 …
#[inline(always)]
pub(super) fn zip8_low(a: v128, b: v128) -> v128 {
    i8x16_shuffle::<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(a, b)
}

/// The high 8 bytes of `a` and `b`, byte by byte.
#[inline(always)]
pub(super) fn zip8_high(a: v128, b: v128) -> v128 {
    i8x16_shuffle::<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(a, b)
}

/// The low four 16-bit lanes of `a` and `b`: a0 b0 a1 b1 …
#[inline(always)]
pub(super) fn zip16_low(a: v128, b: v128) -> v128 {
    i8x16_shuffle::<0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23>(a, b)
}

/// The high four 16-bit lanes of `a` and `b`.
#[inline(always)]
pub(super) fn zip16_high(a: v128, b: v128) -> v128 {
    i8x16_shuffle::<8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31>(a, b)
}

/// The low two 32-bit lanes of `a` and `b`.
#[inline(always)]
pub(super) fn zip32_low(a: v128, b: v128) -> v128 {
    i8x16_shuffle::<0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23>(a, b)
}

/// The high two 32-bit lanes of `a` and `b`.
#[inline(always)]
pub(super) fn zip32_high(a: v128, b: v128) -> v128 {
    i8x16_shuffle::<8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31>(a, b)
}

/// The low 64-bit lane of `a`, then that of `b`.
#[inline(always)]
pub(super) fn zip64_low(a: v128, b: v128) -> v128 {
    i8x16_shuffle::<0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>(a, b)
}

/// The high 64-bit lane of `a`, then that of `b`.
#[inline(always)]
pub(super) fn zip64_high(a: v128, b: v128) -> v128 {
    i8x16_shuffle::<8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31>(a, b)
}

/// Both halves of eight numbers.
#[inline(always)]
pub(super) fn halves<T>(eight: &[T; 8]) -> [&[T; 4]; 2] {
    let (a, b) = eight.split_at(4);
    [a.try_into().expect("4 of 8"), b.try_into().expect("the other 4 of 8")]
}

/// Both halves of eight numbers, to be written.
#[inline(always)]
pub(super) fn halves_mut<T>(eight: &mut [T; 8]) -> [&mut [T; 4]; 2] {
    let (a, b) = eight.split_at_mut(4);
    [a.try_into().expect("4 of 8"), b.try_into().expect("the other 4 of 8")]
}

/// The largest of `from`'s lower 15 bits, of whole groups of 32 elements, and
/// how many elements those are.
pub(super) fn max_magnitude16(from: &[u16]) -> (u32, usize) {
    let (groups, _) = from.as_chunks::<8>();
    let (groups, _) = groups.as_chunks::<4>();
    let mut max = [u16x8_splat(0); 4];
    for group in groups {
        for (max, bits) in max.iter_mut().zip(group) {
            *max = u16x8_max(*max, v128_and(load(bits), u16x8_splat(0x7fff)));
        }
    }
    let mut lanes = [0_u16; 8];
    store(&mut lanes, u16x8_max(u16x8_max(max[0], max[1]), u16x8_max(max[2], max[3])));
    (lanes.into_iter().fold(0, u16::max).into(), groups.len() * 32)
}
