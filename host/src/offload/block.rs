//! What is streamed: blocks, where their bytes come from, and the tensors in
//! them.
//!
//! These types know nothing of a store or a recipe. A block's bytes are its
//! segments one after the other, each beginning on a multiple of
//! [`SEGMENT_ALIGN`]; normally a segment is the data region of one shard file.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::digest::{HASH_BYTES, LEAF_BYTES, leaf_count};
use crate::error::{Code, Error, Result};
use crate::tensor::{TensorName, TensorType};

use super::device::Leaf;

/// What a segment's place in its block, and a tensor's, is a multiple of. The
/// device's loads and the hash kernel want 16; wide loads of consumers, 256.
pub const SEGMENT_ALIGN: u64 = 256;

/// A block, as it is asked for.
#[derive(Clone)]
pub struct BlockSpec {
    /// Its name.
    pub name: String,
    /// Its bytes.
    pub segments: Vec<Segment>,
    /// What the bytes mean. Tensors do not overlap.
    pub tensors: Vec<PlacedTensor>,
}

/// A run of bytes of a block.
#[derive(Clone)]
pub struct Segment {
    /// Where the bytes come from.
    pub content: Content,
    /// How many.
    pub len: u64,
}

/// Where a segment's bytes come from.
#[derive(Clone)]
pub enum Content {
    /// A part of a file. The file stays open, and whatever keeps its content
    /// from changing (a lease) must outlive the streamer.
    File {
        /// The open file.
        file: Arc<File>,
        /// Its path, for messages.
        path: PathBuf,
        /// The segment's first byte in the file.
        offset: u64,
    },
    /// Bytes that are computed on the fly.
    Packed(Arc<dyn Pack>),
}

/// Computes bytes, such as a transform's output, straight into a staging
/// buffer. Called from several threads at once, for any range, more than once.
pub trait Pack: Send + Sync {
    /// Fills `out` with the bytes from `offset` on.
    ///
    /// # Errors
    /// Whatever the source fails with; it ends the stream.
    fn pack(&self, offset: u64, out: &mut [u8]) -> Result<()>;
}

/// A tensor in a block.
#[derive(Clone, Debug)]
pub struct PlacedTensor {
    /// Its name.
    pub name: TensorName,
    /// Element type and extents.
    pub ty: TensorType,
    /// First byte in the block, a multiple of 16.
    pub offset: u64,
    /// The raw hashes of its leaves, if it can be verified.
    pub leaf_hashes: Option<LeafHashes>,
}

/// A tensor's part of a leaf list.
#[derive(Clone, Debug)]
pub struct LeafHashes {
    list: Arc<[u8]>,
    range: Range<usize>,
}

impl LeafHashes {
    /// The bytes `range` of `list`; `None` if it is not that long.
    pub fn new(list: Arc<[u8]>, range: Range<usize>) -> Option<Self> {
        list.get(range.clone()).is_some().then_some(LeafHashes { list, range })
    }

    /// The raw hashes, one after the other.
    pub fn as_bytes(&self) -> &[u8] {
        &self.list[self.range.clone()]
    }
}

impl Content {
    /// Fills `out` with the segment's bytes from `offset` on, on the CPU.
    pub(super) fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        match self {
            Content::Packed(pack) => pack.pack(offset, out),
            Content::File { file, path, offset: start } => {
                let at = start + offset;
                file.read_exact_at(out, at).map_err(|e| match e.kind() {
                    std::io::ErrorKind::UnexpectedEof => Error::new(
                        Code::CorruptBlob,
                        format!("{} ends before byte {}", path.display(), at + out.len() as u64),
                    )
                    .hint("the file was cut short while it was in use; verify the entry and load again"),
                    _ => Error::io(format_args!("reading {} at {at}", path.display()), e),
                })
            }
        }
    }
}

/// A block that was checked, with everything that follows from its spec.
pub(super) struct Block {
    pub(super) spec: BlockSpec,
    /// Where each segment begins in the block.
    pub(super) starts: Vec<u64>,
    pub(super) len_bytes: u64,
    /// For each tensor, ascending by offset: its index, and its leaves in `leaves`.
    places: Vec<(usize, Range<usize>)>,
    /// All leaves, if all tensors can be verified.
    pub(super) leaves: Vec<Leaf>,
}

impl Block {
    pub(super) fn new(spec: BlockSpec) -> Result<Self> {
        let refuse = |why: String| Err(Error::new(Code::BadParams, format!("block '{}': {why}", spec.name)));
        let mut starts = Vec::with_capacity(spec.segments.len());
        let mut end = 0_u64;
        for segment in &spec.segments {
            let start = end.next_multiple_of(SEGMENT_ALIGN);
            starts.push(start);
            end = match start.checked_add(segment.len) {
                Some(end) if end <= crate::canonical::MAX_INTEGER => end,
                _ => return refuse(format!("{} bytes from {start} are too many", segment.len)),
            };
            if let Content::File { offset, path, .. } = &segment.content
                && offset.checked_add(segment.len).is_none()
            {
                return refuse(format!("the range of {} overflows", path.display()));
            }
        }
        let mut order: Vec<usize> = (0..spec.tensors.len()).collect();
        order.sort_by_key(|i| (spec.tensors[*i].offset, spec.tensors[*i].ty.len_bytes()));
        let mut free_from = 0;
        let (mut places, mut leaves) = (Vec::new(), Vec::new());
        for index in order {
            let tensor = &spec.tensors[index];
            let (name, len) = (&tensor.name, tensor.ty.len_bytes());
            if !tensor.offset.is_multiple_of(16) {
                return refuse(format!("tensor '{name}' begins at {}, not on a multiple of 16", tensor.offset));
            }
            if tensor.offset < free_from || tensor.offset.checked_add(len).is_none_or(|to| to > end) {
                return refuse(format!(
                    "tensor '{name}' of {len} bytes at {} does not lie in the block's {end} bytes behind its neighbour, which ends at {free_from}",
                    tensor.offset
                ));
            }
            if let Some(hashes) = &tensor.leaf_hashes
                && hashes.as_bytes().len() as u64 != leaf_count(len) * HASH_BYTES as u64
            {
                return refuse(format!(
                    "tensor '{name}' of {len} bytes has {} bytes of leaf hashes",
                    hashes.as_bytes().len()
                ));
            }
            free_from = tensor.offset + len;
            let first = leaves.len();
            let leaf = LEAF_BYTES as u64;
            leaves.extend(
                (0..len).step_by(LEAF_BYTES).map(|at| Leaf { offset: tensor.offset + at, len: leaf.min(len - at) }),
            );
            places.push((index, first..leaves.len()));
        }
        Ok(Block { spec, starts, len_bytes: end, places, leaves })
    }

    /// Whether every tensor has leaf hashes.
    pub(super) fn unverifiable(&self) -> Option<&TensorName> {
        self.spec.tensors.iter().find(|t| t.leaf_hashes.is_none()).map(|t| &t.name)
    }

    /// Compares the hashes of [`Block::leaves`] with the expected ones.
    pub(super) fn compare(&self, hashes: &[u8]) -> Result<()> {
        for (index, leaves) in &self.places {
            let tensor = &self.spec.tensors[*index];
            let expected = tensor.leaf_hashes.as_ref().map_or(&[][..], LeafHashes::as_bytes);
            let found = &hashes[leaves.start * HASH_BYTES..leaves.end * HASH_BYTES];
            if expected == found {
                continue;
            }
            let differs = |i: &usize| {
                let at = i * HASH_BYTES..(i + 1) * HASH_BYTES;
                expected.get(at.clone()) != Some(&found[at])
            };
            let bad = (0..leaves.len()).filter(differs).count();
            let first = (0..leaves.len()).find(differs).unwrap_or(0);
            let leaf = self.leaves[leaves.start + first];
            let from = leaf.offset - tensor.offset;
            return Err(self.corrupt(
                &format!(
                    "tensor '{}', bytes {from}..{} of {}: what arrived is not what the leaf list says",
                    tensor.name,
                    from + leaf.len,
                    tensor.ty.len_bytes()
                ),
                bad,
            ));
        }
        Ok(())
    }

    /// The error for a byte range of the block that is not as it should be.
    pub(super) fn differs_at(&self, offset: u64) -> Error {
        let tensor = self.spec.tensors.iter().find(|t| t.offset <= offset && offset - t.offset < t.ty.len_bytes());
        self.corrupt(
            &match tensor {
                Some(t) => format!("tensor '{}', byte {}: the copy is not the source", t.name, offset - t.offset),
                None => format!("byte {offset}, outside any tensor: the copy is not the source"),
            },
            1,
        )
    }

    fn corrupt(&self, what: &str, bad: usize) -> Error {
        let more = if bad > 1 { format!(" ({bad} leaves of this tensor differ)") } else { String::new() };
        Error::new(Code::CorruptBlob, format!("block '{}', {what}{more}", self.spec.name))
            .hint("the file, the link or the device's memory is bad: verify the entry on the CPU to tell which")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::leaf_hashes;
    use crate::tensor::Dtype;

    struct Nothing;
    impl Pack for Nothing {
        fn pack(&self, _: u64, _: &mut [u8]) -> Result<()> {
            Ok(())
        }
    }

    fn spec(segments: &[u64], tensors: &[(u64, u64)]) -> BlockSpec {
        let bytes = vec![5_u8; 100_000];
        BlockSpec {
            name: "b".into(),
            segments: segments
                .iter()
                .map(|len| Segment { content: Content::Packed(Arc::new(Nothing)), len: *len })
                .collect(),
            tensors: tensors
                .iter()
                .enumerate()
                .map(|(i, (offset, len))| {
                    let hashes: Arc<[u8]> = leaf_hashes(&bytes[..*len as usize]).into();
                    let range = 0..hashes.len();
                    PlacedTensor {
                        name: TensorName::new(&format!("t{i}")).unwrap(),
                        ty: TensorType::new(Dtype::U8, vec![*len]).unwrap(),
                        offset: *offset,
                        leaf_hashes: LeafHashes::new(hashes, range),
                    }
                })
                .collect(),
        }
    }

    #[test]
    fn segments_and_leaves_have_their_places() {
        let block = Block::new(spec(&[300, 0, 40_000], &[(512, 40_000), (0, 0), (0, 300)])).unwrap();
        assert_eq!(block.starts, [0, 512, 512]);
        assert_eq!(block.len_bytes, 40_512);
        let leaves: Vec<_> = block.leaves.iter().map(|l| (l.offset, l.len)).collect();
        assert_eq!(leaves, [(0, 300), (512, 16_384), (16_896, 16_384), (33_280, 7_232)]);
    }

    #[test]
    fn tensors_that_do_not_fit_are_refused() {
        for bad in [&[(8, 16)][..], &[(0, 301)], &[(0, 32), (16, 16)], &[(304, 1)]] {
            assert_eq!(Block::new(spec(&[300], bad)).err().unwrap().code(), Code::BadParams, "{bad:?}");
        }
        let mut short = spec(&[300], &[(0, 300)]);
        short.tensors[0].leaf_hashes = LeafHashes::new(vec![0; 64].into(), 0..64);
        assert!(Block::new(short).is_err());
        assert!(Block::new(spec(&[u64::MAX], &[])).is_err());
    }

    #[test]
    fn a_difference_names_tensor_and_bytes() {
        let block = Block::new(spec(&[90_000], &[(0, 300), (512, 40_000)])).unwrap();
        let mut hashes: Vec<u8> =
            block.spec.tensors.iter().flat_map(|t| t.leaf_hashes.as_ref().unwrap().as_bytes()).copied().collect();
        block.compare(&hashes).unwrap();
        hashes[2 * HASH_BYTES + 3] ^= 1;
        let error = block.compare(&hashes).unwrap_err();
        assert_eq!(error.code(), Code::CorruptBlob);
        assert!(error.message().contains("block 'b', tensor 't1', bytes 16384..32768 of 40000"), "{error}");
        assert!(block.differs_at(515).message().contains("tensor 't1', byte 3"));
        assert!(block.differs_at(400).message().contains("outside any tensor"));
    }
}
