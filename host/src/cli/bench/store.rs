//! `weightmill bench store`.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::bench::store::{Compared, Options, run as measure};
use crate::cli::args::{Global, size};
use crate::cli::output;
use crate::cli::progress::Bar;
use crate::error::Result;

const EXAMPLES: &str = "Examples:
  weightmill bench store
  weightmill bench store --folder /data/tmp --bytes 4GiB --runs 7 --json

A hit should cost the same whatever the entry's size. Verification is held against SHA-256 of the
same files, a cold build against a loop that reads, hashes three times, writes and syncs. Run it on
the disk that the store will be on, with nothing else at work: all cores are used.";

/// Hits, verification and cold builds against plain loops over the same bytes.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Args {
    /// Where the files are made; they are removed afterwards [default: the folder for temporary files]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Bytes of the entry that is built and verified
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "512MiB")]
    bytes: u64,
    /// Bytes of the smaller entry that is hit; it is sparse
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "100MB")]
    small: u64,
    /// Bytes of the larger entry that is hit; it is sparse, but hashed and verified once
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "10GB")]
    large: u64,
    /// Runs of each; the medians are compared
    #[arg(long, value_name = "N", default_value_t = 5)]
    runs: usize,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let options = Options {
        folder: args.folder.clone().unwrap_or_else(std::env::temp_dir),
        bytes: args.bytes,
        small_bytes: args.small,
        large_bytes: args.large,
        runs: args.runs,
    };
    let report = measure(&options, &Bar::new())?;
    if global.json {
        output::json(&serde_json::json!({
            "bytes": args.bytes,
            "small_bytes": args.small,
            "large_bytes": args.large,
            "runs": args.runs,
            "store": report,
        }));
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows: Vec<Vec<String>> = report
        .hits
        .iter()
        .map(|hit| {
            vec![
                format!("hit of {}, verified: {}", output::bytes(args.large), hit.verify),
                format!("{:.2} ms", hit.large_ms),
                format!("{:.2} ms", hit.small_ms),
                format!("{:.2}", hit.ratio),
                format!("hit of {}; lower is better", output::bytes(args.small)),
            ]
        })
        .collect();
    let mut add = |what: &str, compared: &Compared, baseline: &str| {
        rows.push(vec![
            what.to_string(),
            format!("{:.2} GB/s", compared.gb_per_s),
            format!("{:.2} GB/s", compared.baseline_gb_per_s),
            format!("{:.2}", compared.ratio),
            baseline.to_string(),
        ]);
    };
    add("full verification", &report.verify, "SHA-256 of the same files");
    add("cold build", &report.publish, "read, 3 × SHA-256, write, sync");
    output::line(output::table(&["what", "weightmill", "baseline", "ratio", "baseline is"], &[1, 2, 3], &rows));
    output::line(format!(
        "{}, {} in {}, built {}; medians of {} runs",
        output::count(report.threads, "thread"),
        output::count(report.tensors, "tensor"),
        output::count(report.shards, "shard"),
        output::bytes(args.bytes),
        args.runs
    ));
    Ok(ExitCode::SUCCESS)
}
