//! Programs that tests use and a machine may lack: a registry, and a stock tool
//! for OCI images. Both are packages of Debian and Ubuntu.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use crate::shell;

/// Gets `docker-registry` and `skopeo` where that is possible, and gives the
/// `PATH` that has them. Tests that need one say so where it is missing.
pub(crate) fn registry_tools() -> OsString {
    let own = std::env::var_os("PATH").unwrap_or_default();
    let tools = shell::target().join("tools");
    let bin = tools.join("usr/bin");
    let folders = std::iter::once(bin.clone()).chain(std::env::split_paths(&own));
    let path = std::env::join_paths(folders).unwrap_or(own);
    if !works("docker-registry") && !bin.join("docker-registry").exists() {
        // Installed, it would run as a service on port 5000: it is only unpacked.
        unpack("docker-registry", &tools);
    }
    if !works("skopeo") {
        install("skopeo");
    }
    path
}

fn works(program: &str) -> bool {
    shell::works(program, &["--version"])
}

fn unpack(package: &str, folder: &Path) {
    println!("getting the package {package} with apt-get and unpacking it into {}", folder.display());
    let done = std::fs::create_dir_all(folder).is_ok()
        && succeeds(Command::new("apt-get").args(["download", package]).current_dir(folder))
        && debs(folder).all(|deb| succeeds(Command::new("dpkg").arg("-x").arg(deb).arg(folder)));
    if !done {
        println!("  that is not possible here: tests that need {package} are skipped");
    }
}

fn debs(folder: &Path) -> impl Iterator<Item = std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|extension| extension == "deb"))
}

fn install(package: &str) {
    let arguments = ["apt-get", "install", "--yes", "--no-install-recommends", package];
    let root = Command::new("id").arg("-u").output().is_ok_and(|o| o.stdout.trim_ascii() == b"0");
    let mut command = if root { Command::new(arguments[0]) } else { Command::new("sudo") };
    match root {
        true => command.args(&arguments[1..]),
        false => command.arg("-n").args(arguments),
    };
    println!("installing the package {package} with apt-get");
    if !succeeds(&mut command) {
        println!("  that is not possible here: tests that need {package} are skipped");
    }
}

/// Quietly: what goes wrong is not what a contributor came for.
fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}
