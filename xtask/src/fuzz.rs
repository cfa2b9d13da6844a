//! Fuzzing with the pinned toolchain; `fuzz/README.md` says more.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::shell;

const TARGETS: &[&str] = &["header", "host", "module", "plan", "recipe"];

/// Runs one target, for so many seconds (60 if not said).
pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    let (target, seconds) = match arguments {
        [target] => (*target, 60),
        [target, seconds] => (*target, seconds.parse::<u64>().context("SECONDS is a number")?),
        _ => bail!("fuzz TARGET [SECONDS]; targets: {}", TARGETS.join(", ")),
    };
    if !TARGETS.contains(&target) {
        bail!("there is no target '{target}'; targets: {}", TARGETS.join(", "));
    }
    let folder = shell::root().join("fuzz");
    let mut build = shell::cargo();
    build.args(["build", "--manifest-path", "fuzz/Cargo.toml", "--bin", target]);
    build.env("CARGO_TARGET_DIR", folder.join("target")).env("RUSTC_WRAPPER", folder.join("instrument.sh"));
    shell::run(&mut build)?;
    let (grown, artifacts) = (folder.join("target/corpus").join(target), folder.join("artifacts").join(target));
    std::fs::create_dir_all(&grown)?;
    std::fs::create_dir_all(&artifacts)?;
    shell::run(
        Command::new(folder.join("target/debug").join(target))
            .arg(format!("-max_total_time={seconds}"))
            .args(["-timeout=30", "-rss_limit_mb=3000", "-max_len=8192"])
            .arg(format!("-artifact_prefix={}/", artifacts.display()))
            .args([grown, folder.join("corpus").join(target)]),
    )
}
