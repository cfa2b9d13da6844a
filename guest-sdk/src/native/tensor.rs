use alloc::vec;
use alloc::vec::Vec;

use crate::abi::{ALIGN, Dtype};
use crate::pod::{self, Pod};

/// Bytes that begin on a 64-byte boundary, as a tile's windows do.
///
/// ```
/// use weightmill_guest::native::Window;
///
/// let mut window = Window::zeroed(8);
/// window.bytes_mut()[4] = 1;
/// assert_eq!(window.numbers::<u32>(), [0, 1]);
/// assert_eq!(Window::of(&[1.0_f32]).bytes(), [0, 0, 0x80, 0x3f]);
/// ```
#[derive(Clone, Debug)]
pub struct Window {
    room: Vec<u8>,
    start: usize,
    len: usize,
}

impl Window {
    /// `len` bytes of 0.
    pub fn zeroed(len: usize) -> Self {
        let room = vec![0; len + ALIGN];
        let start = room.as_ptr().align_offset(ALIGN);
        Window { room, start, len }
    }

    /// A copy of `numbers`.
    pub fn of<T: Pod>(numbers: &[T]) -> Self {
        let bytes = pod::bytes_of(numbers);
        let mut window = Window::zeroed(bytes.len());
        window.bytes_mut().copy_from_slice(bytes);
        window
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.room[self.start..self.start + self.len]
    }

    /// The bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.room[self.start..self.start + self.len]
    }

    /// The bytes as numbers.
    pub fn numbers<T: Pod>(&self) -> &[T] {
        pod::of(self.bytes())
    }
}

/// A tensor in memory.
///
/// ```
/// use weightmill_guest::native::Tensor;
///
/// let tensor = Tensor::of(&[2, 2], &[1.0_f32, 2.0, 3.0, 4.0]);
/// assert_eq!(tensor.bytes.len(), 16);
/// assert_eq!(tensor.numbers::<f32>(), [1.0, 2.0, 3.0, 4.0]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Element type.
    pub dtype: Dtype,
    /// Extents, outermost first.
    pub shape: Vec<u64>,
    /// The elements, row-major.
    pub bytes: Vec<u8>,
}

/// A number type that is a dtype.
pub trait Element: Pod {
    /// The dtype.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($number:ty: $dtype:ident),+) => { $( impl Element for $number { const DTYPE: Dtype = Dtype::$dtype; } )+ };
}

elements!(u8: U8, i8: I8, u16: U16, i16: I16, u32: U32, i32: I32, f32: F32, u64: U64, i64: I64, f64: F64);

impl Tensor {
    /// A tensor of numbers.
    ///
    /// # Panics
    /// If they are not as many as the shape says.
    pub fn of<T: Element>(shape: &[u64], numbers: &[T]) -> Self {
        Tensor::new(T::DTYPE, shape, pod::bytes_of(numbers).to_vec())
    }

    /// A tensor of any dtype.
    ///
    /// # Panics
    /// If there are not as many bytes as the shape says.
    pub fn new(dtype: Dtype, shape: &[u64], bytes: Vec<u8>) -> Self {
        assert_eq!(dtype.tensor_bytes(shape), Some(bytes.len() as u64), "{dtype} {shape:?}");
        Tensor { dtype, shape: shape.to_vec(), bytes }
    }

    /// A tensor whose elements are all different as far as their size allows:
    /// element `i` holds `first + i`, little-endian.
    ///
    /// # Panics
    /// If the size is not a whole number of bytes.
    ///
    /// ```
    /// use weightmill_guest::abi::Dtype;
    /// use weightmill_guest::native::Tensor;
    ///
    /// assert_eq!(Tensor::counting(Dtype::U16, &[3], 5).numbers::<u16>(), [5, 6, 7]);
    /// ```
    pub fn counting(dtype: Dtype, shape: &[u64], first: u64) -> Self {
        let (size, count) = (dtype.bytes(), shape.iter().product::<u64>());
        let Some(size) = size else { panic!("{dtype} has no whole number of bytes") };
        let bytes = (first..first + count).flat_map(|n| n.to_le_bytes().into_iter().take(size as usize)).collect();
        Tensor::new(dtype, shape, bytes)
    }

    /// The elements as numbers.
    ///
    /// # Panics
    /// If they are of another size.
    pub fn numbers<T: Pod>(&self) -> Vec<T> {
        let mut window = Window::zeroed(self.bytes.len());
        window.bytes_mut().copy_from_slice(&self.bytes);
        window.numbers::<T>().to_vec()
    }
}
