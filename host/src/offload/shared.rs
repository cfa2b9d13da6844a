//! What the feeder, the staging threads and the consumer share.
//!
//! # The life of a slot
//! free → the copy stream waits for the slot's `release` event → copies are
//! queued → `ready` is recorded → (verify stream waits for `ready`, hashes,
//! `verified` is recorded) → a [`Message::Ready`] goes to the consumer → the
//! compute stream waits for `ready` → the consumer works → `release` is
//! recorded on the compute stream → the slot's number goes back to the feeder.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::digest::HASH_BYTES;
use crate::error::{Error, Result};

use super::block::Block;
use super::device::{Device, Pinned};
use super::options::StreamOptions;
use super::trace::{Trace, Track};

/// A device buffer and its events.
pub(super) struct Slot<D: Device> {
    pub(super) memory: D::Memory,
    /// On the copy stream: the block is there.
    pub(super) ready: D::Event,
    /// On the compute stream: the consumer's work is done.
    pub(super) release: D::Event,
    /// On the verify stream: the hashes are there.
    pub(super) verified: D::Event,
    /// Its part of [`Shared::hashes`].
    pub(super) hashes_at: usize,
}

/// What the feeder's side tells the consumer's.
pub(super) enum Message {
    Ready(Ready),
    Failed(Error),
}

/// A block whose copies are queued.
#[derive(Clone, Copy)]
pub(super) struct Ready {
    /// Deliveries are counted from 0 on, in the order of the consumer.
    pub(super) sequence: u64,
    pub(super) epoch: u64,
    pub(super) block: usize,
    pub(super) slot: usize,
    pub(super) bytes: u64,
    pub(super) copies: u64,
}

pub(super) struct Shared<D: Device> {
    pub(super) device: Arc<D>,
    pub(super) options: StreamOptions,
    pub(super) blocks: Vec<Block>,
    /// For each block, its leaves on the device, if blocks are verified.
    pub(super) tables: Vec<D::LeafTable>,
    /// Where the hashes of what is in the slots arrive.
    pub(super) hashes: Option<D::Pinned>,
    /// First the rotating ones, then one for each resident block.
    pub(super) slots: Vec<Slot<D>>,
    pub(super) copy: D::Stream,
    pub(super) verify: D::Stream,
    pub(super) compute: D::Stream,
    /// Changes when a pass is abandoned: what was fed for it is stale.
    pub(super) epoch: AtomicU64,
    pub(super) stop: AtomicBool,
    pub(super) failed: AtomicBool,
    pub(super) h2d_bytes: AtomicU64,
    pub(super) h2d_copies: AtomicU64,
    /// Of staging buffers.
    pub(super) pinned_bytes: AtomicU64,
    pub(super) to_consumer: Sender<Message>,
    pub(super) timeline: Option<Timeline<D>>,
}

impl<D: Device> Shared<D> {
    pub(super) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.failed.load(Ordering::Relaxed)
    }

    /// Ends the stream: the consumer gets `error`, nothing else is queued.
    pub(super) fn fail(&self, error: Error) {
        self.failed.store(true, Ordering::Relaxed);
        self.to_consumer.send(Message::Failed(error)).ok();
    }

    /// Waits for the hashes of what is in a slot and compares them with the
    /// block's.
    pub(super) fn check_hashes(&self, slot: &Slot<D>, block: &Block) -> Result<()> {
        let Some(hashes) = &self.hashes else { return Ok(()) };
        self.device.synchronize_event(&slot.verified)?;
        let mut compared = Ok(());
        let len = block.leaves.len() * HASH_BYTES;
        hashes.read(&mut |bytes| compared = block.compare(&bytes[slot.hashes_at..slot.hashes_at + len]));
        compared
    }

    pub(super) fn largest_segment(&self) -> u64 {
        self.blocks.iter().flat_map(|b| &b.spec.segments).map(|s| s.len).max().unwrap_or(0)
    }
}

/// A block on its way into a slot. It is delivered when the feeder and all
/// staging tasks are done with it.
pub(super) struct Delivery<D: Device> {
    pub(super) sequence: u64,
    pub(super) epoch: u64,
    pub(super) block: usize,
    pub(super) slot: usize,
    pending: AtomicUsize,
    bytes: AtomicU64,
    copies: AtomicU64,
    began: Mutex<Option<D::Event>>,
}

impl<D: Device> Delivery<D> {
    /// A delivery with one thing pending: the feeder itself.
    pub(super) fn begin(shared: &Shared<D>, sequence: u64, epoch: u64, block: usize, slot: usize) -> Result<Self> {
        shared.device.wait(&shared.copy, &shared.slots[slot].release)?;
        let began = match &shared.timeline {
            Some(timeline) => Some(timeline.mark(&shared.device, &shared.copy)?),
            None => None,
        };
        let pending = AtomicUsize::new(1);
        Ok(Delivery {
            sequence,
            epoch,
            block,
            slot,
            pending,
            bytes: 0.into(),
            copies: 0.into(),
            began: Mutex::new(began),
        })
    }

    pub(super) fn expect_one_more(&self) {
        self.pending.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a queued copy.
    pub(super) fn count_copy(&self, shared: &Shared<D>, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.copies.fetch_add(1, Ordering::Relaxed);
        shared.h2d_bytes.fetch_add(bytes, Ordering::Relaxed);
        shared.h2d_copies.fetch_add(1, Ordering::Relaxed);
        if let Some(progress) = &shared.options.progress {
            progress.advance(bytes);
        }
    }

    /// One of the pending things is done; the last one delivers the block.
    pub(super) fn piece_done(&self, shared: &Shared<D>, copied: Result<u64>) {
        match copied {
            Ok(0) => {}
            Ok(bytes) => self.count_copy(shared, bytes),
            Err(error) => shared.fail(error.context(format_args!("block '{}'", shared.blocks[self.block].spec.name))),
        }
        // Release and acquire, so that whoever delivers sees all queued copies.
        if self.pending.fetch_sub(1, Ordering::AcqRel) == 1
            && !shared.is_stopping()
            && let Err(error) = self.deliver(shared)
        {
            shared.fail(error);
        }
    }

    fn deliver(&self, shared: &Shared<D>) -> Result<()> {
        let (device, slot, block) = (&shared.device, &shared.slots[self.slot], &shared.blocks[self.block]);
        device.record(&slot.ready, &shared.copy)?;
        let bytes = self.bytes.load(Ordering::Relaxed);
        let name = &block.spec.name;
        let began = self.began.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let (Some(timeline), Some(began)) = (&shared.timeline, began) {
            timeline.end(device, &shared.copy, Track::Copy, name, began, bytes)?;
        }
        if let (Some(hashes), Some(table)) = (&shared.hashes, shared.tables.get(self.block)) {
            device.wait(&shared.verify, &slot.ready)?;
            let began = match &shared.timeline {
                Some(timeline) => Some(timeline.mark(device, &shared.verify)?),
                None => None,
            };
            device.hash_leaves(&shared.verify, &slot.memory, table, hashes, slot.hashes_at)?;
            device.record(&slot.verified, &shared.verify)?;
            if let (Some(timeline), Some(began)) = (&shared.timeline, began) {
                timeline.end(device, &shared.verify, Track::Verify, name, began, bytes)?;
            }
        }
        let ready = Ready {
            sequence: self.sequence,
            epoch: self.epoch,
            block: self.block,
            slot: self.slot,
            bytes,
            copies: self.copies.load(Ordering::Relaxed),
        };
        shared.to_consumer.send(Message::Ready(ready)).ok();
        Ok(())
    }
}

/// Spans that the device timed. Their events are resolved when the device is
/// idle.
pub(super) struct Timeline<D: Device> {
    trace: Arc<Trace>,
    origin: (Instant, D::Event),
    open: Mutex<Vec<Timed<D>>>,
}

struct Timed<D: Device> {
    track: Track,
    name: String,
    began: D::Event,
    ended: D::Event,
    bytes: u64,
}

impl<D: Device> Timeline<D> {
    pub(super) fn new(device: &D, stream: &D::Stream, trace: Arc<Trace>) -> Result<Self> {
        let event = device.event(true)?;
        device.record(&event, stream)?;
        device.synchronize_event(&event)?;
        Ok(Timeline { trace, origin: (Instant::now(), event), open: Mutex::default() })
    }

    fn mark(&self, device: &D, stream: &D::Stream) -> Result<D::Event> {
        let event = device.event(true)?;
        device.record(&event, stream)?;
        Ok(event)
    }

    fn end(&self, device: &D, stream: &D::Stream, track: Track, name: &str, began: D::Event, bytes: u64) -> Result<()> {
        let timed = Timed { track, name: name.into(), began, ended: self.mark(device, stream)?, bytes };
        self.open.lock().unwrap_or_else(PoisonError::into_inner).push(timed);
        Ok(())
    }

    /// Adds the spans that are done to the trace.
    pub(super) fn resolve(&self, device: &D) {
        let open = std::mem::take(&mut *self.open.lock().unwrap_or_else(PoisonError::into_inner));
        let mut unfinished = Vec::new();
        for timed in open {
            let (origin, event) = &self.origin;
            match (device.elapsed_ms(event, &timed.began), device.elapsed_ms(&timed.began, &timed.ended)) {
                (Ok(start), Ok(took)) => {
                    let start_us = self.trace.at_us(*origin) + start * 1e3;
                    self.trace.add(timed.track, &timed.name, start_us, took * 1e3, timed.bytes);
                }
                _ => unfinished.push(timed),
            }
        }
        self.open.lock().unwrap_or_else(PoisonError::into_inner).extend(unfinished);
    }
}
