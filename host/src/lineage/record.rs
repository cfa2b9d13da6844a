//! The names that an entry was made from.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::digest::{ApplicationDigest, ModuleDigest};
use crate::error::{Error, Result};
use crate::plan::action::Action;
use crate::recipe::{Origin, Resolution};
use crate::sandbox::Module;
use crate::tensor::TensorName;

/// The schema's name.
const SCHEMA: &str = "weightmill lineage v1";

/// What a build says about names: of sources, of intermediate tensors, of
/// modules. Nothing is hashed over it, and it is believed only as far as it
/// agrees with the action.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lineage {
    schema: String,
    /// Names and versions by digest.
    pub modules: BTreeMap<ModuleDigest, ModuleName>,
    /// In order of execution.
    pub applications: Vec<ApplicationRecord>,
    /// Where each final tensor comes from.
    pub tensors: BTreeMap<TensorName, OriginRecord>,
}

/// What a module calls itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModuleName {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
}

/// One use of a recipe's step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApplicationRecord {
    /// Which of the action's applications it is.
    pub digest: ApplicationDigest,
    /// The recipe's step, from 1.
    pub step: usize,
    /// The step's captures and their values.
    pub captures: Vec<(String, String)>,
    /// Where each input comes from, in the action's order.
    pub inputs: Vec<OriginRecord>,
    /// What the step called its outputs, before renaming, by role.
    pub outputs: BTreeMap<String, TensorName>,
}

/// Where a tensor comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum OriginRecord {
    /// The checkpoint.
    Source {
        /// The name that it has there.
        source: TensorName,
    },
    /// An output of an application.
    Output {
        /// Position in [`Lineage::applications`].
        application: usize,
        /// Its role.
        output: String,
    },
}

impl From<&Origin> for OriginRecord {
    fn from(origin: &Origin) -> Self {
        match origin {
            Origin::Source(name) => OriginRecord::Source { source: name.clone() },
            Origin::Output { application, role } => {
                OriginRecord::Output { application: *application, output: role.clone() }
            }
        }
    }
}

/// The record of a build, for its provenance's member `lineage`. `modules` has
/// one for each application.
///
/// # Errors
/// None that is known.
pub fn record(
    resolution: &Resolution,
    action: &Action,
    modules: &[std::sync::Arc<Module>],
) -> Result<serde_json::Value> {
    let named = modules.iter().map(|module| {
        let metadata = module.metadata();
        (module.digest(), ModuleName { name: metadata.name.clone(), version: metadata.version.clone() })
    });
    let applications =
        resolution.applications.iter().zip(&action.applications).map(|(application, digest)| ApplicationRecord {
            digest: *digest,
            step: application.step + 1,
            captures: application.captures.clone(),
            inputs: application.inputs.iter().map(|input| OriginRecord::from(&input.origin)).collect(),
            outputs: application.outputs.iter().map(|o| (o.role.clone(), o.name.clone())).collect(),
        });
    let lineage = Lineage {
        schema: SCHEMA.to_string(),
        modules: named.collect(),
        applications: applications.collect(),
        tensors: resolution.tensors.iter().map(|(name, origin)| (name.clone(), origin.into())).collect(),
    };
    serde_json::to_value(lineage).map_err(|e| Error::io("writing the lineage", e))
}

impl Lineage {
    /// Reads a record; `None` if it is not of this version.
    pub fn read(value: &serde_json::Value) -> Option<Self> {
        Lineage::deserialize(value).ok().filter(|lineage| lineage.schema == SCHEMA)
    }
}
