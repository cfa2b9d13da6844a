//! `weightmill store gc`.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

use crate::cli::args::{Global, size};
use crate::cli::progress::Bar;
use crate::cli::{output, session};
use crate::error::{Code, Error, Result};
use crate::store::{GcPolicy, GcReport};

const EXAMPLES: &str = "Examples:
  weightmill store gc                                   leftovers only: no entry goes
  weightmill store gc --max-size 200GB --dry-run
  weightmill store gc --max-age 30d --keep 9f3c1d2a --keep 07aa41c5

The least recently leased entry goes first, one that is in use or kept never. Blobs that other
entries share stay. gc waits for running builds, and they for it; readers are not disturbed.";

/// Evict entries by size and age, and remove what nothing reaches.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Args {
    /// Evict until all that entries and modules are made of has at most so many bytes
    #[arg(long, value_name = "SIZE", value_parser = size)]
    max_size: Option<u64>,
    /// Evict what was not leased for so long: 90min, 12h, 30d, 4w. Cached facts and source digests,
    /// and what is in quarantine, go at this age too
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    max_age: Option<Duration>,
    /// Never evict this entry: its key, or the beginning of it; may be repeated
    #[arg(long, value_name = "KEY", num_args = 1..)]
    keep: Vec<String>,
    /// Only say what would be done
    #[arg(long)]
    dry_run: bool,
}

/// A duration such as `30d`.
fn duration(text: &str) -> Result<Duration> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let scale = match unit.trim_start() {
        "s" => Some(1),
        "min" => Some(60),
        "h" => Some(3_600),
        "d" => Some(86_400),
        "w" => Some(604_800),
        _ => None,
    };
    let seconds = scale.and_then(|scale| number.parse::<u64>().ok()?.checked_mul(scale));
    seconds.map(Duration::from_secs).ok_or_else(|| {
        Error::new(Code::BadParams, format!("'{text}' is no duration; write 45s, 90min, 12h, 30d or 4w"))
    })
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let store = session::wanted_store(global)?;
    let keep = args.keep.iter().map(|text| session::find_key(&store, text)).collect::<Result<BTreeSet<_>>>()?;
    let policy = GcPolicy { max_size_bytes: args.max_size, max_age: args.max_age, keep, dry_run: args.dry_run };
    let before = store.entries()?;
    let model = |key| -> Result<String> {
        let provenance = store.provenance(key)?.into_iter().next().unwrap_or_default();
        Ok(provenance["model"].as_str().unwrap_or("").to_string())
    };
    // They are gone with their entries.
    let models = before.iter().map(|entry| Ok((entry.key, model(&entry.key)?))).collect::<Result<Vec<_>>>()?;
    let bar = Bar::new();
    let report = store.gc(&policy, &bar)?;
    let copies = crate::cli::tmpfs::sweep(store.root(), args.dry_run)?;
    bar.clear();
    if global.json {
        let mut document = document(&report, args.dry_run);
        document["tmpfs_copies_removed"] = copies.copies.into();
        document["tmpfs_bytes_freed"] = copies.bytes.into();
        output::json(&document);
        return Ok(ExitCode::SUCCESS);
    }
    if !report.evicted.is_empty() {
        let model_of = |key| models.iter().find(|(k, _)| k == key).map_or("", |(_, model)| model.as_str());
        let rows: Vec<_> = report.evicted.iter().map(|key| super::describe(key, &before, model_of(key))).collect();
        let what = if args.dry_run { "would be evicted" } else { "evicted" };
        output::line(output::table(&[what, "size", "model"], &[1], &rows));
    }
    for key in &report.in_use {
        output::line(format!("{}  is in use and stays", key.short()));
    }
    output::line(summary(&report, args.dry_run));
    if copies.copies > 0 {
        let would = if args.dry_run { "would be " } else { "" };
        let what = if copies.copies == 1 { "copy" } else { "copies" };
        output::line(format!("{} {what} in tmpfs, {} {would}freed", copies.copies, output::bytes(copies.bytes)));
    }
    Ok(ExitCode::SUCCESS)
}

fn summary(report: &GcReport, dry_run: bool) -> String {
    let would = if dry_run { "would be " } else { "" };
    let mut parts = vec![format!(
        "{}, {} {would}freed; blobs have {} of {}",
        output::count(report.blobs_removed as usize, "blob"),
        output::bytes(report.bytes_freed),
        output::bytes(report.size_after_bytes),
        output::bytes(report.size_before_bytes),
    )];
    if report.work_removed > 0 {
        parts.push(format!("{} {would}removed", output::count(report.work_removed as usize, "leftover")));
    }
    if report.records_removed > 0 {
        parts.push(format!("{} removed", output::count(report.records_removed as usize, "record")));
    }
    parts.join("; ")
}

/// The JSON document of what was removed.
pub(super) fn document(report: &GcReport, dry_run: bool) -> serde_json::Value {
    serde_json::json!({
        "dry_run": dry_run,
        "evicted": report.evicted,
        "in_use": report.in_use,
        "blobs_removed": report.blobs_removed,
        "bytes_freed": report.bytes_freed,
        "work_removed": report.work_removed,
        "records_removed": report.records_removed,
        "size_before_bytes": report.size_before_bytes,
        "size_after_bytes": report.size_after_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        let seconds = |text| duration(text).ok().map(|d| d.as_secs());
        assert_eq!(seconds("45s"), Some(45));
        assert_eq!(seconds("90 min"), Some(5_400));
        assert_eq!(seconds("12h"), Some(43_200));
        assert_eq!(seconds("30d"), Some(2_592_000));
        assert_eq!(seconds("4w"), Some(2_419_200));
        for bad in ["", "3", "d", "-3d", "1.5h", "3m", "99999999999999999999d", "18446744073709551615w"] {
            assert_eq!(seconds(bad), None, "{bad:?}");
        }
    }
}
