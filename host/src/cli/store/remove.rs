//! `weightmill store rm`.

use std::process::ExitCode;

use crate::cli::args::Global;
use crate::cli::progress::Bar;
use crate::cli::{output, session};
use crate::error::Result;
use crate::store::GcReport;

const EXAMPLES: &str = "Examples:
  weightmill store rm 9f3c1d2a
  weightmill store rm 9f3c1d2a 07aa41c5 --json

An entry that is in use is not removed (lock_timeout). Blobs that other entries share stay.";

/// Remove entries, and what only they are made of.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Args {
    /// The keys, or the beginnings of them
    #[arg(value_name = "KEY", required = true)]
    keys: Vec<String>,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let store = session::wanted_store(global)?;
    let mut keys = args.keys.iter().map(|text| session::find_key(&store, text)).collect::<Result<Vec<_>>>()?;
    keys.sort_unstable();
    keys.dedup();
    // All or none of a list with a slip in it.
    let known = store.keys()?;
    if let Some(key) = keys.iter().find(|key| known.binary_search(key).is_err()) {
        return Err(super::missing(key));
    }
    let bar = Bar::new();
    let mut total = GcReport::default();
    for key in &keys {
        let (done, all) = (total.evicted.len(), keys.len());
        let report = store.remove(key, &bar).map_err(|e| match done {
            0 => e,
            _ => e.context(format!("after {done} of {all} were removed")),
        })?;
        if total.evicted.is_empty() {
            total.size_before_bytes = report.size_before_bytes;
        }
        total.evicted.extend(report.evicted);
        total.blobs_removed += report.blobs_removed;
        total.bytes_freed += report.bytes_freed;
        total.work_removed += report.work_removed;
        total.records_removed += report.records_removed;
        total.size_after_bytes = report.size_after_bytes;
    }
    bar.clear();
    if global.json {
        output::json(&super::gc::document(&total, false));
    } else {
        total.evicted.iter().for_each(|key| output::line(format!("removed {}", key.short())));
        output::line(format!("{} freed", output::bytes(total.bytes_freed)));
    }
    Ok(ExitCode::SUCCESS)
}
