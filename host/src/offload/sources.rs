//! The ladder: how the bytes of the blocks get to the device.
//!
//! Rungs are tried best first. For a registering rung the files are mapped,
//! the ranges that the blocks need are coalesced and cut, their complete size
//! is checked against the budget, the first one is probed, and only then is
//! the driver asked. A rung that cannot be had is passed over with its reason;
//! where registration is required, that reason is the error.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use crate::error::{Code, Error, Result};
use crate::mapping::FileMap;

use super::block::{Block, Content, Segment};
use super::budget::PinBudget;
use super::device::{Access, Device};
use super::options::{RegisterWhen, Registration, Rung, StreamOptions};
use super::ranges::{PAGE_BYTES, coalesce, cut};
use super::registrar::{Job, Registrar};
use super::shared_copy::map_shared_copy;

/// While registering as needed, the first copy waits for the first
/// registration, and each registration hides behind the copy before it.
const AS_NEEDED_BYTES: u64 = 128 << 20;
/// From so many threads on, a single pass is faster through the staging ring:
/// registering costs about as much as copying and is done by one thread,
/// while `pread` scales with the cores. The crossover was measured on an H200
/// with 16 cores, between 4 threads (22 GB/s) and 8 (50 GB/s), where
/// registering as needed gave 36 GB/s.
const STAGING_WINS_THREADS: usize = 8;

/// A part of a block that is copied from one source.
#[derive(Clone)]
pub(super) enum Piece {
    /// From a registered range: one copy.
    Registered { job: usize, map: Arc<FileMap>, from: Range<u64>, to: u64 },
    /// Through the staging buffers.
    Staged { segment: usize, len: u64, to: u64 },
}

/// The chosen rung, and what it needs.
pub(super) struct Sources<D: Device> {
    pub(super) rung: Rung,
    pub(super) passed_over: Vec<String>,
    pub(super) registrar: Option<Registrar<D>>,
    /// For each block, its pieces.
    pub(super) pieces: Vec<Vec<Piece>>,
    /// What staging may pin.
    pub(super) staging_budget: u64,
}

enum Attempt<D: Device> {
    Taken(Box<Sources<D>>),
    Passed(Error),
    /// A call hung: nothing else can be tried in this process.
    Over(Error),
}

impl<D: Device> Sources<D> {
    pub(super) fn choose(device: &Arc<D>, blocks: &[Block], options: &StreamOptions) -> Result<Self> {
        check_lengths(blocks)?;
        let budget = PinBudget::new(options.pin_limit_bytes);
        let mut passed_over = Vec::new();
        let once = copies_once(blocks, options, &budget);
        if once {
            passed_over.push(format!("{}: staging is faster for a single pass with this many threads", Rung::A));
        }
        let is_file = |segment: &Segment| matches!(segment.content, Content::File { .. });
        let files = blocks.iter().flat_map(|b| &b.spec.segments).any(is_file);
        for rung in [Rung::A, Rung::B] {
            let wanted = match options.only {
                Some(only) => only == rung,
                // Bytes that are computed on the fly have nothing to register.
                None => options.registration != Registration::Off && !once && files,
            };
            if !wanted {
                continue;
            }
            match Self::register(device, blocks, options, &budget, rung) {
                Attempt::Taken(sources) => return Ok(Sources { passed_over, ..*sources }),
                Attempt::Over(error) => return Err(error),
                Attempt::Passed(error) => {
                    let last = rung == Rung::B || options.tmpfs_root.is_none();
                    if options.only.is_some() || (options.registration == Registration::Require && last) {
                        return Err(error);
                    }
                    passed_over.push(format!("{rung}: {}", error.message()));
                }
            }
        }
        let pieces = blocks.iter().map(staged_pieces).collect();
        let available = budget.staging_bytes(options.staging_bytes);
        // A ring of fewer than two buffers cannot overlap filling and copying.
        let rung = match options.only {
            Some(only) => only,
            None if available >= 2 * options.chunk_bytes => Rung::C,
            None => Rung::D,
        };
        if rung == Rung::C {
            budget.check_staging(available, 2 * options.chunk_bytes)?;
        } else if options.only.is_none() {
            passed_over.push(format!("{}: only {available} bytes may be pinned for staging", Rung::C));
        }
        Ok(Sources { rung, passed_over, registrar: None, pieces, staging_budget: available })
    }

    fn register(
        device: &Arc<D>,
        blocks: &[Block],
        options: &StreamOptions,
        budget: &PinBudget,
        rung: Rung,
    ) -> Attempt<D> {
        let plan = match Registrations::plan(device, blocks, options, budget, rung) {
            Ok(plan) => plan,
            Err(error) => return Attempt::Passed(error),
        };
        let bytes: u64 = plan.jobs.iter().map(|j| j.range.len()).sum();
        let mut registrar = match Registrar::new(device.clone(), plan.jobs, options) {
            Ok(registrar) => registrar,
            Err(error) => return Attempt::Passed(error),
        };
        if options.register_when == RegisterWhen::AtOpen
            && let Err(error) = registrar.ensure(registrar.job_count())
        {
            if registrar.hung().is_some() || error.code() == Code::Interrupted {
                return Attempt::Over(error);
            }
            return match registrar.roll_back() {
                Ok(()) => Attempt::Passed(error),
                Err(fatal) => Attempt::Over(fatal),
            };
        }
        Attempt::Taken(Box::new(Sources {
            rung,
            passed_over: Vec::new(),
            registrar: Some(registrar),
            pieces: plan.pieces,
            staging_budget: budget.staging_bytes(options.staging_bytes.saturating_add(bytes)).saturating_sub(bytes),
        }))
    }
}

/// Whether every block is copied only once, by enough threads that staging is
/// faster than registering first.
fn copies_once(blocks: &[Block], options: &StreamOptions, budget: &PinBudget) -> bool {
    options.registration == Registration::Auto
        && options.only.is_none()
        && (options.single_pass || options.resident >= blocks.len())
        && options.staging_threads() >= STAGING_WINS_THREADS
        && budget.staging_bytes(options.staging_bytes) >= options.staging_bytes.max(1)
}

/// What would be registered.
struct Registrations {
    jobs: Vec<Job>,
    pieces: Vec<Vec<Piece>>,
}

struct MappedFile {
    map: Arc<FileMap>,
    ranges: Vec<(u64, u64)>,
    jobs: Range<usize>,
}

impl Registrations {
    fn plan<D: Device>(
        device: &Arc<D>,
        blocks: &[Block],
        options: &StreamOptions,
        budget: &PinBudget,
        rung: Rung,
    ) -> Result<Self> {
        let info = device.info();
        let access = if rung == Rung::A { Access::ReadOnly } else { Access::ReadWrite };
        let supported = if rung == Rung::A { info.registers_read_only } else { info.registers_writable };
        if !supported {
            return Err(Error::new(
                Code::RegistrationFailed,
                format!("{} cannot register {access:?} mappings", info.name),
            ));
        }
        // The complete size is known before anything is mapped or copied.
        budget.check(total_page_bytes(blocks)?)?;

        // Files in the order in which blocks use them first.
        let mut by_identity: BTreeMap<(u64, u64), usize> = BTreeMap::new();
        let mut files: Vec<MappedFile> = Vec::new();
        for (file, path, offset, len) in file_segments(blocks) {
            let index = match by_identity.get(&identity(file, path)?) {
                Some(index) => *index,
                None => {
                    let map = match (rung, &options.tmpfs_root) {
                        (Rung::A, _) => FileMap::read_only(file.clone(), path)?,
                        (_, Some(root)) => map_shared_copy(root, file, path)?,
                        (_, None) => {
                            return Err(Error::new(
                                Code::RegistrationFailed,
                                "no tmpfs folder is given for shared copies",
                            ));
                        }
                    };
                    by_identity.insert(identity(file, path)?, files.len());
                    files.push(MappedFile { map: Arc::new(map), ranges: Vec::new(), jobs: 0..0 });
                    files.len() - 1
                }
            };
            files[index].ranges.push((offset, len));
        }
        let limit = match options.register_when {
            RegisterWhen::AtOpen => options.registration_bytes,
            RegisterWhen::AsNeeded => options.registration_bytes.min(AS_NEEDED_BYTES),
        };
        let mut jobs = Vec::new();
        for file in &mut files {
            let mut starts: Vec<u64> = file.ranges.iter().map(|(start, _)| *start).collect();
            starts.sort_unstable();
            let first = jobs.len();
            let ranges = cut(&coalesce(&file.ranges)?, limit, &starts);
            jobs.extend(ranges.into_iter().map(|range| Job { map: file.map.clone(), range, access }));
            file.jobs = first..jobs.len();
        }
        if let (Some(probe), Some(job), true) = (&options.probe, jobs.first(), info.probe_registration) {
            probe.check(info, &job.map, job.range, access)?;
        }
        let pieces = blocks.iter().map(|block| pieces_of(block, &by_identity, &files, &jobs)).collect::<Result<_>>()?;
        Ok(Registrations { jobs, pieces })
    }
}

fn pieces_of(
    block: &Block,
    by_identity: &BTreeMap<(u64, u64), usize>,
    files: &[MappedFile],
    jobs: &[Job],
) -> Result<Vec<Piece>> {
    let mut pieces = Vec::new();
    for (index, (segment, to)) in block.spec.segments.iter().zip(&block.starts).enumerate() {
        let Content::File { file, path, offset } = &segment.content else {
            pieces.push(Piece::Staged { segment: index, len: segment.len, to: *to });
            continue;
        };
        let Some(file) = by_identity.get(&identity(file, path)?).map(|i| &files[*i]) else { continue };
        let of_file = &jobs[file.jobs.clone()];
        let first = of_file.partition_point(|j| j.range.end() <= *offset);
        for (job, Job { range, .. }) in of_file.iter().enumerate().skip(first) {
            let Some(from) = range.clip(*offset, segment.len) else { break };
            let (job, to) = (file.jobs.start + job, to + (from.start - offset));
            pieces.push(Piece::Registered { job, map: file.map.clone(), from, to });
        }
    }
    Ok(pieces)
}

/// All of a block through staging.
pub(super) fn staged_pieces(block: &Block) -> Vec<Piece> {
    let segments = block.spec.segments.iter().zip(&block.starts).enumerate();
    segments.map(|(index, (s, to))| Piece::Staged { segment: index, len: s.len, to: *to }).collect()
}

fn file_segments(blocks: &[Block]) -> impl Iterator<Item = (&Arc<File>, &Path, u64, u64)> {
    blocks.iter().flat_map(|b| &b.spec.segments).filter_map(|s| match &s.content {
        Content::File { file, path, offset } if s.len > 0 => Some((file, path.as_path(), *offset, s.len)),
        _ => None,
    })
}

fn identity(file: &File, path: &Path) -> Result<(u64, u64)> {
    let stat = file.metadata().map_err(|e| Error::io(format_args!("asking about {}", path.display()), e))?;
    Ok((stat.dev(), stat.ino()))
}

/// The bytes of all pages that the blocks' files need.
fn total_page_bytes(blocks: &[Block]) -> Result<u64> {
    let mut ranges: BTreeMap<(u64, u64), Vec<(u64, u64)>> = BTreeMap::new();
    for (file, path, offset, len) in file_segments(blocks) {
        ranges.entry(identity(file, path)?).or_default().push((offset, len));
    }
    let mut total = 0_u64;
    for ranges in ranges.values() {
        total = coalesce(ranges)?.iter().fold(total, |sum, r| sum.saturating_add(r.len()));
    }
    Ok(total)
}

/// Every file must be as long as its segments say, or the device would read
/// pages that are not there.
fn check_lengths(blocks: &[Block]) -> Result<()> {
    for (file, path, offset, len) in file_segments(blocks) {
        let stat = file.metadata().map_err(|e| Error::io(format_args!("asking about {}", path.display()), e))?;
        if offset + len > stat.len() {
            return Err(Error::new(
                Code::CorruptBlob,
                format!("{} has {} bytes, but {} are needed", path.display(), stat.len(), offset + len),
            )
            .hint("the file was cut short; verify the entry"));
        }
    }
    Ok(())
}

/// The largest staging buffers that the budget allows, for each of `threads`:
/// how many buffers.
pub(super) fn ring_depth(budget: u64, options: &StreamOptions, threads: usize) -> (usize, usize) {
    let buffers = budget.min(options.staging_bytes.max(2 * options.chunk_bytes)) / options.chunk_bytes.max(PAGE_BYTES);
    let buffers = usize::try_from(buffers).unwrap_or(usize::MAX).max(2);
    // Two buffers a thread, so that it fills one while the other is copied;
    // fewer threads rather than fewer buffers. More buffers than that only
    // leave the cache between the thread that writes and the device that reads.
    let threads = threads.clamp(1, buffers / 2);
    (threads, 2)
}
