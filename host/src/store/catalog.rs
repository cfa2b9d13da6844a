//! What is in the store: its entries, what they reach, and when they were used.
//!
//! Nothing here takes a lease or moves anything aside: a look must not change
//! what it looks at.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::Path;
use std::time::SystemTime;

use super::document::EntryDocument;
use super::lease::EntryRecord;
use super::paths::named_by;
use super::shard::ShardLayout;
use super::storage::{failed, read_whole};
use super::{Inner, Store};
use crate::digest::{ActionKey, BlobDigest, ModuleDigest};
use crate::error::{Code, Error, Result};

/// The largest action that is read.
const ACTION_LIMIT_BYTES: u64 = 1 << 30;

/// An entry of the store.
#[derive(Clone, Debug)]
pub struct EntryInfo {
    /// Its key.
    pub key: ActionKey,
    /// Its document; `Err` says why there is none that can be used.
    pub document: Result<EntryDocument, String>,
    /// Bytes of all blobs that it is made of.
    pub size_bytes: u64,
    /// How many of these bytes other entries are made of too.
    pub shared_bytes: u64,
    /// When it was last leased, or published if it never was. Never later
    /// than now, whatever the clock of the host said that leased it.
    pub last_used: SystemTime,
}

/// An entry as its record and document give it.
pub(crate) struct Listed {
    pub(crate) document: Result<(EntryDocument, Vec<ShardLayout>), String>,
    /// The blobs that it is made of and the bytes that each should have.
    pub(crate) blobs: BTreeMap<BlobDigest, u64>,
    pub(crate) last_used: SystemTime,
}

/// Everything that roots reach.
#[derive(Default)]
pub(crate) struct Reach {
    pub(crate) entries: BTreeMap<ActionKey, Listed>,
    pub(crate) modules: BTreeMap<ModuleDigest, u64>,
}

impl Listed {
    pub(crate) fn size_bytes(&self) -> u64 {
        self.blobs.values().sum()
    }
}

impl Reach {
    /// How many roots reach each blob, and its bytes.
    pub(crate) fn uses(&self) -> BTreeMap<BlobDigest, (usize, u64)> {
        let mut uses: BTreeMap<BlobDigest, (usize, u64)> = BTreeMap::new();
        let of_entries = self.entries.values().flat_map(|entry| entry.blobs.iter().map(|(d, size)| (*d, *size)));
        let of_modules = self.modules.iter().map(|(d, size)| (BlobDigest::from_bytes(*d.as_bytes()), *size));
        for (digest, size) in of_entries.chain(of_modules) {
            uses.entry(digest).or_insert((0, size)).0 += 1;
        }
        uses
    }
}

impl Store {
    /// The entries, ascending by key.
    ///
    /// # Errors
    /// `io_error`.
    pub fn entries(&self) -> Result<Vec<EntryInfo>> {
        let reach = self.0.reach()?;
        let uses = reach.uses();
        let shared = |entry: &Listed| entry.blobs.iter().filter(|(d, _)| uses[*d].0 > 1).map(|(_, size)| size).sum();
        let info = |(key, entry): (&ActionKey, &Listed)| EntryInfo {
            key: *key,
            document: entry.document.as_ref().map(|(document, _)| document.clone()).map_err(Clone::clone),
            size_bytes: entry.size_bytes(),
            shared_bytes: shared(entry),
            last_used: entry.last_used,
        };
        Ok(reach.entries.iter().map(info).collect())
    }

    /// The action of a key, checked against it: `None` if it is not here.
    ///
    /// # Errors
    /// `io_error`; `digest_mismatch` if it is not the key's.
    pub fn action(&self, key: &ActionKey) -> Result<Option<Vec<u8>>> {
        self.0.action(key)
    }
}

impl Inner {
    pub(crate) fn action(&self, key: &ActionKey) -> Result<Option<Vec<u8>>> {
        let path = self.paths.action(key);
        let read = |file| read_whole(&*self.storage, &file, ACTION_LIMIT_BYTES);
        let bytes = match self.storage.open_read(&path).and_then(read) {
            Ok(bytes) => bytes.unwrap_or_default(),
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(failed("read", &path, &e)),
        };
        if ActionKey::of(&bytes) != *key {
            let message = format!("{} hashes to {}, expected its name", path.display(), ActionKey::of(&bytes));
            return Err(Error::new(Code::DigestMismatch, message)
                .hint("run `weightmill store doctor --fix`, then build the entry again"));
        }
        Ok(Some(bytes))
    }

    /// Reads all roots.
    pub(crate) fn reach(&self) -> Result<Reach> {
        let mut reach = Reach::default();
        for name in self.names(&self.paths.entries())? {
            if let Some(key) = named_by(&name)
                && let Some(listed) = self.listed(&key)?
            {
                reach.entries.insert(key, listed);
            }
        }
        for name in self.names(&self.paths.modules())? {
            let Some(digest) = named_by::<ModuleDigest>(&name) else { continue };
            let blob = self.paths.blob(&BlobDigest::from_bytes(*digest.as_bytes()));
            reach.modules.insert(digest, self.storage.metadata(&blob).map_or(0, |m| m.len()));
        }
        Ok(reach)
    }

    /// An entry as its record gives it; `None` if it was removed meanwhile.
    fn listed(&self, key: &ActionKey) -> Result<Option<Listed>> {
        let path = self.paths.entry(key);
        let published = match self.modified(&path) {
            Ok(Some(published)) => published,
            Ok(None) => return Ok(None),
            Err(e) => return Err(failed("look at", &path, &e)),
        };
        let leased = self.modified(&self.paths.leased(key)).ok().flatten();
        let last_used = leased.map_or(published, |leased| leased.max(published)).min(SystemTime::now());
        let record = match self.entry_record(key) {
            Ok(record) => record,
            Err(e) if e.code() == Code::EntryNotTrusted => {
                let document = Err(e.message().to_owned());
                return Ok(Some(Listed { document, blobs: BTreeMap::new(), last_used }));
            }
            Err(e) => return Err(e),
        };
        let document = match record {
            None => Err("its record is torn or is none".to_owned()),
            Some(record) => self.peek(key, &record)?,
        };
        let mut blobs: BTreeMap<BlobDigest, u64> = record.iter().map(|r| (r.digest, r.size_bytes)).collect();
        if let Ok((document, _)) = &document {
            blobs.extend(document.shards.iter().flat_map(|s| [(s.digest, s.size), (s.leaves, s.leaves_size)]));
        }
        Ok(Some(Listed { document, blobs, last_used }))
    }

    /// An entry's document, without moving a corrupt one aside. That it
    /// cannot be read for now is an error, not a finding.
    fn peek(&self, key: &ActionKey, record: &EntryRecord) -> Result<Result<(EntryDocument, Vec<ShardLayout>), String>> {
        let blob = match self.open_blob(&record.digest) {
            Ok(Some(blob)) => blob,
            Ok(None) => return Ok(Err(format!("its document {} is gone", record.digest))),
            Err(e) if e.code() == Code::EntryNotTrusted => return Ok(Err(e.message().to_owned())),
            Err(e) => return Err(e),
        };
        let bytes = read_whole(&*self.storage, &blob.file, 1 << 32).map_err(|e| failed("read", &blob.path, &e))?;
        let bytes = bytes.unwrap_or_default();
        if BlobDigest::of(&bytes) != record.digest {
            return Ok(Err(format!("its document {} is corrupt", record.digest)));
        }
        Ok(self.parse_document(key, record, &bytes).map_err(|e| e.message().to_owned()))
    }

    /// When a file was last modified; `None` if there is none.
    pub(crate) fn modified(&self, path: &Path) -> std::io::Result<Option<SystemTime>> {
        match self.storage.metadata(path) {
            Ok(metadata) => metadata.modified().map(Some),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// The blobs in the store with their sizes.
    pub(crate) fn blob_sizes(&self) -> Result<BTreeMap<BlobDigest, u64>> {
        let names: BTreeSet<BlobDigest> =
            self.names(&self.paths.blobs())?.iter().filter_map(|name| named_by(name)).collect();
        let mut sizes = BTreeMap::new();
        for digest in names {
            let path = self.paths.blob(&digest);
            match self.storage.metadata(&path) {
                Ok(metadata) => drop(sizes.insert(digest, metadata.len())),
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                Err(e) => return Err(failed("look at", &path, &e)),
            }
        }
        Ok(sizes)
    }
}
