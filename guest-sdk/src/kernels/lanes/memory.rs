//! The two operations of the lanes that touch memory.
#![allow(unsafe_code)]

use core::arch::wasm32::{v128, v128_load, v128_store};

use crate::pod::Pod;

/// The 16 bytes of `from`.
#[inline(always)]
pub(in super::super) fn load<T: Pod, const N: usize>(from: &[T; N]) -> v128 {
    const { assert!(size_of::<[T; N]>() == 16, "a vector is 16 bytes") };
    // SAFETY: the reference covers exactly 16 readable bytes, all initialised
    // (`Pod` has no padding); `v128.load` needs no alignment.
    unsafe { v128_load(from.as_ptr().cast()) }
}

/// Writes the 16 bytes of `to`.
#[inline(always)]
pub(in super::super) fn store<T: Pod, const N: usize>(to: &mut [T; N], value: v128) {
    const { assert!(size_of::<[T; N]>() == 16, "a vector is 16 bytes") };
    // SAFETY: the reference covers exactly 16 bytes that only we can reach,
    // any bits are a value of a `Pod`; `v128.store` needs no alignment.
    unsafe { v128_store(to.as_mut_ptr().cast(), value) }
}
