//! The documents of a registry: manifests, their descriptors, indexes.
//!
//! What is published is written as canonical JSON, so that the same content is
//! the same manifest on every host. What is read may have been written by
//! anything: unknown fields are let be, sizes are bounded, digests compared.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::canonical::to_canonical;
use crate::digest::BlobDigest;
use crate::error::{Code, Error, Result};

/// Media types of the OCI image specification.
pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// An index: a list of manifests.
pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// `{}`: what an artefact has for a config that needs none.
pub const EMPTY: &str = "application/vnd.oci.empty.v1+json";
/// The bytes of an [`EMPTY`] config.
pub const EMPTY_BYTES: &[u8] = b"{}";

/// The largest manifest or index that is read. Registries refuse larger ones
/// than 4 MiB, so this leaves room for those that do not.
pub const MANIFEST_LIMIT_BYTES: u64 = 16 << 20;

/// What a manifest says about a blob or another manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// What it is.
    pub media_type: String,
    /// Its digest.
    #[serde(with = "prefixed")]
    pub digest: BlobDigest,
    /// Its bytes.
    pub size: u64,
    /// What the artefact is, where the descriptor is of a manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    /// Free-form.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl Descriptor {
    /// A descriptor of bytes.
    pub fn of(media_type: &str, bytes: &[u8]) -> Self {
        Descriptor::new(media_type, BlobDigest::of(bytes), bytes.len() as u64)
    }

    /// A descriptor without annotations.
    pub fn new(media_type: &str, digest: BlobDigest, size: u64) -> Self {
        Descriptor {
            media_type: media_type.to_owned(),
            digest,
            size,
            artifact_type: None,
            annotations: BTreeMap::new(),
        }
    }

    /// The same with an annotation.
    #[must_use]
    pub fn annotated(mut self, name: &str, value: impl Into<String>) -> Self {
        self.annotations.insert(name.to_owned(), value.into());
        self
    }
}

/// A manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// Always 2.
    pub schema_version: u32,
    /// [`MANIFEST`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    /// What the artefact is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    /// The config blob.
    pub config: Descriptor,
    /// The other blobs.
    pub layers: Vec<Descriptor>,
    /// What this manifest is about, if it is attached to another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<Descriptor>,
    /// Free-form.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// A list of manifests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    /// Always 2.
    pub schema_version: u32,
    /// [`INDEX`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    /// The manifests.
    #[serde(default)]
    pub manifests: Vec<Descriptor>,
    /// Free-form.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl Manifest {
    /// A manifest of an artefact.
    pub fn new(artifact_type: Option<&str>, config: Descriptor, layers: Vec<Descriptor>) -> Self {
        Manifest {
            schema_version: 2,
            media_type: Some(MANIFEST.to_owned()),
            artifact_type: artifact_type.map(str::to_owned),
            config,
            layers,
            subject: None,
            annotations: BTreeMap::new(),
        }
    }

    /// Reads a manifest that hashes to what it should already.
    ///
    /// # Errors
    /// `registry_refused` if it is none.
    pub fn parse(bytes: &[u8], from: &str) -> Result<Self> {
        let manifest: Manifest = serde_json::from_slice(bytes).map_err(|e| {
            Error::new(Code::RegistryRefused, format!("what {from} gave is no manifest of an artefact: {e}"))
                .hint("is something else published under this reference?")
        })?;
        if manifest.schema_version != 2 {
            let found = manifest.schema_version;
            return Err(Error::new(
                Code::RegistryRefused,
                format!("the manifest of {from} has schema version {found}, expected 2"),
            ));
        }
        Ok(manifest)
    }

    /// Its bytes.
    ///
    /// # Errors
    /// `bad_params` if a size is beyond what JSON can say.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        to_canonical(self)
    }
}

impl Index {
    /// A list of these.
    pub fn new(manifests: Vec<Descriptor>) -> Self {
        Index { schema_version: 2, media_type: Some(INDEX.to_owned()), manifests, annotations: BTreeMap::new() }
    }
}

/// `sha256:<hex>` in documents.
pub(crate) mod prefixed {
    use serde::{Deserialize as _, Deserializer, Serializer};

    use crate::digest::BlobDigest;

    pub(crate) fn serialize<S: Serializer>(digest: &BlobDigest, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("sha256:{digest}"))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BlobDigest, D::Error> {
        let text = String::deserialize(deserializer)?;
        let parsed = text.strip_prefix("sha256:").and_then(|hex| hex.parse().ok());
        parsed.ok_or_else(|| serde::de::Error::custom(format!("'{}' is no sha256 digest", text.escape_debug())))
    }
}
