//! Every check and test.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::{modules, packages, shell, supply};

pub(crate) fn run() -> Result<()> {
    println!("This installs the wasm target if it is missing, checks formatting and lints, rebuilds the shipped");
    println!("modules and compares them, and runs all tests. Tests of publishing use Debian's docker-registry, which");
    println!("is unpacked into the build folder, and skopeo, which is installed, where apt-get can. GPU tests are");
    println!("skipped where there is no GPU.");
    modules::install_target()?;
    shell::stage("formatting and lints");
    shell::run(shell::cargo().args(["fmt", "--all", "--check"]))?;
    shell::run(shell::cargo().args(["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    supply::check()?;
    modules::check()?;
    shell::stage("building the program");
    let program = shell::build_program()?;
    shell::stage("tests");
    let mut tests = shell::cargo();
    tests.args(["test", "--locked", "--workspace"]).env("WEIGHTMILL_BIN", &program);
    tests.env("PATH", packages::registry_tools());
    if let Some(python) = shell::python(&["safetensors", "numpy"]) {
        tests.env("WEIGHTMILL_PYTHON", python);
    }
    let (passed, failed) = run_and_count(&mut tests)?;
    println!("{passed} passed, {failed} failed");
    Ok(())
}

/// Runs `cargo test`, passes its output on, and adds up what its many test
/// programs say.
fn run_and_count(tests: &mut Command) -> Result<(u64, u64)> {
    let mut child = tests.stdout(Stdio::piped()).spawn().context("starting cargo test")?;
    let output = child.stdout.take().context("cargo test has an output")?;
    let (mut passed, mut failed) = (0, 0);
    for line in BufReader::new(output).lines() {
        let line = line?;
        println!("{line}");
        if let Some(counts) = line.strip_prefix("test result: ") {
            let number = |what: &str| {
                let words: Vec<&str> = counts.split([' ', ';']).collect();
                let at = words.iter().position(|word| *word == what)?;
                words.get(at.checked_sub(1)?)?.parse::<u64>().ok()
            };
            passed += number("passed").unwrap_or(0);
            failed += number("failed").unwrap_or(0);
        }
    }
    let status = child.wait()?;
    ensure!(status.success() && failed == 0 && passed > 0, "{passed} passed, {failed} failed: {status}");
    Ok((passed, failed))
}
