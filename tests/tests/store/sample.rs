//! A small entry that is a function of its name, published through the
//! library as the executor does it.

use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use serde_json::json;
use weightmill::digest::{ActionKey, BlockKey, ContentDigest};
use weightmill::error::Result;
use weightmill::progress::Silent;
use weightmill::store::document::{BlockRecord, EntryDocument, SCHEMA, TensorRecord};
use weightmill::store::{Claim, Lease, Publication, ShardLayout, Store, Verify};
use weightmill::tensor::{Dtype, TensorName, TensorType};

/// One block with one tensor, and a block that all samples share.
pub(crate) struct Sample {
    /// What determines the key.
    pub(crate) action: Vec<u8>,
    /// The key.
    pub(crate) key: ActionKey,
    blocks: [(String, BlockKey, TensorName, Vec<u8>); 2],
}

/// Two threads are enough to have two.
pub(crate) fn pool() -> &'static rayon::ThreadPool {
    static POOL: OnceLock<rayon::ThreadPool> = OnceLock::new();
    POOL.get_or_init(|| rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("threads can be started"))
}

fn noise(len: usize, mut state: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&(state ^ (state >> 29)).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

impl Sample {
    /// The sample of a number, with a tensor of so many bytes.
    pub(crate) fn new(number: u64, len_bytes: usize) -> Self {
        let action = serde_json::to_vec(&json!({"sample": number, "bytes": len_bytes})).expect("it is JSON");
        let block = |name: &str, tensor: &str, len, seed| {
            let key = BlockKey::of(format!("{name} {len} {seed}").as_bytes());
            (name.to_owned(), key, TensorName::new(tensor).expect("it is a name"), noise(len, seed))
        };
        Sample {
            key: ActionKey::of(&action),
            action,
            blocks: [block("rest", "embed", 100_000, 0), block("h.0.", "h.0.w", len_bytes, number + 1)],
        }
    }

    /// Publishes it; `false` if it is there already.
    pub(crate) fn publish(&self, store: &Store) -> Result<bool> {
        match store.claim(&self.key, &self.action, &Silent)? {
            Claim::Found => Ok(false),
            Claim::Build(publication) => self.build(publication).map(|()| true),
        }
    }

    fn build(&self, publication: Publication) -> Result<()> {
        let (mut tensors, mut shards, mut blocks) = (Vec::new(), Vec::new(), Vec::new());
        for (number, (name, key, tensor, bytes)) in (0..).zip(&self.blocks) {
            let shape = vec![bytes.len() as u64];
            let ty = TensorType::new(Dtype::U8, shape.clone()).expect("it is small");
            let mut writer = publication.create_shard(&ShardLayout::new([(tensor.clone(), ty)])?)?;
            for piece in bytes.chunks(1 << 16) {
                writer.tensor(0, piece, None)?;
            }
            let finished = writer.finish()?;
            let placed = &finished.tensors[0];
            tensors.push(TensorRecord {
                name: tensor.clone(),
                dtype: Dtype::U8,
                shape,
                digest: placed.digest,
                shard: number,
                offset: placed.offset,
            });
            blocks.push(BlockRecord { name: name.clone(), action: *key, shards: vec![number] });
            shards.push(finished.record);
        }
        let mut document = EntryDocument {
            schema: SCHEMA.into(),
            key: self.key,
            content_digest: ContentDigest::from_bytes([0; 32]),
            tensors,
            aliases: Vec::new(),
            blocks,
            shards,
        };
        document.content_digest = document.compute_content_digest();
        publication.commit(document, &json!({"test": true}), pool(), &Silent).map(drop)
    }

    /// Leases it with every byte verified, and compares it with what it must
    /// be; `false` if it is not there.
    pub(crate) fn check(&self, store: &Store) -> Result<bool> {
        let Some(lease) = store.lease(&self.key, Verify::Always, pool(), &Silent)? else { return Ok(false) };
        self.assert_is(&lease);
        Ok(true)
    }

    /// Asserts that a lease gives exactly this sample.
    pub(crate) fn assert_is(&self, lease: &Lease) {
        for (shard, (_, _, name, bytes)) in self.blocks.iter().enumerate() {
            let placed = &lease.shard_layout(shard).tensors()[0];
            assert_eq!(placed.name, *name);
            let mut found = vec![0; bytes.len()];
            lease.shard_file(shard).read_exact_at(&mut found, placed.offset).expect("the shard can be read");
            assert!(found == *bytes, "wrong bytes in {name} of {}", self.key);
        }
    }
}
