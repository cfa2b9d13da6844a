//! A small model on disk, for the tests.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use tempfile::TempDir;

use crate::digest::leaf_hashes;
use crate::error::Result;
use crate::offload::{BlockSpec, Content, Device, DeviceBlock, LeafHashes, Pack, PlacedTensor, Segment};
use crate::tensor::{Dtype, TensorName, TensorType};

/// Blocks of one file each, whose data begins at byte 4096.
pub(in crate::offload) struct Model {
    pub(in crate::offload) folder: TempDir,
    pub(in crate::offload) bytes: Vec<Vec<u8>>,
}

const DATA_START: u64 = 4096;

impl Model {
    /// `blocks` blocks of about `len` bytes, no two alike.
    pub(in crate::offload) fn new(blocks: usize, len: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut bytes = Vec::new();
        for block in 0..blocks {
            let content: Vec<u8> = (0..len + 100 * block).map(|i| (i * 7 + i / 251 + 31 * block) as u8).collect();
            let mut file = File::create(folder.path().join(format!("{block}.bin"))).unwrap();
            file.write_all(&[0xEE; DATA_START as usize]).unwrap();
            file.write_all(&content).unwrap();
            bytes.push(content);
        }
        Model { folder, bytes }
    }

    pub(in crate::offload) fn path(&self, block: usize) -> PathBuf {
        self.folder.path().join(format!("{block}.bin"))
    }

    fn block(&self, index: usize, content: impl Fn(u64) -> Content) -> BlockSpec {
        let bytes = &self.bytes[index];
        // Two tensors, the second on a multiple of 256.
        let cut = (bytes.len() / 3).next_multiple_of(256).min(bytes.len());
        let tensor = |name: &str, from: usize, to: usize| {
            let hashes: Arc<[u8]> = leaf_hashes(&bytes[from..to]).into();
            let all = 0..hashes.len();
            PlacedTensor {
                name: TensorName::new(name).unwrap(),
                ty: TensorType::new(Dtype::U8, vec![(to - from) as u64]).unwrap(),
                offset: from as u64,
                leaf_hashes: LeafHashes::new(hashes, all),
            }
        };
        BlockSpec {
            name: format!("layer.{index}"),
            segments: vec![Segment { content: content(DATA_START), len: bytes.len() as u64 }],
            tensors: vec![tensor("a", 0, cut), tensor("b", cut, bytes.len())],
        }
    }

    pub(in crate::offload) fn blocks(&self) -> Vec<BlockSpec> {
        let open = |i: usize| {
            let path = self.path(i);
            let file = Arc::new(File::open(&path).unwrap());
            self.block(i, |offset| Content::File { file: file.clone(), path: path.clone(), offset })
        };
        (0..self.bytes.len()).map(open).collect()
    }

    /// The same blocks, computed instead of read.
    pub(in crate::offload) fn packed_blocks(&self) -> Vec<BlockSpec> {
        let packed = |i: usize| {
            let source: Arc<dyn Pack> = Arc::new(FromMemory(self.bytes[i].clone()));
            self.block(i, |_| Content::Packed(source.clone()))
        };
        (0..self.bytes.len()).map(packed).collect()
    }

    /// Flips a bit of a block in its file.
    pub(in crate::offload) fn flip(&self, block: usize, offset: u64) {
        use std::os::unix::fs::FileExt;
        let file = File::options().write(true).open(self.path(block)).unwrap();
        let byte = self.bytes[block][offset as usize] ^ 1;
        file.write_all_at(&[byte], DATA_START + offset).unwrap();
    }

    /// What a held block must contain.
    pub(in crate::offload) fn check<D: Device>(&self, block: &DeviceBlock<'_, D>) -> Result<()> {
        let mut found = vec![0; block.len_bytes() as usize];
        block.read(0, &mut found)?;
        assert!(found == self.bytes[block.index()], "{} has other bytes", block.name());
        Ok(())
    }
}

struct FromMemory(Vec<u8>);

impl Pack for FromMemory {
    fn pack(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(&self.0[offset as usize..][..out.len()]);
        Ok(())
    }
}
