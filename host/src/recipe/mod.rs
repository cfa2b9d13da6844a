//! Recipes: which tensors become which, and by what module.
//!
//! ```text
//! recipe.toml ──parse──► Recipe ─┐
//! names and types of sources ────┼─resolve──► Resolution: applications, final
//! config.json ───────────────────┘            names, aliases, blocks
//! ```
//!
//! A recipe is text from elsewhere: it is parsed into types that cannot be
//! wrong ([`Recipe`], in `parse` and the files that it uses), and only then met
//! with a checkpoint ([`resolve`]). Neither step reads a tensor or knows what a
//! module does. Whatever is wrong is an error that says where in the recipe.
//!
//! The order of work is fixed: names are dropped, steps run in order (a later
//! one sees what earlier ones made), what no step took is kept, dropped or
//! refused, ties are made, names are rewritten, blocks are formed.
//!
//! Nothing depends on the order in which TOML fields were written: roles,
//! parameters and guards are sorted by their names, applications by the natural
//! order of their captures' values.

mod blocks;
mod expression;
mod fields;
mod filter;
mod glob;
mod group;
mod layout;
mod module_ref;
mod names;
mod natural;
mod params;
mod parse;
mod pattern;
mod rename;
mod resolution;
mod resolve;
mod source;
mod step;

#[cfg(test)]
mod tests;

pub use layout::{Layout, parse_size};
pub use module_ref::ModuleRef;
pub use parse::Recipe;
pub use resolution::{Application, Block, Facts, Input, Origin, Output, Resolution, SourceUse};
pub use resolve::resolve;
pub use step::Step;

/// Element type and extents of a tensor.
pub type TensorMeta = crate::tensor::TensorType;
