//! `store ls --built-by`: entries of an engine's releases.

use std::fmt;

use semver::{Version, VersionReq};

use crate::error::{Code, Error, Result, nearest};
use crate::sandbox::EngineName;
use crate::store::Engines;

/// An engine and a range of its versions.
#[derive(Clone, Debug)]
pub(in crate::cli) struct BuiltBy {
    engine: EngineName,
    versions: VersionReq,
}

/// Whether an engine of the range had a part in an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Yes,
    No,
    /// Not as far as is known, but not everything is.
    Unknown,
}

impl BuiltBy {
    /// Reads `wasmtime`, `wasmtime <48.0.9`, `wasmtime >=48.0.0, <48.0.9`.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let text = text.trim();
        let end = text.find(|c: char| !(c.is_ascii_alphanumeric() || c == '-')).unwrap_or(text.len());
        let (name, range) = text.split_at(end);
        let bad = |what: String| Error::new(Code::BadParams, what).hint("write it as 'wasmtime <48.0.9'");
        let engine = EngineName::from_name(name).ok_or_else(|| {
            let names: Vec<&str> = EngineName::ALL.iter().map(|e| e.as_str()).collect();
            match nearest(name, names.iter().copied()) {
                Some(near) => bad(format!("'{name}' is no engine; did you mean {near}?")),
                None => bad(format!("'{text}' does not begin with an engine; there are {}", names.join(", "))),
            }
        })?;
        let versions = match range.trim() {
            "" => VersionReq::STAR,
            range => VersionReq::parse(range).map_err(|e| bad(format!("'{range}' is no range of versions: {e}")))?,
        };
        Ok(BuiltBy { engine, versions })
    }

    /// Whether one of `engines` is of the range.
    pub(super) fn judge(&self, engines: &Engines) -> Verdict {
        let mut complete = engines.complete;
        for built_with in engines.known.iter().filter(|e| e.engine == self.engine.as_str()) {
            match Version::parse(&built_with.version) {
                Ok(version) if self.versions.matches(&version) => return Verdict::Yes,
                Ok(_) => {}
                // Any version is of the range that has all of them.
                Err(_) if self.versions == VersionReq::STAR => return Verdict::Yes,
                Err(_) => complete = false,
            }
        }
        if complete { Verdict::No } else { Verdict::Unknown }
    }
}

impl fmt::Display for BuiltBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.engine.as_str(), self.versions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::BuiltWith;

    fn engines(known: &[(&str, &str)], complete: bool) -> Engines {
        let known =
            known.iter().map(|(engine, version)| BuiltWith { engine: (*engine).into(), version: (*version).into() });
        Engines { known: known.collect(), complete }
    }

    fn judge(range: &str, known: &[(&str, &str)], complete: bool) -> Verdict {
        BuiltBy::parse(range).unwrap().judge(&engines(known, complete))
    }

    #[test]
    fn ranges_are_compared_as_versions() {
        let built = [("wasmtime", "48.0.8"), ("wasmi", "2.0.0")];
        for (range, verdict) in [
            ("wasmtime <48.0.9", Verdict::Yes),
            ("wasmtime<48.0.9", Verdict::Yes),
            ("wasmtime < 48.0.8", Verdict::No),
            ("wasmtime <48.0.10", Verdict::Yes),
            ("wasmtime =48.0.8", Verdict::Yes),
            ("wasmtime >=48.0.0, <48.0.8", Verdict::No),
            ("wasmtime >=48.0.0, <49", Verdict::Yes),
            ("wasmtime", Verdict::Yes),
            ("wasmi *", Verdict::Yes),
            ("wasmi >2.0.0", Verdict::No),
            ("pulley", Verdict::No),
        ] {
            assert_eq!(judge(range, &built, true), verdict, "{range}");
        }
    }

    #[test]
    fn what_is_not_known_is_not_denied() {
        assert_eq!(judge("wasmtime <48.0.8", &[("wasmtime", "48.0.8")], false), Verdict::Unknown);
        assert_eq!(judge("wasmtime <48.0.9", &[("wasmtime", "48.0.8")], false), Verdict::Yes);
        assert_eq!(judge("wasmtime <48.0.9", &[], false), Verdict::Unknown);
        assert_eq!(judge("wasmtime <48.0.9", &[("wasmtime", "nightly")], true), Verdict::Unknown);
        assert_eq!(judge("wasmtime", &[("wasmtime", "nightly")], true), Verdict::Yes);
    }

    #[test]
    fn other_texts_are_refused() {
        for (text, part) in [
            ("", "engine"),
            ("<48.0.9", "engine"),
            ("wasmtme <48", "did you mean wasmtime"),
            ("wasmtime <<4", "range"),
            ("wasmtime 1.x.y.z", "range"),
        ] {
            let error = BuiltBy::parse(text).unwrap_err();
            assert!(error.code() == Code::BadParams && error.message().contains(part), "{error}");
        }
    }
}
