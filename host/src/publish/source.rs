//! Finding an entry without the checkpoint.
//!
//! A key is known from the digests of the source's tensors, which a node
//! without the checkpoint does not have. What it does have is the recipe with
//! its modules, the name of the source (a repository and a commit, as model
//! hubs have them) and its tensor parallel rank. So whoever pushes an entry may
//! also publish a *reference*: for this recipe over that source, at this rank,
//! the key is K and the content C. Its tag is a hash of what the node knows.
//!
//! A reference is a claim: with it a registry could send a node to another
//! model. So it must be signed by a key that is trusted for entries, unless the
//! caller knows the content digest or believes the registry. A reference that
//! is trusted pins the content; the entry then needs nothing more.

use serde::{Deserialize, Serialize};
use weightmill_guest::abi::Tp;

use super::client::{At, Registry};
use super::manifest::{Descriptor, EMPTY, EMPTY_BYTES, MANIFEST, Manifest};
use super::module::ENVELOPE;
use super::trust::Trust;
use crate::attest::{Envelope, SigningKey, sign};
use crate::canonical::to_canonical;
use crate::checkpoint::Checkpoint;
use crate::digest::{ActionKey, BlobDigest, ContentDigest, ModuleDigest, RecordDigest};
use crate::error::{Code, Error, Result};
use crate::plan::action::VERSIONS;
use crate::progress::Progress;
use crate::recipe::Recipe;

/// The schema's name.
const SCHEMA: &str = "weightmill reference v1";
/// What a reference is as an artefact, as a document, and as a signed payload.
const REFERENCE: &str = "application/vnd.weightmill.reference.v1";
const DOCUMENT: &str = "application/vnd.weightmill.reference.v1+json";
const SIGNATURE: &str = "application/vnd.weightmill.reference.signature.v1";
const LIMIT_BYTES: u64 = 16 << 20;

/// A checkpoint as a hub names it: a repository and a commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceName {
    /// `organisation/model`, or any name that its users agree on.
    pub name: String,
    /// The commit, or any name of a state that does not move.
    pub commit: String,
}

/// A file of a source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceFile {
    /// Its name.
    pub name: String,
    /// SHA-256 of its bytes: what hubs show of large files.
    pub sha256: BlobDigest,
    /// Its bytes.
    pub size: u64,
}

/// What is claimed: see the module's text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryReference {
    /// Always the same.
    schema: String,
    /// The recipe with its modules.
    pub recipe: RecordDigest,
    /// The source.
    pub source: SourceName,
    /// Its files, ascending by name.
    pub files: Vec<SourceFile>,
    /// Tensor parallel size and rank.
    pub tp: Tp,
    /// The entry's key.
    pub key: ActionKey,
    /// The entry's content.
    pub content_digest: ContentDigest,
}

/// What a node knows without the checkpoint.
#[derive(Clone, Debug)]
pub struct Sought {
    /// The recipe with its modules.
    pub recipe: RecordDigest,
    /// The source.
    pub source: SourceName,
    /// Tensor parallel size and rank.
    pub tp: Tp,
}

impl SourceName {
    /// Reads `NAME@COMMIT`.
    ///
    /// # Errors
    /// `bad_params`.
    pub fn parse(text: &str) -> Result<Self> {
        let fits = |part: &str, limit: usize| {
            (1..=limit).contains(&part.len())
                && part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-' | b'/' | b':'))
        };
        match text.rsplit_once('@') {
            Some((name, commit)) if fits(name, 256) && fits(commit, 128) => {
                Ok(SourceName { name: name.to_owned(), commit: commit.to_owned() })
            }
            _ => Err(Error::new(Code::BadParams, format!("'{}' is no source", text.escape_debug()))
                .hint("write NAME@COMMIT, such as EleutherAI/pythia-160m@582159a2dfe3e712a8b47ac83dc95f9c5e45ee15")),
        }
    }

    /// The name that a folder of a hub's cache carries in its path:
    /// `models--ORG--NAME/snapshots/COMMIT`.
    pub fn of_cache(path: &std::path::Path) -> Option<Self> {
        let real = path.canonicalize().ok()?;
        let parts: Vec<&str> = real.components().filter_map(|c| c.as_os_str().to_str()).collect();
        let at = parts.windows(3).position(|w| w[0].starts_with("models--") && w[1] == "snapshots")?;
        let name = parts[at].strip_prefix("models--")?.replace("--", "/");
        SourceName::parse(&format!("{name}@{}", parts[at + 2])).ok()
    }
}

impl std::fmt::Display for SourceName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}@{}", self.name, self.commit)
    }
}

/// A recipe with its modules: what determines an entry besides the source and
/// the rank. `modules` has one digest for each step.
///
/// # Errors
/// None, in fact: digests always have a canonical form.
pub fn recipe_identity(recipe: &Recipe, modules: &[ModuleDigest]) -> Result<RecordDigest> {
    #[derive(Serialize)]
    struct Identity<'a> {
        schema: &'static str,
        versions: serde_json::Value,
        recipe: BlobDigest,
        modules: &'a [ModuleDigest],
    }
    let identity = Identity {
        schema: "weightmill recipe v1",
        versions: serde_json::json!(VERSIONS),
        recipe: recipe.text_digest(),
        modules,
    };
    Ok(RecordDigest::of(&to_canonical(&identity)?))
}

/// The names, digests and sizes of a checkpoint's files.
///
/// # Errors
/// `io_error`, `source_changed`, `interrupted`.
pub fn source_files(
    checkpoint: &Checkpoint,
    pool: &rayon::ThreadPool,
    progress: &dyn Progress,
) -> Result<Vec<SourceFile>> {
    use rayon::prelude::*;
    use sha2::{Digest as _, Sha256};
    let files = checkpoint.files();
    progress.stage("hashing", files.iter().map(|file| file.identity().size_bytes).sum());
    let hash = |file: &crate::checkpoint::SourceFile| {
        let size = file.identity().size_bytes;
        let (mut hash, mut at) = (Sha256::new(), 0);
        let mut buffer = vec![0; 1 << 20];
        while at < size {
            if progress.cancelled() {
                return Err(super::client::interrupted());
            }
            let want = usize::try_from(size - at).unwrap_or(usize::MAX).min(buffer.len());
            file.read_exact_at(&mut buffer[..want], at)?;
            hash.update(&buffer[..want]);
            at += want as u64;
            progress.advance(want as u64);
        }
        file.check_unchanged()?;
        let name = file.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(SourceFile { name, sha256: BlobDigest::from_bytes(hash.finalize().into()), size })
    };
    let mut hashed: Vec<SourceFile> = pool.install(|| files.par_iter().map(hash).collect::<Result<_>>())?;
    hashed.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(hashed)
}

impl Sought {
    /// The tag that a reference for it has.
    ///
    /// # Errors
    /// `bad_params` if the rank is beyond what JSON can say.
    pub fn tag(&self) -> Result<String> {
        let document = serde_json::json!({
            "schema": "weightmill reference tag v1",
            "recipe": self.recipe,
            "source": self.source,
            "tp": self.tp,
        });
        Ok(format!("ref-{}", RecordDigest::of(&to_canonical(&document)?)))
    }
}

impl EntryReference {
    /// The claim that what is sought is this entry.
    pub fn new(sought: &Sought, files: Vec<SourceFile>, key: ActionKey, content_digest: ContentDigest) -> Self {
        EntryReference {
            schema: SCHEMA.to_owned(),
            recipe: sought.recipe,
            source: sought.source.clone(),
            files,
            tp: sought.tp,
            key,
            content_digest,
        }
    }

    fn answers(&self, sought: &Sought) -> bool {
        self.schema == SCHEMA && self.recipe == sought.recipe && self.source == sought.source && self.tp == sought.tp
    }
}

/// Publishes a reference, signed if there is a key: its manifest's digest.
///
/// # Errors
/// Like [`Registry::put_manifest`].
pub fn push_reference(
    registry: &Registry,
    sought: &Sought,
    reference: &EntryReference,
    key: Option<&SigningKey>,
    progress: &dyn Progress,
) -> Result<BlobDigest> {
    let document = to_canonical(reference)?;
    let (config, layer) = (Descriptor::of(EMPTY, EMPTY_BYTES), Descriptor::of(DOCUMENT, &document));
    let manifest = Manifest::new(Some(REFERENCE), config, vec![layer]);
    registry.guarded(progress, || {
        let layer = &manifest.layers[0];
        registry.push_blob(&layer.digest, layer.size, &document.as_slice(), None, progress)?;
        registry.push_blob(&manifest.config.digest, manifest.config.size, &EMPTY_BYTES, None, progress)?;
        let digest = registry.put_manifest(&At::Tag(sought.tag()?), &manifest, progress)?;
        if let Some(key) = key {
            let subject = Descriptor::of(MANIFEST, &manifest.to_bytes()?);
            let envelope = sign(DOCUMENT, &document, key).to_json()?;
            registry.attach(&subject, SIGNATURE, ENVELOPE, &envelope, progress)?;
        }
        Ok(digest)
    })
}

/// A reference that was found, and who vouches for it.
#[derive(Clone, Debug)]
pub struct FoundReference {
    /// What it says.
    pub reference: EntryReference,
    /// The name of the key that signed it, if one that is trusted did.
    pub signer: Option<String>,
}

/// Looks a reference up: `None` if there is none.
///
/// # Errors
/// `digest_mismatch` if what is there is something else; `network_error`,
/// `registry_refused`, `registry_timeout`, `interrupted`.
pub fn find_reference(
    registry: &Registry,
    sought: &Sought,
    trust: &Trust,
    progress: &dyn Progress,
) -> Result<Option<FoundReference>> {
    registry.guarded(progress, || {
        let tag = sought.tag()?;
        let from = format!("{}:{tag}", registry.repository());
        let refuse = |what: String| {
            Error::new(Code::DigestMismatch, format!("{from} is not the reference that was asked for: {what}"))
        };
        let Some(fetched) = registry.manifest(&At::Tag(tag.clone()), progress)? else { return Ok(None) };
        let manifest = Manifest::parse(&fetched.bytes, &from)?;
        let [layer] = manifest.layers.as_slice() else {
            return Err(refuse(format!("it has {} layers", manifest.layers.len())));
        };
        let document = registry.small_blob(&layer.digest, layer.size.min(LIMIT_BYTES), progress)?;
        let reference: EntryReference =
            serde_json::from_slice(&document).map_err(|e| refuse(format!("its document is malformed: {e}")))?;
        if !reference.answers(sought) {
            return Err(refuse("it is about another recipe, source or rank".into()));
        }
        let signatures = registry.attached(&fetched.digest, SIGNATURE, progress)?;
        let signer = signatures.iter().find_map(|bytes| {
            let envelope = Envelope::parse(bytes).ok()?;
            let (payload, signer) = trust.entry_payload(&envelope, DOCUMENT)?;
            (payload == document).then_some(signer)
        });
        Ok(Some(FoundReference { reference, signer }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_named_by_repository_and_commit() {
        let source = SourceName::parse("EleutherAI/pythia-160m@58215").unwrap();
        assert_eq!((source.name.as_str(), source.commit.as_str()), ("EleutherAI/pythia-160m", "58215"));
        assert_eq!(source.to_string(), "EleutherAI/pythia-160m@58215");
        for bad in ["", "a", "@b", "a@", "a b@c", "a@b c", "a@\n"] {
            assert_eq!(SourceName::parse(bad).unwrap_err().code(), Code::BadParams, "{bad:?}");
        }
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("hub/models--org--m-1/snapshots/0123abcd");
        std::fs::create_dir_all(&folder).unwrap();
        assert_eq!(SourceName::of_cache(&folder).unwrap().to_string(), "org/m-1@0123abcd");
        assert_eq!(SourceName::of_cache(dir.path()), None);
    }

    #[test]
    fn tags_tell_everything_apart() {
        let sought = |recipe: &[u8], source: &str, rank| {
            let source = SourceName::parse(source).unwrap();
            Sought { recipe: RecordDigest::of(recipe), source, tp: Tp { rank, size: 2 } }.tag().unwrap()
        };
        let tags = [
            sought(b"r", "a@1", 0),
            sought(b"s", "a@1", 0),
            sought(b"r", "b@1", 0),
            sought(b"r", "a@2", 0),
            sought(b"r", "a@1", 1),
        ];
        let distinct: std::collections::BTreeSet<&String> = tags.iter().collect();
        assert_eq!(distinct.len(), tags.len());
        assert!(tags.iter().all(|tag| tag.len() == 68));
    }
}
