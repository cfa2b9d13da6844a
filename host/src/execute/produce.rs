//! Making a tensor: segments computed out of order on a pool, delivered in
//! order to one sink.
//!
//! A *segment* is what one thread makes at a time: a range of a view or of a
//! source, or one tile. A few segments are in flight, so that memory is
//! bounded by threads × segment whatever the tensor's size. Leaf hashes are
//! computed by the thread that made the segment, while it is in its cache.
//!
//! A pool of one thread is left out where taking a segment is no work: then
//! the thread that takes segments makes them.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use rayon::prelude::*;

use super::buffers::Buffer;
use super::gather::{Survey, gather_wide};
use super::graph::{Graph, Source};
use super::spill::SpillRoom;
use crate::digest::{LEAF_BYTES, leaf_hashes};
use crate::error::{Code, Error, Result};
use crate::plan::{Body, Group, View};
use crate::progress::Progress;

/// Bytes of a segment of a view or of a source: within the second-level
/// cache, and a whole number of leaves.
const SEGMENT_BYTES: u64 = 1 << 20;
/// The largest segment of a view whose runs are short and far apart.
const WIDE_BYTES: u64 = 256 << 20;
/// Reading this many times more than is used is accepted for a segment.
const ACCEPTED_COVER: u64 = 4;

/// Takes a tensor's bytes, in order.
pub trait Sink {
    /// The next bytes, and their leaf hashes if they begin on a leaf's boundary.
    ///
    /// # Errors
    /// Whatever stops the execution.
    fn piece(&mut self, bytes: &[u8], leaves: Option<&[u8]>) -> Result<()>;

    /// Whether taking a piece is so much work (hashing, writing) that the next
    /// one should be made meanwhile, even by an execution of one thread.
    fn works(&self) -> bool {
        false
    }
}

/// What an execution runs on.
pub struct Workshop<'a> {
    /// The tensors to make and what from.
    pub graph: &'a Graph,
    /// The threads that compute.
    pub pool: &'a rayon::ThreadPool,
    /// Segments in flight for one tensor.
    pub in_flight: usize,
    /// Where intermediate tensors go.
    pub room: &'a SpillRoom<'a>,
    /// Told about bytes delivered; asked whether to stop.
    pub progress: &'a dyn Progress,
    /// Whether sinks are given leaf hashes; a sink that hashes nothing saves
    /// them.
    pub hash_leaves: bool,
    /// Start a tensor's segments in an order that this seeds, all of them at
    /// once: for tests that order changes no byte. Memory is not bounded then.
    pub shuffle: Option<u64>,
    /// Held by the one tensor whose segments are wide.
    pub(super) wide: std::sync::Mutex<()>,
}

struct Segment {
    offset: u64,
    len: u64,
    kind: SegmentKind,
}

enum SegmentKind {
    Range,
    /// A range of a view that is made by all threads together.
    Wide,
    Tile {
        group: usize,
        turn: u64,
    },
}

struct Piece {
    bytes: Buffer,
    leaves: Option<Vec<u8>>,
}

impl<'a> Workshop<'a> {
    /// Sets up an execution with as many segments in flight for each of
    /// `lanes` tensors as keeps the pool busy.
    pub fn new(
        graph: &'a Graph,
        pool: &'a rayon::ThreadPool,
        lanes: usize,
        room: &'a SpillRoom<'a>,
        progress: &'a dyn Progress,
    ) -> Self {
        let in_flight = 2 + (2 * pool.current_num_threads()).div_ceil(lanes.max(1));
        Workshop {
            graph,
            pool,
            in_flight,
            room,
            progress,
            hash_leaves: true,
            shuffle: None,
            wide: std::sync::Mutex::new(()),
        }
    }

    /// Makes a wanted tensor, and first whatever it reads that has to be whole.
    /// Must not be called from a thread of the pool: it waits.
    ///
    /// # Errors
    /// The first error in the tensor's own order, whatever thread met it first.
    pub fn make(&self, source: Source, len: u64, sink: &mut dyn Sink) -> Result<()> {
        self.prepare(source)?;
        let meanwhile = sink.works();
        self.deliver(source, len, self.hash_leaves, meanwhile, &mut |piece: &Piece| {
            sink.piece(&piece.bytes, piece.leaves.as_deref())?;
            self.progress.advance(piece.bytes.len() as u64);
            Ok(())
        })
    }

    /// Makes whatever `source` reads that has to be whole. Must not be called
    /// from a thread of the pool: it waits.
    ///
    /// # Errors
    /// Those of [`make`](Self::make).
    pub fn prepare(&self, source: Source) -> Result<()> {
        self.graph.spills_before(source).into_iter().try_for_each(|id| {
            let len = self.graph.target(id).tensor.len_bytes();
            self.graph.spill_once(id, || {
                let mut writer = self.room.create(len)?;
                let append = &mut |piece: &Piece| writer.append(&piece.bytes);
                self.deliver(Source::Target(id), len, false, false, append)?;
                Ok(writer.finish())
            })
        })
    }

    /// `meanwhile` is whether to make pieces while one is taken, if there is
    /// only one thread.
    fn deliver(
        &self,
        source: Source,
        len: u64,
        hash: bool,
        meanwhile: bool,
        take: &mut dyn FnMut(&Piece) -> Result<()>,
    ) -> Result<()> {
        let segments = self.segments(source, len);
        let wide = matches!(segments.first(), Some(Segment { kind: SegmentKind::Wide, .. }));
        let _turn = wide.then(|| self.wide.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        if self.pool.current_num_threads() == 1 && !meanwhile && !wide && self.shuffle.is_none() {
            return self.deliver_here(source, &segments, hash, take);
        }
        let order = self.shuffle.filter(|_| !wide).map(|seed| shuffled(segments.len(), seed));
        let in_flight = match (wide, &order) {
            (true, _) => 1,
            (false, None) => self.in_flight,
            (false, Some(order)) => order.len(),
        };
        let stop = AtomicBool::new(false);
        let stop = &stop;
        self.pool.in_place_scope(|scope| {
            let (sender, finished) = mpsc::channel();
            let start = |position: usize| {
                let index = order.as_ref().map_or(position, |order| order[position]);
                let sender = sender.clone();
                let segment = &segments[index];
                let leaves = hash && has_leaves(&segments, index);
                scope.spawn(move |_| {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let made = catch_unwind(AssertUnwindSafe(|| self.segment(source, segment, leaves)));
                    // The receiver is gone only when nobody waits any more.
                    let _ = sender.send((index, made));
                });
            };
            let mut started = segments.len().min(in_flight);
            (0..started).for_each(start);
            let mut early = BTreeMap::new();
            for next in 0..segments.len() {
                if self.progress.cancelled() {
                    stop.store(true, Ordering::Relaxed);
                    return Err(interrupted());
                }
                let made = loop {
                    if let Some(made) = early.remove(&next) {
                        break made;
                    }
                    // `sender` lives in this scope, so the channel is open.
                    let (index, made) = finished.recv().map_err(|e| Error::io("waiting for a segment", e))?;
                    early.insert(index, made);
                };
                let piece = match made {
                    Ok(piece) => piece,
                    Err(panic) => {
                        stop.store(true, Ordering::Relaxed);
                        resume_unwind(panic)
                    }
                };
                let taken = piece.and_then(|piece| take(&piece));
                if let Err(error) = taken {
                    stop.store(true, Ordering::Relaxed);
                    return Err(error);
                }
                if started < segments.len() {
                    start(started);
                    started += 1;
                }
            }
            Ok(())
        })
    }

    /// With one thread: nothing is handed over, because waking two threads in
    /// turn costs more than what they could do at the same time.
    fn deliver_here(
        &self,
        source: Source,
        segments: &[Segment],
        hash: bool,
        take: &mut dyn FnMut(&Piece) -> Result<()>,
    ) -> Result<()> {
        segments.iter().enumerate().try_for_each(|(index, segment)| {
            if self.progress.cancelled() {
                return Err(interrupted());
            }
            take(&self.segment(source, segment, hash && has_leaves(segments, index))?)
        })
    }

    fn segments(&self, source: Source, len: u64) -> Vec<Segment> {
        let ranges = |size: u64, wide: bool| {
            let kind = || if wide { SegmentKind::Wide } else { SegmentKind::Range };
            (0..len.div_ceil(size))
                .map(|i| (i * size, kind()))
                .map(|(offset, kind)| Segment { offset, len: size.min(len - offset), kind })
                .collect()
        };
        let Source::Target(id) = source else { return ranges(SEGMENT_BYTES, false) };
        if self.graph.spilled(id).is_some() {
            return ranges(SEGMENT_BYTES, false);
        }
        match &self.graph.target(id).body {
            Body::View(view) => {
                let size = view_segment_bytes(view);
                ranges(size, size > SEGMENT_BYTES)
            }
            Body::Tiles(groups) => groups.iter().enumerate().flat_map(|(g, group)| tiles_of(g, group)).collect(),
        }
    }

    fn segment(&self, source: Source, segment: &Segment, hash: bool) -> Result<Piece> {
        // In range: segments are at most WIDE_BYTES or a tile.
        let mut bytes = self.graph.buffers.take(segment.len as usize);
        match (&segment.kind, source) {
            (SegmentKind::Tile { group, turn }, Source::Target(id)) => {
                self.graph.run_tile(id, *group, *turn, &mut bytes)?;
            }
            (SegmentKind::Wide, Source::Target(id)) => {
                if let Body::View(view) = &self.graph.target(id).body {
                    let read = |s: u32, at: u64, to: &mut [u8]| self.graph.read_numbered(id, s, at, to);
                    gather_wide(view, segment.offset, &mut bytes, &read, &self.graph.buffers)?;
                }
            }
            _ => self.graph.read(source, segment.offset, &mut bytes)?,
        }
        let aligned = segment.offset.is_multiple_of(LEAF_BYTES as u64);
        let leaves = (hash && aligned).then(|| match segment.kind {
            SegmentKind::Wide => leaf_hashes_on_all_threads(&bytes),
            _ => leaf_hashes(&bytes),
        });
        Ok(Piece { bytes, leaves })
    }
}

/// The error of work that was told to stop.
pub fn interrupted() -> Error {
    Error::new(Code::Interrupted, "interrupted; nothing was written")
}

/// Whether a segment that begins on a leaf's boundary is whole leaves: a short
/// one is the tensor's last, or it is no leaf.
fn has_leaves(segments: &[Segment], index: usize) -> bool {
    index + 1 == segments.len() || segments[index].len.is_multiple_of(LEAF_BYTES as u64)
}

fn leaf_hashes_on_all_threads(bytes: &[u8]) -> Vec<u8> {
    let pieces: Vec<Vec<u8>> = bytes.par_chunks(64 * LEAF_BYTES).map(leaf_hashes).collect();
    pieces.concat()
}

fn tiles_of(index: usize, group: &Group) -> impl Iterator<Item = Segment> + '_ {
    (0..group.count).map(move |turn| Segment {
        offset: group.offset + turn * u64::from(group.len),
        len: u64::from(group.len),
        kind: SegmentKind::Tile { group: index, turn },
    })
}

/// The numbers below `count`, by Fisher and Yates with a linear congruential
/// generator.
fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut state = seed;
    for i in (1..count).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(i, (state >> 33) as usize % (i + 1));
    }
    order
}

/// How large a view's segments are: larger where runs are short and a small
/// segment would have to read many times its size.
fn view_segment_bytes(view: &View) -> u64 {
    let mut size = SEGMENT_BYTES;
    while size < view.len() && size < WIDE_BYTES {
        let survey = Survey::of(view, 0, 0, size);
        if survey.long_runs() || survey.covered() <= ACCEPTED_COVER * size {
            break;
        }
        size *= 2;
    }
    size
}

#[cfg(test)]
mod tests;
