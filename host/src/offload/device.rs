//! What the offload core needs of a device.
//!
//! The trait has associated types instead of trait objects: a buffer, stream
//! or event of one device cannot be passed to another, handles free
//! themselves, and the per-chunk calls of the staging ring are direct calls.
//! The price is that the choice between devices is made once, at the call of a
//! generic function.
//!
//! # Ordering
//! Work on one stream runs in order; streams are ordered with each other, and
//! with the host, by events only. An event that was never recorded is
//! complete. A copy from pinned or registered memory is asynchronous: the
//! source must not change, or be unregistered, before the copy is done. A
//! device keeps memory alive for work in flight, so breaking this rule gives
//! wrong bytes, never an access to freed memory.

use std::sync::Arc;

use crate::error::Result;
use crate::mapping::FileMap;

use super::ranges::PageRange;

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// `host` or `cuda`.
    pub kind: &'static str,
    /// Its number among the devices of its kind.
    pub ordinal: usize,
    /// Its name, as its driver gives it.
    pub name: String,
    /// The driver's version, for the record of what was probed.
    pub driver: String,
    /// Whether it can register memory that it only reads, such as a shared,
    /// read-only mapping of a file (rung A).
    pub registers_read_only: bool,
    /// Whether it can register writable shared memory (rung B).
    pub registers_writable: bool,
    /// Whether the first registration is tried in a child process first.
    pub probe_registration: bool,
    /// Whether device and host share their memory.
    pub unified_memory: bool,
    /// Bytes of device memory.
    pub memory_bytes: u64,
}

/// How the device may use a registered range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// The mapping and the registration are read-only.
    ReadOnly,
    /// The mapping is writable, as devices without [`DeviceInfo::registers_read_only`]
    /// want it; nothing ever writes to it.
    ReadWrite,
}

/// Device memory.
pub trait Memory: Send + Sync + 'static {
    /// The address of the first byte in the device's address space.
    fn address(&self) -> u64;
    /// Size in bytes.
    fn len_bytes(&self) -> u64;
}

/// Page-locked host memory.
pub trait Pinned: Send + Sync + 'static {
    /// Lends the bytes for writing.
    ///
    /// # Errors
    /// Those of `fill`.
    fn fill(&mut self, fill: &mut dyn FnMut(&mut [u8]) -> Result<()>) -> Result<()>;
    /// Lends the bytes for reading.
    fn read(&self, read: &mut dyn FnMut(&[u8]));
}

/// A leaf of a tensor: where it lies in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Leaf {
    /// First byte in the buffer, a multiple of 16.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// A device with its own memory, streams and events.
pub trait Device: Send + Sync + 'static {
    /// Device memory. Freed on drop, after the device's work is done.
    type Memory: Memory;
    /// Page-locked host memory. Freed on drop, after the device's work is done.
    type Pinned: Pinned;
    /// A queue of work.
    type Stream: Send + Sync + 'static;
    /// A point in a stream's work.
    type Event: Send + Sync + 'static;
    /// A list of leaves in a form that the device reads.
    type LeafTable: Send + Sync + 'static;

    /// What this device is.
    fn info(&self) -> &DeviceInfo;

    /// Device memory with undefined content.
    ///
    /// # Errors
    /// `insufficient_memory`.
    fn allocate(&self, len_bytes: u64) -> Result<Self::Memory>;
    /// Several buffers at once, each beginning on a multiple of 256; a device
    /// may serve them from one allocation.
    ///
    /// # Errors
    /// `insufficient_memory`.
    fn allocate_all(&self, lens_bytes: &[u64]) -> Result<Vec<Self::Memory>> {
        lens_bytes.iter().map(|len| self.allocate(*len)).collect()
    }
    /// Page-locked memory of exactly `len_bytes`.
    ///
    /// # Errors
    /// `insufficient_memory`.
    fn allocate_pinned(&self, len_bytes: usize) -> Result<Self::Pinned>;
    /// A stream that does not wait for any other.
    ///
    /// # Errors
    /// `io_error`, as for all calls below unless they say otherwise.
    fn stream(&self) -> Result<Self::Stream>;
    /// An event; `timed` if [`Device::elapsed_ms`] will be asked about it.
    ///
    /// # Errors
    /// As above.
    fn event(&self, timed: bool) -> Result<Self::Event>;

    /// Registers a page range of a mapped file for copies.
    ///
    /// # Errors
    /// `registration_failed`.
    fn register(&self, map: &Arc<FileMap>, range: PageRange, access: Access) -> Result<()>;
    /// Takes a registration back. No copy from it may be in flight.
    ///
    /// # Errors
    /// `registration_failed`.
    fn unregister(&self, map: &Arc<FileMap>, range: PageRange) -> Result<()>;

    /// Marks the current end of `stream`.
    ///
    /// # Errors
    /// As above.
    fn record(&self, event: &Self::Event, stream: &Self::Stream) -> Result<()>;
    /// Makes later work of `stream` wait for what `event` marks now.
    ///
    /// # Errors
    /// As above.
    fn wait(&self, stream: &Self::Stream, event: &Self::Event) -> Result<()>;
    /// Blocks the caller until what `event` marks is done.
    ///
    /// # Errors
    /// As above; also a failure of the work itself.
    fn synchronize_event(&self, event: &Self::Event) -> Result<()>;
    /// Blocks the caller until all work of `stream` is done.
    ///
    /// # Errors
    /// As above; also a failure of the work itself.
    fn synchronize(&self, stream: &Self::Stream) -> Result<()>;
    /// Milliseconds between two timed events, both done.
    ///
    /// # Errors
    /// As above.
    fn elapsed_ms(&self, from: &Self::Event, to: &Self::Event) -> Result<f64>;

    /// Copies from a registered range, asynchronously.
    ///
    /// # Errors
    /// As above.
    fn copy_registered(
        &self,
        stream: &Self::Stream,
        map: &Arc<FileMap>,
        from: std::ops::Range<u64>,
        to: &Self::Memory,
        to_offset: u64,
    ) -> Result<()>;
    /// Copies the first `len` bytes of pinned memory, asynchronously.
    ///
    /// # Errors
    /// As above.
    fn copy_pinned(
        &self,
        stream: &Self::Stream,
        from: &Self::Pinned,
        len: usize,
        to: &Self::Memory,
        to_offset: u64,
    ) -> Result<()>;
    /// Copies from ordinary memory; `from` may be reused at return.
    ///
    /// # Errors
    /// As above.
    fn copy_pageable(&self, stream: &Self::Stream, from: &[u8], to: &Self::Memory, to_offset: u64) -> Result<()>;
    /// Copies device memory back, after the work that `stream` has so far;
    /// returns when it is there.
    ///
    /// # Errors
    /// As above.
    fn read_back(&self, stream: &Self::Stream, from: &Self::Memory, offset: u64, out: &mut [u8]) -> Result<()>;

    /// Says that a call has hung and may hold locks of the driver: from now on
    /// nothing is freed or destroyed, because that could hang as well.
    fn abandon(&self) {}

    /// Uploads lists of leaves, one for each block.
    ///
    /// # Errors
    /// `insufficient_memory`.
    fn leaf_tables(&self, leaves: &[&[Leaf]]) -> Result<Vec<Self::LeafTable>>;
    /// Hashes each leaf with SHA-256 and puts the raw hashes, one after the
    /// other, into `hashes` from `offset` on, asynchronously.
    ///
    /// # Errors
    /// As above.
    fn hash_leaves(
        &self,
        stream: &Self::Stream,
        memory: &Self::Memory,
        leaves: &Self::LeafTable,
        hashes: &Self::Pinned,
        offset: usize,
    ) -> Result<()>;
}
