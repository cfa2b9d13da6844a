//! The table of digests that two hosts compare.

use std::process::Command;

use anyhow::{Result, bail, ensure};

use crate::shell;

/// The target that can be run here under emulation.
const AARCH64: &str = "aarch64-unknown-linux-gnu";

/// Without a target: this machine. With one: the program built for it, under
/// emulation, quickly.
pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    match arguments {
        [] => here(&[]),
        ["--quick"] => here(&["--quick"]),
        ["--target", AARCH64 | "aarch64"] => emulated(),
        other => bail!("reproduce takes --quick or --target aarch64, not {}", other.join(" ")),
    }
}

fn here(arguments: &[&str]) -> Result<()> {
    let program = shell::build_program()?.with_file_name("reproduce");
    shell::run(Command::new(program).args(arguments))
}

/// Needs Debian's qemu-user, gcc-aarch64-linux-gnu and libc6-dev-arm64-cross, or
/// what they are elsewhere.
fn emulated() -> Result<()> {
    for (program, package) in [("qemu-aarch64", "qemu-user"), ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu")] {
        ensure!(shell::works(program, &["--version"]), "there is no {program}: install {package} (Debian's name)");
    }
    shell::run(Command::new("rustup").current_dir(shell::root()).args(["target", "add", AARCH64]))?;
    let mut build = shell::cargo();
    build.args(["build", "--locked", "--package", "weightmill-tests", "--bin", "reproduce", "--target", AARCH64]);
    build.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc");
    shell::run(&mut build)?;
    let program = shell::target().join(AARCH64).join("debug/reproduce");
    shell::run(Command::new("qemu-aarch64").args(["-L", "/usr/aarch64-linux-gnu"]).arg(program).arg("--quick"))
}
