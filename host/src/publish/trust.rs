//! Whom to trust: `trust.toml`, in the user's own configuration and nowhere
//! else.
//!
//! ```toml
//! trust = 1
//! remote = "pinned"            # or "listed": a digest in the recipe alone is not enough
//!
//! [[module]]                   # one module, by the SHA-256 of its wasm bytes
//! digest = "sha256:<hex>"
//!
//! [[repository]]               # all modules that were pulled from there
//! name = "oci://ghcr.io/acme/*"
//!
//! [[key]]                      # what is signed by this ed25519 key
//! name = "acme release"
//! file = "acme.pub"            # beside trust.toml; or pem = "-----BEGIN PUBLIC KEY-----…"
//! for = ["modules", "entries"] # the default
//!
//! [[entry]]                    # one entry: this content for this key
//! key = "<hex>"
//! content = "<hex>"
//! ```
//!
//! **Modules.** A module runs in a sandbox and can at worst compute nonsense,
//! so what is asked is who may decide which one runs. Shipped modules, files and
//! `sha256:` references are the recipe's own choice. A remote one runs if its
//! digest, its repository or a key that signed it is listed; or, unless
//! `remote = "listed"`, if the recipe itself pins its manifest by digest. A lock
//! file pins nothing here: it comes along with the recipe and is written by
//! whoever resolved a tag.
//!
//! **Entries.** A key says what was asked for, not that the bytes which a
//! registry gives are its result. So an entry from elsewhere is taken if this
//! content is listed for this key, or a listed key signed a statement about it,
//! or the caller says that the registry is to be believed.
//!
//! The file must not be writable by others. A missing file trusts nobody.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::reference::{Reference, SCHEME};
use crate::attest::{EntryStatement, Envelope, PAYLOAD_TYPE, PublicKey, Statement, verify};
use crate::digest::{ActionKey, BlobDigest, ContentDigest, ModuleDigest};
use crate::error::{Code, Error, Location, Result};
use crate::store::RemoteModule;
use crate::store::document::EntryDocument;

/// The format that is read.
const FORMAT: u32 = 1;
/// The largest file.
const LIMIT_BYTES: u64 = 4 << 20;
/// The type of a signed statement about a module.
pub const MODULE_PREDICATE: &str = "urn:weightmill:attestation:module:v1";

/// What a module's signature says besides its digest: for people.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, Deserialize)]
pub struct ModulePredicate {
    /// The module's own name.
    pub name: String,
    /// The module's own version.
    pub version: String,
}

/// Whom this user trusts.
#[derive(Clone, Debug, Default)]
pub struct Trust {
    file: PathBuf,
    listed_only: bool,
    modules: BTreeSet<ModuleDigest>,
    repositories: Vec<String>,
    keys: Vec<TrustedKey>,
    entries: BTreeMap<ActionKey, BTreeSet<ContentDigest>>,
}

/// A key that is trusted for something.
#[derive(Clone, Debug)]
struct TrustedKey {
    name: String,
    key: PublicKey,
    modules: bool,
    entries: bool,
}

/// Why something is trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Grounds {
    /// The recipe gives the digest.
    Pinned,
    /// Its digest is listed.
    Listed,
    /// Its repository is listed.
    Repository(String),
    /// A listed key signed it.
    Key(String),
    /// A reference that a listed key signed gives its content.
    Reference(String),
    /// The caller said so.
    Caller,
}

impl Grounds {
    /// Whether they are about an entry's whole document, and not about its
    /// tensors alone.
    pub(super) fn cover_document(&self) -> bool {
        matches!(self, Grounds::Key(_))
    }
}

impl std::fmt::Display for Grounds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Grounds::Pinned => f.write_str("pinned by digest"),
            Grounds::Listed => f.write_str("listed by digest"),
            Grounds::Repository(name) => write!(f, "from {name}"),
            Grounds::Key(name) => write!(f, "signed by {name}"),
            Grounds::Reference(name) => write!(f, "in a reference signed by {name}"),
            Grounds::Caller => f.write_str("the caller says so"),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    trust: u32,
    #[serde(default)]
    remote: Remote,
    #[serde(default)]
    module: Vec<ModuleRow>,
    #[serde(default)]
    repository: Vec<RepositoryRow>,
    #[serde(default)]
    key: Vec<KeyRow>,
    #[serde(default)]
    entry: Vec<EntryRow>,
}

#[derive(Deserialize, Default, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Remote {
    #[default]
    Pinned,
    Listed,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModuleRow {
    digest: String,
    #[serde(default, rename = "note")]
    _note: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RepositoryRow {
    name: String,
    #[serde(default, rename = "note")]
    _note: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyRow {
    name: String,
    file: Option<PathBuf>,
    pem: Option<String>,
    #[serde(default = "both", rename = "for")]
    uses: Vec<Use>,
}

#[derive(Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Use {
    Modules,
    Entries,
}

fn both() -> Vec<Use> {
    vec![Use::Modules, Use::Entries]
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EntryRow {
    key: ActionKey,
    content: ContentDigest,
    #[serde(default, rename = "note")]
    _note: String,
}

impl Trust {
    /// Where the user's file is, there or not.
    ///
    /// # Errors
    /// `io_error` if no variable says where the user's configuration is.
    pub fn default_file() -> Result<PathBuf> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        // For tests, which must not read the user's own.
        if let Some(file) = variable("WEIGHTMILL_TRUST") {
            return Ok(file);
        }
        // A relative folder would be one of whoever chose the current folder.
        let absolute = |name| variable(name).filter(|folder| folder.is_absolute());
        let config = absolute("XDG_CONFIG_HOME").or_else(|| absolute("HOME").map(|home| home.join(".config")));
        config.map(|config| config.join("weightmill/trust.toml")).ok_or_else(|| {
            Error::new(Code::IoError, "no place for trust.toml: neither XDG_CONFIG_HOME nor HOME is an absolute path")
        })
    }

    /// The user's trust.
    ///
    /// # Errors
    /// `bad_params` if the file is malformed or writable by others; `io_error`.
    pub fn load() -> Result<Self> {
        Trust::read(&Trust::default_file()?)
    }

    /// The trust in a file; nobody's if there is none.
    ///
    /// # Errors
    /// Like [`Trust::load`].
    pub fn read(file: &Path) -> Result<Self> {
        match own_text(file)? {
            Some(text) => Trust::parse(&text, file),
            None => Ok(Trust { file: file.to_path_buf(), ..Trust::default() }),
        }
    }

    fn parse(text: &str, file: &Path) -> Result<Self> {
        let at = |offset: usize| locate(text, offset, file);
        let document: Document = toml::from_str(text).map_err(|e| {
            let message = e.message().trim().replace('\n', ", ");
            Error::new(Code::BadParams, format!("this is no trust.toml: {message}"))
                .at(at(e.span().map_or(0, |span| span.start)))
        })?;
        let refuse = |what: String| Error::new(Code::BadParams, what).at(at(0));
        if document.trust != FORMAT {
            return Err(refuse(format!("this is trust format {}; this program reads format {FORMAT}", document.trust)));
        }
        let mut trust =
            Trust { file: file.to_path_buf(), listed_only: document.remote == Remote::Listed, ..Trust::default() };
        for row in document.module {
            let digest = row.digest.strip_prefix("sha256:").and_then(|hex| hex.parse().ok());
            trust.modules.insert(digest.ok_or_else(|| {
                refuse(format!("the module digest '{}' is not sha256: and 64 hexadecimal digits", row.digest))
            })?);
        }
        for row in document.repository {
            let base = row.name.strip_suffix("/*").unwrap_or(&row.name);
            // A whole registry is "oci://host/*": then there is no path.
            let whole = format!("{base}/x");
            let checked = Reference::parse(if base == row.name { base } else { &whole });
            match checked {
                Ok(Reference { tag: None, digest: None, .. }) => trust.repositories.push(row.name),
                _ => {
                    return Err(refuse(format!("'{}' is no repository", row.name))
                        .hint("write oci://registry/repository, or oci://registry/folder/* for all below"));
                }
            }
        }
        for row in document.key {
            let key = match (&row.pem, &row.file) {
                (Some(pem), None) => PublicKey::from_pem(pem),
                (None, Some(path)) => {
                    let path = file.parent().unwrap_or(Path::new(".")).join(path);
                    own_text(&path).and_then(|text| match text {
                        Some(text) => PublicKey::from_pem(&text),
                        None => Err(Error::io(path.display(), "there is no such file")),
                    })
                }
                _ => Err(refuse("it needs either 'file' or 'pem'".into())),
            };
            trust.keys.push(TrustedKey {
                key: key.map_err(|e| e.context(format!("the key '{}' in {}", row.name, file.display())))?,
                name: row.name,
                modules: row.uses.contains(&Use::Modules),
                entries: row.uses.contains(&Use::Entries),
            });
        }
        for row in document.entry {
            trust.entries.entry(row.key).or_default().insert(row.content);
        }
        Ok(trust)
    }

    /// Whether some key is trusted for modules: whether it is worth asking
    /// for signatures.
    pub fn has_module_keys(&self) -> bool {
        self.keys.iter().any(|key| key.modules)
    }

    /// Whether a module that was pulled may run. `reference` is what the recipe
    /// says.
    ///
    /// # Errors
    /// `module_not_trusted`, saying what to add.
    pub fn judge_module(&self, reference: &Reference, remote: &RemoteModule) -> Result<Grounds> {
        if self.modules.contains(&remote.module) {
            return Ok(Grounds::Listed);
        }
        if let Some(name) = self.repositories.iter().find(|pattern| covers(pattern, &remote.repository)) {
            return Ok(Grounds::Repository(name.clone()));
        }
        if let Some(name) = self.signer_of_module(remote) {
            return Ok(Grounds::Key(name));
        }
        if reference.digest == Some(remote.manifest) && !self.listed_only {
            return Ok(Grounds::Pinned);
        }
        let why = match (&reference.digest, remote.signatures.len()) {
            (Some(_), _) => {
                "trust.toml says remote = \"listed\", and lists neither it nor its repository nor a key that signed it"
                    .to_owned()
            }
            (None, 0) => "nothing vouches for what its tag points to".to_owned(),
            (None, n) => format!("it has {n} signature(s), and none is of a key in trust.toml"),
        };
        let pin = reference.pinned(remote.manifest);
        let pin = if self.listed_only { String::new() } else { format!("write \"{pin}\" in the recipe, or ") };
        Err(Error::new(
            Code::ModuleNotTrusted,
            format!("the module {reference} (sha256:{}) may not run: {why}", remote.module),
        )
        .hint(format!("{pin}add to {}:", self.file.display()))
        .hint_lines(self.heading())
        .hint_lines(["[[module]]".to_owned(), format!("digest = \"sha256:{}\"", remote.module)]))
    }

    /// Whether a module that a recipe names by digest may run. It may, unless
    /// only what is listed may.
    ///
    /// # Errors
    /// `module_not_trusted`, saying what to add.
    pub fn judge_stored(&self, digest: &ModuleDigest) -> Result<Grounds> {
        if self.modules.contains(digest) {
            return Ok(Grounds::Listed);
        }
        if !self.listed_only {
            return Ok(Grounds::Pinned);
        }
        Err(Error::new(
            Code::ModuleNotTrusted,
            format!(
                "the module sha256:{digest} may not run: trust.toml says remote = \"listed\", and does not list it"
            ),
        )
        .hint(format!("add to {}:", self.file.display()))
        .hint_lines(["[[module]]".to_owned(), format!("digest = \"sha256:{digest}\"")]))
    }

    fn signer_of_module(&self, remote: &RemoteModule) -> Option<String> {
        let keys: Vec<PublicKey> = self.keys.iter().filter(|k| k.modules).map(|k| k.key.clone()).collect();
        remote.signatures.iter().find_map(|text| {
            let envelope = Envelope::parse(text.as_bytes()).ok()?;
            let verified = verify(&envelope, &keys).ok().filter(|v| v.payload_type == PAYLOAD_TYPE)?;
            let statement: Statement<ModulePredicate> = Statement::parse(verified.payload, MODULE_PREDICATE).ok()?;
            let digest = remote.module.to_string();
            let about = statement.subject.iter().any(|s| s.sha256_digest() == Some(&digest));
            let signer = verified.signers.first()?;
            about.then(|| self.name_of(signer))
        })
    }

    fn name_of(&self, id: &crate::digest::KeyId) -> String {
        self.keys.iter().find(|k| k.key.id() == *id).map_or_else(|| id.to_string(), |k| k.name.clone())
    }

    /// Whether an entry from elsewhere may be used. `attestations` are the
    /// envelopes that came with it; `from` says from where.
    ///
    /// # Errors
    /// `entry_not_trusted`, saying what to add.
    pub fn judge_entry(
        &self,
        document: &EntryDocument,
        document_digest: &BlobDigest,
        attestations: &[Vec<u8>],
        from: &str,
    ) -> Result<Grounds> {
        let (key, content) = (document.key, document.content_digest);
        if self.entries.get(&key).is_some_and(|contents| contents.contains(&content)) {
            return Ok(Grounds::Listed);
        }
        let mut flaw = None;
        let keys: Vec<PublicKey> = self.keys.iter().filter(|k| k.entries).map(|k| k.key.clone()).collect();
        for bytes in attestations {
            let Ok(envelope) = Envelope::parse(bytes) else { continue };
            let Some(verified) = verify(&envelope, &keys).ok().filter(|v| v.payload_type == PAYLOAD_TYPE) else {
                continue;
            };
            let checked = EntryStatement::read(verified.payload).and_then(|s| s.check(document, document_digest));
            match (checked, verified.signers.first()) {
                (Ok(()), Some(signer)) => return Ok(Grounds::Key(self.name_of(signer))),
                (Err(e), _) => flaw = Some(e.message().to_owned()),
                _ => {}
            }
        }
        let why = match (flaw, attestations.len(), self.entries.get(&key)) {
            (_, _, Some(_)) => format!("trust.toml lists other content for its key {key}"),
            (Some(flaw), ..) => format!("a signed statement is not about it: {flaw}"),
            (None, 0, _) => "it carries no attestation".to_owned(),
            (None, n, _) => format!("it carries {n} attestation(s), and none is of a key in trust.toml"),
        };
        Err(Error::new(
            Code::EntryNotTrusted,
            format!("the entry {key} (content {content}) from {from} is not used: {why}"),
        )
        .hint(format!(
            "use --trust-registry to believe the registry this once; or add the key of whoever signs entries as [[key]] to {0}; or, if it is what you want, add to {0}:",
            self.file.display(),
        ))
        .hint_lines(self.heading())
        .hint_lines(["[[entry]]".to_owned(), format!("key = \"{key}\""), format!("content = \"{content}\"")]))
    }

    /// Whether a signed document is of a key that is trusted for entries: its
    /// payload of the given type.
    pub fn entry_payload<'a>(&self, envelope: &'a Envelope, payload_type: &str) -> Option<(&'a [u8], String)> {
        let keys: Vec<PublicKey> = self.keys.iter().filter(|k| k.entries).map(|k| k.key.clone()).collect();
        let verified = verify(envelope, &keys).ok().filter(|v| v.payload_type == payload_type)?;
        let signer = self.name_of(verified.signers.first()?);
        Some((verified.payload, signer))
    }

    /// The file's first line, where there is none to add to yet.
    fn heading(&self) -> Option<&'static str> {
        (!self.file.exists()).then_some("trust = 1")
    }

    /// The file that it is read from.
    pub fn file(&self) -> &Path {
        &self.file
    }
}

/// The text of a file that only this user (or root) can change; `None` if
/// there is none.
fn own_text(path: &Path) -> Result<Option<String>> {
    let failed = |e| Error::io(format_args!("{} cannot be read", path.display()), e);
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let mut file = match std::fs::File::options().read(true).custom_flags(nonblocking).open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(failed(e)),
    };
    // Of what was opened, whatever the name means by now.
    let metadata = file.metadata().map_err(failed)?;
    let refuse = |what: String| Error::new(Code::BadParams, format!("{} {what}", path.display()));
    let user = rustix::process::geteuid().as_raw();
    if metadata.mode() & 0o022 != 0 || ![0, user].contains(&metadata.uid()) {
        return Err(refuse("can be changed by others, so it says nothing about whom this user trusts".into())
            .hint(format!("chown it to yourself and run `chmod go-w {}`", path.display())));
    }
    if !metadata.is_file() || metadata.len() > LIMIT_BYTES {
        return Err(refuse(format!("is no regular file of at most {LIMIT_BYTES} bytes")));
    }
    let mut text = String::new();
    file.by_ref().take(LIMIT_BYTES).read_to_string(&mut text).map_err(failed)?;
    Ok(Some(text))
}

/// Whether a pattern of trust.toml covers a repository.
fn covers(pattern: &str, repository: &str) -> bool {
    match pattern.strip_suffix("/*") {
        None => pattern == repository,
        Some(folder) => {
            folder.len() > SCHEME.len() && repository.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
        }
    }
}

fn locate(text: &str, offset: usize, file: &Path) -> Location {
    let before = text.get(..offset.min(text.len())).unwrap_or("");
    let line = before.bytes().filter(|b| *b == b'\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
    let bounded = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    Location { file: file.to_path_buf(), line: bounded(line), column: bounded(column) }
}

#[cfg(test)]
mod tests;
