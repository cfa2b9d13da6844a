//! `weightmill verify`.
//!
//! Two questions. Are the bytes in the store what the entry's document says?
//! Every leaf of every shard is hashed for that. And is the document what the
//! recipe makes of the checkpoint? With `--rebuild` the transform runs again,
//! its result is hashed and forgotten, and the digests are compared.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;

use super::args::{Global, RecipeArgs, TpArgs, WorkArgs};
use super::output::{self, Style};
use super::progress::Bar;
use super::session::{self, Session};
use crate::checkpoint::{DigestCache, NoCache, source_digests};
use crate::digest::{ActionKey, BlobDigest};
use crate::error::{Code, Error, Fault, Result};
use crate::execute::{DigestTable, Graph, SpillRoom, Workshop, arrange, hash_all};
use crate::progress::Progress;
use crate::sandbox::EngineName;
use crate::store::document::EntryDocument;
use crate::store::{Audit, EntryInfo, Root, Store};
use crate::tensor::TensorName;

const EXAMPLES: &str = "Examples:
  weightmill verify --entry 9f3c1d2a
  weightmill verify --all --json
  weightmill verify --entry 9f3c1d2a --rebuild --recipe recipes/llama.toml --checkpoint llama-3-8b
  weightmill verify --entry 9f3c1d2a --rebuild --recipe R --checkpoint C --engine wasmi --sample 5%

A corrupt blob is named with the tensor and the bytes that differ, and moved into quarantine; the
next build makes it again. Exit status: 0 if everything is as it must be, 3 if not (corrupt_blob;
identity_collision if a rebuild gives other bytes), 1 if the recipe and checkpoint are not what the
entry was made from (source_unavailable).";

/// How many differing tensors are listed for people.
const SHOWN: usize = 10;

/// Whether the bytes of entries are what they must be.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// The entry: its key, or the beginning of it
    #[arg(long, value_name = "KEY", required_unless_present = "all", conflicts_with = "all")]
    entry: Option<String>,
    /// Every entry and every module of the store
    #[arg(long)]
    all: bool,
    /// Also run the transform again, write nothing, and compare content and tensor digests
    #[arg(long, requires_all = ["entry", "recipe", "checkpoint"])]
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
    /// The engine that runs the modules: wasmtime, wasmi or pulley
    #[arg(long, value_name = "ENGINE", value_parser = super::digest::engine_name, requires = "rebuild")]
    engine: Option<EngineName>,
    /// Rebuild only so many of the blocks, chosen at random, at least one
    #[arg(long, value_name = "PERCENT", value_parser = share, requires = "rebuild")]
    sample: Option<Share>,
    #[command(flatten)]
    work: WorkArgs,
}

/// A share of the blocks, above 0 and at most 1.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Share(f64);

fn share(text: &str) -> Result<Share> {
    let number = text.strip_suffix('%').and_then(|number| number.trim().parse::<f64>().ok());
    number.filter(|percent| *percent > 0.0 && *percent <= 100.0).map(|percent| Share(percent / 100.0)).ok_or_else(
        || {
            Error::new(
                Code::BadParams,
                format!("'{text}' is no share; write a percentage such as 5%, above 0% and up to 100%"),
            )
        },
    )
}

impl Share {
    /// How many of `blocks` this is.
    fn of(self, blocks: usize) -> usize {
        ((blocks as f64 * self.0).round() as usize).clamp(1, blocks.max(1))
    }
}

/// What a rebuild came to.
struct Rebuilt {
    engine: EngineName,
    blocks: Vec<String>,
    tensors: usize,
    /// Tensors that differ, with the digests of the entry and of the rebuild
    /// (empty where one has no such tensor).
    differing: Vec<(TensorName, String, String)>,
    /// The content digests; `None` if only a sample was rebuilt.
    content: Option<(String, String)>,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let store = session::wanted_store(global)?;
    let pool = session::pool(args.work.jobs)?;
    let bar = Bar::new();
    let entries = store.entries()?;
    let key = args.entry.as_deref().map(|text| session::find_key(&store, text)).transpose()?;
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
            let recipe = RecipeArgs { recipe: recipe.clone(), checkpoint: checkpoint.clone(), tp: args.tp };
            let entry = entries.iter().find(|e| e.key == *key);
            // A document that cannot be read is damage, so there is one here.
            let document = entry.and_then(|e| e.document.as_ref().ok()).ok_or_else(|| super::store::missing(key))?;
            Some(rebuild(args, &recipe, &store, document, &pool, &bar)?)
        }
        _ => None,
    };
    bar.clear();
    let wrong = wrong(&audit, key.as_ref(), rebuilt.as_ref());
    if global.json {
        output::json(&document(&audit, rebuilt.as_ref(), wrong.as_ref()));
    } else {
        print(&audit, rebuilt.as_ref());
    }
    let Some(error) = wrong else { return Ok(ExitCode::SUCCESS) };
    super::report(&error, false);
    Ok(ExitCode::from(Fault::exit_status(error.code().fault())))
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

fn rebuild(
    args: &Args,
    recipe: &RecipeArgs,
    store: &Store,
    document: &EntryDocument,
    pool: &rayon::ThreadPool,
    bar: &Bar,
) -> Result<Rebuilt> {
    let engine = args.engine.unwrap_or(EngineName::Wasmtime);
    let session = Session::open(recipe, Some(store), Some(engine))?;
    let outline = session.outline()?;
    let cache: &dyn DigestCache = if args.sample.is_some() { store } else { &NoCache };
    let digests = source_digests(outline.checkpoint(), cache, pool, bar)?;
    let key = outline.action(&digests)?.key;
    if key != document.key {
        return Err(other_source(&key, &document.key));
    }
    let graph = Graph::new(outline.checkpoint().clone(), outline.steps()?);
    let mut shards = arrange(&graph, &outline.resolution)?;
    let blocks: Vec<&str> = outline.resolution.blocks.iter().map(|block| block.name.as_str()).collect();
    let chosen = match args.sample {
        Some(share) => choose(blocks.len(), share.of(blocks.len()), entropy()),
        None => (0..blocks.len()).collect(),
    };
    shards.retain(|shard| chosen.contains(&shard.block));
    let room = SpillRoom::memory_only(session::memory_budget(&args.work));
    let lanes = pool.current_num_threads();
    let workshop = Workshop::new(&graph, pool, lanes, &room, bar);
    bar.stage("transform", shards.iter().flat_map(|s| &s.tensors).map(|w| w.tensor.len_bytes()).sum());
    let mut made = hash_all(&workshop, &shards, lanes)?;
    outline.checkpoint().files().iter().try_for_each(|file| file.check_unchanged())?;

    let tensors = made.0.len();
    let mut wanted = DigestTable::of_document(document);
    let content = if args.sample.is_none() {
        made.add_aliases(&outline.resolution.aliases);
        Some((document.content_digest.to_string(), made.content_digest().to_string()))
    } else {
        wanted.0.retain(|name, _| made.0.contains_key(name));
        None
    };
    Ok(Rebuilt {
        engine,
        blocks: chosen.iter().map(|block| blocks[*block].to_string()).collect(),
        tensors,
        differing: differing(&wanted, &made),
        content,
    })
}

fn other_source(found: &ActionKey, wanted: &ActionKey) -> Error {
    Error::new(
        Code::SourceUnavailable,
        format!("this recipe and checkpoint give the key {found}, expected that of the entry, {wanted}"),
    )
    .hint("the checkpoint's bytes, the recipe, a module, --tp-size or --tp-rank differ from those that the entry was made with: `weightmill store show` says what they were")
}

/// Names whose rows are not equal, with both digests.
fn differing(wanted: &DigestTable, made: &DigestTable) -> Vec<(TensorName, String, String)> {
    let names: BTreeSet<&TensorName> = wanted.0.keys().chain(made.0.keys()).collect();
    let row = |table: &DigestTable, name| {
        let row = table.0.get(name);
        row.map_or_else(String::new, |(tensor, digest)| format!("{tensor} {digest}"))
    };
    let differs = |name: &&TensorName| wanted.0.get(*name) != made.0.get(*name);
    names.into_iter().filter(differs).map(|name| (name.clone(), row(wanted, name), row(made, name))).collect()
}

/// `count` different numbers below `total`, ascending: the first of a
/// Fisher–Yates shuffle.
fn choose(total: usize, count: usize, mut random: u64) -> BTreeSet<usize> {
    let mut numbers: Vec<usize> = (0..total).collect();
    for i in 0..count.min(total) {
        // SplitMix64 (Steele, Lea, Flood 2014).
        random = random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        numbers.swap(i, i + (z % (total - i) as u64) as usize);
    }
    numbers.into_iter().take(count).collect()
}

/// A number that differs from run to run: the standard library seeds its hash
/// maps from the system's random numbers.
fn entropy() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
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
        .hint("one of the two was computed wrongly, or the transform is not deterministic: compare with another --engine and on another machine; `weightmill store show` says who built the entry"))
}

fn document(audit: &Audit, rebuilt: Option<&Rebuilt>, wrong: Option<&Error>) -> serde_json::Value {
    let damaged = audit.damaged.iter().map(|(root, error)| {
        let (entry, module) = match root {
            Root::Entry(key) => (Some(key), None),
            Root::Module(digest) => (None, Some(digest)),
        };
        serde_json::json!({ "entry": entry, "module": module, "error": output::error_document(error) })
    });
    let mut document = serde_json::json!({
        "entries": audit.entries,
        "modules": audit.modules,
        "shards": audit.shards,
        "bytes": audit.bytes,
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
    let Some(rebuilt) = rebuilt else { return };
    for (name, entry, made) in rebuilt.differing.iter().take(SHOWN) {
        output::line(format!("{}\n  entry   {entry}\n  rebuilt {made}", style.red(name.as_str())));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_percentages() {
        assert_eq!(share("5%").unwrap(), Share(0.05));
        assert_eq!(share("100 %").unwrap(), Share(1.0));
        for bad in ["", "5", "0%", "-1%", "101%", "NaN%", "%"] {
            assert!(share(bad).is_err(), "{bad:?}");
        }
        assert_eq!([Share(0.05).of(1), Share(0.05).of(48), Share(0.001).of(48), Share(1.0).of(7)], [1, 2, 1, 7]);
    }

    #[test]
    fn a_sample_has_the_size_and_reaches_everything() {
        let mut seen = BTreeSet::new();
        for seed in 0..200 {
            let chosen = choose(9, 2, seed);
            assert_eq!(chosen.len(), 2);
            seen.extend(chosen);
        }
        assert_eq!(seen, (0..9).collect());
        assert_eq!(choose(3, 3, 7).len(), 3);
    }
}
