//! Running the transform again, to compare.

use std::collections::BTreeSet;

use crate::checkpoint::{DigestCache, NoCache, source_digests};
use crate::cli::args::{RecipeArgs, WorkArgs};
use crate::cli::progress::Bar;
use crate::cli::session::{self, Session};
use crate::digest::{ActionKey, ContentDigest};
use crate::error::{Code, Error, Result};
use crate::execute::{DigestTable, Graph, SpillRoom, Workshop, arrange, hash_all};
use crate::progress::Progress;
use crate::sandbox::EngineName;
use crate::store::Store;
use crate::store::document::EntryDocument;
use crate::tensor::TensorName;

/// A share of the blocks, above 0 and at most 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Share(f64);

pub(super) fn share(text: &str) -> Result<Share> {
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
pub(super) struct Rebuilt {
    pub(super) engine: EngineName,
    pub(super) blocks: Vec<String>,
    pub(super) tensors: usize,
    /// Tensors that differ, with the digests of the entry and of the rebuild
    /// (empty where one has no such tensor).
    pub(super) differing: Vec<(TensorName, String, String)>,
    /// The content digests; `None` if only a sample was rebuilt.
    pub(super) content: Option<(ContentDigest, ContentDigest)>,
}

/// What a rebuild is compared with.
#[derive(Clone, Copy)]
pub(super) enum Wanted<'a> {
    Entry(&'a EntryDocument),
    Content(&'a ActionKey, &'a ContentDigest),
}

impl Wanted<'_> {
    fn key(&self) -> &ActionKey {
        match self {
            Wanted::Entry(document) => &document.key,
            Wanted::Content(key, _) => key,
        }
    }

    fn content(&self) -> ContentDigest {
        match self {
            Wanted::Entry(document) => document.content_digest,
            Wanted::Content(_, content) => **content,
        }
    }
}

/// How a rebuild is done.
pub(super) struct How<'a> {
    /// What runs the modules.
    pub(super) engine: EngineName,
    /// The share of the blocks; all if there is none.
    pub(super) sample: Option<Share>,
    pub(super) work: &'a WorkArgs,
    pub(super) pool: &'a rayon::ThreadPool,
    pub(super) bar: &'a Bar,
}

/// Runs the transform, hashes its result and compares.
///
/// # Errors
/// `source_unavailable` if recipe and checkpoint give another key; what is
/// wrong with them or a module.
pub(super) fn rebuild(
    how: &How<'_>,
    recipe: &RecipeArgs,
    store: Option<&Store>,
    wanted: Wanted<'_>,
) -> Result<Rebuilt> {
    let (pool, bar) = (how.pool, how.bar);
    let engine = how.engine;
    let session = Session::open(recipe, store, Some(engine))?;
    let outline = session.outline()?;
    let cache: &dyn DigestCache = match store {
        Some(store) if how.sample.is_some() => store,
        _ => &NoCache,
    };
    let digests = source_digests(outline.checkpoint(), cache, pool, bar)?;
    let key = outline.action(&digests)?.key;
    if key != *wanted.key() {
        return Err(other_source(&key, wanted.key()));
    }
    let graph = Graph::new(outline.checkpoint().clone(), outline.steps()?);
    let mut shards = arrange(&graph, &outline.resolution)?;
    let blocks: Vec<&str> = outline.resolution.blocks.iter().map(|block| block.name.as_str()).collect();
    let chosen = match how.sample {
        Some(share) => choose(blocks.len(), share.of(blocks.len()), entropy()),
        None => (0..blocks.len()).collect(),
    };
    shards.retain(|shard| chosen.contains(&shard.block));
    let room = SpillRoom::memory_only(session::memory_budget(how.work));
    let lanes = pool.current_num_threads();
    let workshop = Workshop::new(&graph, pool, lanes, &room, bar);
    bar.stage("transform", shards.iter().flat_map(|s| &s.tensors).map(|w| w.tensor.len_bytes()).sum());
    let mut made = hash_all(&workshop, &shards, lanes)?;
    outline.checkpoint().files().iter().try_for_each(|file| file.check_unchanged())?;

    let tensors = made.0.len();
    let mut table = match wanted {
        Wanted::Entry(document) => DigestTable::of_document(document),
        Wanted::Content(..) => DigestTable::default(),
    };
    let content = if how.sample.is_none() {
        made.add_aliases(&outline.resolution.aliases);
        Some((wanted.content(), made.content_digest()))
    } else {
        table.0.retain(|name, _| made.0.contains_key(name));
        None
    };
    let differing = match wanted {
        Wanted::Entry(_) => differing(&table, &made),
        // Only the digest over all is known.
        Wanted::Content(..) => Vec::new(),
    };
    Ok(Rebuilt {
        engine,
        blocks: chosen.iter().map(|block| blocks[*block].to_string()).collect(),
        tensors,
        differing,
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
