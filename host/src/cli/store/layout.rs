//! `weightmill store export` and `store import`: entries as an OCI image layout.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::cli::args::{DemandArgs, Global};
use crate::cli::progress::Bar;
use crate::cli::{output, session};
use crate::digest::ActionKey;
use crate::error::{Code, Error, Result};
use crate::publish::layout::LayoutFolder;
use crate::store::Verify;

const EXPORT_EXAMPLES: &str = "Examples:
  weightmill store export --oci out/ 9f3c1d2a
  skopeo copy oci:out:KEY docker://registry.example.com/weights/pythia:KEY

The folder is an OCI image layout; the tag of an entry is its key. Blobs are hard links where that
is possible.";

const IMPORT_EXAMPLES: &str = "Examples:
  weightmill store import --oci in/ --attestation 9f3c1d2a.dsse.json
  weightmill store import --oci in/ KEY --content DIGEST

An entry is used if trust.toml lists its content or a key that signed an --attestation, or --content
or --trust-registry (here: the folder) says so.";

/// Write entries into a folder for hosts that reach no registry.
#[derive(clap::Args)]
#[command(after_help = EXPORT_EXAMPLES)]
pub(in crate::cli) struct ExportArgs {
    /// The folder: an OCI image layout, created if it is missing
    #[arg(long, value_name = "DIR")]
    oci: PathBuf,
    /// The entries: keys, or the beginnings of keys
    #[arg(required_unless_present = "all")]
    keys: Vec<String>,
    /// Every entry
    #[arg(long, conflicts_with = "keys")]
    all: bool,
}

/// Read entries from such a folder.
#[derive(clap::Args)]
#[command(after_help = IMPORT_EXAMPLES)]
pub(in crate::cli) struct ImportArgs {
    /// The folder: an OCI image layout
    #[arg(long, value_name = "DIR")]
    oci: PathBuf,
    /// The entries [default: all in the folder]
    keys: Vec<String>,
    #[command(flatten)]
    demand: DemandArgs,
}

pub(super) fn export(global: &Global, args: &ExportArgs) -> Result<ExitCode> {
    let store = session::wanted_store(global)?;
    let keys: Vec<ActionKey> = match args.all {
        true => store.entries()?.into_iter().map(|entry| entry.key).collect(),
        false => args.keys.iter().map(|text| session::find_key(&store, text)).collect::<Result<_>>()?,
    };
    let bar = Bar::new();
    let pool = session::pool(None)?;
    let folder = LayoutFolder::create(&args.oci)?;
    let mut exported = Vec::new();
    for key in keys {
        let lease = store.lease(&key, Verify::First, &pool, &bar)?.ok_or_else(|| super::missing(&key))?;
        let action = store.action(&key)?.ok_or_else(|| {
            Error::new(Code::CorruptBlob, format!("the action of the entry {key} is gone"))
                .hint("run `weightmill store doctor --fix`, then build the entry again")
        })?;
        exported.push(folder.add_entry(&lease, &action, &bar)?);
    }
    bar.clear();
    if global.json {
        let rows = exported.iter().map(|e| {
            serde_json::json!({ "key": e.key, "manifest": format!("sha256:{}", e.manifest), "bytes_written": e.bytes_written })
        });
        output::json(&serde_json::json!({ "folder": args.oci.to_string_lossy(), "entries": rows.collect::<Vec<_>>() }));
    } else {
        exported.iter().for_each(|e| {
            output::line(format!("{}  {}  manifest sha256:{}", e.key, output::bytes(e.bytes_written), e.manifest));
        });
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn import(global: &Global, args: &ImportArgs) -> Result<ExitCode> {
    let demand = args.demand.demand()?;
    let folder = LayoutFolder::open(&args.oci)?;
    let entries = folder.entries()?;
    let chosen = choose(entries, &args.keys, &args.oci)?;
    let store = session::store(global)?;
    let bar = Bar::new();
    let pool = session::pool(None)?;
    let mut imported = Vec::new();
    for (key, manifest) in &chosen {
        imported.push(folder.import(&store, key, manifest, &demand, &pool, &bar)?);
    }
    bar.clear();
    let outcome = |found: bool| if found { "hit" } else { "imported" };
    if global.json {
        let rows = imported.iter().map(|e| {
            serde_json::json!({
                "key": e.key, "content_digest": e.content_digest, "outcome": outcome(e.found),
                "trusted": e.grounds.to_string(),
            })
        });
        output::json(&serde_json::json!({ "entries": rows.collect::<Vec<_>>() }));
    } else {
        imported.iter().for_each(|e| {
            output::line(format!(
                "{:<8}  key {}…  content {}…  {}",
                outcome(e.found),
                e.key.short(),
                e.content_digest.short(),
                e.grounds
            ));
        });
    }
    Ok(ExitCode::SUCCESS)
}

fn choose<T>(
    entries: BTreeMap<ActionKey, T>,
    keys: &[String],
    folder: &std::path::Path,
) -> Result<Vec<(ActionKey, T)>> {
    let matches =
        |key: &ActionKey| keys.is_empty() || keys.iter().any(|text| key.to_string().starts_with(text.as_str()));
    let absent = |text: &&String| !entries.keys().any(|key| key.to_string().starts_with(text.as_str()));
    if let Some(text) = keys.iter().find(absent) {
        return Err(Error::new(
            Code::SourceUnavailable,
            format!("{} has no entry '{}'", folder.display(), text.escape_debug()),
        ));
    }
    if entries.is_empty() {
        return Err(Error::new(Code::SourceUnavailable, format!("{} has no entry", folder.display()))
            .hint("entries are tagged with their keys: what else is in the folder is passed over"));
    }
    Ok(entries.into_iter().filter(|(key, _)| matches(key)).collect())
}
