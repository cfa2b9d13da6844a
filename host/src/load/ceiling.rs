//! The most that the link gives: what every other rate is held against.

use std::time::Instant;

use crate::error::Result;
use crate::offload::{Device, Memory};

/// Copies pinned memory to the device over and over, and says how fast that
/// went, in 10⁹ bytes a second: the best of a few rounds.
///
/// # Errors
/// `insufficient_memory`, or a failure of a copy.
pub fn ceiling_gb_per_s<D: Device>(device: &D) -> Result<f64> {
    const BUFFER_BYTES: usize = 64 << 20;
    const COPIES: usize = 8;
    const ROUNDS: usize = 3;
    let mut pinned = device.allocate_pinned(BUFFER_BYTES)?;
    // Untouched memory would be measured as page faults.
    crate::offload::Pinned::fill(&mut pinned, &mut |bytes| {
        bytes.fill(0x5A);
        Ok(())
    })?;
    let memory = device.allocate(BUFFER_BYTES as u64)?;
    let stream = device.stream()?;
    device.copy_pinned(&stream, &pinned, BUFFER_BYTES, &memory, 0)?;
    device.synchronize(&stream)?;
    let mut best = 0.0_f64;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        for _ in 0..COPIES {
            device.copy_pinned(&stream, &pinned, BUFFER_BYTES, &memory, 0)?;
        }
        device.synchronize(&stream)?;
        best = best.max((COPIES as u64 * memory.len_bytes()) as f64 / start.elapsed().as_secs_f64() / 1e9);
    }
    Ok(best)
}
