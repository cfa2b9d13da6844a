//! Sending blobs.
//!
//! A blob goes up in one request (`POST`, then `PUT` with all bytes), which
//! every registry takes. If that breaks, the registry is asked how far it came,
//! and the rest is sent (`PATCH`, then an empty `PUT`); one that does not say is
//! sent everything anew.

use std::io::Read;

use ureq::http::Method;

use super::Registry;
use super::auth::Scope;
use super::exchange::{Again, Answer, Ask, Failure, Payload};
use crate::digest::BlobDigest;
use crate::error::{Code, Error, Result};
use crate::plan::printable;
use crate::progress::Progress;
use crate::publish::reference::is_name;

/// Where a blob's bytes come from.
pub trait BlobSource: Sync {
    /// The bytes from `offset` on.
    fn open(&self, offset: u64) -> Box<dyn Read + '_>;
}

impl BlobSource for &[u8] {
    fn open(&self, offset: u64) -> Box<dyn Read + '_> {
        Box::new(self.get(offset as usize..).unwrap_or_default())
    }
}

/// How a blob came to be in the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pushed {
    /// It was there.
    Present,
    /// The registry took it from another of its repositories.
    Mounted,
    /// It was sent.
    Sent,
}

/// What a registry makes of the wish to take a blob from elsewhere.
enum Mount {
    Done,
    /// It begins an upload instead.
    Begun(Upload),
    Refused,
}

/// An upload that has begun.
struct Upload {
    location: String,
}

impl Registry {
    /// Sees to it that the registry has a blob of `size_bytes`: asks, tries to
    /// mount it from another repository of the registry, then sends it.
    ///
    /// # Errors
    /// `network_error`, `registry_refused`, `registry_timeout`, `interrupted`;
    /// `digest_mismatch` if the registry takes the bytes for something else;
    /// `bad_params` if `mount_from` is no repository's name.
    pub fn push_blob(
        &self,
        digest: &BlobDigest,
        size_bytes: u64,
        source: &dyn BlobSource,
        mount_from: Option<&str>,
        progress: &dyn Progress,
    ) -> Result<Pushed> {
        if let Some(from) = mount_from.filter(|from| !is_name(from)) {
            return Err(Error::new(Code::BadParams, format!("'{}' is no repository to mount from", printable(from)))
                .hint("write the name of a repository of the same registry, such as weights/base"));
        }
        if self.has_blob(digest, progress)? {
            return Ok(Pushed::Present);
        }
        let mut upload = match mount_from {
            Some(from) => match self.mount(digest, from, progress)? {
                Mount::Done => return Ok(Pushed::Mounted),
                Mount::Begun(upload) => Some(upload),
                Mount::Refused => None,
            },
            None => None,
        };
        let mut offset = 0;
        self.retried(progress, || {
            let current = match upload.take() {
                Some(upload) => upload,
                None => {
                    offset = 0;
                    self.begin()?
                }
            };
            let failure = match self.send_rest(&current, digest, offset, size_bytes, source) {
                Ok(()) => return Ok(()),
                Err(failure) => failure,
            };
            if failure.again != Again::Never {
                if let Some((at, continued)) = self.reached(&current, size_bytes) {
                    (offset, upload) = (at, Some(continued));
                } else if self.has_blob_now(digest) {
                    // Only the answer was lost.
                    return Ok(());
                }
            }
            Err(failure)
        })?;
        Ok(Pushed::Sent)
    }

    /// Asks the registry to take a blob from another repository. Who may write
    /// here may not be allowed to read there.
    fn mount(&self, digest: &BlobDigest, from: &str, progress: &dyn Progress) -> Result<Mount> {
        let url = format!("{}/blobs/uploads/?mount=sha256:{digest}&from={from}", self.base);
        let ask = Ask::new(Method::POST, url, Scope::Mount(from.to_owned()));
        self.retried(progress, || match self.once(&ask) {
            Ok(answer) if answer.status == 201 => Ok(Mount::Done),
            Ok(answer) => Ok(self.upload(&answer).map_or(Mount::Refused, Mount::Begun)),
            // Not allowed to read there, or not able to mount: it is sent.
            Err(Failure { status: Some(_), again: Again::Never, .. }) => Ok(Mount::Refused),
            Err(failure) => Err(failure),
        })
    }

    fn begin(&self) -> Result<Upload, Failure> {
        let ask = Ask::new(Method::POST, format!("{}/blobs/uploads/", self.base), Scope::Push);
        let answer = self.once(&ask)?.or_missing(&self.repository)?;
        Ok(self.upload(&answer)?)
    }

    fn send_rest(
        &self,
        upload: &Upload,
        digest: &BlobDigest,
        offset: u64,
        size_bytes: u64,
        source: &dyn BlobSource,
    ) -> Result<(), Failure> {
        let open = || source.open(offset);
        let finish = |location: &str| {
            let separator = if location.contains('?') { '&' } else { '?' };
            format!("{location}{separator}digest=sha256:{digest}")
        };
        let bytes = Payload::Stream(size_bytes - offset, &open);
        let ask = if offset == 0 {
            let mut ask = Ask::new(Method::PUT, finish(&upload.location), Scope::Push);
            ask.content_type = Some("application/octet-stream");
            ask.payload = bytes;
            ask
        } else {
            let mut location = upload.location.clone();
            if offset < size_bytes {
                let mut ask = Ask::new(Method::PATCH, location, Scope::Push);
                ask.content_type = Some("application/octet-stream");
                ask.content_range = Some(format!("{offset}-{}", size_bytes - 1));
                ask.payload = bytes;
                let answer = self.once(&ask)?.or_missing(&self.repository)?;
                location = self.upload(&answer)?.location;
            }
            Ask::new(Method::PUT, finish(&location), Scope::Push)
        };
        self.once(&ask)?.or_missing(&self.repository)?;
        Ok(())
    }

    /// How far a broken upload came, and where it goes on.
    fn reached(&self, upload: &Upload, size_bytes: u64) -> Option<(u64, Upload)> {
        let ask = Ask::new(Method::GET, upload.location.clone(), Scope::Push);
        let answer = self.once(&ask).ok().filter(|answer| answer.status == 204)?;
        let last: u64 = answer.header("range")?.split('-').nth(1)?.parse().ok()?;
        // "0-0" says one byte or none: not worth telling apart.
        let offset = if last == 0 { return None } else { last + 1 };
        let next = self.upload(&answer).unwrap_or(Upload { location: upload.location.clone() });
        (offset <= size_bytes).then_some((offset, next))
    }

    fn has_blob_now(&self, digest: &BlobDigest) -> bool {
        let ask = Ask::for_blob(Method::HEAD, self.blob_url(digest), Scope::Push);
        self.once(&ask).is_ok_and(|answer| answer.status == 200)
    }

    /// The upload that an answer leads to. Registries give a whole address or
    /// a path; bytes and credentials go to the registry that was named only,
    /// or, without credentials being added by anybody, nowhere else.
    fn upload(&self, answer: &Answer) -> Result<Upload> {
        let refuse = |what: &str| {
            Error::new(Code::RegistryRefused, format!("{} gave no place for an upload: {what}", self.repository))
        };
        let location = answer.header("location").ok_or_else(|| refuse("its answer has no Location"))?;
        let origin = self.base.split("/v2/").next().unwrap_or(&self.base);
        let location = match location.strip_prefix('/') {
            Some(path) if !path.starts_with('/') => format!("{origin}/{path}"),
            _ => location.to_owned(),
        };
        let inside = location.strip_prefix(origin).is_some_and(|rest| rest.starts_with('/'));
        match inside {
            true => Ok(Upload { location }),
            false => Err(refuse("its Location is on another host")
                .hint("a registry behind a proxy must be told its own address, e.g. with X-Forwarded headers")),
        }
    }
}
