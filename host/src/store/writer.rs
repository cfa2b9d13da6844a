//! Writing a shard: bytes in file order, hashed while they are hot.
//!
//! One thread at a time owns a [`ShardWriter`]. It writes the header and the
//! fillers itself; the executor hands it the tensors' bytes, in pieces of any
//! size. Large pieces go straight from the caller's buffer to `pwrite`, small
//! ones are gathered first, so that a shard of thousands of small tensors is
//! not thousands of system calls. Each byte is hashed twice in passing: for the
//! file's SHA-256 and for its tensor's leaves (unless the caller brings the leaf
//! hashes, computed on another core).

use std::fmt;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::document::ShardRecord;
use super::publication::Workspace;
use super::shard::ShardLayout;
use super::storage::{failed, write_full};
use crate::digest::{BlobDigest, LeafHasher, TensorDigest};
use crate::error::{Error, Result};
use crate::tensor::TensorName;

/// Pieces of at least this size are written without being copied.
const DIRECT_BYTES: usize = 256 << 10;
/// What is gathered before it is written.
const BUFFER_BYTES: usize = 1 << 20;
/// The permission bits of blobs: nobody writes to them, everybody may read.
pub(crate) const BLOB_MODE: u32 = 0o444;

/// Writes one shard of a [`Publication`](super::Publication).
pub struct ShardWriter {
    work: Arc<Workspace>,
    layout: ShardLayout,
    path: PathBuf,
    file: File,
    hash: Sha256,
    /// What is hashed but not written yet; it ends at `at`.
    buffer: Vec<u8>,
    /// The next byte in the file.
    at: u64,
    /// The tensor that is being written.
    current: usize,
    leaves: LeafHasher,
    leaf_list: Vec<u8>,
    tensors: Vec<FinishedTensor>,
}

/// A shard that is written and synced, but not published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FinishedShard {
    /// For the entry document.
    pub record: ShardRecord,
    /// Its tensors, in file order.
    pub tensors: Vec<FinishedTensor>,
}

/// A tensor of a finished shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FinishedTensor {
    /// Its name.
    pub name: TensorName,
    /// The digest of its bytes.
    pub digest: TensorDigest,
    /// First byte in the file.
    pub offset: u64,
}

impl fmt::Debug for ShardWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardWriter").field("path", &self.path).field("at", &self.at).finish_non_exhaustive()
    }
}

impl ShardWriter {
    pub(crate) fn create(work: Arc<Workspace>, layout: ShardLayout) -> Result<Self> {
        let (path, file) = work.create("shard")?;
        let mut writer = ShardWriter {
            work,
            path,
            file,
            hash: Sha256::new(),
            buffer: Vec::new(),
            at: 0,
            current: 0,
            leaves: LeafHasher::default(),
            leaf_list: Vec::with_capacity(layout.leaf_list_bytes() as usize),
            tensors: Vec::with_capacity(layout.tensors().len()),
            layout,
        };
        let header = writer.layout.header().to_vec();
        writer.put(&header)?;
        Ok(writer)
    }

    /// What is being written.
    pub fn layout(&self) -> &ShardLayout {
        &self.layout
    }

    /// Appends the next bytes of a tensor, which is the current one or, once
    /// that is complete, a later one after only empty ones. `leaf_hashes` are
    /// those of `bytes`, used where these begin on a leaf's boundary of the
    /// tensor and end on one or at its end.
    ///
    /// # Errors
    /// `io_error`, `insufficient_disk`; `io_error` too if the bytes are not
    /// the next ones.
    pub fn tensor(&mut self, index: usize, bytes: &[u8], leaf_hashes: Option<&[u8]>) -> Result<()> {
        while self.current < index {
            self.close_tensor()?;
        }
        let Some(tensor) = self.layout.tensors().get(index).filter(|_| self.current == index) else {
            return Err(
                self.misuse(format!("the bytes are of tensor {index}, the next are of tensor {}", self.current))
            );
        };
        let (offset, end) = (tensor.offset, tensor.end());
        self.pad_to(offset)?;
        let after = self.at + bytes.len() as u64;
        if after > end {
            return Err(self.misuse(format!("tensor {index} has {} bytes too many", after - end)));
        }
        let known = leaf_hashes.is_some_and(|hashes| self.leaves.append_leaves(bytes.len() as u64, hashes).is_some());
        if !known {
            self.leaves.update(bytes);
        }
        self.put(bytes)
    }

    /// Ends the shard: writes what is gathered, syncs the file and its leaf
    /// list, and makes both known to the publication. Syncing here and not in
    /// the commit lets the disk write one shard while others are computed, on
    /// the thread that produced it.
    ///
    /// # Errors
    /// `io_error`, `insufficient_disk`; `io_error` too if bytes are missing.
    pub fn finish(mut self) -> Result<FinishedShard> {
        while self.current < self.layout.tensors().len() {
            self.close_tensor()?;
        }
        self.flush()?;
        self.work.seal(&self.file, &self.path)?;
        let leaves = BlobDigest::of(&self.leaf_list);
        let leaves_path = self.work.write("leaves", &self.leaf_list)?;
        let record = ShardRecord {
            digest: BlobDigest::from_bytes(self.hash.finalize().into()),
            size: self.at,
            leaves,
            leaves_size: self.leaf_list.len() as u64,
        };
        let shard = FinishedShard { record, tensors: self.tensors };
        self.work.finished(shard.clone(), self.layout, self.path, leaves_path);
        Ok(shard)
    }

    fn close_tensor(&mut self) -> Result<()> {
        let Some(tensor) = self.layout.tensors().get(self.current) else {
            return Err(self.misuse(format!("there is no tensor {}", self.current)));
        };
        let (name, offset, end) = (tensor.name.clone(), tensor.offset, tensor.end());
        self.pad_to(offset)?;
        if self.at != end {
            return Err(self.misuse(format!("tensor '{name}' lacks {} bytes", end - self.at)));
        }
        let (digest, leaves) = std::mem::take(&mut self.leaves).finish();
        self.leaf_list.extend_from_slice(&leaves);
        self.tensors.push(FinishedTensor { name, digest, offset });
        self.current += 1;
        Ok(())
    }

    /// Writes the filler before a tensor, if it is not written yet.
    fn pad_to(&mut self, offset: u64) -> Result<()> {
        let missing = offset.saturating_sub(self.at) as usize;
        self.put(&[0; super::shard::TENSOR_ALIGNMENT_BYTES as usize][..missing])
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        if bytes.len() >= DIRECT_BYTES {
            self.flush()?;
            self.write(bytes, self.at)?;
        } else {
            self.buffer.extend_from_slice(bytes);
        }
        self.at += bytes.len() as u64;
        if self.buffer.len() >= BUFFER_BYTES { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<()> {
        let buffer = std::mem::take(&mut self.buffer);
        self.write(&buffer, self.at - buffer.len() as u64)?;
        self.buffer = buffer;
        self.buffer.clear();
        Ok(())
    }

    fn write(&self, bytes: &[u8], at: u64) -> Result<()> {
        write_full(&*self.work.inner.storage, &self.file, bytes, at).map_err(|e| failed("write", &self.path, &e))
    }

    fn misuse(&self, what: String) -> Error {
        Error::io(format_args!("writing the shard {}", self.path.display()), what)
    }
}
