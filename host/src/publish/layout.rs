//! Entries and modules in a folder: an OCI image layout, for hosts that reach
//! no registry.
//!
//! ```text
//! DIR/oci-layout              {"imageLayoutVersion":"1.0.0"}
//! DIR/index.json              manifests; a tag is the annotation org.opencontainers.image.ref.name
//! DIR/blobs/sha256/<hex>      the same blobs as in a registry and in the store
//! ```
//!
//! Stock tools (skopeo, oras, crane) inspect such a folder and copy it to a
//! registry and back. Blobs are hard links where the folder is on the store's
//! filesystem, else copies. A folder from elsewhere is believed as little as a
//! registry: every blob is compared with its digest, every entry is judged.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use super::client::interrupted;
use super::entry::{
    ACTION_LIMIT_BYTES, DOCUMENT_LIMIT_BYTES, Demand, ENTRY, Offered, check_action, check_stored, entry_manifest,
    provenance,
};
use super::manifest::{Descriptor, Index, MANIFEST, MANIFEST_LIMIT_BYTES, Manifest};
use super::trust::Grounds;
use crate::canonical::to_canonical;
use crate::digest::{ActionKey, BlobDigest, ContentDigest};
use crate::error::{Code, Error, Result};
use crate::progress::{Progress, Quiet};
use crate::store::{Claim, Lease, Publication, Store, check_leaves};

const REF_NAME: &str = "org.opencontainers.image.ref.name";
const VERSION: &str = "{\"imageLayoutVersion\":\"1.0.0\"}";

/// A folder that is an OCI image layout.
pub struct LayoutFolder {
    folder: PathBuf,
}

/// An entry that was exported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportedEntry {
    /// Its key.
    pub key: ActionKey,
    /// Its manifest: the same as in a registry.
    pub manifest: BlobDigest,
    /// Bytes of blobs that were not there.
    pub bytes_written: u64,
}

/// An entry that was imported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportedEntry {
    /// Its key.
    pub key: ActionKey,
    /// Its content.
    pub content_digest: ContentDigest,
    /// Why it is used.
    pub grounds: Grounds,
    /// Whether it was in the store already.
    pub found: bool,
}

impl LayoutFolder {
    /// A folder to export into; created where it is missing.
    ///
    /// # Errors
    /// `io_error`, also if it holds something else.
    pub fn create(folder: &Path) -> Result<Self> {
        let layout = LayoutFolder { folder: folder.to_path_buf() };
        let marker = folder.join("oci-layout");
        if !marker.exists() {
            let occupied = std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some());
            if occupied {
                return Err(Error::io(folder.display(), "expected an empty folder or an OCI image layout")
                    .hint("name a folder that does not exist yet"));
            }
            std::fs::create_dir_all(folder.join("blobs/sha256")).map_err(|e| failed("create", folder, &e))?;
            layout.write("index.json", &to_canonical(&Index::new(Vec::new()))?)?;
            layout.write("oci-layout", VERSION.as_bytes())?;
        }
        LayoutFolder::open(folder)
    }

    /// A folder to import from.
    ///
    /// # Errors
    /// `io_error` if it is no OCI image layout.
    pub fn open(folder: &Path) -> Result<Self> {
        let layout = LayoutFolder { folder: folder.to_path_buf() };
        let marker = layout.read("oci-layout", 4096)?;
        let version = serde_json::from_slice::<serde_json::Value>(&marker).ok();
        if version.as_ref().and_then(|v| v["imageLayoutVersion"].as_str()) != Some("1.0.0") {
            return Err(Error::io(folder.display(), "this is no OCI image layout of version 1.0.0"));
        }
        Ok(layout)
    }

    fn index(&self) -> Result<Index> {
        let bytes = self.read("index.json", MANIFEST_LIMIT_BYTES)?;
        serde_json::from_slice(&bytes).map_err(|e| Error::io(self.folder.join("index.json").display(), e))
    }

    fn blob_path(&self, digest: &BlobDigest) -> PathBuf {
        self.folder.join("blobs/sha256").join(digest.to_string())
    }

    fn read(&self, name: &str, limit_bytes: u64) -> Result<Vec<u8>> {
        let path = self.folder.join(name);
        read_file(&path, limit_bytes).map_err(|e| {
            failed("read", &path, &e)
                .hint("expected an OCI image layout: a folder with oci-layout, index.json and blobs/")
        })
    }

    /// A blob's bytes, verified.
    fn small_blob(&self, digest: &BlobDigest, limit_bytes: u64) -> Result<Vec<u8>> {
        let path = self.blob_path(digest);
        let bytes = read_file(&path, limit_bytes).map_err(|e| failed("read", &path, &e))?;
        if BlobDigest::of(&bytes) != *digest {
            let found = BlobDigest::of(&bytes);
            return Err(Error::new(Code::DigestMismatch, format!("{} hashes to sha256:{found}", path.display()))
                .hint("the folder was altered or copied in part: copy it again"));
        }
        Ok(bytes)
    }

    /// Writes a small file, whole or not at all.
    fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.folder.join(name);
        let temporary = fresh(&path);
        let write = || {
            let mut file = File::options().write(true).create_new(true).open(&temporary)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            std::fs::rename(&temporary, &path)
        };
        write().map_err(|e| failed("write", &path, &e))
    }

    /// What was written stays, also when the medium is pulled out now.
    fn sync(&self, name: &str) -> Result<()> {
        let path = self.folder.join(name);
        File::open(&path).and_then(|folder| folder.sync_all()).map_err(|e| failed("sync", &path, &e))
    }

    fn put_bytes(&self, digest: &BlobDigest, bytes: &[u8]) -> Result<u64> {
        if self.has(digest, bytes.len() as u64, None) {
            return Ok(0);
        }
        self.write(&format!("blobs/sha256/{digest}"), bytes)?;
        Ok(bytes.len() as u64)
    }

    /// Links or copies a verified file of the store.
    fn put_file(&self, digest: &BlobDigest, size: u64, from: &Path, progress: &dyn Progress) -> Result<u64> {
        progress.advance(size);
        if self.has(digest, size, Some(from)) {
            return Ok(0);
        }
        let path = self.blob_path(digest);
        let temporary = fresh(&path);
        let copy = || {
            let mut to = File::options().write(true).create_new(true).open(&temporary)?;
            std::io::copy(&mut File::open(from)?, &mut to)?;
            to.sync_all()
        };
        std::fs::hard_link(from, &temporary)
            .or_else(|_| copy())
            .and_then(|()| std::fs::rename(&temporary, &path))
            .map_err(|e| failed("write", &path, &e))?;
        Ok(size)
    }

    /// Whether a blob is there and whole: it is the file that it would be made
    /// from, or has its digest.
    fn has(&self, digest: &BlobDigest, size: u64, from: Option<&Path>) -> bool {
        let Ok(mut file) = open_regular(&self.blob_path(digest)) else { return false };
        let Ok(metadata) = file.metadata() else { return false };
        let same =
            |from: &Path| std::fs::metadata(from).is_ok_and(|m| (m.dev(), m.ino()) == (metadata.dev(), metadata.ino()));
        if metadata.len() != size {
            return false;
        }
        from.is_some_and(same) || digest_of(&mut file).is_ok_and(|found| found == *digest)
    }

    /// Adds a leased, verified entry. `action` is its action; `attestations`
    /// are not part of a layout: they travel as files.
    ///
    /// # Errors
    /// `io_error`, `corrupt_blob`, `interrupted`.
    pub fn add_entry(&self, lease: &Lease, action: &[u8], progress: &dyn Progress) -> Result<ExportedEntry> {
        let document = lease.document();
        let (bytes, manifest) = entry_manifest(document, action)?;
        let manifest_bytes = manifest.to_bytes()?;
        progress.stage("exporting", document.shards.iter().map(|s| s.size).sum());
        let mut written = 0;
        for (index, shard) in document.shards.iter().enumerate() {
            if progress.cancelled() {
                return Err(Error::new(Code::Interrupted, "stopped while exporting"));
            }
            written += self.put_file(&shard.digest, shard.size, lease.shard_path(index), progress)?;
            written += self.put_bytes(&shard.leaves, &lease.leaf_list(index, &Quiet(progress))?)?;
        }
        written += self.put_bytes(&BlobDigest::of(action), action)?;
        written += self.put_bytes(&manifest.config.digest, &bytes)?;
        let mut descriptor = Descriptor::of(MANIFEST, &manifest_bytes).annotated(REF_NAME, document.key.to_string());
        descriptor.artifact_type = Some(ENTRY.to_owned());
        written += self.put_bytes(&descriptor.digest, &manifest_bytes)?;
        self.sync("blobs/sha256")?;
        let mut index = self.index()?;
        index.manifests.retain(|m| m.annotations.get(REF_NAME) != descriptor.annotations.get(REF_NAME));
        index.manifests.push(descriptor.clone());
        index.manifests.sort_by(|a, b| a.annotations.get(REF_NAME).cmp(&b.annotations.get(REF_NAME)));
        self.write("index.json", &to_canonical(&index)?)?;
        self.sync("")?;
        Ok(ExportedEntry { key: document.key, manifest: descriptor.digest, bytes_written: written })
    }

    /// The keys of the entries in the folder, ascending. Other artefacts are
    /// passed over.
    ///
    /// # Errors
    /// `io_error`.
    pub fn entries(&self) -> Result<BTreeMap<ActionKey, BlobDigest>> {
        let index = self.index()?;
        let key = |m: &Descriptor| m.annotations.get(REF_NAME)?.parse().ok();
        // Tools that copy a layout drop the artefact's type, so only the tag
        // tells; what is behind it is looked at when it is imported.
        let of_entries = index.manifests.iter().filter(|m| m.media_type == MANIFEST);
        Ok(of_entries.filter_map(|m| Some((key(m)?, m.digest))).collect())
    }

    /// Imports an entry.
    ///
    /// # Errors
    /// `entry_not_trusted`, `digest_mismatch`, `io_error`, what the store says.
    pub fn import(
        &self,
        store: &Store,
        key: &ActionKey,
        manifest: &BlobDigest,
        demand: &Demand,
        pool: &rayon::ThreadPool,
        progress: &dyn Progress,
    ) -> Result<ImportedEntry> {
        let from = self.folder.display().to_string();
        let manifest_bytes = self.small_blob(manifest, MANIFEST_LIMIT_BYTES)?;
        let parsed = Manifest::parse(&manifest_bytes, &from)?;
        let bytes = self.small_blob(&parsed.config.digest, DOCUMENT_LIMIT_BYTES)?;
        let offered = Offered::read(key, *manifest, &parsed, &bytes, &from)?;
        let document = &offered.document;
        let grounds = match demand.waives(document, &from)? {
            Some(grounds) => grounds,
            None => demand.trust.judge_entry(document, &offered.document_digest, &demand.attestations, &from)?,
        };
        let action = self.small_blob(&offered.action.digest, ACTION_LIMIT_BYTES)?;
        check_action(key, &action, &from)?;
        let mut imported = ImportedEntry { key: *key, content_digest: document.content_digest, grounds, found: true };
        let publication = match store.claim(key, &action, progress)? {
            Claim::Found => {
                check_stored(store, key, &imported.content_digest, pool, progress)?;
                return Ok(imported);
            }
            Claim::Build(publication) => publication,
        };
        imported.found = false;
        let missing = document.shards.iter().filter(|s| !store.has_blob(&s.digest, s.size));
        publication.reserve(missing.map(|s| s.size + s.leaves_size).sum())?;
        progress.stage("importing", document.shards.iter().map(|s| s.size).sum());
        for shard in 0..document.shards.len() {
            self.import_shard(&publication, &offered, shard, pool, progress)?;
        }
        let provenance = provenance(&from, &imported.grounds, &action, &demand.labels);
        let vouched = imported.grounds.cover_document();
        publication.commit_received(offered.document, &provenance, vouched, pool, progress)?;
        Ok(imported)
    }

    fn import_shard(
        &self,
        publication: &Publication,
        offered: &Offered,
        shard: usize,
        pool: &rayon::ThreadPool,
        progress: &dyn Progress,
    ) -> Result<()> {
        let quiet = Quiet(progress);
        let (record, layout) = (&offered.document.shards[shard], &offered.layouts[shard]);
        let take = || publication.take_shard(&offered.document, shard, layout, pool, &quiet);
        if take()? {
            progress.advance(record.size);
            return Ok(());
        }
        let leaves = self.small_blob(&record.leaves, record.leaves_size)?;
        check_leaves(&offered.document, shard, layout, &leaves)?;
        publication.put_small(&record.leaves, &leaves, &quiet)?;
        if let Some(mut reception) = publication.receive(&record.digest, record.size, &quiet)? {
            // Copying is quick: nothing is continued.
            if reception.is_continued() {
                reception.restart()?;
            }
            let path = self.blob_path(&record.digest);
            let mut file = open_regular(&path).map_err(|e| failed("open", &path, &e))?;
            let mut buffer = vec![0; 1 << 20];
            loop {
                if progress.cancelled() {
                    return Err(interrupted());
                }
                let read = file.read(&mut buffer).map_err(|e| failed("read", &path, &e))?;
                if read == 0 {
                    break;
                }
                reception.append(&buffer[..read])?;
                progress.advance(read as u64);
            }
            reception.finish_shard(record, layout, &leaves, pool, progress)?;
        }
        match take()? {
            true => Ok(()),
            false => Err(Error::new(Code::CorruptBlob, format!("the shard {} vanished from the store", record.digest))
                .hint("another process moved it aside: run it again")),
        }
    }
}

fn failed(doing: &str, path: &Path, cause: &std::io::Error) -> Error {
    Error::io(format_args!("cannot {doing} {}", path.display()), cause)
}

/// A name for a file in the making, that nothing has: what an earlier process
/// of this number left is removed.
fn fresh(path: &Path) -> PathBuf {
    let temporary = path.with_extension(format!("{}.new", std::process::id()));
    let _ = std::fs::remove_file(&temporary);
    temporary
}

fn digest_of(file: &mut File) -> std::io::Result<BlobDigest> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(BlobDigest::from_bytes(hash.finalize().into())),
            read => hash.update(&buffer[..read]),
        }
    }
}

/// Opens a file that may be anything: a FIFO is not waited for.
fn open_regular(path: &Path) -> std::io::Result<File> {
    let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(std::io::Error::other("it is no regular file")),
    }
}

fn read_file(path: &Path, limit_bytes: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)?.take(limit_bytes + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > limit_bytes {
        true => Err(std::io::Error::other(format!("it has more than {limit_bytes} bytes"))),
        false => Ok(bytes),
    }
}
