//! The action: everything that determines an entry, known before any tensor
//! is loaded. Its SHA-256 is the key.
//!
//! In it: the versions of everything that could change a byte, every
//! application with its module's digest, parameters and inputs' digests, what
//! passes through, names, ties, blocks, the layout policy, tensor parallel
//! size and rank, and the recipe's guards. Never in it: paths, file names, how
//! the source is split into files, devices, threads, tile size, engine, time.
//! Plans are not in it either: they are functions of what is.
//!
//! The same construction for one block gives the block's action. It leaves out
//! what does not determine the block's bytes (size and rank where no module
//! uses them, guards, other blocks), so that blocks are shared between entries.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use weightmill_guest::abi::{ABI_VERSION, Dtype, Tp};

use crate::canonical::to_canonical;
use crate::digest::{ActionKey, ApplicationDigest, BlockKey, ModuleDigest, RecordDigest, TensorDigest};
use crate::error::{Code, Error, Result};
use crate::recipe::{Application, Origin, Resolution};
use crate::tensor::{TensorName, TensorType};

/// Version of the determinism profile.
const DETERMINISM: u32 = 1;
/// Version of the meaning of views.
const VIEW: u32 = 1;
/// Version of the shard writer's layout.
const LAYOUT: u32 = 1;

/// The versions that are part of every key, for what must not outlive them:
/// ABI, determinism profile, views, shard layout.
pub const VERSIONS: [u32; 4] = [ABI_VERSION, DETERMINISM, VIEW, LAYOUT];

/// The identity of the module behind an application.
#[derive(Clone, Copy, Debug)]
pub struct ModuleIdentity {
    /// SHA-256 of its bytes.
    pub digest: ModuleDigest,
    /// Whether its plans depend on tensor parallelism.
    pub uses_tp: bool,
}

/// A source tensor's identity.
#[derive(Clone, Debug)]
pub struct SourceIdentity {
    /// What it is.
    pub tensor: TensorType,
    /// Its digest.
    pub digest: TensorDigest,
}

/// An action: the key, the bytes that it is the hash of, and the blocks' own.
#[derive(Clone, Debug)]
pub struct Action {
    /// SHA-256 of `canonical`.
    pub key: ActionKey,
    /// The action's canonical JSON.
    pub canonical: Vec<u8>,
    /// One for each block, in stream order.
    pub blocks: Vec<BlockKey>,
    /// One for each application.
    pub applications: Vec<ApplicationDigest>,
}

#[derive(Serialize)]
struct ActionDocument<'a> {
    schema: &'static str,
    #[serde(flatten)]
    versions: Versions<'a>,
    tp: Tp,
    applications: BTreeMap<String, &'a ApplicationDocument<'a>>,
    tensors: Vec<TensorDocument<'a>>,
    aliases: Vec<AliasDocument<'a>>,
    blocks: Vec<BlockDocument<'a>>,
    max_shard: u64,
    guards: &'a BTreeMap<String, String>,
}

#[derive(Serialize)]
struct BlockActionDocument<'a> {
    schema: &'static str,
    #[serde(flatten)]
    versions: Versions<'a>,
    applications: BTreeMap<String, &'a ApplicationDocument<'a>>,
    tensors: Vec<TensorDocument<'a>>,
    max_shard: u64,
}

#[derive(Clone, Copy, Serialize)]
struct Versions<'a> {
    abi: u32,
    determinism: u32,
    view: u32,
    layout: u32,
    salt: &'a str,
}

#[derive(Serialize)]
struct ApplicationDocument<'a> {
    module: ModuleDigest,
    params: &'a serde_json::Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    tp: Option<Tp>,
    inputs: Vec<InputDocument<'a>>,
    outputs: Vec<&'a str>,
}

#[derive(Serialize)]
struct InputDocument<'a> {
    role: &'a str,
    index: u64,
    #[serde(flatten)]
    from: FromDocument<'a>,
}

#[derive(Serialize)]
struct TensorDocument<'a> {
    name: &'a TensorName,
    #[serde(flatten)]
    from: FromDocument<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum FromDocument<'a> {
    Source { dtype: Dtype, shape: &'a [u64], digest: TensorDigest },
    Output { application: ApplicationDigest, output: &'a str },
}

#[derive(Serialize)]
struct AliasDocument<'a> {
    name: &'a TensorName,
    of: &'a TensorName,
}

#[derive(Serialize)]
struct BlockDocument<'a> {
    name: &'a str,
    tensors: &'a [TensorName],
}

/// What `tp` an application's module is given: none unless the module declares
/// that it uses it and the step does not turn it off.
pub fn effective_tp(application: &Application, module: ModuleIdentity, tp: Tp) -> Tp {
    if module.uses_tp && application.tp { tp } else { Tp::ONE }
}

/// Builds the action. `modules` has one identity for each application; `salt`
/// is empty but for tests and forced rebuilds.
///
/// # Errors
/// `bad_params` if a parameter has no canonical form; `checkpoint_invalid` if
/// a source has no digest.
pub fn build(
    resolution: &Resolution,
    modules: &[ModuleIdentity],
    sources: &BTreeMap<TensorName, SourceIdentity>,
    tp: Tp,
    salt: &str,
) -> Result<Action> {
    let versions = Versions { abi: ABI_VERSION, determinism: DETERMINISM, view: VIEW, layout: LAYOUT, salt };
    let mut documents: Vec<ApplicationDocument<'_>> = Vec::new();
    let mut digests: Vec<ApplicationDigest> = Vec::new();
    for (application, module) in resolution.applications.iter().zip(modules) {
        let inputs = application.inputs.iter().map(|input| {
            let from = from(&input.origin, sources, &digests)?;
            Ok(InputDocument { role: &input.role, index: input.index, from })
        });
        let document = ApplicationDocument {
            module: module.digest,
            params: &application.params,
            tp: (module.uses_tp && application.tp).then_some(tp),
            inputs: inputs.collect::<Result<_>>()?,
            outputs: application.outputs.iter().map(|o| o.role.as_str()).collect(),
        };
        digests.push(ApplicationDigest::of(&to_canonical(&document)?));
        documents.push(document);
    }
    let max_shard = resolution.layout.max_shard_bytes;
    let tensor = |name, origin| Ok(TensorDocument { name, from: from(origin, sources, &digests)? });
    let listed = |wanted: &BTreeSet<usize>| wanted.iter().map(|&i| (digests[i].to_string(), &documents[i])).collect();

    let mut blocks = Vec::new();
    for block in &resolution.blocks {
        let names = block.tensors.iter();
        let origins = names.map(|name| (name, &resolution.tensors[name])).collect::<Vec<_>>();
        let document = BlockActionDocument {
            schema: "weightmill block v1",
            versions,
            applications: listed(&reachable(resolution, origins.iter().map(|(_, origin)| *origin))),
            tensors: origins.iter().map(|(name, origin)| tensor(*name, *origin)).collect::<Result<_>>()?,
            max_shard,
        };
        blocks.push(BlockKey::of(&to_canonical(&document)?));
    }
    let document = ActionDocument {
        schema: "weightmill action v1",
        versions,
        tp,
        applications: listed(&reachable(resolution, resolution.tensors.values())),
        tensors: resolution.tensors.iter().map(|(name, origin)| tensor(name, origin)).collect::<Result<_>>()?,
        aliases: resolution.aliases.iter().map(|(name, of)| AliasDocument { name, of }).collect(),
        blocks: resolution.blocks.iter().map(|b| BlockDocument { name: &b.name, tensors: &b.tensors }).collect(),
        max_shard,
        guards: &resolution.guards,
    };
    let canonical = to_canonical(&document)?;
    Ok(Action { key: ActionKey::of(&canonical), canonical, blocks, applications: digests })
}

fn from<'a>(
    origin: &'a Origin,
    sources: &'a BTreeMap<TensorName, SourceIdentity>,
    digests: &[ApplicationDigest],
) -> Result<FromDocument<'a>> {
    Ok(match origin {
        Origin::Source(name) => {
            let source = sources.get(name).ok_or_else(|| {
                Error::new(Code::CheckpointInvalid, format!("the source tensor {name} has no digest"))
            })?;
            FromDocument::Source { dtype: source.tensor.dtype(), shape: source.tensor.shape(), digest: source.digest }
        }
        Origin::Output { application, role } => {
            FromDocument::Output { application: digests[*application], output: role }
        }
    })
}

/// The applications that `origins` come from, directly or through others.
pub fn reachable<'a>(resolution: &Resolution, origins: impl Iterator<Item = &'a Origin>) -> BTreeSet<usize> {
    let mut found = BTreeSet::new();
    let mut open: Vec<usize> = Vec::new();
    let application = |origin: &Origin| match origin {
        Origin::Output { application, .. } => Some(*application),
        Origin::Source(_) => None,
    };
    open.extend(origins.filter_map(application));
    while let Some(next) = open.pop() {
        if found.insert(next) {
            open.extend(resolution.applications[next].inputs.iter().filter_map(|i| application(&i.origin)));
        }
    }
    found
}

/// The name of the record that holds an application's facts: what its plan
/// says about dtypes and shapes, a function of metadata only.
///
/// # Errors
/// `bad_params` if a parameter has no canonical form.
pub fn facts_key(
    module: ModuleIdentity,
    params: &serde_json::Value,
    tp: Tp,
    inputs: &[super::Input<'_>],
    outputs: &[String],
) -> Result<RecordDigest> {
    #[derive(Serialize)]
    struct FactsDocument<'a> {
        schema: &'static str,
        abi: u32,
        module: ModuleDigest,
        params: &'a serde_json::Value,
        tp: Tp,
        inputs: Vec<(&'a str, u64, Dtype, &'a [u64])>,
        outputs: &'a [String],
    }
    let inputs = inputs.iter().map(|(role, index, t)| (*role, *index, t.dtype(), t.shape())).collect();
    let document = FactsDocument {
        schema: "weightmill facts v1",
        abi: ABI_VERSION,
        module: module.digest,
        params,
        tp,
        inputs,
        outputs,
    };
    Ok(RecordDigest::of(&to_canonical(&document)?))
}
