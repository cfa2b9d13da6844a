//! Source tensors, found in a checkpoint.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::explanation::SourceUse;
use crate::checkpoint::{Checkpoint, SourceTensor};
use crate::digest::{LeafHasher, TensorDigest};
use crate::error::{Code, Error, Result};
use crate::progress::Progress;
use crate::tensor::TensorName;

/// How much is read at once.
const CHUNK_BYTES: usize = 4 << 20;

/// Where a source tensor is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The name that it has there.
    pub name: TensorName,
    /// The file.
    pub file: PathBuf,
    /// Its first byte, from the beginning of the file.
    pub offset: u64,
}

/// Finds sources in a checkpoint: by name if that is known, else by content
/// (then the first of equal tensors). Their bytes are read and hashed.
///
/// # Errors
/// `source_unavailable` if one is not there or has other bytes;
/// `source_changed`, `io_error`, `interrupted`.
pub fn locate(checkpoint: &Checkpoint, sources: &[SourceUse], progress: &dyn Progress) -> Result<Vec<Found>> {
    let mut hashed: BTreeMap<&TensorName, TensorDigest> = BTreeMap::new();
    let mut digest = |name: &'_ TensorName| -> Result<TensorDigest> {
        let (name, tensor) = match checkpoint.tensors().get_key_value(name) {
            Some(found) => found,
            None => return Err(missing(checkpoint, &format!("no tensor '{name}'"))),
        };
        match hashed.get(name) {
            Some(digest) => Ok(*digest),
            None => Ok(*hashed.entry(name).or_insert(hash(checkpoint, tensor, progress)?)),
        }
    };
    let mut found = Vec::with_capacity(sources.len());
    for source in sources {
        let name = match &source.name {
            Some(name) => {
                let there = digest(name)?;
                let tensor = &checkpoint.tensors()[name].tensor;
                if (tensor, there) != (&source.tensor, source.digest) {
                    let what = format!(
                        "'{name}' as {tensor} with the digest {there}, the entry was made from {} with {}",
                        source.tensor, source.digest
                    );
                    return Err(missing(checkpoint, &what));
                }
                name.clone()
            }
            None => {
                let same_type = checkpoint.tensors().iter().filter(|(_, t)| t.tensor == source.tensor);
                let mut equal = None;
                for (name, _) in same_type {
                    if digest(name)? == source.digest {
                        equal = Some(name.clone());
                        break;
                    }
                }
                equal.ok_or_else(|| {
                    missing(checkpoint, &format!("no tensor {} with the digest {}", source.tensor, source.digest))
                })?
            }
        };
        let there = &checkpoint.tensors()[&name];
        let file = checkpoint.files()[there.file].path().to_path_buf();
        found.push(Found { name, file, offset: there.offset });
    }
    checkpoint.files().iter().try_for_each(|file| file.check_unchanged())?;
    Ok(found)
}

fn missing(checkpoint: &Checkpoint, what: &str) -> Error {
    Error::new(Code::SourceUnavailable, format!("{} has {what}", checkpoint.path().display()))
        .hint("name the checkpoint that the entry was made from: `weightmill store show` says what it was called")
}

fn hash(checkpoint: &Checkpoint, source: &SourceTensor, progress: &dyn Progress) -> Result<TensorDigest> {
    let mut hasher = LeafHasher::default();
    let len = source.tensor.len_bytes();
    // In range: a chunk at most.
    let mut buffer = vec![0; len.min(CHUNK_BYTES as u64) as usize];
    let mut at = 0;
    while at < len {
        if progress.cancelled() {
            return Err(Error::new(Code::Interrupted, "stopped while reading the sources"));
        }
        let chunk = &mut buffer[..(len - at).min(CHUNK_BYTES as u64) as usize];
        checkpoint.files()[source.file].read_exact_at(chunk, source.offset + at)?;
        hasher.update(chunk);
        at += chunk.len() as u64;
        progress.advance(chunk.len() as u64);
    }
    Ok(hasher.finish().0)
}
