//! A device in host memory: what is used where there is no GPU, and what the
//! tests run on.
//!
//! A stream is a thread with a queue; an event counts how often it was
//! recorded and reached. Work really is asynchronous, so a caller that breaks
//! the ordering rules reads wrong bytes here as it would on a GPU. A copy from
//! a registered range reads the file with `pread`, on several threads where
//! that pays, and never touches the mapping.

use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use rayon::prelude::*;

use crate::digest::{HASH_BYTES, sha256};
use crate::error::{Code, Error, Result};
use crate::mapping::FileMap;

use super::device::{Access, Device, DeviceInfo, Leaf, Memory, Pinned};
use super::ranges::PageRange;
use super::table::RegistrationTable;

/// A copy is divided over threads in pieces of this size.
const PIECE_BYTES: usize = 4 << 20;

/// The host as a device.
pub struct HostDevice {
    info: DeviceInfo,
    registered: RegistrationTable,
}

impl Default for HostDevice {
    fn default() -> Self {
        HostDevice::new(&[Access::ReadOnly, Access::ReadWrite])
    }
}

impl HostDevice {
    /// A host device that can register memory in the given ways.
    pub fn new(registers: &[Access]) -> Self {
        HostDevice {
            info: DeviceInfo {
                kind: "host",
                ordinal: 0,
                name: "host memory".into(),
                driver: "none".into(),
                registers_read_only: registers.contains(&Access::ReadOnly),
                registers_writable: registers.contains(&Access::ReadWrite),
                probe_registration: false,
                unified_memory: true,
                memory_bytes: u64::MAX,
            },
            registered: RegistrationTable::default(),
        }
    }

    /// Bytes that are registered now.
    pub fn registered_bytes(&self) -> u64 {
        self.registered.bytes()
    }

    /// Whether a range is registered whose mapping is gone: what must never be.
    pub fn has_dangling_registration(&self) -> bool {
        self.registered.has_dangling()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

type Bytes = Arc<RwLock<Vec<u8>>>;

fn zeroed(len: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| {
        Error::new(Code::InsufficientMemory, format!("{len} bytes of host memory could not be allocated"))
    })?;
    bytes.resize(len, 0);
    Ok(bytes)
}

/// "Device" memory of the host.
pub struct HostMemory {
    bytes: Bytes,
    address: u64,
    len: u64,
}

impl HostMemory {
    /// The bytes, in place. Work that writes to them waits until the guard is
    /// dropped.
    pub fn bytes(&self) -> RwLockReadGuard<'_, Vec<u8>> {
        self.bytes.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Memory for HostMemory {
    fn address(&self) -> u64 {
        self.address
    }

    fn len_bytes(&self) -> u64 {
        self.len
    }
}

/// "Pinned" memory of the host.
pub struct HostPinned(Bytes);

impl Pinned for HostPinned {
    fn fill(&mut self, fill: &mut dyn FnMut(&mut [u8]) -> Result<()>) -> Result<()> {
        fill(&mut self.0.write().unwrap_or_else(PoisonError::into_inner))
    }

    fn read(&self, read: &mut dyn FnMut(&[u8])) {
        read(&self.0.read().unwrap_or_else(PoisonError::into_inner));
    }
}

type Work = Box<dyn FnOnce() -> Result<()> + Send>;

/// A thread that works through a queue. The first failure is kept, and the
/// work behind it is skipped.
pub struct HostStream {
    queue: Option<Sender<Step>>,
    thread: Option<JoinHandle<()>>,
}

enum Step {
    Work(Work),
    Reach(Arc<HostEventState>, u64),
    Wait(Arc<HostEventState>, u64),
}

impl HostStream {
    fn start() -> Result<Self> {
        let (queue, steps) = channel::<Step>();
        let run = move || {
            let mut failed: Option<Error> = None;
            for step in steps {
                match step {
                    Step::Work(work) if failed.is_none() => failed = work().err(),
                    Step::Work(_) => {}
                    Step::Reach(event, ticket) => event.reach(ticket, failed.clone()),
                    Step::Wait(event, ticket) => {
                        if let Err(error) = event.wait_for(ticket) {
                            failed.get_or_insert(error);
                        }
                    }
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("host-stream".into())
            .spawn(run)
            .map_err(|e| Error::io("starting a stream's thread", e))?;
        Ok(HostStream { queue: Some(queue), thread: Some(thread) })
    }

    fn push(&self, step: Step) -> Result<()> {
        let queue = self.queue.as_ref().filter(|q| q.send(step).is_ok());
        queue.map(|_| ()).ok_or_else(|| Error::io("queueing work", "the stream has ended"))
    }
}

impl Drop for HostStream {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

/// A point in a stream's work.
#[derive(Default)]
pub struct HostEvent(Arc<HostEventState>);

#[derive(Default)]
struct HostEventState {
    counts: Mutex<Counts>,
    changed: Condvar,
}

#[derive(Default)]
struct Counts {
    recorded: u64,
    reached: u64,
    at: Option<Instant>,
    failed: Option<Error>,
}

impl HostEventState {
    fn next_ticket(&self) -> u64 {
        let mut counts = lock(&self.counts);
        counts.recorded += 1;
        counts.recorded
    }

    fn reach(&self, ticket: u64, failed: Option<Error>) {
        let mut counts = lock(&self.counts);
        counts.reached = counts.reached.max(ticket);
        counts.at = Some(Instant::now());
        counts.failed = failed;
        self.changed.notify_all();
    }

    fn wait_for(&self, ticket: u64) -> Result<()> {
        let mut counts = lock(&self.counts);
        while counts.reached < ticket {
            counts = self.changed.wait(counts).unwrap_or_else(PoisonError::into_inner);
        }
        counts.failed.clone().map_or(Ok(()), Err)
    }
}

/// Leaves, as they are.
pub struct HostLeafTable(Arc<[Leaf]>);

impl Device for HostDevice {
    type Memory = HostMemory;
    type Pinned = HostPinned;
    type Stream = HostStream;
    type Event = HostEvent;
    type LeafTable = HostLeafTable;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn allocate(&self, len_bytes: u64) -> Result<HostMemory> {
        let bytes = zeroed(usize::try_from(len_bytes).unwrap_or(usize::MAX))?;
        Ok(HostMemory { address: bytes.as_ptr().addr() as u64, len: len_bytes, bytes: Arc::new(RwLock::new(bytes)) })
    }

    fn allocate_pinned(&self, len_bytes: usize) -> Result<HostPinned> {
        Ok(HostPinned(Arc::new(RwLock::new(zeroed(len_bytes)?))))
    }

    fn stream(&self) -> Result<HostStream> {
        HostStream::start()
    }

    fn event(&self, _timed: bool) -> Result<HostEvent> {
        Ok(HostEvent::default())
    }

    fn register(&self, map: &Arc<FileMap>, range: PageRange, access: Access) -> Result<()> {
        self.registered.check_new(&self.info, map, range, access)?;
        self.registered.insert(map, range);
        Ok(())
    }

    fn unregister(&self, map: &Arc<FileMap>, range: PageRange) -> Result<()> {
        self.registered.check_known(map, range)?;
        self.registered.remove(map, range);
        Ok(())
    }

    fn record(&self, event: &HostEvent, stream: &HostStream) -> Result<()> {
        stream.push(Step::Reach(event.0.clone(), event.0.next_ticket()))
    }

    fn wait(&self, stream: &HostStream, event: &HostEvent) -> Result<()> {
        let ticket = lock(&event.0.counts).recorded;
        stream.push(Step::Wait(event.0.clone(), ticket))
    }

    fn synchronize_event(&self, event: &HostEvent) -> Result<()> {
        let ticket = lock(&event.0.counts).recorded;
        event.0.wait_for(ticket)
    }

    fn synchronize(&self, stream: &HostStream) -> Result<()> {
        let event = HostEvent::default();
        self.record(&event, stream)?;
        self.synchronize_event(&event)
    }

    fn elapsed_ms(&self, from: &HostEvent, to: &HostEvent) -> Result<f64> {
        let at = |e: &HostEvent| lock(&e.0.counts).at;
        match (at(from), at(to)) {
            (Some(from), Some(to)) => Ok(to.saturating_duration_since(from).as_secs_f64() * 1e3),
            _ => Err(Error::io("timing two events", "one of them was never reached")),
        }
    }

    fn copy_registered(
        &self,
        stream: &HostStream,
        map: &Arc<FileMap>,
        from: Range<u64>,
        to: &HostMemory,
        to_offset: u64,
    ) -> Result<()> {
        self.registered.check_copy(map, &from)?;
        let len = from.end - from.start;
        let (map, target, at) = (map.clone(), to.bytes.clone(), place(to, to_offset, len)?);
        stream.push(Step::Work(Box::new(move || {
            let mut bytes = target.write().unwrap_or_else(PoisonError::into_inner);
            bytes[at].par_chunks_mut(PIECE_BYTES).enumerate().try_for_each(|(i, piece)| {
                let offset = from.start + (i * PIECE_BYTES) as u64;
                map.file()
                    .read_exact_at(piece, offset)
                    .map_err(|e| Error::io(format_args!("reading {} at {offset}", map.path().display()), e))
            })
        })))
    }

    fn copy_pinned(
        &self,
        stream: &HostStream,
        from: &HostPinned,
        len: usize,
        to: &HostMemory,
        to_offset: u64,
    ) -> Result<()> {
        let (source, target, at) = (from.0.clone(), to.bytes.clone(), place(to, to_offset, len as u64)?);
        stream.push(Step::Work(Box::new(move || {
            let source = source.read().unwrap_or_else(PoisonError::into_inner);
            target.write().unwrap_or_else(PoisonError::into_inner)[at].copy_from_slice(&source[..len]);
            Ok(())
        })))
    }

    fn copy_pageable(&self, stream: &HostStream, from: &[u8], to: &HostMemory, to_offset: u64) -> Result<()> {
        self.synchronize(stream)?;
        let at = place(to, to_offset, from.len() as u64)?;
        to.bytes.write().unwrap_or_else(PoisonError::into_inner)[at].copy_from_slice(from);
        Ok(())
    }

    fn read_back(&self, stream: &HostStream, from: &HostMemory, offset: u64, out: &mut [u8]) -> Result<()> {
        self.synchronize(stream)?;
        out.copy_from_slice(&from.bytes()[place(from, offset, out.len() as u64)?]);
        Ok(())
    }

    fn leaf_tables(&self, leaves: &[&[Leaf]]) -> Result<Vec<HostLeafTable>> {
        Ok(leaves.iter().map(|leaves| HostLeafTable((*leaves).into())).collect())
    }

    fn hash_leaves(
        &self,
        stream: &HostStream,
        memory: &HostMemory,
        leaves: &HostLeafTable,
        hashes: &HostPinned,
        offset: usize,
    ) -> Result<()> {
        let (memory, leaves, hashes) = (memory.bytes.clone(), leaves.0.clone(), hashes.0.clone());
        stream.push(Step::Work(Box::new(move || {
            let memory = memory.read().unwrap_or_else(PoisonError::into_inner);
            let hash = |leaf: &Leaf| sha256(&memory[leaf.offset as usize..][..leaf.len as usize]);
            // Not under the lock of `hashes`, which holds other blocks' as well.
            let found: Vec<[u8; HASH_BYTES]> = leaves.par_iter().map(hash).collect();
            let mut hashes = hashes.write().unwrap_or_else(PoisonError::into_inner);
            hashes[offset..offset + found.len() * HASH_BYTES].copy_from_slice(found.as_flattened());
            Ok(())
        })))
    }
}

/// The bounds of `len` bytes from `offset`, if they are in `memory`.
fn place(memory: &HostMemory, offset: u64, len: u64) -> Result<Range<usize>> {
    match offset.checked_add(len) {
        Some(end) if end <= memory.len => Ok(offset as usize..end as usize),
        _ => Err(Error::io("copying", format!("{len} bytes at {offset} are not in a buffer of {}", memory.len))),
    }
}
