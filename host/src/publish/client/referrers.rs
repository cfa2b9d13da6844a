//! What is attached to a manifest: signatures and attestations.
//!
//! Registries of the distribution specification 1.1 list the manifests whose
//! `subject` is a digest. Older ones do not; for them the specification has a
//! tag, `sha256-<hex>`, that holds an index of the referrers and that whoever
//! attaches one keeps up to date.
//!
//! Anybody who may push can attach anything. So what cannot be read is passed
//! over, only so much is looked at, and only for so long.

use std::time::Instant;

use serde_json::{Map, Value, json};
use ureq::http::Method;

use super::auth::Scope;
use super::exchange::{Ask, Failure};
use super::redirect::resolve_at_home;
use super::{At, Registry};
use crate::canonical::to_canonical;
use crate::digest::BlobDigest;
use crate::error::{Code, Error, Result};
use crate::progress::Progress;
use crate::publish::manifest::{Descriptor, EMPTY, EMPTY_BYTES, INDEX, MANIFEST, MANIFEST_LIMIT_BYTES, Manifest};

/// How many referrers of the kind that is wanted are looked at.
const REFERRERS_LIMIT: usize = 64;
/// How many of any kind are listed at most, and on how many pages.
const LISTED_LIMIT: usize = 256;
const PAGES_LIMIT: usize = 8;
/// All of it may take so many time-outs.
const TIMEOUTS: u32 = 4;
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
        let limit = self.options.timeout.saturating_mul(TIMEOUTS);
        let bounded = Bounded { progress, end: Instant::now().checked_add(limit) };
        let mut found = Vec::new();
        match self.collect(subject, artifact_type, &mut found, &bounded) {
            Err(e) if e.code() == Code::Interrupted && !progress.cancelled() => {
                // What came before the end may be enough.
                if found.is_empty() {
                    let message = format!(
                        "{} did not give what is attached to sha256:{subject} within {} s",
                        self.repository,
                        limit.as_secs_f64()
                    );
                    return Err(Error::new(Code::RegistryTimeout, message)
                        .hint("check the registry, or allow it more time with --registry-timeout"));
                }
                Ok(found)
            }
            Err(e) => Err(e),
            Ok(()) => Ok(found),
        }
    }

    fn collect(
        &self,
        subject: &BlobDigest,
        artifact_type: &str,
        found: &mut Vec<Vec<u8>>,
        progress: &dyn Progress,
    ) -> Result<()> {
        let listed = self.referrers(subject, progress)?;
        let of_kind = listed
            .iter()
            .filter(|d| d.artifact_type.as_deref() == Some(artifact_type) && d.size <= MANIFEST_LIMIT_BYTES);
        for descriptor in of_kind.take(REFERRERS_LIMIT) {
            match self.attached_document(subject, descriptor, progress) {
                Ok(bytes) => found.extend(bytes),
                Err(e) if matches!(e.code(), Code::RegistryRefused | Code::DigestMismatch) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
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

    /// The descriptors that can be read of what is listed for a manifest.
    fn referrers(&self, subject: &BlobDigest, progress: &dyn Progress) -> Result<Vec<Descriptor>> {
        let mut listed = Vec::new();
        let mut next = Some(format!("{}/referrers/sha256:{subject}", self.base));
        for page in 0..PAGES_LIMIT {
            let Some(url) = next.take() else { break };
            match self.page(&url, subject, progress) {
                Ok(Some((documents, more))) => {
                    listed.extend(documents);
                    next = more.filter(|_| listed.len() < LISTED_LIMIT);
                }
                // A registry without this API may say so in any way.
                Ok(None) if page == 0 => return self.listed_by_tag(subject, progress),
                Err(e) if page == 0 && e.code() == Code::RegistryRefused => {
                    return self.listed_by_tag(subject, progress);
                }
                Ok(None) => {}
                Err(e) if e.code() == Code::RegistryRefused => {}
                Err(e) => return Err(e),
            }
        }
        Ok(readable(&listed))
    }

    /// One page of the list, and where the next one is. `None` is no page.
    fn page(
        &self,
        url: &str,
        subject: &BlobDigest,
        progress: &dyn Progress,
    ) -> Result<Option<(Vec<Value>, Option<String>)>> {
        let mut ask = Ask::new(Method::GET, url.to_owned(), Scope::Pull);
        ask.accept = Some(INDEX);
        let what = format!("the referrers of sha256:{subject}");
        let page = self.retried(progress, || {
            let answer = self.once(&ask)?;
            let is_index = answer.status == 200 && answer.header("content-type").is_some_and(|t| t.starts_with(INDEX));
            if !is_index {
                return Ok(None);
            }
            let next = answer.header("link").and_then(next_link).and_then(|next| resolve_at_home(url, next));
            Ok(Some((answer.whole(MANIFEST_LIMIT_BYTES, &what)?, next)))
        })?;
        let Some((bytes, next)) = page else { return Ok(None) };
        Ok(Some((documents(&parse(&bytes, &what)?).to_vec(), next)))
    }

    /// What the tag lists. Who may not read it finds nothing.
    fn listed_by_tag(&self, subject: &BlobDigest, progress: &dyn Progress) -> Result<Vec<Descriptor>> {
        let tag = At::Tag(fallback_tag(subject));
        match self.manifest_unless(Failure::is_denial, &tag, progress)? {
            Some(fetched) => Ok(readable(documents(&parse(&fetched.bytes, "the list of referrers")?))),
            None => Ok(Vec::new()),
        }
    }

    /// Two that attach at the same moment may lose one of the two entries: the
    /// specification has no remedy. So it is looked at again. What others have
    /// listed stays as it is, readable or not.
    fn list_by_tag(&self, subject: &BlobDigest, listed: Descriptor, progress: &dyn Progress) -> Result<()> {
        let tag = At::Tag(fallback_tag(subject));
        for _ in 0..4 {
            let mut index = match self.manifest(&tag, progress)? {
                Some(fetched) => parse(&fetched.bytes, "the list of referrers")?,
                None => empty_index(),
            };
            let there = documents(&index);
            if readable(there).iter().any(|d| d.digest == listed.digest) {
                return Ok(());
            }
            let mut all = there.to_vec();
            let listed = serde_json::to_value(&listed)
                .map_err(|e| Error::new(Code::BadParams, format!("a descriptor cannot be written: {e}")))?;
            all.push(listed);
            all.sort_by(|a, b| a["digest"].as_str().cmp(&b["digest"].as_str()));
            index.insert("manifests".into(), Value::Array(all));
            self.put_manifest_bytes(&tag, INDEX, &to_canonical(&index)?, progress)?;
        }
        Err(Error::new(
            Code::RegistryRefused,
            format!("the list of referrers of sha256:{subject} changes all the time"),
        )
        .hint("somebody else attaches to the same manifest: run it again"))
    }
}

/// Ends work when its time is over.
struct Bounded<'a> {
    progress: &'a dyn Progress,
    end: Option<Instant>,
}

impl Progress for Bounded<'_> {
    fn cancelled(&self) -> bool {
        self.progress.cancelled() || self.end.is_some_and(|end| Instant::now() >= end)
    }
}

fn fallback_tag(subject: &BlobDigest) -> String {
    format!("sha256-{subject}")
}

fn empty_index() -> Map<String, Value> {
    let index = [("schemaVersion", json!(2)), ("mediaType", json!(INDEX)), ("manifests", json!([]))];
    index.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn parse(bytes: &[u8], what: &str) -> Result<Map<String, Value>> {
    serde_json::from_slice(bytes).map_err(|e| Error::new(Code::RegistryRefused, format!("{what} is no index: {e}")))
}

/// What an index lists, readable or not.
fn documents(index: &Map<String, Value>) -> &[Value] {
    index.get("manifests").and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// The descriptors among these: one with a digest of another kind, or none at
/// all, hides no others.
fn readable(documents: &[Value]) -> Vec<Descriptor> {
    let documents = documents.iter().take(LISTED_LIMIT);
    documents.filter_map(|document| serde::Deserialize::deserialize(document).ok()).collect()
}

/// The next page in a `Link` header: `<address>; rel="next"`, among others.
fn next_link(header: &str) -> Option<&str> {
    let mut rest = header;
    loop {
        let (address, after) = rest.split_once('<')?.1.split_once('>')?;
        let parameters = after.split('<').next().unwrap_or_default();
        let mut parameters = parameters.split([';', ',']).map(str::trim);
        if parameters.any(|p| p.eq_ignore_ascii_case("rel=\"next\"") || p.eq_ignore_ascii_case("rel=next")) {
            return Some(address);
        }
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_page_is_found() {
        for (header, next) in [
            ("</v2/a/referrers/x?last=b,c&n=1>; rel=\"next\"", Some("/v2/a/referrers/x?last=b,c&n=1")),
            ("<a>; rel=\"prev\", <b>; title=x; rel=Next", Some("b")),
            ("<a>; rel=\"prev\"", None),
            ("<a", None),
            ("a>; rel=next", None),
            ("", None),
        ] {
            assert_eq!(next_link(header), next, "{header}");
        }
    }

    #[test]
    fn what_cannot_be_read_hides_no_others() {
        let good = Descriptor::new(MANIFEST, BlobDigest::of(b"x"), 1);
        let other = json!({ "mediaType": MANIFEST, "digest": format!("sha512:{}", "ab".repeat(64)), "size": 1 });
        let listed = [other, json!(null), json!("x"), json!({}), serde_json::to_value(&good).unwrap()];
        assert_eq!(readable(&listed), std::slice::from_ref(&good));
        let many = vec![serde_json::to_value(&good).unwrap(); 2 * LISTED_LIMIT];
        assert_eq!(readable(&many).len(), LISTED_LIMIT);
        for (index, count) in [("{}", 0), ("{\"manifests\":7}", 0), ("{\"manifests\":[1,2]}", 2)] {
            assert_eq!(documents(&parse(index.as_bytes(), "x").unwrap()).len(), count, "{index}");
        }
        for bad in ["[]", "7", ""] {
            assert_eq!(parse(bad.as_bytes(), "x").unwrap_err().code(), Code::RegistryRefused);
        }
    }
}
