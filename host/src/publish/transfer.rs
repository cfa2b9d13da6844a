//! Moving blobs: several at once, continued where they broke off.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::client::{Again, BlobSource, Failure, Registry, interrupted};
use crate::digest::BlobDigest;
use crate::error::{Code, Error, Result};
use crate::progress::Progress;
use crate::store::Reception;

/// What is read from a connection at once.
const PIECE_BYTES: usize = 1 << 20;
/// An attempt that moved so many bytes is no failed one: the next starts with
/// all its retries.
const PROGRESS_BYTES: u64 = 16 << 20;

/// Receives the rest of a blob. If the whole has the wrong digest, it is
/// received anew, once, where the fault may not be the registry's: what arrived
/// in an earlier attempt may be anything after a crash, and a mirror may lie.
pub(super) fn download(
    registry: &Registry,
    digest: &BlobDigest,
    reception: &mut Reception<'_>,
    progress: &dyn Progress,
) -> Result<()> {
    loop {
        let mirrored = receive_rest(registry, digest, reception, progress)?;
        let found = reception.digest_so_far();
        if found == *digest {
            return Ok(());
        }
        let continued = reception.is_continued();
        // Either way nothing of it may be continued.
        reception.restart()?;
        registry.distrust_mirrors();
        if !continued && !mirrored {
            return Err(registry.not_the_blob(digest, &found));
        }
    }
}

/// Whether a mirror gave some of the bytes.
fn receive_rest(
    registry: &Registry,
    digest: &BlobDigest,
    reception: &mut Reception<'_>,
    progress: &dyn Progress,
) -> Result<bool> {
    let doing = format!("receiving the blob sha256:{digest}");
    let mut buffer = vec![0; PIECE_BYTES];
    let mut furthest = reception.received_bytes();
    let mut mirrored = false;
    registry.retried(progress, || {
        let mut attempt = || receive(registry, digest, reception, &mut buffer, &mut mirrored, &doing, progress);
        let result = attempt();
        let moved = reception.received_bytes().saturating_sub(furthest) >= PROGRESS_BYTES;
        furthest = furthest.max(reception.received_bytes());
        let Err(failure) = result else { return Ok(()) };
        if !mirrored {
            return Err(Failure { progressed: moved, ..failure });
        }
        // It broke at a mirror: the registry is asked for the whole, at once.
        // This happens once, since no mirror is asked any more.
        registry.distrust_mirrors();
        reception.restart()?;
        mirrored = false;
        Err(Failure { again: Again::After(Some(Duration::ZERO)), progressed: true, ..failure })
    })?;
    Ok(mirrored)
}

/// One attempt.
fn receive(
    registry: &Registry,
    digest: &BlobDigest,
    reception: &mut Reception<'_>,
    buffer: &mut [u8],
    mirrored: &mut bool,
    doing: &str,
    progress: &dyn Progress,
) -> Result<(), Failure> {
    let from = reception.received_bytes();
    if from == reception.size_bytes() {
        return Ok(());
    }
    let mut stream = match registry.stream(digest, from) {
        // What is there may be of another time, or the registry knows no
        // ranges and says so in this way.
        Err(failure) if failure.status == Some(416) && from > 0 => {
            reception.restart()?;
            registry.stream(digest, 0)?
        }
        stream => stream?,
    };
    *mirrored |= stream.mirrored;
    if stream.offset != reception.received_bytes() {
        if stream.offset != 0 {
            let what = format!("{doing}: asked from byte {from} on, got byte {}", stream.offset);
            return Err(Error::new(Code::RegistryRefused, what).into());
        }
        reception.restart()?;
    }
    loop {
        if progress.cancelled() {
            return Err(interrupted().into());
        }
        let read = stream.reader.read(buffer).map_err(|e| Failure::of_read(e, doing))?;
        if read == 0 {
            break;
        }
        reception.append(&buffer[..read])?;
        progress.advance(read as u64);
    }
    match reception.size_bytes() - reception.received_bytes() {
        0 => Ok(()),
        missing => Err(Failure::short(doing, missing)),
    }
}

/// Works through `count` pieces on so many threads. The first error ends all:
/// none is begun after it.
pub(super) fn in_parallel<T: Send>(
    count: usize,
    threads: usize,
    work: impl Fn(usize) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let done: Mutex<Vec<(usize, Result<T>)>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, count.max(1)) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= count || stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let result = work(index);
                    if result.is_err() {
                        stop.store(true, Ordering::Relaxed);
                    }
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((index, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

/// A file that is sent.
pub(super) struct FileSource<'a> {
    pub(super) file: Arc<File>,
    pub(super) size_bytes: u64,
    pub(super) progress: &'a dyn Progress,
}

impl BlobSource for FileSource<'_> {
    fn open(&self, offset: u64) -> Box<dyn Read + '_> {
        Box::new(FileReader { source: self, at: offset })
    }
}

struct FileReader<'a> {
    source: &'a FileSource<'a>,
    at: u64,
}

impl Read for FileReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.source.progress.cancelled() {
            return Err(std::io::ErrorKind::ConnectionAborted.into());
        }
        let left = self.source.size_bytes.saturating_sub(self.at);
        let want = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let read = self.source.file.read_at(&mut buffer[..want], self.at)?;
        self.at += read as u64;
        self.source.progress.advance(read as u64);
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_error_ends_all_and_order_is_kept() {
        assert_eq!(in_parallel(5, 3, |i| Ok(i * i)).unwrap(), [0, 1, 4, 9, 16]);
        assert_eq!(in_parallel(0, 3, |_| Ok(())).unwrap().len(), 0);
        let begun = AtomicUsize::new(0);
        let failed = in_parallel(1000, 1, |i| {
            begun.fetch_add(1, Ordering::Relaxed);
            if i == 3 { Err(Error::new(Code::NetworkError, "no")) } else { Ok(()) }
        });
        assert_eq!(failed.unwrap_err().code(), Code::NetworkError);
        assert_eq!(begun.into_inner(), 4);
    }
}
