//! What a tensor is, apart from its bytes.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
pub use weightmill_guest::abi::Dtype;

use crate::error::{Code, Error, Result};

/// The longest tensor name, in bytes.
pub const NAME_MAX_BYTES: usize = 4096;
/// What the names of filler tensors in shards begin with.
pub const PAD_PREFIX: &str = "__pad__.";

/// A tensor's name: UTF-8 of 1 to 4,096 bytes without control characters that
/// does not begin with `__pad__.`. Cheap to clone; ordered by bytes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TensorName(Arc<str>);

impl TensorName {
    /// Checks a name.
    ///
    /// # Errors
    /// `bad_tensor_name`.
    pub fn new(name: &str) -> Result<Self> {
        let shown = || name.chars().take(80).flat_map(char::escape_debug).collect::<String>();
        let refuse = |why: &str| Err(Error::new(Code::BadTensorName, format!("the tensor name '{}' {why}", shown())));
        if name.is_empty() {
            return refuse("is empty");
        }
        if name.len() > NAME_MAX_BYTES {
            return refuse(&format!("has {} bytes, more than {NAME_MAX_BYTES}", name.len()));
        }
        if name.chars().any(char::is_control) {
            return refuse("has a control character");
        }
        if name.starts_with(PAD_PREFIX) {
            return refuse(&format!("begins with {PAD_PREFIX}, which is reserved for fillers"));
        }
        Ok(TensorName(name.into()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for TensorName {
    type Error = Error;

    fn try_from(name: String) -> Result<Self> {
        TensorName::new(&name)
    }
}

impl From<TensorName> for String {
    fn from(name: TensorName) -> Self {
        name.0.to_string()
    }
}

impl std::borrow::Borrow<str> for TensorName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl AsRef<str> for TensorName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// Element type and extents of a dense row-major tensor whose size is known
/// to be a whole number of bytes within 2⁵³−1.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorType {
    dtype: Dtype,
    shape: Vec<u64>,
    len_bytes: u64,
}

impl TensorType {
    /// `None` if the size overflows or is not a whole number of bytes.
    pub fn new(dtype: Dtype, shape: Vec<u64>) -> Option<Self> {
        let len_bytes = dtype.tensor_bytes(&shape)?;
        Some(TensorType { dtype, shape, len_bytes })
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Extents, outermost first.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Size in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_would_hurt_are_refused() {
        for bad in ["", "a\nb", "a\u{7f}", "__pad__.0", &"x".repeat(4097)] {
            assert_eq!(TensorName::new(bad).unwrap_err().code(), Code::BadTensorName, "{bad:?}");
        }
        for good in ["a", "../a/b", "é", "__pad__", &"x".repeat(4096)] {
            assert!(TensorName::new(good).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn sizes_are_whole_bytes_and_bounded() {
        assert_eq!(TensorType::new(Dtype::F4, vec![3, 2]).unwrap().len_bytes(), 3);
        assert_eq!(TensorType::new(Dtype::F4, vec![3]), None);
        assert_eq!(TensorType::new(Dtype::U8, vec![u64::MAX, 2]), None);
        assert_eq!(TensorType::new(Dtype::U8, vec![1 << 53]), None);
        assert_eq!(TensorType::new(Dtype::F32, vec![]).unwrap().len_bytes(), 4);
    }

    #[test]
    fn dtypes_are_those_of_safetensors() {
        for dtype in Dtype::ALL {
            let stock: safetensors::Dtype = serde_json::from_value(dtype.as_str().into()).unwrap();
            assert_eq!(stock.bitsize() as u64, dtype.bits());
        }
    }
}
