//! Benchmarks, in the build that everything else uses.

use std::process::Command;

use anyhow::Result;

use crate::shell;

pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    let program = shell::build_program()?;
    let arguments = if arguments.is_empty() { &["transform"] } else { arguments };
    shell::run(Command::new(program).arg("bench").args(arguments))
}
