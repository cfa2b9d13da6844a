//! `weightmill store doctor`.

use std::process::ExitCode;

use crate::cli::args::Global;
use crate::cli::output::{self, Style};
use crate::cli::progress::Bar;
use crate::cli::session;
use crate::error::{Fault, Result};
use crate::store::Finding;

const EXAMPLES: &str = "Examples:
  weightmill store doctor
  weightmill store doctor --fix --json

Looks at the structure: folders, records, owners, modes, sizes, headers, unfinished builds, what
nothing reaches, and quarantine. It does not read tensors: `weightmill verify --all` does.
--fix removes only what can be made again; the next build makes it. It waits for running builds.
Exit status: 0 if all is well, or was repaired, else 3.";

/// Find and explain what is wrong with the store.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Args {
    /// Repair what can be repaired
    #[arg(long)]
    fix: bool,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let store = session::wanted_store(global)?;
    let bar = Bar::new();
    let findings = store.doctor(args.fix, &bar)?;
    bar.clear();
    let left = findings.iter().filter(|finding| !finding.repaired).count();
    if global.json {
        let rows: Vec<_> = findings.iter().map(document).collect();
        output::json(&serde_json::json!({ "healthy": left == 0, "findings": rows }));
    } else {
        findings.iter().for_each(print);
        output::line(match (findings.len(), left) {
            (0, _) => "nothing is wrong".to_string(),
            (n, 0) => format!("{} repaired", output::count(n, "finding")),
            (_, left) if args.fix => format!("{} left, for a person to decide", output::count(left, "finding")),
            (_, left) if findings.iter().any(|f| f.repair.is_some()) => {
                format!("{}; --fix carries out the repairs", output::count(left, "finding"))
            }
            (_, left) => format!("{}, for a person to decide", output::count(left, "finding")),
        });
    }
    Ok(if left == 0 { ExitCode::SUCCESS } else { ExitCode::from(Fault::Environment.exit_status()) })
}

fn document(finding: &Finding) -> serde_json::Value {
    serde_json::json!({
        "path": finding.path.to_string_lossy(),
        "what": finding.what,
        "repair": finding.repair,
        "repaired": finding.repaired,
    })
}

fn print(finding: &Finding) {
    let style = Style::stdout();
    output::line(format!("{}\n  {}", style.bold(&finding.path.display().to_string()), finding.what));
    match (&finding.repair, finding.repaired) {
        (Some(repair), true) => output::line(style.green(&format!("  repaired: {repair}"))),
        (Some(repair), false) => output::line(format!("  --fix would: {repair}")),
        (None, _) => output::line("  only a person can decide what to do"),
    }
}
