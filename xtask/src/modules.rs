//! Building the shipped modules, reproducibly.
//!
//! The same source gives the same bytes in any folder: the toolchain is
//! pinned, paths are remapped, and everything is compiled into one unit.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::shell;

fn dist() -> PathBuf {
    shell::root().join("transforms/dist")
}

/// The crates under `transforms/`, ascending.
fn crates() -> Result<Vec<String>> {
    let mut names = Vec::new();
    for folder in std::fs::read_dir(shell::root().join("transforms"))? {
        let folder = folder?.path();
        if folder.join("Cargo.toml").exists() {
            names.push(folder.file_name().context("a folder has a name")?.to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Installs the target that modules are built for.
pub(crate) fn install_target() -> Result<()> {
    let listed = std::process::Command::new("rustup")
        .current_dir(shell::root())
        .args(["target", "list", "--installed"])
        .output();
    let installed = listed.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    if installed.lines().any(|line| line == "wasm32-unknown-unknown") {
        return Ok(());
    }
    shell::run(std::process::Command::new("rustup").current_dir(shell::root()).args([
        "target",
        "add",
        "wasm32-unknown-unknown",
    ]))
}

/// Builds every module; their bytes by name.
fn build() -> Result<BTreeMap<String, Vec<u8>>> {
    install_target()?;
    let names = crates()?;
    let mut command = shell::cargo();
    command.args(["build", "--locked", "--profile", "guest", "--target", "wasm32-unknown-unknown"]);
    names.iter().for_each(|name| {
        command.args(["--package", name]);
    });
    command.env("CARGO_ENCODED_RUSTFLAGS", flags().join("\u{1f}"));
    command.env_remove("RUSTFLAGS");
    shell::run(&mut command)?;
    let folder = shell::target().join("wasm32-unknown-unknown/guest");
    let read = |name: String| {
        let file = folder.join(format!("{}.wasm", name.replace('-', "_")));
        Ok((name, std::fs::read(&file).with_context(|| format!("reading {}", file.display()))?))
    };
    names.into_iter().map(read).collect()
}

/// What makes the output independent of the folder it is built in, and fast.
fn flags() -> Vec<String> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::var_os("HOME").map(|h| Path::new(&h).join(".cargo")));
    let mut flags = vec![
        "-Ctarget-feature=+simd128".to_string(),
        // Memory that an instance dirties has to be zeroed again for each tile.
        "-Clink-arg=-zstack-size=65536".to_string(),
        // Rewriting loops' addresses, it loses that they do not wrap, and so
        // makes an addition of what could be the offset of a load.
        "-Cllvm-args=--disable-lsr".to_string(),
        format!("--remap-path-prefix={}=/weightmill", shell::root().display()),
    ];
    if let Some(home) = home {
        flags.push(format!("--remap-path-prefix={}=/cargo", home.display()));
    }
    flags
}

/// Rebuilds `transforms/dist`.
pub(crate) fn rebuild() -> Result<()> {
    shell::stage("building the shipped modules");
    std::fs::create_dir_all(dist())?;
    let built = build()?;
    for (name, bytes) in &built {
        std::fs::write(dist().join(format!("{name}.wasm")), bytes)?;
    }
    let mut sums = String::new();
    for name in built.keys() {
        let sum = shell::sha256_file(&dist().join(format!("{name}.wasm")))?;
        println!("{sum}  {name}.wasm  {} bytes", built[name].len());
        sums.push_str(&format!("{sum}  {name}.wasm\n"));
    }
    std::fs::write(dist().join("SHA256SUMS"), sums)?;
    Ok(())
}

/// Rebuilds and compares with `transforms/dist`.
pub(crate) fn check() -> Result<()> {
    shell::stage("comparing the shipped modules with their source");
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        eprintln!("  skipped: the committed modules are compared on Linux x86-64 only");
        return Ok(());
    }
    let mut wrong = Vec::new();
    let built = build()?;
    for (name, bytes) in &built {
        let committed = std::fs::read(dist().join(format!("{name}.wasm"))).unwrap_or_default();
        if committed != *bytes {
            wrong.push(format!("{name}.wasm: {} bytes committed, {} built", committed.len(), bytes.len()));
        }
    }
    let sums = std::fs::read_to_string(dist().join("SHA256SUMS"))?;
    for line in sums.lines() {
        let (sum, file) = line.split_once("  ").context("a line of SHA256SUMS has two columns")?;
        if shell::sha256_file(&dist().join(file))? != sum {
            wrong.push(format!("{file}: not what SHA256SUMS says"));
        }
    }
    if sums.lines().count() != built.len() {
        wrong.push(format!("SHA256SUMS lists {} modules, there are {}", sums.lines().count(), built.len()));
    }
    if !wrong.is_empty() {
        bail!("transforms/dist is not what its source gives; run `cargo xtask modules`:\n  {}", wrong.join("\n  "));
    }
    println!("  {} modules equal their source, byte for byte", built.len());
    Ok(())
}
