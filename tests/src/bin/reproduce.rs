//! Prints the table of `cargo xtask reproduce`; exits 1 if anything differs.
//! `--quick` takes one tile size for each number of jobs.

use std::process::ExitCode;

use weightmill_tests::reproduce::{NOT_COMPARED, run};

fn main() -> ExitCode {
    let quick = match std::env::args().skip(1).collect::<Vec<_>>().as_slice() {
        [] => false,
        [only] if only == "--quick" => true,
        other => {
            eprintln!("unknown arguments {other:?}; there is --quick");
            return ExitCode::from(2);
        }
    };
    let report = run(quick, &|what| eprintln!("  {what}"));
    println!("{}", report.table());
    for engine in &report.engines {
        println!("{engine}");
    }
    println!("{} {}", std::env::consts::ARCH, std::env::consts::OS);
    for row in report.differing() {
        println!("\n{} differs:", row.name);
        for (column, cell) in report.columns.iter().zip(&row.cells) {
            let shown = cell.as_ref().unwrap_or_else(|why| why);
            if shown != NOT_COMPARED {
                println!("  {} {:?}: {shown}", column.engine, column.jobs);
            }
        }
    }
    match report.line() {
        Some(line) => {
            println!("\n{line}");
            ExitCode::SUCCESS
        }
        None => ExitCode::FAILURE,
    }
}
