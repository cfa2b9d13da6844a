//! How to stream, and what was done.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Code, Error, Result};
use crate::progress::Progress;

use super::device::DeviceInfo;
use super::node_lock::NodeLock;
use super::probe::Probe;
use super::ranges::PAGE_BYTES;
use super::trace::Trace;

/// Whether files are registered with the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Registration {
    /// Never; always a staging buffer.
    Off,
    /// Where the device, the budget and the probe allow it.
    #[default]
    Auto,
    /// Or fail.
    Require,
}

/// How the bytes get from a file to the device, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Rung {
    /// The page cache itself is registered, read-only, and copied from.
    A,
    /// A copy in tmpfs, shared by the node's processes, is registered.
    B,
    /// A ring of pinned buffers, filled by several threads.
    C,
    /// One buffer of ordinary memory.
    D,
}

impl std::fmt::Display for Rung {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Rung::A => "A (registered page cache)",
            Rung::B => "B (registered tmpfs copy)",
            Rung::C => "C (pinned staging ring)",
            Rung::D => "D (pageable staging buffer)",
        })
    }
}

/// When files are registered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RegisterWhen {
    /// All of them before the first copy, so that a failure is known at once.
    #[default]
    AtOpen,
    /// Each just before its first copy, while the copy before it is in flight:
    /// the first pass is over sooner. A failure changes the rung on the way.
    AsNeeded,
}

/// What happens when memory stays registered that must not: the process ends.
pub type Fatal = Arc<dyn Fn(&Error) + Send + Sync>;

/// How to stream.
#[derive(Clone)]
pub struct StreamOptions {
    /// Rotating device buffers, at least 2.
    pub slots: usize,
    /// How many blocks, from the first on, get a buffer of their own and stay.
    /// A `rest` block comes first, so "rest and n more" is n + 1.
    pub resident: usize,
    /// Whether files are registered.
    pub registration: Registration,
    /// Take this rung or fail, for measuring and for tests.
    pub only: Option<Rung>,
    /// When files are registered.
    pub register_when: RegisterWhen,
    /// Whether every block is copied only once, as it is when all are
    /// resident: registering files first may then not pay.
    pub single_pass: bool,
    /// At most so many bytes of files are registered; `Some(0)` registers none.
    /// Staging buffers do not count.
    pub pin_limit_bytes: Option<u64>,
    /// The most that one registration holds, a multiple of 4 KiB.
    pub registration_bytes: u64,
    /// How long one registration may take before it counts as hung.
    pub registration_timeout: Duration,
    /// A tmpfs folder for node-shared copies; without it there is no rung B.
    pub tmpfs_root: Option<PathBuf>,
    /// Serialises registrations on a node.
    pub node_lock: Option<NodeLock>,
    /// Tries the first registration in a child process, where the device wants
    /// that. `None` trusts the driver.
    pub probe: Option<Probe>,
    /// Bytes of pinned staging buffers in all; fewer than two buffers' worth
    /// means one pageable buffer instead (rung D).
    pub staging_bytes: u64,
    /// Bytes of one staging buffer.
    pub chunk_bytes: u64,
    /// Threads that fill staging buffers; 0 means one a core, up to 12, which
    /// is where one link is full.
    pub threads: usize,
    /// Hash what arrived, on the device, before the consumer gets a block.
    pub verify_on_device: bool,
    /// Copy every block back and compare it with its source. Slow.
    pub check_copy_back: bool,
    /// At the end of a pass go on with the first blocks of the next one.
    pub prefetch_next_pass: bool,
    /// Told about bytes copied and registered; asked whether to stop.
    pub progress: Option<Arc<dyn Progress + Send + Sync>>,
    /// Collects a time line.
    pub trace: Option<Arc<Trace>>,
    /// Called when a failed registration cannot be taken back; by default
    /// prints the error and aborts the process.
    pub fatal: Fatal,
}

impl Default for StreamOptions {
    fn default() -> Self {
        StreamOptions {
            slots: 2,
            resident: 0,
            registration: Registration::Auto,
            only: None,
            register_when: RegisterWhen::AtOpen,
            single_pass: false,
            pin_limit_bytes: None,
            registration_bytes: 1 << 30,
            registration_timeout: Duration::from_secs(60),
            tmpfs_root: None,
            node_lock: None,
            probe: None,
            staging_bytes: 96 << 20,
            chunk_bytes: 4 << 20,
            threads: 0,
            verify_on_device: false,
            check_copy_back: false,
            prefetch_next_pass: false,
            progress: None,
            trace: None,
            fatal: Arc::new(|error| {
                eprintln!("fatal: {error}");
                std::process::abort();
            }),
        }
    }
}

impl StreamOptions {
    /// What loading everything once, and keeping it, wants.
    #[must_use]
    pub fn load_all(self) -> Self {
        StreamOptions { resident: usize::MAX, register_when: RegisterWhen::AsNeeded, ..self }
    }

    /// The number of staging threads that `threads` means.
    pub(super) fn staging_threads(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(4, usize::from).min(12),
            n => n,
        }
    }

    pub(super) fn cancelled(&self) -> Result<()> {
        match &self.progress {
            Some(progress) if progress.cancelled() => Err(Error::new(Code::Interrupted, "streaming was asked to stop")),
            _ => Ok(()),
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        let refuse = |why: String| Err(Error::new(Code::BadParams, why));
        if self.slots < 2 {
            return refuse(format!("streaming needs at least 2 slots, not {}", self.slots));
        }
        for (what, bytes) in [("a registration", self.registration_bytes), ("a staging buffer", self.chunk_bytes)] {
            if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) || bytes > 1 << 30 {
                return refuse(format!("{what} is a multiple of {PAGE_BYTES} bytes and at most 1 GiB, not {bytes}"));
            }
        }
        Ok(())
    }
}

/// What a streamer is and has done.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StreamReport {
    /// The device's kind and name.
    pub device: String,
    /// The rung in use.
    pub rung: Rung,
    /// Why each better rung is not in use.
    pub passed_over: Vec<String>,
    /// Bytes registered now.
    pub registered_bytes: u64,
    /// Bytes of pinned staging buffers.
    pub pinned_bytes: u64,
    /// Bytes of the device's buffers.
    pub device_bytes: u64,
    /// Milliseconds spent in registering calls.
    pub register_ms: f64,
    /// Bytes copied to the device.
    pub h2d_bytes: u64,
    /// Copies to the device.
    pub h2d_copies: u64,
    /// What was verified on the device.
    pub verify: VerifyReport,
}

/// What was verified on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct VerifyReport {
    /// Blocks whose hashes were compared.
    pub blocks: u64,
    /// Leaves whose hashes were compared.
    pub leaves: u64,
    /// Blocks that were copied back and compared with their source.
    pub copied_back_blocks: u64,
}

/// What a pass did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PassReport {
    /// Wall time until the consumer's last work on the device was done.
    pub ms: f64,
    /// Blocks handed out.
    pub blocks: u64,
    /// Bytes copied for them; resident blocks are copied once.
    pub bytes: u64,
    /// Copies made for them.
    pub copies: u64,
}

impl PassReport {
    /// 10⁹ bytes a second.
    pub fn gb_per_s(&self) -> f64 {
        if self.ms > 0.0 { self.bytes as f64 / self.ms / 1e6 } else { 0.0 }
    }
}

/// A device's name with its kind.
pub(super) fn device_text(info: &DeviceInfo) -> String {
    format!("{} ({})", info.name, info.kind)
}
