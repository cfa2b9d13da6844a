//! Names of things in registries: `oci://registry/repository[:tag][@sha256:…]`.
//!
//! The registry is always written out: there is no default one, so a reference
//! means the same thing to everybody who reads it. `docker.io` is the one name
//! whose API is at another host.

use std::fmt;

use crate::digest::BlobDigest;
use crate::error::{Code, Error, Result};

/// How every reference begins.
pub const SCHEME: &str = "oci://";
const DOCKER_HUB: &str = "docker.io";

/// A repository of a registry.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Repository {
    /// `host` or `host:port`.
    pub registry: String,
    /// `name/of/repository`.
    pub name: String,
}

/// A repository, and what in it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reference {
    /// Where.
    pub repository: Repository,
    /// The tag, if there is one.
    pub tag: Option<String>,
    /// The manifest's digest, if it is pinned.
    pub digest: Option<BlobDigest>,
}

impl Repository {
    /// Reads `oci://registry/repository`, without a tag or a digest.
    ///
    /// # Errors
    /// `bad_params`, saying what is wrong.
    pub fn parse(text: &str) -> Result<Self> {
        let reference = Reference::parse(text)?;
        match (&reference.tag, &reference.digest) {
            (None, None) => Ok(reference.repository),
            _ => Err(bad(text, "names a tag or a digest where a repository is expected")
                .hint("write oci://registry/repository: entries are tagged with their keys")),
        }
    }

    /// The host (and port) that answers for the registry.
    pub fn api_host(&self) -> &str {
        if self.registry == DOCKER_HUB { "registry-1.docker.io" } else { &self.registry }
    }

    /// What `docker login` files the credentials under.
    pub fn credential_name(&self) -> &str {
        if self.registry == DOCKER_HUB { "https://index.docker.io/v1/" } else { &self.registry }
    }

    /// The repository's name in the registry's API.
    pub fn api_name(&self) -> String {
        let official = self.registry == DOCKER_HUB && !self.name.contains('/');
        if official { format!("library/{}", self.name) } else { self.name.clone() }
    }

    /// The host without its port.
    pub fn host(&self) -> &str {
        let registry = self.registry.as_str();
        match registry.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((address, _)) => address,
            None => registry.split_once(':').map_or(registry, |(host, _)| host),
        }
    }

    /// Whether the registry is this very machine.
    pub fn is_loopback(&self) -> bool {
        let host = self.host();
        host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
    }

    /// This repository's manifest `digest`.
    pub fn at(&self, digest: BlobDigest) -> Reference {
        Reference { repository: self.clone(), tag: None, digest: Some(digest) }
    }
}

impl Reference {
    /// Reads a reference. Tag and digest may both be missing.
    ///
    /// # Errors
    /// `bad_params`, saying what is wrong.
    pub fn parse(text: &str) -> Result<Self> {
        let Some(rest) = text.strip_prefix(SCHEME) else {
            return Err(bad(text, "does not begin with oci://"));
        };
        let (named, digest) = match rest.split_once('@') {
            Some((named, digest)) => (named, Some(digest)),
            None => (rest, None),
        };
        let digest = match digest {
            None => None,
            Some(digest) => {
                let parsed = digest.strip_prefix("sha256:").and_then(|hex| hex.parse().ok());
                Some(
                    parsed
                        .ok_or_else(|| bad(text, "needs sha256: and 64 lower-case hexadecimal digits after the '@'"))?,
                )
            }
        };
        let Some((registry, path)) = named.split_once('/') else {
            return Err(bad(text, "lacks a repository"));
        };
        let (name, tag) = match path.rsplit_once(':') {
            Some((name, tag)) => (name, Some(tag)),
            None => (path, None),
        };
        if !is_registry(registry) {
            return Err(bad(text, &format!("has no registry: '{registry}' is no host or host:port")));
        }
        if !is_name(name) {
            return Err(bad(
                text,
                &format!(
                    "names no repository: '{name}' is not of lower-case letters, digits and single separators '.', '_', '-', '/'"
                ),
            ));
        }
        if let Some(tag) = tag.filter(|tag| !is_tag(tag)) {
            return Err(bad(
                text,
                &format!("has no tag: '{tag}' is not of at most 128 letters, digits, '.', '_', '-'"),
            ));
        }
        let repository = Repository { registry: registry.to_owned(), name: name.to_owned() };
        Ok(Reference { repository, tag: tag.map(str::to_owned), digest })
    }

    /// The same with a digest.
    pub fn pinned(&self, digest: BlobDigest) -> Reference {
        Reference { digest: Some(digest), ..self.clone() }
    }
}

fn bad(text: &str, why: &str) -> Error {
    let shown: String = text.chars().take(300).flat_map(char::escape_debug).collect();
    Error::new(Code::BadParams, format!("the reference '{shown}' {why}"))
        .hint("write oci://registry/repository:tag or oci://registry/repository:tag@sha256:<hex>")
}

fn is_registry(text: &str) -> bool {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((address, "")) => (address, None),
            Some((address, port)) => match port.strip_prefix(':') {
                Some(port) => (address, Some(port)),
                None => return false,
            },
            None => return false,
        },
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let is_host = match text.starts_with('[') {
        true => host.parse::<std::net::Ipv6Addr>().is_ok(),
        false => {
            let is_label = |label: &str| {
                !label.is_empty()
                    && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
                    && !label.starts_with('-')
                    && !label.ends_with('-')
            };
            host.len() <= 253 && host.split('.').all(is_label)
        }
    };
    is_host && port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port > 0))
}

/// Components of lower-case letters and digits, with `.`, `_`, `__` or dashes
/// between, as the distribution specification has them.
pub(super) fn is_name(text: &str) -> bool {
    let is_component = |component: &str| {
        let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let bytes = component.as_bytes();
        let ends = |b: Option<&u8>| b.is_some_and(|b| alphanumeric(*b));
        let separators = component.split(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
        let mut separators = separators.filter(|s| !s.is_empty());
        ends(bytes.first())
            && ends(bytes.last())
            && separators.all(|s| matches!(s, "." | "_" | "__") || s.bytes().all(|b| b == b'-'))
    };
    text.len() <= 255 && text.split('/').all(is_component)
}

fn is_tag(text: &str) -> bool {
    let first = text.bytes().next();
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    text.len() <= 128 && first.is_some_and(word) && text.bytes().all(|b| word(b) || matches!(b, b'.' | b'-'))
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.registry, self.name)
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.repository.fmt(f)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        match &self.digest {
            Some(digest) => write!(f, "@sha256:{digest}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_told_apart_and_written_back() {
        let hex = "ab".repeat(32);
        for (text, registry, name, tag) in [
            ("r.io/a", "r.io", "a", None),
            ("r.io/a/b-c__d.e:v1.0_x-y", "r.io", "a/b-c__d.e", Some("v1.0_x-y")),
            ("localhost:5000/m---n:V", "localhost:5000", "m---n", Some("V")),
            ("[::1]:5000/a:v", "[::1]:5000", "a", Some("v")),
            ("127.0.0.1/a:_", "127.0.0.1", "a", Some("_")),
        ] {
            for (suffix, digest) in [(String::new(), None), (format!("@sha256:{hex}"), Some(hex.parse().unwrap()))] {
                let text = format!("oci://{text}{suffix}");
                let found = Reference::parse(&text).unwrap();
                assert_eq!((found.repository.registry.as_str(), found.repository.name.as_str()), (registry, name));
                assert_eq!((found.tag.as_deref(), found.digest), (tag, digest), "{text}");
                assert_eq!(found.to_string(), text);
            }
        }
    }

    #[test]
    fn anything_else_is_refused() {
        let long = format!("oci://r.io/a:{}", "v".repeat(129));
        for text in [
            "",
            "r.io/a:v",
            "http://r.io/a",
            "oci://",
            "oci://r.io",
            "oci://r.io/",
            "oci:///a",
            "oci://r.io/A:v",
            "oci://r.io/a//b",
            "oci://r.io/a/:v",
            "oci://r.io/-a",
            "oci://r.io/a-",
            "oci://r.io/a..b",
            "oci://r.io/a___b",
            "oci://r.io/a._b",
            "oci://r.io/a:",
            "oci://r.io/a:.v",
            "oci://r.io/a:v/b",
            "oci://r.io/a:v:w",
            "oci://r.io/a b:v",
            "oci://user@r.io/a:v",
            "oci://r.io:0/a",
            "oci://r.io:99999/a",
            "oci://r.io:/a",
            "oci://-r.io/a",
            "oci://r..io/a",
            "oci://[::1/a",
            "oci://[::1]5/a",
            "oci://[x]/a",
            "oci://r.io/a@sha256:12",
            "oci://r.io/a@md5:12",
            "oci://r.io/a?x=1",
            "oci://r.io/a#b",
            "oci://r.io/../a",
            "oci://r.io/a%2e",
            "oci://r.io/a\n:v",
            &long,
        ] {
            assert_eq!(Reference::parse(text).unwrap_err().code(), Code::BadParams, "{text:?}");
        }
        assert!(Repository::parse("oci://r.io/a:v").is_err());
        assert!(Repository::parse("oci://r.io/a").is_ok());
    }

    #[test]
    fn hosts_for_the_api_and_for_credentials() {
        let hub = Repository::parse("oci://docker.io/alpine").unwrap();
        assert_eq!(
            (hub.api_host(), hub.api_name().as_str(), hub.credential_name()),
            ("registry-1.docker.io", "library/alpine", "https://index.docker.io/v1/")
        );
        let own = Repository::parse("oci://r.io:5000/a").unwrap();
        assert_eq!((own.api_host(), own.api_name().as_str(), own.credential_name()), ("r.io:5000", "a", "r.io:5000"));
        for (text, loopback) in [
            ("127.0.0.1:5000", true),
            ("127.9.9.9", true),
            ("localhost", true),
            ("[::1]:80", true),
            ("10.0.0.1", false),
            ("localhost.evil.io", false),
            ("127.0.0.1.evil.io", false),
        ] {
            let found = Repository::parse(&format!("oci://{text}/a")).unwrap();
            assert_eq!(found.is_loopback(), loopback, "{text}");
        }
    }
}
