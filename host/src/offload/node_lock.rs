//! A lock that serialises work of a node's processes, with a bounded wait.

use std::fs::{File, TryLockError};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::error::{Code, Error, Result};

/// How often the lock is tried.
const PAUSE: Duration = Duration::from_millis(5);

/// A lock file and how long to wait for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeLock {
    /// The lock file; made if it is not there, never removed.
    pub path: PathBuf,
    /// How long to wait for it.
    pub timeout: Duration,
}

impl NodeLock {
    /// Takes the lock; dropping the file releases it, and so does the end of
    /// the process, however it ends.
    pub(super) fn take(&self, holder_does: &str) -> Result<File> {
        let failed = |e| Error::io(format_args!("opening the lock {}", self.path.display()), e);
        let file = File::options().create(true).append(true).open(&self.path).map_err(failed)?;
        let start = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) if start.elapsed() < self.timeout => std::thread::sleep(PAUSE),
                Err(TryLockError::WouldBlock) => {
                    return Err(Error::new(
                        Code::LockTimeout,
                        format!("another process was {holder_does} for more than {:?}", self.timeout),
                    )
                    .hint(format!("see who holds {}", self.path.display())));
                }
                Err(TryLockError::Error(e)) => return Err(failed(e)),
            }
        }
    }
}
