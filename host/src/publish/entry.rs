//! Entries in registries.
//!
//! ```text
//! manifest  tag = key
//!   config  the entry document                         application/vnd.weightmill.entry.v1+json
//!   layers  shards, as ModelPack raw weights           application/vnd.cncf.model.weight.v1.raw
//!           leaf lists                                 application/vnd.weightmill.leaves.v1
//!           the action, whose SHA-256 is the key       application/vnd.weightmill.action.v1+json
//! ```
//!
//! All of them are blobs of the store as they are, and none holds a time, an
//! engine or a host: two hosts that build one key push one manifest. A shard
//! that two entries share is one blob of the repository.
//!
//! **Pulling** goes from what is small to what is large: manifest, document
//! (does it hold together, is it of this key?), trust (before a shard is asked
//! for), action (does it hash to the key?), then shards, each beside its leaf
//! list, several at once. The store's publish protocol makes the entry visible
//! when all of them are whole.

use std::collections::{BTreeMap, BTreeSet};

use super::client::{At, BlobSource, Registry};
use super::manifest::{Descriptor, MANIFEST, Manifest};
use super::module::ENVELOPE;
use super::transfer::{FileSource, download, in_parallel};
use super::trust::{Grounds, Trust};
use crate::canonical::to_canonical;
use crate::digest::{ActionKey, BlobDigest, ContentDigest};
use crate::error::{Code, Error, Result};
use crate::progress::{Progress, Quiet};
use crate::store::document::EntryDocument;
use crate::store::{Claim, Lease, Publication, ShardLayout, Store, Verify, check_leaves};

/// What an entry is as an artefact.
pub const ENTRY: &str = "application/vnd.weightmill.entry.v1";
pub(super) const DOCUMENT: &str = "application/vnd.weightmill.entry.v1+json";
const SHARD: &str = "application/vnd.cncf.model.weight.v1.raw";
const LEAVES: &str = "application/vnd.weightmill.leaves.v1";
pub(super) const ACTION: &str = "application/vnd.weightmill.action.v1+json";
/// Where a ModelPack tool puts a layer.
const FILE_PATH: &str = "org.cncf.model.filepath";
/// What an attestation of an entry is as an artefact.
pub const ENTRY_ATTESTATION: &str = "application/vnd.weightmill.entry.attestation.v1";

/// The largest entry document that is read: some hundred thousand tensors.
pub(super) const DOCUMENT_LIMIT_BYTES: u64 = 64 << 20;
/// The largest action that is read.
pub(super) const ACTION_LIMIT_BYTES: u64 = 128 << 20;

/// What a push did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Blobs that were sent.
    pub blobs: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Blobs that were there.
    pub blobs_present: usize,
    /// Blobs that the registry took from another repository.
    pub blobs_mounted: usize,
    /// Bytes that did not have to be sent.
    pub bytes_spared: u64,
}

/// An entry that was pushed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushedEntry {
    /// The manifest: the same from every host.
    pub manifest: Descriptor,
    /// Whether it was there already.
    pub present: bool,
    /// What was sent.
    pub sent: Sent,
}

/// What is asked of an entry that is pulled.
#[derive(Clone, Debug, Default)]
pub struct Demand {
    /// Whom the user trusts.
    pub trust: Trust,
    /// The content that it must have, if the caller knows: then nothing else
    /// has to vouch for it.
    pub content: Option<ContentDigest>,
    /// Whose signed reference said which content it must have, if not the
    /// caller did.
    pub content_said_by: Option<String>,
    /// Whether the registry itself is believed.
    pub believe_registry: bool,
    /// Envelopes that the caller has at hand.
    pub attestations: Vec<Vec<u8>>,
    /// What the caller knows of the entry, such as `recipe` and `model`: for
    /// the provenance, which is for people.
    pub labels: BTreeMap<String, String>,
}

/// An entry that was pulled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PulledEntry {
    /// Its content.
    pub content_digest: ContentDigest,
    /// Its manifest.
    pub manifest: BlobDigest,
    /// Why it is used.
    pub grounds: Grounds,
    /// Bytes of shards that came over the network.
    pub bytes_received: u64,
    /// Bytes of shards that were here.
    pub bytes_present: u64,
    /// Whether another process published it meanwhile.
    pub found: bool,
}

/// The manifest of an entry.
///
/// # Errors
/// `bad_params` if the document has no canonical form.
pub fn entry_manifest(document: &EntryDocument, action: &[u8]) -> Result<(Vec<u8>, Manifest)> {
    let bytes = to_canonical(document)?;
    let count = document.shards.len();
    let mut layers = Vec::new();
    let mut seen = BTreeSet::new();
    for (index, shard) in document.shards.iter().enumerate() {
        if seen.insert(shard.digest) {
            let name = format!("model-{:05}-of-{count:05}.safetensors", index + 1);
            layers.push(Descriptor::new(SHARD, shard.digest, shard.size).annotated(FILE_PATH, name));
        }
    }
    for shard in &document.shards {
        if seen.insert(shard.leaves) {
            layers.push(Descriptor::new(LEAVES, shard.leaves, shard.leaves_size));
        }
    }
    layers.push(Descriptor::of(ACTION, action));
    let mut manifest = Manifest::new(Some(ENTRY), Descriptor::of(DOCUMENT, &bytes), layers);
    manifest.annotations = BTreeMap::from([
        ("dev.weightmill.content".to_owned(), document.content_digest.to_string()),
        ("dev.weightmill.key".to_owned(), document.key.to_string()),
    ]);
    Ok((bytes, manifest))
}

/// Pushes an entry that is leased; `action` is its action.
///
/// # Errors
/// `identity_collision` if the registry has other content for the key, which
/// stays; `network_error`, `registry_refused`, `registry_timeout`,
/// `interrupted`; `corrupt_blob`.
pub fn push_entry(
    registry: &Registry,
    lease: &Lease,
    action: &[u8],
    mount_from: Option<&str>,
    progress: &dyn Progress,
) -> Result<PushedEntry> {
    let document = lease.document();
    let (bytes, manifest) = entry_manifest(document, action)?;
    let manifest_bytes = manifest.to_bytes()?;
    let descriptor = Descriptor::of(MANIFEST, &manifest_bytes);
    let tag = document.key.to_string();
    registry.guarded(progress, || {
        match registry.resolve(&tag, progress)? {
            Some(found) if found == descriptor.digest => {
                return Ok(PushedEntry { manifest: descriptor.clone(), present: true, sent: Sent::default() });
            }
            Some(found) => return Err(collision(registry, &tag, &found, &descriptor.digest)),
            None => {}
        }
        let sent = push_blobs(registry, lease, &manifest, &bytes, action, mount_from, progress)?;
        registry.put_manifest(&At::Tag(tag.clone()), &manifest, progress)?;
        Ok(PushedEntry { manifest: descriptor.clone(), present: false, sent })
    })
}

fn collision(registry: &Registry, tag: &str, found: &BlobDigest, ours: &BlobDigest) -> Error {
    Error::new(
        Code::IdentityCollision,
        format!(
            "{} has another manifest for the key {tag}: sha256:{found}, this entry's is sha256:{ours}",
            registry.repository()
        ),
    )
    .hint("one of the two builds was wrong, or somebody put something else there: nothing was replaced; pull it into another store and compare the two with `weightmill diff`")
}

fn push_blobs(
    registry: &Registry,
    lease: &Lease,
    manifest: &Manifest,
    document: &[u8],
    action: &[u8],
    mount_from: Option<&str>,
    progress: &dyn Progress,
) -> Result<Sent> {
    use super::client::Pushed;
    let shards: BTreeMap<BlobDigest, usize> =
        lease.document().shards.iter().enumerate().map(|(index, shard)| (shard.digest, index)).collect();
    let leaves: BTreeMap<BlobDigest, usize> =
        lease.document().shards.iter().enumerate().map(|(index, shard)| (shard.leaves, index)).collect();
    let blobs: Vec<&Descriptor> = manifest.layers.iter().chain([&manifest.config]).collect();
    progress.stage("pushing", blobs.iter().map(|blob| blob.size).sum());
    let push = |source: &dyn BlobSource, blob: &Descriptor| {
        registry.push_blob(&blob.digest, blob.size, source, mount_from, progress)
    };
    let pushed = in_parallel(blobs.len(), registry.options().connections, |index| {
        let blob = blobs[index];
        let outcome = if let Some(&shard) = shards.get(&blob.digest) {
            let file = lease.shard_file(shard).clone();
            push(&FileSource { file, size_bytes: blob.size, progress }, blob)?
        } else if let Some(&shard) = leaves.get(&blob.digest) {
            push(&lease.leaf_list(shard, &Quiet(progress))?.as_slice(), blob)?
        } else if blob.media_type == ACTION {
            push(&action, blob)?
        } else {
            push(&document, blob)?
        };
        if outcome != Pushed::Sent {
            progress.advance(blob.size);
        }
        Ok(outcome)
    })?;
    let mut sent = Sent::default();
    for (blob, outcome) in blobs.iter().zip(pushed) {
        match outcome {
            Pushed::Sent => {
                sent.blobs += 1;
                sent.bytes += blob.size;
                continue;
            }
            Pushed::Present => sent.blobs_present += 1,
            Pushed::Mounted => sent.blobs_mounted += 1,
        }
        sent.bytes_spared += blob.size;
    }
    Ok(sent)
}

/// An entry's manifest and document, as a registry gives them: they hold
/// together, and are not judged yet.
pub(super) struct Offered {
    pub(super) manifest: BlobDigest,
    pub(super) action: Descriptor,
    pub(super) document: EntryDocument,
    pub(super) document_digest: BlobDigest,
    pub(super) layouts: Vec<ShardLayout>,
}

/// Pulls an entry into the store, if the registry has it and it is trusted:
/// `None` if the registry does not have it.
///
/// # Errors
/// `entry_not_trusted`, saying what to add; `digest_mismatch`, naming what is
/// not what it should be; `network_error`, `registry_refused`,
/// `registry_timeout`, `interrupted`; what the store says. Then nothing is
/// visible in the store; what has arrived of shards is continued next time.
pub fn pull_entry(
    store: &Store,
    registry: &Registry,
    key: &ActionKey,
    demand: &Demand,
    pool: &rayon::ThreadPool,
    progress: &dyn Progress,
) -> Result<Option<PulledEntry>> {
    registry.guarded(progress, || {
        let Some(offered) = offered(registry, key, progress)? else { return Ok(None) };
        let grounds = judge(registry, &offered, demand, progress)?;
        let action = registry.small_blob(&offered.action.digest, ACTION_LIMIT_BYTES, progress)?;
        check_action(key, &action, &registry.repository().to_string())?;
        let mut pulled = PulledEntry {
            content_digest: offered.document.content_digest,
            manifest: offered.manifest,
            grounds,
            bytes_received: 0,
            bytes_present: offered.document.shards.iter().map(|s| s.size).sum(),
            found: true,
        };
        let publication = match store.claim(key, &action, progress)? {
            Claim::Found => {
                check_stored(store, key, &pulled.content_digest, pool, progress)?;
                return Ok(Some(pulled));
            }
            Claim::Build(publication) => publication,
        };
        pulled.found = false;
        pulled.bytes_received = receive_shards(store, registry, &publication, &offered, pool, progress)?;
        pulled.bytes_present -= pulled.bytes_received;
        let from = registry.repository().at(offered.manifest).to_string();
        let provenance = provenance(&from, &pulled.grounds, &action, &demand.labels);
        let vouched = pulled.grounds.cover_document();
        publication.commit_received(offered.document, &provenance, vouched, pool, progress)?;
        Ok(Some(pulled))
    })
}

/// Checks that the entry which the store has for a key is the one that is
/// offered.
pub(super) fn check_stored(
    store: &Store,
    key: &ActionKey,
    offered: &ContentDigest,
    pool: &rayon::ThreadPool,
    progress: &dyn Progress,
) -> Result<()> {
    let stored = store.lease(key, Verify::Never, pool, progress)?.map(|lease| lease.document().content_digest);
    match stored {
        Some(stored) if stored != *offered => Err(Error::new(
            Code::IdentityCollision,
            format!("the store has the entry {key} with the content {stored}, what is offered has {offered}"),
        )
        .hint("one of the two builds was wrong: look at both before you remove one with `weightmill store rm`")),
        _ => Ok(()),
    }
}

/// The provenance of an entry that was not built here.
pub(super) fn provenance(
    from: &str,
    grounds: &Grounds,
    action: &[u8],
    labels: &BTreeMap<String, String>,
) -> serde_json::Value {
    let action: serde_json::Value = serde_json::from_slice(action).unwrap_or_default();
    let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let mut provenance = serde_json::json!({
        "program": concat!("weightmill ", env!("CARGO_PKG_VERSION")),
        "pulled_from": from,
        "pulled_at_unix_s": seconds,
        "trusted": grounds.to_string(),
        "host": rustix::system::uname().nodename().to_string_lossy(),
        "tp_size": action["tp"]["size"],
        "tp_rank": action["tp"]["rank"],
    });
    labels.iter().for_each(|(name, value)| provenance[name] = value.clone().into());
    provenance
}

/// Checks that an action is that of the key.
pub(super) fn check_action(key: &ActionKey, action: &[u8], from: &str) -> Result<()> {
    if ActionKey::of(action) == *key {
        return Ok(());
    }
    Err(Error::new(
        Code::DigestMismatch,
        format!("the action that {from} gives for the key {key} hashes to {}", ActionKey::of(action)),
    )
    .hint("something else was published under this key: nothing was kept"))
}

fn offered(registry: &Registry, key: &ActionKey, progress: &dyn Progress) -> Result<Option<Offered>> {
    let from = format!("{}:{key}", registry.repository());
    let Some(fetched) = registry.manifest(&At::Tag(key.to_string()), progress)? else { return Ok(None) };
    let manifest = Manifest::parse(&fetched.bytes, &from)?;
    let size = manifest.config.size.min(DOCUMENT_LIMIT_BYTES);
    let bytes = registry.small_blob(&manifest.config.digest, size, progress)?;
    Offered::read(key, fetched.digest, &manifest, &bytes, &from).map(Some)
}

impl Offered {
    /// Reads a manifest and its config, which hash to what they should.
    pub(super) fn read(
        key: &ActionKey,
        manifest_digest: BlobDigest,
        manifest: &Manifest,
        bytes: &[u8],
        from: &str,
    ) -> Result<Self> {
        let refuse = |what: String| {
            Error::new(Code::DigestMismatch, format!("what {from} gives is no entry of weightmill: {what}"))
                .hint("something else was published under this key, by another version or by mistake: nothing was kept")
        };
        if manifest.config.media_type != DOCUMENT {
            return Err(refuse(format!("its config is of '{}'", manifest.config.media_type.escape_debug())));
        }
        let document: EntryDocument =
            serde_json::from_slice(bytes).map_err(|e| refuse(format!("its document is malformed: {e}")))?;
        if document.key != *key {
            return Err(refuse(format!("it is of the key {}, asked for {key}", document.key)));
        }
        // Each shard costs a header in memory.
        if document.shards.len() > document.tensors.len().max(1) {
            return Err(refuse(format!(
                "it has {} shards for {} tensors",
                document.shards.len(),
                document.tensors.len()
            )));
        }
        let layouts = document.layouts().map_err(|e| refuse(e.message().to_owned()))?;
        if to_canonical(&document).ok().as_deref() != Some(bytes) {
            return Err(refuse("its document is not canonical".into()));
        }
        let mut actions = manifest.layers.iter().filter(|layer| layer.media_type == ACTION);
        let (Some(action), None) = (actions.next(), actions.next()) else {
            return Err(refuse("it has not exactly one action".into()));
        };
        let listed: BTreeMap<BlobDigest, u64> = manifest.layers.iter().map(|l| (l.digest, l.size)).collect();
        for shard in &document.shards {
            for (digest, size) in [(shard.digest, shard.size), (shard.leaves, shard.leaves_size)] {
                if listed.get(&digest) != Some(&size) {
                    return Err(refuse(format!("its manifest lacks the blob sha256:{digest} of {size} bytes")));
                }
            }
        }
        Ok(Offered {
            manifest: manifest_digest,
            action: action.clone(),
            document_digest: BlobDigest::of(bytes),
            document,
            layouts,
        })
    }
}

fn judge(registry: &Registry, offered: &Offered, demand: &Demand, progress: &dyn Progress) -> Result<Grounds> {
    let from = registry.repository().to_string();
    if let Some(grounds) = demand.waives(&offered.document, &from)? {
        return Ok(grounds);
    }
    let judged = demand.trust.judge_entry(&offered.document, &offered.document_digest, &demand.attestations, &from);
    if judged.is_ok() {
        return judged;
    }
    let mut attestations = demand.attestations.clone();
    attestations.extend(registry.attached(&offered.manifest, ENTRY_ATTESTATION, progress)?);
    demand.trust.judge_entry(&offered.document, &offered.document_digest, &attestations, &from)
}

impl Demand {
    /// Whether the caller's own word is enough, or rules the entry out.
    pub(super) fn waives(&self, document: &EntryDocument, from: &str) -> Result<Option<Grounds>> {
        match self.content {
            Some(content) if content == document.content_digest => {
                Ok(Some(self.content_said_by.clone().map_or(Grounds::Caller, Grounds::Reference)))
            }
            Some(content) => Err(Error::new(
                Code::EntryNotTrusted,
                format!(
                    "the entry {} of {from} has the content {}, expected {content}",
                    document.key, document.content_digest
                ),
            )
            .hint("the registry has another result for this key than the one that is asked for: nothing was kept")),
            None => Ok(self.believe_registry.then_some(Grounds::Caller)),
        }
    }
}

/// Sees to it that all shards are in the store and held by the publication:
/// how many of their bytes came over the network.
fn receive_shards(
    store: &Store,
    registry: &Registry,
    publication: &Publication,
    offered: &Offered,
    pool: &rayon::ThreadPool,
    progress: &dyn Progress,
) -> Result<u64> {
    let document = &offered.document;
    let total: u64 = document.shards.iter().map(|s| s.size).sum();
    let missing = document.shards.iter().filter(|s| !store.has_blob(&s.digest, s.size));
    publication.reserve(missing.map(|s| s.size + s.leaves_size).sum())?;
    progress.stage("pulling", total);
    let mut seen = BTreeSet::new();
    let distinct: Vec<usize> = (0..document.shards.len()).filter(|&s| seen.insert(document.shards[s].digest)).collect();
    let quiet = Quiet(progress);
    let received = in_parallel(distinct.len(), registry.options().connections, |index| {
        let shard = distinct[index];
        let (record, layout) = (&document.shards[shard], &offered.layouts[shard]);
        let take = || publication.take_shard(document, shard, layout, pool, &quiet);
        if take()? {
            progress.advance(record.size);
            return Ok(0);
        }
        let leaves = leaf_list(registry, publication, offered, shard, progress)?;
        let mut received = 0;
        if let Some(mut reception) = publication.receive(&record.digest, record.size, &quiet)? {
            received = record.size - reception.received_bytes();
            progress.advance(reception.received_bytes());
            download(registry, &record.digest, &mut reception, progress)?;
            reception.finish_shard(record, layout, &leaves, pool, progress)?;
        }
        match take()? {
            true => Ok(received),
            false => Err(Error::new(Code::CorruptBlob, format!("the shard {} vanished from the store", record.digest))
                .hint("another process moved it aside: run it again")),
        }
    })?;
    Ok(received.iter().sum())
}

fn leaf_list(
    registry: &Registry,
    publication: &Publication,
    offered: &Offered,
    shard: usize,
    progress: &dyn Progress,
) -> Result<Vec<u8>> {
    let record = &offered.document.shards[shard];
    let known = publication.small_blob(&record.leaves, progress)?;
    let fetched = known.is_none();
    let leaves = match known {
        Some(leaves) => leaves,
        None => registry.small_blob(&record.leaves, record.leaves_size, progress)?,
    };
    check_leaves(&offered.document, shard, &offered.layouts[shard], &leaves)?;
    if fetched {
        publication.put_small(&record.leaves, &leaves, progress)?;
    }
    Ok(leaves)
}

/// Attaches a signed statement to an entry that was pushed.
///
/// # Errors
/// Like [`Registry::attach`].
pub fn attach_attestation(
    registry: &Registry,
    manifest: &Descriptor,
    envelope: &[u8],
    progress: &dyn Progress,
) -> Result<BlobDigest> {
    registry.guarded(progress, || registry.attach(manifest, ENTRY_ATTESTATION, ENVELOPE, envelope, progress))
}
