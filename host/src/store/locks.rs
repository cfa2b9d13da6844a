//! Locks between processes.
//!
//! All are `flock` locks on files in `locks/`. The kernel releases them when
//! the last descriptor is closed, which a process's death does as well, so no
//! lock is ever stale. A lock file is never unlinked: a process that had
//! opened it before would hold a lock that nobody else can see.
//!
//! | lock | shared by | exclusive to |
//! | --- | --- | --- |
//! | `store` | whoever adds blobs (builders, module installs) | gc, rm, doctor's repairs |
//! | `<key>.build` | – | the builder of the key |
//! | `<key>.lease` | every live user of the entry | who evicts it |
//! | `<blob>.blob` | – | who renames a corrupt blob aside |
//!
//! **Order**: store → build → lease → blob. While a process waits for one, what
//! can it hold, and who can hold what it waits for?
//! - Waiting for `store`: at most leases. Held by builders (shared) or by gc
//!   (exclusive). gc only *tries* build and lease locks and skips what is taken.
//! - Waiting for `build`: `store`, shared, and leases. Held by a builder, which
//!   waits for nothing but a blob's lock from then on.
//! - Waiting for `lease`, shared: at most other leases. Held exclusively by gc
//!   alone, which waits for nothing from then on.
//! - Waiting for `blob`: anything. Its holder waits for nothing.
//!
//! So nobody waits for a holder of a lease: a process may keep leases for as
//! long as it lives and build other entries meanwhile. No lock is upgraded from
//! shared to exclusive. There is no cycle, and every wait is bounded besides:
//! whatever else goes wrong ends as `lock_timeout`.

use std::fs::File;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::storage::{Sharing, Storage, failed};
use crate::error::{Code, Error, Result};
use crate::progress::Progress;

/// The first pause between two attempts; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(1);
/// The longest pause: what a waiter is late by at most.
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// A held lock, released when dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

/// Takes a lock if it is free: `None` if others hold it.
pub(crate) fn try_lock(storage: &dyn Storage, path: &Path, sharing: Sharing) -> Result<Option<Lock>> {
    let file = storage.open_lock(path).map_err(|e| failed("open the lock file", path, &e))?;
    let held = storage.try_lock(&file, sharing).map_err(|e| failed("lock", path, &e))?;
    Ok(held.then_some(Lock { _file: file }))
}

/// Takes a lock, waiting for it up to `timeout`.
///
/// # Errors
/// `lock_timeout`; `interrupted` if the work was cancelled while waiting.
pub(crate) fn lock(
    storage: &dyn Storage,
    path: &Path,
    sharing: Sharing,
    timeout: Duration,
    progress: &dyn Progress,
) -> Result<Lock> {
    let file = storage.open_lock(path).map_err(|e| failed("open the lock file", path, &e))?;
    let start = Instant::now();
    let mut pause = FIRST_PAUSE;
    loop {
        if storage.try_lock(&file, sharing).map_err(|e| failed("lock", path, &e))? {
            return Ok(Lock { _file: file });
        }
        if progress.cancelled() {
            return Err(Error::new(
                Code::Interrupted,
                format!("stopped while waiting for the lock {}", path.display()),
            ));
        }
        let left = timeout.saturating_sub(start.elapsed());
        if left.is_zero() {
            let message = format!("the lock {} was not free within {} s", path.display(), timeout.as_secs_f64());
            return Err(Error::new(Code::LockTimeout, message).hint(format!(
                "another process is at work on the store: `fuser -v {}` shows which; wait for it, end it, or raise the lock timeout",
                path.display()
            )));
        }
        thread::sleep(pause.min(left));
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;
    use crate::store::storage::SystemStorage;

    struct Cancelled;
    impl Progress for Cancelled {
        fn cancelled(&self) -> bool {
            true
        }
    }

    #[test]
    fn exclusion_sharing_timeout_and_release() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.lease");
        let short = Duration::from_millis(20);
        let take = |sharing| lock(&SystemStorage, &path, sharing, short, &Silent);

        let one = take(Sharing::Shared).unwrap();
        let two = take(Sharing::Shared).unwrap();
        let refused = take(Sharing::Exclusive).unwrap_err();
        assert_eq!(refused.code(), Code::LockTimeout);
        assert!(refused.message().contains("a.lease"), "{refused}");
        drop(one);
        assert!(try_lock(&SystemStorage, &path, Sharing::Exclusive).unwrap().is_none());
        drop(two);
        let alone = try_lock(&SystemStorage, &path, Sharing::Exclusive).unwrap().unwrap();
        assert_eq!(take(Sharing::Shared).unwrap_err().code(), Code::LockTimeout);
        let stopped = lock(&SystemStorage, &path, Sharing::Shared, Duration::from_secs(60), &Cancelled);
        assert_eq!(stopped.unwrap_err().code(), Code::Interrupted);
        drop(alone);
        assert!(take(Sharing::Shared).is_ok());
        assert!(path.exists(), "lock files are never unlinked");
    }

    #[test]
    fn a_waiter_gets_the_lock_when_it_is_released() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        let held = try_lock(&SystemStorage, &path, Sharing::Exclusive).unwrap().unwrap();
        thread::scope(|scope| {
            let waiter =
                scope.spawn(|| lock(&SystemStorage, &path, Sharing::Exclusive, Duration::from_secs(30), &Silent));
            thread::sleep(Duration::from_millis(30));
            drop(held);
            assert!(waiter.join().unwrap().is_ok());
        });
    }
}
