//! The reference data of the kernels' tests, written once by `make.py`.

use crate::kernels::Float;
use crate::pod::{self, Pod};

/// A file of `make.py`, read front to back.
pub(super) struct Reference {
    name: &'static str,
    rest: &'static [u8],
}

impl Reference {
    /// The next `len` numbers.
    pub(super) fn take<T: Pod>(&mut self, len: usize) -> Vec<T> {
        let (bytes, rest) = self.rest.split_at(len * size_of::<T>());
        self.rest = rest;
        let mut numbers = vec![T::default(); len];
        pod::of_mut::<u8>(bytes_of_mut(&mut numbers)).copy_from_slice(bytes);
        numbers
    }

    /// All numbers that are left.
    pub(super) fn all<T: Pod>(mut self) -> Vec<T> {
        let numbers = self.take(self.rest.len() / size_of::<T>());
        assert!(self.rest.is_empty(), "{} has a broken end", self.name);
        numbers
    }
}

#[allow(unsafe_code)]
fn bytes_of_mut<T: Pod>(numbers: &mut [T]) -> &mut [u8] {
    // SAFETY: `Pod`s have no padding and take any bits, and any byte is a `u8`.
    let (head, bytes, tail) = unsafe { numbers.align_to_mut::<u8>() };
    assert!(head.is_empty() && tail.is_empty());
    bytes
}

macro_rules! files {
    ($($name:ident)+) => { $(
        pub(super) fn $name() -> Reference {
            let rest = include_bytes!(concat!(stringify!($name), ".bin"));
            Reference { name: stringify!($name), rest }
        }
    )+ };
}

files! {
    f32 f32_to_bf16 f32_to_f16 bf16_to_f16 f16_to_f32 f16_to_bf16 fp8_quantize fp8_dequantize mxfp4
    int4_codes int4_f32 int4_f16 int4_bf16 weight_norm lora
}

/// All 65,536 bit patterns of a 16-bit format.
pub(super) fn every_u16() -> Vec<u16> {
    (0..=u16::MAX).collect()
}

/// Asserts that two slices have the same bits, and says where they differ.
#[track_caller]
pub(super) fn assert_same_bits<T: Pod>(found: &[T], expected: &[T], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: lengths");
    let differs = |&i: &usize| pod::bytes_of(&found[i..=i]) != pod::bytes_of(&expected[i..=i]);
    if let Some(i) = (0..found.len()).find(differs) {
        panic!(
            "{what}: at {i} found {:x?}, expected {:x?}",
            pod::bytes_of(&found[i..=i]),
            pod::bytes_of(&expected[i..=i])
        );
    }
}

/// A slice of f32 in the format `F`.
pub(super) fn encoded<F: Float>(values: &[f32]) -> Vec<F::Element> {
    values.iter().map(|&x| F::encode(x)).collect()
}
