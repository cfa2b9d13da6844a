//! `weightmill pull`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use super::{pull_document, repository};
use crate::cli::args::{DemandArgs, Global, RemoteArgs, TpArgs};
use crate::cli::output::{self, Style};
use crate::cli::progress::Bar;
use crate::cli::session;
use crate::digest::ActionKey;
use crate::error::{Code, Error, Result};
use crate::publish::client::Registry;
use crate::publish::entry::{Demand, pull_entry};
use crate::publish::reference::{Repository, SCHEME};
use crate::publish::source::{FoundReference, SourceName, find_reference};
use crate::recipe::Recipe;
use crate::store::{Store, Verify};

const EXAMPLES: &str = "Examples:
  weightmill pull 9f3c…(64 digits) oci://registry.example.com/weights/pythia
  weightmill pull oci://registry.example.com/weights/pythia --recipe recipes/gpt-neox.toml \\
      --source EleutherAI/pythia-160m@582159a2 --tp-size 4 --tp-rank 2

An entry is used if trust.toml lists its content or a key that signed it, or --content or
--trust-registry says so. A pull that was interrupted is continued by the next one.";

/// Pull an entry from an OCI registry into the store.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Args {
    /// [KEY] REPOSITORY: the entry's key, unless --recipe and --source say what is wanted, and
    /// oci://registry/repository
    #[arg(value_name = "KEY | REPOSITORY", num_args = 1..=2, required = true)]
    what: Vec<String>,
    /// Look the entry up by the recipe that makes it …
    #[arg(long, value_name = "FILE", requires = "source")]
    recipe: Option<PathBuf>,
    /// … and the name of its source, NAME@COMMIT; no checkpoint is needed
    #[arg(long, value_name = "NAME@COMMIT", requires = "recipe", value_parser = SourceName::parse)]
    source: Option<SourceName>,
    #[command(flatten)]
    tp: TpArgs,
    #[command(flatten)]
    demand: DemandArgs,
    #[command(flatten)]
    remote: RemoteArgs,
}

pub(in crate::cli) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let start = Instant::now();
    let (key, from) = arguments(args)?;
    let store = session::store(global)?;
    let bar = Bar::new();
    let mut demand = args.demand.demand()?;
    let registry = Registry::open(&from, &args.remote.registry.options())?;
    let (key, signer) = match (key, &args.recipe, &args.source) {
        (Some(key), ..) => (key, None),
        (None, Some(recipe), Some(source)) => {
            let recipe = Recipe::load(recipe)?;
            let library = session::library(Some(&store), &args.remote);
            let sought = session::sought(&recipe, &library, source.clone(), args.tp.tp())?;
            let found = find_reference(&registry, &sought, &demand.trust, &bar)?.ok_or_else(|| {
                Error::new(
                    Code::SourceUnavailable,
                    format!("{from} has no entry of {} for this recipe at this rank", sought.source),
                )
                .hint("push it with --recipe, --checkpoint and --source; the recipe and its modules must be the same")
            })?;
            let FoundReference { reference, signer } = accept(found, &demand, &from)?;
            if demand.content.is_none() {
                demand.content_said_by = signer.clone();
            }
            demand.content = Some(reference.content_digest);
            demand.labels.insert("recipe".into(), recipe.name().into());
            demand.labels.insert("model".into(), sought.source.to_string());
            (reference.key, signer)
        }
        _ => {
            return Err(Error::new(Code::BadParams, "nothing says which entry is wanted")
                .hint("give a key, or --recipe and --source"));
        }
    };
    let found = has(&store, &key)?;
    let document = match found {
        Some(content) => {
            refuse_other(&key, &content, &demand)?;
            serde_json::json!({
                "repository": from.to_string(), "outcome": "hit", "content_digest": content,
                "bytes_received": 0, "bytes_present": 0,
            })
        }
        None => {
            let pool = session::pool(None)?;
            let pulled = pull_entry(&store, &registry, &key, &demand, &pool, &bar)?.ok_or_else(|| {
                Error::new(Code::SourceUnavailable, format!("{from} has no entry {key}"))
                    .hint("entries are tagged with their whole keys; `weightmill plan` and `build` print the key")
            })?;
            pull_document(&from, &pulled)
        }
    };
    bar.clear();
    let mut document = document;
    document["key"] = serde_json::json!(key);
    document["reference_signed_by"] = serde_json::json!(signer);
    document["timings_ms"] = serde_json::json!({ "total": crate::cli::build::millis(start.elapsed()) });
    if global.json {
        output::json(&document);
    } else {
        print(&document, start);
    }
    Ok(ExitCode::SUCCESS)
}

fn arguments(args: &Args) -> Result<(Option<ActionKey>, Repository)> {
    let (key, from) = match args.what.as_slice() {
        [from] => (None, from),
        [key, from] if key.starts_with(SCHEME) => (Some(from), key),
        [key, from] => (Some(key), from),
        _ => return Err(Error::new(Code::BadParams, "expected a key and a repository")),
    };
    if key.is_some() && args.recipe.is_some() {
        return Err(Error::new(Code::BadParams, "both a key and a recipe say which entry is wanted")
            .hint("give one of the two"));
    }
    let key = key.map(|text| {
        text.parse::<ActionKey>().map_err(|e| {
            Error::new(Code::BadParams, format!("'{}' is no whole key: {e}", text.escape_debug()))
                .hint("a registry is asked for whole keys only")
        })
    });
    Ok((key.transpose()?, repository(from)?))
}

/// A reference that may be followed: it pins the content from here on.
fn accept(found: FoundReference, demand: &Demand, from: &Repository) -> Result<FoundReference> {
    let content = found.reference.content_digest;
    let vouched = match demand.content {
        Some(wanted) => wanted == content,
        None => found.signer.is_some() || demand.believe_registry,
    };
    if vouched {
        return Ok(found);
    }
    let key = found.reference.key;
    Err(match demand.content {
        Some(wanted) => Error::new(
            Code::EntryNotTrusted,
            format!("{from} says that this recipe over this source gives the content {content}, expected {wanted}"),
        )
        .hint("nothing was kept; was the recipe, or one of its modules, changed?"),
        None => Error::new(
            Code::EntryNotTrusted,
            format!("nobody who is trusted says that this recipe over this source gives the entry {key} of {from}"),
        )
        .hint(format!(
            "add the key of whoever pushes entries with --sign as [[key]] to {}, or name the content that you expect with --content {content}, or use --trust-registry to believe the registry this once",
            demand.trust.file().display()
        )),
    })
}

/// The content of an entry that is in the store and whole.
fn has(store: &Store, key: &ActionKey) -> Result<Option<crate::digest::ContentDigest>> {
    let lease = store.lease(key, Verify::Never, &session::pool(Some(1))?, &crate::progress::Silent)?;
    Ok(lease.map(|lease| lease.document().content_digest))
}

fn refuse_other(key: &ActionKey, content: &crate::digest::ContentDigest, demand: &Demand) -> Result<()> {
    match demand.content {
        Some(wanted) if wanted != *content => Err(Error::new(
            Code::IdentityCollision,
            format!("the store has the entry {key} with the content {content}, expected {wanted}"),
        )
        .hint("one of the two builds was wrong: look at both before you remove one with `weightmill store rm`")),
        _ => Ok(()),
    }
}

fn print(document: &serde_json::Value, start: Instant) {
    let style = Style::stdout();
    let text = |field: &str| document[field].as_str().unwrap_or_default().to_owned();
    let number = |field: &str| document[field].as_u64().unwrap_or_default();
    if text("outcome") == "pulled" {
        output::line(format!(
            "received {} · had {} · {}",
            output::bytes(number("bytes_received")),
            output::bytes(number("bytes_present")),
            text("trusted")
        ));
    }
    let short = |field: &str| text(field).chars().take(8).collect::<String>();
    output::line(format!(
        "{}  key {}…  content {}…  in {}",
        style.bold(&format!("{:<6}", text("outcome"))),
        short("key"),
        short("content_digest"),
        output::duration(start.elapsed())
    ));
}
