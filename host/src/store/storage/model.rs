//! A disk that does only what it promised.
//!
//! [`FaultyStorage`] passes every operation on to the system, so that the
//! files are real ones, and keeps book of what a crash could take back:
//! - of a file, every write since its last successful sync. Each is kept, lost,
//!   or torn (a part of it kept) on its own;
//! - of a folder, every name made, replaced or removed since the folder's last
//!   sync. Each name goes back to any state that it had since then, on its own:
//!   names do not reach the disk in the order in which they were changed, and
//!   both halves of a rename are independent. Real filesystems lose less;
//! - of a file whose sync failed, everything that was not synced before: a
//!   later sync that succeeds does not bring it back.
//!
//! [`FaultyStorage::reboot`] writes what such a crash leaves into another
//! folder. Which operation fails or is the last one before the crash is said by
//! [`Plan`]; every choice comes from its seed, which a test prints when it
//! fails.

use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::disk::Disk;
use super::{FilesystemKind, Sharing, Space, Storage, SystemStorage};

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The machine stops: the operation is the last one, and may be half done.
    Crash,
    /// The operation fails with an input/output error; of a write, a part may
    /// have been done.
    Io,
    /// There is no room: a write may do a part and fails with `ENOSPC` after.
    Full,
}

/// When it goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// At the n-th operation that changes or syncs something, from 1.
    Change(u64),
    /// At the n-th read of a file's bytes, from 1.
    Read(u64),
}

/// What a [`FaultyStorage`] does.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plan {
    /// What all choices come from.
    pub seed: u64,
    /// The fault, if there is one.
    pub fault: Option<(At, Fault)>,
    /// Reads and writes do less than asked, or are interrupted.
    pub short: bool,
}

/// The system's files, with faults and a memory of what is not on the disk.
#[derive(Debug)]
pub struct FaultyStorage {
    plan: Plan,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    changes: u64,
    reads: u64,
    crashed: bool,
    disk: Disk,
}

/// Whether an operation is to be done, and whether the machine stops after it.
enum Verdict {
    Do,
    DoAndCrash,
    Fail(ErrorKind),
}

fn stopped() -> io::Error {
    io::Error::other("the machine has stopped")
}

impl FaultyStorage {
    /// Takes over a folder: all that is in it now is on the disk.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(root: &Path, plan: Plan) -> io::Result<Self> {
        let disk = Disk::adopt(root, plan.seed)?;
        let state = State { changes: 0, reads: 0, crashed: false, disk };
        Ok(FaultyStorage { plan, state: Mutex::new(state) })
    }

    /// How many operations have changed or synced something.
    pub fn changes(&self) -> u64 {
        self.state().changes
    }

    /// How often a file's bytes were read.
    pub fn reads(&self) -> u64 {
        self.state().reads
    }

    /// Whether the machine has stopped.
    pub fn crashed(&self) -> bool {
        self.state().crashed
    }

    /// Writes what a crash now leaves of `root` into the empty folder `to`.
    ///
    /// # Errors
    /// What the system says.
    pub fn reboot(&self, root: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.crashed = true;
        state.disk.survive(root, to)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fault_at(&self, at: At) -> Option<Fault> {
        self.plan.fault.filter(|(when, _)| *when == at).map(|(_, fault)| fault)
    }

    /// Counts an operation that changes something, and says what becomes of it.
    fn verdict(&self, state: &mut State) -> io::Result<Verdict> {
        if state.crashed {
            return Err(stopped());
        }
        state.changes += 1;
        Ok(match self.fault_at(At::Change(state.changes)) {
            None => Verdict::Do,
            Some(Fault::Crash) => Verdict::DoAndCrash,
            Some(Fault::Io) => Verdict::Fail(ErrorKind::Other),
            Some(Fault::Full) => Verdict::Fail(ErrorKind::StorageFull),
        })
    }

    /// An operation on names: done or not done.
    fn change<T>(&self, operation: impl FnOnce(&mut State) -> io::Result<T>) -> io::Result<T> {
        let mut state = self.state();
        match self.verdict(&mut state)? {
            Verdict::Do => operation(&mut state),
            Verdict::Fail(kind) => Err(kind.into()),
            Verdict::DoAndCrash => {
                let _ = operation(&mut state);
                state.crashed = true;
                Err(stopped())
            }
        }
    }

    /// An operation that changes nothing.
    fn look<T>(&self, operation: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        if self.crashed() { Err(stopped()) } else { operation() }
    }
}

impl Storage for FaultyStorage {
    fn open_read(&self, path: &Path) -> io::Result<File> {
        self.look(|| SystemStorage.open_read(path))
    }

    fn create_new(&self, path: &Path, mode: u32) -> io::Result<File> {
        self.change(|state| {
            let file = SystemStorage.create_new(path, mode)?;
            state.disk.created(path, &file.metadata()?);
            Ok(file)
        })
    }

    fn open_lock(&self, path: &Path) -> io::Result<File> {
        if fs::symlink_metadata(path).is_ok() {
            return self.look(|| SystemStorage.open_lock(path));
        }
        self.change(|state| {
            let file = SystemStorage.open_lock(path)?;
            state.disk.created(path, &file.metadata()?);
            Ok(file)
        })
    }

    fn try_lock(&self, file: &File, sharing: Sharing) -> io::Result<bool> {
        self.look(|| SystemStorage.try_lock(file, sharing))
    }

    fn read_at(&self, file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut state = self.state();
        if state.crashed {
            return Err(stopped());
        }
        state.reads += 1;
        match self.fault_at(At::Read(state.reads)) {
            None => {}
            Some(Fault::Crash) => {
                state.crashed = true;
                return Err(stopped());
            }
            Some(Fault::Io | Fault::Full) => return Err(ErrorKind::Other.into()),
        }
        let mut len = buffer.len();
        if self.plan.short && len > 0 {
            if state.disk.below(8) == 0 {
                return Err(ErrorKind::Interrupted.into());
            }
            len = 1 + state.disk.below(len);
        }
        file.read_at(&mut buffer[..len], offset)
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let mut state = self.state();
        let metadata = file.metadata()?;
        let write = |state: &mut State, bytes: &[u8]| -> io::Result<usize> {
            file.write_all_at(bytes, offset)?;
            state.disk.wrote(&metadata, offset, bytes);
            Ok(bytes.len())
        };
        match self.verdict(&mut state)? {
            Verdict::Do if self.plan.short && !bytes.is_empty() => match state.disk.below(8) {
                0 => Err(ErrorKind::Interrupted.into()),
                _ => {
                    let len = 1 + state.disk.below(bytes.len());
                    write(&mut state, &bytes[..len])
                }
            },
            Verdict::Do => write(&mut state, bytes),
            Verdict::Fail(kind) => {
                let part = state.disk.part(bytes);
                write(&mut state, part)?;
                Err(kind.into())
            }
            Verdict::DoAndCrash => {
                let part = state.disk.part(bytes);
                let _ = write(&mut state, part);
                state.crashed = true;
                Err(stopped())
            }
        }
    }

    fn set_mode(&self, file: &File, mode: u32) -> io::Result<()> {
        self.change(|state| {
            SystemStorage.set_mode(file, mode)?;
            state.disk.mode_set(&file.metadata()?, mode);
            Ok(())
        })
    }

    fn sync_file(&self, file: &File) -> io::Result<()> {
        let mut state = self.state();
        let metadata = file.metadata()?;
        match self.verdict(&mut state)? {
            Verdict::Do => {
                state.disk.synced(&metadata);
                Ok(())
            }
            Verdict::Fail(kind) => {
                state.disk.sync_failed(&metadata);
                Err(kind.into())
            }
            // What was not synced stays uncertain.
            Verdict::DoAndCrash => {
                state.crashed = true;
                Err(stopped())
            }
        }
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        match self.verdict(&mut state)? {
            Verdict::Do => {}
            Verdict::Fail(kind) => return Err(kind.into()),
            Verdict::DoAndCrash => {
                state.crashed = true;
                return Err(stopped());
            }
        }
        fs::metadata(path)?;
        state.disk.folder_synced(path);
        Ok(())
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.change(|state| {
            SystemStorage.link(from, to)?;
            state.disk.linked(to, &fs::symlink_metadata(to)?);
            Ok(())
        })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.change(|state| {
            SystemStorage.rename(from, to)?;
            state.disk.removed(from);
            state.disk.linked(to, &fs::symlink_metadata(to)?);
            Ok(())
        })
    }

    fn unlink(&self, path: &Path) -> io::Result<()> {
        self.change(|state| {
            SystemStorage.unlink(path)?;
            state.disk.removed(path);
            Ok(())
        })
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.change(|state| {
            SystemStorage.create_dir(path)?;
            state.disk.folder_created(path);
            Ok(())
        })
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.change(|state| {
            SystemStorage.remove_dir(path)?;
            state.disk.removed(path);
            Ok(())
        })
    }

    fn touch(&self, path: &Path) -> io::Result<()> {
        self.look(|| SystemStorage.touch(path))
    }

    fn metadata(&self, path: &Path) -> io::Result<Metadata> {
        self.look(|| SystemStorage.metadata(path))
    }

    fn file_metadata(&self, file: &File) -> io::Result<Metadata> {
        self.look(|| SystemStorage.file_metadata(file))
    }

    fn read_dir(&self, path: &Path) -> io::Result<Vec<OsString>> {
        self.look(|| SystemStorage.read_dir(path))
    }

    fn kind(&self, _: &Path) -> io::Result<FilesystemKind> {
        Ok(FilesystemKind::Local)
    }

    fn space(&self, path: &Path) -> io::Result<Space> {
        self.look(|| SystemStorage.space(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is left of a folder, over many seeds.
    fn outcomes(act: impl Fn(&FaultyStorage, &Path)) -> Vec<Vec<(String, Vec<u8>)>> {
        let mut found = Vec::new();
        for seed in 0..200 {
            let (before, after) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let storage = FaultyStorage::new(before.path(), Plan { seed, ..Plan::default() }).unwrap();
            act(&storage, before.path());
            storage.reboot(before.path(), after.path()).unwrap();
            let mut files: Vec<(String, Vec<u8>)> = fs::read_dir(after.path())
                .unwrap()
                .map(|e| e.unwrap())
                .map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap()))
                .collect();
            files.sort();
            found.push(files);
        }
        found.sort();
        found.dedup();
        found
    }

    fn file(name: &str, bytes: &[u8]) -> (String, Vec<u8>) {
        (name.into(), bytes.to_vec())
    }

    #[test]
    fn only_what_was_synced_is_certain() {
        let unsynced = outcomes(|s, dir| {
            let file = s.create_new(&dir.join("a"), 0o600).unwrap();
            s.write_at(&file, b"xy", 0).unwrap();
        });
        for possible in
            [vec![], vec![file("a", b"")], vec![file("a", b"x")], vec![file("a", b"x\0")], vec![file("a", b"xy")]]
        {
            assert!(unsynced.contains(&possible), "{possible:?}");
        }
        let name_lost = outcomes(|s, dir| {
            let file = s.create_new(&dir.join("a"), 0o600).unwrap();
            s.write_at(&file, b"xy", 0).unwrap();
            s.sync_file(&file).unwrap();
        });
        assert_eq!(name_lost, [vec![], vec![file("a", b"xy")]]);
        let certain = outcomes(|s, dir| {
            let file = s.create_new(&dir.join("a"), 0o600).unwrap();
            s.write_at(&file, b"xy", 0).unwrap();
            s.sync_file(&file).unwrap();
            s.sync_dir(dir).unwrap();
        });
        assert_eq!(certain, [vec![file("a", b"xy")]]);
    }

    #[test]
    fn an_unsynced_rename_has_both_outcomes_and_a_failed_sync_stays_failed() {
        let renamed = outcomes(|s, dir| {
            for (name, bytes) in [("a", b"old"), ("b", b"new")] {
                let file = s.create_new(&dir.join(name), 0o600).unwrap();
                s.write_at(&file, bytes, 0).unwrap();
                s.sync_file(&file).unwrap();
            }
            s.sync_dir(dir).unwrap();
            s.rename(&dir.join("b"), &dir.join("a")).unwrap();
        });
        assert!(renamed.contains(&vec![file("a", b"old"), file("b", b"new")]));
        assert!(renamed.contains(&vec![file("a", b"new")]));
        assert!(renamed.iter().all(|files| files.iter().any(|(name, _)| name == "a")));

        let dir = tempfile::tempdir().unwrap();
        let plan = Plan { seed: 5, fault: Some((At::Change(3), Fault::Io)), short: false };
        let storage = FaultyStorage::new(dir.path(), plan).unwrap();
        let handle = storage.create_new(&dir.path().join("a"), 0o600).unwrap();
        storage.write_at(&handle, &[7; 1000], 0).unwrap();
        assert!(storage.sync_file(&handle).is_err());
        storage.sync_file(&handle).unwrap();
        storage.sync_dir(dir.path()).unwrap();
        let mut lengths: Vec<u64> = Vec::new();
        for _ in 0..50 {
            let after = tempfile::tempdir().unwrap();
            storage.reboot(dir.path(), after.path()).unwrap();
            lengths.push(fs::metadata(after.path().join("a")).unwrap().len());
        }
        assert!(lengths.contains(&0) && lengths.contains(&1000), "lost for one crash, kept for another");
    }
}
