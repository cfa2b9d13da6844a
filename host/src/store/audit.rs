//! Verifying everything in the store.

use std::collections::BTreeSet;

use super::Store;
use super::blobs::OpenShard;
use super::locks::lock;
use super::storage::Sharing;
use super::verify::Verify;
use crate::digest::{ActionKey, BlobDigest};
use crate::error::{Code, Error, Result};
use crate::progress::Progress;

/// What [`Store::verify_all`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Audit {
    /// Entries that were looked at.
    pub entries: u64,
    /// Modules that were looked at.
    pub modules: u64,
    /// Shards whose every byte was verified; a shared one counts once.
    pub shards: u64,
    /// Their bytes.
    pub bytes: u64,
    /// What is wrong, by what it is wrong with. The blobs are in quarantine
    /// where they could be moved.
    pub damaged: Vec<(Root, Error)>,
}

/// What keeps a blob in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Root {
    /// An entry.
    Entry(ActionKey),
    /// A module.
    Module(crate::digest::ModuleDigest),
}

impl Store {
    /// Verifies every byte of every entry and module. Each entry is leased
    /// while it is looked at, so gc and builders go on.
    ///
    /// # Errors
    /// `io_error`, `lock_timeout`, `interrupted`. Damage is no error, but in
    /// the answer.
    pub fn verify_all(&self, pool: &rayon::ThreadPool, progress: &dyn Progress) -> Result<Audit> {
        let mut audit = self.verify_entries(&self.keys()?, pool, progress)?;
        for digest in self.modules()? {
            audit.modules += 1;
            match self.module(&digest, progress) {
                Ok(Some(_)) => {}
                Ok(None) => {
                    let gone = Error::new(Code::CorruptBlob, format!("the bytes of the module {digest} are gone"));
                    audit.damaged.push((Root::Module(digest), gone.hint("put it into the store again")));
                }
                Err(error) => audit.damaged.push((Root::Module(digest), error)),
            }
        }
        Ok(audit)
    }

    /// Verifies every byte of some entries, each leased while it is looked at.
    /// Damage to a blob that several of them share is told once.
    ///
    /// # Errors
    /// Like [`Store::verify_all`].
    pub fn verify_entries(
        &self,
        keys: &[ActionKey],
        pool: &rayon::ThreadPool,
        progress: &dyn Progress,
    ) -> Result<Audit> {
        let mut audit = Audit::default();
        let mut seen = BTreeSet::new();
        for key in keys {
            let outcome = self.verify_entry(key, &mut seen, &mut audit, pool, progress);
            audit.entries += 1;
            if let Err(error) = outcome {
                match error.code() {
                    Code::CorruptBlob | Code::EntryNotTrusted => audit.damaged.push((Root::Entry(*key), error)),
                    _ => return Err(error),
                }
            }
        }
        Ok(audit)
    }

    /// The keys that have an entry record, ascending.
    ///
    /// # Errors
    /// `io_error`.
    pub fn keys(&self) -> Result<Vec<ActionKey>> {
        Ok(self.0.names(&self.0.paths.entries())?.iter().filter_map(|name| super::paths::named_by(name)).collect())
    }

    fn verify_entry(
        &self,
        key: &ActionKey,
        seen: &mut BTreeSet<BlobDigest>,
        audit: &mut Audit,
        pool: &rayon::ThreadPool,
        progress: &dyn Progress,
    ) -> Result<()> {
        let inner = &*self.0;
        let timeout = inner.options.lock_timeout;
        let _lease = lock(&*inner.storage, &inner.paths.lease_lock(key), Sharing::Shared, timeout, progress)?;
        let not_whole = || {
            Error::new(Code::CorruptBlob, format!("the entry {key} is not whole"))
                .hint("build it again; `weightmill store doctor` says what is missing")
        };
        // Removed since the listing, or torn.
        let Some(record) = inner.entry_record(key)? else { return Err(not_whole()) };
        let entry = inner.open_entry(key, &record, progress)?.ok_or_else(not_whole)?;
        for shard in entry.shards {
            if !seen.insert(shard.record.digest) {
                continue;
            }
            let bytes = shard.record.size;
            match inner.verify_shards(std::slice::from_ref::<OpenShard>(&shard), Verify::Always, pool, progress) {
                Ok(true) => {
                    audit.shards += 1;
                    audit.bytes += bytes;
                }
                Ok(false) => audit.damaged.push((Root::Entry(*key), not_whole())),
                Err(error) if error.code() == Code::CorruptBlob => audit.damaged.push((Root::Entry(*key), error)),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
