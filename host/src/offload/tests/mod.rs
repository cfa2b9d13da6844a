//! Streaming as a whole, on the host device and on one that fails.

mod failures;
pub(super) mod model;
mod streaming;
