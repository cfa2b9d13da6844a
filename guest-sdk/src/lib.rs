//! The SDK for weightmill transforms.
//!
//! A transform is a WebAssembly module that says how a checkpoint's tensors
//! become the tensors that a serving process wants. It is a struct of
//! parameters with a `plan`: from dtypes and shapes alone it answers, for each
//! output, either a *view* (bytes moved, which the host does) or *tiles*
//! (bytes computed, by the transform's `run`). It imports nothing, keeps no
//! state, and never sees a name or a file.
//!
//! ```
//! use weightmill_guest::prelude::*;
//!
//! /// Doubles every head: [H·d, …] becomes [2·H·d, …].
//! #[transform(name = "head-double", version = "1.0.0", summary = "every head twice")]
//! pub struct HeadDouble {
//!     /// Rows of a head.
//!     head_dim: NonZeroU64,
//! }
//!
//! impl Transform for HeadDouble {
//!     fn plan(&self, cx: &Plan) -> Result<Outputs> {
//!         let w = cx.input("w")?;
//!         let d = self.head_dim.get();
//!         let heads = w.split(0, &[w.extent(0)? / d, d])?;
//!         cx.outputs().view("w", heads.repeat(0, 2)?.merge(0..2)?)
//!     }
//! }
//!
//! use weightmill_guest::native::{Case, Tensor};
//! let case = Case::new().param("head_dim", 2).input("w", Tensor::of(&[4], &[1_u8, 2, 3, 4]));
//! assert_eq!(case.run::<HeadDouble>().unwrap()["w"].bytes, [1, 2, 1, 2, 3, 4, 3, 4]);
//! ```
//!
//! Where to look:
//!
//! | module | what |
//! | --- | --- |
//! | [`prelude`] | everything that a transform needs |
//! | [`macro@transform`], [`macro@Choice`] | from a struct to a module |
//! | [`module`], [`plan`], [`outputs`] | the trait, what `plan` sees, what it answers |
//! | [`view`] | bytes moved: the array algebra |
//! | [`cut`], [`tile`], [`pod`] | bytes computed: tile groups, one tile, its windows as numbers |
//! | [`kernels`] | the arithmetic of the shipped transforms |
//! | [`params`], [`error`] | parameter types, errors |
//! | [`abi`] | the specification of the interface, for any language |
//! | [`json`], [`wire`], `glue` | how the SDK speaks it |
//! | `native` | running a transform in its own tests |
//!
//! A module is built with `-C target-feature=+simd128` for
//! `wasm32-unknown-unknown`; on that target the SDK brings the allocator and
//! the panic handler. The host starts a fresh instance for every tile, so the
//! SDK keeps starting cheap: nothing is initialised, nothing is ever freed,
//! and JSON is read by a reader of its own.
#![cfg_attr(not(test), no_std)]

extern crate alloc;
// The attribute macro writes absolute paths, in this crate's own tests too.
extern crate self as weightmill_guest;

pub mod abi;
pub mod cut;
pub mod error;
#[cfg(target_arch = "wasm32")]
pub mod glue;
pub mod json;
pub mod kernels;
pub mod module;
#[cfg(not(target_arch = "wasm32"))]
pub mod native;
pub mod outputs;
pub mod params;
pub mod plan;
pub mod pod;
pub mod prelude;
pub mod tile;
pub mod view;
pub mod wire;

pub use weightmill_guest_macros::{Choice, transform};

/// Compiles the example of the authors' page.
#[cfg(doctest)]
#[doc = include_str!("../../transforms/README.md")]
struct AuthorsPage;
