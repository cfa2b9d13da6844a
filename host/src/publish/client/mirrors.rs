//! Mirrors: caches and peers that are asked for blobs before the registry.
//!
//! Only blobs are asked for there, by digest, so a mirror can be slow, empty or
//! hostile without harm: what it does not have, or what fails, comes from the
//! registry. One that cannot be reached or is silent is asked once only, and
//! after bytes with the wrong digest no mirror is asked any more.
//! What a tag points to, manifests and signatures come from the registry itself.
//! No credentials go to a mirror.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ureq::Agent;
use ureq::http::{Method, Request, header};

use super::exchange::{Answer, Failure, from_transport};
use super::redirect::Trail;
use super::{RegistryOptions, transport};
use crate::digest::BlobDigest;
use crate::error::{Code, Error, Result};
use crate::publish::reference::Repository;

/// The mirrors of a repository.
pub(super) struct Mirrors {
    mirrors: Vec<Mirror>,
    timeout: Duration,
    given_up: AtomicBool,
}

struct Mirror {
    /// As far as the blob's digest.
    blobs: String,
    /// Which registry is meant, for mirrors of several.
    query: String,
    agent: Agent,
    /// It was silent, or could not be reached.
    left: AtomicBool,
}

impl Mirrors {
    /// The mirrors in `options`: `host`, `host:port` or either with `http://`
    /// or `https://` before it.
    pub(super) fn new(repository: &Repository, options: &RegistryOptions) -> Result<Self> {
        let mirror = |text: &String| {
            let (plain, host) = match (text.strip_prefix("http://"), text.strip_prefix("https://")) {
                (Some(host), _) => (Some(true), host),
                (_, Some(host)) => (Some(false), host),
                _ => (None, text.as_str()),
            };
            let host = host.strip_suffix('/').unwrap_or(host);
            let place = Repository::parse(&format!("oci://{host}/x")).map_err(|_| {
                Error::new(Code::BadParams, format!("'{}' is no mirror", text.escape_debug()))
                    .hint("write host, host:port or http://host:port")
            })?;
            let plain = plain.unwrap_or_else(|| place.is_loopback());
            let scheme = if plain { "http" } else { "https" };
            Ok(Mirror {
                blobs: format!("{scheme}://{host}/v2/{}/blobs/sha256:", repository.api_name()),
                query: format!("?ns={}", repository.registry),
                agent: transport::agent(&place, plain, options)?,
                left: AtomicBool::new(false),
            })
        };
        let mirrors = options.mirrors.iter().map(mirror).collect::<Result<_>>()?;
        Ok(Mirrors { mirrors, timeout: options.timeout, given_up: AtomicBool::new(false) })
    }

    /// The first good answer to the question for a blob from `offset` on, and
    /// the number of the mirror that gave it.
    pub(super) fn ask(&self, digest: &BlobDigest, offset: u64) -> Option<(usize, Answer)> {
        if self.given_up.load(Ordering::Relaxed) {
            return None;
        }
        let mut asked = self.mirrors.iter().enumerate().filter(|(_, mirror)| !mirror.left.load(Ordering::Relaxed));
        asked.find_map(|(number, mirror)| match mirror.ask(digest, offset, self.timeout) {
            Ok(answer) => matches!(answer.status, 200 | 206).then_some((number, answer)),
            Err(_) => {
                self.leave(number);
                None
            }
        })
    }

    /// Asks one mirror no more.
    pub(super) fn leave(&self, number: usize) {
        self.mirrors[number].left.store(true, Ordering::Relaxed);
    }

    /// Asks no mirror any more.
    pub(super) fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }

    /// Ends what is being transferred.
    pub(super) fn shutdown(&self) {
        self.mirrors.iter().for_each(|mirror| mirror.agent.clone().shutdown());
    }
}

impl Mirror {
    fn ask(&self, digest: &BlobDigest, offset: u64, timeout: Duration) -> Result<Answer, Failure> {
        let mut trail = Trail::new(&format!("{}{digest}{}", self.blobs, self.query))?;
        loop {
            let doing = || format!("asking the mirror {}", trail.url());
            let mut request = Request::builder().method(Method::GET).uri(trail.url());
            if offset > 0 {
                request = request.header(header::RANGE, format!("bytes={offset}-"));
            }
            let request = request.body(()).map_err(|e| Error::new(Code::BadParams, format!("{}: {e}", doing())))?;
            let answer = Answer::of(self.agent.run(request).map_err(|e| from_transport(e, &doing()))?, timeout);
            if !trail.follow(&answer)? {
                return Ok(answer);
            }
        }
    }
}
