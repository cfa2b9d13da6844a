//! Staging: rungs C and D.
//!
//! Each thread owns a few buffers and uses them in turn: wait until the copy
//! out of this buffer is done, fill it (`pread`, or computed on the fly),
//! queue its copy. Buffers are small, so that what a thread writes is still in
//! the CPU's cache when the device reads it; many threads are needed, because
//! one core copies a fraction of what the link takes. Copies of one block may
//! be queued in any order; the block is delivered when the last one is.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::error::{Code, Error, Result};

use super::device::{Device, Pinned};
use super::options::Rung;
use super::shared::{Delivery, Shared};
use super::sources::ring_depth;
use super::trace::Track;

/// A part of a segment that fits a staging buffer.
pub(super) struct Task<D: Device> {
    pub(super) delivery: Arc<Delivery<D>>,
    pub(super) segment: usize,
    pub(super) offset: u64,
    pub(super) len: usize,
    pub(super) to: u64,
}

/// The staging threads.
pub(super) struct Staging<D: Device> {
    queue: Arc<Queue<D>>,
    threads: Vec<JoinHandle<()>>,
    chunk: usize,
}

struct Queue<D: Device> {
    tasks: Mutex<(VecDeque<Task<D>>, bool)>,
    changed: Condvar,
}

/// What a thread stages through. Pinned buffers are allocated when they are
/// first needed, so that the first copies do not wait for all of them; a
/// thread that gets none falls back to ordinary memory.
enum Buffers<D: Device> {
    Pinned { ring: Vec<(D::Pinned, D::Event)>, next: usize, depth: usize },
    Pageable(Vec<u8>),
}

impl<D: Device> Staging<D> {
    /// Starts the threads; pins at most `budget` bytes.
    pub(super) fn start(shared: &Arc<Shared<D>>, rung: Rung, budget: u64) -> Result<Self> {
        let options = &shared.options;
        let chunk = usize::try_from(options.chunk_bytes.min(shared.largest_segment())).unwrap_or(usize::MAX);
        let queue = Arc::new(Queue { tasks: Mutex::new((VecDeque::new(), false)), changed: Condvar::new() });
        let mut staging = Staging { queue, threads: Vec::new(), chunk: chunk.max(1) };
        let (threads, depth) = match rung {
            Rung::D => (1, 0),
            _ => ring_depth(budget, options, options.staging_threads()),
        };
        for _ in 0..threads {
            let (queue, shared, chunk) = (staging.queue.clone(), shared.clone(), staging.chunk);
            let thread = std::thread::Builder::new()
                .name("staging".into())
                .spawn(move || work(&queue, &shared, Buffers::new(depth, chunk), chunk))
                .map_err(|e| Error::io("starting a staging thread", e))?;
            staging.threads.push(thread);
        }
        Ok(staging)
    }

    /// Queues a segment of `delivery`'s block, in tasks of one buffer each.
    pub(super) fn push(&self, delivery: &Arc<Delivery<D>>, segment: usize, len: u64, to: u64) {
        let step = self.chunk as u64;
        let mut queue = self.queue.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        for offset in (0..len).step_by(self.chunk) {
            delivery.expect_one_more();
            let len = step.min(len - offset) as usize;
            queue.0.push_back(Task { delivery: delivery.clone(), segment, offset, len, to: to + offset });
        }
        drop(queue);
        self.queue.changed.notify_all();
    }
}

impl<D: Device> Drop for Staging<D> {
    fn drop(&mut self) {
        self.queue.tasks.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
        self.queue.changed.notify_all();
        for thread in self.threads.drain(..) {
            thread.join().ok();
        }
    }
}

impl<D: Device> Queue<D> {
    /// The next task; `None` when the queue is closed and empty.
    fn pop(&self) -> Option<Task<D>> {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(task) = tasks.0.pop_front() {
                return Some(task);
            }
            if tasks.1 {
                return None;
            }
            tasks = self.changed.wait(tasks).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn work<D: Device>(queue: &Queue<D>, shared: &Shared<D>, mut buffers: Buffers<D>, chunk: usize) {
    while let Some(task) = queue.pop() {
        // Once the stream has failed, or stops, tasks are only counted off.
        let done = match shared.is_stopping() {
            true => Ok(0),
            // A panic of a packing source must reach the consumer as an error.
            false => catch_unwind(AssertUnwindSafe(|| stage(shared, &task, &mut buffers, chunk)))
                .unwrap_or_else(|_| Err(Error::io("packing a block", "the source of its bytes panicked")))
                .map(|()| task.len as u64),
        };
        task.delivery.piece_done(shared, done);
    }
}

impl<D: Device> Buffers<D> {
    fn new(depth: usize, chunk: usize) -> Self {
        match depth {
            0 => Buffers::Pageable(vec![0; chunk]),
            _ => Buffers::Pinned { ring: Vec::with_capacity(depth), next: 0, depth },
        }
    }

    /// Makes sure that the next buffer is there.
    fn grow(&mut self, shared: &Shared<D>, chunk: usize) -> Result<()> {
        let Buffers::Pinned { ring, next, depth } = self else { return Ok(()) };
        if *next < ring.len() {
            return Ok(());
        }
        match shared.device.allocate_pinned(chunk) {
            Ok(pinned) => {
                ring.push((pinned, shared.device.event(false)?));
                shared.pinned_bytes.fetch_add(chunk as u64, Ordering::Relaxed);
            }
            Err(error) if error.code() != Code::InsufficientMemory || shared.options.only == Some(Rung::C) => {
                return Err(error);
            }
            Err(_) if ring.is_empty() => *self = Buffers::new(0, chunk),
            Err(_) => {
                *depth = ring.len();
                *next = 0;
            }
        }
        Ok(())
    }
}

fn stage<D: Device>(shared: &Shared<D>, task: &Task<D>, buffers: &mut Buffers<D>, chunk: usize) -> Result<()> {
    let content = &shared.blocks[task.delivery.block].spec.segments[task.segment].content;
    let memory = &shared.slots[task.delivery.slot].memory;
    let device = &shared.device;
    buffers.grow(shared, chunk)?;
    match buffers {
        Buffers::Pageable(buffer) => {
            content.read(task.offset, &mut buffer[..task.len])?;
            device.copy_pageable(&shared.copy, &buffer[..task.len], memory, task.to)
        }
        Buffers::Pinned { ring, next, depth } => {
            let (pinned, event) = &mut ring[*next];
            *next = (*next + 1) % *depth;
            device.synchronize_event(event)?;
            let start = Instant::now();
            pinned.fill(&mut |bytes| content.read(task.offset, &mut bytes[..task.len]))?;
            if let Some(trace) = &shared.options.trace {
                trace.host(Track::Staging, "fill", start, task.len as u64);
            }
            device.copy_pinned(&shared.copy, pinned, task.len, memory, task.to)?;
            device.record(event, &shared.copy)
        }
    }
}
