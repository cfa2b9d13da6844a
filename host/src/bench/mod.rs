//! Measurements, as ratios against a baseline in the same process.

pub mod checkpoint;
pub mod transform;
