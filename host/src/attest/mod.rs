//! Attestations: what one host says about an entry, for others to check.
//!
//! ```text
//! entry ──statement.rs──► in-toto Statement v1 ──envelope.rs──► DSSE envelope
//!         key, content digest,  (plain JSON: any tool       (payload + signatures,
//!         shards, modules,       can sign it)                ed25519, keys.rs)
//!         who built it
//! ```
//!
//! The forms are public ones, so that a statement can be signed, verified and
//! stored by other tools: [in-toto Statement v1], [DSSE] with the payload type
//! `application/vnd.in-toto+json`, and ed25519 keys as the PEM files that
//! `openssl genpkey -algorithm ed25519` and `openssl pkey -pubout` write.
//!
//! A signature says who speaks, not that it is true. What is checked against
//! the bytes at hand is in [`EntryStatement::check`].
//!
//! [in-toto Statement v1]: https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
//! [DSSE]: https://github.com/secure-systems-lab/dsse/blob/master/protocol.md

mod envelope;
mod keys;
mod statement;

pub use envelope::{Envelope, PAYLOAD_TYPE, Untrusted, Verified, pae, sign, verify};
pub use keys::{PublicKey, SIGNATURE_BYTES, SigningKey};
pub use statement::{
    ENTRY_PREDICATE, EntryPredicate, EntryStatement, ModuleRow, STATEMENT, ShardRow, Statement, Subject,
};

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::{Code, Error, Result};

/// The largest statement, envelope or key file that is read.
const FILE_LIMIT_BYTES: u64 = 64 << 20;

/// Reads a signature that is a file of its own: 64 bytes, or base64 of them.
///
/// # Errors
/// `attestation_invalid` if it is neither.
pub fn read_signature(path: &Path) -> Result<[u8; SIGNATURE_BYTES]> {
    let bytes = read_file(path)?;
    if let Ok(raw) = bytes.as_slice().try_into() {
        return Ok(raw);
    }
    let text = std::str::from_utf8(&bytes).ok().and_then(|text| envelope::decode(text.trim()));
    text.and_then(|raw| raw.try_into().ok()).ok_or_else(|| {
        let message =
            format!("{} is no ed25519 signature: expected {SIGNATURE_BYTES} bytes or their base64", path.display());
        Error::new(Code::AttestationInvalid, message)
            .hint("`openssl pkeyutl -sign -inkey key.pem -rawin -in statement.json -out statement.sig` writes one")
    })
}

/// Reads a statement, an envelope, a key: a regular file of bounded size.
///
/// # Errors
/// `attestation_invalid` if it cannot be one.
pub fn read_file(path: &Path) -> Result<Vec<u8>> {
    let refuse = |why: String| {
        Error::new(Code::AttestationInvalid, format!("{} {why}", path.display())).hint(
            "name a statement, an envelope, a signature or a key: `weightmill attest --help` shows how they are made",
        )
    };
    let cannot = |e: std::io::Error| refuse(format!("cannot be read: {e}"));
    if !std::fs::metadata(path).map_err(cannot)?.is_file() {
        return Err(refuse("is no regular file".into()));
    }
    let mut bytes = Vec::new();
    File::open(path).and_then(|f| f.take(FILE_LIMIT_BYTES + 1).read_to_end(&mut bytes)).map_err(cannot)?;
    if bytes.len() as u64 > FILE_LIMIT_BYTES {
        return Err(refuse(format!("has more than {FILE_LIMIT_BYTES} bytes")));
    }
    Ok(bytes)
}
