//! Checkpoints: safetensors files on disk, opened, checked and hashed.
//!
//! ```text
//! Checkpoint ── owns ──► SourceFile (open descriptor + FileIdentity), one per file
//!            ── owns ──► TensorName → SourceTensor { type, file number, offset }
//!            ── owns ──► config.json, if it lies beside the files
//! ```
//!
//! Everything in a checkpoint is untrusted. What holds once [`Checkpoint::open`]
//! has returned:
//!
//! - every file is a regular file that was opened without blocking, and its
//!   header describes every one of its bytes ([`header`]);
//! - every name is a valid [`TensorName`] and stands in exactly one file;
//! - every tensor lies within its file as the file was when it was opened;
//! - a later change of a file gives it another [`FileIdentity`] (`file.rs` says
//!   how that is made sure).
//!
//! Files are read with `pread` and never mapped, so a file that shrinks under
//! the reader is a `source_changed` and not a signal.
//!
//! Shards that this program wrote are ordinary checkpoints: their filler
//! tensors (U8, named `__pad__.<number>`) are left out when they are read. Any
//! other name that begins so is a `bad_tensor_name`.

mod config;
mod digests;
mod file;
pub mod header;
mod index;
mod layout;

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod mutations;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use digests::{DigestCache, NoCache, SourceDigests, source_digests};
pub use file::{FileIdentity, SourceFile};
pub use index::{Index, parse as parse_index};

use crate::error::{Code, Error, Result};
use crate::tensor::{TensorName, TensorType};

/// A checkpoint whose files are open and whose headers have been checked.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    files: Vec<SourceFile>,
    tensors: BTreeMap<TensorName, SourceTensor>,
    tensor_bytes: u64,
    config: Option<serde_json::Value>,
}

/// Where a tensor lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceTensor {
    /// Element type and shape.
    pub tensor: TensorType,
    /// Position in [`Checkpoint::files`].
    pub file: usize,
    /// First byte, from the beginning of the file.
    pub offset: u64,
}

impl Checkpoint {
    /// Opens a `.safetensors` file, or a directory of them.
    ///
    /// In a directory with exactly one `*.safetensors.index.json` these are the
    /// files that the index names; without one, all `*.safetensors`, whose
    /// tensor names must be disjoint. Names that begin with a dot are passed
    /// over, symbolic links are followed. `config.json` is taken from the
    /// directory, or from beside the file.
    ///
    /// A file that was changed a moment ago is waited for, a few dozen
    /// milliseconds, until a further change would be seen in its timestamps.
    ///
    /// # Errors
    /// `checkpoint_invalid`, `bad_tensor_name`; `source_changed` if a file is
    /// being written; `io_error`.
    pub fn open(path: &Path) -> Result<Self> {
        let found = layout::find(path)?;
        let mut checkpoint = Checkpoint {
            path: path.to_path_buf(),
            files: Vec::with_capacity(found.files.len()),
            tensors: BTreeMap::new(),
            tensor_bytes: 0,
            config: config::read(&found.folder)?,
        };
        for path in found.files {
            checkpoint.add_file(path)?;
        }
        if let Some((index_path, index)) = &found.index {
            checkpoint.check_index(index).map_err(|e| e.context(format_args!("{index_path:?}")))?;
        }
        Ok(checkpoint)
    }

    /// Where it was opened, as the caller named it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its files, ascending by name.
    pub fn files(&self) -> &[SourceFile] {
        &self.files
    }

    /// Its tensors.
    pub fn tensors(&self) -> &BTreeMap<TensorName, SourceTensor> {
        &self.tensors
    }

    /// `config.json`: an object. `None` if there is no such file.
    pub fn config(&self) -> Option<&serde_json::Value> {
        self.config.as_ref()
    }

    /// Bytes of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensor_bytes
    }

    fn add_file(&mut self, path: PathBuf) -> Result<()> {
        let file = SourceFile::open(path)?;
        let header = header::read(&file)?;
        file.check_unchanged()?;
        let number = self.files.len();
        self.files.push(file);
        for (name, place) in header.tensors {
            self.tensor_bytes += place.tensor.len_bytes();
            let tensor = SourceTensor { tensor: place.tensor, file: number, offset: place.offset };
            if let Some(other) = self.tensors.insert(name.clone(), tensor) {
                return Err(Error::new(
                    Code::CheckpointInvalid,
                    format!(
                        "the tensor '{name}' is in two files, {:?} and {:?}",
                        self.files[other.file].path(),
                        self.files[number].path(),
                    ),
                )
                .hint("take one of the files away, or add the index that says which one counts"));
            }
        }
        Ok(())
    }

    /// The index and the headers must say the same.
    fn check_index(&self, index: &Index) -> Result<()> {
        let damaged = |message: String| {
            Err(Error::new(Code::CheckpointInvalid, message)
                .hint("the files and the index are of different checkpoints, or one is damaged: fetch them again"))
        };
        let file_name = |tensor: &SourceTensor| self.files[tensor.file].path().file_name().and_then(|n| n.to_str());
        for (name, file) in &index.weight_map {
            match self.tensors.get(name) {
                None => return damaged(format!("the index says that '{name}' is in {file:?}, but it is not")),
                Some(tensor) if file_name(tensor) != Some(file) => {
                    let found = self.files[tensor.file].path();
                    return damaged(format!("the index says that '{name}' is in {file:?}, but it is in {found:?}"));
                }
                Some(_) => {}
            }
        }
        for (name, tensor) in &self.tensors {
            if !index.weight_map.contains_key(name) {
                let found = self.files[tensor.file].path();
                return damaged(format!("the tensor '{name}' is in {found:?}, but the index does not list it"));
            }
        }
        Ok(())
    }
}

/// An excerpt of `text` that is fit for a message: bounded and without control
/// characters.
fn excerpt(text: &str) -> String {
    const SHOWN_CHARS: usize = 120;
    let mut shown: String = text.chars().take(SHOWN_CHARS).flat_map(char::escape_debug).collect();
    if text.chars().nth(SHOWN_CHARS).is_some() {
        shown.push('…');
    }
    shown
}

/// What `serde_json` has to say, as part of a message.
fn json_problem(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    let what = text.strip_suffix(&place).unwrap_or(&text);
    format!("{}{place}", what.chars().filter(|c| !c.is_control()).take(300).collect::<String>())
}
