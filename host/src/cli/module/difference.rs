//! Where two tensors of one type first differ.

use crate::tensor::{Dtype, TensorType};

/// The first element that differs.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub(super) struct Difference {
    /// Its flat index.
    pub(super) element: u64,
    /// Its index in each dimension.
    pub(super) index: Vec<u64>,
    pub(super) got: String,
    pub(super) expected: String,
    /// How many bytes differ in all.
    pub(super) bytes: u64,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Difference { index, got, expected, bytes, .. } = self;
        write!(f, "first at {index:?}: got {got}, expected {expected}; {bytes} bytes differ in all")
    }
}

/// `None` if both are equal. Both have the tensor's length.
pub(super) fn first(tensor: &TensorType, got: &[u8], expected: &[u8]) -> Option<Difference> {
    let at = got.iter().zip(expected).position(|(a, b)| a != b)?;
    let bytes = got.iter().zip(expected).filter(|(a, b)| a != b).count() as u64;
    let dtype = tensor.dtype();
    let element = at as u64 * 8 / dtype.bits();
    let mut left = element;
    let mut index: Vec<u64> = tensor
        .shape()
        .iter()
        .rev()
        .map(|&extent| {
            let i = left % extent.max(1);
            left /= extent.max(1);
            i
        })
        .collect();
    index.reverse();
    let of = |tensor: &[u8]| shown(dtype, element_bytes(dtype, element, at, tensor));
    Some(Difference { element, index, got: of(got), expected: of(expected), bytes })
}

/// The bytes of an element; of a sub-byte dtype the byte that differs.
fn element_bytes(dtype: Dtype, element: u64, at: usize, tensor: &[u8]) -> &[u8] {
    let range = match dtype.bytes() {
        // In range: the element lies inside a tensor that is in memory.
        Some(size) => (element * size) as usize..((element + 1) * size) as usize,
        None => at..at + 1,
    };
    tensor.get(range).unwrap_or(&[])
}

fn shown(dtype: Dtype, bytes: &[u8]) -> String {
    let hex = bytes.iter().rev().fold(String::from("0x"), |text, b| format!("{text}{b:02x}"));
    let mut wide = [0; 8];
    wide[..bytes.len().min(8)].copy_from_slice(&bytes[..bytes.len().min(8)]);
    let bits = u64::from_le_bytes(wide);
    match dtype {
        Dtype::F32 => format!("{} ({hex})", f32::from_bits(bits as u32)),
        Dtype::F64 => format!("{} ({hex})", f64::from_bits(bits)),
        Dtype::BF16 => format!("{} ({hex})", f32::from_bits((bits as u32) << 16)),
        Dtype::U8 | Dtype::U16 | Dtype::U32 | Dtype::U64 | Dtype::BOOL => bits.to_string(),
        Dtype::I8 => (bits as i8).to_string(),
        Dtype::I16 => (bits as i16).to_string(),
        Dtype::I32 => (bits as i32).to_string(),
        Dtype::I64 => (bits as i64).to_string(),
        _ => hex,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_element_is_found_and_shown() {
        let tensor = TensorType::new(Dtype::BF16, vec![2, 3]).unwrap();
        let expected = [0, 0, 0x80, 0x3F, 0, 0, 0, 0, 0x80, 0x3F, 0, 0];
        let mut got = expected;
        assert_eq!(first(&tensor, &got, &expected), None);
        got[9] = 0x40;
        got[11] = 1;
        let found = first(&tensor, &got, &expected).unwrap();
        assert_eq!((found.element, found.index.as_slice(), found.bytes), (4, &[1, 1][..], 2));
        assert_eq!((found.got.as_str(), found.expected.as_str()), ("4 (0x4080)", "1 (0x3f80)"));
    }

    #[test]
    fn integers_and_nibbles_read_well() {
        let tensor = TensorType::new(Dtype::I32, vec![1]).unwrap();
        assert_eq!(first(&tensor, &[0xFF; 4], &[0; 4]).unwrap().got, "-1");
        let tensor = TensorType::new(Dtype::F4, vec![4]).unwrap();
        let found = first(&tensor, &[1, 0x21], &[1, 0x31]).unwrap();
        assert_eq!((found.element, found.got.as_str()), (2, "0x21"));
    }
}
