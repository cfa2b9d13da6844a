//! Pulling an entry against `curl` of the same blobs from the same registry and
//! SHA-256 of them.
//!
//! The registry is Debian's `docker-registry` on the loopback, over the same
//! folder for both sides, so what is measured is the client: both receive every
//! byte of every blob, write it to a file and hash it. Weightmill also compares
//! every byte with the leaf lists and syncs what it publishes; the baseline does
//! neither. After each pull every blob is compared with what was pushed.

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::checkpoint::write_tensors;
use super::store::{Compared, build_plain, median};
use crate::digest::{ActionKey, BlobDigest};
use crate::error::{Code, Error, Result};
use crate::progress::{Progress, Quiet};
use crate::publish::client::{Registry, RegistryOptions};
use crate::publish::entry::{Demand, pull_entry, push_entry};
use crate::publish::reference::Repository;
use crate::store::{Store, StoreOptions, Verify};
use crate::tensor::Dtype;

/// Blocks of the entry, each a shard.
const BLOCKS: usize = 16;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the files are made. They are removed afterwards.
    pub folder: PathBuf,
    /// Bytes of the entry.
    pub bytes: u64,
    /// Runs of each; the medians are compared.
    pub runs: usize,
    /// Blobs that weightmill transfers at once.
    pub connections: usize,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Blobs of the entry.
    pub blobs: usize,
    /// Their bytes.
    pub bytes: u64,
    /// The push, in 10⁹ bytes a second; nothing stands against it.
    pub push_gb_per_s: f64,
    /// The pull against curl and sha256sum of the same blobs.
    pub pull: Compared,
}

/// Measures. Stops between runs if `progress` says so.
///
/// # Errors
/// `io_error` if there is no `docker-registry`, `curl` or `sha256sum`;
/// `interrupted`; what publishing says.
pub fn run(options: &Options, progress: &dyn Progress) -> Result<Report> {
    let folder = options.folder.join(format!("weightmill-bench-registry-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|e| Error::io(format!("making the folder {}", folder.display()), e))?;
    let report = measure(options, &folder, progress);
    // What stays is in a folder that says whose it is.
    let _ = std::fs::remove_dir_all(&folder);
    report
}

fn measure(options: &Options, folder: &Path, progress: &dyn Progress) -> Result<Report> {
    let quiet = Quiet(progress);
    let pool = rayon::ThreadPoolBuilder::new().build().map_err(|e| Error::io("starting threads", e))?;
    let server = Server::start(folder)?;
    let repository = Repository::parse(&format!("oci://127.0.0.1:{}/bench/entry", server.port))?;
    let registry_options = RegistryOptions { connections: options.connections, ..RegistryOptions::default() };
    let registry = Registry::open(&repository, &registry_options)?;

    let source = folder.join("checkpoint.safetensors");
    let tensor_bytes = (options.bytes / BLOCKS as u64).max(1);
    let tensors: Vec<_> = (0..BLOCKS).map(|n| (format!("layers.{n:03}.w"), Dtype::U8, vec![tensor_bytes])).collect();
    write_tensors(&source, &tensors)?;
    let (built, key) = build_plain(&source, &folder.join("built"), &pool, &quiet)?;
    let _ = std::fs::remove_file(&source);
    let lease = built
        .lease(&key, Verify::Never, &pool, &quiet)?
        .ok_or_else(|| Error::new(Code::CorruptBlob, "the entry is gone"))?;
    let action = built.action(&key)?.unwrap_or_default();
    let start = Instant::now();
    let pushed = push_entry(&registry, &lease, &action, None, &quiet)?;
    let push_s = start.elapsed().as_secs_f64();
    let blobs: Vec<BlobDigest> = lease.document().shards.iter().flat_map(|s| [s.digest, s.leaves]).collect();

    let (mut pulls, mut baselines) = (Vec::new(), Vec::new());
    for run in 0..options.runs.max(1) {
        if progress.cancelled() {
            return Err(Error::new(Code::Interrupted, "stopped between runs"));
        }
        baselines.push(baseline(&folder.join("plain"), &repository, &blobs)?);
        let root = folder.join(format!("pulled-{run}"));
        let store = Store::open(&root, StoreOptions::default())?;
        let demand = Demand { believe_registry: true, ..Demand::default() };
        let registry = Registry::open(&repository, &registry_options)?;
        let start = Instant::now();
        pull_entry(&store, &registry, &key, &demand, &pool, &quiet)?;
        pulls.push(start.elapsed().as_secs_f64());
        compare(&built, &store, &key, &blobs, &pool, progress)?;
        let _ = std::fs::remove_dir_all(&root);
    }
    let (pull_s, baseline_s) = (median(pulls), median(baselines));
    let gb = pushed.sent.bytes as f64 / 1e9;
    Ok(Report {
        blobs: pushed.sent.blobs,
        bytes: pushed.sent.bytes,
        push_gb_per_s: gb / push_s,
        pull: Compared { gb_per_s: gb / pull_s, baseline_gb_per_s: gb / baseline_s, ratio: baseline_s / pull_s },
    })
}

/// Seconds that curl and sha256sum take.
fn baseline(folder: &Path, repository: &Repository, blobs: &[BlobDigest]) -> Result<f64> {
    let _ = std::fs::remove_dir_all(folder);
    std::fs::create_dir_all(folder).map_err(|e| Error::io(folder.display(), e))?;
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--show-error", "--fail"]).current_dir(folder);
    for blob in blobs {
        let url = format!("http://{}/v2/{}/blobs/sha256:{blob}", repository.registry, repository.name);
        curl.args(["--output", &blob.to_string(), &url]);
    }
    let mut sums = Command::new("sha256sum");
    sums.args(blobs.iter().map(ToString::to_string)).stdout(Stdio::null()).current_dir(folder);
    let start = Instant::now();
    for (name, command) in [("curl", &mut curl), ("sha256sum", &mut sums)] {
        let status = command.status().map_err(|e| Error::io(format!("starting {name}"), e).hint("install it"))?;
        if !status.success() {
            return Err(Error::io(name, status));
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let _ = std::fs::remove_dir_all(folder);
    Ok(seconds)
}

/// Compares every blob of two stores, byte for byte, and verifies the entry.
fn compare(
    one: &Store,
    other: &Store,
    key: &ActionKey,
    blobs: &[BlobDigest],
    pool: &rayon::ThreadPool,
    progress: &dyn Progress,
) -> Result<()> {
    let read = |store: &Store, blob: &BlobDigest| {
        let path = store.root().join("blobs/sha256").join(blob.to_string());
        std::fs::read(&path).map_err(|e| Error::io(path.display(), e))
    };
    for blob in blobs {
        if read(one, blob)? != read(other, blob)? {
            return Err(Error::new(Code::DigestMismatch, format!("the blob {blob} differs from what was pushed")));
        }
    }
    match other.lease(key, Verify::Always, pool, &Quiet(progress))? {
        Some(_) => Ok(()),
        None => Err(Error::new(Code::CorruptBlob, "the entry that was pulled is not there")),
    }
}

/// A registry that ends with this value.
struct Server {
    child: Child,
    port: u16,
}

impl Server {
    fn start(folder: &Path) -> Result<Self> {
        let port = TcpListener::bind("127.0.0.1:0")
            .and_then(|listener| listener.local_addr())
            .map_err(|e| Error::io("looking for a free port", e))?
            .port();
        let data = folder.join("registry");
        let config = format!(
            "version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: 127.0.0.1:{port}\n",
            data.display()
        );
        let file = folder.join("registry.yml");
        std::fs::write(&file, config).map_err(|e| Error::io(file.display(), e))?;
        let child = Command::new("docker-registry")
            .args([Path::new("serve"), &file])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| {
                Error::io("starting docker-registry", e)
                    .hint("it is a package of Debian and Ubuntu: apt-get install docker-registry")
            })?;
        let server = Server { child, port };
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(30) {
            if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return Ok(server);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Err(Error::io("starting docker-registry", "it does not answer within 30 s"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
