//! Eviction: bounding the store.
//!
//! gc works alone in the store, under the exclusive lock on `locks/store`: no
//! builder, no module install. Readers go on: they hold leases, and an entry
//! whose lease lock is not free at once is left alone. In this order:
//!
//! 1. entries are chosen: those older than `max_age`, then the least recently
//!    leased until what is left fits into `max_size_bytes`;
//! 2. their records are removed and `entries/` is synced, so that no crash
//!    can bring a record back without its blobs;
//! 3. blobs that no entry and no module reaches are removed;
//! 4. so is work whose build lock is free, and weak records that speak of
//!    what is gone.
//!
//! A crash between leaves blobs that nothing reaches, for the next gc. Age is
//! counted from the last lease by this host's clock; a time in the future (a
//! host with another clock) counts as now.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::catalog::{Listed, Reach};
use super::locks::{Lock, lock, try_lock};
use super::paths::{key_of_work, named_by};
use super::storage::{Sharing, failed};
use super::{Inner, Store};
use crate::digest::{ActionKey, BlobDigest, BlockKey};
use crate::error::{Code, Error, Result};
use crate::progress::Progress;

/// What gc should keep and what not.
#[derive(Clone, Debug, Default)]
pub struct GcPolicy {
    /// Evict until all that entries and modules are made of has at most so
    /// many bytes.
    pub max_size_bytes: Option<u64>,
    /// Evict what was not used for so long. Facts, source digests and what is
    /// in quarantine go at this age too.
    pub max_age: Option<Duration>,
    /// Never evict these.
    pub keep: BTreeSet<ActionKey>,
    /// Only say what would be done.
    pub dry_run: bool,
}

/// What gc did, or would do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GcReport {
    /// Entries that were evicted, in the order of their eviction.
    pub evicted: Vec<ActionKey>,
    /// Entries that would have been evicted, but are in use.
    pub in_use: Vec<ActionKey>,
    /// Blobs that were removed.
    pub blobs_removed: u64,
    /// Their bytes.
    pub bytes_freed: u64,
    /// Unfinished builds whose builder is dead, and other leftovers.
    pub work_removed: u64,
    /// Weak records that were removed.
    pub records_removed: u64,
    /// Bytes of all blobs before.
    pub size_before_bytes: u64,
    /// Bytes of all blobs after.
    pub size_after_bytes: u64,
}

impl Store {
    /// Evicts entries by a policy, and removes what nothing reaches.
    ///
    /// # Errors
    /// `lock_timeout` if builders never leave the store alone; `io_error`;
    /// `interrupted`.
    pub fn gc(&self, policy: &GcPolicy, progress: &dyn Progress) -> Result<GcReport> {
        let inner = &*self.0;
        let _store = inner.lock_store(progress)?;
        let mut reach = inner.reach()?;
        let mut report = GcReport::default();
        let mut held = Vec::new();
        for key in chosen_by_age(&reach, policy) {
            inner.evict(&key, &mut reach, policy.dry_run, &mut report, &mut held)?;
        }
        if let Some(max_size_bytes) = policy.max_size_bytes {
            for key in by_last_use(&reach, &policy.keep) {
                let total_bytes: u64 = reach.uses().values().map(|(_, size)| size).sum();
                if total_bytes <= max_size_bytes {
                    break;
                }
                if !report.in_use.contains(&key) {
                    inner.evict(&key, &mut reach, policy.dry_run, &mut report, &mut held)?;
                }
            }
        }
        inner.sweep(&reach, policy, &mut report, progress)?;
        Ok(report)
    }

    /// Removes one entry, and what only it reached.
    ///
    /// # Errors
    /// `lock_timeout` if it is in use, or the store is; `io_error`.
    pub fn remove(&self, key: &ActionKey, progress: &dyn Progress) -> Result<GcReport> {
        let inner = &*self.0;
        let _store = inner.lock_store(progress)?;
        let mut reach = inner.reach()?;
        let (mut report, mut held) = (GcReport::default(), Vec::new());
        if reach.entries.contains_key(key) {
            inner.evict(key, &mut reach, false, &mut report, &mut held)?;
            if report.in_use.contains(key) {
                let path = inner.paths.lease_lock(key);
                return Err(Error::new(Code::LockTimeout, format!("the entry {key} is in use"))
                    .hint(format!("end the processes that `fuser -v {}` shows, and run it again", path.display())));
            }
        }
        inner.sweep(&reach, &GcPolicy::default(), &mut report, progress)?;
        Ok(report)
    }
}

fn chosen_by_age(reach: &Reach, policy: &GcPolicy) -> Vec<ActionKey> {
    let Some(max_age) = policy.max_age else { return Vec::new() };
    let old = |key: &ActionKey| age(reach.entries[key].last_used) > max_age;
    by_last_use(reach, &policy.keep).into_iter().filter(old).collect()
}

/// The entries that may be evicted, least recently used first; equal times
/// ascending by key.
fn by_last_use(reach: &Reach, keep: &BTreeSet<ActionKey>) -> Vec<ActionKey> {
    let mut keys: Vec<(SystemTime, ActionKey)> =
        reach.entries.iter().filter(|(key, _)| !keep.contains(key)).map(|(key, e)| (e.last_used, *key)).collect();
    keys.sort_unstable();
    keys.into_iter().map(|(_, key)| key).collect()
}

/// How long ago a time was; nothing for one in the future.
fn age(time: SystemTime) -> Duration {
    SystemTime::now().duration_since(time).unwrap_or_default()
}

impl Inner {
    pub(crate) fn lock_store(&self, progress: &dyn Progress) -> Result<Lock> {
        let path = self.paths.store_lock();
        lock(&*self.storage, &path, Sharing::Exclusive, self.options.lock_timeout, progress)
    }

    /// Evicts an entry if nobody leases it. Its lock is kept until gc is done.
    fn evict(
        &self,
        key: &ActionKey,
        reach: &mut Reach,
        dry_run: bool,
        report: &mut GcReport,
        held: &mut Vec<Lock>,
    ) -> Result<()> {
        let Some(lease) = try_lock(&*self.storage, &self.paths.lease_lock(key), Sharing::Exclusive)? else {
            report.in_use.push(*key);
            return Ok(());
        };
        if !dry_run {
            self.remove_entry(key)?;
            held.push(lease);
        }
        reach.entries.remove(key);
        report.evicted.push(*key);
        Ok(())
    }

    /// Removes an entry's record for good, then what belongs to it alone. The
    /// lease lock is held, or nobody can lease it.
    pub(crate) fn remove_entry(&self, key: &ActionKey) -> Result<()> {
        self.remove_file(&self.paths.entry(key))?;
        self.sync_dir(&self.paths.entries())?;
        self.remove_file(&self.paths.action(key))?;
        self.remove_file(&self.paths.leased(key))?;
        let provenance = self.paths.provenance(key);
        self.remove_work(&provenance).map_err(|e| failed("remove", &provenance, &e))
    }

    /// Removes a file; that it is gone already is no error. Whether it was
    /// there.
    pub(crate) fn remove_file(&self, path: &Path) -> Result<bool> {
        match self.storage.unlink(path) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
            Err(e) => Err(failed("remove", path, &e)),
        }
    }

    /// Removes what nothing in `reach` needs. The store's lock is held.
    fn sweep(&self, reach: &Reach, policy: &GcPolicy, report: &mut GcReport, progress: &dyn Progress) -> Result<()> {
        let sizes = self.blob_sizes()?;
        let uses = reach.uses();
        report.size_before_bytes = sizes.values().sum();
        report.size_after_bytes = report.size_before_bytes;
        let unreached: BTreeMap<&BlobDigest, &u64> = sizes.iter().filter(|(d, _)| !uses.contains_key(d)).collect();
        for (digest, size) in &unreached {
            if progress.cancelled() {
                return Err(Error::new(Code::Interrupted, "stopped while removing blobs"));
            }
            if !policy.dry_run {
                self.remove_file(&self.paths.blob(digest))?;
            }
            report.blobs_removed += 1;
            report.bytes_freed += **size;
            report.size_after_bytes -= **size;
        }
        report.work_removed += self.sweep_work(policy.dry_run)?;
        if !policy.dry_run {
            report.records_removed += self.sweep_records(&reach.entries, policy.max_age)?;
        }
        Ok(())
    }

    /// Removes what dead processes left under `tmp/` and `entries/`. With the
    /// store's lock held no builder is alive; the build lock is looked at all
    /// the same. Temporaries of weak records may have a live writer, which then
    /// writes no record.
    pub(crate) fn sweep_work(&self, dry_run: bool) -> Result<u64> {
        let mut removed = 0;
        for name in self.names(&self.paths.tmp())? {
            let path = self.paths.tmp().join(&name);
            match key_of_work(&name) {
                Some(key) => {
                    let free = try_lock(&*self.storage, &self.paths.build_lock(&key), Sharing::Exclusive)?;
                    if free.is_none() {
                        continue;
                    }
                    if !dry_run {
                        self.remove_work(&path).map_err(|e| failed("remove", &path, &e))?;
                    }
                }
                None if !dry_run => drop(self.remove_file(&path)?),
                None => {}
            }
            removed += 1;
        }
        for name in self.names(&self.paths.entries())? {
            let text = name.to_string_lossy();
            if text.starts_with('.') && text.ends_with(".new") {
                if !dry_run {
                    self.remove_file(&self.paths.entries().join(&name))?;
                }
                removed += 1;
            }
        }
        Ok(removed)
    }

    /// Removes weak records that speak of blobs and entries that are gone, and
    /// those that only age can tell.
    pub(crate) fn sweep_records(
        &self,
        entries: &BTreeMap<ActionKey, Listed>,
        max_age: Option<Duration>,
    ) -> Result<u64> {
        let mut removed = 0;
        for key in self.names(&self.paths.blocks())?.iter().filter_map(|name| named_by::<BlockKey>(name)) {
            if self.is_stale_block(&key) {
                removed += u64::from(self.remove_file(&self.paths.block(&key))?);
            }
        }
        for name in self.names(&self.paths.firsts())? {
            let gone = named_by::<BlobDigest>(&name)
                .is_none_or(|digest| self.storage.metadata(&self.paths.blob(&digest)).is_err());
            if gone {
                removed += u64::from(self.remove_file(&self.paths.firsts().join(&name))?);
            }
        }
        let of_no_entry = |name: &str| name.parse().is_ok_and(|key: ActionKey| !entries.contains_key(&key));
        for name in self.names(&self.paths.actions())? {
            if name.to_str().and_then(|name| name.strip_suffix(".json")).is_some_and(of_no_entry) {
                removed += u64::from(self.remove_file(&self.paths.actions().join(&name))?);
            }
        }
        for name in self.names(&self.paths.leases())? {
            if name.to_str().is_some_and(of_no_entry) {
                removed += u64::from(self.remove_file(&self.paths.leases().join(&name))?);
            }
        }
        for name in self.names(&self.paths.provenances())? {
            if name.to_str().is_some_and(of_no_entry) {
                let dir = self.paths.provenances().join(&name);
                self.remove_work(&dir).map_err(|e| failed("remove", &dir, &e))?;
                removed += 1;
            }
        }
        let aging = [self.paths.all_facts(), self.paths.all_sources(), self.paths.quarantine()];
        for dir in aging.iter().filter(|_| max_age.is_some()) {
            for name in self.names(dir)? {
                let path = dir.join(&name);
                let modified = self.modified(&path).map_err(|e| failed("look at", &path, &e))?;
                if modified.is_some_and(|modified| Some(age(modified)) > max_age) {
                    removed += u64::from(self.remove_file(&path)?);
                }
            }
        }
        Ok(removed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;
    use crate::store::fixture::{Sample, open};
    use crate::store::{Claim, StoreOptions};
    use std::fs;

    fn set_last_use(store: &Store, sample: &Sample, when: SystemTime) {
        for path in [store.0.paths.leased(&sample.key), store.0.paths.entry(&sample.key)] {
            let file = fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
            file.set_modified(when).unwrap();
        }
    }

    fn long_ago(hours: u64) -> SystemTime {
        SystemTime::now() - Duration::from_secs(3600 * hours)
    }

    /// Three entries, last used 3, 2 and 1 hours ago.
    fn filled(root: &Path) -> (Store, [Sample; 3]) {
        let store = open(root);
        let samples = [Sample::new("a", 100_000, 1), Sample::new("b", 100_000, 2), Sample::new("c", 100_000, 3)];
        for (sample, hours) in samples.iter().zip([3, 2, 1]) {
            sample.publish(&store).unwrap();
            set_last_use(&store, sample, long_ago(hours));
        }
        (store, samples)
    }

    fn there(store: &Store) -> Vec<ActionKey> {
        store.entries().unwrap().iter().map(|e| e.key).collect()
    }

    #[test]
    fn the_least_recently_used_go_first_and_shared_blobs_stay() {
        let dir = tempfile::tempdir().unwrap();
        let (store, samples) = filled(dir.path());
        let entries = store.entries().unwrap();
        assert!(
            entries.iter().all(|e| e.shared_bytes > 40_000 && e.size_bytes > e.shared_bytes + 100_000),
            "{entries:?}"
        );
        let policy = GcPolicy { max_size_bytes: Some(300_000), ..GcPolicy::default() };
        let dry = store.gc(&GcPolicy { dry_run: true, ..policy.clone() }, &Silent).unwrap();
        assert_eq!(there(&store).len(), 3, "a dry run removes nothing");
        let report = store.gc(&policy, &Silent).unwrap();
        assert_eq!(report.evicted, [samples[0].key]);
        assert_eq!((report.blobs_removed, report.bytes_freed), (dry.blobs_removed, dry.bytes_freed));
        assert_eq!(report.blobs_removed, 3, "its shard, leaf list and document");
        assert!(report.size_after_bytes <= 300_000);
        let left: u64 = store.0.blob_sizes().unwrap().values().sum();
        assert_eq!(left, report.size_after_bytes);
        for sample in &samples[1..] {
            sample.assert_is(&sample.lease(&store).unwrap().unwrap());
        }
        assert!(samples[0].lease(&store).unwrap().is_none());
        assert_eq!(store.action(&samples[0].key).unwrap(), None);
        samples[0].publish(&store).unwrap().unwrap();
    }

    #[test]
    fn what_is_leased_kept_or_young_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (store, samples) = filled(dir.path());
        let lease = samples[0].lease(&store).unwrap().unwrap();
        set_last_use(&store, &samples[0], long_ago(3));
        let policy = GcPolicy {
            max_age: Some(Duration::from_secs(5400)),
            keep: BTreeSet::from([samples[1].key]),
            ..GcPolicy::default()
        };
        let report = store.gc(&policy, &Silent).unwrap();
        assert_eq!((report.evicted.as_slice(), report.in_use.as_slice()), (&[][..], &[samples[0].key][..]));
        assert_eq!(store.remove(&samples[0].key, &Silent).unwrap_err().code(), Code::LockTimeout);
        samples[0].assert_is(&lease);
        drop(lease);
        set_last_use(&store, &samples[0], long_ago(3));
        assert_eq!(store.gc(&policy, &Silent).unwrap().evicted, [samples[0].key]);
        assert_eq!(store.remove(&samples[1].key, &Silent).unwrap().evicted, [samples[1].key]);
        assert_eq!(there(&store), [samples[2].key]);
    }

    #[test]
    fn a_clock_that_was_ahead_does_not_make_an_entry_immortal_or_old() {
        let dir = tempfile::tempdir().unwrap();
        let (store, samples) = filled(dir.path());
        set_last_use(&store, &samples[0], SystemTime::now() + Duration::from_secs(7 * 86_400));
        let day = GcPolicy { max_age: Some(Duration::from_secs(86_400)), ..GcPolicy::default() };
        assert!(store.gc(&day, &Silent).unwrap().evicted.is_empty());
        let none = GcPolicy { max_size_bytes: Some(0), ..GcPolicy::default() };
        let report = store.gc(&none, &Silent).unwrap();
        assert_eq!(report.evicted, [samples[1].key, samples[2].key, samples[0].key], "it counts as used now");
        assert_eq!(report.size_after_bytes, 0);
        assert!(report.records_removed > 0);
        assert!(store.0.names(&store.0.paths.blocks()).unwrap().is_empty());
    }

    #[test]
    fn modules_live_builders_and_only_dead_work() {
        let dir = tempfile::tempdir().unwrap();
        let (store, samples) = filled(dir.path());
        let module = store.put_module(b"module", &Silent).unwrap();
        fs::write(dir.path().join("blobs/sha256").join(BlobDigest::of(b"lost").to_string()), "lost").unwrap();
        let dead = dir.path().join("tmp").join(format!("{}.4.5", samples[0].key));
        fs::create_dir(&dead).unwrap();
        fs::write(dead.join("shard.1"), "x").unwrap();
        fs::write(dir.path().join("tmp/record.4.5"), "x").unwrap();
        let report = store.gc(&GcPolicy::default(), &Silent).unwrap();
        assert_eq!((report.blobs_removed, report.bytes_freed, report.work_removed), (1, 4, 2));
        assert!(report.evicted.is_empty() && !dead.exists());
        assert_eq!(store.module(&module, &Silent).unwrap().unwrap(), b"module");

        let building = Sample::new("d", 10, 1);
        let Claim::Build(publication) = store.claim(&building.key, &building.action, &Silent).unwrap() else {
            panic!("found")
        };
        let options = StoreOptions { lock_timeout: Duration::from_millis(20), ..StoreOptions::default() };
        let hasty = Store::open(dir.path(), options).unwrap();
        let refused = hasty.gc(&GcPolicy::default(), &Silent).unwrap_err();
        assert_eq!(refused.code(), Code::LockTimeout, "a builder keeps gc away");
        building.build(publication, &BTreeMap::new()).unwrap();
        hasty.gc(&GcPolicy::default(), &Silent).unwrap();
        building.assert_is(&building.lease(&store).unwrap().unwrap());
    }
}
