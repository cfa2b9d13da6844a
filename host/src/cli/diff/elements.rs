//! Where two tensors of one type differ.

use std::fmt;

use super::side::Reader;
use super::values;
use crate::error::{Code, Error, Result};
use crate::progress::Progress;
use crate::tensor::{Dtype, TensorType};

/// Bytes that are compared at a time: a whole number of elements of any dtype.
const CHUNK_BYTES: u64 = 3 << 20;

/// The elements that differ.
pub(super) struct Differing {
    dtype: Dtype,
    /// The first, counted in the order of the bytes.
    first: u64,
    /// Its place in each dimension.
    position: Vec<u64>,
    /// Its bits on both sides.
    a: u64,
    b: u64,
    /// How many differ.
    count: u64,
    /// How many there are.
    total: u64,
}

/// Compares two tensors of the type `tensor`, and their bytes with their
/// digests.
///
/// # Errors
/// What reading says; `interrupted`.
pub(super) fn compare(
    tensor: &TensorType,
    mut a: Reader<'_>,
    mut b: Reader<'_>,
    progress: &dyn Progress,
) -> Result<Differing> {
    let (bits, len) = (tensor.dtype().bits(), tensor.len_bytes());
    let mut first: Option<(u64, u64, u64)> = None;
    let mut count = 0;
    let mut at = 0;
    while at < len {
        if progress.cancelled() {
            return Err(Error::new(Code::Interrupted, "stopped while comparing"));
        }
        // In range: a chunk at most.
        let size = (len - at).min(CHUNK_BYTES) as usize;
        let (mut bytes_a, mut bytes_b) = (vec![0; size], vec![0; size]);
        a.read(&mut bytes_a)?;
        b.read(&mut bytes_b)?;
        if bytes_a != bytes_b {
            for element in 0..size as u64 * 8 / bits {
                let (x, y) = (values::element(&bytes_a, bits, element), values::element(&bytes_b, bits, element));
                if x != y {
                    count += 1;
                    first.get_or_insert((at * 8 / bits + element, x, y));
                }
            }
        }
        at += size as u64;
        progress.advance(2 * size as u64);
    }
    a.finish().map_err(|e| e.context("a"))?;
    b.finish().map_err(|e| e.context("b"))?;
    // The digests differ, and each is that of the bytes.
    let (first, a, b) = first.ok_or_else(|| Error::new(Code::DigestMismatch, "equal bytes have two digests"))?;
    let position = position(first, tensor.shape());
    Ok(Differing { dtype: tensor.dtype(), first, position, a, b, count, total: len * 8 / bits })
}

/// The indices of an element of a dense row-major tensor.
fn position(mut element: u64, shape: &[u64]) -> Vec<u64> {
    let mut position: Vec<u64> = shape
        .iter()
        .rev()
        .map(|extent| {
            let index = element % extent;
            element /= extent;
            index
        })
        .collect();
    position.reverse();
    position
}

impl Differing {
    pub(super) fn document(&self) -> serde_json::Value {
        let side = |bits| {
            serde_json::json!({
                "value": values::text(self.dtype, bits),
                "bits": values::hexadecimal(self.dtype, bits),
            })
        };
        serde_json::json!({
            "first": self.first,
            "position": self.position,
            "a": side(self.a),
            "b": side(self.b),
            "differing": self.count,
            "total": self.total,
        })
    }
}

impl fmt::Display for Differing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |bits| format!("{} ({})", values::text(self.dtype, bits), values::hexadecimal(self.dtype, bits));
        write!(
            f,
            "{:?} (element {}): a {}, b {}; {} of {} elements differ",
            self.position,
            self.first,
            side(self.a),
            side(self.b),
            self.count,
            self.total
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_row_major() {
        assert_eq!(position(0, &[2, 3, 4]), [0, 0, 0]);
        assert_eq!(position(23, &[2, 3, 4]), [1, 2, 3]);
        assert_eq!(position(13, &[2, 3, 4]), [1, 0, 1]);
        assert_eq!(position(0, &[]), [0; 0]);
    }

    #[test]
    fn chunks_hold_whole_elements_of_any_dtype() {
        for dtype in Dtype::ALL {
            assert_eq!(CHUNK_BYTES * 8 % dtype.bits(), 0, "{dtype}");
        }
    }
}
