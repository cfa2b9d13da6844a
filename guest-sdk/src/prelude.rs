//! Everything that a transform needs: `use weightmill_guest::prelude::*;`.

pub use alloc::string::{String, ToString};
pub use alloc::vec::Vec;
pub use alloc::{format, vec};
pub use core::num::NonZeroU64;

pub use weightmill_guest_macros::{Choice, transform};

pub use crate::abi::{Dtype, TileGroup, Tp};
pub use crate::cut::Cut;
pub use crate::error::{DataError, PlanError, Result};
pub use crate::module::{Module, Transform};
pub use crate::outputs::Outputs;
pub use crate::params::Choice;
pub use crate::plan::Plan;
pub use crate::pod::Pod;
pub use crate::tile::Tile;
pub use crate::view::Array;
