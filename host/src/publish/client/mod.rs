//! A client of the OCI distribution API.
//!
//! ```text
//! Registry ── manifests, blobs, uploads, referrers: what the API can do
//!    │
//!    ├─ exchange  one request, authorised, retried with back-off
//!    ├─ auth      anonymous, basic, bearer
//!    ├─ redirect  blobs that are kept elsewhere
//!    └─ transport TLS, proxies, time-outs: one HTTP agent
//! ```
//!
//! **Why an own client.** The `oci-client` crate (0.18) was looked at first. It
//! reads manifests, indexes, tokens and error texts of any length into memory,
//! where a registry is not trusted here; its errors drop the headers, so a
//! `Retry-After` is lost; it has no retries, no bound on a whole request, no
//! way to stop a transfer, no continuation of an upload, and cannot attach a
//! referrer; and it brings an asynchronous runtime and some hundred crates to a
//! program that blocks everywhere else. What is left of it is the API's paths,
//! which are few. So this is a small client on `ureq`, which blocks, bounds
//! every phase of a request, and is built on rustls with ring.
//!
//! **What is believed of a registry**: nothing. Every document has a largest
//! size, every blob and every manifest is compared with the digest that was
//! asked for, headers are parsed and never copied into paths, and no wait is
//! without a bound. Redirects of blobs to other hosts are followed without the
//! credentials, and not from TLS to plain HTTP; others are not followed.

mod auth;
mod exchange;
mod mirrors;
mod redirect;
mod referrers;
mod transport;
mod upload;

use std::io::Read;
use std::time::Duration;

use ureq::http::{HeaderMap, Method};

pub use upload::{BlobSource, Pushed};

use self::auth::{Auth, Scope};
use self::exchange::{Answer, Ask, Payload};
use self::mirrors::Mirrors;
use super::manifest::{MANIFEST, MANIFEST_LIMIT_BYTES, Manifest};
use super::reference::Repository;
use crate::digest::BlobDigest;
use crate::error::{Code, Error, Result};
use crate::progress::Progress;

/// What is taken where a manifest is asked for: manifests and indexes of OCI.
const MANIFESTS: &str = "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json";

/// Where TLS is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tls {
    /// Everywhere but on this very machine.
    Elsewhere,
    /// Everywhere.
    Always,
    /// Nowhere.
    Never,
}

/// How a registry is talked to.
#[derive(Clone, Debug)]
pub struct RegistryOptions {
    /// Whether TLS is used.
    pub tls: Tls,
    /// The longest silence of the registry, and a bound on connecting.
    pub timeout: Duration,
    /// How often a request that failed for now is tried again.
    pub retries: u32,
    /// Blobs that are transferred at once.
    pub connections: usize,
    /// Hosts that are asked for blobs first.
    pub mirrors: Vec<String>,
}

impl Default for RegistryOptions {
    fn default() -> Self {
        RegistryOptions {
            tls: Tls::Elsewhere,
            timeout: Duration::from_secs(60),
            retries: 5,
            connections: 4,
            mirrors: Vec::new(),
        }
    }
}

/// A tag or a digest: what a manifest is asked for by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum At {
    /// What a tag points to now.
    Tag(String),
    /// One manifest for ever.
    Digest(BlobDigest),
}

impl std::fmt::Display for At {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            At::Tag(tag) => f.write_str(tag),
            At::Digest(digest) => write!(f, "sha256:{digest}"),
        }
    }
}

/// A manifest that hashes to what it should.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// Its digest.
    pub digest: BlobDigest,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// The bytes of a blob from some place on.
pub struct BlobStream {
    /// Where they begin: where they were asked from, or 0 if the registry
    /// knows no ranges.
    pub offset: u64,
    /// Whether a mirror gives them.
    pub mirrored: bool,
    /// The bytes. Not verified yet.
    pub reader: Box<dyn Read + Send>,
}

/// One repository of a registry.
pub struct Registry {
    repository: Repository,
    base: String,
    agent: ureq::Agent,
    mirrors: Mirrors,
    auth: Auth,
    options: RegistryOptions,
}

impl Registry {
    /// Makes ready to talk to a repository's registry. Asks nothing yet, not
    /// even for credentials.
    ///
    /// # Errors
    /// `network_error` if TLS cannot be set up; `bad_params` for a mirror.
    pub fn open(repository: &Repository, options: &RegistryOptions) -> Result<Self> {
        let plain = match options.tls {
            Tls::Elsewhere => repository.is_loopback(),
            Tls::Always => false,
            Tls::Never => true,
        };
        let scheme = if plain { "http" } else { "https" };
        let agent = transport::agent(repository, plain, options)?;
        Ok(Registry {
            base: format!("{scheme}://{}/v2/{}", repository.api_host(), repository.api_name()),
            auth: Auth::new(repository, plain, options.timeout),
            mirrors: Mirrors::new(repository, options)?,
            repository: repository.clone(),
            agent,
            options: options.clone(),
        })
    }

    /// The repository.
    pub fn repository(&self) -> &Repository {
        &self.repository
    }

    /// How it is talked to.
    pub fn options(&self) -> &RegistryOptions {
        &self.options
    }

    /// Runs transfers, and ends them at once when the work is cancelled: a
    /// read that waits for a silent registry does not look at anything else.
    ///
    /// # Errors
    /// What `work` says; `interrupted`.
    pub fn guarded<T>(&self, progress: &dyn Progress, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let (done, watch) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                loop {
                    let waited = watch.recv_timeout(Duration::from_millis(100));
                    if waited != Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                        return;
                    }
                    if progress.cancelled() {
                        self.agent.clone().shutdown();
                        self.mirrors.shutdown();
                        return;
                    }
                }
            });
            let result = work();
            drop(done);
            match result {
                Err(_) if progress.cancelled() => Err(interrupted()),
                result => result,
            }
        })
    }

    /// What a tag points to, by one HEAD request where the registry says so in
    /// its answer; `None` if there is no such tag.
    ///
    /// # Errors
    /// `network_error`, `registry_refused`, `registry_timeout`, `interrupted`.
    pub fn resolve(&self, tag: &str, progress: &dyn Progress) -> Result<Option<BlobDigest>> {
        let at = At::Tag(tag.to_owned());
        let answer = self.exchange(&self.ask_manifest(Method::HEAD, &at), progress)?;
        if answer.status == 404 {
            return Ok(None);
        }
        match digest_header(&answer.headers) {
            Some(digest) => Ok(Some(digest)),
            None => Ok(self.manifest(&at, progress)?.map(|fetched| fetched.digest)),
        }
    }

    /// A manifest; `None` if there is none.
    ///
    /// # Errors
    /// `digest_mismatch` if it is not what was asked for, or not what the
    /// registry says that it is; like [`Registry::resolve`].
    pub fn manifest(&self, at: &At, progress: &dyn Progress) -> Result<Option<Fetched>> {
        self.manifest_unless(|_| false, at, progress)
    }

    /// A manifest; `None` if there is none, or asking fails in a way that means
    /// the same to the caller.
    fn manifest_unless(
        &self,
        absent: impl Fn(&Failure) -> bool,
        at: &At,
        progress: &dyn Progress,
    ) -> Result<Option<Fetched>> {
        let ask = self.ask_manifest(Method::GET, at);
        let what = format!("the manifest {at}");
        let found = self.retried(progress, || {
            let answer = match self.once(&ask) {
                Err(failure) if absent(&failure) => return Ok(None),
                answer => answer?,
            };
            if answer.status == 404 {
                return Ok(None);
            }
            let said = digest_header(&answer.headers);
            Ok(Some((said, answer.whole(MANIFEST_LIMIT_BYTES, &what)?)))
        })?;
        let Some((said, bytes)) = found else { return Ok(None) };
        let digest = BlobDigest::of(&bytes);
        let mismatch = |expected: &BlobDigest, who: &str| {
            Error::new(
                Code::DigestMismatch,
                format!(
                    "the manifest {at} of {} hashes to sha256:{digest}, where {who} sha256:{expected}",
                    self.repository
                ),
            )
            .hint("the registry, or something between, altered it: nothing was kept")
        };
        match (at, said) {
            (At::Digest(asked), _) if *asked != digest => Err(mismatch(asked, "the reference says")),
            (_, Some(said)) if said != digest => Err(mismatch(&said, "the registry says")),
            _ => Ok(Some(Fetched { digest, bytes })),
        }
    }

    /// Puts a manifest. Everything that it names must be there.
    ///
    /// # Errors
    /// Like [`Registry::resolve`].
    pub fn put_manifest(&self, at: &At, manifest: &Manifest, progress: &dyn Progress) -> Result<BlobDigest> {
        let bytes = manifest.to_bytes()?;
        self.put_manifest_bytes(at, MANIFEST, &bytes, progress)?;
        Ok(BlobDigest::of(&bytes))
    }

    fn put_manifest_bytes(&self, at: &At, media_type: &str, bytes: &[u8], progress: &dyn Progress) -> Result<Answer> {
        let mut ask = self.ask_manifest(Method::PUT, at);
        ask.scope = Scope::Push;
        ask.content_type = Some(media_type);
        ask.payload = Payload::Bytes(bytes);
        let answer = self.exchange(&ask, progress)?.or_missing(&self.repository)?;
        match digest_header(&answer.headers) {
            Some(said) if said != BlobDigest::of(bytes) => Err(Error::new(
                Code::DigestMismatch,
                format!(
                    "the registry of {} took the manifest {at} as sha256:{said}, it is sha256:{}",
                    self.repository,
                    BlobDigest::of(bytes)
                ),
            )),
            _ => Ok(answer),
        }
    }

    /// Whether the registry has a blob.
    ///
    /// # Errors
    /// Like [`Registry::resolve`].
    pub fn has_blob(&self, digest: &BlobDigest, progress: &dyn Progress) -> Result<bool> {
        let ask = Ask::for_blob(Method::HEAD, self.blob_url(digest), Scope::Push);
        Ok(self.exchange(&ask, progress)?.status != 404)
    }

    /// A whole blob of at most `limit_bytes`, verified.
    ///
    /// # Errors
    /// `digest_mismatch`; `registry_refused` if there is none, or it is larger;
    /// like [`Registry::resolve`].
    pub fn small_blob(&self, digest: &BlobDigest, limit_bytes: u64, progress: &dyn Progress) -> Result<Vec<u8>> {
        if let Some((mirror, answer)) = self.mirrors.ask(digest, 0) {
            match answer.whole(limit_bytes, "a blob") {
                Ok(bytes) if BlobDigest::of(&bytes) == *digest => return Ok(bytes),
                Ok(_) => self.distrust_mirrors(),
                Err(_) => self.mirrors.leave(mirror),
            }
        }
        let ask = Ask::for_blob(Method::GET, self.blob_url(digest), Scope::Pull);
        let what = format!("the blob sha256:{digest}");
        let bytes = self.retried(progress, || {
            let answer = self.once(&ask)?;
            if answer.status == 404 {
                return Err(self.no_blob(digest).into());
            }
            answer.whole(limit_bytes, &what)
        })?;
        if BlobDigest::of(&bytes) != *digest {
            return Err(self.not_the_blob(digest, &BlobDigest::of(&bytes)));
        }
        Ok(bytes)
    }

    /// The bytes of a blob from `offset` on. Does not retry: the caller knows
    /// from where to go on.
    pub(super) fn stream(&self, digest: &BlobDigest, offset: u64) -> Result<BlobStream, Failure> {
        let mirror = self.mirrors.ask(digest, offset);
        let mirrored = mirror.is_some();
        let answer = match mirror {
            Some((_, answer)) => answer,
            None => {
                let mut ask = Ask::for_blob(Method::GET, self.blob_url(digest), Scope::Pull);
                ask.from = offset;
                self.once(&ask)?
            }
        };
        match answer.status {
            404 => Err(self.no_blob(digest).into()),
            206 => Ok(BlobStream {
                offset: answer.range_start().unwrap_or(offset),
                mirrored,
                reader: answer.into_reader(),
            }),
            _ => Ok(BlobStream { offset: 0, mirrored, reader: answer.into_reader() }),
        }
    }

    /// Asks the registry alone from now on.
    pub(super) fn distrust_mirrors(&self) {
        self.mirrors.give_up();
    }

    /// Runs `attempt` until it succeeds, fails for good, or the retries are
    /// used up, with pauses that grow or that the registry asked for.
    pub(super) fn retried<T>(&self, progress: &dyn Progress, attempt: impl FnMut() -> Result<T, Failure>) -> Result<T> {
        exchange::retried(&self.options, progress, attempt)
    }

    pub(super) fn not_the_blob(&self, asked: &BlobDigest, found: &BlobDigest) -> Error {
        Error::new(
            Code::DigestMismatch,
            format!("the blob sha256:{asked} of {} arrived as sha256:{found}", self.repository),
        )
        .hint("the registry, a mirror or the network altered it: nothing was kept; try another mirror")
    }

    fn no_blob(&self, digest: &BlobDigest) -> Error {
        Error::new(Code::RegistryRefused, format!("{} has no blob sha256:{digest}", self.repository))
            .hint("its manifest is there, so the registry has lost it: push it again")
    }

    fn blob_url(&self, digest: &BlobDigest) -> String {
        format!("{}/blobs/sha256:{digest}", self.base)
    }

    fn ask_manifest<'a>(&self, method: Method, at: &At) -> Ask<'a> {
        let mut ask = Ask::new(method, format!("{}/manifests/{at}", self.base), Scope::Pull);
        ask.accept = Some(MANIFESTS);
        ask
    }
}

pub(super) use exchange::{Again, Failure};

pub(super) fn interrupted() -> Error {
    Error::new(Code::Interrupted, "stopped while talking to the registry")
}

fn digest_header(headers: &HeaderMap) -> Option<BlobDigest> {
    headers.get("docker-content-digest")?.to_str().ok()?.strip_prefix("sha256:")?.parse().ok()
}
