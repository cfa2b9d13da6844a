//! A CUDA device, through the driver API.
//!
//! The driver is loaded at run time: the same program runs where there is no
//! CUDA, and says so. The primary context is used, which is the one that
//! frameworks in the same process use. Every call sets it current first,
//! because calls come from many threads.
//!
//! Everything that is freed waits for the context's work before, so that no
//! copy in flight ever meets freed memory; only teardown frees. After
//! [`Device::abandon`] nothing is freed at all.
//!
//! This file decides what is called; [`driver`] holds the calls themselves.

mod driver;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::digest::HASH_BYTES;
use crate::error::{Code, Error, Result};
use crate::mapping::FileMap;

use super::device::{Access, Device, DeviceInfo, Leaf, Memory, Pinned};
use super::ranges::PageRange;
use super::table::{RegistrationTable, refused};

use driver::{Allocation, Context, HostAllocation, Kernel};
pub use driver::{CudaEvent, CudaStream, exit_without_cleanup};

/// The kernel that hashes leaves, made from `leaf_sha256.cu` beside it.
const LEAF_SHA256_PTX: &str = include_str!("../kernels/leaf_sha256.ptx");
/// Threads of a block of that kernel: one warp, so that few leaves already
/// spread over all multiprocessors.
const LEAVES_PER_BLOCK: u32 = 32;

/// A CUDA device.
pub struct CudaDevice {
    // Before the context, which must outlive it.
    leaf_sha256: Kernel,
    uploads: CudaStream,
    registered: RegistrationTable,
    context: Arc<Context>,
    info: DeviceInfo,
}

impl CudaDevice {
    /// Opens a device by its number.
    ///
    /// # Errors
    /// `no_device` if there is no driver, or no such device.
    pub fn open(ordinal: usize) -> Result<Self> {
        let (context, info) = Context::open(ordinal)?;
        let context = Arc::new(context);
        let leaf_sha256 = Kernel::load(&context, LEAF_SHA256_PTX, "leaf_sha256")?;
        let uploads = CudaStream::new(&context)?;
        Ok(CudaDevice { leaf_sha256, uploads, registered: RegistrationTable::default(), context, info })
    }

    /// Bytes that are registered now.
    pub fn registered_bytes(&self) -> u64 {
        self.registered.bytes()
    }
}

/// Device memory: a part of an allocation.
pub struct CudaMemory {
    allocation: Arc<Allocation>,
    offset: u64,
    len: u64,
}

impl Memory for CudaMemory {
    fn address(&self) -> u64 {
        self.allocation.address() + self.offset
    }

    fn len_bytes(&self) -> u64 {
        self.len
    }
}

/// Page-locked memory.
pub struct CudaPinned(HostAllocation);

impl Pinned for CudaPinned {
    fn fill(&mut self, fill: &mut dyn FnMut(&mut [u8]) -> Result<()>) -> Result<()> {
        fill(self.0.bytes_mut())
    }

    fn read(&self, read: &mut dyn FnMut(&[u8])) {
        read(self.0.bytes());
    }
}

/// A block's leaves in device memory, and room for their hashes; all blocks'
/// tables are in one allocation.
pub struct CudaLeafTable {
    _allocation: Arc<Allocation>,
    leaves_at: u64,
    hashes_at: u64,
    count: u32,
}

impl Device for CudaDevice {
    type Memory = CudaMemory;
    type Pinned = CudaPinned;
    type Stream = CudaStream;
    type Event = CudaEvent;
    type LeafTable = CudaLeafTable;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn allocate(&self, len_bytes: u64) -> Result<CudaMemory> {
        Ok(CudaMemory { allocation: Arc::new(Allocation::new(&self.context, len_bytes)?), offset: 0, len: len_bytes })
    }

    /// One allocation for all: an allocation costs a fraction of a millisecond,
    /// in which the link could copy megabytes.
    fn allocate_all(&self, lens_bytes: &[u64]) -> Result<Vec<CudaMemory>> {
        let mut total = 0_u64;
        let mut places = Vec::with_capacity(lens_bytes.len());
        for len in lens_bytes {
            places.push((total, *len));
            total = len.checked_next_multiple_of(4096).and_then(|len| total.checked_add(len)).ok_or_else(|| {
                Error::new(Code::InsufficientMemory, "the device buffers are larger than the address space")
            })?;
        }
        if places.is_empty() {
            return Ok(Vec::new());
        }
        let allocation = Arc::new(Allocation::new(&self.context, total)?);
        let memory = |(offset, len)| CudaMemory { allocation: allocation.clone(), offset, len };
        Ok(places.into_iter().map(memory).collect())
    }

    fn allocate_pinned(&self, len_bytes: usize) -> Result<CudaPinned> {
        Ok(CudaPinned(HostAllocation::new(&self.context, len_bytes)?))
    }

    fn stream(&self) -> Result<CudaStream> {
        CudaStream::new(&self.context)
    }

    fn event(&self, timed: bool) -> Result<CudaEvent> {
        CudaEvent::new(&self.context, timed)
    }

    fn register(&self, map: &Arc<FileMap>, range: PageRange, access: Access) -> Result<()> {
        self.registered.check_new(&self.info, map, range, access)?;
        driver::register(&self.context, map, range, access).map_err(|why| refused(map, range, &why))?;
        self.registered.insert(map, range);
        Ok(())
    }

    fn unregister(&self, map: &Arc<FileMap>, range: PageRange) -> Result<()> {
        self.registered.check_known(map, range)?;
        driver::unregister(&self.context, map, range).map_err(|why| refused(map, range, &why))?;
        self.registered.remove(map, range);
        Ok(())
    }

    fn record(&self, event: &CudaEvent, stream: &CudaStream) -> Result<()> {
        event.record(stream)
    }

    fn wait(&self, stream: &CudaStream, event: &CudaEvent) -> Result<()> {
        stream.wait(event)
    }

    fn synchronize_event(&self, event: &CudaEvent) -> Result<()> {
        event.synchronize()
    }

    fn synchronize(&self, stream: &CudaStream) -> Result<()> {
        stream.synchronize()
    }

    fn elapsed_ms(&self, from: &CudaEvent, to: &CudaEvent) -> Result<f64> {
        from.elapsed_ms(to)
    }

    fn copy_registered(
        &self,
        stream: &CudaStream,
        map: &Arc<FileMap>,
        from: Range<u64>,
        to: &CudaMemory,
        to_offset: u64,
    ) -> Result<()> {
        self.registered.check_copy(map, &from)?;
        let target = place(to, to_offset, from.end - from.start)?;
        driver::copy_mapped(stream, map, from, target)
    }

    fn copy_pinned(
        &self,
        stream: &CudaStream,
        from: &CudaPinned,
        len: usize,
        to: &CudaMemory,
        to_offset: u64,
    ) -> Result<()> {
        let Some(bytes) = from.0.bytes().get(..len) else {
            return Err(Error::io(
                "copying",
                format!("{len} bytes are not in a pinned buffer of {}", from.0.bytes().len()),
            ));
        };
        driver::copy_to_device(stream, bytes, place(to, to_offset, len as u64)?)
    }

    fn copy_pageable(&self, stream: &CudaStream, from: &[u8], to: &CudaMemory, to_offset: u64) -> Result<()> {
        // The driver has copied pageable memory to a buffer of its own when
        // this returns.
        driver::copy_to_device(stream, from, place(to, to_offset, from.len() as u64)?)
    }

    fn read_back(&self, stream: &CudaStream, from: &CudaMemory, offset: u64, out: &mut [u8]) -> Result<()> {
        driver::copy_to_host(stream, place(from, offset, out.len() as u64)?, out)
    }

    fn abandon(&self) {
        self.context.abandoned.store(true, Ordering::Relaxed);
    }

    fn leaf_tables(&self, leaves: &[&[Leaf]]) -> Result<Vec<CudaLeafTable>> {
        let count: usize = leaves.iter().map(|leaves| leaves.len()).sum();
        let mut table = Vec::with_capacity(count * size_of::<Leaf>());
        for leaf in leaves.iter().copied().flatten() {
            table.extend_from_slice(&leaf.offset.to_le_bytes());
            table.extend_from_slice(&leaf.len.to_le_bytes());
        }
        let hash_bytes = count * HASH_BYTES;
        let memory = Arc::new(Allocation::new(&self.context, (table.len() + hash_bytes).max(1) as u64)?);
        driver::copy_to_device(&self.uploads, &table, memory.address())?;
        self.uploads.synchronize()?;
        let (mut leaves_at, mut hashes_at) = (memory.address(), memory.address() + table.len() as u64);
        let mut tables = Vec::with_capacity(leaves.len());
        for leaves in leaves {
            let count = u32::try_from(leaves.len())
                .map_err(|_| Error::new(Code::InsufficientMemory, format!("a block has {} leaves", leaves.len())))?;
            tables.push(CudaLeafTable { _allocation: memory.clone(), leaves_at, hashes_at, count });
            leaves_at += size_of_val(*leaves) as u64;
            hashes_at += (leaves.len() * HASH_BYTES) as u64;
        }
        Ok(tables)
    }

    fn hash_leaves(
        &self,
        stream: &CudaStream,
        memory: &CudaMemory,
        leaves: &CudaLeafTable,
        hashes: &CudaPinned,
        offset: usize,
    ) -> Result<()> {
        if leaves.count == 0 {
            return Ok(());
        }
        let grid = (leaves.count.div_ceil(LEAVES_PER_BLOCK), LEAVES_PER_BLOCK);
        self.leaf_sha256.launch(stream, grid, memory.address(), leaves)?;
        driver::copy_to_pinned(stream, leaves.hashes_at, &hashes.0, offset, leaves.count as usize * HASH_BYTES)
    }
}

/// The device address of `len` bytes at `offset`, if they are in `memory`.
fn place(memory: &CudaMemory, offset: u64, len: u64) -> Result<u64> {
    match offset.checked_add(len) {
        Some(end) if end <= memory.len => Ok(memory.address() + offset),
        _ => Err(Error::io("copying", format!("{len} bytes at {offset} are not in a buffer of {}", memory.len))),
    }
}

#[cfg(test)]
mod tests;
