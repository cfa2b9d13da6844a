//! Redirects: a registry may send whoever wants a blob to where it keeps it.
//!
//! Where an answer leads is as little believed as the rest. Only blobs are
//! followed, which are compared with their digest; a few steps only; never from
//! TLS to plain HTTP. What the user is to the registry is told to nobody else:
//! another origin gets no `Authorization`, and its challenges are not answered.

use ureq::http::Uri;

use super::exchange::Answer;
use crate::error::{Code, Error, Result};
use crate::plan::printable;

/// How often one request is led on.
const LIMIT: u32 = 5;

/// The way of one request.
#[derive(Debug)]
pub(super) struct Trail {
    home: Origin,
    at: Origin,
    url: String,
    followed: u32,
}

/// Whom a request reaches.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Origin {
    tls: bool,
    host: String,
    port: u16,
}

impl Trail {
    /// Begins at the address that is asked for.
    pub(super) fn new(url: &str) -> Result<Self> {
        let home = Origin::of(url).ok_or_else(|| refuse(format!("'{}' is no address", printable(url))))?;
        Ok(Trail { at: home.clone(), home, url: url.to_owned(), followed: 0 })
    }

    /// The address that is asked now.
    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// The host that is asked now.
    pub(super) fn host(&self) -> &str {
        &self.at.host
    }

    /// Whether that is still whom the request was meant for.
    pub(super) fn is_home(&self) -> bool {
        self.at == self.home
    }

    /// Goes where an answer leads; `false` if it leads nowhere.
    pub(super) fn follow(&mut self, answer: &Answer) -> Result<bool> {
        if !matches!(answer.status, 301 | 302 | 303 | 307 | 308) {
            return Ok(false);
        }
        self.step(answer.header("location")).map(|()| true)
    }

    fn step(&mut self, location: Option<&str>) -> Result<()> {
        let from = &self.url;
        let location = location.ok_or_else(|| refuse(format!("{from} leads elsewhere and does not say where")))?;
        if self.followed == LIMIT {
            return Err(refuse(format!("{from} leads on for more than {LIMIT} times")));
        }
        let next = resolve(from, location).and_then(|url| Some((Origin::of(&url)?, url)));
        let Some((at, url)) = next else {
            return Err(refuse(format!("{from} leads to '{}', which is no address", printable(location))));
        };
        if self.at.tls && !at.tls {
            let message = format!("{from} leads to plain HTTP at {}, which is refused", at.host);
            return Err(Error::new(Code::NetworkError, message)
                .hint("the registry must lead to https; its operator can say why it does not"));
        }
        (self.at, self.url, self.followed) = (at, url, self.followed + 1);
        Ok(())
    }
}

fn refuse(what: String) -> Error {
    Error::new(Code::RegistryRefused, what).hint("look at the registry's settings, or at what stands before it")
}

impl Origin {
    fn of(url: &str) -> Option<Self> {
        let uri: Uri = url.parse().ok()?;
        let tls = match uri.scheme_str()?.to_ascii_lowercase().as_str() {
            "https" => true,
            "http" => false,
            _ => return None,
        };
        let authority = uri.authority()?;
        // A name and password in an address would be sent as credentials.
        if authority.as_str().contains('@') || authority.host().is_empty() {
            return None;
        }
        let port = authority.port_u16().unwrap_or(if tls { 443 } else { 80 });
        Some(Origin { tls, host: authority.host().to_ascii_lowercase(), port })
    }
}

/// The address that a reference in an answer of `from` means, if it stays at
/// the same origin.
pub(super) fn resolve_at_home(from: &str, reference: &str) -> Option<String> {
    let url = resolve(from, reference)?;
    (Origin::of(&url)? == Origin::of(from)?).then_some(url)
}

/// The address that a reference in an answer of `from` means: a whole one, one
/// without its scheme, a path, or a query.
fn resolve(from: &str, reference: &str) -> Option<String> {
    let reference = reference.split('#').next().unwrap_or_default().trim();
    let (scheme, rest) = from.split_once("://")?;
    let path = rest.find(['/', '?']).unwrap_or(rest.len());
    if reference.starts_with("//") {
        return Some(format!("{scheme}:{reference}"));
    }
    if reference.starts_with('/') {
        return Some(format!("{scheme}://{}{reference}", &rest[..path]));
    }
    if reference.starts_with('?') {
        return Some(format!("{}{reference}", from.split('?').next().unwrap_or_default()));
    }
    let (scheme, _) = reference.split_once("://")?;
    (scheme.eq_ignore_ascii_case("http") || scheme.eq_ignore_ascii_case("https")).then(|| reference.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_resolved() {
        let from = "https://r.io:5000/v2/a/blobs/sha256:x?ns=b";
        for (reference, url) in [
            ("https://s.io/x?y=1#z", Some("https://s.io/x?y=1")),
            ("//s.io/x", Some("https://s.io/x")),
            ("/v2/x", Some("https://r.io:5000/v2/x")),
            ("?page=2", Some("https://r.io:5000/v2/a/blobs/sha256:x?page=2")),
            ("HTTP://s.io/", Some("HTTP://s.io/")),
            ("file:///etc/passwd", None),
            ("ftp://s.io/x", None),
            ("x", None),
            ("", None),
        ] {
            assert_eq!(resolve(from, reference).as_deref(), url, "{reference}");
        }
        assert_eq!(resolve_at_home(from, "/x").as_deref(), Some("https://r.io:5000/x"));
        assert!(resolve_at_home(from, "https://R.IO:5000/x").is_some());
        for elsewhere in ["//s.io/x", "https://r.io/x", "http://r.io:5000/x", "https://u@r.io:5000/x"] {
            assert_eq!(resolve_at_home(from, elsewhere), None, "{elsewhere}");
        }
    }

    #[test]
    fn a_default_port_is_the_same_origin() {
        assert_eq!(Origin::of("https://r.io/a"), Origin::of("https://R.io:443/b"));
        assert_ne!(Origin::of("https://r.io/a"), Origin::of("http://r.io:443/a"));
        for bad in ["r.io/a", "https:///a", "https://a:b@r.io/", "ftp://r.io/", "https://r.io/a b", ""] {
            assert_eq!(Origin::of(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_way_is_short_and_does_not_leave_tls() {
        let mut trail = Trail::new("https://r.io/v2/a").unwrap();
        assert!(trail.is_home());
        trail.step(Some("https://s.io/a")).unwrap();
        assert!(!trail.is_home());
        assert_eq!((trail.url(), trail.host()), ("https://s.io/a", "s.io"));
        assert_eq!(trail.step(Some("http://s.io/a")).unwrap_err().code(), Code::NetworkError);
        assert_eq!(trail.step(Some("http:")).unwrap_err().code(), Code::RegistryRefused);
        assert_eq!(trail.step(None).unwrap_err().code(), Code::RegistryRefused);
        trail.step(Some("https://r.io/b")).unwrap();
        assert!(trail.is_home());
        for _ in 2..LIMIT {
            trail.step(Some("/c")).unwrap();
        }
        assert!(trail.step(Some("/c")).unwrap_err().message().contains("leads on"));
        // Plain HTTP may lead to TLS, and then not back.
        let mut trail = Trail::new("http://127.0.0.1:5000/v2/a").unwrap();
        trail.step(Some("https://s.io/a")).unwrap();
        assert_eq!(trail.step(Some("http://127.0.0.1:5000/v2/a")).unwrap_err().code(), Code::NetworkError);
    }
}
