//! Where everything is under a store's root.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::str::FromStr;

use crate::digest::{ActionKey, BlobDigest, BlockKey, ModuleDigest, RecordDigest};

/// The paths of a store.
#[derive(Clone, Debug)]
pub(crate) struct Paths {
    pub(crate) root: PathBuf,
}

impl Paths {
    pub(crate) fn new(root: PathBuf) -> Self {
        Paths { root }
    }

    /// Every folder, parents first.
    pub(crate) fn folders(&self) -> Vec<PathBuf> {
        let names = [
            "blobs",
            "blobs/sha256",
            "entries",
            "actions",
            "blocks",
            "facts",
            "modules",
            "remotes",
            "sources",
            "provenance",
            "state",
            "state/first",
            "state/leased",
            "locks",
            "tmp",
            "quarantine",
        ];
        names.iter().map(|name| self.root.join(name)).collect()
    }

    /// The folders that hold other folders of [`Paths::folders`].
    pub(crate) fn parents(&self) -> [PathBuf; 3] {
        [self.root.join("blobs"), self.root.join("state"), self.root.clone()]
    }

    pub(crate) fn format(&self) -> PathBuf {
        self.root.join("format")
    }

    pub(crate) fn blobs(&self) -> PathBuf {
        self.root.join("blobs/sha256")
    }

    pub(crate) fn blob(&self, digest: &BlobDigest) -> PathBuf {
        self.blobs().join(digest.to_string())
    }

    pub(crate) fn entries(&self) -> PathBuf {
        self.root.join("entries")
    }

    pub(crate) fn entry(&self, key: &ActionKey) -> PathBuf {
        self.entries().join(key.to_string())
    }

    /// The entry record before its rename. The build lock makes it one
    /// process's, so it needs no number.
    pub(crate) fn new_entry(&self, key: &ActionKey) -> PathBuf {
        self.entries().join(format!(".{key}.new"))
    }

    pub(crate) fn actions(&self) -> PathBuf {
        self.root.join("actions")
    }

    pub(crate) fn action(&self, key: &ActionKey) -> PathBuf {
        self.actions().join(format!("{key}.json"))
    }

    pub(crate) fn blocks(&self) -> PathBuf {
        self.root.join("blocks")
    }

    pub(crate) fn block(&self, key: &BlockKey) -> PathBuf {
        self.blocks().join(key.to_string())
    }

    pub(crate) fn all_facts(&self) -> PathBuf {
        self.root.join("facts")
    }

    pub(crate) fn facts(&self, digest: &RecordDigest) -> PathBuf {
        self.all_facts().join(digest.to_string())
    }

    pub(crate) fn all_sources(&self) -> PathBuf {
        self.root.join("sources")
    }

    pub(crate) fn source(&self, digest: &RecordDigest) -> PathBuf {
        self.all_sources().join(digest.to_string())
    }

    pub(crate) fn modules(&self) -> PathBuf {
        self.root.join("modules")
    }

    pub(crate) fn module(&self, digest: &ModuleDigest) -> PathBuf {
        self.modules().join(digest.to_string())
    }

    pub(crate) fn remotes(&self) -> PathBuf {
        self.root.join("remotes")
    }

    pub(crate) fn provenances(&self) -> PathBuf {
        self.root.join("provenance")
    }

    pub(crate) fn provenance(&self, key: &ActionKey) -> PathBuf {
        self.provenances().join(key.to_string())
    }

    pub(crate) fn lineage(&self, key: &ActionKey, digest: &BlobDigest) -> PathBuf {
        self.provenance(key).join(format!("{digest}{LINEAGE_SUFFIX}"))
    }

    pub(crate) fn firsts(&self) -> PathBuf {
        self.root.join("state/first")
    }

    pub(crate) fn first(&self, digest: &BlobDigest) -> PathBuf {
        self.firsts().join(digest.to_string())
    }

    pub(crate) fn leases(&self) -> PathBuf {
        self.root.join("state/leased")
    }

    pub(crate) fn leased(&self, key: &ActionKey) -> PathBuf {
        self.leases().join(key.to_string())
    }

    fn lock(&self, name: String) -> PathBuf {
        self.root.join("locks").join(name)
    }

    pub(crate) fn store_lock(&self) -> PathBuf {
        self.lock("store".into())
    }

    pub(crate) fn build_lock(&self, key: &ActionKey) -> PathBuf {
        self.lock(format!("{key}.build"))
    }

    pub(crate) fn lease_lock(&self, key: &ActionKey) -> PathBuf {
        self.lock(format!("{key}.lease"))
    }

    pub(crate) fn blob_lock(&self, digest: &BlobDigest) -> PathBuf {
        self.lock(format!("{digest}.blob"))
    }

    pub(crate) fn tmp(&self) -> PathBuf {
        self.root.join("tmp")
    }

    pub(crate) fn temporary(&self, stem: &str, number: u64) -> PathBuf {
        self.tmp().join(format!("{stem}.{}.{number}", std::process::id()))
    }

    pub(crate) fn quarantine(&self) -> PathBuf {
        self.root.join("quarantine")
    }
}

/// What the names of lineage files end in.
pub(crate) const LINEAGE_SUFFIX: &str = ".lineage.json";

/// What a file is named by, if its name is a digest.
pub(crate) fn named_by<D: FromStr>(name: &OsStr) -> Option<D> {
    name.to_str()?.parse().ok()
}

/// The key in the name of a folder under `tmp/`.
pub(crate) fn key_of_work(name: &OsStr) -> Option<ActionKey> {
    let (key, rest) = name.to_str()?.split_once('.')?;
    let (pid, number) = rest.split_once('.')?;
    let number_like = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    (number_like(pid) && number_like(number)).then(|| key.parse().ok())?
}
