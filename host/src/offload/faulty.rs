//! A device that fails where it is told to.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::error::{Code, Error, Result};
use crate::mapping::FileMap;

use super::device::{Access, Device, DeviceInfo, Leaf, Memory, Pinned};
use super::ranges::PageRange;

/// What goes wrong. Calls of each kind are counted from 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// This registration is refused.
    pub register: Option<u64>,
    /// This registration does not return until [`FaultyDevice::release`].
    pub hang: Option<u64>,
    /// These unregistrations fail.
    pub unregister: Vec<u64>,
    /// This copy is refused.
    pub copy: Option<u64>,
    /// This recording of an event is refused.
    pub record: Option<u64>,
    /// This waiting on the host fails, as it does after a failure on the device.
    pub synchronize: Option<u64>,
    /// This allocation of pinned memory fails, and all after it.
    pub pinned: Option<u64>,
    /// A bit flips in pinned memory after this filling of it.
    pub flip_staged: Option<u64>,
    /// A bit flips in device memory after this copy.
    pub flip_copied: Option<u64>,
}

impl Faults {
    /// One or two faults among the first calls, chosen by `seed`; hangs are
    /// never chosen.
    pub fn seeded(seed: u64) -> Self {
        // splitmix64
        let mut state = seed;
        let mut draw = |below: u64| {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            (z ^ (z >> 31)) % below
        };
        let mut faults = Faults::default();
        for _ in 0..=draw(2) {
            let (kind, at) = (draw(7), draw(12));
            match kind {
                0 => faults.register = Some(at),
                1 => faults.copy = Some(at),
                2 => faults.record = Some(at),
                3 => faults.synchronize = Some(at),
                4 => faults.pinned = Some(at),
                5 => faults.flip_staged = Some(at),
                _ => faults.flip_copied = Some(at),
            }
        }
        faults
    }
}

/// What was called, as far as its order matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Called {
    /// A range that begins at this byte of its file was registered.
    Register(u64),
    /// It was unregistered.
    Unregister(u64),
    /// A stream was waited for.
    Synchronize,
    /// The device was abandoned.
    Abandon,
}

/// Wraps a device and makes its calls fail.
pub struct FaultyDevice<D> {
    inner: D,
    faults: Faults,
    counts: Counts,
    calls: Mutex<Vec<Called>>,
    released: Arc<(Mutex<bool>, Condvar)>,
}

#[derive(Default)]
struct Counts {
    register: AtomicU64,
    unregister: AtomicU64,
    copy: AtomicU64,
    record: AtomicU64,
    synchronize: AtomicU64,
    pinned: AtomicU64,
    fill: Arc<AtomicU64>,
    healed: AtomicBool,
}

impl<D: Device> FaultyDevice<D> {
    /// `inner` with these faults.
    pub fn new(inner: D, faults: Faults) -> Self {
        FaultyDevice { inner, faults, counts: Counts::default(), calls: Mutex::default(), released: Arc::default() }
    }

    /// The device itself.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// What was called so far.
    pub fn calls(&self) -> Vec<Called> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lets calls that hang return, with an error.
    pub fn release(&self) {
        *self.released.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.released.1.notify_all();
    }

    /// From now on nothing fails.
    pub fn heal(&self) {
        self.counts.healed.store(true, Ordering::Relaxed);
    }

    fn note(&self, call: Called) {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).push(call);
    }

    /// Counts a call; whether it is the one that goes wrong.
    fn strikes(&self, count: &AtomicU64, at: Option<u64>) -> bool {
        let now = count.fetch_add(1, Ordering::Relaxed);
        !self.counts.healed.load(Ordering::Relaxed) && at == Some(now)
    }

    fn fail_if(&self, strikes: bool, code: Code, what: &str) -> Result<()> {
        if strikes { Err(Error::new(code, format!("{what} failed, as it was told to"))) } else { Ok(()) }
    }

    /// Around every copy: the one that fails, and the one that goes wrong unseen.
    fn copying(
        &self,
        stream: &D::Stream,
        to: &D::Memory,
        to_offset: u64,
        copy: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let now = self.counts.copy.fetch_add(1, Ordering::Relaxed);
        let healed = self.counts.healed.load(Ordering::Relaxed);
        self.fail_if(!healed && self.faults.copy == Some(now), Code::IoError, "a copy")?;
        copy()?;
        if !healed && self.faults.flip_copied == Some(now) && to_offset < to.len_bytes() {
            let mut byte = [0];
            self.inner.read_back(stream, to, to_offset, &mut byte)?;
            self.inner.copy_pageable(stream, &[byte[0] ^ 0x10], to, to_offset)?;
        }
        Ok(())
    }
}

/// Pinned memory in which a bit may flip.
pub struct FaultyPinned<P> {
    inner: P,
    fills: Arc<AtomicU64>,
    flip_at: Option<u64>,
}

impl<P: Pinned> Pinned for FaultyPinned<P> {
    fn fill(&mut self, fill: &mut dyn FnMut(&mut [u8]) -> Result<()>) -> Result<()> {
        let flips = self.flip_at == Some(self.fills.fetch_add(1, Ordering::Relaxed));
        self.inner.fill(&mut |bytes| {
            fill(bytes)?;
            if let Some(byte) = bytes.first_mut().filter(|_| flips) {
                *byte ^= 0x10;
            }
            Ok(())
        })
    }

    fn read(&self, read: &mut dyn FnMut(&[u8])) {
        self.inner.read(read);
    }
}

impl<D: Device> Device for FaultyDevice<D> {
    type Memory = D::Memory;
    type Pinned = FaultyPinned<D::Pinned>;
    type Stream = D::Stream;
    type Event = D::Event;
    type LeafTable = D::LeafTable;

    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn allocate(&self, len_bytes: u64) -> Result<D::Memory> {
        self.inner.allocate(len_bytes)
    }

    fn allocate_all(&self, lens_bytes: &[u64]) -> Result<Vec<D::Memory>> {
        self.inner.allocate_all(lens_bytes)
    }

    fn allocate_pinned(&self, len_bytes: usize) -> Result<FaultyPinned<D::Pinned>> {
        let now = self.counts.pinned.fetch_add(1, Ordering::Relaxed);
        let strikes = self.faults.pinned.is_some_and(|at| now >= at);
        self.fail_if(strikes, Code::InsufficientMemory, "allocating pinned memory")?;
        Ok(FaultyPinned {
            inner: self.inner.allocate_pinned(len_bytes)?,
            fills: self.counts.fill.clone(),
            flip_at: self.faults.flip_staged,
        })
    }

    fn stream(&self) -> Result<D::Stream> {
        self.inner.stream()
    }

    fn event(&self, timed: bool) -> Result<D::Event> {
        self.inner.event(timed)
    }

    fn register(&self, map: &Arc<FileMap>, range: PageRange, access: Access) -> Result<()> {
        let now = self.counts.register.fetch_add(1, Ordering::Relaxed);
        if self.faults.hang == Some(now) {
            let mut released = self.released.0.lock().unwrap_or_else(PoisonError::into_inner);
            while !*released {
                released = self.released.1.wait(released).unwrap_or_else(PoisonError::into_inner);
            }
            return Err(Error::new(Code::RegistrationFailed, "a registration hung and was released"));
        }
        self.fail_if(self.faults.register == Some(now), Code::RegistrationFailed, "a registration")?;
        self.inner.register(map, range, access)?;
        self.note(Called::Register(range.start()));
        Ok(())
    }

    fn unregister(&self, map: &Arc<FileMap>, range: PageRange) -> Result<()> {
        let now = self.counts.unregister.fetch_add(1, Ordering::Relaxed);
        let strikes = !self.counts.healed.load(Ordering::Relaxed) && self.faults.unregister.contains(&now);
        self.fail_if(strikes, Code::RegistrationFailed, "an unregistration")?;
        self.inner.unregister(map, range)?;
        self.note(Called::Unregister(range.start()));
        Ok(())
    }

    fn record(&self, event: &D::Event, stream: &D::Stream) -> Result<()> {
        let strikes = self.strikes(&self.counts.record, self.faults.record);
        self.fail_if(strikes, Code::IoError, "recording an event")?;
        self.inner.record(event, stream)
    }

    fn wait(&self, stream: &D::Stream, event: &D::Event) -> Result<()> {
        self.inner.wait(stream, event)
    }

    fn synchronize_event(&self, event: &D::Event) -> Result<()> {
        let strikes = self.strikes(&self.counts.synchronize, self.faults.synchronize);
        self.fail_if(strikes, Code::IoError, "waiting for an event")?;
        self.inner.synchronize_event(event)
    }

    fn synchronize(&self, stream: &D::Stream) -> Result<()> {
        let strikes = self.strikes(&self.counts.synchronize, self.faults.synchronize);
        self.fail_if(strikes, Code::IoError, "waiting for a stream")?;
        self.inner.synchronize(stream)?;
        self.note(Called::Synchronize);
        Ok(())
    }

    fn elapsed_ms(&self, from: &D::Event, to: &D::Event) -> Result<f64> {
        self.inner.elapsed_ms(from, to)
    }

    fn copy_registered(
        &self,
        stream: &D::Stream,
        map: &Arc<FileMap>,
        from: Range<u64>,
        to: &D::Memory,
        to_offset: u64,
    ) -> Result<()> {
        self.copying(stream, to, to_offset, || self.inner.copy_registered(stream, map, from, to, to_offset))
    }

    fn copy_pinned(
        &self,
        stream: &D::Stream,
        from: &FaultyPinned<D::Pinned>,
        len: usize,
        to: &D::Memory,
        to_offset: u64,
    ) -> Result<()> {
        self.copying(stream, to, to_offset, || self.inner.copy_pinned(stream, &from.inner, len, to, to_offset))
    }

    fn copy_pageable(&self, stream: &D::Stream, from: &[u8], to: &D::Memory, to_offset: u64) -> Result<()> {
        self.copying(stream, to, to_offset, || self.inner.copy_pageable(stream, from, to, to_offset))
    }

    fn read_back(&self, stream: &D::Stream, from: &D::Memory, offset: u64, out: &mut [u8]) -> Result<()> {
        self.inner.read_back(stream, from, offset, out)
    }

    fn abandon(&self) {
        self.note(Called::Abandon);
        self.inner.abandon();
    }

    fn leaf_tables(&self, leaves: &[&[Leaf]]) -> Result<Vec<D::LeafTable>> {
        self.inner.leaf_tables(leaves)
    }

    fn hash_leaves(
        &self,
        stream: &D::Stream,
        memory: &D::Memory,
        leaves: &D::LeafTable,
        hashes: &FaultyPinned<D::Pinned>,
        offset: usize,
    ) -> Result<()> {
        self.inner.hash_leaves(stream, memory, leaves, &hashes.inner, offset)
    }
}
