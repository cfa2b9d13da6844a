//! The first registration on a node, tried in a child process.
//!
//! Some drivers do not return from a registration that they cannot make, and
//! a call that hangs inside this process may hold locks that nothing can take
//! back. So the first registration of a kind (device, driver, kernel,
//! filesystem, boot) is tried by a child with a time limit, and what came of
//! it is recorded. The child is this program again, with a hidden subcommand.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::digest::RecordDigest;
use crate::error::{Code, Error, Result};
use crate::mapping::FileMap;

use super::device::{Access, Device, DeviceInfo};
use super::ranges::PageRange;

/// The hidden subcommand that [`probe_child_main`] serves.
pub const PROBE_SUBCOMMAND: &str = "__probe-registration";
/// How much of the first range is tried.
const PROBE_BYTES: u64 = 16 << 20;
/// How long a killed child is waited for. One that is stuck in the kernel does
/// not even die.
const AFTER_KILL: Duration = Duration::from_secs(2);

/// What came of a probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case", deny_unknown_fields)]
pub enum ProbeOutcome {
    /// Registered and unregistered.
    Works,
    /// The driver said no.
    Refused {
        /// Its words.
        message: String,
    },
    /// The child did not answer in time.
    Hung,
}

/// Where outcomes are kept, by a key that is a short text.
pub trait ProbeRecords: Send + Sync {
    /// The outcome that was saved under `key`.
    fn load(&self, key: &str) -> Option<ProbeOutcome>;
    /// Saves an outcome.
    ///
    /// # Errors
    /// `io_error`; probing goes on without the record.
    fn save(&self, key: &str, outcome: &ProbeOutcome) -> Result<()>;
}

/// Records in a folder, one file a key.
#[derive(Clone, Debug)]
pub struct ProbeFolder(
    /// The folder; made at the first record.
    pub PathBuf,
);

impl ProbeFolder {
    fn file(&self, key: &str) -> PathBuf {
        self.0.join(format!("probe-{}.json", RecordDigest::of(key.as_bytes())))
    }
}

#[derive(Serialize, Deserialize)]
struct Record {
    key: String,
    probe: ProbeOutcome,
}

impl ProbeRecords for ProbeFolder {
    fn load(&self, key: &str) -> Option<ProbeOutcome> {
        let record: Record = serde_json::from_slice(&std::fs::read(self.file(key)).ok()?).ok()?;
        (record.key == key).then_some(record.probe)
    }

    fn save(&self, key: &str, outcome: &ProbeOutcome) -> Result<()> {
        let failed = |e: std::io::Error| Error::io(format_args!("recording a probe in {}", self.0.display()), e);
        let record = Record { key: key.into(), probe: outcome.clone() };
        let json = serde_json::to_vec(&record).map_err(|e| Error::io("writing a probe's record", e))?;
        std::fs::create_dir_all(&self.0).map_err(failed)?;
        let temporary = self.0.join(format!(".probe.{}", std::process::id()));
        std::fs::write(&temporary, json).map_err(failed)?;
        std::fs::rename(&temporary, self.file(key)).map_err(failed)
    }
}

/// How to probe.
#[derive(Clone)]
pub struct Probe {
    /// The child's command and first arguments.
    pub command: Vec<OsString>,
    /// How long the child may take; it has to start the device's driver.
    pub timeout: Duration,
    /// Where outcomes are kept.
    pub records: Option<Arc<dyn ProbeRecords>>,
}

impl Probe {
    /// Probes with this program, which must serve [`PROBE_SUBCOMMAND`].
    ///
    /// # Errors
    /// `io_error` if its path is unknown.
    pub fn with_this_program(records: Option<Arc<dyn ProbeRecords>>) -> Result<Self> {
        let program = std::env::current_exe().map_err(|e| Error::io("finding this program's file", e))?;
        let command = vec![program.into(), PROBE_SUBCOMMAND.into()];
        Ok(Probe { command, timeout: Duration::from_secs(30), records })
    }

    /// Whether ranges like this one can be registered: from the record, or by
    /// trying.
    ///
    /// # Errors
    /// `registration_failed` or `registration_hung` if not.
    pub(super) fn check(&self, info: &DeviceInfo, map: &FileMap, range: PageRange, access: Access) -> Result<()> {
        let key = key(info, map, access)?;
        let recorded = self.records.as_ref().and_then(|r| r.load(&key));
        let outcome = match recorded {
            Some(outcome) => outcome,
            None => {
                let outcome = self.try_in_child(info, map, range, access)?;
                if let Some(records) = &self.records {
                    // A store that cannot be written to only means that the
                    // next process probes again.
                    records.save(&key, &outcome).ok();
                }
                outcome
            }
        };
        match outcome {
            ProbeOutcome::Works => Ok(()),
            ProbeOutcome::Refused { message } => Err(Error::new(
                Code::RegistrationFailed,
                format!("the probe of the first registration failed: {message}"),
            )),
            ProbeOutcome::Hung => Err(Error::new(
                Code::RegistrationHung,
                format!("the probe of the first registration did not return within {} s", self.timeout.as_secs()),
            )
            .hint("this driver cannot register such files; staging is used instead where --registration allows it")),
        }
    }

    fn try_in_child(&self, info: &DeviceInfo, map: &FileMap, range: PageRange, access: Access) -> Result<ProbeOutcome> {
        let Some((program, first)) = self.command.split_first() else {
            return Err(Error::new(Code::BadParams, "the probe has no command"));
        };
        let failed = |e| Error::io("starting the probe of the first registration", e);
        let mut child = Command::new(program)
            .args(first)
            .arg(info.ordinal.to_string())
            .arg(match access {
                Access::ReadOnly => "read-only",
                Access::ReadWrite => "read-write",
            })
            .arg(range.start().to_string())
            .arg(range.len().min(PROBE_BYTES).to_string())
            .arg(map.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(failed)?;
        let Some(success) = wait(&mut child, self.timeout).map_err(failed)? else {
            child.kill().ok();
            wait(&mut child, AFTER_KILL).ok();
            return Ok(ProbeOutcome::Hung);
        };
        let mut answer = Vec::new();
        if let Some(mut out) = child.stdout.take() {
            out.read_to_end(&mut answer).map_err(failed)?;
        }
        let refused = |message: String| ProbeOutcome::Refused { message };
        Ok(match serde_json::from_slice(&answer) {
            Ok(outcome) if success => outcome,
            _ => refused(format!("the probing child gave no answer (it {})", if success { "ended" } else { "failed" })),
        })
    }
}

/// Whether the child succeeded, or `None` if it is still running.
fn wait(child: &mut Child, timeout: Duration) -> std::io::Result<Option<bool>> {
    let start = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status.success()));
        }
        if start.elapsed() >= timeout {
            return Ok(None);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// What decides whether a registration works.
fn key(info: &DeviceInfo, map: &FileMap, access: Access) -> Result<String> {
    let failed = |e| Error::io(format_args!("asking for the filesystem of {}", map.path().display()), e);
    let filesystem = rustix::fs::fstatfs(&**map.file()).map_err(failed)?.f_type;
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    Ok(format!(
        "{} | {} | driver {} | kernel {} | filesystem {filesystem:#x} | boot {} | {access:?}",
        info.kind,
        info.name,
        info.driver,
        rustix::system::uname().release().to_string_lossy(),
        boot.trim(),
    ))
}

/// The child's side: registers and unregisters one range, and prints the
/// outcome as JSON. `open` makes the device with the given number; `arguments`
/// are those behind [`PROBE_SUBCOMMAND`].
pub fn probe_child_main<D: Device>(
    open: impl FnOnce(usize) -> Result<D>,
    arguments: impl IntoIterator<Item = OsString>,
) -> ExitCode {
    let outcome = match probe_here(open, &arguments.into_iter().collect::<Vec<_>>()) {
        Ok(()) => ProbeOutcome::Works,
        Err(e) => ProbeOutcome::Refused { message: e.message().to_string() },
    };
    match serde_json::to_string(&outcome) {
        Ok(json) => {
            println!("{json}");
            ExitCode::SUCCESS
        }
        Err(_) => ExitCode::FAILURE,
    }
}

fn probe_here<D: Device>(open: impl FnOnce(usize) -> Result<D>, arguments: &[OsString]) -> Result<()> {
    let bad = || Error::new(Code::BadParams, "the probe takes: device access offset length path");
    let [ordinal, access, offset, len, path] = arguments else { return Err(bad()) };
    let number = |text: &OsString| text.to_str().and_then(|t| t.parse::<u64>().ok()).ok_or_else(bad);
    let path = Path::new(path);
    let failed = |e| Error::io(format_args!("opening {}", path.display()), e);
    let (map, access) = match access.to_str() {
        Some("read-only") => (FileMap::read_only(Arc::new(File::open(path).map_err(failed)?), path)?, Access::ReadOnly),
        Some("read-write") => {
            let file = File::options().read(true).write(true).open(path).map_err(failed)?;
            (FileMap::writable(Arc::new(file), path)?, Access::ReadWrite)
        }
        _ => return Err(bad()),
    };
    let range = PageRange::around(number(offset)?, number(len)?).ok_or_else(bad)?;
    let device = open(number(ordinal)? as usize)?;
    let map = Arc::new(map);
    device.register(&map, range, access)?;
    device.unregister(&map, range)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offload::HostDevice;
    use std::io::Write;
    use std::sync::Mutex;

    #[derive(Default)]
    struct Notebook(Mutex<Vec<(String, ProbeOutcome)>>);

    impl ProbeRecords for Notebook {
        fn load(&self, key: &str) -> Option<ProbeOutcome> {
            self.0.lock().unwrap().iter().find(|(k, _)| k == key).map(|(_, o)| o.clone())
        }
        fn save(&self, key: &str, outcome: &ProbeOutcome) -> Result<()> {
            self.0.lock().unwrap().push((key.into(), outcome.clone()));
            Ok(())
        }
    }

    fn try_with(script: &str, records: Arc<Notebook>) -> Result<()> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[1; 5000]).unwrap();
        let map = FileMap::read_only(Arc::new(file.reopen().unwrap()), file.path()).unwrap();
        let command = ["sh", "-c", script, "sh"].map(OsString::from).to_vec();
        let probe = Probe { command, timeout: Duration::from_millis(500), records: Some(records) };
        probe.check(HostDevice::default().info(), &map, PageRange::around(0, 5000).unwrap(), Access::ReadOnly)
    }

    #[test]
    fn what_the_child_says_is_believed_and_recorded() {
        let records = Arc::new(Notebook::default());
        try_with("[ $2 = read-only ] && [ $4 = 8192 ] && echo '{\"outcome\":\"works\"}'", records.clone()).unwrap();
        assert_eq!(records.0.lock().unwrap()[0].1, ProbeOutcome::Works);
        try_with("exit 1", records).expect("the record is used, no child is started");
    }

    #[test]
    fn a_refusal_a_crash_and_nonsense_are_refusals() {
        for script in ["echo '{\"outcome\":\"refused\",\"message\":\"error 801\"}'", "kill -9 $$", "echo hello"] {
            let error = try_with(script, Arc::default()).unwrap_err();
            assert_eq!(error.code(), Code::RegistrationFailed, "{script}");
        }
    }

    #[test]
    fn a_child_that_hangs_is_killed_and_the_hang_is_recorded() {
        let records = Arc::new(Notebook::default());
        let start = Instant::now();
        let error = try_with("exec sleep 60", records.clone()).unwrap_err();
        assert_eq!(error.code(), Code::RegistrationHung);
        assert!(start.elapsed() < Duration::from_secs(20));
        assert_eq!(records.0.lock().unwrap()[0].1, ProbeOutcome::Hung);
    }

    #[test]
    fn the_child_registers_and_unregisters() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[1; 5000]).unwrap();
        let arguments = |access: &str| {
            let path = file.path().to_str().unwrap();
            ["0", access, "0", "5000", path].map(OsString::from).to_vec()
        };
        let open = |_| Ok(HostDevice::default());
        probe_here(open, &arguments("read-only")).unwrap();
        probe_here(open, &arguments("read-write")).unwrap();
        assert!(probe_here(open, &arguments("private")).is_err());
        assert!(probe_here(open, &arguments("read-only")[1..]).is_err());
        let none = |_| Ok(HostDevice::new(&[]));
        assert_eq!(probe_here(none, &arguments("read-only")).unwrap_err().code(), Code::RegistrationFailed);
    }

    #[test]
    fn a_folder_keeps_records_by_key() {
        let folder = tempfile::tempdir().unwrap();
        let records = ProbeFolder(folder.path().join("state"));
        assert_eq!(records.load("a"), None);
        records.save("a", &ProbeOutcome::Hung).unwrap();
        records.save("b", &ProbeOutcome::Refused { message: "no".into() }).unwrap();
        assert_eq!(records.load("a"), Some(ProbeOutcome::Hung));
        assert_eq!(records.load("b"), Some(ProbeOutcome::Refused { message: "no".into() }));
    }
}
