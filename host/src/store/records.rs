//! Weak records: what makes a run faster and may be lost at any time.
//!
//! Facts, source digests, block records and `first` records are each one file:
//! JSON on one line, a line break, `sha256:` and the hash of the kind and the
//! JSON, a line break. They are written to a temporary and renamed, but not
//! synced: after a crash such a file may be empty, torn or gone. Then its hash
//! does not fit, and the reader takes it for missing. The kind is hashed too, so
//! that a record is never read as one of another kind.

use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Inner;
use super::storage::read_whole;
use crate::digest::{RecordDigest, sha256};
use crate::error::{Error, Result};

/// The longest record that is read.
pub(crate) const RECORD_LIMIT_BYTES: u64 = 1 << 28;

/// What a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Facts,
    Source,
    Block,
    First,
    Remote,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Facts => "facts v1",
            Kind::Source => "source v1",
            Kind::Block => "block v1",
            Kind::First => "first v1",
            Kind::Remote => "remote v1",
        }
    }

    fn checksum(self, json: &[u8]) -> RecordDigest {
        let mut text = format!("weightmill record {}\n", self.name()).into_bytes();
        text.extend_from_slice(json);
        RecordDigest::from_bytes(sha256(&text))
    }
}

/// The file's bytes for a record.
fn encode(kind: Kind, record: &impl Serialize) -> Result<Vec<u8>> {
    let mut bytes =
        serde_json::to_vec(record).map_err(|e| Error::io(format!("cannot write a {} record", kind.name()), e))?;
    let checksum = kind.checksum(&bytes);
    bytes.extend_from_slice(format!("\nsha256:{checksum}\n").as_bytes());
    Ok(bytes)
}

/// The record in a file's bytes; `None` if they are not whole.
fn decode<T: DeserializeOwned>(kind: Kind, bytes: &[u8]) -> Option<T> {
    let text = bytes.strip_suffix(b"\n")?;
    let (json, checksum) = text.split_at_checked(text.len().checked_sub("\nsha256:".len() + 64)?)?;
    let checksum = checksum.strip_prefix(b"\nsha256:")?;
    if checksum != kind.checksum(json).to_string().as_bytes() {
        return None;
    }
    serde_json::from_slice(json).ok()
}

impl Inner {
    /// Reads a weak record; `None` if it is missing, not whole, or a file that
    /// must not be trusted.
    pub(crate) fn read_record<T: DeserializeOwned>(&self, path: &Path, kind: Kind) -> Option<T> {
        let file = self.storage.open_read(path).ok()?;
        self.trust.check(path, &self.storage.file_metadata(&file).ok()?).ok()?;
        decode(kind, &read_whole(&*self.storage, &file, RECORD_LIMIT_BYTES).ok()??)
    }

    /// Writes a weak record.
    ///
    /// # Errors
    /// `io_error`, `insufficient_disk`: callers that only want speed ignore it.
    pub(crate) fn write_record(&self, path: &Path, kind: Kind, record: &impl Serialize) -> Result<()> {
        self.replace(path, &encode(kind, record)?, 0o644, super::Durability::Weak)
    }
}

impl super::Store {
    /// The facts that were kept under a digest.
    pub fn facts(&self, digest: &RecordDigest) -> Option<serde_json::Value> {
        self.0.read_record(&self.0.paths.facts(digest), Kind::Facts)
    }

    /// Keeps facts under a digest. They may be lost at any time.
    ///
    /// # Errors
    /// `io_error`, `insufficient_disk`: to be ignored where the facts only
    /// serve to be faster the next time.
    pub fn put_facts(&self, digest: &RecordDigest, facts: &serde_json::Value) -> Result<()> {
        self.0.write_record(&self.0.paths.facts(digest), Kind::Facts, facts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn any_changed_byte_is_found() {
        let record = json!({"a": [1, 2], "b": "é"});
        let bytes = encode(Kind::Facts, &record).unwrap();
        assert_eq!(decode::<Value>(Kind::Facts, &bytes), Some(record));
        assert_eq!(decode::<Value>(Kind::Block, &bytes), None, "another kind");
        for i in 0..bytes.len() {
            let mut torn = bytes.clone();
            torn[i] ^= 1;
            assert_eq!(decode::<Value>(Kind::Facts, &torn), None, "byte {i}");
            assert_eq!(decode::<Value>(Kind::Facts, &bytes[..i]), None, "cut at {i}");
        }
    }
}
