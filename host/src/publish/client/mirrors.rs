//! Mirrors: caches and peers that are asked for blobs before the registry.
//!
//! Only blobs are asked for there, by digest, so a mirror can be slow, empty or
//! hostile without harm: what it does not have, or what fails, comes from the
//! registry, and after bytes with the wrong digest no mirror is asked any more.
//! What a tag points to, manifests and signatures come from the registry itself.
//! No credentials go to a mirror.

use std::sync::atomic::{AtomicBool, Ordering};

use ureq::Agent;
use ureq::http::{Method, header};

use super::exchange::Answer;
use super::{RegistryOptions, transport};
use crate::digest::BlobDigest;
use crate::error::{Code, Error, Result};
use crate::publish::reference::Repository;

/// The mirrors of a repository.
pub(super) struct Mirrors {
    mirrors: Vec<Mirror>,
    timeout: std::time::Duration,
    given_up: AtomicBool,
}

struct Mirror {
    /// As far as the blob's digest.
    blobs: String,
    /// Which registry is meant, for mirrors of several.
    query: String,
    agent: Agent,
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
            })
        };
        let mirrors = options.mirrors.iter().map(mirror).collect::<Result<_>>()?;
        Ok(Mirrors { mirrors, timeout: options.timeout, given_up: AtomicBool::new(false) })
    }

    /// The first good answer to the question for a blob from `offset` on.
    pub(super) fn ask(&self, digest: &BlobDigest, offset: u64) -> Option<Answer> {
        if self.given_up.load(Ordering::Relaxed) {
            return None;
        }
        self.mirrors.iter().find_map(|mirror| {
            let mut request = ureq::http::Request::builder()
                .method(Method::GET)
                .uri(format!("{}{digest}{}", mirror.blobs, mirror.query));
            if offset > 0 {
                request = request.header(header::RANGE, format!("bytes={offset}-"));
            }
            let answer = mirror.agent.run(request.body(()).ok()?).ok()?;
            let good = matches!(answer.status().as_u16(), 200 | 206);
            good.then(|| Answer::of(answer, self.timeout))
        })
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
