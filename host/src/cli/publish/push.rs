//! `weightmill push`.

use std::path::PathBuf;
use std::process::ExitCode;

use super::{push_document, repository, sign};
use crate::attest::{Envelope, SigningKey, read_file};
use crate::cli::args::{Global, RecipeArgs, RegistryArgs, RemoteArgs, TpArgs};
use crate::cli::output::{self, Style};
use crate::cli::progress::Bar;
use crate::cli::session::{self, Session};
use crate::error::{Code, Error, Result};
use crate::progress::Progress;
use crate::publish::client::Registry;
use crate::publish::entry::{PushedEntry, attach_attestation, push_entry};
use crate::publish::reference::Repository;
use crate::publish::source::{EntryReference, Sought, SourceName, push_reference, source_files};
use crate::store::{Lease, Store, Verify};

const EXAMPLES: &str = "Examples:
  weightmill push 9f3c1d2a oci://registry.example.com/weights/pythia
  weightmill push 9f3c1d2a oci://registry.example.com/weights/pythia --sign release.pem
  weightmill push 9f3c1d2a oci://registry.example.com/weights/pythia --sign release.pem \\
      --recipe recipes/gpt-neox.toml --checkpoint pythia-160m --source EleutherAI/pythia-160m@582159a2

The tag is the key. Blobs that the registry has are not sent again. With --recipe and --checkpoint,
nodes without the checkpoint find the entry by recipe and source name (see `weightmill pull`).";

/// Push an entry to an OCI registry.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Args {
    /// The entry: its key, or the beginning of it
    key: String,
    /// The repository: oci://registry/repository
    #[arg(value_parser = repository)]
    to: Repository,
    /// Attach a statement about the entry, signed with this ed25519 key (PKCS#8 PEM)
    #[arg(long, value_name = "FILE")]
    sign: Option<PathBuf>,
    /// Attach a signed statement that `weightmill attest` or another tool wrote; may be repeated
    #[arg(long, value_name = "FILE")]
    attestation: Vec<PathBuf>,
    /// Take blobs from this other repository of the registry, where it has them
    #[arg(long, value_name = "REPOSITORY")]
    mount_from: Option<String>,
    /// Also publish where nodes without the checkpoint find the entry: the recipe …
    #[arg(long, value_name = "FILE", requires = "checkpoint")]
    recipe: Option<PathBuf>,
    /// … the checkpoint …
    #[arg(long, value_name = "PATH", requires = "recipe")]
    checkpoint: Option<PathBuf>,
    /// … and its name, NAME@COMMIT [default: what a hub's cache folder says]
    #[arg(long, value_name = "NAME@COMMIT", requires = "recipe", value_parser = SourceName::parse)]
    source: Option<SourceName>,
    #[command(flatten)]
    tp: TpArgs,
    #[command(flatten)]
    remote: RemoteArgs,
}

/// What goes along with an entry.
pub(in crate::cli) struct Along<'a> {
    /// Where to look the entry up.
    pub(in crate::cli) reference: Option<(Sought, &'a Session)>,
    /// Signs the entry and the reference.
    pub(in crate::cli) key: Option<&'a SigningKey>,
    /// Envelopes to attach.
    pub(in crate::cli) attestations: Vec<Vec<u8>>,
    /// Where blobs may be mounted from.
    pub(in crate::cli) mount_from: Option<&'a str>,
}

pub(in crate::cli) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    // What cannot be used is found before anything is sent.
    let key = sign::key(args.sign.as_deref())?;
    let attestations = args.attestation.iter().map(|path| {
        let bytes = read_file(path)?;
        Envelope::parse(&bytes).map_err(|e| e.context(path.display()))?;
        Ok(bytes)
    });
    let attestations = attestations.collect::<Result<Vec<_>>>()?;
    let store = session::wanted_store(global)?;
    let entry = session::find_key(&store, &args.key)?;
    let recipe_args = args.recipe.as_ref().zip(args.checkpoint.as_ref()).map(|(recipe, checkpoint)| RecipeArgs {
        recipe: recipe.clone(),
        checkpoint: checkpoint.clone(),
        tp: args.tp,
        remote: args.remote.clone(),
    });
    let session = recipe_args.as_ref().map(|args| Session::open(args, Some(&store), None)).transpose()?;
    let bar = Bar::new();
    let lease = store.lease(&entry, Verify::First, &session::pool(None)?, &bar)?;
    let lease = lease.ok_or_else(|| crate::cli::store::missing(&entry))?;
    let reference = match &session {
        Some(session) => {
            session.check_makes(&store, &entry, &bar)?;
            let source = source_of(session, args.source.as_ref())?;
            Some((session.sought(source)?, session))
        }
        None => None,
    };
    let along = Along { reference, key: key.as_ref(), attestations, mount_from: args.mount_from.as_deref() };
    let (pushed, document) = push(&args.to, &args.remote.registry, &store, &lease, &along, &bar)?;
    bar.clear();
    if global.json {
        output::json(&document);
    } else {
        print(&args.to, &lease, &pushed, &document);
    }
    Ok(ExitCode::SUCCESS)
}

/// The source's name: as given, or as a hub's cache has it.
pub(in crate::cli) fn source_of(session: &Session, given: Option<&SourceName>) -> Result<SourceName> {
    given.cloned().or_else(|| SourceName::of_cache(session.checkpoint().path())).ok_or_else(|| {
        Error::new(
            Code::BadParams,
            format!("{} does not say which repository and commit it is", session.checkpoint().path().display()),
        )
        .hint("name them with --source NAME@COMMIT")
    })
}

/// Pushes a leased entry and what goes along with it.
pub(in crate::cli) fn push(
    to: &Repository,
    registry: &RegistryArgs,
    store: &Store,
    lease: &Lease,
    along: &Along<'_>,
    progress: &dyn Progress,
) -> Result<(PushedEntry, serde_json::Value)> {
    let registry = Registry::open(to, &registry.options())?;
    let key = *lease.key();
    let action = store.action(&key)?.ok_or_else(|| {
        Error::new(Code::CorruptBlob, format!("the action of the entry {key} is gone"))
            .hint("run `weightmill store doctor --fix`, then build the entry again")
    })?;
    let pushed = push_entry(&registry, lease, &action, along.mount_from, progress)?;
    let mut document = push_document(to, &pushed);
    document["key"] = serde_json::json!(key);
    document["content_digest"] = serde_json::json!(lease.document().content_digest);
    let mut envelopes = along.attestations.clone();
    if let Some(key) = along.key {
        envelopes.push(sign::attestation(store, lease, key)?);
    }
    let attached = envelopes.iter().map(|envelope| {
        attach_attestation(&registry, &pushed.manifest, envelope, progress).map(|digest| format!("sha256:{digest}"))
    });
    document["attestations"] = serde_json::json!(attached.collect::<Result<Vec<_>>>()?);
    if let Some((sought, session)) = &along.reference {
        let files = source_files(session.checkpoint(), &session::pool(None)?, progress)?;
        let reference = EntryReference::new(sought, files, key, lease.document().content_digest);
        let digest = push_reference(&registry, sought, &reference, along.key, progress)?;
        document["reference"] = serde_json::json!({
            "manifest": format!("sha256:{digest}"), "tag": sought.tag()?, "source": sought.source.to_string(),
        });
    }
    Ok((pushed, document))
}

/// The lines that people read.
pub(in crate::cli) fn print(to: &Repository, lease: &Lease, pushed: &PushedEntry, document: &serde_json::Value) {
    let style = Style::stdout();
    let sent = &pushed.sent;
    if !pushed.present {
        output::line(format!(
            "sent {} in {} · spared {}",
            output::bytes(sent.bytes),
            output::count(sent.blobs, "blob"),
            output::bytes(sent.bytes_spared),
        ));
    }
    output::line(format!(
        "{}  {to}:{}\ncontent {}  manifest sha256:{}",
        style.bold(if pushed.present { "present" } else { "pushed " }),
        lease.key(),
        lease.document().content_digest,
        pushed.manifest.digest
    ));
    if let Some(source) = document["reference"]["source"].as_str() {
        output::line(format!("found by its recipe and {source}"));
    }
}
