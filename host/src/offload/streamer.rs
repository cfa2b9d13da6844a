//! The consumer's side: passes over the blocks, and the blocks it holds.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::digest::HASH_BYTES;
use crate::error::{Code, Error, Result};

use super::block::{Block, BlockSpec};
use super::device::{Device, DeviceInfo, Leaf, Memory};
use super::feeder::{Command, Feeder, SourceState, lock};
use super::handle::DeviceBlock;
use super::options::{PassReport, Rung, StreamOptions, StreamReport, VerifyReport, device_text};
use super::shared::{Message, Ready, Shared, Slot, Timeline};
use super::sources::Sources;

/// How often a waiting consumer asks whether it should stop.
const CANCEL_PAUSE: Duration = Duration::from_millis(100);
/// Blocks are copied back and compared in pieces of this size.
const COMPARE_BYTES: usize = 8 << 20;

/// Streams blocks into device slots.
///
/// Dropping it waits for the device, unregisters and unmaps, whatever happened
/// before; [`Streamer::close`] does the same and says what failed.
pub struct Streamer<D: Device> {
    pub(super) shared: Arc<Shared<D>>,
    consumer: Mutex<Consumer>,
    /// `None` once closed.
    commands: Option<Sender<Command>>,
    feeder: Option<JoinHandle<()>>,
    sources: Arc<Mutex<SourceState<D>>>,
    resident: usize,
    /// Rotating slots that the consumer holds.
    held: AtomicUsize,
    verified_blocks: AtomicU64,
    verified_leaves: AtomicU64,
    copied_back: AtomicU64,
}

struct Consumer {
    messages: Receiver<Message>,
    /// Blocks that were ready before one that comes first.
    early: BTreeMap<u64, Ready>,
    next_sequence: u64,
    /// For each resident block, whether it is there.
    loaded: Vec<bool>,
    failed: Option<Error>,
    in_pass: bool,
}

impl<D: Device> Streamer<D> {
    /// Chooses how to copy, registers (unless that is done as needed) and
    /// allocates the slots. Nothing is copied yet.
    ///
    /// # Errors
    /// `bad_params` for blocks or options that make no sense;
    /// `pin_limit_exceeded`, `registration_failed`, `lock_timeout` where
    /// registration is required; `registration_hung`; `insufficient_memory`;
    /// `corrupt_blob` if a file is too short; `io_error`.
    pub fn open(device: Arc<D>, blocks: Vec<BlockSpec>, options: StreamOptions) -> Result<Self> {
        options.check()?;
        let blocks = blocks.into_iter().map(Block::new).collect::<Result<Vec<_>>>()?;
        if options.verify_on_device
            && let Some((block, tensor)) = blocks.iter().find_map(|b| Some((b, b.unverifiable()?)))
        {
            return Err(Error::new(
                Code::BadParams,
                format!("block '{}', tensor '{tensor}' has no leaf hashes to verify against", block.spec.name),
            ));
        }
        let sources = Sources::choose(&device, &blocks, &options)?;
        let resident = options.resident.min(blocks.len());
        let (to_consumer, messages) = channel();
        let shared = Arc::new(Self::share(device, blocks, options, resident, to_consumer)?);
        let (feeder, sources) = Feeder::new(shared.clone(), sources, resident);
        let (commands, received) = channel();
        let ending = shared.clone();
        let thread = std::thread::Builder::new()
            .name("feeder".into())
            .spawn(move || {
                if catch_unwind(AssertUnwindSafe(|| feeder.run(&received))).is_err() {
                    ending.fail(Error::io("streaming", "the feeding thread panicked"));
                }
            })
            .map_err(|e| Error::io("starting the feeding thread", e))?;
        Ok(Streamer {
            shared,
            consumer: Mutex::new(Consumer {
                messages,
                early: BTreeMap::new(),
                next_sequence: 0,
                loaded: vec![false; resident],
                failed: None,
                in_pass: false,
            }),
            commands: Some(commands),
            feeder: Some(thread),
            sources,
            resident,
            held: 0.into(),
            verified_blocks: 0.into(),
            verified_leaves: 0.into(),
            copied_back: 0.into(),
        })
    }

    fn share(
        device: Arc<D>,
        blocks: Vec<Block>,
        options: StreamOptions,
        resident: usize,
        to_consumer: Sender<Message>,
    ) -> Result<Shared<D>> {
        let (kept, streamed) = blocks.split_at(resident);
        let rotating = if streamed.is_empty() { 0 } else { options.slots };
        let largest = |of: fn(&Block) -> u64| streamed.iter().map(of).max().unwrap_or(0);
        let (bytes, leaves) = (largest(|b| b.len_bytes), largest(|b| b.leaves.len() as u64));
        let sizes: Vec<(u64, u64)> = std::iter::repeat_n((bytes, leaves), rotating)
            .chain(kept.iter().map(|b| (b.len_bytes, b.leaves.len() as u64)))
            .collect();
        let memories = device.allocate_all(&sizes.iter().map(|(bytes, _)| (*bytes).max(1)).collect::<Vec<_>>())?;
        let mut slots = Vec::with_capacity(sizes.len());
        let mut hash_bytes = 0;
        for (memory, (_, leaves)) in memories.into_iter().zip(sizes) {
            let (ready, release, verified) = (device.event(false)?, device.event(false)?, device.event(false)?);
            slots.push(Slot { memory, ready, release, verified, hashes_at: hash_bytes });
            hash_bytes += leaves as usize * HASH_BYTES;
        }
        let (tables, hashes) = match options.verify_on_device {
            true => {
                let leaves: Vec<&[Leaf]> = blocks.iter().map(|b| b.leaves.as_slice()).collect();
                (device.leaf_tables(&leaves)?, Some(device.allocate_pinned(hash_bytes.max(1))?))
            }
            false => (Vec::new(), None),
        };
        let (copy, verify, compute) = (device.stream()?, device.stream()?, device.stream()?);
        let timeline = match &options.trace {
            Some(trace) => Some(Timeline::new(&*device, &copy, trace.clone())?),
            None => None,
        };
        Ok(Shared {
            device,
            options,
            blocks,
            tables,
            hashes,
            slots,
            copy,
            verify,
            compute,
            epoch: 0.into(),
            stop: false.into(),
            failed: false.into(),
            h2d_bytes: 0.into(),
            h2d_copies: 0.into(),
            pinned_bytes: 0.into(),
            to_consumer,
            timeline,
        })
    }

    /// The device.
    pub fn device(&self) -> &Arc<D> {
        &self.shared.device
    }

    /// What the device is.
    pub fn device_info(&self) -> &DeviceInfo {
        self.shared.device.info()
    }

    /// The stream that blocks are handed out on: a block is there for work
    /// that is queued on it, and its slot is free again when the work queued
    /// on it before the block was dropped is done.
    pub fn compute_stream(&self) -> &D::Stream {
        &self.shared.compute
    }

    /// How many blocks there are.
    pub fn block_count(&self) -> usize {
        self.shared.blocks.len()
    }

    /// Begins a pass over all blocks. Only one can be under way.
    ///
    /// # Errors
    /// `bad_params` if one is, or the streamer is closed.
    pub fn begin(&self) -> Result<Pass<'_, D>> {
        let mut consumer = lock(&self.consumer);
        if consumer.in_pass {
            return Err(Error::new(Code::BadParams, "a pass is under way already"));
        }
        self.command(Command::Pass(self.shared.epoch.load(Ordering::Acquire)))?;
        consumer.in_pass = true;
        if let Some(progress) = &self.shared.options.progress {
            let to_come = |b: &usize| consumer.loaded.get(*b) != Some(&true);
            let bytes = (0..self.block_count()).filter(to_come).map(|b| self.shared.blocks[b].len_bytes).sum();
            progress.stage("stream", bytes);
        }
        Ok(Pass { streamer: self, start: Instant::now(), position: 0, report: PassReport::default() })
    }

    /// Hands every block to `consume`, in order. The time is taken until the
    /// work queued on the compute stream is done.
    ///
    /// # Errors
    /// Those of [`Pass::next`] and of `consume`; the pass ends there, and
    /// after an error of `consume` another one can be begun.
    pub fn pass(&mut self, mut consume: impl FnMut(&DeviceBlock<'_, D>) -> Result<()>) -> Result<PassReport> {
        let mut pass = self.begin()?;
        while let Some(block) = pass.next()? {
            consume(&block)?;
        }
        pass.finish()
    }

    /// Loads every block into a buffer of its own and gives up what was
    /// registered for that. Made for [`StreamOptions::load_all`].
    ///
    /// # Errors
    /// `bad_params` if not all blocks are resident; those of [`Pass::next`]
    /// and [`Streamer::close`].
    pub fn load_all(&mut self) -> Result<PassReport> {
        if self.resident < self.block_count() {
            return Err(Error::new(Code::BadParams, "loading everything needs every block to be resident"));
        }
        let report = self.pass(|_| Ok(()))?;
        self.release_sources()?;
        Ok(report)
    }

    /// A resident block that is loaded.
    pub fn resident_block(&self, index: usize) -> Option<DeviceBlock<'_, D>> {
        let loaded = lock(&self.consumer).loaded.get(index) == Some(&true);
        loaded.then(|| self.block_in(index, self.shared.slots.len() - self.resident + index))
    }

    fn release_sources(&self) -> Result<()> {
        self.shared.device.synchronize(&self.shared.copy)?;
        lock(&self.sources).registrar.as_mut().map_or(Ok(()), |r| r.close())
    }

    fn command(&self, command: Command) -> Result<()> {
        let sent = self.commands.as_ref().is_some_and(|c| c.send(command).is_ok());
        if sent { Ok(()) } else { Err(Error::new(Code::BadParams, "the streamer is closed")) }
    }

    fn block_in(&self, block: usize, slot: usize) -> DeviceBlock<'_, D> {
        DeviceBlock::new(self, block, slot, self.is_resident(block))
    }

    pub(super) fn is_resident(&self, block: usize) -> bool {
        block < self.resident
    }

    /// Gives a rotating slot back: the copy stream will wait for the compute
    /// stream before it writes to it.
    pub(super) fn give_back(&self, slot: usize) {
        let released = self.shared.device.record(&self.shared.slots[slot].release, &self.shared.compute);
        match released {
            // A closed streamer takes no slots back, and needs none.
            Ok(()) => drop(self.command(Command::Free(slot))),
            // The slot stays out: it cannot be told when it may be reused.
            Err(error) => self.shared.fail(error.context("releasing a slot")),
        }
    }

    pub(super) fn drop_held(&self) {
        self.held.fetch_sub(1, Ordering::AcqRel);
    }

    /// The next block of a pass.
    fn next(&self, block: usize) -> Result<(DeviceBlock<'_, D>, Option<Ready>)> {
        let mut consumer = lock(&self.consumer);
        if let Some(error) = &consumer.failed {
            return Err(error.clone());
        }
        if consumer.loaded.get(block) == Some(&true) {
            return Ok((self.block_in(block, self.shared.slots.len() - self.resident + block), None));
        }
        let rotating = self.shared.slots.len() - self.resident;
        if !self.is_resident(block) && self.held.load(Ordering::Acquire) >= rotating {
            return Err(Error::new(Code::BadParams, format!("all {rotating} slots are held by the consumer"))
                .hint("drop a block before asking for the next one, or use more slots"));
        }
        let taken = self.take(&mut consumer, block);
        match taken {
            Ok(ready) => {
                if !self.is_resident(block) {
                    self.held.fetch_add(1, Ordering::AcqRel);
                }
                Ok((self.block_in(block, ready.slot), Some(ready)))
            }
            Err(error) => {
                if error.code() != Code::Interrupted {
                    self.shared.failed.store(true, Ordering::Relaxed);
                    consumer.failed.get_or_insert(error.clone());
                }
                Err(error)
            }
        }
    }

    /// Waits for `block`, and checks it.
    fn take(&self, consumer: &mut Consumer, block: usize) -> Result<Ready> {
        loop {
            let Some(ready) = consumer.early.remove(&consumer.next_sequence) else {
                self.receive(consumer)?;
                continue;
            };
            consumer.next_sequence += 1;
            let stale = ready.epoch != self.shared.epoch.load(Ordering::Acquire);
            if stale && !self.is_resident(ready.block) {
                self.give_back(ready.slot);
                continue;
            }
            self.check(&ready)?;
            self.shared.device.wait(&self.shared.compute, &self.shared.slots[ready.slot].ready)?;
            if let Some(loaded) = consumer.loaded.get_mut(ready.block) {
                *loaded = true;
            }
            if ready.block == block {
                return Ok(ready);
            }
        }
    }

    fn receive(&self, consumer: &mut Consumer) -> Result<()> {
        loop {
            self.shared.options.cancelled()?;
            match consumer.messages.recv_timeout(CANCEL_PAUSE) {
                Ok(Message::Ready(ready)) => {
                    consumer.early.insert(ready.sequence, ready);
                    return Ok(());
                }
                Ok(Message::Failed(error)) => return Err(error),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(Error::io("streaming", "the feeder has ended")),
            }
        }
    }

    /// Whatever has to hold before a consumer sees a block.
    fn check(&self, ready: &Ready) -> Result<()> {
        let (shared, block, slot) = (&self.shared, &self.shared.blocks[ready.block], &self.shared.slots[ready.slot]);
        if shared.options.verify_on_device {
            shared.check_hashes(slot, block)?;
            self.verified_blocks.fetch_add(1, Ordering::Relaxed);
            self.verified_leaves.fetch_add(block.leaves.len() as u64, Ordering::Relaxed);
        }
        if shared.options.check_copy_back {
            shared.device.synchronize_event(&slot.ready)?;
            self.compare_copy(block, slot)?;
            self.copied_back.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    fn compare_copy(&self, block: &Block, slot: &Slot<D>) -> Result<()> {
        let (mut arrived, mut source) = (vec![0; COMPARE_BYTES], vec![0; COMPARE_BYTES]);
        for (segment, start) in block.spec.segments.iter().zip(&block.starts) {
            for offset in (0..segment.len).step_by(COMPARE_BYTES) {
                let take = COMPARE_BYTES.min(usize::try_from(segment.len - offset).unwrap_or(COMPARE_BYTES));
                let (arrived, source) = (&mut arrived[..take], &mut source[..take]);
                segment.content.read(offset, source)?;
                self.shared.device.read_back(&self.shared.verify, &slot.memory, start + offset, arrived)?;
                if arrived != source {
                    let at = arrived.iter().zip(source.iter()).position(|(a, b)| a != b).unwrap_or(0);
                    return Err(block.differs_at(start + offset + at as u64));
                }
            }
        }
        Ok(())
    }

    /// What this streamer is and has done so far.
    pub fn report(&self) -> StreamReport {
        let sources = lock(&self.sources);
        let count = |n: &AtomicU64| n.load(Ordering::Relaxed);
        StreamReport {
            device: device_text(self.shared.device.info()),
            rung: match sources.rung {
                // Every staging thread had to make do with ordinary memory.
                Rung::C if count(&self.shared.h2d_copies) > 0 && count(&self.shared.pinned_bytes) == 0 => Rung::D,
                rung => rung,
            },
            passed_over: sources.passed_over.clone(),
            registered_bytes: sources.registrar.as_ref().map_or(0, |r| r.registered_bytes()),
            pinned_bytes: count(&self.shared.pinned_bytes),
            device_bytes: self.shared.slots.iter().map(|s| s.memory.len_bytes()).sum(),
            register_ms: sources.registrar.as_ref().map_or(0.0, |r| r.spent_ms()),
            h2d_bytes: count(&self.shared.h2d_bytes),
            h2d_copies: count(&self.shared.h2d_copies),
            verify: VerifyReport {
                blocks: count(&self.verified_blocks),
                leaves: count(&self.verified_leaves),
                copied_back_blocks: count(&self.copied_back),
            },
        }
    }

    /// Ends streaming: stops the feeder, waits for the device, unregisters in
    /// reverse order. Ranges that cannot be unregistered stay mapped, and the
    /// next call tries them again; with nothing left to do it does nothing.
    ///
    /// # Errors
    /// `registration_failed` for the first range that could not be
    /// unregistered; `registration_hung` if a call hung: then nothing is
    /// waited for or freed, and the process should end with
    /// [`exit_without_cleanup`](super::exit_without_cleanup).
    pub fn close(&mut self) -> Result<()> {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.commands = None;
        if let Some(feeder) = self.feeder.take() {
            feeder.join().ok();
            let hung = lock(&self.sources).registrar.as_ref().is_some_and(|r| r.hung().is_some());
            if !hung {
                let shared = &self.shared;
                for stream in [&shared.copy, &shared.verify, &shared.compute] {
                    // A failed device is reported by whoever used it; what is
                    // registered must be taken back all the same.
                    shared.device.synchronize(stream).ok();
                }
                if let Some(timeline) = &shared.timeline {
                    timeline.resolve(&*shared.device);
                }
            }
        }
        lock(&self.sources).registrar.as_mut().map_or(Ok(()), |r| r.close())
    }
}

impl<D: Device> Drop for Streamer<D> {
    fn drop(&mut self) {
        self.close().ok();
    }
}

/// A pass over the blocks. Dropping it early abandons what was copied ahead.
pub struct Pass<'s, D: Device> {
    streamer: &'s Streamer<D>,
    start: Instant,
    position: usize,
    report: PassReport,
}

impl<'s, D: Device> Pass<'s, D> {
    /// The next block; `None` after the last. Several may be held at once, up
    /// to the number of slots, and dropped in any order.
    ///
    /// Work queued on the [compute stream](Streamer::compute_stream) from now
    /// on finds the block's bytes in place; on the host,
    /// [`DeviceBlock::wait`] waits for them.
    ///
    /// # Errors
    /// `corrupt_blob` if the block is not what its leaf hashes say; then, and
    /// after every other failure, the streamer can only be closed.
    /// `bad_params` if all slots are held; `interrupted`.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<Option<DeviceBlock<'s, D>>> {
        if self.position == self.streamer.block_count() {
            return Ok(None);
        }
        let (block, ready) = self.streamer.next(self.position)?;
        self.position += 1;
        self.report.blocks += 1;
        if let Some(ready) = ready {
            self.report.bytes += ready.bytes;
            self.report.copies += ready.copies;
        }
        Ok(Some(block))
    }

    /// Waits for the work on the compute stream.
    ///
    /// # Errors
    /// A failure of that work, or of a copy.
    pub fn finish(mut self) -> Result<PassReport> {
        let shared = &self.streamer.shared;
        shared.device.synchronize(&shared.compute)?;
        self.report.ms = self.start.elapsed().as_secs_f64() * 1e3;
        if let Some(timeline) = &shared.timeline {
            timeline.resolve(&*shared.device);
        }
        Ok(self.report)
    }
}

impl<D: Device> Drop for Pass<'_, D> {
    fn drop(&mut self) {
        let mut consumer = lock(&self.streamer.consumer);
        if self.position < self.streamer.block_count() {
            self.streamer.shared.epoch.fetch_add(1, Ordering::AcqRel);
        }
        consumer.in_pass = false;
    }
}
