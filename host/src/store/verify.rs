//! Verification: are the bytes of a shard what the entry says?
//!
//! A shard's leaf list is checked against its own digest first, then every
//! leaf of the file against the list, in parallel over pieces of 64 leaves, so
//! that one large tensor keeps all cores as busy as many small ones. Header and
//! fillers are compared with what the layout gives. Together that is every
//! byte of the file. Bytes are read with `pread` into a buffer for each thread:
//! a file that was truncated is a finding, not a signal.
//!
//! What was verified is remembered until the next boot in `state/first/`, by
//! blob, device, inode, size and change time, for all processes: what `first`
//! trusts is that the page cache and the disk do not rot while the machine
//! runs. A blob's change time moves whenever anybody writes to it, links it or
//! changes its mode, and then it is verified again.

use std::cell::RefCell;
use std::fs::{File, Metadata};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::Inner;
use super::document::ShardRecord;
use super::records::Kind;
use super::shard::ShardLayout;
use super::storage::{Storage, read_twice};
use crate::digest::{BlobDigest, HASH_BYTES, LEAF_BYTES, sha256};
use crate::error::{Code, Error, Result};
use crate::progress::Progress;

/// What a thread reads and hashes at a time.
const PIECE_BYTES: u64 = 64 * LEAF_BYTES as u64;

/// When the bytes of an entry are verified. Its structure always is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Verify {
    /// At every lease.
    Always,
    /// Once for each blob and boot.
    #[default]
    First,
    /// Never.
    Never,
}

/// What a shard was when it was verified, and by which leaf list: another one
/// says nothing about it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FirstRecord {
    digest: BlobDigest,
    leaves: BlobDigest,
    device: u64,
    inode: u64,
    size_bytes: u64,
    changed: (i64, i64),
    boot: String,
}

/// An open shard with a leaf list that is what its digest says.
pub(crate) struct Suspect<'a> {
    pub(crate) file: &'a File,
    pub(crate) layout: &'a ShardLayout,
    pub(crate) leaf_list: &'a [u8],
}

/// The first thing in a shard that is not what it must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Damage {
    /// Which of the suspects.
    pub(crate) shard: usize,
    /// First byte in the file.
    offset: u64,
    /// What it is, for people.
    pub(crate) what: String,
}

/// A part of a shard that is checked at once.
struct Piece {
    shard: usize,
    /// The tensor, or `None` for a filler.
    tensor: Option<usize>,
    /// In the file.
    range: Range<u64>,
}

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Checks every byte of some shards: the first damage, in the order of the
/// shards and of their bytes, whatever the number of threads.
pub(crate) fn find_damage(
    storage: &dyn Storage,
    suspects: &[Suspect<'_>],
    pool: &rayon::ThreadPool,
    progress: &dyn Progress,
) -> Result<Option<Damage>> {
    let pieces: Vec<Piece> = suspects.iter().enumerate().flat_map(|(i, s)| pieces(i, s.layout)).collect();
    progress.stage("verifying", suspects.iter().map(|s| s.layout.size_bytes()).sum());
    for (shard, suspect) in suspects.iter().enumerate() {
        if let Some(what) = header_damage(storage, suspect.file, suspect.layout) {
            return Ok(Some(Damage { shard, offset: 0, what }));
        }
        progress.advance(suspect.layout.data_start());
    }
    let check = |piece: &Piece| -> Result<Option<Damage>> {
        if progress.cancelled() {
            return Err(Error::new(Code::Interrupted, "stopped while verifying"));
        }
        let found = check_piece(storage, &suspects[piece.shard], piece);
        progress.advance(piece.range.end - piece.range.start);
        Ok(found)
    };
    let first = |a: Option<Damage>, b: Option<Damage>| match (a, b) {
        (Some(a), Some(b)) => Some(if (b.shard, b.offset) < (a.shard, a.offset) { b } else { a }),
        (a, b) => a.or(b),
    };
    pool.install(|| pieces.par_iter().map(check).try_reduce(|| None, |a, b| Ok(first(a, b))))
}

fn pieces(shard: usize, layout: &ShardLayout) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (index, tensor) in layout.tensors().iter().enumerate() {
        let mut at = tensor.offset;
        while at < tensor.end() {
            let end = tensor.end().min(at + PIECE_BYTES);
            pieces.push(Piece { shard, tensor: Some(index), range: at..end });
            at = end;
        }
    }
    pieces.extend(layout.fillers().map(|range| Piece { shard, tensor: None, range }));
    pieces
}

/// What is wrong with a shard's header, if anything is.
pub(crate) fn header_damage(storage: &dyn Storage, file: &File, layout: &ShardLayout) -> Option<String> {
    let mut found = vec![0; layout.header().len()];
    match read_twice(storage, file, &mut found, 0) {
        Err(e) => Some(format!("its header cannot be read ({e})")),
        Ok(n) if n < found.len() => Some(format!("it ends at byte {n}, inside its header")),
        Ok(_) => (found != layout.header()).then(|| "its header is not what the entry document gives".into()),
    }
}

fn check_piece(storage: &dyn Storage, suspect: &Suspect<'_>, piece: &Piece) -> Option<Damage> {
    BUFFER.with_borrow_mut(|buffer| {
        let len = (piece.range.end - piece.range.start) as usize;
        if buffer.len() < len {
            buffer.resize(len, 0);
        }
        let buffer = &mut buffer[..len];
        let damage = |offset: u64, what: String| Some(Damage { shard: piece.shard, offset, what });
        match read_twice(storage, suspect.file, buffer, piece.range.start) {
            Ok(n) if n == len => {}
            Ok(n) => return damage(piece.range.start, format!("it ends at byte {}", piece.range.start + n as u64)),
            Err(e) => {
                return damage(piece.range.start, format!("bytes from {} on cannot be read ({e})", piece.range.start));
            }
        }
        let Some(index) = piece.tensor else {
            let bad = buffer.iter().position(|byte| *byte != 0)?;
            let at = piece.range.start + bad as u64;
            return damage(at, format!("byte {at} of it, in a filler, is not zero"));
        };
        let tensor = &suspect.layout.tensors()[index];
        let within = piece.range.start - tensor.offset;
        let first = (tensor.first_leaf as usize + within as usize / LEAF_BYTES) * HASH_BYTES;
        let wanted = suspect.leaf_list[first..].chunks_exact(HASH_BYTES);
        let (n, leaf) = buffer
            .chunks(LEAF_BYTES)
            .zip(wanted)
            .enumerate()
            .find_map(|(n, (leaf, wanted))| (sha256(leaf) != wanted).then_some((n, leaf)))?;
        let begin = within + (n * LEAF_BYTES) as u64;
        let end = begin + leaf.len() as u64;
        damage(tensor.offset + begin, format!("tensor '{}' differs within its bytes {begin}..{end}", tensor.name))
    })
}

impl Inner {
    fn first_record(&self, shard: &ShardRecord, metadata: &Metadata) -> Option<FirstRecord> {
        Some(FirstRecord {
            digest: shard.digest,
            leaves: shard.leaves,
            device: metadata.dev(),
            inode: metadata.ino(),
            size_bytes: metadata.size(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
            boot: self.boot_id()?.to_owned(),
        })
    }

    /// Whether a shard was verified by its leaf list since this boot, and not
    /// changed since.
    pub(crate) fn is_verified(&self, shard: &ShardRecord, metadata: &Metadata) -> bool {
        let known: Option<FirstRecord> = self.read_record(&self.paths.first(&shard.digest), Kind::First);
        known.is_some() && known == self.first_record(shard, metadata)
    }

    /// Remembers that a shard was verified by its leaf list. `before` is what it
    /// was then; if it has changed since, nothing is remembered.
    pub(crate) fn set_verified(&self, shard: &ShardRecord, file: &File, before: &Metadata) {
        let now = self.storage.file_metadata(file).ok().and_then(|m| self.first_record(shard, &m));
        if let Some(record) = self.first_record(shard, before).filter(|record| now.as_ref() == Some(record)) {
            // Where it cannot be written, the blob is verified again.
            let _ = self.write_record(&self.paths.first(&shard.digest), Kind::First, &record);
        }
    }
}
