//! `weightmill verify`.
//!
//! Three questions. Are the bytes in the store what the entry's document says?
//! Every leaf of every shard is hashed for that. And is the document what the
//! recipe makes of the checkpoint? With `--rebuild` the transform runs again,
//! its result is hashed and forgotten, and the digests are compared. And are
//! these digests what another host says? Its attestation is compared with the
//! entry, or with a rebuild alone.

mod attested;
mod rebuild;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::canonical::to_canonical;
use crate::cli::args::{Global, RecipeArgs, RemoteArgs, TpArgs, WorkArgs};
use crate::cli::output::{self, Style};
use crate::cli::progress::Bar;
use crate::cli::session;
use crate::digest::{ActionKey, BlobDigest};
use crate::error::{Code, Error, Fault, Result};
use crate::progress::Progress;
use crate::sandbox::EngineName;
use crate::store::document::EntryDocument;
use crate::store::{Audit, EntryInfo, Root, Store};
use attested::{AttestationArgs, Attested};
use rebuild::{How, Rebuilt, Share, Wanted, rebuild, share};

const EXAMPLES: &str = "Examples:
  weightmill verify --entry 9f3c1d2a
  weightmill verify --all --json
  weightmill verify --entry 9f3c1d2a --rebuild --recipe recipes/llama.toml --checkpoint llama-3-8b
  weightmill verify --entry 9f3c1d2a --rebuild --recipe R --checkpoint C --engine wasmi --sample 5%
  weightmill verify --attestation entry.dsse.json --trusted-key key.pub
  weightmill verify --attestation e.json --trusted-key key.pub --rebuild --recipe R --checkpoint C

A corrupt blob is named with the tensor and the bytes that differ, and moved into quarantine; the
next build makes it again. With --attestation and --rebuild, but without --entry, no store is
needed.
Exit status: 0 if everything is as it must be, 3 if not (corrupt_blob; identity_collision if a
rebuild gives other bytes; digest_mismatch if an attestation says otherwise; entry_not_trusted if no
trusted key signed it), 1 if the recipe and checkpoint are not what the entry was made from
(source_unavailable).";

/// How many differing tensors are listed for people.
const SHOWN: usize = 10;

/// Whether the bytes of entries are what they must be.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// The entry: its key, or the beginning of it
    #[arg(long, value_name = "KEY", required_unless_present_any = ["all", "attestation"], conflicts_with = "all")]
    entry: Option<String>,
    /// Every entry and every module of the store
    #[arg(long)]
    all: bool,
    /// Also run the transform again, write nothing, and compare content and tensor digests
    #[arg(long, requires_all = ["recipe", "checkpoint"], conflicts_with = "all")]
    rebuild: bool,
    /// The recipe that the entry was made with
    #[arg(long, value_name = "FILE", requires = "rebuild")]
    recipe: Option<PathBuf>,
    /// The checkpoint that it was made from. It is hashed again, unless --sample is given: then
    /// digests of unchanged files are taken from the store
    #[arg(long, value_name = "PATH", requires = "rebuild")]
    checkpoint: Option<PathBuf>,
    #[command(flatten)]
    tp: TpArgs,
    /// The engine that runs the modules: wasmtime, wasmi or pulley [default: wasmtime; with
    /// --sample, one that did not build the entry]
    #[arg(long, value_name = "ENGINE", value_parser = super::digest::engine_name, requires = "rebuild")]
    engine: Option<EngineName>,
    /// Rebuild only so many of the blocks, chosen at random, at least one
    #[arg(long, value_name = "PERCENT", value_parser = share, requires = "rebuild")]
    sample: Option<Share>,
    #[command(flatten)]
    attestation: AttestationArgs,
    #[command(flatten)]
    work: WorkArgs,
    #[command(flatten)]
    remote: RemoteArgs,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let attested = args.attestation.load()?;
    if let (Some(attested), None, true) = (&attested, &args.entry, args.rebuild) {
        return attested_rebuild(global, args, attested);
    }
    let store = session::wanted_store(global)?;
    let pool = session::pool(args.work.jobs)?;
    let bar = Bar::new();
    let entries = store.entries()?;
    let key = match (&args.entry, &attested) {
        (Some(text), _) => Some(session::find_key(&store, text)?),
        (None, attested) => attested.as_ref().map(|attested| attested.statement.predicate.key),
    };
    if let (Some(key), Some(attested)) = (&key, &attested) {
        let document = document_of(&entries, key)?;
        attested.statement.check(document, &BlobDigest::of(&to_canonical(document)?))?;
    }
    let audit = match &key {
        Some(key) => {
            let entry = entries.iter().find(|e| e.key == *key).ok_or_else(|| super::store::missing(key))?;
            let whole = Whole::new(&bar, std::slice::from_ref(entry));
            store.verify_entries(&[*key], &pool, &whole)?
        }
        None => store.verify_all(&pool, &Whole::new(&bar, &entries))?,
    };
    let rebuilt = match (&key, &args.recipe, &args.checkpoint) {
        (Some(key), Some(recipe), Some(checkpoint)) if audit.damaged.is_empty() => {
            let recipe = RecipeArgs {
                recipe: recipe.clone(),
                checkpoint: checkpoint.clone(),
                tp: args.tp,
                remote: args.remote.clone(),
            };
            // A document that cannot be read is damage, so there is one here.
            let document = document_of(&entries, key)?;
            Some(rebuild(
                &how(args, engine_of(args, &store, key)?, &pool, &bar),
                &recipe,
                Some(&store),
                Wanted::Entry(document),
            )?)
        }
        _ => None,
    };
    bar.clear();
    let wrong = wrong(&audit, key.as_ref(), rebuilt.as_ref());
    if global.json {
        output::json(&document(Some(&audit), rebuilt.as_ref(), attested.as_ref(), wrong.as_ref()));
    } else {
        print(&audit, rebuilt.as_ref());
        if let (Some(attested), None) = (&attested, &wrong) {
            attested.print();
        }
    }
    let Some(error) = wrong else { return Ok(ExitCode::SUCCESS) };
    super::report(&error, false);
    Ok(ExitCode::from(Fault::exit_status(error.code().fault())))
}

/// The engine of a rebuild: the one that is named; for a sample, which is
/// small, one that did not build the entry; else the fastest.
fn engine_of(args: &Args, store: &Store, key: &ActionKey) -> Result<EngineName> {
    if args.engine.is_some() || args.sample.is_none() {
        return Ok(args.engine.unwrap_or(session::DEFAULT_ENGINE));
    }
    let builds = store.provenance(key)?;
    let by_wasmi = builds.iter().any(|built| built["engine"] == EngineName::Wasmi.as_str());
    Ok(if by_wasmi { EngineName::Wasmtime } else { EngineName::Wasmi })
}

fn how<'a>(args: &'a Args, engine: EngineName, pool: &'a rayon::ThreadPool, bar: &'a Bar) -> How<'a> {
    How { engine, sample: args.sample, work: &args.work, pool, bar }
}

/// Makes what an attestation is about from its sources, without an entry.
fn attested_rebuild(global: &Global, args: &Args, attested: &Attested) -> Result<ExitCode> {
    let (Some(recipe), Some(checkpoint)) = (&args.recipe, &args.checkpoint) else {
        return Err(Error::new(Code::BadParams, "a rebuild needs --recipe and --checkpoint"));
    };
    if args.sample.is_some() {
        return Err(Error::new(
            Code::BadParams,
            "an attestation has one digest over all blocks, so none can be left out",
        )
        .hint("leave --sample out, or name the --entry"));
    }
    let recipe =
        RecipeArgs { recipe: recipe.clone(), checkpoint: checkpoint.clone(), tp: args.tp, remote: args.remote.clone() };
    // Modules that were pulled are in the store; entries are not looked at.
    let store = session::existing_store(global)?;
    let (pool, bar) = (session::pool(args.work.jobs)?, Bar::new());
    let predicate = &attested.statement.predicate;
    let wanted = Wanted::Content(&predicate.key, &predicate.content_digest);
    let rebuilt = rebuild(
        &how(args, args.engine.unwrap_or(session::DEFAULT_ENGINE), &pool, &bar),
        &recipe,
        store.as_ref(),
        wanted,
    )?;
    bar.clear();
    let wrong = match &rebuilt.content {
        Some((_, made)) => attested.statement.check_content(&predicate.key, made).err(),
        None => None,
    };
    if global.json {
        output::json(&document(None, Some(&rebuilt), Some(attested), wrong.as_ref()));
    } else if wrong.is_none() {
        print_rebuilt(&rebuilt);
        attested.print();
    }
    let Some(error) = wrong else { return Ok(ExitCode::SUCCESS) };
    super::report(&error, false);
    Ok(ExitCode::from(Fault::exit_status(error.code().fault())))
}

fn document_of<'a>(entries: &'a [EntryInfo], key: &ActionKey) -> Result<&'a EntryDocument> {
    let entry = entries.iter().find(|e| e.key == *key).ok_or_else(|| super::store::missing(key))?;
    entry.document.as_ref().map_err(|why| {
        Error::new(Code::CorruptBlob, format!("the entry {key} is broken: {why}"))
            .hint("`weightmill store doctor` says what is wrong")
    })
}

/// One bar over all shards, each of which is a stage of its own to the store.
struct Whole<'a>(&'a Bar);

impl<'a> Whole<'a> {
    fn new(bar: &'a Bar, entries: &[EntryInfo]) -> Self {
        let documents = entries.iter().filter_map(|entry| entry.document.as_ref().ok());
        let shards: BTreeSet<(BlobDigest, u64)> =
            documents.flat_map(|d| &d.shards).map(|shard| (shard.digest, shard.size)).collect();
        bar.stage("verifying", shards.iter().map(|(_, size)| size).sum());
        Whole(bar)
    }
}

impl Progress for Whole<'_> {
    fn advance(&self, bytes: u64) {
        self.0.advance(bytes);
    }

    fn cancelled(&self) -> bool {
        self.0.cancelled()
    }
}

/// The error that everything found comes to, if anything was.
fn wrong(audit: &Audit, key: Option<&ActionKey>, rebuilt: Option<&Rebuilt>) -> Option<Error> {
    if let Some((_, first)) = audit.damaged.first() {
        let more = match audit.damaged.len() - 1 {
            0 => String::new(),
            n => format!(" (and {n} more)"),
        };
        let hint = match first.code() {
            Code::CorruptBlob => {
                "`weightmill build` with the entry's recipe and checkpoint makes what is missing again, with the same content; if this comes back, check the disk and the memory"
            }
            _ => first.hint_text().unwrap_or("`weightmill store doctor` says what is wrong"),
        };
        return Some(Error::new(first.code(), format!("{}{more}", first.message())).hint(hint));
    }
    let (key, rebuilt) = (key?, rebuilt?);
    let other_content = rebuilt.content.as_ref().filter(|(entry, made)| entry != made);
    let what = match (rebuilt.differing.first(), other_content) {
        (Some((name, entry, made)), _) => {
            format!(
                "{} of {} differ, first '{name}': the entry has {entry}, the rebuild gives {made}",
                rebuilt.differing.len(),
                output::count(rebuilt.tensors, "tensor")
            )
        }
        (None, Some((entry, made))) => format!("the entry has the content {entry}, the rebuild gives {made}"),
        (None, None) => return None,
    };
    Some(Error::new(Code::IdentityCollision, format!("rebuilding {key} with {} gives other bytes: {what}", rebuilt.engine.as_str()))
        .hint("one of the two was computed wrongly, or the transform is not deterministic: compare with another --engine and on another machine; `weightmill diff --a-entry … --b-recipe … --b-checkpoint …` shows the first differing element, `weightmill store show` who built the entry"))
}

fn document(
    audit: Option<&Audit>,
    rebuilt: Option<&Rebuilt>,
    attested: Option<&Attested>,
    wrong: Option<&Error>,
) -> serde_json::Value {
    let damaged = audit.iter().flat_map(|audit| &audit.damaged).map(|(root, error)| {
        let (entry, module) = match root {
            Root::Entry(key) => (Some(key), None),
            Root::Module(digest) => (None, Some(digest)),
        };
        serde_json::json!({ "entry": entry, "module": module, "error": output::error_document(error) })
    });
    let mut document = serde_json::json!({
        "entries": audit.map_or(0, |audit| audit.entries),
        "modules": audit.map_or(0, |audit| audit.modules),
        "shards": audit.map_or(0, |audit| audit.shards),
        "bytes": audit.map_or(0, |audit| audit.bytes),
        "damaged": damaged.collect::<Vec<_>>(),
        "rebuild": rebuilt.map(|rebuilt| {
            let rows = rebuilt.differing.iter().map(|(name, entry, made)| {
                serde_json::json!({ "tensor": name, "entry": entry, "rebuilt": made })
            });
            serde_json::json!({
                "engine": rebuilt.engine.as_str(),
                "blocks": rebuilt.blocks,
                "tensors": rebuilt.tensors,
                "differing": rows.collect::<Vec<_>>(),
                "content_digest": rebuilt.content.as_ref().map(|(_, made)| made),
                "equal": wrong.is_none(),
            })
        }),
        "attestation": attested.map(Attested::document),
    });
    if let (Some(error), Some(fields)) = (wrong, document.as_object_mut()) {
        fields.insert("error".into(), output::error_document(error));
    }
    document
}

fn print(audit: &Audit, rebuilt: Option<&Rebuilt>) {
    let style = Style::stdout();
    // A single one is the error that the command ends with.
    for (root, error) in audit.damaged.iter().filter(|_| audit.damaged.len() > 1) {
        let what = match root {
            Root::Entry(key) => format!("entry {}", key.short()),
            Root::Module(digest) => format!("module {}", digest.short()),
        };
        output::line(format!("{}  {}", style.red(&what), error.message()));
    }
    let modules = if audit.modules > 0 {
        format!(", {}", output::count(audit.modules as usize, "module"))
    } else {
        String::new()
    };
    let entries = if audit.entries == 1 { "1 entry".to_string() } else { format!("{} entries", audit.entries) };
    output::line(format!(
        "{entries}{modules}: {}, {} are as they must be",
        output::count(audit.shards as usize, "shard"),
        output::bytes(audit.bytes)
    ));
    if let Some(rebuilt) = rebuilt {
        print_rebuilt(rebuilt);
    }
}

fn print_rebuilt(rebuilt: &Rebuilt) {
    for (name, entry, made) in rebuilt.differing.iter().take(SHOWN) {
        output::line(format!("{}\n  entry   {entry}\n  rebuilt {made}", Style::stdout().red(name.as_str())));
    }
    if rebuilt.differing.len() > SHOWN {
        output::line(format!("… and {} more", rebuilt.differing.len() - SHOWN));
    }
    if rebuilt.differing.is_empty() {
        output::line(format!(
            "{} in {} rebuilt with {}: every digest is equal",
            output::count(rebuilt.tensors, "tensor"),
            output::count(rebuilt.blocks.len(), "block"),
            rebuilt.engine.as_str()
        ));
    }
}
