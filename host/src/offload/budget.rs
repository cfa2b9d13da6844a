//! How much memory may be pinned.
//!
//! The pin limit governs the registration of files; staging buffers are bounded
//! by their own size and by the cgroup.
//!
//! Pinned page cache cannot be reclaimed any more, so a process in a cgroup
//! that pins up to its memory limit is killed by the first allocation after
//! that. The limit is checked over the complete byte count, before the driver
//! is asked for anything.

use std::path::{Path, PathBuf};

use crate::error::{Code, Error, Result};

/// What may be pinned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinBudget {
    limit_bytes: Option<u64>,
    cgroup: Option<CgroupRoom>,
}

/// What a cgroup's memory limit leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CgroupRoom {
    /// The limit.
    pub limit_bytes: u64,
    /// In use, without page cache that can be reclaimed.
    pub used_bytes: u64,
}

impl PinBudget {
    /// The budget from `--pin-limit` and this process's cgroup.
    pub fn new(limit_bytes: Option<u64>) -> Self {
        PinBudget { limit_bytes, cgroup: CgroupRoom::of_this_process() }
    }

    /// A budget with a given cgroup, for tests.
    pub fn with_cgroup(limit_bytes: Option<u64>, cgroup: Option<CgroupRoom>) -> Self {
        PinBudget { limit_bytes, cgroup }
    }

    /// How many of `wanted` bytes of staging buffers the cgroup leaves room
    /// for. The limit is on registered files; staging has a size of its own.
    pub(super) fn staging_bytes(&self, wanted: u64) -> u64 {
        self.cgroup.map_or(wanted, |c| wanted.min(c.limit_bytes.saturating_sub(c.used_bytes)))
    }

    /// Whether a ring of `needed` bytes fits the `available` ones.
    ///
    /// # Errors
    /// `pin_limit_exceeded`.
    pub(super) fn check_staging(&self, available: u64, needed: u64) -> Result<()> {
        if available >= needed {
            return Ok(());
        }
        Err(Error::new(
            Code::PinLimitExceeded,
            format!("a staging ring needs {needed} bytes, but may have {available}"),
        )
        .hint("raise --staging, or give the container more memory"))
    }

    /// Whether `bytes` may be pinned.
    ///
    /// # Errors
    /// `pin_limit_exceeded`.
    pub fn check(&self, bytes: u64) -> Result<()> {
        if let Some(limit) = self.limit_bytes
            && bytes > limit
        {
            return Err(Error::new(
                Code::PinLimitExceeded,
                format!("{bytes} bytes are to be pinned, but the pin limit is {limit}"),
            )
            .hint("raise --pin-limit, or use --registration auto, which stages what may not be pinned"));
        }
        if let Some(cgroup) = self.cgroup
            && bytes > cgroup.limit_bytes.saturating_sub(cgroup.used_bytes)
        {
            return Err(Error::new(
                Code::PinLimitExceeded,
                format!(
                    "{bytes} bytes are to be pinned, but the cgroup's memory limit of {} leaves {}",
                    cgroup.limit_bytes,
                    cgroup.limit_bytes.saturating_sub(cgroup.used_bytes)
                ),
            )
            .hint("give the container more memory, or use --registration auto or off"));
        }
        Ok(())
    }
}

impl CgroupRoom {
    /// The tightest limit on this process, from cgroup v2 or v1; `None` where
    /// there is none.
    pub fn of_this_process() -> Option<Self> {
        let membership = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        Self::from_files(&membership, Path::new("/sys/fs/cgroup"))
    }

    fn from_files(membership: &str, root: &Path) -> Option<Self> {
        let mut tightest: Option<CgroupRoom> = None;
        for line in membership.lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next()?, fields.next()?);
            let (base, v2) = match controllers {
                "" => (root.to_path_buf(), true),
                c if c.split(',').any(|c| c == "memory") => (root.join("memory"), false),
                _ => continue,
            };
            // A container sees its own group at the root of the tree, whatever
            // the path says; every ancestor limits as well.
            let mut group: Option<PathBuf> = Some(base.join(path.trim_start_matches('/')));
            while let Some(folder) = group.filter(|g| g.starts_with(&base)) {
                if let Some(room) = Self::from_folder(&folder, v2) {
                    let left = |r: &CgroupRoom| r.limit_bytes.saturating_sub(r.used_bytes);
                    tightest = Some(tightest.filter(|t| left(t) <= left(&room)).unwrap_or(room));
                }
                group = folder.parent().map(Path::to_path_buf);
            }
        }
        tightest
    }

    fn from_folder(folder: &Path, v2: bool) -> Option<Self> {
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
        let (max, current, cache) = match v2 {
            true => ("memory.max", "memory.current", "file "),
            false => ("memory.limit_in_bytes", "memory.usage_in_bytes", "cache "),
        };
        let limit_bytes: u64 = read(max)?.trim().parse().ok()?;
        // Version 1 says "no limit" with a number close to 2^63.
        if limit_bytes >= 1 << 60 {
            return None;
        }
        let current: u64 = read(current)?.trim().parse().ok()?;
        let reclaimable = read("memory.stat")
            .and_then(|s| s.lines().find_map(|l| l.strip_prefix(cache)?.trim().parse::<u64>().ok()))
            .unwrap_or(0);
        Some(CgroupRoom { limit_bytes, used_bytes: current.saturating_sub(reclaimable) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_means_nothing_and_none_means_no_limit() {
        let zero = PinBudget::with_cgroup(Some(0), None);
        assert_eq!(zero.check(1).unwrap_err().code(), Code::PinLimitExceeded);
        assert!(zero.check(0).is_ok());
        assert!(PinBudget::with_cgroup(None, None).check(u64::MAX).is_ok());
        assert!(PinBudget::with_cgroup(Some(10), None).check(10).is_ok());
        assert!(PinBudget::with_cgroup(Some(10), None).check(11).is_err());
    }

    #[test]
    fn the_cgroup_counts_too() {
        let room = CgroupRoom { limit_bytes: 100, used_bytes: 40 };
        let budget = PinBudget::with_cgroup(Some(1000), Some(room));
        assert!(budget.check(60).is_ok());
        assert!(budget.check(61).unwrap_err().message().contains("cgroup"));
        assert_eq!(budget.staging_bytes(1000), 60);
    }

    #[test]
    fn the_tightest_group_of_the_tree_is_found() {
        let root = tempfile::tempdir().unwrap();
        let group = |path: &str, max: &str, current: u64, file: u64| {
            let folder = root.path().join(path);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("memory.max"), max).unwrap();
            std::fs::write(folder.join("memory.current"), format!("{current}\n")).unwrap();
            std::fs::write(folder.join("memory.stat"), format!("anon 5\nfile {file}\n")).unwrap();
        };
        group("a", "1000\n", 700, 100);
        group("a/b", "5000\n", 10, 0);
        group("a/b/c", "max\n", 10, 0);
        let found = CgroupRoom::from_files("0::/a/b/c\n", root.path());
        assert_eq!(found, Some(CgroupRoom { limit_bytes: 1000, used_bytes: 600 }));
        assert_eq!(CgroupRoom::from_files("0::/nowhere\n", root.path()), None);

        let v1 = root.path().join("memory/x");
        std::fs::create_dir_all(&v1).unwrap();
        std::fs::write(v1.join("memory.limit_in_bytes"), "500").unwrap();
        std::fs::write(v1.join("memory.usage_in_bytes"), "100").unwrap();
        std::fs::write(v1.join("memory.stat"), "cache 30\n").unwrap();
        let found = CgroupRoom::from_files("4:cpu,memory:/x\n", root.path());
        assert_eq!(found, Some(CgroupRoom { limit_bytes: 500, used_bytes: 70 }));
    }
}
