//! Signing what is pushed.

use std::path::Path;

use crate::attest::{PAYLOAD_TYPE, SigningKey, sign};
use crate::cli::attest::statement;
use crate::error::Result;
use crate::store::{Lease, Store};

/// The key in a file, if one is named.
pub(super) fn key(path: Option<&Path>) -> Result<Option<SigningKey>> {
    path.map(SigningKey::load).transpose()
}

/// A signed statement about an entry: what `weightmill attest --key` writes.
pub(super) fn attestation(store: &Store, lease: &Lease, key: &SigningKey) -> Result<Vec<u8>> {
    sign(PAYLOAD_TYPE, &statement(store, lease)?.to_bytes()?, key).to_json()
}
