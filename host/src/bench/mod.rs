//! Measurements, as ratios against a baseline in the same process.

mod cases;
pub mod checkpoint;
mod native;
mod plain;
pub mod registry;
pub mod store;
pub mod transform;
