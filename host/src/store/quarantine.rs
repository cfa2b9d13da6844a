//! Moving a corrupt blob aside.
//!
//! Whoever finds a blob corrupt holds a lease on an entry; others may hold
//! leases on the same entry or on another that shares the blob. Nobody's lock
//! is upgraded: the finder takes the blob's own lock, looks whether the name
//! still holds the inode that was found bad (another process may have moved it
//! and a builder may have put a good one there), and renames it into
//! `quarantine/`. Descriptors and mappings that others have stay what they
//! are. After that the entry lacks a blob, so the next lease finds no entry
//! and the next build puts a new file there under the same name.

use std::fs::{File, Metadata};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::locks::lock;
use super::storage::{Sharing, failed, read_full, read_whole};
use super::{Durability, Inner, Store};
use crate::digest::BlobDigest;
use crate::error::{Code, Error, Result};
use crate::progress::Progress;

/// A blob that was moved aside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quarantined {
    /// What its name said it was.
    pub digest: BlobDigest,
    /// Its name under `quarantine/`.
    pub file: String,
    /// What was wrong with it.
    pub what: String,
    /// When it was found, in seconds since 1970.
    pub found_unix_s: u64,
}

impl Inner {
    /// Moves a blob aside if its name still holds the inode of `bad`: where to;
    /// `None` if somebody else did.
    pub(crate) fn quarantine(
        &self,
        digest: &BlobDigest,
        bad: &Metadata,
        what: &str,
        progress: &dyn Progress,
    ) -> Result<Option<PathBuf>> {
        let path = self.paths.blob(digest);
        let timeout = self.options.lock_timeout;
        let _blob = lock(&*self.storage, &self.paths.blob_lock(digest), Sharing::Exclusive, timeout, progress)?;
        match self.storage.metadata(&path) {
            Ok(now) if (now.dev(), now.ino()) == (bad.dev(), bad.ino()) => {}
            Ok(_) => return Ok(None),
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(failed("look at", &path, &e)),
        }
        let (file, aside) = self.free_name(digest)?;
        self.storage.rename(&path, &aside).map_err(|e| failed("move aside", &path, &e))?;
        // The note and the record are for people and for speed; the blob is
        // out of the way already.
        let _ = self.storage.unlink(&self.paths.first(digest));
        let found_unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let note = Quarantined { digest: *digest, file: file.clone(), what: what.to_owned(), found_unix_s };
        if let Ok(note) = serde_json::to_vec_pretty(&note) {
            let _ = self.replace(&self.paths.quarantine().join(format!("{file}.json")), &note, 0o644, Durability::Weak);
        }
        Ok(Some(aside))
    }

    /// A name under `quarantine/` that is not taken. The blob's lock is held,
    /// so it stays free.
    fn free_name(&self, digest: &BlobDigest) -> Result<(String, PathBuf)> {
        for n in 0_u32.. {
            let name = format!("{digest}.{n}");
            let path = self.paths.quarantine().join(&name);
            match self.storage.metadata(&path) {
                Err(e) if e.kind() == ErrorKind::NotFound => return Ok((name, path)),
                Err(e) => return Err(failed("look at", &path, &e)),
                Ok(_) => {}
            }
        }
        Err(Error::io(self.paths.quarantine().display(), "expected a free name, found none"))
    }

    /// The error for a blob that is not what an entry document says. It is
    /// moved aside if it is not what its own name says either; if it is, the
    /// document is wrong, and the blob may belong to others.
    pub(crate) fn doubt(
        &self,
        digest: &BlobDigest,
        file: &File,
        metadata: &Metadata,
        what: &str,
        progress: &dyn Progress,
    ) -> Error {
        if self.digest_of(file, metadata.len()) != Some(*digest) {
            return self.condemn(digest, metadata, what, progress);
        }
        Error::new(
            Code::DigestMismatch,
            format!("an entry document says something else about the blob {digest} than what it is: {what}"),
        )
        .hint("whoever made the entry did not build it with weightmill: remove it, and build it here")
    }

    fn digest_of(&self, file: &File, len_bytes: u64) -> Option<BlobDigest> {
        let mut hash = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        let mut at = 0;
        while at < len_bytes {
            let want = buffer.len().min((len_bytes - at) as usize);
            let read = read_full(&*self.storage, file, &mut buffer[..want], at).ok()?;
            if read < want {
                return None;
            }
            hash.update(&buffer[..want]);
            at += want as u64;
        }
        Some(BlobDigest::from_bytes(hash.finalize().into()))
    }

    /// Moves a corrupt blob aside and gives the error that says so.
    pub(crate) fn condemn(&self, digest: &BlobDigest, bad: &Metadata, what: &str, progress: &dyn Progress) -> Error {
        let mut message = format!("the blob {digest} is corrupt: {what}");
        let hint = match self.quarantine(digest, bad, what, progress) {
            Ok(Some(aside)) => {
                message.push_str(&format!("; it was moved to {}", aside.display()));
                "run it again: the entry will be rebuilt; if this comes back, check the disk and the memory"
            }
            Ok(None) => "another process has moved it aside: run it again, and the entry will be rebuilt",
            Err(error) => {
                message.push_str(&format!("; it could not be moved aside: {}", error.message()));
                "let the owner of the store run `weightmill store doctor --fix`, then build the entry again"
            }
        };
        Error::new(Code::CorruptBlob, message).hint(hint)
    }
}

impl Store {
    /// What is in quarantine, ascending by name.
    ///
    /// # Errors
    /// `io_error`.
    pub fn quarantined(&self) -> Result<Vec<Quarantined>> {
        let dir = self.0.paths.quarantine();
        let mut found = Vec::new();
        for name in self.0.names(&dir)? {
            let Some(file) = name.to_str().filter(|name| !name.ends_with(".json")) else { continue };
            let Some(digest) = file.split('.').next().and_then(|hex| hex.parse().ok()) else { continue };
            let note = self.0.storage.open_read(&dir.join(format!("{file}.json"))).ok();
            let note = note.and_then(|f| read_whole(&*self.0.storage, &f, 1 << 20).ok()?);
            let note = note.and_then(|bytes| serde_json::from_slice(&bytes).ok());
            found.push(note.unwrap_or_else(|| Quarantined {
                digest,
                file: file.to_owned(),
                what: "no note was left".to_owned(),
                found_unix_s: 0,
            }));
        }
        Ok(found)
    }
}
