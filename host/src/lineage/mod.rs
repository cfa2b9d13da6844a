//! Which source bytes, modules and parameters made a tensor.
//!
//! ```text
//! action (hashed: the key) ── digests, types, modules, parameters ──┐
//! lineage record (beside the entry) ── names ───────────────────────┼─► Explanation
//! modules, planned again from metadata ── byte ranges ──────────────┘
//! ```
//!
//! What an entry's action says is certain: it hashes to the key. It has no
//! source names, since they do not determine a byte; a build [`record`]s them
//! beside the entry. Byte ranges are in neither: they are what a module's plan
//! answers, so [`explain`] asks again, which needs no tensor's bytes, only the
//! modules. What cannot be known is left out, and the explanation says why.

mod action;
mod explanation;
mod ranges;
mod reads;
mod record;
mod sources;
mod trace;

#[cfg(test)]
mod tests;

pub use explanation::{Explanation, How, InputUse, Link, OutputUse, SourceUse, StepUse};
pub use ranges::Ranges;
pub use record::{Lineage, OriginRecord, record};
pub use sources::{Found, locate};
pub use trace::{Asked, explain, modules_of};

use crate::digest::ActionKey;
use crate::error::Result;
use crate::store::Store;

/// What the builds of an entry recorded of names.
///
/// # Errors
/// `io_error`.
pub fn read_all(store: &Store, key: &ActionKey) -> Result<Vec<Lineage>> {
    Ok(store.lineages(key)?.iter().filter_map(Lineage::read).collect())
}
