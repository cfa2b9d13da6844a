//! `weightmill load`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::ValueEnum;

use super::args::{Global, Mode, RecipeArgs, WorkArgs, size};
use super::output::{self, Style};
use super::progress::Bar;
use super::session::{self, Session};
use crate::error::{Code, Error, Result};
use crate::execute::build::{self, BuildOptions, Built, Entry};
use crate::execute::{Graph, SpillRoom, Workshop, arrange};
use crate::load::{blocks_of_entry, blocks_of_graph};
use crate::offload::{
    BlockSpec, CudaDevice, Device, HostDevice, NodeLock, PassReport, Probe, ProbeFolder, ProbeRecords, Registration,
    StreamOptions, StreamReport, Streamer,
};
use crate::progress::Progress;
use crate::store;

const EXAMPLES: &str = "Examples:
  weightmill load --recipe recipes/gpt-neox.toml --checkpoint pythia-160m --passes 3
  weightmill load --recipe R --checkpoint C --device cuda --registration require --verify device
  weightmill load --recipe R --checkpoint C --mode disabled

Streams every block, in order, through rotating device buffers; a pass is all blocks once.";

/// Make or find the entry, and stream its blocks to a device.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    #[command(flatten)]
    work: WorkArgs,
    /// host, cuda or cuda:N
    #[arg(long, default_value = "host")]
    device: String,
    /// Whether files are registered with the device
    #[arg(long, value_enum, default_value_t = RegistrationArg::Auto)]
    registration: RegistrationArg,
    /// Register at most so much memory; 0 registers nothing
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pin_limit: Option<u64>,
    /// Bytes of staging buffers
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "512MiB")]
    staging: u64,
    /// Threads that fill staging buffers [default: one a core, at most 12]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    staging_threads: Option<u16>,
    /// Rotating device buffers
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(2..))]
    slots: u16,
    /// Keep the first N blocks, and rest, on the device
    #[arg(long, value_name = "N", default_value_t = 0)]
    resident: usize,
    /// Stream everything so many times
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    passes: u32,
    /// When bytes are verified: before streaming, or on the device after they arrived
    #[arg(long, value_enum, default_value_t = VerifyArg::First)]
    verify: VerifyArg,
    /// What a failing store means
    #[arg(long, value_enum, default_value_t = Mode::Preferred)]
    mode: Mode,
    /// A tmpfs folder for copies that a node's processes share, for devices that cannot register
    /// files on disk; they take memory, and `store gc` removes those of blobs that are gone
    #[arg(long, value_name = "DIR")]
    tmpfs: Option<PathBuf>,
    /// Copy every block back and compare it with its source; slow
    #[arg(long)]
    check_copy_back: bool,
    /// Write a time line that Chrome and Perfetto read
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RegistrationArg {
    /// Never
    Off,
    /// Where it works
    Auto,
    /// Or fail
    Require,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum VerifyArg {
    /// At every load
    Always,
    /// Once per blob and boot
    First,
    /// Never
    Never,
    /// On the device, over what arrived
    Device,
}

impl VerifyArg {
    fn of_store(self) -> store::Verify {
        match self {
            VerifyArg::Always => store::Verify::Always,
            VerifyArg::First => store::Verify::First,
            VerifyArg::Never | VerifyArg::Device => store::Verify::Never,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            VerifyArg::Always => "always",
            VerifyArg::First => "first",
            VerifyArg::Never => "never",
            VerifyArg::Device => "device",
        }
    }
}

/// What streaming came to.
struct Streamed {
    report: StreamReport,
    passes: Vec<PassReport>,
    ceiling_gb_per_s: f64,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    if args.mode == Mode::Disabled && args.verify == VerifyArg::Device {
        return Err(Error::new(Code::BadParams, "--verify device needs leaf lists, which --mode disabled has none of")
            .hint("use another --verify, or let the store be used"));
    }
    let store = match args.mode {
        Mode::Disabled => None,
        Mode::Preferred | Mode::Required => Some(session::store(global)),
    };
    let known = store.as_ref().and_then(|store| store.as_ref().ok());
    let session = Session::open(&args.recipe, known, None)?;
    let bar = Arc::new(Bar::new());
    let pool = session::pool(args.work.jobs)?;
    let outline = session.outline()?;
    if !global.json {
        output::line(super::plan::headline(&outline));
    }
    let Some(store) = store else {
        let steps = outline.steps()?;
        let graph = Arc::new(Graph::new(outline.checkpoint().clone(), steps));
        let shards = arrange(&graph, &outline.resolution)?;
        let room = SpillRoom::memory_only(session::memory_budget(&args.work));
        let workshop = Workshop::new(&graph, &pool, 1, &room, bar.as_ref());
        shards.iter().flat_map(|s| &s.tensors).try_for_each(|w| workshop.prepare(w.source))?;
        let blocks = blocks_of_graph(&graph, &outline.resolution, &shards)?;
        let streamed = stream_on(args, blocks, None, &bar)?;
        outline.checkpoint().files().iter().try_for_each(|file| file.check_unchanged())?;
        return finish(global, args, &bar, None, &streamed);
    };
    let options = BuildOptions {
        mode: if args.mode == Mode::Required { build::Mode::Required } else { build::Mode::Preferred },
        verify: args.verify.of_store(),
        pool: &pool,
        memory_budget_bytes: session::memory_budget(&args.work),
        check_source: false,
        remote: None,
        progress: bar.as_ref(),
        provenance: &|| session.provenance(),
    };
    let built = build::build(&outline, store, &options)?;
    let blocks = blocks_of_entry(&built.entry, args.verify == VerifyArg::Device, bar.as_ref())?;
    let state = match &built.entry {
        Entry::Stored(lease) => Some(lease.store_root().to_path_buf()),
        Entry::Memory(_) => None,
    };
    let streamed = stream_on(args, blocks, state.as_deref(), &bar)?;
    finish(global, args, &bar, Some(&built), &streamed)
}

/// Streams on the device that was asked for. `root` is the store's, where
/// probes are recorded and registrations serialised.
fn stream_on(args: &Args, blocks: Vec<BlockSpec>, root: Option<&Path>, bar: &Arc<Bar>) -> Result<Streamed> {
    match parse_device(&args.device)? {
        None => stream(Arc::new(HostDevice::default()), args, blocks, root, bar),
        Some(ordinal) => stream(Arc::new(CudaDevice::open(ordinal)?), args, blocks, root, bar),
    }
}

/// The number of a CUDA device, or `None` for the host.
pub(super) fn parse_device(text: &str) -> Result<Option<usize>> {
    let wrong = || Error::new(Code::NoDevice, format!("'{text}' is no device")).hint("write host, cuda or cuda:N");
    match text.split_once(':') {
        None if text == "host" => Ok(None),
        None if text == "cuda" => Ok(Some(0)),
        Some(("cuda", ordinal)) => ordinal.parse().map(Some).map_err(|_| wrong()),
        _ => Err(wrong()),
    }
}

fn stream<D: Device>(
    device: Arc<D>,
    args: &Args,
    blocks: Vec<BlockSpec>,
    root: Option<&Path>,
    bar: &Arc<Bar>,
) -> Result<Streamed> {
    let total: u64 = blocks.iter().flat_map(|b| &b.segments).map(|s| s.len).sum();
    let has_rest = blocks.first().is_some_and(|b| b.name == store::document::REST);
    let trace = args.trace.as_ref().map(|_| Arc::new(crate::offload::Trace::default()));
    let options = StreamOptions {
        slots: usize::from(args.slots),
        resident: if args.resident > 0 { args.resident + usize::from(has_rest) } else { 0 },
        registration: match args.registration {
            RegistrationArg::Off => Registration::Off,
            RegistrationArg::Auto => Registration::Auto,
            RegistrationArg::Require => Registration::Require,
        },
        // The host device registers at once.
        single_pass: args.passes == 1 && device.info().probe_registration,
        pin_limit_bytes: args.pin_limit,
        probe: Some(Probe::with_this_program(
            root.map(|root| Arc::new(ProbeFolder(root.join("state"))) as Arc<dyn ProbeRecords>),
        )?),
        node_lock: root.map(|root| NodeLock {
            path: root.join("locks/registration"),
            timeout: std::time::Duration::from_secs(60),
        }),
        tmpfs_root: match (root, &args.tmpfs) {
            (Some(root), Some(dir)) => Some(super::tmpfs::folder_in(root, dir)?),
            _ => None,
        },
        prefetch_next_pass: args.passes > 1,
        staging_bytes: args.staging,
        threads: usize::from(args.staging_threads.unwrap_or(0)),
        verify_on_device: args.verify == VerifyArg::Device,
        check_copy_back: args.check_copy_back,
        progress: Some(bar.clone()),
        trace: trace.clone(),
        ..StreamOptions::default()
    };
    // Enough for a figure, not so much that a small load waits for it.
    let ceiling_gb_per_s = crate::offload::bench::ceiling(&device, 64 << 20, 3)?.median;
    bar.stage("stream", total * u64::from(args.passes));
    let mut streamer = Streamer::open(device, blocks, options)?;
    let mut passes = Vec::new();
    for _ in 0..args.passes {
        passes.push(streamer.pass(|_| Ok(()))?);
    }
    let report = streamer.report();
    streamer.close()?;
    if let (Some(trace), Some(path)) = (trace, &args.trace) {
        trace.write(path)?;
    }
    Ok(Streamed { report, passes, ceiling_gb_per_s })
}

fn finish(global: &Global, args: &Args, bar: &Bar, built: Option<&Built>, streamed: &Streamed) -> Result<ExitCode> {
    bar.clear();
    let Streamed { report, passes, ceiling_gb_per_s } = streamed;
    if global.json {
        let mut document = built.map_or_else(|| serde_json::json!({ "outcome": "disabled" }), super::build::document);
        let rounded = |x: f64| (x * 1e3).round() / 1e3;
        let passes: Vec<_> =
            passes.iter().map(|p| serde_json::json!({ "ms": rounded(p.ms), "gbps": rounded(p.gb_per_s()) })).collect();
        let more = serde_json::json!({
            "device": report.device,
            "rung": report.rung,
            "passed_over": report.passed_over,
            "registered_bytes": report.registered_bytes,
            "pinned_bytes": report.pinned_bytes,
            "h2d_bytes": report.h2d_bytes,
            "h2d_copies": report.h2d_copies,
            "verify": { "mode": args.verify.as_str(), "device": report.verify },
            "passes": passes,
            "ceiling_gbps": rounded(*ceiling_gb_per_s),
        });
        if let (Some(all), serde_json::Value::Object(more)) = (document.as_object_mut(), more) {
            all.extend(more);
        }
        output::json(&document);
        return Ok(ExitCode::SUCCESS);
    }
    match built {
        Some(built) => super::build::print(built),
        None => output::line("transformed while streaming, without the store"),
    }
    let style = Style::stdout();
    output::line(format!("{}  rung {}  ceiling {ceiling_gb_per_s:.1} GB/s", style.bold(&report.device), report.rung));
    let rows: Vec<Vec<String>> = passes
        .iter()
        .enumerate()
        .map(|(i, pass)| {
            vec![
                (i + 1).to_string(),
                pass.blocks.to_string(),
                output::bytes(pass.bytes),
                pass.copies.to_string(),
                format!("{:.1} ms", pass.ms),
                format!("{:.1} GB/s", pass.gb_per_s()),
            ]
        })
        .collect();
    output::line(output::table(&["pass", "blocks", "bytes", "copies", "time", "rate"], &[0, 1, 2, 3, 4, 5], &rows));
    if report.verify.blocks > 0 {
        output::line(format!(
            "{} blocks verified on the device, {} leaves",
            report.verify.blocks, report.verify.leaves
        ));
    }
    Ok(ExitCode::SUCCESS)
}
