//! What most subcommands begin with: threads, store, recipe, checkpoint.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::args::{Global, RecipeArgs, RemoteArgs, WorkArgs};
use super::progress::Signals;
use crate::checkpoint::{Checkpoint, source_digests};
use crate::digest::{ActionKey, RecordDigest};
use crate::error::{Code, Error, Result};
use crate::execute::{Engines, FactsCache, Inputs, NoFacts, Outline, TILE_BYTES, default_budget_bytes};
use crate::modules::Library;
use crate::progress::Progress;
use crate::publish::remotes::RemoteModules;
use crate::publish::source::{Sought, SourceName, recipe_identity};
use crate::recipe::Recipe;
use crate::sandbox::{EngineName, engine};
use crate::store::{Store, StoreOptions};
use crate::tensor::{Dtype, TensorType};

/// The engine that runs tiles unless another is named.
pub(super) const DEFAULT_ENGINE: EngineName = EngineName::Wasmtime;

/// The engine that runs plans unless another is named: it starts at once.
pub(super) const PLAN_ENGINE: EngineName = EngineName::Wasmi;

/// The pool that computes.
pub(super) fn pool(jobs: Option<u16>) -> Result<rayon::ThreadPool> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(jobs.map_or(0, usize::from))
        // What a module's frames may use, with room: a setting of the
        // environment must not lower it.
        .stack_size(4 << 20)
        .thread_name(|i| format!("work-{i}"))
        .build()
        .map_err(|e| Error::io("starting threads", e))
}

/// The memory budget.
pub(super) fn memory_budget(work: &WorkArgs) -> u64 {
    work.memory_budget.unwrap_or_else(default_budget_bytes)
}

fn store_options(global: &Global) -> StoreOptions {
    StoreOptions {
        allow_network_filesystem: global.allow_network_filesystem,
        lock_timeout: Duration::from_secs(global.lock_timeout),
    }
}

fn root(global: &Global) -> Result<std::path::PathBuf> {
    global.store.clone().map_or_else(Store::default_root, Ok)
}

/// The store, created if it is not there.
pub(super) fn store(global: &Global) -> Result<Store> {
    Store::open(&root(global)?, store_options(global))
}

/// The store if there is one; nothing is created.
pub(super) fn existing_store(global: &Global) -> Result<Option<Store>> {
    Store::open_existing(&root(global)?, store_options(global))
}

/// The store, which must be there.
pub(super) fn wanted_store(global: &Global) -> Result<Store> {
    let root = root(global)?;
    existing_store(global)?.ok_or_else(|| {
        Error::new(Code::IoError, format!("there is no store at {}", root.display()))
            .hint("name it with --store or WEIGHTMILL_STORE; `weightmill build` creates one")
    })
}

/// A key, whole or a unique beginning of at least four digits.
pub(super) fn find_key(store: &Store, text: &str) -> Result<ActionKey> {
    if let Ok(key) = text.parse() {
        return Ok(key);
    }
    let hex = text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    let keys = store.entries()?.into_iter().map(|entry| entry.key);
    let found: Vec<ActionKey> = keys.filter(|k| k.to_string().starts_with(text)).collect();
    match found.as_slice() {
        [key] if hex && text.len() >= 4 => Ok(*key),
        [] | [_] => Err(Error::new(Code::SourceUnavailable, format!("the store has no entry '{text}'"))
            .hint("`weightmill store ls` lists the keys; four digits are enough if no other begins so")),
        _ => Err(Error::new(Code::SourceUnavailable, format!("{} entries begin with '{text}'", found.len()))
            .hint("write more of the key")),
    }
}

/// Where a recipe's modules come from: with the program, beside the recipe,
/// the store, registries.
pub(super) fn library(store: Option<&Store>, remote: &RemoteArgs) -> Library {
    let remotes = RemoteModules::new(store.cloned(), remote.registry.options(), remote.locked, Box::new(Signals));
    Library::new(store.cloned()).with_remotes(Box::new(remotes))
}

/// What is asked for where there is no checkpoint.
pub(super) fn sought(
    recipe: &Recipe,
    library: &Library,
    source: SourceName,
    tp: weightmill_guest::abi::Tp,
) -> Result<Sought> {
    let folder = crate::execute::folder_of(recipe.file());
    let module = |step: &crate::recipe::Step| {
        let module = library.load(step.module(), folder).map_err(|e| e.at(step.module_at().clone()))?;
        Ok(module.digest())
    };
    let modules = recipe.steps().iter().map(module).collect::<Result<Vec<_>>>()?;
    Ok(Sought { recipe: recipe_identity(recipe, &modules)?, source, tp })
}

/// A recipe with what it needs.
pub(super) struct Session {
    pub(super) recipe: Recipe,
    checkpoint: Arc<Checkpoint>,
    tp: weightmill_guest::abi::Tp,
    modules: Library,
    engine: Engines,
    facts: Box<dyn FactsCache>,
    pub(super) tile_bytes: u64,
}

impl Session {
    /// Loads the recipe and opens the checkpoint. Modules and facts come from
    /// `store` too, if there is one; without one, nothing is remembered.
    ///
    /// `named` is an engine that runs everything; else plans run where they
    /// start at once, and tiles where they run fast.
    pub(super) fn open(args: &RecipeArgs, store: Option<&Store>, named: Option<EngineName>) -> Result<Self> {
        let facts: Box<dyn FactsCache> = match store {
            Some(store) => Box::new(StoredFacts(store.clone())),
            None => Box::new(NoFacts),
        };
        Ok(Session {
            recipe: Recipe::load(&args.recipe)?,
            checkpoint: Arc::new(Checkpoint::open(&args.checkpoint)?),
            tp: args.tp.tp(),
            modules: library(store, &args.remote),
            engine: match named {
                Some(name) => Engines::one(move || engine(name)),
                None => Engines::two(|| engine(PLAN_ENGINE), || engine(DEFAULT_ENGINE)),
            },
            facts,
            tile_bytes: TILE_BYTES,
        })
    }

    /// What the provenance calls an entry of it.
    pub(super) fn labels(&self) -> BTreeMap<String, String> {
        let names = [("recipe", self.recipe.name().to_owned()), ("model", model_name(self.checkpoint.path()))];
        names.into_iter().map(|(field, name)| (field.to_owned(), name)).collect()
    }

    /// The checkpoint.
    pub(super) fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Checks that the recipe makes this entry of the checkpoint.
    ///
    /// # Errors
    /// `source_unavailable` if it makes another.
    pub(super) fn check_makes(&self, store: &Store, key: &ActionKey, progress: &dyn Progress) -> Result<()> {
        let outline = self.outline()?;
        let digests = source_digests(outline.checkpoint(), store, &pool(None)?, progress)?;
        let made = outline.action(&digests)?.key;
        if made == *key {
            return Ok(());
        }
        Err(Error::new(
            Code::SourceUnavailable,
            format!("this recipe makes the entry {made} of this checkpoint, not {key}"),
        )
        .hint("give the recipe, checkpoint, --tp-size and --tp-rank that the entry was built with"))
    }

    /// What a node without the checkpoint would ask for.
    pub(super) fn sought(&self, source: SourceName) -> Result<Sought> {
        sought(&self.recipe, &self.modules, source, self.tp)
    }

    /// The recipe, resolved.
    pub(super) fn outline(&self) -> Result<Outline<'_>> {
        Outline::new(Inputs {
            recipe: &self.recipe,
            checkpoint: self.checkpoint.clone(),
            tp: self.tp,
            modules: &self.modules,
            engine: &self.engine,
            facts: self.facts.as_ref(),
            tile_bytes: self.tile_bytes,
        })
    }

    /// Who builds, for the provenance.
    ///
    /// # Errors
    /// What making the engine says.
    pub(super) fn provenance(&self) -> Result<serde_json::Value> {
        let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
        Ok(serde_json::json!({
            "program": concat!("weightmill ", env!("CARGO_PKG_VERSION")),
            "engine": DEFAULT_ENGINE.as_str(),
            "engine_version": engine(DEFAULT_ENGINE)?.version(),
            // The default engine compiles for the machine that it runs on.
            "target": host_triple(),
            "plan_engine": PLAN_ENGINE.as_str(),
            "plan_engine_version": engine(PLAN_ENGINE)?.version(),
            "host": rustix::system::uname().nodename().to_string_lossy(),
            "host_triple": host_triple(),
            "built_at_unix_s": seconds,
            "recipe": self.recipe.name(),
            "model": model_name(self.checkpoint.path()),
            "tp_size": self.tp.size,
            "tp_rank": self.tp.rank,
        }))
    }
}

/// The machine, as compilers name it.
fn host_triple() -> String {
    let system = match (std::env::consts::OS, cfg!(target_env = "musl")) {
        ("linux", true) => "unknown-linux-musl",
        ("linux", false) => "unknown-linux-gnu",
        ("macos", _) => "apple-darwin",
        (other, _) => other,
    };
    format!("{}-{system}", std::env::consts::ARCH)
}

fn model_name(path: &Path) -> String {
    let real = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    real.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Facts as the store's weak records.
struct StoredFacts(Store);

impl FactsCache for StoredFacts {
    fn load(&self, key: &RecordDigest) -> Option<BTreeMap<String, TensorType>> {
        let facts: BTreeMap<String, (Dtype, Vec<u64>)> = serde_json::from_value(self.0.facts(key)?).ok()?;
        facts.into_iter().map(|(role, (dtype, shape))| Some((role, TensorType::new(dtype, shape)?))).collect()
    }

    fn save(&self, key: &RecordDigest, facts: &BTreeMap<String, TensorType>) {
        let facts: BTreeMap<&String, (Dtype, &[u64])> =
            facts.iter().map(|(role, tensor)| (role, (tensor.dtype(), tensor.shape()))).collect();
        if let Ok(facts) = serde_json::to_value(facts) {
            // Weak: losing it costs a plan, not a result.
            let _ = self.0.put_facts(key, &facts);
        }
    }
}
