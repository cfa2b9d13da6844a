//! The store against plain loops over the same bytes, on all cores.
//!
//! - A **hit** (open the store, lease, check the structure, map every shard)
//!   for two entries of the same form and very different size: its cost must
//!   not depend on the bytes. The entries are synthetic: zeros, in sparse files.
//! - **Full verification** against SHA-256 of the same files, in pieces of a
//!   mebibyte on all cores.
//! - A **cold build** into an empty store, from the checkpoint's first byte to
//!   the last sync, against a loop that does the least that any build has to:
//!   read, hash for the source's digests, hash for the leaves, hash for the
//!   file's name, write, sync. The recipe passes every tensor through, so what
//!   is measured is the store and not a transform.
//!
//! What is compared runs in turn, and the medians are compared.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use rayon::prelude::*;
use serde::Serialize;
use sha2::{Digest as _, Sha256};
use weightmill_guest::abi::Tp;

use super::checkpoint::write_tensors;
use crate::checkpoint::Checkpoint;
use crate::digest::{
    ActionKey, BlobDigest, BlockKey, ContentDigest, HASH_BYTES, LEAF_BYTES, leaf_hashes, tensor_digest,
};
use crate::error::{Code, Error, Result};
use crate::execute::build::{BuildOptions, Mode, Outcome, build};
use crate::execute::{Engines, Inputs, NoFacts, Outline, TILE_BYTES};
use crate::modules::Library;
use crate::progress::Progress;
use crate::recipe::Recipe;
use crate::sandbox::{EngineName, engine};
use crate::store::document::{BlockRecord, EntryDocument, SCHEMA, ShardRecord, TensorRecord};
use crate::store::{Claim, Lease, ShardLayout, Store, StoreOptions, StoredBlock, StoredShard, StoredTensor, Verify};
use crate::tensor::{Dtype, TensorName, TensorType};

/// What plain loops read, hash and write at a time.
const PIECE_BYTES: u64 = 1 << 20;
/// Blocks of every entry.
const BLOCKS: usize = 32;
/// Tensors of a block.
const TENSORS: usize = 12;
/// Hits are short, so there are more of them than of other runs.
const HITS_A_RUN: usize = 5;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the files are made. They are removed afterwards.
    pub folder: PathBuf,
    /// Bytes of the entry that is built and verified.
    pub bytes: u64,
    /// Bytes of the smaller synthetic entry.
    pub small_bytes: u64,
    /// Bytes of the larger synthetic entry.
    pub large_bytes: u64,
    /// Runs of each; the medians are compared.
    pub runs: usize,
}

/// Two hits.
#[derive(Clone, Debug, Serialize)]
pub struct Hit {
    /// `first`: every blob was verified since the boot; or `never`.
    pub verify: &'static str,
    /// Milliseconds for the smaller entry.
    pub small_ms: f64,
    /// Milliseconds for the larger one.
    pub large_ms: f64,
    /// The larger's time over the smaller's.
    pub ratio: f64,
}

/// Work by weightmill and by a plain loop. Rates are in 10⁹ bytes a second.
#[derive(Clone, Debug, Serialize)]
pub struct Compared {
    /// Weightmill's.
    pub gb_per_s: f64,
    /// The plain loop's.
    pub baseline_gb_per_s: f64,
    /// The plain loop's time over weightmill's.
    pub ratio: f64,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Threads of both sides.
    pub threads: usize,
    /// Shards and tensors of every entry.
    pub shards: usize,
    /// Tensors of every entry.
    pub tensors: usize,
    /// Hits with and without looking up what was verified.
    pub hits: Vec<Hit>,
    /// Full verification against SHA-256 of the same files.
    pub verify: Compared,
    /// A cold build against read, 3 × SHA-256, write and sync.
    pub publish: Compared,
}

/// Measures. Stops between runs if `progress` says so.
///
/// # Errors
/// `io_error`, `insufficient_disk`, `interrupted`.
pub fn run(options: &Options, progress: &dyn Progress) -> Result<Report> {
    let folder = options.folder.join(format!("weightmill-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|e| Error::io(format!("making the folder {}", folder.display()), e))?;
    let bench = Bench { options, folder: &folder, pool: rayon_pool()?, progress: Quiet(progress) };
    let report = bench.run();
    // What stays is in a folder that says whose it is.
    let _ = std::fs::remove_dir_all(&folder);
    report
}

fn rayon_pool() -> Result<rayon::ThreadPool> {
    rayon::ThreadPoolBuilder::new().build().map_err(|e| Error::io("starting threads", e))
}

/// Shows nothing, so that nothing is drawn while time is taken.
struct Quiet<'a>(&'a dyn Progress);

impl Progress for Quiet<'_> {
    fn cancelled(&self) -> bool {
        self.0.cancelled()
    }
}

struct Bench<'a> {
    options: &'a Options,
    folder: &'a Path,
    pool: rayon::ThreadPool,
    progress: Quiet<'a>,
}

impl Bench<'_> {
    fn run(&self) -> Result<Report> {
        let (publish, verify) = self.publish_and_verify()?;
        Ok(Report {
            threads: self.pool.current_num_threads(),
            shards: BLOCKS,
            tensors: BLOCKS * TENSORS,
            hits: self.hits()?,
            verify,
            publish,
        })
    }

    fn runs(&self) -> impl Iterator<Item = Result<usize>> {
        (0..self.options.runs.max(1)).map(|run| match self.progress.cancelled() {
            true => Err(Error::new(Code::Interrupted, "stopped while measuring")),
            false => Ok(run),
        })
    }

    fn compared(&self, ours: Vec<f64>, theirs: Vec<f64>, bytes: u64) -> Compared {
        let (ours, theirs) = (median(ours), median(theirs));
        let rate = |seconds: f64| bytes as f64 / seconds / 1e9;
        Compared { gb_per_s: rate(ours), baseline_gb_per_s: rate(theirs), ratio: theirs / ours }
    }

    // Hits.

    fn hits(&self) -> Result<Vec<Hit>> {
        let root = self.folder.join("hits");
        let store = Store::open(&root, StoreOptions::default())?;
        let small = self.synthetic(&store, "small", self.options.small_bytes)?;
        let large = self.synthetic(&store, "large", self.options.large_bytes)?;
        let mut hits = Vec::new();
        for (verify, name) in [(Verify::First, "first"), (Verify::Never, "never")] {
            let (mut small_s, mut large_s) = (Vec::new(), Vec::new());
            // Once each beforehand: the first look reads folders from the disk.
            self.hit(&root, &small, verify)?;
            self.hit(&root, &large, verify)?;
            for run in self.runs() {
                run?;
                for _ in 0..HITS_A_RUN {
                    small_s.push(timed(|| self.hit(&root, &small, verify))?);
                    large_s.push(timed(|| self.hit(&root, &large, verify))?);
                }
            }
            let (small_s, large_s) = (median(small_s), median(large_s));
            hits.push(Hit { verify: name, small_ms: small_s * 1e3, large_ms: large_s * 1e3, ratio: large_s / small_s });
        }
        Ok(hits)
    }

    fn hit(&self, root: &Path, key: &ActionKey, verify: Verify) -> Result<()> {
        let store = Store::open(root, StoreOptions::default())?;
        let lease = self.lease(&store, key, verify)?;
        (0..lease.shards()).try_for_each(|shard| lease.map_shard(shard).map(drop))
    }

    fn lease(&self, store: &Store, key: &ActionKey, verify: Verify) -> Result<Lease> {
        let lease = store.lease(key, verify, &self.pool, &self.progress)?;
        lease.ok_or_else(|| Error::new(Code::SourceUnavailable, format!("the benchmark's entry {key} is gone")))
    }

    /// Publishes an entry of zeros whose shards are sparse files: their blobs
    /// are put in place, and its blocks are then known ones.
    fn synthetic(&self, store: &Store, name: &str, bytes: u64) -> Result<ActionKey> {
        let tensor_bytes = (bytes / (BLOCKS * TENSORS) as u64).max(1);
        let blobs = store.root().join("blobs/sha256");
        let block = |number: usize| zero_block(&blobs, name, number, tensor_bytes);
        let blocks = self.pool.install(|| (0..BLOCKS).into_par_iter().map(block).collect::<Result<Vec<_>>>())?;
        let action = format!("{{\"bench\":\"{name}\"}}");
        let key = ActionKey::of(action.as_bytes());
        let Claim::Build(publication) = store.claim(&key, action.as_bytes(), &self.progress)? else { return Ok(key) };
        for block in &blocks {
            if !publication.reuse_block(block, &self.pool, &self.progress)? {
                return Err(Error::new(Code::CorruptBlob, "a synthetic shard is not what was written"));
            }
        }
        publication.commit(document(key, &blocks), &serde_json::json!({}), &self.pool, &self.progress)?;
        Ok(key)
    }

    // Build and verification.

    fn publish_and_verify(&self) -> Result<(Compared, Compared)> {
        let source = self.folder.join("checkpoint.safetensors");
        let tensor_bytes = (self.options.bytes / (BLOCKS * TENSORS) as u64).max(1);
        let tensors: Vec<_> = (0..BLOCKS * TENSORS)
            .map(|n| (tensor_name("", n / TENSORS, n % TENSORS), Dtype::U8, vec![tensor_bytes]))
            .collect();
        write_tensors(&source, &tensors)?;
        let bytes = tensor_bytes * (BLOCKS * TENSORS) as u64;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        let mut built = None;
        for run in self.runs() {
            let root = self.folder.join(format!("built-{}", run?));
            theirs.push(timed(|| self.plain_build(&source).map_err(|e| Error::io("the plain loop", e)))?);
            let start = Instant::now();
            let (store, key) = self.build(&source, &root)?;
            ours.push(start.elapsed().as_secs_f64());
            if let Some((_, _, old)) = built.replace((store, key, root)) {
                std::fs::remove_dir_all(&old).map_err(|e| Error::io(format!("removing {}", old.display()), e))?;
            }
        }
        let publish = self.compared(ours, theirs, bytes);
        let Some((store, key, _)) = built else { return Err(Error::new(Code::IoError, "nothing was built")) };

        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        let lease = self.lease(&store, &key, Verify::Never)?;
        let file_bytes = (0..lease.shards()).map(|shard| lease.shard_layout(shard).size_bytes()).sum();
        for run in self.runs() {
            run?;
            theirs.push(timed(|| self.plain_hash(&lease).map_err(|e| Error::io("the plain loop", e)))?);
            ours.push(timed(|| self.lease(&store, &key, Verify::Always).map(drop))?);
        }
        Ok((publish, self.compared(ours, theirs, file_bytes)))
    }

    /// The whole way from a checkpoint to an entry in a new store.
    fn build(&self, source: &Path, root: &Path) -> Result<(Store, ActionKey)> {
        build_plain(source, root, &self.pool, &self.progress)
    }

    /// The least that a build has to do, with as many files on all cores.
    fn plain_build(&self, source: &Path) -> io::Result<()> {
        let folder = self.folder.join("plain");
        std::fs::create_dir_all(&folder)?;
        let source = File::open(source)?;
        let total = source.metadata()?.len();
        let part = total.div_ceil(BLOCKS as u64);
        let copy = |number: u64| -> io::Result<()> {
            let file = File::create(folder.join(number.to_string()))?;
            let mut buffer = vec![0; PIECE_BYTES as usize];
            let (mut source_leaves, mut leaves, mut whole) = (Vec::new(), Vec::new(), Sha256::new());
            let (mut at, end) = (number * part, ((number + 1) * part).min(total));
            let start = at;
            while at < end {
                let piece = &mut buffer[..PIECE_BYTES.min(end - at) as usize];
                source.read_exact_at(piece, at)?;
                source_leaves.extend_from_slice(&leaf_hashes(piece));
                leaves.extend_from_slice(&leaf_hashes(piece));
                whole.update(&*piece);
                file.write_all_at(piece, at - start)?;
                at += piece.len() as u64;
            }
            file.sync_all()?;
            std::hint::black_box((source_leaves, leaves, whole.finalize()));
            Ok(())
        };
        let done = self.pool.install(|| (0..BLOCKS as u64).into_par_iter().try_for_each(copy));
        done.and_then(|()| std::fs::remove_dir_all(&folder))
    }

    /// SHA-256 of every piece of an entry's files.
    fn plain_hash(&self, lease: &Lease) -> io::Result<()> {
        let pieces: Vec<(usize, u64, u64)> = (0..lease.shards())
            .flat_map(|shard| {
                let size = lease.shard_layout(shard).size_bytes();
                (0..size.div_ceil(PIECE_BYTES)).map(move |n| (shard, n * PIECE_BYTES, size))
            })
            .collect();
        let hash = |buffer: &mut Vec<u8>, (shard, at, size): (usize, u64, u64)| -> io::Result<()> {
            let piece = &mut buffer[..PIECE_BYTES.min(size - at) as usize];
            lease.shard_file(shard).read_exact_at(piece, at)?;
            std::hint::black_box(Sha256::digest(piece));
            Ok(())
        };
        let buffer = || vec![0; PIECE_BYTES as usize];
        self.pool.install(|| pieces.into_par_iter().map_init(buffer, hash).collect())
    }
}

/// The whole way from a checkpoint to an entry in a new store, every tensor
/// passed through.
pub(super) fn build_plain(
    source: &Path,
    root: &Path,
    pool: &rayon::ThreadPool,
    progress: &dyn Progress,
) -> Result<(Store, ActionKey)> {
    let text = "recipe = 1\nname = \"bench\"\n[blocks]\npatterns = [\"layers.{i}.\"]\n";
    let recipe = Recipe::parse(text, Path::new("bench.toml"))?;
    let store = Store::open(root, StoreOptions::default())?;
    let library = Library::new(None);
    let engines = Engines::one(|| engine(EngineName::Wasmtime));
    let outline = Outline::new(Inputs {
        recipe: &recipe,
        checkpoint: Arc::new(Checkpoint::open(source)?),
        tp: Tp::ONE,
        modules: &library,
        engine: &engines,
        facts: &NoFacts,
        tile_bytes: TILE_BYTES,
    })?;
    let options = BuildOptions {
        mode: Mode::Required,
        verify: Verify::First,
        pool,
        memory_budget_bytes: 1 << 30,
        check_source: false,
        remote: None,
        progress,
        provenance: &|| Ok(serde_json::json!({})),
    };
    let built = build(&outline, Ok(store.clone()), &options)?;
    match built.outcome {
        Outcome::Built => Ok((store, built.action.key)),
        other => Err(Error::new(Code::IoError, format!("the benchmark's build came to {other:?}"))),
    }
}

fn tensor_name(entry: &str, block: usize, tensor: usize) -> String {
    format!("{entry}layers.{block:03}.{tensor:03}")
}

/// Puts a block of zeros into `blobs`: a sparse shard and its leaf list.
fn zero_block(blobs: &Path, entry: &str, number: usize, tensor_bytes: u64) -> Result<StoredBlock> {
    let ty = TensorType::new(Dtype::U8, vec![tensor_bytes])
        .ok_or_else(|| Error::new(Code::BadParams, format!("{tensor_bytes} bytes are too many for a tensor")))?;
    let named = |t| Ok((TensorName::new(&tensor_name(entry, number, t))?, ty.clone()));
    let layout = ShardLayout::new((0..TENSORS).map(named).collect::<Result<Vec<_>>>()?)?;
    let of_one = zero_leaves(tensor_bytes);
    let leaves = of_one.repeat(TENSORS);
    let record = ShardRecord {
        digest: digest_of_zeros(&layout),
        size: layout.size_bytes(),
        leaves: BlobDigest::of(&leaves),
        leaves_size: leaves.len() as u64,
    };
    let failed = |e: io::Error| Error::io(format!("writing into {}", blobs.display()), e);
    put(blobs, &record.digest, layout.header(), layout.size_bytes()).map_err(failed)?;
    put(blobs, &record.leaves, &leaves, leaves.len() as u64).map_err(failed)?;
    let digest = tensor_digest(tensor_bytes, &of_one);
    let tensors = layout.tensors().iter().map(|t| StoredTensor {
        name: t.name.clone(),
        dtype: Dtype::U8,
        shape: vec![tensor_bytes],
        digest,
        offset: t.offset,
    });
    let tensors = tensors.collect();
    let key = BlockKey::of(format!("bench {entry} {number}").as_bytes());
    Ok(StoredBlock { key, shards: vec![StoredShard { record, tensors }], engines: None })
}

/// The leaf hashes of a tensor of zeros.
fn zero_leaves(len_bytes: u64) -> Vec<u8> {
    let leaf_bytes = LEAF_BYTES as u64;
    let mut hashes = leaf_hashes(&[0; LEAF_BYTES]).repeat((len_bytes / leaf_bytes) as usize);
    hashes.extend_from_slice(&leaf_hashes(&[0; LEAF_BYTES][..(len_bytes % leaf_bytes) as usize]));
    debug_assert_eq!(hashes.len() as u64, crate::digest::leaf_count(len_bytes) * HASH_BYTES as u64);
    hashes
}

/// SHA-256 of a shard whose tensors are zeros.
fn digest_of_zeros(layout: &ShardLayout) -> BlobDigest {
    let zeros = vec![0; PIECE_BYTES as usize];
    let mut hasher = Sha256::new_with_prefix(layout.header());
    let mut left = layout.size_bytes() - layout.header().len() as u64;
    while left > 0 {
        let piece = left.min(PIECE_BYTES);
        hasher.update(&zeros[..piece as usize]);
        left -= piece;
    }
    BlobDigest::from_bytes(hasher.finalize().into())
}

/// Makes a blob that begins with `bytes` and goes on with a hole. One that is
/// there already (leaf lists of equal tensors are equal) is left alone.
fn put(blobs: &Path, digest: &BlobDigest, bytes: &[u8], size_bytes: u64) -> io::Result<()> {
    let file = match OpenOptions::new().write(true).create_new(true).open(blobs.join(digest.to_string())) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        opened => opened?,
    };
    file.write_all_at(bytes, 0)?;
    file.set_len(size_bytes)?;
    file.set_permissions(Permissions::from_mode(0o444))
}

fn document(key: ActionKey, blocks: &[StoredBlock]) -> EntryDocument {
    let shards = || blocks.iter().flat_map(|block| &block.shards);
    let tensors = shards().enumerate().flat_map(|(index, shard)| {
        shard.tensors.iter().map(move |t| TensorRecord {
            name: t.name.clone(),
            dtype: t.dtype,
            shape: t.shape.clone(),
            digest: t.digest,
            shard: index as u32,
            offset: t.offset,
        })
    });
    let names = blocks.iter().enumerate().map(|(number, block)| BlockRecord {
        name: format!("block {number}"),
        action: block.key,
        shards: vec![number as u32],
    });
    let mut document = EntryDocument {
        schema: SCHEMA.to_string(),
        key,
        content_digest: ContentDigest::from_bytes([0; HASH_BYTES]),
        tensors: tensors.collect(),
        aliases: Vec::new(),
        blocks: names.collect(),
        shards: shards().map(|shard| shard.record.clone()).collect(),
    };
    document.content_digest = document.compute_content_digest();
    document
}

fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}

pub(super) fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;

    #[test]
    fn zeros_hash_as_zeros() {
        for len in [0, 1, LEAF_BYTES, LEAF_BYTES + 1, 5 * LEAF_BYTES - 3] {
            assert_eq!(zero_leaves(len as u64), leaf_hashes(&vec![0; len]), "{len}");
        }
    }

    #[test]
    fn every_row_is_measured_and_nothing_stays() {
        let dir = tempfile::tempdir().unwrap();
        let options = Options {
            folder: dir.path().to_path_buf(),
            bytes: 4 << 20,
            small_bytes: 1 << 20,
            large_bytes: 9_999_999,
            runs: 1,
        };
        let report = run(&options, &Silent).unwrap();
        assert_eq!(report.hits.len(), 2);
        assert!(report.hits.iter().all(|hit| hit.small_ms > 0.0 && hit.large_ms > 0.0), "{report:?}");
        assert!(report.verify.ratio > 0.0 && report.publish.ratio > 0.0, "{report:?}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
