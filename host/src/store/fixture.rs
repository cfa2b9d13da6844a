//! Small entries for the store's tests.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde_json::json;

use super::document::{AliasRecord, BlockRecord, EntryDocument, SCHEMA, ShardRecord, TensorRecord};
use super::storage::Storage;
use super::{Claim, Lease, Publication, Published, ShardLayout, Store, StoreOptions, StoredShard, Verify};
use crate::digest::{ActionKey, BlockKey, ContentDigest, TensorDigest, leaf_hashes};
use crate::error::Result;
use crate::progress::Silent;
use crate::tensor::{Dtype, TensorName, TensorType};

/// A tensor and its bytes.
pub(crate) struct Tensor {
    pub(crate) name: TensorName,
    pub(crate) ty: TensorType,
    pub(crate) bytes: Vec<u8>,
}

/// A shard's record and its tensors: name, digest, offset.
type Written = (ShardRecord, Vec<(TensorName, TensorDigest, u64)>);

/// An entry to be published: blocks of one shard each.
pub(crate) struct Sample {
    pub(crate) action: Vec<u8>,
    pub(crate) key: ActionKey,
    pub(crate) blocks: Vec<(String, BlockKey, Vec<Tensor>)>,
}

pub(crate) fn pool() -> &'static rayon::ThreadPool {
    static POOL: OnceLock<rayon::ThreadPool> = OnceLock::new();
    POOL.get_or_init(|| rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap())
}

/// A folder in memory where there is one: these tests sync nothing.
pub(crate) fn fast_dir() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

pub(crate) fn open(root: &Path) -> Store {
    Store::open(root, StoreOptions::default()).unwrap()
}

pub(crate) fn open_on(root: &Path, storage: Arc<dyn Storage>) -> Result<Store> {
    let options = StoreOptions { lock_timeout: std::time::Duration::from_secs(5), ..StoreOptions::default() };
    Store::open_on(root, options, storage)
}

/// Copies a folder with what is in it; files with two names stay one file.
pub(crate) fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    fn copy(from: &Path, to: &Path, seen: &mut BTreeMap<u64, PathBuf>) -> io::Result<()> {
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            let (metadata, path) = (entry.metadata()?, to.join(entry.file_name()));
            if metadata.is_dir() {
                fs::create_dir(&path)?;
                copy(&entry.path(), &path, seen)?;
            } else if let Some(first) = seen.get(&metadata.ino()) {
                fs::hard_link(first, &path)?;
            } else {
                fs::copy(entry.path(), &path)?;
                seen.insert(metadata.ino(), path);
            }
        }
        Ok(())
    }
    copy(from, to, &mut BTreeMap::new())
}

/// Bytes that differ from place to place and from seed to seed.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

fn tensor(name: &str, len: usize, seed: u64) -> Tensor {
    Tensor {
        name: TensorName::new(name).unwrap(),
        ty: TensorType::new(Dtype::U8, vec![len as u64]).unwrap(),
        bytes: noise(len, seed),
    }
}

impl Sample {
    /// Two blocks: one small, with an empty tensor; one with a tensor of
    /// `len` bytes. `name` and `seed` determine the second, the first is the
    /// same for all.
    pub(crate) fn new(name: &str, len: usize, seed: u64) -> Self {
        let action = serde_json::to_vec(&json!({"name": name})).unwrap();
        Sample {
            key: ActionKey::of(&action),
            action,
            blocks: vec![
                (
                    "rest".into(),
                    BlockKey::of(b"rest"),
                    vec![tensor("a", 100, 1), tensor("b.empty", 0, 1), tensor("c", 40_000, 2)],
                ),
                ("h.0.".into(), BlockKey::of(name.as_bytes()), vec![tensor("h.0.w", len, seed)]),
            ],
        }
    }

    /// Publishes it, computing every block.
    pub(crate) fn publish(&self, store: &Store) -> Result<Option<Published>> {
        match store.claim(&self.key, &self.action, &Silent)? {
            Claim::Found => Ok(None),
            Claim::Build(publication) => self.build(publication, &BTreeMap::new()).map(Some),
        }
    }

    /// Builds it, taking some blocks as given.
    pub(crate) fn build(
        &self,
        publication: Publication,
        reused: &BTreeMap<BlockKey, StoredShard>,
    ) -> Result<Published> {
        publication.reserve(self.blocks.iter().flat_map(|(_, _, t)| t).map(|t| t.bytes.len() as u64).sum())?;
        let mut shards: Vec<Written> = Vec::new();
        for (_, key, tensors) in &self.blocks {
            if let Some(shard) = reused.get(key) {
                let rows = shard.tensors.iter().map(|t| (t.name.clone(), t.digest, t.offset)).collect();
                shards.push((shard.record.clone(), rows));
                continue;
            }
            let layout = ShardLayout::new(tensors.iter().map(|t| (t.name.clone(), t.ty.clone())))?;
            let mut writer = publication.create_shard(&layout)?;
            for (index, tensor) in tensors.iter().enumerate() {
                for (n, piece) in tensor.bytes.chunks(32_768).enumerate() {
                    let hashes = (n % 2 == 0).then(|| leaf_hashes(piece));
                    writer.tensor(index, piece, hashes.as_deref())?;
                }
            }
            let finished = writer.finish()?;
            shards
                .push((finished.record, finished.tensors.into_iter().map(|t| (t.name, t.digest, t.offset)).collect()));
        }
        publication.commit(self.document(&shards), &json!({"engine": "none"}), pool(), &Silent)
    }

    fn document(&self, shards: &[Written]) -> EntryDocument {
        let mut tensors = Vec::new();
        for (index, ((_, rows), (_, _, given))) in shards.iter().zip(&self.blocks).enumerate() {
            for ((name, digest, offset), tensor) in rows.iter().zip(given) {
                tensors.push(TensorRecord {
                    name: name.clone(),
                    dtype: tensor.ty.dtype(),
                    shape: tensor.ty.shape().to_vec(),
                    digest: *digest,
                    shard: index as u32,
                    offset: *offset,
                });
            }
        }
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        let name = |name| TensorName::new(name).unwrap();
        let mut document = EntryDocument {
            schema: SCHEMA.into(),
            key: self.key,
            content_digest: ContentDigest::from_bytes([0; 32]),
            tensors,
            aliases: vec![AliasRecord { name: name("z"), of: name("a") }],
            blocks: self
                .blocks
                .iter()
                .enumerate()
                .map(|(i, (name, key, _))| BlockRecord { name: name.clone(), action: *key, shards: vec![i as u32] })
                .collect(),
            shards: shards.iter().map(|(record, _)| record.clone()).collect(),
        };
        document.content_digest = document.compute_content_digest();
        document
    }

    /// Leases it with every byte verified.
    pub(crate) fn lease(&self, store: &Store) -> Result<Option<Lease>> {
        store.lease(&self.key, Verify::Always, pool(), &Silent)
    }

    /// Asserts that a lease gives exactly this sample's bytes.
    pub(crate) fn assert_is(&self, lease: &Lease) {
        assert_eq!(*lease.key(), self.key);
        assert_eq!(lease.shards(), self.blocks.len());
        for (shard, (_, _, tensors)) in self.blocks.iter().enumerate() {
            let placed = lease.shard_layout(shard).tensors();
            assert_eq!(placed.len(), tensors.len());
            for (at, tensor) in placed.iter().zip(tensors) {
                assert_eq!((&at.name, &at.ty), (&tensor.name, &tensor.ty));
                let mut bytes = vec![0; tensor.bytes.len()];
                lease.shard_file(shard).read_exact_at(&mut bytes, at.offset).unwrap();
                assert!(bytes == tensor.bytes, "the bytes of {}", tensor.name);
            }
        }
    }
}
