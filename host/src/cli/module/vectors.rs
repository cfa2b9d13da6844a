//! Golden vectors: what a module has to answer, as files.
//!
//! ```text
//! vectors/
//!   NAME/
//!     case.json              parameters, inputs, outputs, or the error
//!     input.safetensors      the tensors that go in
//!     expected.safetensors   the tensors that have to come out, named by role
//! ```
//!
//! ```json
//! {"params": {"dim": 0}, "tp": {"rank": 0, "size": 1},
//!  "inputs": {"w": "w", "list": ["first", "second"]}, "outputs": ["w"]}
//! ```
//!
//! `params` and `tp` may be left out. `inputs` gives each role a tensor of
//! `input.safetensors`, or a list of them. A case that has to be refused has
//! `"error": {"code": "bad_params", "message": "a part of it"}` and no
//! `expected.safetensors`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use weightmill_guest::abi::Tp;

use crate::checkpoint::Checkpoint;
use crate::error::{Code, Error, Result};
use crate::tensor::{TensorName, TensorType};

/// One vector, its files open.
pub(super) struct Vector {
    /// The folder's name.
    pub(super) name: String,
    pub(super) params: serde_json::Value,
    pub(super) tp: Tp,
    /// By role, then index.
    pub(super) inputs: Vec<VectorInput>,
    /// Sorted.
    pub(super) outputs: Vec<String>,
    pub(super) source: Arc<Checkpoint>,
    pub(super) expected: Expected,
    folder: PathBuf,
}

pub(super) struct VectorInput {
    pub(super) role: String,
    pub(super) index: u64,
    pub(super) name: TensorName,
}

/// What has to come of it.
pub(super) enum Expected {
    /// Tensors, named by role.
    Tensors(Checkpoint),
    /// An error of this code whose message contains the text.
    Error { code: Code, message: String },
    /// The author has not said yet.
    Unknown,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    #[serde(default = "no_params")]
    params: serde_json::Value,
    #[serde(default = "no_tp")]
    tp: Tp,
    inputs: BTreeMap<String, Names>,
    outputs: Vec<String>,
    error: Option<ErrorDocument>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a tensor's name or a list of names")]
enum Names {
    One(TensorName),
    List(Vec<TensorName>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ErrorDocument {
    code: String,
    #[serde(default)]
    message: String,
}

fn no_params() -> serde_json::Value {
    serde_json::json!({})
}

fn no_tp() -> Tp {
    Tp::ONE
}

/// Every vector in `folder`, ascending by name.
///
/// # Errors
/// `vector_invalid`, also if there is none; `checkpoint_invalid`; `io_error`.
pub(super) fn load(folder: &Path) -> Result<Vec<Vector>> {
    let entries = std::fs::read_dir(folder).map_err(|e| {
        Error::new(Code::VectorInvalid, format!("there are no vectors at {}: {e}", folder.display()))
            .hint("a vector is a folder with case.json, input.safetensors and expected.safetensors")
    })?;
    let mut folders = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| Error::io(format!("reading {}", folder.display()), e))?.path();
        if path.join("case.json").is_file() {
            folders.push(path);
        }
    }
    folders.sort();
    if folders.is_empty() {
        return Err(Error::new(Code::VectorInvalid, format!("{} holds no folder with a case.json", folder.display()))
            .hint("a vector is a folder with case.json, input.safetensors and expected.safetensors"));
    }
    folders.iter().map(|folder| Vector::load(folder)).collect()
}

impl Vector {
    fn load(folder: &Path) -> Result<Self> {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let path = folder.join("case.json");
        let invalid = |what: String| Error::new(Code::VectorInvalid, format!("{}: {what}", path.display()));
        let bytes = std::fs::read(&path).map_err(|e| Error::io(format!("reading {}", path.display()), e))?;
        let document: Document = serde_json::from_slice(&bytes).map_err(|e| {
            invalid(e.to_string())
                .hint("it has inputs (role to tensor) and outputs (roles), and may have params, tp and error")
        })?;
        if !document.params.is_object() {
            return Err(invalid("params is no object".into()));
        }
        if document.tp.rank >= document.tp.size {
            return Err(invalid(format!("there is no rank {} of {}", document.tp.rank, document.tp.size)));
        }
        let source = Checkpoint::open(&folder.join("input.safetensors"))?;
        let mut inputs = Vec::new();
        for (role, names) in document.inputs {
            let names = match names {
                Names::One(name) => vec![name],
                Names::List(names) => names,
            };
            for (index, name) in names.into_iter().enumerate() {
                if !source.tensors().contains_key(&name) {
                    return Err(invalid(format!(
                        "the role '{role}' names '{name}', which is not in input.safetensors"
                    )));
                }
                inputs.push(VectorInput { role: role.clone(), index: index as u64, name });
            }
        }
        let mut outputs = document.outputs;
        outputs.sort();
        outputs.dedup();
        let file = folder.join("expected.safetensors");
        let expected = match document.error {
            Some(error) => Expected::Error {
                code: *Code::ALL.iter().find(|code| code.as_str() == error.code).ok_or_else(|| {
                    invalid(format!("'{}' is no error code", error.code))
                        .hint("a module's refusals are bad_params, module_rejected_input and bad_data")
                })?,
                message: error.message,
            },
            None if !file.exists() => Expected::Unknown,
            None => {
                let expected = Checkpoint::open(&file)?;
                if let Some(role) = outputs.iter().find(|role| !expected.tensors().contains_key(role.as_str())) {
                    return Err(invalid(format!("expected.safetensors has no tensor for the output '{role}'")));
                }
                if let Some(name) = expected.tensors().keys().find(|name| !outputs.iter().any(|o| o == name.as_str())) {
                    return Err(invalid(format!("expected.safetensors has '{name}', which is no output of the case")));
                }
                Expected::Tensors(expected)
            }
        };
        Ok(Vector {
            name,
            params: document.params,
            tp: document.tp,
            inputs,
            outputs,
            source: Arc::new(source),
            expected,
            folder: folder.to_path_buf(),
        })
    }

    /// Bytes of all inputs.
    pub(super) fn input_bytes(&self) -> u64 {
        self.inputs.iter().map(|input| self.source.tensors()[&input.name].tensor.len_bytes()).sum()
    }

    /// Writes `expected.safetensors`.
    pub(super) fn write_expected(&self, outputs: &BTreeMap<String, (TensorType, Vec<u8>)>) -> Result<()> {
        write_safetensors(&self.folder.join("expected.safetensors"), outputs)
    }
}

/// Reads a tensor whole.
pub(super) fn read(checkpoint: &Checkpoint, name: &str) -> Result<(TensorType, Vec<u8>)> {
    let found = checkpoint.tensors().get(name);
    let source = found.ok_or_else(|| Error::new(Code::VectorInvalid, format!("there is no tensor '{name}'")))?;
    let too_large = || Error::new(Code::InsufficientMemory, format!("'{name}' does not fit into memory"));
    let mut bytes = vec![0; usize::try_from(source.tensor.len_bytes()).map_err(|_| too_large())?];
    checkpoint.files()[source.file].read_exact_at(&mut bytes, source.offset)?;
    Ok((source.tensor.clone(), bytes))
}

/// Writes a plain safetensors file.
pub(super) fn write_safetensors(path: &Path, tensors: &BTreeMap<String, (TensorType, Vec<u8>)>) -> Result<()> {
    let wrong = |e: String| Error::io(format!("writing {}", path.display()), e);
    let mut views = Vec::new();
    for (name, (tensor, bytes)) in tensors {
        let dtype: safetensors::Dtype =
            serde_json::from_value(tensor.dtype().as_str().into()).map_err(|e| wrong(e.to_string()))?;
        // In range: the tensor is in memory.
        let shape = tensor.shape().iter().map(|&extent| extent as usize).collect();
        let view = safetensors::tensor::TensorView::new(dtype, shape, bytes).map_err(|e| wrong(e.to_string()))?;
        views.push((name, view));
    }
    let bytes = safetensors::serialize(views, None).map_err(|e| wrong(e.to_string()))?;
    super::pack::write(path, &bytes)
}
