//! `weightmill module build`: cargo, with what a module needs to be small,
//! fast and the same bytes wherever it is built.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use serde::Deserialize;

use crate::cli::args::Global;
use crate::cli::output;
use crate::error::{Code, Error, Result};
use crate::sandbox::Module;

const TARGET: &str = "wasm32-unknown-unknown";

const EXAMPLES: &str = "Examples:
  weightmill module build
  weightmill module build path/to/crate --json

The crate needs no profile and no flags of its own: they are given here. The result
is in weightmill/ of cargo's target folder.";

/// Build a module.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Args {
    /// The crate's folder
    #[arg(value_name = "PATH", default_value = ".")]
    folder: PathBuf,
}

/// A module, and the file that it was written to.
pub(super) struct Built {
    pub(super) module: Module,
    pub(super) path: PathBuf,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let Built { module, path } = build(&args.folder)?;
    let (metadata, path) = (module.metadata(), path.display().to_string());
    if global.json {
        output::json(&serde_json::json!({
            "path": path, "name": metadata.name, "version": metadata.version,
            "bytes": module.bytes().len(), "digest": module.digest(),
        }));
    } else {
        output::line(format!(
            "{} {}  {} bytes\n{path}\nsha256 {}",
            metadata.name,
            metadata.version,
            module.bytes().len(),
            module.digest()
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// Builds the crate in `folder` and checks what comes out.
///
/// # Errors
/// `module_build_failed`, or what is wrong with the module.
pub(super) fn build(folder: &Path) -> Result<Built> {
    let manifest = folder.join("Cargo.toml");
    let manifest = manifest.canonicalize().map_err(|e| {
        Error::new(Code::ModuleBuildFailed, format!("there is no crate at {}: {e}", folder.display()))
            .hint("`weightmill module new NAME` starts one")
    })?;
    let folder = manifest.parent().unwrap_or(folder);
    install_target(folder)?;
    let workspace = Workspace::read(folder)?;
    let library = workspace.cdylib_of(&manifest)?;
    let artefact = compile(folder, &workspace, &library)?;
    let bytes = std::fs::read(&artefact).map_err(|e| Error::io(format!("reading {}", artefact.display()), e))?;
    let module = Module::parse(bytes).map_err(|e| e.context(format!("the crate {library} builds, but")))?;
    let out = workspace.target_directory.join("weightmill");
    std::fs::create_dir_all(&out).map_err(|e| Error::io(format!("making {}", out.display()), e))?;
    let path = out.join(format!("{}.wasm", module.metadata().name));
    super::pack::write(&path, module.bytes())?;
    Ok(Built { module, path })
}

fn program(variable: &str, name: &str) -> OsString {
    std::env::var_os(variable).unwrap_or_else(|| name.into())
}

fn cargo(folder: &Path) -> Command {
    let mut command = Command::new(program("CARGO", "cargo"));
    command.current_dir(folder);
    command
}

fn not_started(what: &str, cause: &std::io::Error) -> Error {
    Error::new(Code::ModuleBuildFailed, format!("{what} does not start: {cause}"))
        .hint("building a module needs Rust: see https://rustup.rs")
}

/// Sees to it that the toolchain of `folder` can build for WebAssembly.
fn install_target(folder: &Path) -> Result<()> {
    let mut rustc = Command::new(program("RUSTC", "rustc"));
    rustc.current_dir(folder).args(["--print", "target-libdir", "--target", TARGET]);
    let printed = rustc.output().map_err(|e| not_started("rustc", &e))?;
    let folder_of_target = PathBuf::from(String::from_utf8_lossy(&printed.stdout).trim());
    if printed.status.success() && folder_of_target.is_dir() {
        return Ok(());
    }
    eprintln!("the target {TARGET} is not installed: rustup target add {TARGET}");
    let added =
        Command::new("rustup").current_dir(folder).args(["target", "add", TARGET]).stdout(Stdio::null()).status();
    match added {
        Ok(status) if status.success() => Ok(()),
        Ok(_) | Err(_) => Err(Error::new(Code::ModuleBuildFailed, format!("the toolchain has no target {TARGET}"))
            .hint(format!(
                "`rustup target add {TARGET}` installs it; without rustup, install it with your distribution's Rust"
            ))),
    }
}

/// What `cargo metadata` says, as far as it is of interest.
#[derive(Deserialize)]
struct Workspace {
    packages: Vec<Package>,
    target_directory: PathBuf,
    workspace_root: PathBuf,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    manifest_path: PathBuf,
    /// `None` for a package of the local disk.
    source: Option<String>,
    targets: Vec<Target>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    crate_types: Vec<String>,
}

impl Workspace {
    fn read(folder: &Path) -> Result<Self> {
        let mut command = cargo(folder);
        command.args(["metadata", "--format-version", "1", "--filter-platform", TARGET]).stderr(Stdio::inherit());
        let printed = command.output().map_err(|e| not_started("cargo", &e))?;
        if !printed.status.success() {
            return Err(failed(folder));
        }
        serde_json::from_slice(&printed.stdout)
            .map_err(|e| Error::new(Code::ModuleBuildFailed, format!("cargo's metadata cannot be read: {e}")))
    }

    /// The name of the library that becomes the module.
    fn cdylib_of(&self, manifest: &Path) -> Result<String> {
        let package = self.packages.iter().find(|p| p.manifest_path == manifest).ok_or_else(|| {
            Error::new(Code::ModuleBuildFailed, format!("{} is no package, but a workspace", manifest.display()))
                .hint("name the folder of one of its packages")
        })?;
        let dynamic = |target: &&Target| target.crate_types.iter().any(|kind| kind == "cdylib");
        let library = package.targets.iter().find(dynamic).ok_or_else(|| {
            Error::new(Code::ModuleBuildFailed, format!("the crate {} has no cdylib", package.name))
                .hint("a module's Cargo.toml has [lib] with crate-type = [\"cdylib\", \"rlib\"]")
        })?;
        Ok(library.name.clone())
    }

    /// SIMD, a small stack (what an instance dirties is zeroed again for each
    /// tile), and no path of this machine in panic messages: cargo names the
    /// sources of its workspace relative to it, so these are of the others.
    fn flags(&self) -> String {
        let local = self.packages.iter().filter(|p| p.source.is_none());
        let mut remap: Vec<(PathBuf, String)> = local
            .filter_map(|p| {
                let folder = p.manifest_path.parent().filter(|folder| !folder.starts_with(&self.workspace_root))?;
                Some((folder.to_path_buf(), format!("/{}", p.name)))
            })
            .collect();
        let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
        let home = home.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cargo")));
        remap.extend(home.map(|home| (home, "/cargo".to_string())));
        let mut flags = vec!["-Ctarget-feature=+simd128".to_string(), "-Clink-arg=-zstack-size=65536".to_string()];
        flags.extend(remap.iter().map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display())));
        flags.join("\u{1f}")
    }
}

/// The profile of a module, whatever the crate's own says.
const PROFILE: [&str; 6] = [
    "profile.release.opt-level=3",
    "profile.release.lto=\"fat\"",
    "profile.release.codegen-units=1",
    "profile.release.panic=\"abort\"",
    "profile.release.strip=true",
    "profile.release.debug=false",
];

/// A line of cargo's messages.
#[derive(Deserialize)]
struct Message {
    reason: String,
    target: Option<Target>,
    #[serde(default)]
    filenames: Vec<PathBuf>,
}

fn compile(folder: &Path, workspace: &Workspace, library: &str) -> Result<PathBuf> {
    let mut command = cargo(folder);
    command.args(["build", "--lib", "--release", "--target", TARGET, "--message-format", "json-render-diagnostics"]);
    PROFILE.iter().for_each(|setting| {
        command.args(["--config", setting]);
    });
    command.env("CARGO_ENCODED_RUSTFLAGS", workspace.flags()).env_remove("RUSTFLAGS").stderr(Stdio::inherit());
    let printed = command.output().map_err(|e| not_started("cargo", &e))?;
    if !printed.status.success() {
        return Err(failed(folder));
    }
    let messages =
        printed.stdout.split(|b| *b == b'\n').filter_map(|line| serde_json::from_slice::<Message>(line).ok());
    let own =
        messages.filter(|m| m.reason == "compiler-artifact" && m.target.as_ref().is_some_and(|t| t.name == library));
    let mut files = own.flat_map(|m| m.filenames).filter(|file| file.extension().is_some_and(|e| e == "wasm"));
    files.next_back().ok_or_else(|| Error::new(Code::ModuleBuildFailed, format!("cargo wrote no .wasm for {library}")))
}

fn failed(folder: &Path) -> Error {
    Error::new(Code::ModuleBuildFailed, format!("the crate at {} does not build", folder.display()))
        .hint("cargo's messages are above")
}
