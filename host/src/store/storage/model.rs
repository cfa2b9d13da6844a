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

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

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

type FileId = usize;

#[derive(Debug)]
struct State {
    random: u64,
    changes: u64,
    reads: u64,
    crashed: bool,
    files: Vec<ModelFile>,
    by_inode: BTreeMap<(u64, u64), FileId>,
    folders: BTreeMap<PathBuf, BTreeMap<OsString, Name>>,
}

#[derive(Debug, Default)]
struct ModelFile {
    durable: Vec<u8>,
    durable_mode: u32,
    mode: u32,
    /// Writes since the last sync.
    pending: Vec<(u64, Vec<u8>)>,
    /// Writes that a failed sync has dropped: they may be on the disk, and
    /// nothing makes that certain.
    doubtful: Vec<(u64, Vec<u8>)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Nothing,
    File(FileId),
    Folder,
}

/// The states of a name since its folder was synced; the first is certain.
#[derive(Debug)]
struct Name(Vec<Target>);

/// Whether an operation is to be done, and whether the machine stops after it.
enum Verdict {
    Do,
    DoAndCrash,
    Fail(ErrorKind),
}

fn stopped() -> io::Error {
    io::Error::other("the machine has stopped")
}

impl State {
    /// SplitMix64: below `bound`.
    fn below(&mut self, bound: usize) -> usize {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % bound.max(1) as u64) as usize
    }

    fn set(&mut self, path: &Path, target: Target) {
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return };
        let names = self.folders.entry(folder.to_owned()).or_default();
        names.entry(name.to_owned()).or_insert_with(|| Name(vec![Target::Nothing])).0.push(target);
    }

    fn id(&mut self, metadata: &Metadata) -> FileId {
        let next = self.files.len();
        let id = *self.by_inode.entry((metadata.dev(), metadata.ino())).or_insert(next);
        if id == next {
            self.files.push(ModelFile::default());
        }
        id
    }

    /// The system uses inode numbers again.
    fn new_file(&mut self, metadata: &Metadata) -> FileId {
        self.by_inode.remove(&(metadata.dev(), metadata.ino()));
        let id = self.id(metadata);
        self.files[id].mode = metadata.mode() & 0o7777;
        self.files[id].durable_mode = self.files[id].mode;
        id
    }

    /// A part of some bytes, from none to all.
    fn part<'b>(&mut self, bytes: &'b [u8]) -> &'b [u8] {
        &bytes[..self.below(bytes.len() + 1)]
    }
}

impl FaultyStorage {
    /// Takes over a folder: all that is in it now is on the disk.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(root: &Path, plan: Plan) -> io::Result<Self> {
        let mut state = State {
            random: plan.seed,
            changes: 0,
            reads: 0,
            crashed: false,
            files: Vec::new(),
            by_inode: BTreeMap::new(),
            folders: BTreeMap::new(),
        };
        adopt(&mut state, root)?;
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
        let mut written = BTreeMap::new();
        survive(&mut state, &mut written, root, to)
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

fn adopt(state: &mut State, folder: &Path) -> io::Result<()> {
    let mut names = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        let target = if metadata.is_dir() {
            adopt(state, &entry.path())?;
            Target::Folder
        } else {
            let id = state.id(&metadata);
            let mode = metadata.mode() & 0o7777;
            state.files[id] = ModelFile { durable: fs::read(entry.path())?, durable_mode: mode, mode, ..Default::default() };
            Target::File(id)
        };
        names.insert(entry.file_name(), Name(vec![target]));
    }
    state.folders.insert(folder.to_owned(), names);
    Ok(())
}

fn apply(bytes: &mut Vec<u8>, offset: u64, write: &[u8]) {
    let end = offset as usize + write.len();
    if bytes.len() < end {
        bytes.resize(end, 0);
    }
    bytes[offset as usize..end].copy_from_slice(write);
}

/// Writes what survives of a folder into another.
fn survive(state: &mut State, written: &mut BTreeMap<FileId, PathBuf>, from: &Path, to: &Path) -> io::Result<()> {
    let names: Vec<(OsString, Vec<Target>)> = state
        .folders
        .get(from)
        .map(|names| names.iter().map(|(name, Name(states))| (name.clone(), states.clone())).collect())
        .unwrap_or_default();
    for (name, states) in names {
        let target = states[state.below(states.len())];
        let path = to.join(&name);
        match target {
            Target::Nothing => {}
            Target::Folder => {
                fs::create_dir(&path)?;
                survive(state, written, &from.join(&name), &path)?;
            }
            Target::File(id) => match written.get(&id) {
                Some(first) => fs::hard_link(first, &path)?,
                None => {
                    let (bytes, mode) = surviving_file(state, id);
                    fs::write(&path, bytes)?;
                    fs::set_permissions(&path, Permissions::from_mode(mode))?;
                    written.insert(id, path);
                }
            },
        }
    }
    Ok(())
}

fn surviving_file(state: &mut State, id: FileId) -> (Vec<u8>, u32) {
    let file = &state.files[id];
    let mut bytes = file.durable.clone();
    let modes = [file.durable_mode, file.mode];
    let writes: Vec<(u64, Vec<u8>)> = file.doubtful.iter().chain(&file.pending).cloned().collect();
    for (offset, write) in writes {
        match state.below(4) {
            0 => {}
            1 => {
                let torn = state.part(&write);
                apply(&mut bytes, offset, torn);
                // The size may have been written, and not the bytes.
                let len = bytes.len().max(offset as usize + write.len());
                bytes.resize(len, 0);
            }
            2 => {
                let torn = state.part(&write);
                apply(&mut bytes, offset, torn);
            }
            _ => apply(&mut bytes, offset, &write),
        }
    }
    (bytes, modes[state.below(2)])
}

impl Storage for FaultyStorage {
    fn open_read(&self, path: &Path) -> io::Result<File> {
        self.look(|| SystemStorage.open_read(path))
    }

    fn create_new(&self, path: &Path, mode: u32) -> io::Result<File> {
        self.change(|state| {
            let file = SystemStorage.create_new(path, mode)?;
            let id = state.new_file(&file.metadata()?);
            state.set(path, Target::File(id));
            Ok(file)
        })
    }

    fn open_lock(&self, path: &Path) -> io::Result<File> {
        if fs::symlink_metadata(path).is_ok() {
            return self.look(|| SystemStorage.open_lock(path));
        }
        self.change(|state| {
            let file = SystemStorage.open_lock(path)?;
            let id = state.new_file(&file.metadata()?);
            state.set(path, Target::File(id));
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
            if state.below(8) == 0 {
                return Err(ErrorKind::Interrupted.into());
            }
            len = 1 + state.below(len);
        }
        file.read_at(&mut buffer[..len], offset)
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let mut state = self.state();
        let id = state.id(&file.metadata()?);
        let write = |state: &mut State, bytes: &[u8]| -> io::Result<usize> {
            file.write_all_at(bytes, offset)?;
            state.files[id].pending.push((offset, bytes.to_vec()));
            Ok(bytes.len())
        };
        match self.verdict(&mut state)? {
            Verdict::Do if self.plan.short && !bytes.is_empty() => match state.below(8) {
                0 => Err(ErrorKind::Interrupted.into()),
                _ => {
                    let len = 1 + state.below(bytes.len());
                    write(&mut state, &bytes[..len])
                }
            },
            Verdict::Do => write(&mut state, bytes),
            Verdict::Fail(kind) => {
                let part = state.part(bytes);
                write(&mut state, part)?;
                Err(kind.into())
            }
            Verdict::DoAndCrash => {
                let part = state.part(bytes);
                let _ = write(&mut state, part);
                state.crashed = true;
                Err(stopped())
            }
        }
    }

    fn set_mode(&self, file: &File, mode: u32) -> io::Result<()> {
        self.change(|state| {
            SystemStorage.set_mode(file, mode)?;
            let id = state.id(&file.metadata()?);
            state.files[id].mode = mode;
            Ok(())
        })
    }

    fn sync_file(&self, file: &File) -> io::Result<()> {
        let mut state = self.state();
        let id = state.id(&file.metadata()?);
        let verdict = self.verdict(&mut state)?;
        let pending = match verdict {
            // What was not synced stays uncertain.
            Verdict::DoAndCrash => {
                state.crashed = true;
                return Err(stopped());
            }
            _ => std::mem::take(&mut state.files[id].pending),
        };
        let model = &mut state.files[id];
        match verdict {
            Verdict::Fail(kind) => {
                model.doubtful.extend(pending);
                Err(kind.into())
            }
            _ => {
                pending.iter().for_each(|(offset, bytes)| apply(&mut model.durable, *offset, bytes));
                model.durable_mode = model.mode;
                Ok(())
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
        for Name(states) in state.folders.entry(path.to_owned()).or_default().values_mut() {
            let last = states.len() - 1;
            states.drain(..last);
        }
        Ok(())
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.change(|state| {
            SystemStorage.link(from, to)?;
            let id = state.id(&fs::symlink_metadata(to)?);
            state.set(to, Target::File(id));
            Ok(())
        })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.change(|state| {
            SystemStorage.rename(from, to)?;
            let id = state.id(&fs::symlink_metadata(to)?);
            state.set(from, Target::Nothing);
            state.set(to, Target::File(id));
            Ok(())
        })
    }

    fn unlink(&self, path: &Path) -> io::Result<()> {
        self.change(|state| {
            SystemStorage.unlink(path)?;
            state.set(path, Target::Nothing);
            Ok(())
        })
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.change(|state| {
            SystemStorage.create_dir(path)?;
            state.set(path, Target::Folder);
            Ok(())
        })
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.change(|state| {
            SystemStorage.remove_dir(path)?;
            state.set(path, Target::Nothing);
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

/// Copies a folder with what is in it; files with two names stay one file.
///
/// # Errors
/// What the system says.
pub fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    fn copy(from: &Path, to: &Path, seen: &mut BTreeMap<u64, PathBuf>) -> io::Result<()> {
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            let (metadata, path) = (entry.metadata()?, to.join(OsStr::new(&entry.file_name())));
            if metadata.is_dir() {
                fs::create_dir(&path)?;
                copy(&entry.path(), &path, seen)?;
            } else if let Some(first) = seen.get(&metadata.ino()) {
                fs::hard_link(first, &path)?;
            } else {
                fs::copy(entry.path(), &path)?;
                seen.insert(metadata.ino(), path);
            }
        }
        Ok(())
    }
    copy(from, to, &mut BTreeMap::new())
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
        for possible in [vec![], vec![file("a", b"")], vec![file("a", b"x")], vec![file("a", b"x\0")], vec![file("a", b"xy")]] {
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

        let (dir, after) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let plan = Plan { seed: 5, fault: Some((At::Change(3), Fault::Io)), short: false };
        let storage = FaultyStorage::new(dir.path(), plan).unwrap();
        let handle = storage.create_new(&dir.path().join("a"), 0o600).unwrap();
        storage.write_at(&handle, &[7; 1000], 0).unwrap();
        assert!(storage.sync_file(&handle).is_err());
        storage.sync_file(&handle).unwrap();
        storage.sync_dir(dir.path()).unwrap();
        let state = storage.state();
        assert_eq!((state.files[0].durable.len(), state.files[0].doubtful.len()), (0, 1));
        drop(state);
        storage.reboot(dir.path(), after.path()).unwrap();
    }
}
