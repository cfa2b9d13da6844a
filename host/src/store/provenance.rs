//! How an entry came to be: kept beside it, never hashed.
//!
//! `provenance/<key>/` has one document for each build. They are free-form, but
//! for two members that this file knows: `engines`, everything that had a part
//! in a byte of the entry, reused blocks included, so that the entries of a bad
//! engine release can be found; and `lineage`, the digest of a file beside that
//! says from which tensor names the entry was made.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::ErrorKind;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Store;
use super::paths::LINEAGE_SUFFIX;
use super::records::RECORD_LIMIT_BYTES;
use super::storage::{failed, read_whole};
use crate::digest::{ActionKey, BlobDigest};
use crate::error::{Code, Error, Result};

/// An engine that had a part in an entry.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BuiltWith {
    /// Its name, as `--engine` takes it.
    pub engine: String,
    /// The version of the library behind it.
    pub version: String,
}

/// The engines that had a part in an entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Engines {
    /// Those that are known.
    pub known: BTreeSet<BuiltWith>,
    /// Whether these are all.
    pub complete: bool,
}

/// The engines that the documents of an entry's provenance name.
pub fn engines(provenance: &[Value]) -> Engines {
    let mut found = Engines { known: BTreeSet::new(), complete: !provenance.is_empty() };
    for built_by in provenance {
        match built_by.get("engines").map(Vec::<BuiltWith>::deserialize) {
            Some(Ok(engines)) => {
                found.known.extend(engines);
                found.complete &= built_by["engines_complete"] == true;
            }
            _ => {
                let own = own(built_by);
                found.complete &= own.is_some();
                found.known.extend(own.into_iter().flatten());
            }
        }
    }
    found
}

/// The engines of one build by itself, if its document names them: what ran
/// tiles, and what ran plans.
pub(crate) fn own(built_by: &Value) -> Option<Vec<BuiltWith>> {
    let named = |engine: &str, version: &str| {
        Some(BuiltWith { engine: built_by[engine].as_str()?.into(), version: built_by[version].as_str()?.into() })
    };
    let tiles = named("engine", "engine_version")?;
    let mut own: Vec<BuiltWith> =
        [Some(tiles), named("plan_engine", "plan_engine_version")].into_iter().flatten().collect();
    own.sort();
    own.dedup();
    Some(own)
}

/// The document with everything that had a part in the entry: the build's
/// `own` engines and those of the blocks that it reused. Unchanged if it names
/// none of its own.
pub(crate) fn with_all_engines<'a>(
    built_by: &Value,
    own: Option<&[BuiltWith]>,
    reused: impl Iterator<Item = &'a Option<Vec<BuiltWith>>>,
) -> Value {
    let mut document = built_by.clone();
    let (Some(own), Some(fields)) = (own, document.as_object_mut()) else { return document };
    let mut known: BTreeSet<&BuiltWith> = own.iter().collect();
    let mut complete = true;
    for engines in reused {
        complete &= engines.is_some();
        known.extend(engines.iter().flatten());
    }
    let known = known.iter().map(|e| serde_json::json!({ "engine": e.engine, "version": e.version }));
    fields.insert("engines".into(), known.collect());
    fields.insert("engines_complete".into(), complete.into());
    document
}

impl Store {
    /// What is known about how an entry came to be: one document for each
    /// build, in no particular order.
    ///
    /// # Errors
    /// `io_error`.
    pub fn provenance(&self, key: &ActionKey) -> Result<Vec<Value>> {
        let dir = self.0.paths.provenance(key);
        let is_lineage = |name: &OsStr| name.to_str().is_some_and(|name| name.ends_with(LINEAGE_SUFFIX));
        let mut found = Vec::new();
        for name in self.0.names(&dir)?.into_iter().filter(|name| !is_lineage(name)) {
            let path = dir.join(&name);
            let read = |file| read_whole(&*self.0.storage, &file, RECORD_LIMIT_BYTES);
            let bytes = self.0.storage.open_read(&path).and_then(read).map_err(|e| failed("read", &path, &e))?;
            let document = bytes.as_deref().and_then(|bytes| serde_json::from_slice(bytes).ok());
            found.push(document.ok_or_else(|| {
                Error::new(Code::IoError, format!("{} is no JSON document", path.display()))
                    .hint("delete it: nothing depends on it")
            })?);
        }
        Ok(found)
    }

    /// The lineages that an entry's provenance documents refer to. One that is
    /// gone or damaged is left out: it only names things.
    ///
    /// # Errors
    /// `io_error`.
    pub fn lineages(&self, key: &ActionKey) -> Result<Vec<Value>> {
        let mut digests: BTreeSet<BlobDigest> = BTreeSet::new();
        for built_by in self.provenance(key)? {
            digests.extend(built_by["lineage"].as_str().and_then(|digest| digest.parse::<BlobDigest>().ok()));
        }
        let mut found = Vec::new();
        for digest in digests {
            let path = self.0.paths.lineage(key, &digest);
            let read = |file| read_whole(&*self.0.storage, &file, RECORD_LIMIT_BYTES);
            let bytes = match self.0.storage.open_read(&path).and_then(read) {
                Ok(bytes) => bytes.unwrap_or_default(),
                Err(e) if e.kind() == ErrorKind::NotFound => continue,
                Err(e) => return Err(failed("read", &path, &e)),
            };
            if BlobDigest::of(&bytes) == digest {
                found.extend(serde_json::from_slice(&bytes).ok());
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn with(engine: &str, version: &str) -> BuiltWith {
        BuiltWith { engine: engine.into(), version: version.into() }
    }

    #[test]
    fn engines_are_those_of_the_build_and_of_what_it_reused() {
        let built_by = json!({"engine": "wasmtime", "engine_version": "48.0.9", "plan_engine": "wasmi", "plan_engine_version": "2.0.0"});
        let own = own(&built_by).unwrap();
        assert_eq!(own, [with("wasmi", "2.0.0"), with("wasmtime", "48.0.9")]);
        let old = Some(vec![with("wasmtime", "48.0.5")]);
        let all = with_all_engines(&built_by, Some(&own), [&old].into_iter());
        let found = engines(std::slice::from_ref(&all));
        assert!(found.complete);
        assert_eq!(
            found.known.into_iter().collect::<Vec<_>>(),
            [with("wasmi", "2.0.0"), with("wasmtime", "48.0.5"), with("wasmtime", "48.0.9")]
        );
        let partly = with_all_engines(&built_by, Some(&own), [&old, &None].into_iter());
        assert!(!engines(&[partly]).complete, "a reused block without a record");
        assert!(!engines(&[]).complete, "an entry without provenance");
        assert!(!engines(&[all, json!({"pulled_from": "elsewhere"})]).complete);
    }

    #[test]
    fn a_document_without_engines_stays_as_it_is() {
        let free = json!({"engine": "none"});
        assert_eq!(own(&free), None);
        assert_eq!(with_all_engines(&free, None, [].into_iter()), free);
        assert_eq!(engines(&[free]), Engines::default());
        let plain = json!({"engine": "wasmtime", "engine_version": "48.0.8"});
        assert_eq!(engines(&[plain]).known.len(), 1, "of an older version of this program");
    }
}
