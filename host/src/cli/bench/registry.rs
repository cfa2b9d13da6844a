//! `weightmill bench registry`.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::bench::registry::{Options, run as measure};
use crate::cli::args::{Global, size};
use crate::cli::output;
use crate::cli::progress::Bar;
use crate::error::Result;

const EXAMPLES: &str = "Examples:
  weightmill bench registry
  weightmill bench registry --bytes 4GiB --folder /data/tmp --json

Starts Debian's docker-registry on the loopback, pushes an entry, and pulls it into an empty store
against curl and sha256sum of the same blobs from the same registry.";

/// Pulling an entry against curl and SHA-256 of the same blobs.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Args {
    /// Where the files are made; they are removed afterwards [default: the folder for temporary files]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Bytes of the entry
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "1GiB")]
    bytes: u64,
    /// Runs of each; the medians are compared
    #[arg(long, value_name = "N", default_value_t = 3)]
    runs: usize,
    /// Blobs that weightmill transfers at once
    #[arg(long, value_name = "N", default_value_t = 4)]
    connections: usize,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let options = Options {
        folder: args.folder.clone().unwrap_or_else(std::env::temp_dir),
        bytes: args.bytes,
        runs: args.runs,
        connections: args.connections,
    };
    let report = measure(&options, &Bar::new())?;
    if global.json {
        output::json(&serde_json::json!({ "runs": args.runs, "connections": args.connections, "registry": report }));
        return Ok(ExitCode::SUCCESS);
    }
    let rows = [vec![
        "pull".to_string(),
        format!("{:.2} GB/s", report.pull.gb_per_s),
        format!("{:.2} GB/s", report.pull.baseline_gb_per_s),
        format!("{:.2}", report.pull.ratio),
        "curl, then sha256sum, of the same blobs".to_string(),
    ]];
    output::line(output::table(&["what", "weightmill", "baseline", "ratio", "baseline is"], &[1, 2, 3], &rows));
    output::line(format!(
        "{} of {}, pushed at {:.2} GB/s; {} at once; medians of {} runs",
        output::count(report.blobs, "blob"),
        output::bytes(report.bytes),
        report.push_gb_per_s,
        args.connections,
        args.runs
    ));
    Ok(ExitCode::SUCCESS)
}
