//! What is attached to a manifest: signatures and attestations.
//!
//! Registries of the distribution specification 1.1 list the manifests whose
//! `subject` is a digest. Older ones do not; for them the specification has a
//! tag, `sha256-<hex>`, that holds an index of the referrers and that whoever
//! attaches one keeps up to date.

use ureq::http::Method;

use super::auth::Scope;
use super::exchange::Ask;
use super::{At, Registry};
use crate::canonical::to_canonical;
use crate::digest::BlobDigest;
use crate::error::{Code, Error, Result};
use crate::progress::Progress;
use crate::publish::manifest::Index;
use crate::publish::manifest::{Descriptor, EMPTY, EMPTY_BYTES, INDEX, MANIFEST, MANIFEST_LIMIT_BYTES, Manifest};

/// How many referrers are looked at: anybody who may push can add some.
const REFERRERS_LIMIT: usize = 64;
/// The largest document that is attached.
pub(in crate::publish) const ATTACHED_LIMIT_BYTES: u64 = 4 << 20;

impl Registry {
    /// Attaches a document to a manifest.
    ///
    /// # Errors
    /// Like [`Registry::put_manifest`].
    pub fn attach(
        &self,
        subject: &Descriptor,
        artifact_type: &str,
        media_type: &str,
        bytes: &[u8],
        progress: &dyn Progress,
    ) -> Result<BlobDigest> {
        let layer = Descriptor::of(media_type, bytes);
        let config = Descriptor::of(EMPTY, EMPTY_BYTES);
        self.push_blob(&layer.digest, layer.size, &bytes, None, progress)?;
        self.push_blob(&config.digest, config.size, &EMPTY_BYTES, None, progress)?;
        let mut manifest = Manifest::new(Some(artifact_type), config, vec![layer]);
        manifest.subject = Some(subject.clone());
        let bytes = manifest.to_bytes()?;
        let digest = BlobDigest::of(&bytes);
        let answer = self.put_manifest_bytes(&At::Digest(digest), MANIFEST, &bytes, progress)?;
        // A registry that keeps the list says so in its answer.
        if answer.header("oci-subject").is_none() {
            let mut listed = Descriptor::of(MANIFEST, &bytes);
            listed.artifact_type = Some(artifact_type.to_owned());
            self.list_by_tag(&subject.digest, listed, progress)?;
        }
        Ok(digest)
    }

    /// The documents of one kind that are attached to a manifest. Those that
    /// cannot be read are left out: anybody may attach anything.
    ///
    /// # Errors
    /// `network_error`, `registry_refused`, `registry_timeout`, `interrupted`.
    pub fn attached(&self, subject: &BlobDigest, artifact_type: &str, progress: &dyn Progress) -> Result<Vec<Vec<u8>>> {
        let mut found = Vec::new();
        let index = self.referrers(subject, progress)?;
        let of_kind = index
            .manifests
            .iter()
            .filter(|d| d.artifact_type.as_deref() == Some(artifact_type) && d.size <= MANIFEST_LIMIT_BYTES);
        for descriptor in of_kind.take(REFERRERS_LIMIT) {
            match self.attached_document(subject, descriptor, progress) {
                Ok(bytes) => found.extend(bytes),
                Err(e) if matches!(e.code(), Code::RegistryRefused | Code::DigestMismatch) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(found)
    }

    fn attached_document(
        &self,
        subject: &BlobDigest,
        descriptor: &Descriptor,
        progress: &dyn Progress,
    ) -> Result<Option<Vec<u8>>> {
        let Some(fetched) = self.manifest(&At::Digest(descriptor.digest), progress)? else { return Ok(None) };
        let manifest = Manifest::parse(&fetched.bytes, &self.repository.to_string())?;
        if manifest.subject.as_ref().map(|s| s.digest) != Some(*subject) {
            return Ok(None);
        }
        match manifest.layers.as_slice() {
            [layer] => self.small_blob(&layer.digest, ATTACHED_LIMIT_BYTES, progress).map(Some),
            _ => Ok(None),
        }
    }

    fn referrers(&self, subject: &BlobDigest, progress: &dyn Progress) -> Result<Index> {
        let mut ask = Ask::new(Method::GET, format!("{}/referrers/sha256:{subject}", self.base), Scope::Pull);
        ask.accept = Some(INDEX);
        let what = format!("the referrers of sha256:{subject}");
        let listed = self.retried(progress, || {
            let answer = self.once(&ask)?;
            // A registry without this API may answer anything; only an index
            // is one.
            let is_index = answer.status == 200 && answer.header("content-type").is_some_and(|t| t.starts_with(INDEX));
            if is_index { answer.whole(MANIFEST_LIMIT_BYTES, &what).map(Some) } else { Ok(None) }
        });
        match listed {
            Ok(Some(bytes)) => parse(&bytes, &what),
            Ok(None) => self.by_tag(subject, progress),
            Err(e) if e.code() == Code::RegistryRefused => self.by_tag(subject, progress),
            Err(e) => Err(e),
        }
    }

    fn by_tag(&self, subject: &BlobDigest, progress: &dyn Progress) -> Result<Index> {
        match self.manifest(&At::Tag(fallback_tag(subject)), progress)? {
            Some(fetched) => parse(&fetched.bytes, "the list of referrers"),
            None => Ok(Index::new(Vec::new())),
        }
    }

    /// Two that attach at the same moment may lose one of the two entries: the
    /// specification has no remedy. So it is looked at again.
    fn list_by_tag(&self, subject: &BlobDigest, listed: Descriptor, progress: &dyn Progress) -> Result<()> {
        for _ in 0..4 {
            let mut index = self.by_tag(subject, progress)?;
            if index.manifests.iter().any(|d| d.digest == listed.digest) {
                return Ok(());
            }
            index.manifests.push(listed.clone());
            index.manifests.sort_by_key(|listed| listed.digest);
            let tag = At::Tag(fallback_tag(subject));
            self.put_manifest_bytes(&tag, INDEX, &to_canonical(&index)?, progress)?;
        }
        Err(Error::new(
            Code::RegistryRefused,
            format!("the list of referrers of sha256:{subject} changes all the time"),
        )
        .hint("somebody else attaches to the same manifest: run it again"))
    }
}

fn fallback_tag(subject: &BlobDigest) -> String {
    format!("sha256-{subject}")
}

fn parse(bytes: &[u8], what: &str) -> Result<Index> {
    serde_json::from_slice(bytes).map_err(|e| Error::new(Code::RegistryRefused, format!("{what} is no index: {e}")))
}
