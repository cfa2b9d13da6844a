//! The lanes' operations on plain arrays, as the WebAssembly specification
//! defines them; float results are canonical, as the host makes them.
#![allow(non_camel_case_types)]

use super::super::canonical;
use crate::pod::{self, Pod};

/// 16 bytes, lane 0 first, little-endian. Public because the methods of sealed
/// traits name it.
#[allow(unreachable_pub)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(align(16))]
pub struct v128([u8; 16]);

pub(in super::super) fn load<T: Pod, const N: usize>(from: &[T; N]) -> v128 {
    v128(pod::bytes_of(from).try_into().expect("a vector is 16 bytes"))
}

pub(in super::super) fn store<T: Pod, const N: usize>(to: &mut [T; N], value: v128) {
    to.copy_from_slice(pod::of::<T>(&value.0));
}

/// A lane's number as bytes and back.
trait Lane: Copy {
    fn get(vector: v128, lane: usize) -> Self;
    fn set(vector: &mut v128, lane: usize, value: Self);
}

macro_rules! lanes {
    ($($number:ty)+) => { $(
        impl Lane for $number {
            fn get(vector: v128, lane: usize) -> Self {
                const BYTES: usize = size_of::<$number>();
                let mut bytes = [0; BYTES];
                bytes.copy_from_slice(&vector.0[lane * BYTES..][..BYTES]);
                Self::from_le_bytes(bytes)
            }
            fn set(vector: &mut v128, lane: usize, value: Self) {
                const BYTES: usize = size_of::<$number>();
                vector.0[lane * BYTES..][..BYTES].copy_from_slice(&value.to_le_bytes());
            }
        }
    )+ };
}

lanes!(u8 i8 u16 i16 u32 i32 f32);

fn make<T: Lane>(lane: impl Fn(usize) -> T) -> v128 {
    let mut vector = v128([0; 16]);
    (0..16 / size_of::<T>()).for_each(|i| T::set(&mut vector, i, lane(i)));
    vector
}

macro_rules! binary {
    ($($name:ident: $from:ty => $to:ty, |$a:ident, $b:ident| $value:expr;)+) => { $(
        pub(in super::super) fn $name(a: v128, b: v128) -> v128 {
            make::<$to>(|i| {
                let ($a, $b) = (<$from>::get(a, i), <$from>::get(b, i));
                $value
            })
        }
    )+ };
}

binary! {
    u8x16_min: u8 => u8, |a, b| a.min(b);
    i8x16_add: u8 => u8, |a, b| a.wrapping_add(b);
    i8x16_max: i8 => i8, |a, b| a.max(b);
    i16x8_add: u16 => u16, |a, b| a.wrapping_add(b);
    u16x8_max: u16 => u16, |a, b| a.max(b);
    i32x4_add: u32 => u32, |a, b| a.wrapping_add(b);
    i32x4_sub: u32 => u32, |a, b| a.wrapping_sub(b);
    i8x16_eq: u8 => u8, |a, b| if a == b { 0xff } else { 0 };
    i32x4_eq: u32 => u32, |a, b| if a == b { u32::MAX } else { 0 };
    f32x4_lt: f32 => u32, |a, b| if a < b { u32::MAX } else { 0 };
    f32x4_ne: f32 => u32, |a, b| if a != b { u32::MAX } else { 0 };
    i32x4_max: i32 => i32, |a, b| a.max(b);
    i32x4_min: i32 => i32, |a, b| a.min(b);
    u32x4_min: u32 => u32, |a, b| a.min(b);
    v128_and: u32 => u32, |a, b| a & b;
    v128_andnot: u32 => u32, |a, b| a & !b;
    v128_or: u32 => u32, |a, b| a | b;
    f32x4_add: f32 => f32, |a, b| canonical(a + b);
    f32x4_sub: f32 => f32, |a, b| canonical(a - b);
    f32x4_mul: f32 => f32, |a, b| canonical(a * b);
}

macro_rules! shift {
    ($($name:ident: $number:ty, |$a:ident, $by:ident| $value:expr;)+) => { $(
        pub(in super::super) fn $name(a: v128, by: u32) -> v128 {
            let $by = by % <$number>::BITS;
            make::<$number>(|i| {
                let $a = <$number>::get(a, i);
                $value
            })
        }
    )+ };
}

shift! {
    i16x8_shr: i16, |a, by| a >> by;
    u16x8_shr: u16, |a, by| a >> by;
    i32x4_shr: i32, |a, by| a >> by;
    u32x4_shl: u32, |a, by| a << by;
    u32x4_shr: u32, |a, by| a >> by;
}

macro_rules! splat {
    ($($name:ident: $number:ty;)+) => { $(
        pub(in super::super) fn $name(a: $number) -> v128 {
            make::<$number>(|_| a)
        }
    )+ };
}

splat! {
    u8x16_splat: u8;
    i8x16_splat: i8;
    u16x8_splat: u16;
    u32x4_splat: u32;
    i32x4_splat: i32;
    f32x4_splat: f32;
}

/// Two vectors' lanes, `a`'s first, each made narrower.
fn narrow<W: Lane, N: Lane>(a: v128, b: v128, saturate: impl Fn(W) -> N) -> v128 {
    let half = 16 / size_of::<W>();
    make::<N>(|i| saturate(if i < half { W::get(a, i) } else { W::get(b, i - half) }))
}

pub(in super::super) fn u8x16_narrow_i16x8(a: v128, b: v128) -> v128 {
    narrow(a, b, |x: i16| x.clamp(0, 0xff) as u8)
}

pub(in super::super) fn i8x16_narrow_i16x8(a: v128, b: v128) -> v128 {
    narrow(a, b, |x: i16| x.clamp(-0x80, 0x7f) as i8)
}

pub(in super::super) fn u16x8_narrow_i32x4(a: v128, b: v128) -> v128 {
    narrow(a, b, |x: i32| x.clamp(0, 0xffff) as u16)
}

pub(in super::super) fn i16x8_narrow_i32x4(a: v128, b: v128) -> v128 {
    narrow(a, b, |x: i32| x.clamp(-0x8000, 0x7fff) as i16)
}

pub(in super::super) fn f32x4_convert_i32x4(a: v128) -> v128 {
    make(|i| i32::get(a, i) as f32)
}

pub(in super::super) fn v128_any_true(a: v128) -> bool {
    a.0 != [0; 16]
}

/// Bits of `a` where `mask` has ones, of `b` elsewhere.
pub(in super::super) fn v128_bitselect(a: v128, b: v128, mask: v128) -> v128 {
    v128_or(v128_and(a, mask), v128_andnot(b, mask))
}

pub(in super::super) fn i8x16_swizzle(table: v128, index: v128) -> v128 {
    make(|i| table.0.get(usize::from(index.0[i])).copied().unwrap_or(0))
}

#[rustfmt::skip]
pub(in super::super) fn i8x16_shuffle<
    const I0: usize, const I1: usize, const I2: usize, const I3: usize,
    const I4: usize, const I5: usize, const I6: usize, const I7: usize,
    const I8: usize, const I9: usize, const I10: usize, const I11: usize,
    const I12: usize, const I13: usize, const I14: usize, const I15: usize,
>(a: v128, b: v128) -> v128 {
    let index = [I0, I1, I2, I3, I4, I5, I6, I7, I8, I9, I10, I11, I12, I13, I14, I15];
    make(|i| if index[i] < 16 { a.0[index[i]] } else { b.0[index[i] - 16] })
}

pub(in super::super) fn u32x4(a: u32, b: u32, c: u32, d: u32) -> v128 {
    make(|i| [a, b, c, d][i])
}

pub(in super::super) fn f32x4(a: f32, b: f32, c: f32, d: f32) -> v128 {
    make(|i| [a, b, c, d][i])
}
