//! The doctor: every inconsistency of a store, explained and, if asked,
//! repaired.
//!
//! It looks alone, under the exclusive store lock, so that a build in progress
//! is not mistaken for leftovers. It looks at structure (names, sizes, owners,
//! modes, headers, digests of documents, actions and weak records), not at the
//! bytes of shards: that is what [`Store::verify_all`] does.
//!
//! A repair only ever removes what can be made again, or moves it into
//! quarantine: an entry that is not whole loses its record, and the next build
//! makes it anew, from its whole blocks where it has such.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::catalog::{Listed, Reach};
use super::document::ShardRecord;
use super::locks::try_lock;
use super::paths::{key_of_work, named_by};
use super::permissions::Trust;
use super::records::Kind;
use super::shard::ShardLayout;
use super::storage::{FilesystemKind, Sharing, failed};
use super::verify::header_damage;
use super::writer::BLOB_MODE;
use super::{Inner, Store};
use crate::digest::{ActionKey, BlobDigest, ModuleDigest, RecordDigest};
use crate::error::Result;
use crate::progress::Progress;

/// Something in a store that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Where.
    pub path: PathBuf,
    /// What is wrong, and what it means.
    pub what: String,
    /// What the repair is; `None` if only a person can decide.
    pub repair: Option<String>,
    /// Whether it was done.
    pub repaired: bool,
}

/// What the doctor works with.
struct Round<'a> {
    inner: &'a Inner,
    fix: bool,
    progress: &'a dyn Progress,
    findings: Vec<Finding>,
}

impl Store {
    /// Looks for everything that is not as it should be; with `fix`, repairs
    /// what it can. An empty answer is a healthy store.
    ///
    /// # Errors
    /// `lock_timeout` if the store is in use; `io_error`.
    pub fn doctor(&self, fix: bool, progress: &dyn Progress) -> Result<Vec<Finding>> {
        let inner = &*self.0;
        let mut round = Round { inner, fix, progress, findings: Vec::new() };
        round.folders()?;
        let _store = inner.lock_store(progress)?;
        let mut reach = inner.reach()?;
        // First, so that what this very look moves aside is kept.
        round.quarantine()?;
        round.work()?;
        round.entries(&mut reach)?;
        round.modules(&mut reach)?;
        round.blobs(&reach)?;
        round.actions(&reach)?;
        round.records(&reach)?;
        Ok(round.findings)
    }
}

impl Round<'_> {
    /// Notes a finding and, if asked, repairs it.
    fn found(
        &mut self,
        path: &Path,
        what: impl Into<String>,
        repair: Option<&str>,
        act: impl FnOnce(&Inner) -> Result<()>,
    ) -> Result<()> {
        let repaired = self.fix && repair.is_some();
        if repaired {
            act(self.inner)?;
        }
        let repair = repair.map(str::to_owned);
        self.findings.push(Finding { path: path.to_owned(), what: what.into(), repair, repaired });
        Ok(())
    }

    fn remove(&mut self, path: &Path, what: impl Into<String>) -> Result<()> {
        self.found(path, what, Some("remove it"), |inner| inner.remove_file(path).map(drop))
    }

    fn report(&mut self, path: &Path, what: impl Into<String>) -> Result<()> {
        self.found(path, what, None, |_| Ok(()))
    }

    /// Names in a folder that are digests; others are reported.
    fn digests<D: std::str::FromStr>(&mut self, dir: &Path, suffix: &str) -> Result<Vec<(D, PathBuf)>> {
        let mut found = Vec::new();
        for name in self.inner.names(dir)? {
            let path = dir.join(&name);
            let stem = name.to_str().and_then(|name| name.strip_suffix(suffix)).map(OsStr::new);
            match stem.and_then(named_by) {
                Some(digest) => found.push((digest, path)),
                None => self.stranger(&path)?,
            }
        }
        Ok(found)
    }

    fn stranger(&mut self, path: &Path) -> Result<()> {
        self.report(path, "nothing of weightmill has such a name here: somebody else put it here")
    }

    fn folders(&mut self) -> Result<()> {
        let inner = self.inner;
        let root = &inner.paths.root;
        if let FilesystemKind::Foreign(name) = inner.storage.kind(root).map_err(|e| failed("look at", root, &e))? {
            self.report(
                root,
                format!("the store is on {name}, where locks and syncs cannot be relied on: move it to a local disk"),
            )?;
        }
        for dir in inner.paths.folders() {
            match inner.storage.metadata(&dir) {
                Ok(metadata) => {
                    if let Err(error) = Trust::of_root(&dir, &metadata) {
                        self.report(&dir, error.message().to_owned())?;
                    }
                }
                Err(e) if e.kind() == ErrorKind::NotFound => {
                    let act = |inner: &Inner| inner.create_layout();
                    self.found(&dir, "a folder of the store is missing", Some("create it"), act)?;
                }
                Err(e) => return Err(failed("look at", &dir, &e)),
            }
        }
        Ok(())
    }

    fn work(&mut self) -> Result<()> {
        let inner = self.inner;
        for name in inner.names(&inner.paths.tmp())? {
            let path = inner.paths.tmp().join(&name);
            let Some(key) = key_of_work(&name) else {
                self.remove(&path, "a file that was being written when its writer died")?;
                continue;
            };
            if try_lock(&*inner.storage, &inner.paths.build_lock(&key), Sharing::Exclusive)?.is_some() {
                let what = format!("the unfinished build of {key}, whose builder is dead");
                self.found(&path, what, Some("remove it"), |inner| {
                    inner.remove_work(&path).map_err(|e| failed("remove", &path, &e))
                })?;
            }
        }
        Ok(())
    }

    fn entries(&mut self, reach: &mut Reach) -> Result<()> {
        let inner = self.inner;
        for name in inner.names(&inner.paths.entries())? {
            let path = inner.paths.entries().join(&name);
            let text = name.to_string_lossy();
            if text.starts_with('.') && text.ends_with(".new") {
                self.remove(&path, "an entry record that was being written when its writer died")?;
            } else if named_by::<ActionKey>(&name).is_none() {
                self.stranger(&path)?;
            }
        }
        let mut broken = Vec::new();
        for (key, listed) in &reach.entries {
            if let Some(what) = self.problem_of(key, listed)? {
                let path = inner.paths.entry(key);
                let repair = "remove the entry: the next build makes it again, from its whole blocks";
                self.found(&path, format!("the entry is not whole: {what}"), Some(repair), |inner| {
                    inner.remove_entry(key)
                })?;
                broken.push(*key);
            }
            if inner
                .modified(&inner.paths.leased(key))
                .ok()
                .flatten()
                .is_some_and(|t| t > SystemTime::now() + CLOCK_SLACK)
            {
                let path = inner.paths.leased(key);
                let what = "it was last leased in the future: the clock of this host, or of another that uses the store, is wrong";
                self.found(&path, what, Some("set it to now"), |inner| {
                    inner.storage.touch(&path).map_err(|e| failed("touch", &path, &e))
                })?;
            }
        }
        if self.fix {
            broken.iter().for_each(|key| drop(reach.entries.remove(key)));
        }
        Ok(())
    }

    /// What makes an entry unusable, if anything does.
    fn problem_of(&mut self, key: &ActionKey, listed: &Listed) -> Result<Option<String>> {
        let (document, layouts) = match &listed.document {
            Ok(parsed) => parsed,
            Err(what) => return Ok(Some(what.clone())),
        };
        for (record, layout) in document.shards.iter().zip(layouts) {
            let block =
                document.blocks.iter().find(|b| b.shards.iter().any(|s| document.shards[*s as usize] == *record));
            if let Some(what) = self.problem_of_shard(record, layout)? {
                return Ok(Some(format!("block '{}': {what}", block.map_or("", |b| &b.name))));
            }
        }
        Ok(match self.inner.action(key) {
            Ok(Some(_)) => None,
            Ok(None) => Some("its action is gone".into()),
            Err(error) => Some(error.message().to_owned()),
        })
    }

    fn problem_of_shard(&mut self, record: &ShardRecord, layout: &ShardLayout) -> Result<Option<String>> {
        for (what, digest, size) in
            [("shard", record.digest, record.size), ("leaf list", record.leaves, record.leaves_size)]
        {
            let blob = match self.inner.open_blob(&digest) {
                Ok(Some(blob)) => blob,
                Ok(None) => return Ok(Some(format!("its {what} {digest} is gone"))),
                Err(error) => return Ok(Some(error.message().to_owned())),
            };
            let mut wrong =
                (blob.metadata.len() != size).then(|| format!("it has {} bytes, expected {size}", blob.metadata.len()));
            if what == "shard" {
                wrong = wrong.or_else(|| header_damage(&*self.inner.storage, &blob.file, layout));
            }
            if let Some(wrong) = wrong {
                if self.fix {
                    self.inner.quarantine(&digest, &blob.metadata, &wrong, self.progress)?;
                }
                return Ok(Some(format!("its {what} {digest} is corrupt: {wrong}")));
            }
        }
        Ok(None)
    }

    fn modules(&mut self, reach: &mut Reach) -> Result<()> {
        let inner = self.inner;
        for (digest, path) in self.digests::<ModuleDigest>(&inner.paths.modules(), "")? {
            let blob = BlobDigest::from_bytes(*digest.as_bytes());
            let what = match inner.open_blob(&blob) {
                Ok(Some(open)) => {
                    inner.sound_bytes(&open, &blob).err().map(|what| format!("its bytes are corrupt: {what}"))
                }
                Ok(None) => Some("its bytes are gone".into()),
                Err(error) => Some(error.message().to_owned()),
            };
            if let Some(what) = what {
                self.remove(&path, format!("the module cannot be used: {what}; put it here again"))?;
                if self.fix {
                    reach.modules.remove(&digest);
                }
            }
        }
        Ok(())
    }

    fn blobs(&mut self, reach: &Reach) -> Result<()> {
        let inner = self.inner;
        let uses = reach.uses();
        for (digest, path) in self.digests::<BlobDigest>(&inner.paths.blobs(), "")? {
            let metadata = inner.storage.metadata(&path).map_err(|e| failed("look at", &path, &e))?;
            if !uses.contains_key(&digest) {
                let what = format!(
                    "no entry and no module reaches this blob of {} bytes: an unfinished build left it, or gc was stopped",
                    metadata.len()
                );
                self.remove(&path, what)?;
            } else if metadata.is_file() && metadata.mode() & 0o7777 != BLOB_MODE {
                let what = format!(
                    "the blob has mode {:04o}, expected {BLOB_MODE:04o}: somebody may have changed it",
                    metadata.mode() & 0o7777
                );
                self.found(&path, what, Some("set the mode, and verify it at its next use"), |inner| {
                    inner.remove_file(&inner.paths.first(&digest))?;
                    let file = inner.storage.open_read(&path).map_err(|e| failed("open", &path, &e))?;
                    inner.storage.set_mode(&file, BLOB_MODE).map_err(|e| failed("make read-only", &path, &e))
                })?;
            }
        }
        Ok(())
    }

    fn actions(&mut self, reach: &Reach) -> Result<()> {
        let paths = &self.inner.paths;
        for (key, path) in self.digests::<ActionKey>(&paths.actions(), ".json")? {
            if !reach.entries.contains_key(&key) {
                self.remove(&path, "an action without an entry: an unfinished build left it")?;
            }
        }
        for (key, path) in self.digests::<ActionKey>(&paths.provenances(), "")? {
            if !reach.entries.contains_key(&key) {
                self.found(&path, "the provenance of an entry that is not there", Some("remove it"), |inner| {
                    inner.remove_work(&path).map_err(|e| failed("remove", &path, &e))
                })?;
            }
        }
        for (key, path) in self.digests::<ActionKey>(&paths.leases(), "")? {
            if !reach.entries.contains_key(&key) {
                self.remove(&path, "the last use of an entry that is not there")?;
            }
        }
        Ok(())
    }

    fn records(&mut self, reach: &Reach) -> Result<()> {
        let paths = &self.inner.paths;
        let torn = "the record is torn or corrupt; it counts as missing";
        let folders = [
            (paths.all_facts(), Kind::Facts),
            (paths.all_sources(), Kind::Source),
            (paths.blocks(), Kind::Block),
            (paths.firsts(), Kind::First),
            (paths.remotes(), Kind::Remote),
        ];
        for (dir, kind) in folders {
            for (_, path) in self.digests::<RecordDigest>(&dir, "")? {
                if self.inner.read_record::<serde_json::Value>(&path, kind).is_none() {
                    self.remove(&path, torn)?;
                }
            }
        }
        let uses = reach.uses();
        for (digest, path) in self.digests::<BlobDigest>(&paths.firsts(), "")? {
            if !uses.contains_key(&digest) {
                self.remove(&path, "it says that a blob was verified that is not there")?;
            }
        }
        for (key, path) in self.digests::<crate::digest::BlockKey>(&paths.blocks(), "")? {
            if self.inner.is_stale_block(&key) {
                self.remove(&path, "it names a known block whose shards are not all there")?;
            }
        }
        Ok(())
    }

    fn quarantine(&mut self) -> Result<()> {
        let inner = self.inner;
        for name in inner.names(&inner.paths.quarantine())? {
            let path = inner.paths.quarantine().join(&name);
            let size = inner.storage.metadata(&path).map_or(0, |m| m.len());
            if name.to_string_lossy().ends_with(".json") {
                self.remove(&path, "the note on a blob that failed verification")?;
            } else {
                let what = format!(
                    "a blob of {size} bytes that failed verification: look at it, for the disk or the memory may be failing"
                );
                self.remove(&path, what)?;
            }
        }
        Ok(())
    }
}

/// How far a clock may be ahead without being reported.
const CLOCK_SLACK: std::time::Duration = std::time::Duration::from_secs(60);
