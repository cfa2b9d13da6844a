//! Recycled buffers. Fresh memory costs a page fault for every 4 KiB, which is
//! slower than the copying and hashing done in it.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// A free list of buffers, shared by the threads of one execution.
#[derive(Clone, Debug, Default)]
pub(crate) struct Buffers(Arc<Mutex<Vec<Vec<u8>>>>);

/// A buffer of a wanted length, with arbitrary content, that goes back to its
/// list when dropped.
#[derive(Debug)]
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    len: usize,
    home: Buffers,
}

impl Buffers {
    /// A buffer of `len` bytes: of the smallest free ones that are large enough
    /// the one that was used last, which is most likely in a cache.
    pub(crate) fn take(&self, len: usize) -> Buffer {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let best = free.iter().enumerate().rev().filter(|(_, b)| b.len() >= len).min_by_key(|(_, b)| b.len());
        let best = best.map(|(i, _)| i).filter(|&i| free[i].len() / 4 <= len.max(1 << 16));
        let bytes = best.map(|i| free.remove(i));
        drop(free);
        Buffer { bytes: bytes.unwrap_or_else(|| vec![0; len]), len, home: self.clone() }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        const KEEP: usize = 64;
        const LARGE_BYTES: usize = 8 << 20;
        /// One wide segment is made at a time: what it reads and what it writes.
        const KEEP_LARGE: usize = 2;
        let mut free = self.home.0.lock().unwrap_or_else(PoisonError::into_inner);
        let large = free.iter().filter(|b| b.len() > LARGE_BYTES).count();
        if free.len() < KEEP && (self.bytes.len() <= LARGE_BYTES || large < KEEP_LARGE) {
            free.push(std::mem::take(&mut self.bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_and_have_the_wanted_length() {
        let buffers = Buffers::default();
        let first = buffers.take(1 << 20);
        let address = first.as_ptr();
        drop(first);
        let again = buffers.take((1 << 20) - 5);
        assert_eq!((again.as_ptr(), again.len()), (address, (1 << 20) - 5));
        assert_eq!(buffers.take(10).len(), 10);
    }

    #[test]
    fn the_buffer_that_was_used_last_is_taken_first() {
        let buffers = Buffers::default();
        let held: Vec<Buffer> = (0..3).map(|_| buffers.take(4096)).collect();
        let last = held[2].as_ptr();
        held.into_iter().for_each(drop);
        assert_eq!(buffers.take(4096).as_ptr(), last);
    }

    #[test]
    fn few_large_buffers_are_kept() {
        let buffers = Buffers::default();
        let held: Vec<Buffer> = (0..4).map(|_| buffers.take(9 << 20)).collect();
        held.into_iter().for_each(drop);
        assert_eq!(buffers.0.lock().unwrap().len(), 2);
    }
}
