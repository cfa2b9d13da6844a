//! Digests, and the two-level hash over a tensor's bytes.
//!
//! A tensor is hashed in leaves of 16,384 bytes, so that all cores can work on
//! one tensor, any part can be checked alone, and a GPU can do it too:
//! `SHA-256("weightmill tensor v1\n" ‖ length in decimal ‖ "\n" ‖ SHA-256(leaf
//! 0) ‖ SHA-256(leaf 1) ‖ …)`. The last leaf may be shorter; an empty tensor
//! has none.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest as _, Sha256};

/// Bytes of a leaf.
pub const LEAF_BYTES: usize = 16_384;
/// Bytes of a SHA-256.
pub const HASH_BYTES: usize = 32;

/// SHA-256 of some bytes.
pub fn sha256(bytes: &[u8]) -> [u8; HASH_BYTES] {
    Sha256::digest(bytes).into()
}

macro_rules! digest_types {
    ($( $(#[$doc:meta])* $name:ident ),+ $(,)?) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name([u8; HASH_BYTES]);

        impl $name {
            /// From the raw hash.
            pub const fn from_bytes(raw: [u8; HASH_BYTES]) -> Self {
                $name(raw)
            }

            /// The raw hash.
            pub const fn as_bytes(&self) -> &[u8; HASH_BYTES] {
                &self.0
            }

            /// The SHA-256 of `bytes`.
            pub fn of(bytes: &[u8]) -> Self {
                $name(sha256(bytes))
            }

            /// The first eight hexadecimal digits, for people.
            pub fn short(&self) -> String {
                self.to_string()[..8].to_string()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                const DIGITS: &[u8; 16] = b"0123456789abcdef";
                let mut text = [0; 2 * HASH_BYTES];
                for (pair, byte) in text.chunks_exact_mut(2).zip(self.0) {
                    pair[0] = DIGITS[usize::from(byte >> 4)];
                    pair[1] = DIGITS[usize::from(byte & 0xF)];
                }
                f.write_str(std::str::from_utf8(&text).map_err(|_| fmt::Error)?)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = BadDigest;

            fn from_str(text: &str) -> Result<Self, BadDigest> {
                parse_hex(text).map($name).ok_or(BadDigest)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    )+ };
}

digest_types! {
    /// The two-level digest of a tensor's bytes.
    TensorDigest,
    /// The digest over a table of tensors: see [`content_digest`].
    ContentDigest,
    /// SHA-256 of an action's canonical JSON: the cache key.
    ActionKey,
    /// SHA-256 of a block action's canonical JSON.
    BlockKey,
    /// SHA-256 of an application's canonical JSON.
    ApplicationDigest,
    /// SHA-256 of a stored blob: its name in the store and in a registry.
    BlobDigest,
    /// SHA-256 of a module's bytes: its identity.
    ModuleDigest,
    /// SHA-256 that names a weak record (facts, source digests).
    RecordDigest,
    /// SHA-256 of a public key's DER (SubjectPublicKeyInfo).
    KeyId,
}

/// A text that is not 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadDigest;

impl fmt::Display for BadDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a digest is 64 lower-case hexadecimal digits")
    }
}

impl std::error::Error for BadDigest {}

fn parse_hex(text: &str) -> Option<[u8; HASH_BYTES]> {
    let text = text.as_bytes();
    if text.len() != 2 * HASH_BYTES {
        return None;
    }
    let digit = |c: u8| match c {
        b'0'..=b'9' => Some(c - b'0'),
        b'a'..=b'f' => Some(c - b'a' + 10),
        _ => None,
    };
    let mut raw = [0; HASH_BYTES];
    for (byte, pair) in raw.iter_mut().zip(text.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(raw)
}

/// How many leaves a tensor of `len_bytes` has.
pub const fn leaf_count(len_bytes: u64) -> u64 {
    len_bytes.div_ceil(LEAF_BYTES as u64)
}

/// The leaf hashes of `bytes`, which begin on a leaf's boundary, one after the
/// other; the last leaf may be short.
pub fn leaf_hashes(bytes: &[u8]) -> Vec<u8> {
    let mut hashes = Vec::with_capacity(bytes.len().div_ceil(LEAF_BYTES) * HASH_BYTES);
    for leaf in bytes.chunks(LEAF_BYTES) {
        hashes.extend_from_slice(&sha256(leaf));
    }
    hashes
}

/// The tensor digest from its length and its leaves' concatenated raw hashes.
///
/// # Panics
/// If the number of hashes does not fit the length.
pub fn tensor_digest(len_bytes: u64, leaf_hashes: &[u8]) -> TensorDigest {
    assert_eq!(leaf_hashes.len() as u64, leaf_count(len_bytes) * HASH_BYTES as u64);
    let mut hasher = Sha256::new();
    hasher.update(format!("weightmill tensor v1\n{len_bytes}\n"));
    hasher.update(leaf_hashes);
    TensorDigest(hasher.finalize().into())
}

/// Hashes a tensor that arrives in pieces of any size.
#[derive(Clone, Default)]
pub struct LeafHasher {
    hashes: Vec<u8>,
    open: Sha256,
    open_bytes: usize,
    len_bytes: u64,
}

impl LeafHasher {
    /// Takes the next bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        self.len_bytes += bytes.len() as u64;
        while !bytes.is_empty() {
            let take = bytes.len().min(LEAF_BYTES - self.open_bytes);
            self.open.update(&bytes[..take]);
            self.open_bytes += take;
            bytes = &bytes[take..];
            if self.open_bytes == LEAF_BYTES {
                self.close_leaf();
            }
        }
    }

    /// Takes the next bytes, whose leaf hashes are known already: `None` if
    /// this hasher is not on a leaf's boundary. Only the tensor's last bytes
    /// may end in a short leaf.
    #[must_use]
    pub fn append_leaves(&mut self, len_bytes: u64, hashes: &[u8]) -> Option<()> {
        if self.open_bytes != 0 || !self.len_bytes.is_multiple_of(LEAF_BYTES as u64) {
            return None;
        }
        assert_eq!(hashes.len() as u64, leaf_count(len_bytes) * HASH_BYTES as u64);
        self.len_bytes += len_bytes;
        self.hashes.extend_from_slice(hashes);
        Some(())
    }

    fn close_leaf(&mut self) {
        self.hashes.extend_from_slice(&self.open.finalize_reset());
        self.open_bytes = 0;
    }

    /// The tensor's digest and its leaves' hashes.
    pub fn finish(mut self) -> (TensorDigest, Vec<u8>) {
        if self.open_bytes > 0 {
            self.close_leaf();
        }
        (tensor_digest(self.len_bytes, &self.hashes), self.hashes)
    }
}

/// The content digest of a table: SHA-256 over, for every tensor in ascending
/// byte order of its name, `name 0x00 dtype 0x00 shape 0x00 digest 0x0A` with
/// the shape as JSON without spaces and the digest in hexadecimal.
///
/// `rows` must be sorted by name.
pub fn content_digest<'a>(
    rows: impl IntoIterator<Item = (&'a str, weightmill_guest::abi::Dtype, &'a [u64], TensorDigest)>,
) -> ContentDigest {
    let mut hasher = Sha256::new();
    let mut last: Option<&str> = None;
    for (name, dtype, shape, digest) in rows {
        assert!(last < Some(name), "the table is sorted and has no name twice");
        last = Some(name);
        let shape: Vec<String> = shape.iter().map(u64::to_string).collect();
        hasher.update(format!("{name}\0{dtype}\0[{}]\0{digest}\n", shape.join(",")));
    }
    ContentDigest(hasher.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by_the_book(bytes: &[u8]) -> TensorDigest {
        let mut text = format!("weightmill tensor v1\n{}\n", bytes.len()).into_bytes();
        for leaf in bytes.chunks(16_384) {
            text.extend_from_slice(&sha256(leaf));
        }
        TensorDigest::of(&text)
    }

    #[test]
    fn any_cut_gives_the_same_digest() {
        for len in [0, 1, 16_383, 16_384, 16_385, 3 * 16_384, 50_001] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 7 % 251) as u8).collect();
            let want = by_the_book(&bytes);
            assert_eq!(tensor_digest(len as u64, &leaf_hashes(&bytes)), want);
            for cut in [1, 77, 16_384, 20_000] {
                let mut hasher = LeafHasher::default();
                bytes.chunks(cut).for_each(|piece| hasher.update(piece));
                assert_eq!(hasher.finish().0, want, "{len} bytes in pieces of {cut}");
            }
        }
    }

    #[test]
    fn leaves_append_on_boundaries_only() {
        let bytes = vec![3; 40_000];
        let mut hasher = LeafHasher::default();
        hasher.append_leaves(32_768, &leaf_hashes(&bytes[..32_768])).unwrap();
        hasher.update(&bytes[32_768..]);
        assert!(hasher.clone().append_leaves(1, &sha256(b"x")).is_none());
        assert_eq!(hasher.finish().0, by_the_book(&bytes));
    }

    #[test]
    fn hexadecimal_is_lower_case_and_whole() {
        let digest = BlobDigest::of(b"abc");
        let text = digest.to_string();
        assert_eq!(text, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(text.parse(), Ok(digest));
        assert_eq!(text.to_uppercase().parse::<BlobDigest>(), Err(BadDigest));
        assert_eq!(text[1..].parse::<BlobDigest>(), Err(BadDigest));
    }
}
