//! Several sequences of tensors at once, each on a thread of its own.
//!
//! A shard is hashed and written in order by one *lane*; the pool's threads do
//! the computing for all lanes (where there is one thread, one lane may do its
//! own: see `produce`). Lanes may wait (for a segment, or for an
//! intermediate tensor that another lane is making); the pool's threads never
//! do.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};

/// Runs `work` for `0..count`, at most `lanes` at a time, lower ones first.
///
/// # Errors
/// The error of the lowest position that fails: work below a failed position
/// is finished, work above it is abandoned, so that the error does not depend
/// on timing. `work` gets a function that says whether it should give up.
pub(super) fn run<T: Send>(
    count: usize,
    lanes: usize,
    work: impl Fn(usize, &dyn Fn() -> bool) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let failed = AtomicUsize::new(usize::MAX);
    let results: Vec<Mutex<Option<Result<T, Error>>>> = (0..count).map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for _ in 0..lanes.clamp(1, count.max(1)) {
            scope.spawn(|| {
                loop {
                    let position = next.fetch_add(1, Ordering::Relaxed);
                    if position >= count {
                        return;
                    }
                    let give_up = || failed.load(Ordering::Relaxed) < position;
                    if give_up() {
                        continue;
                    }
                    let result = work(position, &give_up);
                    if result.is_err() {
                        failed.fetch_min(position, Ordering::Relaxed);
                    }
                    *results[position].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
                }
            });
        }
    });
    let lowest = failed.into_inner();
    let results = results.into_iter().map(|r| r.into_inner().unwrap_or_else(PoisonError::into_inner));
    if lowest < usize::MAX {
        return match results.into_iter().nth(lowest).flatten() {
            Some(Err(error)) => Err(error),
            _ => Err(super::produce::interrupted()),
        };
    }
    // Every position has a result: none failed, so none was passed over.
    results.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    #[test]
    fn results_keep_their_order() {
        assert_eq!(run(20, 3, |i, _| Ok(i * i)).unwrap(), (0..20).map(|i| i * i).collect::<Vec<_>>());
        assert_eq!(run(0, 3, |i, _| Ok(i)).unwrap(), Vec::<usize>::new());
    }

    #[test]
    fn the_lowest_error_wins_whatever_comes_first() {
        for _ in 0..50 {
            let error = run(8, 4, |i, _| -> Result<()> {
                match i {
                    2 => {
                        std::thread::sleep(std::time::Duration::from_millis(2));
                        Err(Error::new(Code::BadData, "two"))
                    }
                    3 => Err(Error::new(Code::BadData, "three")),
                    _ => Ok(()),
                }
            });
            assert_eq!(error.unwrap_err().message(), "two");
        }
    }
}
