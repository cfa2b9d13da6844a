//! Windows as typed slices.
//!
//! A window is bytes that begin on a 64-byte boundary. [`Pod`] is sealed to
//! the plain integers and floats, for which every bit pattern is a value and
//! there is no padding, so that a slice of bytes can be seen as a slice of
//! them and back. WebAssembly is little-endian; natively the SDK refuses to
//! compile for a big-endian machine, where the same view would differ.
#![allow(unsafe_code)]

#[cfg(target_endian = "big")]
compile_error!("tensors are little-endian, and so must the machine be");

mod sealed {
    /// Keeps [`Pod`](super::Pod) to the types of this file.
    pub trait Sealed {}
}

/// A plain number: any bits are a value.
///
/// ```
/// use weightmill_guest::prelude::*;
///
/// fn sum<T: Pod + Into<u64>>(tile: &Tile) -> u64 {
///     tile.input::<T>(0).iter().map(|&x| x.into()).sum()
/// }
/// ```
pub trait Pod: sealed::Sealed + Copy + Default + core::fmt::Debug + PartialEq + 'static {}

macro_rules! pod {
    ($($number:ty)+) => { $( impl sealed::Sealed for $number {} impl Pod for $number {} )+ };
}

pod!(u8 i8 u16 i16 u32 i32 u64 i64 f32 f64);

/// `bytes` as numbers.
///
/// # Panics
/// If they are not a whole number of `T`, or not aligned for it.
///
/// ```
/// use weightmill_guest::pod;
///
/// assert_eq!(pod::of::<u8>(&[1, 2]), &[1, 2]);
/// ```
#[track_caller]
pub fn of<T: Pod>(bytes: &[u8]) -> &[T] {
    // SAFETY: `Pod` is sealed to integers and floats: every bit pattern is valid.
    let (head, numbers, tail) = unsafe { bytes.align_to::<T>() };
    assert!(head.is_empty() && tail.is_empty(), "{}", misfit::<T>(bytes));
    numbers
}

/// `bytes` as numbers that can be written.
///
/// # Panics
/// If they are not a whole number of `T`, or not aligned for it.
///
/// ```
/// use weightmill_guest::pod;
///
/// pod::of_mut::<u8>(&mut [1, 2])[0] = 7;
/// ```
#[track_caller]
pub fn of_mut<T: Pod>(bytes: &mut [u8]) -> &mut [T] {
    let misfit = misfit::<T>(bytes);
    // SAFETY: `Pod` is sealed to integers and floats: every bit pattern is
    // valid, in both directions.
    let (head, numbers, tail) = unsafe { bytes.align_to_mut::<T>() };
    assert!(head.is_empty() && tail.is_empty(), "{misfit}");
    numbers
}

/// The bytes of `numbers`, in memory order, which is little-endian.
///
/// ```
/// use weightmill_guest::pod;
///
/// assert_eq!(pod::bytes_of(&[0x3f80_u16]), &[0x80, 0x3f]);
/// ```
pub fn bytes_of<T: Pod>(numbers: &[T]) -> &[u8] {
    // SAFETY: integers and floats have no padding, so all their bytes are
    // initialised, and any byte is a `u8`.
    let (head, bytes, tail) = unsafe { numbers.align_to::<u8>() };
    debug_assert!(head.is_empty() && tail.is_empty());
    bytes
}

struct Misfit {
    len: usize,
    size: usize,
}

fn misfit<T>(bytes: &[u8]) -> Misfit {
    Misfit { len: bytes.len(), size: size_of::<T>() }
}

impl core::fmt::Display for Misfit {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "a window of {} bytes is not a run of aligned {}-byte numbers", self.len, self.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_bytes_are_two_views_of_the_same_memory() {
        let numbers = [1.5_f32, -0.0];
        assert_eq!(of::<f32>(bytes_of(&numbers)), numbers);
        assert_eq!(of::<u32>(bytes_of(&numbers)), [0x3fc0_0000, 0x8000_0000]);
        let mut words = [0_u64];
        of_mut::<u64>(of_mut::<u8>(&mut [0; 0])).iter_mut().for_each(|w| *w = 1);
        words[0] = 0x0102;
        assert_eq!(&bytes_of(&words)[..2], &[2, 1]);
    }

    #[test]
    #[should_panic(expected = "a window of 3 bytes is not a run of aligned 2-byte numbers")]
    fn a_broken_run_is_refused() {
        let words = [0_u16; 2];
        of::<u16>(&bytes_of(&words)[..3]);
    }
}
