//! Running programs, and saying so.

use std::ffi::OsStr;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

/// The workspace's folder.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_path_buf).unwrap_or_default()
}

/// The build folder.
pub(crate) fn target() -> PathBuf {
    let folder = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    if folder.is_absolute() { folder } else { root().join(folder) }
}

/// Announces a stage.
pub(crate) fn stage(what: &str) {
    eprintln!("\n── {what}");
}

/// A program of the toolchain that runs this one.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// Runs a program to its end and wants success.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = shown(command);
    eprintln!("$ {shown}");
    let start = Instant::now();
    let status = command.status().with_context(|| format!("starting {shown}"))?;
    ensure!(status.success(), "{shown}: {status}");
    eprintln!("  ({:.1} s)", start.elapsed().as_secs_f64());
    Ok(())
}

/// Whether a program starts and succeeds.
pub(crate) fn works(program: impl AsRef<OsStr>, arguments: &[&str]) -> bool {
    Command::new(program).args(arguments).output().is_ok_and(|o| o.status.success())
}

fn shown(command: &Command) -> String {
    let root = root();
    let short = |text: &OsStr| {
        let text = text.to_string_lossy();
        text.strip_prefix(&format!("{}/", root.display())).unwrap_or(&text).to_string()
    };
    std::iter::once(short(command.get_program())).chain(command.get_args().map(short)).collect::<Vec<_>>().join(" ")
}

/// SHA-256 of a file, in hexadecimal.
pub(crate) fn sha256_file(path: &Path) -> Result<String> {
    let mut file = std::fs::File::open(path).with_context(|| format!("opening {}", path.display()))?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer).with_context(|| format!("reading {}", path.display()))?;
        if read == 0 {
            break;
        }
        hasher.update(&buffer[..read]);
    }
    Ok(hasher.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

/// Builds the program and says where it is. The whole workspace is built, as
/// the tests do: for a single package cargo would choose other features of the
/// dependencies, and compile wasmtime twice.
pub(crate) fn build_program() -> Result<PathBuf> {
    run(cargo().args(["build", "--locked", "--workspace"]))?;
    Ok(target().join("debug/weightmill"))
}

/// A Python with `packages`, in a virtual environment under the build folder;
/// `None`, with the reason on standard error, if there can be none.
pub(crate) fn python(packages: &[&str]) -> Option<PathBuf> {
    let environment = target().join("python");
    let python = environment.join("bin/python");
    let imports = packages.iter().map(|p| format!("import {p}")).collect::<Vec<_>>().join("; ");
    if works(&python, &["-c", &imports]) {
        return Some(python);
    }
    if !works("python3", &["--version"]) {
        eprintln!("  no python3: skipping what needs it");
        return None;
    }
    let made = run(Command::new("python3").args(["-m", "venv"]).arg(&environment))
        .and_then(|()| run(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(packages)));
    match made {
        Ok(()) => Some(python),
        Err(e) => {
            eprintln!("  no Python environment ({e}): skipping what needs {}", packages.join(", "));
            None
        }
    }
}
