//! A real registry on the loopback: Debian's `docker-registry`.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A running registry. It ends with this value.
pub(crate) struct Server {
    child: Child,
    port: u16,
    folder: PathBuf,
}

/// Who may use a registry, and how.
#[derive(Default)]
pub(crate) struct Settings {
    /// A file of `htpasswd`.
    pub(crate) htpasswd: Option<PathBuf>,
    /// A certificate and its key.
    pub(crate) tls: Option<(PathBuf, PathBuf)>,
}

/// Whether a program is there; if not, says what is skipped.
pub(crate) fn has(program: &str) -> bool {
    let there = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !there {
        skip(&format!("{program} is not installed; `apt-get install docker-registry skopeo` brings it"));
    }
    there
}

/// Says what is skipped, past the harness, which shows nothing of tests that
/// pass.
pub(crate) fn skip(why: &str) {
    let name = std::thread::current().name().unwrap_or_default().to_owned();
    let _ = writeln!(std::io::stderr(), "SKIPPED (in part) {name}: {why}");
}

impl Server {
    /// A registry with an empty folder under `folder`; `None`, and a note on
    /// standard error, if there is no such program.
    pub(crate) fn start(folder: &Path) -> Option<Self> {
        Server::start_with(folder, &Settings::default())
    }

    pub(crate) fn start_with(folder: &Path, settings: &Settings) -> Option<Self> {
        if !has("docker-registry") {
            return None;
        }
        // Another process may take the port between looking and using.
        for _ in 0..5 {
            if let Some(server) = Server::try_start(folder, settings) {
                return Some(server);
            }
        }
        panic!("docker-registry does not start: see {}/registry.log", folder.display());
    }

    fn try_start(folder: &Path, settings: &Settings) -> Option<Self> {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let data = folder.join("registry");
        std::fs::create_dir_all(&data).unwrap();
        let tls = settings.tls.as_ref().map_or(String::new(), |(certificate, key)| {
            format!("  tls:\n    certificate: {}\n    key: {}\n", certificate.display(), key.display())
        });
        let auth = settings.htpasswd.as_ref().map_or(String::new(), |file| {
            format!("auth:\n  htpasswd:\n    realm: weightmill-tests\n    path: {}\n", file.display())
        });
        let config = format!(
            "version: 0.1\nlog:\n  level: warn\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: 127.0.0.1:{port}\n{tls}{auth}",
            data.display()
        );
        let file = folder.join("registry.yml");
        std::fs::write(&file, config).unwrap();
        let log = std::fs::File::create(folder.join("registry.log")).unwrap();
        let child = Command::new("docker-registry")
            .args([Path::new("serve"), &file])
            .env_clear()
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut server = Server { child, port, folder: folder.to_path_buf() };
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(30) {
            if server.child.try_wait().unwrap().is_some() {
                return None;
            }
            if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return Some(server);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        None
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// `oci://127.0.0.1:port/name`.
    pub(crate) fn repository(&self, name: &str) -> String {
        format!("oci://127.0.0.1:{}/{name}", self.port)
    }

    /// Where the registry keeps a blob.
    pub(crate) fn blob(&self, hex: &str) -> PathBuf {
        let blobs = self.folder.join("registry/docker/registry/v2/blobs/sha256");
        blobs.join(&hex[..2]).join(hex).join("data")
    }

    /// Ends the registry.
    pub(crate) fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}
