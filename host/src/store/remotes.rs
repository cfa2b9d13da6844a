//! What is known of modules that were pulled: which module a manifest of a
//! repository is, and what was attached to it.
//!
//! The record is weak, like all that can be had again: without it a module is
//! looked up in its registry once more. It is what lets everything that was
//! pulled work offline, and it is the store's word, not that of a lock file
//! that came along with a recipe.

use std::io::ErrorKind;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Store;
use super::records::Kind;
use super::storage::failed;
use crate::digest::{BlobDigest, ModuleDigest, RecordDigest};
use crate::error::Result;

/// A module as a manifest of a repository gives it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoteModule {
    /// `oci://registry/repository`.
    pub repository: String,
    /// The manifest.
    pub manifest: BlobDigest,
    /// The module.
    pub module: ModuleDigest,
    /// Signatures that were attached to the manifest, as they were found.
    pub signatures: Vec<String>,
}

impl Store {
    fn remote_path(&self, repository: &str, manifest: &BlobDigest) -> PathBuf {
        let name = format!("weightmill remote v1\n{repository}\n{manifest}\n");
        self.0.paths.remotes().join(RecordDigest::of(name.as_bytes()).to_string())
    }

    /// What is known of a repository's manifest.
    pub fn remote_module(&self, repository: &str, manifest: &BlobDigest) -> Option<RemoteModule> {
        let path = self.remote_path(repository, manifest);
        let found: RemoteModule = self.0.read_record(&path, Kind::Remote)?;
        (found.repository == repository && found.manifest == *manifest).then_some(found)
    }

    /// Keeps what is known of a repository's manifest.
    ///
    /// # Errors
    /// `io_error`, `insufficient_disk`.
    pub fn put_remote_module(&self, remote: &RemoteModule) -> Result<()> {
        let folder = self.0.paths.remotes();
        match self.0.storage.create_dir(&folder) {
            // Stores of earlier versions lack the folder.
            Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(failed("create the folder", &folder, &e)),
            _ => {}
        }
        self.0.write_record(&self.remote_path(&remote.repository, &remote.manifest), Kind::Remote, remote)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoreOptions;

    #[test]
    fn a_record_is_for_one_manifest_of_one_repository() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), StoreOptions::default()).unwrap();
        std::fs::remove_dir(dir.path().join("remotes")).unwrap();
        let remote = RemoteModule {
            repository: "oci://r.io/a".into(),
            manifest: BlobDigest::of(b"m"),
            module: ModuleDigest::of(b"w"),
            signatures: vec!["{}".into()],
        };
        assert_eq!(store.remote_module("oci://r.io/a", &remote.manifest), None);
        store.put_remote_module(&remote).unwrap();
        assert_eq!(store.remote_module("oci://r.io/a", &remote.manifest), Some(remote.clone()));
        assert_eq!(store.remote_module("oci://r.io/b", &remote.manifest), None);
        assert_eq!(store.remote_module("oci://r.io/a", &BlobDigest::of(b"n")), None);
    }
}
