use core::fmt;
use core::str::FromStr;

use serde::{Deserialize, Serialize};

macro_rules! dtypes {
    ($( $(#[$doc:meta])* $name:ident $bits:literal ),+ $(,)?) => {
        /// An element type, by its safetensors name.
        ///
        /// ```
        /// use weightmill_guest::abi::Dtype;
        ///
        /// assert_eq!("F8_E4M3".parse(), Ok(Dtype::F8_E4M3));
        /// assert_eq!((Dtype::BF16.as_str(), Dtype::F4.bits()), ("BF16", 4));
        /// ```
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum Dtype { $( $(#[$doc])* $name, )+ }

        impl Dtype {
            /// Every dtype.
            pub const ALL: &[Dtype] = &[ $( Dtype::$name, )+ ];

            /// The safetensors name.
            pub const fn as_str(self) -> &'static str {
                match self { $( Dtype::$name => stringify!($name), )+ }
            }

            /// Bits of one element: 4, 6, 8, 16, 32 or 64.
            pub const fn bits(self) -> u64 {
                match self { $( Dtype::$name => $bits, )+ }
            }
        }
    };
}

dtypes! {
    /// One byte, 0 or 1.
    BOOL 8,
    /// OCP MX 4-bit float (E2M1), two to a byte.
    F4 4,
    /// OCP MX 6-bit float, E2M3.
    F6_E2M3 6,
    /// OCP MX 6-bit float, E3M2.
    F6_E3M2 6,
    /// Unsigned 8-bit integer.
    U8 8,
    /// Signed 8-bit integer.
    I8 8,
    /// FP8 E5M2.
    F8_E5M2 8,
    /// FP8 E4M3 ("fn": finite, largest 448).
    F8_E4M3 8,
    /// OCP MX scale: a power of two.
    F8_E8M0 8,
    /// FP8 E4M3 "fnuz" (one zero, bias 8).
    F8_E4M3FNUZ 8,
    /// FP8 E5M2 "fnuz".
    F8_E5M2FNUZ 8,
    /// Signed 16-bit integer.
    I16 16,
    /// Unsigned 16-bit integer.
    U16 16,
    /// IEEE 754 binary16.
    F16 16,
    /// bfloat16.
    BF16 16,
    /// Signed 32-bit integer.
    I32 32,
    /// Unsigned 32-bit integer.
    U32 32,
    /// IEEE 754 binary32.
    F32 32,
    /// Complex of two binary32.
    C64 64,
    /// IEEE 754 binary64.
    F64 64,
    /// Signed 64-bit integer.
    I64 64,
    /// Unsigned 64-bit integer.
    U64 64,
}

impl Dtype {
    /// Bytes of one element, or `None` for a sub-byte dtype.
    ///
    /// ```
    /// use weightmill_guest::abi::Dtype;
    ///
    /// assert_eq!((Dtype::F32.bytes(), Dtype::F4.bytes()), (Some(4), None));
    /// ```
    pub const fn bytes(self) -> Option<u64> {
        if self.bits().is_multiple_of(8) { Some(self.bits() / 8) } else { None }
    }

    /// Bytes of a dense tensor of `shape`: `None` if it is not a whole number
    /// of bytes or over [`limits::SIZE`](super::limits::SIZE).
    ///
    /// ```
    /// use weightmill_guest::abi::Dtype;
    ///
    /// assert_eq!(Dtype::F4.tensor_bytes(&[3, 2]), Some(3));
    /// assert_eq!(Dtype::F4.tensor_bytes(&[3]), None);
    /// ```
    pub fn tensor_bytes(self, shape: &[u64]) -> Option<u64> {
        let mut bits = self.bits();
        for &extent in shape {
            bits = bits.checked_mul(extent)?;
        }
        (bits.is_multiple_of(8) && bits / 8 <= super::limits::SIZE).then_some(bits / 8)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A name that is no safetensors dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownDtype;

impl fmt::Display for UnknownDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("unknown dtype")
    }
}

impl core::error::Error for UnknownDtype {}

impl FromStr for Dtype {
    type Err = UnknownDtype;

    fn from_str(name: &str) -> Result<Self, UnknownDtype> {
        Self::ALL.iter().copied().find(|d| d.as_str() == name).ok_or(UnknownDtype)
    }
}
