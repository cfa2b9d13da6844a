//! Modules that were put into the store.
//!
//! A module is a blob, and `modules/<digest>` is a root that keeps it from gc.
//! It is published like an entry: file synced, linked, `blobs/` synced, then
//! the root renamed into place.

use std::io::ErrorKind;

use super::lease::EntryRecord;
use super::locks::lock;
use super::paths::named_by;
use super::storage::{Sharing, failed, write_full};
use super::writer::BLOB_MODE;
use super::{Durability, Store};
use crate::digest::{BlobDigest, ModuleDigest};
use crate::error::Result;
use crate::progress::Progress;

impl Store {
    /// Keeps a module's bytes under their digest.
    ///
    /// # Errors
    /// `lock_timeout`, `io_error`, `insufficient_disk`.
    pub fn put_module(&self, bytes: &[u8], progress: &dyn Progress) -> Result<ModuleDigest> {
        let inner = &*self.0;
        let digest = BlobDigest::of(bytes);
        let timeout = inner.options.lock_timeout;
        let _store = lock(&*inner.storage, &inner.paths.store_lock(), Sharing::Shared, timeout, progress)?;
        let (path, file) = inner.create_temporary("module", 0o600)?;
        let linked = write_full(&*inner.storage, &file, bytes, 0)
            .and_then(|()| inner.storage.set_mode(&file, BLOB_MODE))
            .and_then(|()| inner.storage.sync_file(&file))
            .map_err(|e| failed("write", &path, &e))
            .and_then(|()| inner.link_small(&path, &digest, progress));
        let removed = inner.storage.unlink(&path);
        linked?;
        removed.map_err(|e| failed("remove", &path, &e))?;
        inner.sync_dir(&inner.paths.blobs())?;
        let digest = ModuleDigest::from_bytes(*digest.as_bytes());
        let root = EntryRecord { digest: BlobDigest::from_bytes(*digest.as_bytes()), size_bytes: bytes.len() as u64 };
        inner.replace(&inner.paths.module(&digest), &root.to_bytes()?, 0o644, Durability::Synced)?;
        Ok(digest)
    }

    /// A module's bytes, checked against their digest; `None` if it is not
    /// here.
    ///
    /// # Errors
    /// `corrupt_blob`, once it has been moved aside; `entry_not_trusted`,
    /// `io_error`.
    pub fn module(&self, digest: &ModuleDigest, progress: &dyn Progress) -> Result<Option<Vec<u8>>> {
        let path = self.0.paths.module(digest);
        match self.0.storage.metadata(&path) {
            Ok(_) => self.0.read_blob(&BlobDigest::from_bytes(*digest.as_bytes()), progress),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(failed("look at", &path, &e)),
        }
    }

    /// The modules that were put here, ascending.
    ///
    /// # Errors
    /// `io_error`.
    pub fn modules(&self) -> Result<Vec<ModuleDigest>> {
        Ok(self.0.names(&self.0.paths.modules())?.iter().filter_map(|name| named_by(name)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;
    use crate::progress::Silent;
    use crate::store::StoreOptions;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_module_is_kept_verified_and_quarantined() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), StoreOptions::default()).unwrap();
        let absent = ModuleDigest::of(b"nothing");
        assert_eq!(store.module(&absent, &Silent).unwrap(), None);
        let digest = store.put_module(b"\0asm...", &Silent).unwrap();
        assert_eq!(digest, ModuleDigest::of(b"\0asm..."));
        assert_eq!(store.put_module(b"\0asm...", &Silent).unwrap(), digest, "once more is no error");
        assert_eq!(store.module(&digest, &Silent).unwrap().unwrap(), b"\0asm...");
        assert_eq!(store.modules().unwrap(), [digest]);
        assert_eq!(fs::read_dir(dir.path().join("tmp")).unwrap().count(), 0);

        let blob = dir.path().join("blobs/sha256").join(digest.to_string());
        fs::set_permissions(&blob, Permissions::from_mode(0o644)).unwrap();
        fs::write(&blob, b"\0asm..!").unwrap();
        assert_eq!(store.module(&digest, &Silent).unwrap_err().code(), Code::CorruptBlob);
        assert_eq!(store.quarantined().unwrap()[0].digest, BlobDigest::of(b"\0asm..."));
        assert_eq!(store.module(&digest, &Silent).unwrap(), None);
        store.put_module(b"\0asm...", &Silent).unwrap();
        assert_eq!(store.module(&digest, &Silent).unwrap().unwrap(), b"\0asm...");
    }
}
