//! An action, read back.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use weightmill_guest::abi::{Dtype, Tp};

use crate::canonical::to_canonical;
use crate::digest::{ApplicationDigest, ModuleDigest, TensorDigest};
use crate::error::{Code, Error, Result};
use crate::tensor::TensorName;

/// The schema that [`crate::plan::action`] writes.
const SCHEMA: &str = "weightmill action v1";

/// What of an action explains a tensor.
#[derive(Debug, Deserialize)]
pub(super) struct ActionText {
    schema: String,
    applications: BTreeMap<ApplicationDigest, serde_json::Value>,
    tensors: Vec<TensorText>,
}

/// One application, as [`crate::plan::action`] writes it.
#[derive(Debug, Deserialize)]
pub(super) struct ApplicationText {
    pub(super) module: ModuleDigest,
    pub(super) params: serde_json::Value,
    #[serde(default)]
    pub(super) tp: Option<Tp>,
    pub(super) inputs: Vec<InputText>,
    pub(super) outputs: Vec<String>,
}

#[derive(Debug, Deserialize)]
pub(super) struct InputText {
    pub(super) role: String,
    pub(super) index: u64,
    #[serde(flatten)]
    pub(super) from: FromText,
}

#[derive(Debug, Deserialize)]
struct TensorText {
    name: TensorName,
    #[serde(flatten)]
    from: FromText,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub(super) enum FromText {
    Source { dtype: Dtype, shape: Vec<u64>, digest: TensorDigest },
    Output { application: ApplicationDigest, output: String },
}

impl ActionText {
    /// Reads the bytes of an action, which are known to hash to its key.
    pub(super) fn read(bytes: &[u8]) -> Result<Self> {
        let other = |what: String| {
            Error::new(Code::SourceUnavailable, format!("the entry's action cannot be read: {what}"))
                .hint("it was made by another version of this program: use that one")
        };
        let action: ActionText = serde_json::from_slice(bytes).map_err(|e| other(e.to_string()))?;
        if action.schema != SCHEMA {
            return Err(other(format!("expected '{SCHEMA}', found '{}'", action.schema.escape_debug())));
        }
        Ok(action)
    }

    /// An application, checked against its digest: so none can come from
    /// itself, whoever wrote the action.
    pub(super) fn application(&self, digest: &ApplicationDigest) -> Result<ApplicationText> {
        let wrong = |what: String| Error::new(Code::DigestMismatch, format!("the entry's action is wrong: {what}"));
        let value = self.applications.get(digest);
        let value = value.ok_or_else(|| wrong(format!("it has no application {digest}, which it refers to")))?;
        let found = ApplicationDigest::of(&to_canonical(value)?);
        if found != *digest {
            return Err(wrong(format!("the application {digest} hashes to {found}")));
        }
        ApplicationText::deserialize(value).map_err(|e| wrong(format!("application {digest}: {e}")))
    }

    /// The modules of all applications.
    pub(super) fn modules(&self) -> BTreeSet<ModuleDigest> {
        let digest = |value: &serde_json::Value| value["module"].as_str()?.parse().ok();
        self.applications.values().filter_map(digest).collect()
    }

    /// Where a final tensor comes from.
    pub(super) fn tensor(&self, name: &TensorName) -> Option<&FromText> {
        self.tensors.iter().find(|t| t.name == *name).map(|t| &t.from)
    }
}
