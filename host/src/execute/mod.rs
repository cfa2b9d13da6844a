//! Carrying out plans: views natively, tiles through the sandbox.
//!
//! ```text
//! Outline ──steps──► Graph ──arrange──► shards ──┬─ lane ─► sink (store, memory, digest)
//!  recipe, modules,    plans wired to             └─ lane ─► sink
//!  resolution          sources and each other         ▲ segments, in order
//!                                                pool: gather, run tiles, hash leaves
//! ```
//!
//! An execution never holds a tensor: segments of about a mebibyte are made by
//! the pool's threads and handed on in order. What a plan or a later step has
//! to have whole is spilled, within a budget.

mod arrange;
mod buffers;
mod gather;
mod graph;
mod lanes;
mod memory;
mod outline;
mod pack;
mod produce;
mod spill;
mod table;
mod tile;

pub mod build;

pub use arrange::{ShardPlan, Wanted, arrange};
pub use graph::{Graph, Source, Step, TargetId};
pub use memory::default_budget_bytes;
pub use outline::{Engines, FactsCache, Inputs, NoFacts, Outline, TILE_BYTES, folder_of};
pub use pack::Packer;
pub use produce::{Sink, Workshop, interrupted};
pub use spill::SpillRoom;
pub use table::{DigestTable, hash_all};
