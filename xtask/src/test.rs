//! Every check and test.

use anyhow::Result;

use crate::{modules, shell};

pub(crate) fn run() -> Result<()> {
    println!("This installs the wasm target if it is missing, checks formatting and lints, rebuilds the shipped");
    println!("modules and compares them, and runs all tests. GPU tests are skipped where there is no GPU.");
    modules::install_target()?;
    shell::stage("formatting and lints");
    shell::run(shell::cargo().args(["fmt", "--all", "--check"]))?;
    shell::run(shell::cargo().args(["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    modules::check()?;
    shell::stage("building the program");
    let program = shell::build_program()?;
    shell::stage("tests");
    let mut tests = shell::cargo();
    tests.args(["test", "--locked", "--workspace"]).env("WEIGHTMILL_BIN", &program);
    if let Some(python) = shell::python(&["safetensors", "numpy"]) {
        tests.env("WEIGHTMILL_PYTHON", python);
    }
    shell::run(&mut tests)
}
