//! The whole way from an outline to an entry: find it, or make and publish it,
//! or, where the store fails and the caller can do without, make it in memory.

mod memory;
mod publish;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

pub use memory::{MemoryEntry, MemoryShard};

use super::graph::Graph;
use super::outline::Outline;
use crate::checkpoint::{DigestCache, FileIdentity, NoCache, SourceDigests, source_digests};
use crate::digest::{ActionKey, ContentDigest, TensorDigest};
use crate::error::{Code, Error, Fault, Result};
use crate::plan::action::Action;
use crate::progress::Progress;
use crate::store::document::EntryDocument;
use crate::store::{Claim, Lease, Store, Verify};
use crate::tensor::TensorName;

/// What a failing store means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The build fails.
    Required,
    /// The result is made in memory.
    Preferred,
}

/// Where entries may come from besides being made.
pub trait RemoteEntries {
    /// Brings the entry of a key into the store: whether it did. What can be
    /// done without (a registry that does not answer, an entry that is not
    /// trusted) is no error here: the entry is made.
    ///
    /// # Errors
    /// `interrupted`, and what is wrong with the store.
    fn fetch(&self, store: &Store, key: &ActionKey) -> Result<bool>;
}

/// How a build is done. None of it changes a byte.
pub struct BuildOptions<'a> {
    /// What a failing store means.
    pub mode: Mode,
    /// When an entry that is found is verified.
    pub verify: Verify,
    /// The threads that compute.
    pub pool: &'a rayon::ThreadPool,
    /// Bytes of intermediate tensors in memory, and of a result in memory.
    pub memory_budget_bytes: u64,
    /// Hash every source tensor now, whatever is known of the files: their
    /// attributes are not believed to stand for their content. What is found is
    /// remembered.
    pub check_source: bool,
    /// Asked for the entry before it is made.
    pub remote: Option<&'a dyn RemoteEntries>,
    /// Told about the work.
    pub progress: &'a dyn Progress,
    /// Who builds, for the provenance: free-form, never hashed. Asked only when
    /// something is published.
    pub provenance: &'a dyn Fn() -> Result<serde_json::Value>,
}

/// How a result came about.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// It was made and published.
    Built,
    /// It was there.
    Hit,
    /// It came from elsewhere.
    Pulled,
    /// It was made in memory, because of this.
    Fallback(Error),
}

/// A result.
pub enum Entry {
    /// In the store, and held.
    Stored(Lease),
    /// In memory.
    Memory(MemoryEntry),
}

impl Entry {
    /// What it is.
    pub fn document(&self) -> &EntryDocument {
        match self {
            Entry::Stored(lease) => lease.document(),
            Entry::Memory(entry) => &entry.document,
        }
    }
}

/// What was done, for the report.
#[derive(Clone, Debug, Default)]
pub struct Done {
    /// Source bytes read to hash and to transform.
    pub source_bytes_read: u64,
    /// Bytes hashed: source digests, leaves and shards.
    pub bytes_hashed: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Blocks taken from the store.
    pub blocks_reused: usize,
    /// Bytes that another entry had already.
    pub bytes_deduplicated: u64,
    /// Fuel that tiles used.
    pub fuel: u64,
    /// Stages and how long they took.
    pub timings: BTreeMap<&'static str, Duration>,
}

impl Done {
    fn timed<T>(&mut self, stage: &'static str, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let start = Instant::now();
        let result = work(self);
        *self.timings.entry(stage).or_default() += start.elapsed();
        result
    }
}

/// A result with its action and report.
pub struct Built {
    /// What determines it.
    pub action: Action,
    /// How it came about.
    pub outcome: Outcome,
    /// The result.
    pub entry: Entry,
    /// What was done.
    pub done: Done,
}

impl Built {
    /// The result's content digest.
    pub fn content_digest(&self) -> ContentDigest {
        self.entry.document().content_digest
    }
}

/// Finds or makes the entry of `outline`. `store` is the store, or why it
/// could not be opened.
///
/// # Errors
/// What is wrong with the input or a module; with [`Mode::Required`] also what
/// is wrong with the store.
pub fn build(outline: &Outline<'_>, store: Result<Store>, options: &BuildOptions<'_>) -> Result<Built> {
    let start = Instant::now();
    let mut done = Done::default();
    let (store, broken) = match store {
        Ok(store) => (Some(store), None),
        Err(error) if options.mode == Mode::Preferred && can_fall_back(&error) => (None, Some(error)),
        Err(error) => return Err(error),
    };
    let digests = done.timed("digest", |done| {
        let cache: &dyn DigestCache = store.as_ref().map_or(&NoCache, |store| store);
        let cache: &dyn DigestCache = if options.check_source { &Unbelieved(cache) } else { cache };
        hash_sources(outline, cache, options, done)
    })?;
    let action = outline.action(&digests)?;
    let stored = match &store {
        Some(store) => find_or_publish(outline, store, &action, options, &mut done),
        None => Err(broken.unwrap_or_else(|| Error::new(Code::IoError, "there is no store"))),
    };
    let (outcome, entry) = match stored {
        Ok((outcome, lease)) => (outcome, Entry::Stored(lease)),
        Err(error) if options.mode == Mode::Preferred && can_fall_back(&error) => {
            // What was done for the store was in vain.
            done.blocks_reused = 0;
            let made = done.timed("transform", |done| memory::make(outline, &action, options, done));
            let entry = made.map_err(|e| match e.code() {
                Code::InsufficientMemory => {
                    e.context(format!("the store could not be used ({}: {})", error.code(), error.message()))
                }
                _ => e,
            })?;
            (Outcome::Fallback(error), Entry::Memory(entry))
        }
        Err(error) => return Err(error),
    };
    done.timings.insert("total", start.elapsed());
    Ok(Built { action, outcome, entry, done })
}

/// Whether a result in memory is an answer to this error.
fn can_fall_back(error: &Error) -> bool {
    let final_whatever = [Code::Interrupted, Code::IdentityCollision, Code::InsufficientMemory];
    error.code().fault() == Fault::Environment && !final_whatever.contains(&error.code())
}

/// A cache that is written and not read.
struct Unbelieved<'a>(&'a dyn DigestCache);

impl DigestCache for Unbelieved<'_> {
    fn load(&self, _: &FileIdentity) -> Option<BTreeMap<TensorName, TensorDigest>> {
        None
    }

    fn save(&self, file: &FileIdentity, digests: &BTreeMap<TensorName, TensorDigest>) {
        self.0.save(file, digests);
    }
}

fn hash_sources(
    outline: &Outline<'_>,
    cache: &dyn DigestCache,
    options: &BuildOptions<'_>,
    done: &mut Done,
) -> Result<SourceDigests> {
    let digests = source_digests(outline.checkpoint(), cache, options.pool, options.progress)?;
    done.source_bytes_read += digests.bytes_read;
    done.bytes_hashed += digests.bytes_read;
    Ok(digests)
}

fn find_or_publish(
    outline: &Outline<'_>,
    store: &Store,
    action: &Action,
    options: &BuildOptions<'_>,
    done: &mut Done,
) -> Result<(Outcome, Lease)> {
    // A corrupt blob is in quarantine once it has been reported, so looking
    // again finds no entry, and the next corrupt one is another blob.
    let mut remote = options.remote;
    let mut outcome = Outcome::Hit;
    for _ in 0..8 {
        let found = done.timed("open", |_| store.lease(&action.key, options.verify, options.pool, options.progress));
        match found {
            Ok(Some(lease)) => return Ok((outcome, lease)),
            Err(error) if error.code() == Code::CorruptBlob => continue,
            Err(error) => return Err(error),
            Ok(None) => {}
        }
        if let Some(remote) = remote.take()
            && done.timed("pull", |_| remote.fetch(store, &action.key))?
        {
            outcome = Outcome::Pulled;
            continue;
        }
        let claim = done.timed("wait", |_| store.claim(&action.key, &action.canonical, options.progress))?;
        let Claim::Build(publication) = claim else { continue };
        publish::publish(outline, store, action, publication, options, done)?;
        // What was just written has been hashed on the way.
        let lease = store.lease(&action.key, Verify::Never, options.pool, options.progress)?;
        if let Some(lease) = lease {
            return Ok((Outcome::Built, lease));
        }
    }
    Err(Error::new(
        Code::CorruptBlob,
        format!("the entry {} is corrupt or evicted as often as it is built", action.key),
    )
    .hint("check the disk: `weightmill store doctor` says what is wrong"))
}

/// The graph of all plans, with their fuel.
fn plan(outline: &Outline<'_>, done: &mut Done) -> Result<Graph> {
    done.timed("plan", |_| Ok(Graph::new(outline.checkpoint().clone(), outline.steps()?)))
}

/// After the last read: is the source still what it was?
fn check_sources(outline: &Outline<'_>) -> Result<()> {
    outline.checkpoint().files().iter().try_for_each(|file| file.check_unchanged())
}
