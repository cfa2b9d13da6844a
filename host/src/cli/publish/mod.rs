//! Entries to and from registries: `weightmill push`, `weightmill pull`, and
//! what `weightmill build --remote` does of them.

pub(super) mod pull;
pub(super) mod push;
pub(super) mod remote;
mod sign;

use crate::error::Result;
use crate::publish::entry::{PulledEntry, PushedEntry};
use crate::publish::reference::Repository;

/// A repository on the command line.
pub(super) fn repository(text: &str) -> Result<Repository> {
    Repository::parse(text)
}

/// A push as a document.
pub(super) fn push_document(repository: &Repository, pushed: &PushedEntry) -> serde_json::Value {
    serde_json::json!({
        "repository": repository.to_string(),
        "manifest": format!("sha256:{}", pushed.manifest.digest),
        "outcome": if pushed.present { "present" } else { "pushed" },
        "blobs_sent": pushed.sent.blobs,
        "bytes_sent": pushed.sent.bytes,
        "blobs_present": pushed.sent.blobs_present,
        "blobs_mounted": pushed.sent.blobs_mounted,
        "bytes_spared": pushed.sent.bytes_spared,
    })
}

/// A pull as a document.
pub(super) fn pull_document(repository: &Repository, pulled: &PulledEntry) -> serde_json::Value {
    serde_json::json!({
        "repository": repository.to_string(),
        "manifest": format!("sha256:{}", pulled.manifest),
        "content_digest": pulled.content_digest,
        "outcome": if pulled.found { "hit" } else { "pulled" },
        "trusted": pulled.grounds.to_string(),
        "bytes_received": pulled.bytes_received,
        "bytes_present": pulled.bytes_present,
    })
}
