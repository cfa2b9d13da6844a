//! What is said about an entry: an in-toto Statement v1.
//!
//! The one subject is the entry document: its name is the key, its digest that
//! of the document's blob, which is also a file of the store
//! (`blobs/sha256/<digest>`) and holds the key, the content digest, every
//! tensor and every shard. So tools that compare a file with a statement's
//! subject have a file to compare. The predicate repeats what people compare,
//! and adds what is never hashed: who built the entry, when, and with what.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::canonical::to_canonical;
use crate::digest::{ActionKey, BlobDigest, ContentDigest, ModuleDigest};
use crate::error::{Code, Error, Result};
use crate::store::document::EntryDocument;

/// The type of a statement.
pub const STATEMENT: &str = "https://in-toto.io/Statement/v1";
/// The type of a predicate about an entry.
pub const ENTRY_PREDICATE: &str = "urn:weightmill:attestation:entry:v1";

/// An in-toto statement with a predicate of one's own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Statement<P> {
    /// [`STATEMENT`].
    #[serde(rename = "_type")]
    pub kind: String,
    /// What it is about.
    pub subject: Vec<Subject>,
    /// What the predicate is.
    pub predicate_type: String,
    /// What is said.
    pub predicate: P,
}

/// Something that is identified by its digest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subject {
    /// A name, for people.
    #[serde(default)]
    pub name: String,
    /// Hexadecimal digests by algorithm.
    pub digest: BTreeMap<String, String>,
}

impl Subject {
    /// A subject with a SHA-256.
    pub fn sha256(name: impl Into<String>, digest: impl std::fmt::Display) -> Self {
        Subject { name: name.into(), digest: BTreeMap::from([("sha256".to_string(), digest.to_string())]) }
    }

    /// Its SHA-256.
    pub fn sha256_digest(&self) -> Option<&str> {
        self.digest.get("sha256").map(String::as_str)
    }
}

impl<P: Serialize + DeserializeOwned> Statement<P> {
    /// Says `predicate` of `subject`.
    pub fn new(subject: Vec<Subject>, predicate_type: &str, predicate: P) -> Self {
        Statement { kind: STATEMENT.to_string(), subject, predicate_type: predicate_type.to_string(), predicate }
    }

    /// Reads a statement whose predicate is of `predicate_type`.
    ///
    /// # Errors
    /// `attestation_invalid`.
    pub fn parse(bytes: &[u8], predicate_type: &str) -> Result<Self> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Types {
            #[serde(rename = "_type")]
            kind: String,
            predicate_type: String,
        }
        let bad = |what: String| {
            Error::new(Code::AttestationInvalid, format!("this is no statement of this program: {what}"))
                .hint("it must be one that `weightmill attest` writes, or has signed")
        };
        // The types first: another predicate has other fields, and that is
        // not what is wrong with it.
        let types: Types = serde_json::from_slice(bytes).map_err(|e| bad(e.to_string()))?;
        for (what, expected, found) in
            [("_type", STATEMENT, &types.kind), ("predicateType", predicate_type, &types.predicate_type)]
        {
            if found != expected {
                let found: String = found.chars().take(200).flat_map(char::escape_debug).collect();
                return Err(bad(format!("expected {what} '{expected}', found '{found}'")));
            }
        }
        serde_json::from_slice(bytes).map_err(|e| bad(e.to_string()))
    }

    /// The canonical JSON: the payload of an envelope.
    ///
    /// # Errors
    /// `bad_params` if the predicate has no canonical form.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        to_canonical(self)
    }
}

/// A statement about an entry.
pub type EntryStatement = Statement<EntryPredicate>;

/// What is said about an entry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EntryPredicate {
    /// The action's digest, which the entry is found by.
    pub key: ActionKey,
    /// The digest over all tensors.
    pub content_digest: ContentDigest,
    /// The shards, in stream order.
    pub shards: Vec<ShardRow>,
    /// The modules that made the entry, ascending by digest; empty if the
    /// action was not at hand.
    pub modules: Vec<ModuleRow>,
    /// Who built it: program, engine, version, target, host, time; one
    /// document a build. Nothing is checked against it.
    pub builds: Vec<serde_json::Value>,
}

/// A shard file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardRow {
    /// SHA-256 of the file.
    pub digest: BlobDigest,
    /// Its bytes.
    pub size: u64,
}

/// A module that was used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModuleRow {
    /// SHA-256 of the file.
    pub digest: ModuleDigest,
    /// The name that it gives itself, where the module was at hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The version that it gives itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

impl EntryStatement {
    /// The statement about the entry of `document`, whose blob has the digest
    /// `document_digest`.
    pub fn of_entry(
        document: &EntryDocument,
        document_digest: &BlobDigest,
        modules: Vec<ModuleRow>,
        builds: Vec<serde_json::Value>,
    ) -> Self {
        let shards = document.shards.iter().map(|s| ShardRow { digest: s.digest, size: s.size }).collect();
        let predicate =
            EntryPredicate { key: document.key, content_digest: document.content_digest, shards, modules, builds };
        Statement::new(vec![Subject::sha256(document.key.to_string(), document_digest)], ENTRY_PREDICATE, predicate)
    }

    /// Reads a statement about an entry.
    ///
    /// # Errors
    /// `attestation_invalid`.
    pub fn read(bytes: &[u8]) -> Result<Self> {
        Statement::parse(bytes, ENTRY_PREDICATE)
    }

    /// Checks that it is true of an entry: key, content, document and shards.
    ///
    /// # Errors
    /// `digest_mismatch`, naming the first thing that differs.
    pub fn check(&self, document: &EntryDocument, document_digest: &BlobDigest) -> Result<()> {
        self.check_content(&document.key, &document.content_digest)?;
        let subject = self.subject.iter().any(|s| s.sha256_digest() == Some(&document_digest.to_string()));
        if !subject {
            let said: Vec<&str> = self.subject.iter().filter_map(Subject::sha256_digest).take(3).collect();
            let what = format!("the document {}", said.join(", ").escape_debug());
            return Err(differs(&what, format!("the entry's is {document_digest}")));
        }
        let shards: Vec<ShardRow> =
            document.shards.iter().map(|s| ShardRow { digest: s.digest, size: s.size }).collect();
        if self.predicate.shards != shards {
            let first = self.predicate.shards.iter().zip(&shards).position(|(a, b)| a != b);
            let first = first.unwrap_or_else(|| self.predicate.shards.len().min(shards.len()));
            let name = |rows: &[ShardRow]| rows.get(first).map_or("none".to_string(), |row| row.digest.to_string());
            let what = format!("shard {first} {}", name(&self.predicate.shards));
            return Err(differs(&what, format!("the entry's is {}", name(&shards))));
        }
        Ok(())
    }

    /// Checks that it is true of a result that has no document: key and
    /// content.
    ///
    /// # Errors
    /// `digest_mismatch`.
    pub fn check_content(&self, key: &ActionKey, content: &ContentDigest) -> Result<()> {
        if self.predicate.key != *key {
            return Err(differs(&format!("the key {}", self.predicate.key), format!("this is {key}")));
        }
        if self.predicate.content_digest != *content {
            let what = format!("the content {}", self.predicate.content_digest);
            return Err(differs(&what, format!("here it is {content}")).hint(
                "one key has two contents: one of the two hosts computed wrongly, or the statement is false; rebuild with another --engine",
            ));
        }
        Ok(())
    }
}

fn differs(attested: &str, found: String) -> Error {
    Error::new(Code::DigestMismatch, format!("the attestation is about {attested}, {found}"))
        .hint("the attestation is about another entry or another build")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::BlockKey;
    use crate::store::document::{BlockRecord, SCHEMA, ShardRecord};

    fn document() -> EntryDocument {
        let shard = |n: &[u8]| ShardRecord {
            digest: BlobDigest::of(n),
            size: 4096,
            leaves: BlobDigest::of(b"leaves"),
            leaves_size: 32,
        };
        let mut document = EntryDocument {
            schema: SCHEMA.into(),
            key: ActionKey::of(b"action"),
            content_digest: ContentDigest::of(b""),
            tensors: Vec::new(),
            aliases: Vec::new(),
            blocks: vec![BlockRecord { name: "rest".into(), action: BlockKey::of(b"block"), shards: vec![0, 1] }],
            shards: vec![shard(b"0"), shard(b"1")],
        };
        document.content_digest = document.compute_content_digest();
        document
    }

    fn statement() -> EntryStatement {
        let module = ModuleRow { digest: ModuleDigest::of(b"m"), name: Some("cast".into()), version: None };
        let built = serde_json::json!({"engine": "wasmtime"});
        EntryStatement::of_entry(&document(), &BlobDigest::of(b"document"), vec![module], vec![built])
    }

    #[test]
    fn a_statement_survives_being_written_and_has_the_public_form() {
        let bytes = statement().to_bytes().unwrap();
        assert_eq!(EntryStatement::read(&bytes).unwrap(), statement());
        let json: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(json["_type"], STATEMENT);
        assert_eq!(json["predicateType"], ENTRY_PREDICATE);
        assert_eq!(json["subject"][0]["digest"]["sha256"], BlobDigest::of(b"document").to_string());
        assert_eq!(json["subject"][0]["name"], document().key.to_string());
    }

    #[test]
    fn what_differs_is_named() {
        let (document, digest) = (document(), BlobDigest::of(b"document"));
        statement().check(&document, &digest).unwrap();
        let refused = |change: &dyn Fn(&mut EntryStatement)| {
            let mut changed = statement();
            change(&mut changed);
            let error = changed.check(&document, &digest).unwrap_err();
            assert_eq!(error.code(), Code::DigestMismatch);
            error.message().to_string()
        };
        assert!(refused(&|s| s.predicate.key = ActionKey::of(b"other")).contains("the key"));
        assert!(refused(&|s| s.predicate.content_digest = ContentDigest::of(b"other")).contains("the content"));
        assert!(refused(&|s| s.subject.clear()).contains("the document"));
        assert!(refused(&|s| s.subject[0] = Subject::sha256("x", "00")).contains("the document 00"));
        assert!(refused(&|s| s.predicate.shards.swap(0, 1)).contains("shard 0"));
        assert!(refused(&|s| s.predicate.shards.truncate(s.predicate.shards.len() - 1)).contains("shard 1 none"));
        assert!(refused(&|s| s.predicate.shards[1].size += 1).contains("shard 1"));
    }

    #[test]
    fn other_statements_are_refused() {
        let good = String::from_utf8(statement().to_bytes().unwrap()).unwrap();
        for (bad, part) in [
            (good.replace("Statement/v1", "Statement/v2"), "_type"),
            (good.replace(":entry:v1", ":entry:v9"), "predicateType"),
            (good.replace("content_digest", "content"), "content_digest"),
            ("{}".into(), "missing field"),
            (String::new(), "EOF"),
        ] {
            let error = EntryStatement::read(bad.as_bytes()).unwrap_err();
            assert_eq!(error.code(), Code::AttestationInvalid);
            assert!(error.message().contains(part), "{error}");
        }
    }
}
