//! `weightmill bench`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Subcommand;

use super::args::{Global, size};
use super::output;
use crate::bench::{checkpoint, transform};
use crate::error::Result;

/// Measure against a baseline in the same run.
#[derive(Subcommand)]
pub(super) enum BenchCommand {
    /// Transforms against the same work by plain Rust, as ratios
    #[command(after_help = "Examples:\n  weightmill bench transform\n  weightmill bench transform --bytes 1GiB --json")]
    Transform {
        /// Bytes that go into each transform
        #[arg(long, value_name = "SIZE", value_parser = size, default_value = "256MiB")]
        bytes: u64,
        /// Runs of each; the medians are compared
        #[arg(long, value_name = "N", default_value_t = 5)]
        runs: usize,
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
        BenchCommand::Transform { bytes, runs } => transforms(global, *bytes, *runs),
        BenchCommand::Checkpoint { out, layers, hidden } => generate(out, *layers, *hidden),
    }
}

fn transforms(global: &Global, bytes: u64, runs: usize) -> Result<ExitCode> {
    let rows = transform::run(bytes, runs)?;
    if global.json {
        output::json(&serde_json::json!({ "bytes": bytes, "runs": runs, "transforms": rows }));
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<Vec<String>> = rows.iter().map(|row| {
        vec![
            row.module.clone(),
            row.how.to_string(),
            format!("{:.2} GB/s", row.gb_per_s),
            format!("{:.2} GB/s", row.baseline_gb_per_s),
            format!("{:.2}", row.ratio),
            row.baseline.to_string(),
        ]
    }).collect();
    output::line(output::table(&["module", "how", "weightmill", "baseline", "ratio", "baseline is"], &[2, 3, 4], &rows));
    Ok(ExitCode::SUCCESS)
}

fn generate(out: &Path, layers: u64, hidden: u64) -> Result<ExitCode> {
    checkpoint::write_gpt_neox(out, layers, hidden)?;
    output::line(out.display());
    Ok(ExitCode::SUCCESS)
}
