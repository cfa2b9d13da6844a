//! `weightmill bench`.

mod registry;
mod store;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Subcommand;

use super::args::{Global, size};
use super::output;
use super::progress::Bar;
use super::session;
use crate::bench::{checkpoint, transform};
use crate::error::{Code, Error, Result};
use crate::load::blocks_of_lease;
use crate::offload::bench::{BenchOptions, BenchReport, bench_h2d};
use crate::offload::{CudaDevice, HostDevice};
use crate::progress::Silent;
use crate::store::Verify;

/// Measure against a baseline in the same run.
#[derive(Subcommand)]
pub(super) enum BenchCommand {
    /// Transforms against the same work without weightmill, as ratios
    #[command(
        after_help = "Examples:\n  weightmill bench transform\n  weightmill bench transform --all --bytes 1GiB --json\n  weightmill bench transform --module fp8-quantize"
    )]
    Transform {
        /// Every shipped module, not only qkv-regroup and cast
        #[arg(long, conflicts_with = "module")]
        all: bool,
        /// This module only; may be repeated
        #[arg(long, value_name = "NAME")]
        module: Vec<String>,
        /// About how many bytes go into each transform
        #[arg(long, value_name = "SIZE", value_parser = size, default_value = "128MiB")]
        bytes: u64,
        /// Runs of each and its baseline, in turn; medians of the ratios are reported
        #[arg(long, value_name = "N", default_value_t = 5)]
        runs: usize,
    },
    /// Hits, verification and cold builds against plain loops over the same bytes, as ratios
    Store(store::Args),
    /// Pulling an entry from a registry against curl and SHA-256 of the same blobs
    Registry(registry::Args),
    /// An entry to the device by every way there is, against plain copies from pinned memory
    #[command(after_help = "Examples:\n  weightmill bench h2d --entry 9f3c1d2a --device cuda --json")]
    H2d {
        /// An entry of the store: its key, or the beginning of it
        #[arg(long, value_name = "KEY")]
        entry: String,
        /// host, cuda or cuda:N
        #[arg(long, default_value = "cuda")]
        device: String,
        /// Passes of each way; the medians are compared
        #[arg(long, value_name = "N", default_value_t = 7)]
        runs: usize,
        /// A tmpfs folder for the node-shared copy of rung B
        #[arg(long, value_name = "DIR")]
        tmpfs: Option<PathBuf>,
    },
    /// Writes a checkpoint with GPT-NeoX's names to try things on
    Checkpoint {
        /// The folder to make
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Layers
        #[arg(long, default_value_t = 6)]
        layers: u64,
        /// Width; a multiple of 64
        #[arg(long, default_value_t = 768)]
        hidden: u64,
    },
}

pub(super) fn run(global: &Global, command: &BenchCommand) -> Result<ExitCode> {
    match command {
        BenchCommand::Transform { all, module, bytes, runs } => {
            let some = || vec!["qkv-regroup".to_string(), "cast".to_string()];
            let only = if *all {
                Vec::new()
            } else if module.is_empty() {
                some()
            } else {
                module.clone()
            };
            transforms(global, *bytes, *runs, &only)
        }
        BenchCommand::Store(args) => store::run(global, args),
        BenchCommand::Registry(args) => registry::run(global, args),
        BenchCommand::H2d { entry, device, runs, tmpfs } => {
            let store = session::wanted_store(global)?;
            let key = session::find_key(&store, entry)?;
            let lease = store.lease(&key, Verify::First, &session::pool(None)?, &Bar::new())?;
            let lease = lease.ok_or_else(|| {
                Error::new(Code::SourceUnavailable, format!("the store has no entry {key}"))
                    .hint("`weightmill store ls` lists the keys")
            })?;
            let options = BenchOptions { samples: *runs, tmpfs_root: tmpfs.clone(), ..BenchOptions::default() };
            let open = |leaf_hashes| blocks_of_lease(&lease, leaf_hashes, &Silent);
            let report = match super::load::parse_device(device)? {
                None => bench_h2d(&Arc::new(HostDevice::default()), open, &options)?,
                Some(ordinal) => bench_h2d(&Arc::new(CudaDevice::open(ordinal)?), open, &options)?,
            };
            links(global, &report)
        }
        BenchCommand::Checkpoint { out, layers, hidden } => generate(out, *layers, *hidden),
    }
}

fn transforms(global: &Global, bytes: u64, runs: usize, only: &[String]) -> Result<ExitCode> {
    let report = transform::run(bytes, runs, only)?;
    if global.json {
        output::json(&serde_json::json!({ "bytes": bytes, "runs": runs, "report": report }));
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<Vec<String>> = report
        .transforms
        .iter()
        .map(|row| {
            vec![
                row.module.clone(),
                row.how.to_string(),
                format!("{:.2}", row.gb_per_s),
                format!("{:.2}", row.ratio),
                format!("{:.2}", row.unhashed_gb_per_s),
                format!("{:.2}", row.unhashed_ratio),
                format!("{:.1}", row.of_sha256),
                kernel(row, |k| format!("{:.2}", k.gb_per_s)),
                kernel(row, |k| format!("{:.2}", k.ratio)),
                kernel(row, |k| format!("{:.1}", k.of_sha256)),
            ]
        })
        .collect();
    let header =
        ["module", "bytes are", "GB/s hashed", "ratio", "GB/s", "ratio", "of SHA", "kernel GB/s", "ratio", "of SHA"];
    output::line(output::table(&header, &[2, 3, 4, 5, 6, 7, 8, 9], &rows));
    output::line(format!(
        "one thread, {} of input, medians of {runs}; SHA-256 {:.2} GB/s; a ratio is the baseline's time over weightmill's",
        output::bytes(bytes),
        report.sha256_gb_per_s
    ));
    Ok(ExitCode::SUCCESS)
}

fn kernel(row: &transform::Row, show: impl Fn(&transform::Kernel) -> String) -> String {
    row.kernel.as_ref().map_or_else(|| "-".to_string(), show)
}

fn links(global: &Global, report: &BenchReport) -> Result<ExitCode> {
    if global.json {
        output::json(&serde_json::json!(report));
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<Vec<String>> = report
        .ways
        .iter()
        .map(|way| {
            vec![
                way.what.clone(),
                way.rung.to_string(),
                way.threads.to_string(),
                format!("{:.1}", way.gb_per_s.median),
                format!("{:.3}", way.of_ceiling),
            ]
        })
        .collect();
    output::line(output::table(&["way", "rung", "threads", "GB/s", "of the ceiling"], &[2, 3, 4], &rows));
    output::line(format!(
        "{}, driver {}: {} in {} blocks; ceiling {:.1} GB/s",
        report.device,
        report.driver,
        output::bytes(report.bytes),
        report.blocks,
        report.ceiling.median
    ));
    Ok(ExitCode::SUCCESS)
}

fn generate(out: &Path, layers: u64, hidden: u64) -> Result<ExitCode> {
    checkpoint::write_gpt_neox(out, layers, hidden)?;
    output::line(out.display());
    Ok(ExitCode::SUCCESS)
}
