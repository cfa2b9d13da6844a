//! `weightmill attest`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::args::Global;
use super::output;
use super::progress::Bar;
use super::session;
use crate::attest::{self, EntryStatement, ModuleRow, PAYLOAD_TYPE, SigningKey};
use crate::digest::ActionKey;
use crate::error::{Error, Result};
use crate::lineage;
use crate::modules::Library;
use crate::store::{Lease, Store, Verify};

const EXAMPLES: &str = "Examples:
  weightmill attest --entry 9f3c1d2a --out statement.json
  openssl genpkey -algorithm ed25519 -out key.pem
  openssl pkey -in key.pem -pubout -out key.pub
  weightmill attest --entry 9f3c1d2a --key key.pem --out entry.dsse.json
  weightmill verify --attestation entry.dsse.json --trusted-key key.pub

Without --key: an in-toto statement (v1), which other tools can sign. With --key: a DSSE envelope
around it. The entry's bytes are verified first, unless that was done since the machine started.";

/// A statement about an entry: its key, content digest, shards, modules, and who built it.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// The entry: its key, or the beginning of it
    #[arg(long, value_name = "KEY")]
    entry: String,
    /// Sign with this ed25519 key (PKCS#8 PEM), as a DSSE envelope
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Write into this file instead of standard output
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    // A key that cannot be used is found before anything is read.
    let key = args.key.as_deref().map(SigningKey::load).transpose()?;
    let store = session::wanted_store(global)?;
    let entry = session::find_key(&store, &args.entry)?;
    let bar = Bar::new();
    let lease = store.lease(&entry, Verify::First, &session::pool(None)?, &bar)?;
    let lease = lease.ok_or_else(|| super::store::missing(&entry))?;
    bar.clear();
    let payload = statement(&store, &lease)?.to_bytes()?;
    let document = match &key {
        Some(key) => attest::sign(PAYLOAD_TYPE, &payload, key).to_json()?,
        None => [payload.as_slice(), b"\n"].concat(),
    };
    let Some(out) = &args.out else {
        output::raw(&document);
        return Ok(ExitCode::SUCCESS);
    };
    write(out, &document)?;
    let signer = key.map(|key| key.public().id());
    if global.json {
        output::json(&serde_json::json!({
            "key": entry,
            "content_digest": lease.document().content_digest,
            "document_digest": lease.document_digest(),
            "signed_by": signer,
            "out": out.to_string_lossy(),
        }));
    } else {
        let signed = signer.map_or_else(|| "not signed".to_string(), |id| format!("signed by {id}"));
        output::line(format!("{}: entry {}, {signed}", out.display(), entry.short()));
    }
    Ok(ExitCode::SUCCESS)
}

/// What this host says about an entry that it holds.
///
/// # Errors
/// `io_error`, `digest_mismatch`: what reading the action and the provenance
/// says.
pub(super) fn statement(store: &Store, lease: &Lease) -> Result<EntryStatement> {
    let (modules, builds) = (modules(store, lease.key())?, builds(store, lease.key())?);
    Ok(EntryStatement::of_entry(lease.document(), lease.document_digest(), modules, builds))
}

/// The modules that made an entry, as far as they are known.
fn modules(store: &Store, key: &ActionKey) -> Result<Vec<ModuleRow>> {
    let Some(action) = store.action(key)? else { return Ok(Vec::new()) };
    let library = Library::new(Some(store.clone()));
    let recorded = lineage::read_all(store, key)?;
    let mut rows = Vec::new();
    for digest in lineage::modules_of(&action)? {
        let named = match library.by_digest(&digest)? {
            Some(module) => Some((module.metadata().name.clone(), module.metadata().version.clone())),
            None => recorded.iter().find_map(|l| l.modules.get(&digest)).map(|m| (m.name.clone(), m.version.clone())),
        };
        let (name, version) = named.unzip();
        rows.push(ModuleRow { digest, name, version });
    }
    Ok(rows)
}

/// Who built an entry. Where its names are recorded is no use elsewhere.
fn builds(store: &Store, key: &ActionKey) -> Result<Vec<serde_json::Value>> {
    let mut builds = store.provenance(key)?;
    for build in &mut builds {
        if let Some(fields) = build.as_object_mut() {
            fields.remove("lineage");
        }
    }
    Ok(builds)
}

/// Writes a whole file beside, then renames it into place.
fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let failed = |e: std::io::Error| Error::io(format!("writing {}", path.display()), e);
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}.partial", std::process::id()));
    let temporary = path.with_file_name(name);
    std::fs::write(&temporary, bytes).and_then(|()| std::fs::rename(&temporary, path)).map_err(|e| {
        let _ = std::fs::remove_file(&temporary);
        failed(e)
    })
}
