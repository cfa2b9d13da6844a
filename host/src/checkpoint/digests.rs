//! Tensor digests of a whole checkpoint, on all cores and with bounded memory.
//!
//! Tensors are taken in the order in which they lie in their files, in batches
//! of [`BATCH_BYTES`] (a larger tensor is a batch of its own). A batch is cut
//! into pieces of [`PIECE_BYTES`], whole numbers of leaves, and the pool's
//! threads take the pieces, so that one large tensor keeps all of them busy as
//! well as many small ones do. Each thread reads into a buffer of its own; a
//! piece's leaf hashes go straight to their place in the batch's leaf list.
//! What is held is threads × piece, plus 0.2 % of a batch.
//!
//! Digests of a file that has not changed come from a [`DigestCache`]. A
//! record is only ever written for a file that was the same before and after
//! it was hashed, and only taken for a file that is the same now.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

use super::{Checkpoint, FileIdentity, SourceFile, SourceTensor};
use crate::digest::{HASH_BYTES, LEAF_BYTES, TensorDigest, leaf_count, sha256, tensor_digest};
use crate::error::{Code, Error, Result};
use crate::progress::Progress;
use crate::tensor::TensorName;

/// What a thread reads and hashes at a time: 64 leaves.
const PIECE_BYTES: usize = 64 * LEAF_BYTES;
/// Large enough that the threads wait for each other rarely, small enough that
/// the leaf hashes of a batch are a few MiB.
const BATCH_BYTES: u64 = 2 << 30;
/// The same for tensors of few bytes.
const BATCH_TENSORS: usize = 1 << 16;

/// Remembers the digests of a file's tensors.
///
/// Both calls are best effort: a cache that cannot be read has nothing, one
/// that cannot be written keeps nothing.
pub trait DigestCache: Sync {
    /// What is known about exactly this file.
    fn load(&self, file: &FileIdentity) -> Option<BTreeMap<TensorName, TensorDigest>>;
    /// Keeps what was found out about it.
    fn save(&self, file: &FileIdentity, digests: &BTreeMap<TensorName, TensorDigest>);
}

/// Remembers nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoCache;

impl DigestCache for NoCache {
    fn load(&self, _: &FileIdentity) -> Option<BTreeMap<TensorName, TensorDigest>> {
        None
    }

    fn save(&self, _: &FileIdentity, _: &BTreeMap<TensorName, TensorDigest>) {}
}

/// The digests of a checkpoint's tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceDigests {
    /// Every tensor's.
    pub by_name: BTreeMap<TensorName, TensorDigest>,
    /// Bytes of tensors that were read for it: 0 if all were in the cache.
    pub bytes_read: u64,
}

/// A tensor that is to be hashed.
type Named<'c> = (&'c TensorName, &'c SourceTensor);

/// Takes the digests of all tensors, from the cache where it knows a file.
///
/// # Errors
/// `source_changed`, `io_error`, or `interrupted` if `progress` says so.
pub fn source_digests(
    checkpoint: &Checkpoint,
    cache: &dyn DigestCache,
    pool: &rayon::ThreadPool,
    progress: &dyn Progress,
) -> Result<SourceDigests> {
    let mut result = SourceDigests { by_name: BTreeMap::new(), bytes_read: 0 };
    let mut unknown: Vec<(&SourceFile, Vec<Named<'_>>)> = Vec::new();
    for (file, tensors) in checkpoint.files().iter().zip(tensors_by_file(checkpoint)) {
        file.check_unchanged()?;
        match load(cache, file, &tensors) {
            Some(known) => result.by_name.extend(known),
            None => unknown.push((file, tensors)),
        }
    }
    result.bytes_read = unknown.iter().flat_map(|(_, tensors)| tensors).map(|(_, t)| t.tensor.len_bytes()).sum();
    if result.bytes_read > 0 {
        progress.stage("hashing the source", result.bytes_read);
    }

    let hasher = Hasher::new(checkpoint.files(), pool, progress);
    let all: Vec<Named<'_>> = unknown.iter().flat_map(|(_, tensors)| tensors).copied().collect();
    let mut hashed = BTreeMap::new();
    let mut waiting = unknown.iter().peekable();
    for batch in batches(&all) {
        hashed.extend(batch.iter().map(|(name, _)| (*name).clone()).zip(hasher.hash(batch)?));
        // Kept file by file, so that a run that is stopped has not been in vain.
        while let Some((file, tensors)) = waiting.next_if(|(_, tensors)| is_done(tensors, &hashed)) {
            finish(cache, file, tensors, &hashed)?;
        }
    }
    waiting.try_for_each(|(file, tensors)| finish(cache, file, tensors, &hashed))?;
    result.by_name.append(&mut hashed);
    Ok(result)
}

/// The tensors of each file, ascending by offset.
fn tensors_by_file(checkpoint: &Checkpoint) -> Vec<Vec<Named<'_>>> {
    let mut by_file = vec![Vec::new(); checkpoint.files().len()];
    for (name, tensor) in checkpoint.tensors() {
        by_file[tensor.file].push((name, tensor));
    }
    by_file.iter_mut().for_each(|tensors| tensors.sort_by_key(|(_, tensor)| tensor.offset));
    by_file
}

/// A record that lists other tensors than the file has is not about this file.
fn load(
    cache: &dyn DigestCache,
    file: &SourceFile,
    tensors: &[Named<'_>],
) -> Option<BTreeMap<TensorName, TensorDigest>> {
    let known = file.is_cacheable().then(|| cache.load(file.identity()))??;
    let complete = known.len() == tensors.len() && tensors.iter().all(|(name, _)| known.contains_key(*name));
    complete.then_some(known)
}

/// Whether all tensors of a file are hashed: they are hashed in their order.
fn is_done(tensors: &[Named<'_>], hashed: &BTreeMap<TensorName, TensorDigest>) -> bool {
    tensors.last().is_none_or(|(name, _)| hashed.contains_key(*name))
}

/// The file's digests are known; they count if it is still the same file.
fn finish(
    cache: &dyn DigestCache,
    file: &SourceFile,
    tensors: &[Named<'_>],
    hashed: &BTreeMap<TensorName, TensorDigest>,
) -> Result<()> {
    file.check_unchanged()?;
    if file.is_cacheable() {
        cache.save(file.identity(), &tensors.iter().map(|(name, _)| ((*name).clone(), hashed[*name])).collect());
    }
    Ok(())
}

/// Cuts the list so that a batch has at least one tensor, and more only within
/// the limits.
fn batches<'a, 'c>(mut tensors: &'a [Named<'c>]) -> impl Iterator<Item = &'a [Named<'c>]> {
    std::iter::from_fn(move || {
        let mut bytes = 0_u64;
        let fits = |(_, tensor): &&Named<'_>| {
            bytes = bytes.saturating_add(tensor.tensor.len_bytes());
            bytes <= BATCH_BYTES
        };
        let count = tensors.iter().take(BATCH_TENSORS).take_while(fits).count().max(1);
        let (batch, rest) = tensors.split_at_checked(count)?;
        tensors = rest;
        Some(batch)
    })
}

struct Hasher<'c> {
    files: &'c [SourceFile],
    pool: &'c rayon::ThreadPool,
    progress: &'c dyn Progress,
    /// One for each of the pool's threads; never contended.
    buffers: Vec<Mutex<Vec<u8>>>,
}

/// Part of a tensor, and where its leaf hashes go.
struct Piece<'b> {
    file: usize,
    offset: u64,
    len: usize,
    hashes: &'b mut [u8],
}

impl<'c> Hasher<'c> {
    fn new(files: &'c [SourceFile], pool: &'c rayon::ThreadPool, progress: &'c dyn Progress) -> Self {
        let buffers = (0..pool.current_num_threads()).map(|_| Mutex::new(Vec::new())).collect();
        Hasher { files, pool, progress, buffers }
    }

    /// The digests of some tensors, in their order.
    fn hash(&self, batch: &[Named<'_>]) -> Result<Vec<TensorDigest>> {
        let hash_bytes = |(_, t): &Named<'_>| leaf_count(t.tensor.len_bytes()) as usize * HASH_BYTES;
        let mut hashes = vec![0; batch.iter().map(hash_bytes).sum()];
        let mut pieces = Vec::new();
        let mut free = &mut hashes[..];
        for (_, tensor) in batch {
            let (mut offset, end) = (tensor.offset, tensor.offset + tensor.tensor.len_bytes());
            while offset < end {
                let len = (end - offset).min(PIECE_BYTES as u64) as usize;
                let (own, rest) = free.split_at_mut(len.div_ceil(LEAF_BYTES) * HASH_BYTES);
                pieces.push(Piece { file: tensor.file, offset, len, hashes: own });
                (offset, free) = (offset + len as u64, rest);
            }
        }
        self.pool.install(|| pieces.into_par_iter().try_for_each(|piece| self.hash_piece(piece)))?;

        let mut rest = &hashes[..];
        let lists: Vec<(u64, &[u8])> = batch
            .iter()
            .map(|named| {
                let (own, behind) = rest.split_at(hash_bytes(named));
                rest = behind;
                (named.1.tensor.len_bytes(), own)
            })
            .collect();
        Ok(self.pool.install(|| lists.into_par_iter().map(|(len, list)| tensor_digest(len, list)).collect()))
    }

    fn hash_piece(&self, piece: Piece<'_>) -> Result<()> {
        if self.progress.cancelled() {
            return Err(Error::new(Code::Interrupted, "stopped while the source was hashed"));
        }
        // Outside of the pool there is no thread number; any buffer will do.
        let thread = self.pool.current_thread_index().unwrap_or(0);
        let mut buffer = self.buffers[thread].lock().unwrap_or_else(PoisonError::into_inner);
        buffer.resize(PIECE_BYTES, 0);
        let bytes = &mut buffer[..piece.len];
        self.files[piece.file].read_exact_at(bytes, piece.offset)?;
        for (leaf, hash) in bytes.chunks(LEAF_BYTES).zip(piece.hashes.chunks_exact_mut(HASH_BYTES)) {
            hash.copy_from_slice(&sha256(leaf));
        }
        self.progress.advance(piece.len as u64);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Dtype, TensorType};

    #[test]
    fn batches_keep_order_and_limits() {
        let sizes =
            [5, 0, BATCH_BYTES, 7 * BATCH_BYTES, 1, BATCH_BYTES - 1, 0, 1, BATCH_BYTES / 2, BATCH_BYTES / 2 + 1];
        let small = std::iter::repeat_n(0, BATCH_TENSORS + 1);
        let tensors: Vec<(TensorName, SourceTensor)> = sizes
            .into_iter()
            .chain(small)
            .enumerate()
            .map(|(number, len)| {
                let tensor = TensorType::new(Dtype::U8, vec![len]).unwrap();
                (TensorName::new(&number.to_string()).unwrap(), SourceTensor { tensor, file: 0, offset: 0 })
            })
            .collect();
        let named: Vec<Named<'_>> = tensors.iter().map(|(name, tensor)| (name, tensor)).collect();
        let cut: Vec<_> = batches(&named).collect();
        assert_eq!(cut.concat(), named);
        let lengths: Vec<usize> = cut.iter().map(|batch| batch.len()).collect();
        assert_eq!(lengths, [2, 1, 1, 3, 2, BATCH_TENSORS, 2]);
        assert_eq!(batches(&[]).count(), 0);
    }
}
