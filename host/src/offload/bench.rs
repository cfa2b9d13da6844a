//! Measuring, as ratios in one process.
//!
//! Absolute rates differ between machines and days; the ratio to a plain copy
//! from pinned memory, measured in the same process before and after, does
//! not. Rates are medians of several samples.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use crate::error::Result;

use super::block::BlockSpec;
use super::device::{Device, Pinned};
use super::options::{Registration, Rung, StreamOptions, device_text};
use super::streamer::Streamer;

/// The pinned buffer that the ceiling is measured with.
const CEILING_BYTES: usize = 1 << 30;

/// A rate in 10⁹ bytes a second.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rate {
    /// The median.
    pub median: f64,
    /// The lowest.
    pub min: f64,
    /// The highest.
    pub max: f64,
    /// How many samples.
    pub samples: usize,
}

impl Rate {
    fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |i: usize| samples.get(i).copied().unwrap_or(0.0);
        Rate {
            median: (at(samples.len() / 2) + at(samples.len().saturating_sub(1) / 2)) / 2.0,
            min: at(0),
            max: at(samples.len().saturating_sub(1)),
            samples: samples.len(),
        }
    }
}

/// One way of moving the blocks, measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Way {
    /// What was done.
    pub what: String,
    /// The rung that was in use.
    pub rung: Rung,
    /// Threads that filled staging buffers; 0 if none did.
    pub threads: usize,
    /// Bytes moved by one sample over its time.
    pub gb_per_s: Rate,
    /// The median over the ceiling.
    pub of_ceiling: f64,
    /// Copies of one sample.
    pub copies: u64,
    /// Milliseconds spent registering, all together.
    pub register_ms: f64,
}

/// What [`bench_h2d`] found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BenchReport {
    /// The device.
    pub device: String,
    /// The driver.
    pub driver: String,
    /// Blocks of one pass.
    pub blocks: usize,
    /// Bytes of one pass.
    pub bytes: u64,
    /// Copies from pinned memory, as large as they come.
    pub ceiling: Rate,
    /// All that was measured.
    pub ways: Vec<Way>,
}

/// What to measure.
#[derive(Clone)]
pub struct BenchOptions {
    /// Samples of each way.
    pub samples: usize,
    /// Thread counts for the staging ring.
    pub threads: Vec<usize>,
    /// Where rung B may put its copies; without it, rung B is left out.
    pub tmpfs_root: Option<PathBuf>,
    /// Whether to measure verification on the device; the blocks must have
    /// leaf hashes.
    pub verify: bool,
    /// Whether to measure loading everything at once, which needs room for it.
    pub load_all: bool,
    /// Slots, chunks, budget and so on.
    pub stream: StreamOptions,
}

impl Default for BenchOptions {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut threads = vec![1, 8, cores];
        threads.retain(|n| *n <= cores);
        threads.dedup();
        BenchOptions {
            samples: 7,
            threads,
            tmpfs_root: None,
            verify: true,
            load_all: true,
            stream: StreamOptions::default(),
        }
    }
}

/// Measures the ceiling and then each way of moving the blocks that `open`
/// makes, with or without leaf hashes, in this process.
///
/// # Errors
/// Those of streaming. A rung that this device does not have is left out.
pub fn bench_h2d<D: Device>(
    device: &Arc<D>,
    open: impl Fn(bool) -> Result<Vec<BlockSpec>>,
    options: &BenchOptions,
) -> Result<BenchReport> {
    let blocks = open(false)?;
    let bytes: u64 = blocks.iter().flat_map(|b| &b.segments).map(|s| s.len).sum();
    let before = ceiling(device, bytes, options.samples)?;
    let mut bench = Bench { device, open: &open, options, ways: Vec::new() };

    let only = |rung| StreamOptions { only: Some(rung), ..options.stream.clone() };
    let info = device.info();
    if info.registers_read_only {
        bench.stream("stream", only(Rung::A))?;
        if options.verify {
            bench
                .stream("stream, verified on the device", StreamOptions { verify_on_device: true, ..only(Rung::A) })?;
        }
    }
    if info.registers_writable && options.tmpfs_root.is_some() {
        bench.stream("stream", StreamOptions { tmpfs_root: options.tmpfs_root.clone(), ..only(Rung::B) })?;
    }
    for threads in &options.threads {
        bench.stream("stream", StreamOptions { threads: *threads, ..only(Rung::C) })?;
    }
    bench.stream("stream", only(Rung::D))?;
    if options.load_all {
        if info.registers_read_only {
            bench.load_all("load all, registering", only(Rung::A).load_all())?;
        }
        bench.load_all("load all, staging", only(Rung::C).load_all())?;
        bench.load_all("load all, auto", options.stream.clone().load_all())?;
    }

    let mut ways = bench.ways;
    let after = ceiling(device, bytes, options.samples)?;
    let ceiling = if before.median >= after.median { before } else { after };
    for way in &mut ways {
        way.of_ceiling = way.gb_per_s.median / ceiling.median;
    }
    Ok(BenchReport {
        device: device_text(info),
        driver: info.driver.clone(),
        blocks: blocks.len(),
        bytes,
        ceiling,
        ways,
    })
}

struct Bench<'a, D: Device, F> {
    device: &'a Arc<D>,
    open: &'a F,
    options: &'a BenchOptions,
    ways: Vec<Way>,
}

impl<D: Device, F: Fn(bool) -> Result<Vec<BlockSpec>>> Bench<'_, D, F> {
    fn stream(&mut self, what: &str, options: StreamOptions) -> Result<()> {
        let way = stream_rate(self.device, (self.open)(options.verify_on_device)?, options, self.options.samples)?;
        self.ways.push(Way { what: what.into(), ..way });
        Ok(())
    }

    fn load_all(&mut self, what: &str, options: StreamOptions) -> Result<()> {
        let way = load_all_rate(self.device, self.open, options, self.options.samples)?;
        self.ways.push(Way { what: what.into(), ..way });
        Ok(())
    }
}

/// The rate of plain copies from pinned memory, up to 1 GiB each.
///
/// # Errors
/// Those of the device.
pub fn ceiling<D: Device>(device: &Arc<D>, bytes: u64, samples: usize) -> Result<Rate> {
    let len = usize::try_from(bytes).unwrap_or(usize::MAX).clamp(1, CEILING_BYTES);
    let copies = bytes.div_ceil(len as u64).max(1);
    let stream = device.stream()?;
    let memory = device.allocate(len as u64)?;
    let mut pinned = device.allocate_pinned(len)?;
    pinned.fill(&mut |bytes| {
        // Zeros may travel faster than data.
        bytes.iter_mut().zip(0_u32..).for_each(|(byte, i)| *byte = (i.wrapping_mul(2_654_435_761) >> 24) as u8);
        Ok(())
    })?;
    let mut rates = Vec::new();
    for sample in 0..=samples {
        let start = Instant::now();
        for _ in 0..copies {
            device.copy_pinned(&stream, &pinned, len, &memory, 0)?;
        }
        device.synchronize(&stream)?;
        if sample > 0 {
            rates.push((copies * len as u64) as f64 / start.elapsed().as_secs_f64() / 1e9);
        }
    }
    Ok(Rate::of(rates))
}

/// The rate of streaming the blocks again and again; the first pass warms up.
///
/// # Errors
/// Those of streaming.
pub fn stream_rate<D: Device>(
    device: &Arc<D>,
    blocks: Vec<BlockSpec>,
    options: StreamOptions,
    samples: usize,
) -> Result<Way> {
    let threads = options.staging_threads();
    let options = StreamOptions { prefetch_next_pass: true, ..options };
    let mut streamer = Streamer::open(device.clone(), blocks, options)?;
    let mut rates = Vec::new();
    let mut copies = 0;
    for sample in 0..=samples {
        let report = streamer.pass(|_| Ok(()))?;
        copies = report.copies;
        if sample > 0 {
            rates.push(report.gb_per_s());
        }
    }
    let report = streamer.report();
    streamer.close()?;
    Ok(Way {
        what: "stream".into(),
        rung: report.rung,
        threads: staging_threads(report.rung, threads),
        gb_per_s: Rate::of(rates),
        of_ceiling: 0.0,
        copies,
        register_ms: report.register_ms,
    })
}

/// The rate of loading everything: from the opening of the files to the last
/// byte on the device, all allocations and registrations included, each time
/// anew.
///
/// # Errors
/// Those of streaming.
pub fn load_all_rate<D: Device>(
    device: &Arc<D>,
    open: &impl Fn(bool) -> Result<Vec<BlockSpec>>,
    options: StreamOptions,
    samples: usize,
) -> Result<Way> {
    let threads = options.staging_threads();
    let mut rates = Vec::new();
    let mut last = None;
    for _ in 0..samples.max(1) {
        let start = Instant::now();
        let mut streamer = Streamer::open(device.clone(), open(options.verify_on_device)?, options.clone())?;
        let pass = streamer.pass(|_| Ok(()))?;
        rates.push(pass.bytes as f64 / start.elapsed().as_secs_f64() / 1e9);
        last = Some((streamer.report(), pass));
        streamer.close()?;
    }
    let (rung, copies, register_ms) =
        last.map_or((Rung::D, 0, 0.0), |(report, pass)| (report.rung, pass.copies, report.register_ms));
    Ok(Way {
        what: "load all".into(),
        rung,
        threads: staging_threads(rung, threads),
        gb_per_s: Rate::of(rates),
        of_ceiling: 0.0,
        copies,
        register_ms,
    })
}

fn staging_threads(rung: Rung, threads: usize) -> usize {
    match rung {
        Rung::A | Rung::B => 0,
        Rung::C => threads,
        Rung::D => 1,
    }
}

/// Pages that the kernel has pinned and not let go of, machine-wide, as far as
/// it counts them.
pub fn pinned_pages() -> Option<i64> {
    let vmstat = std::fs::read_to_string("/proc/vmstat").ok()?;
    let count = |name: &str| -> Option<i64> {
        vmstat.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
    };
    Some(count("nr_foll_pin_acquired")? - count("nr_foll_pin_released")?)
}

/// Registers and unregisters the blocks' files again and again. Gives the
/// number of pages that are pinned more than after the first time, where the
/// kernel says; other processes that pin memory meanwhile are counted as well.
///
/// # Errors
/// Those of streaming.
pub fn register_cycles<D: Device>(device: &Arc<D>, blocks: &[BlockSpec], cycles: usize) -> Result<Option<i64>> {
    let cycle = || {
        let options = StreamOptions { registration: Registration::Require, ..StreamOptions::default() };
        Streamer::open(device.clone(), blocks.to_vec(), options)?.close()
    };
    // The driver keeps some memory of its own from its first use on.
    cycle()?;
    let before = pinned_pages();
    (0..cycles).try_for_each(|_| cycle())?;
    Ok(before.zip(pinned_pages()).map(|(before, after)| after - before))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offload::tests::model::Model;
    use crate::offload::{Access, HostDevice};

    #[test]
    fn every_way_of_the_device_is_measured() {
        let model = Model::new(4, 100_000);
        let stream = StreamOptions { threads: 2, ..StreamOptions::default() };
        let options = BenchOptions { samples: 2, threads: vec![1, 2], stream, ..BenchOptions::default() };
        let device = Arc::new(HostDevice::new(&[Access::ReadOnly]));
        let report = bench_h2d(&device, |_| Ok(model.blocks()), &options).unwrap();
        let rungs: Vec<Rung> = report.ways.iter().map(|w| w.rung).collect();
        assert_eq!(rungs, [Rung::A, Rung::A, Rung::C, Rung::C, Rung::D, Rung::A, Rung::C, Rung::A]);
        assert!(report.ways.iter().all(|w| w.of_ceiling > 0.0 && w.gb_per_s.samples == 2), "{report:?}");
        assert_eq!(device.registered_bytes(), 0);
    }

    #[test]
    fn cycles_leave_nothing_registered() {
        let model = Model::new(3, 50_000);
        let device = Arc::new(HostDevice::default());
        register_cycles(&device, &model.blocks(), 10).unwrap();
        assert_eq!(device.registered_bytes(), 0);
    }

    #[test]
    fn the_median_is_the_middle() {
        let rate = Rate::of(vec![3.0, 1.0, 2.0, 10.0]);
        assert_eq!((rate.median, rate.min, rate.max), (2.5, 1.0, 10.0));
        assert_eq!(Rate::of(vec![5.0]).median, 5.0);
    }
}
