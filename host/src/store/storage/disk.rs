//! The book of what is on a disk for certain, and what may be.
//!
//! See [`model`](super::model), which writes it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The number of a file in the book.
type FileId = usize;

/// A disk's files and names, with all states that a crash may leave.
#[derive(Debug, Default)]
pub(super) struct Disk {
    random: u64,
    files: Vec<ModelFile>,
    by_inode: BTreeMap<(u64, u64), FileId>,
    folders: BTreeMap<PathBuf, BTreeMap<OsString, Name>>,
}

/// A file's bytes and mode.
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

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Nothing,
    File(FileId),
    Folder,
}

/// The states of a name since its folder was synced; the first is certain.
#[derive(Debug)]
struct Name(Vec<Target>);

impl Disk {
    /// A disk on which all that is now in a folder is for certain.
    pub(super) fn adopt(root: &Path, seed: u64) -> io::Result<Self> {
        let mut disk = Disk { random: seed, ..Disk::default() };
        disk.adopt_folder(root)?;
        Ok(disk)
    }

    fn adopt_folder(&mut self, folder: &Path) -> io::Result<()> {
        let mut names = BTreeMap::new();
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let metadata = entry.metadata()?;
            let target = if metadata.is_dir() {
                self.adopt_folder(&entry.path())?;
                Target::Folder
            } else {
                let id = self.id(&metadata);
                let mode = metadata.mode() & 0o7777;
                let durable = fs::read(entry.path())?;
                self.files[id] = ModelFile { durable, durable_mode: mode, mode, ..ModelFile::default() };
                Target::File(id)
            };
            names.insert(entry.file_name(), Name(vec![target]));
        }
        self.folders.insert(folder.to_owned(), names);
        Ok(())
    }

    /// The next choice, below `bound` (SplitMix64).
    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % bound.max(1) as u64) as usize
    }

    /// A part of some bytes, from none to all.
    pub(super) fn part<'b>(&mut self, bytes: &'b [u8]) -> &'b [u8] {
        &bytes[..self.below(bytes.len() + 1)]
    }

    fn id(&mut self, metadata: &Metadata) -> FileId {
        let next = self.files.len();
        let id = *self.by_inode.entry((metadata.dev(), metadata.ino())).or_insert(next);
        if id == next {
            self.files.push(ModelFile::default());
        }
        id
    }

    fn set(&mut self, path: &Path, target: Target) {
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return };
        let names = self.folders.entry(folder.to_owned()).or_default();
        names.entry(name.to_owned()).or_insert_with(|| Name(vec![Target::Nothing])).0.push(target);
    }

    /// A file was created. The system uses inode numbers again.
    pub(super) fn created(&mut self, path: &Path, metadata: &Metadata) {
        self.by_inode.remove(&(metadata.dev(), metadata.ino()));
        let id = self.id(metadata);
        let mode = metadata.mode() & 0o7777;
        self.files[id] = ModelFile { mode, durable_mode: mode, ..ModelFile::default() };
        self.set(path, Target::File(id));
    }

    /// A file got another name.
    pub(super) fn linked(&mut self, path: &Path, metadata: &Metadata) {
        let id = self.id(metadata);
        self.set(path, Target::File(id));
    }

    /// A name was removed.
    pub(super) fn removed(&mut self, path: &Path) {
        self.set(path, Target::Nothing);
    }

    /// A folder was created.
    pub(super) fn folder_created(&mut self, path: &Path) {
        self.set(path, Target::Folder);
    }

    /// Bytes were written.
    pub(super) fn wrote(&mut self, metadata: &Metadata, offset: u64, bytes: &[u8]) {
        let id = self.id(metadata);
        self.files[id].pending.push((offset, bytes.to_vec()));
    }

    /// A file's mode was changed.
    pub(super) fn mode_set(&mut self, metadata: &Metadata, mode: u32) {
        let id = self.id(metadata);
        self.files[id].mode = mode;
    }

    /// A file was synced.
    pub(super) fn synced(&mut self, metadata: &Metadata) {
        let id = self.id(metadata);
        let file = &mut self.files[id];
        for (offset, bytes) in std::mem::take(&mut file.pending) {
            apply(&mut file.durable, offset, &bytes);
        }
        file.durable_mode = file.mode;
    }

    /// Syncing a file failed.
    pub(super) fn sync_failed(&mut self, metadata: &Metadata) {
        let id = self.id(metadata);
        let file = &mut self.files[id];
        file.doubtful.append(&mut file.pending);
    }

    /// A folder was synced.
    pub(super) fn folder_synced(&mut self, path: &Path) {
        for Name(states) in self.folders.entry(path.to_owned()).or_default().values_mut() {
            let last = states.len() - 1;
            states.drain(..last);
        }
    }

    /// Writes what a crash now leaves of a folder into another, empty one.
    pub(super) fn survive(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        self.survive_folder(&mut BTreeMap::new(), from, to)
    }

    fn survive_folder(&mut self, written: &mut BTreeMap<FileId, PathBuf>, from: &Path, to: &Path) -> io::Result<()> {
        let names: Vec<(OsString, Vec<Target>)> = self
            .folders
            .get(from)
            .map(|names| names.iter().map(|(name, Name(states))| (name.clone(), states.clone())).collect())
            .unwrap_or_default();
        for (name, states) in names {
            let target = states[self.below(states.len())];
            let path = to.join(&name);
            match target {
                Target::Nothing => {}
                Target::Folder => {
                    fs::create_dir(&path)?;
                    self.survive_folder(written, &from.join(&name), &path)?;
                }
                Target::File(id) => match written.get(&id) {
                    Some(first) => fs::hard_link(first, &path)?,
                    None => {
                        let (bytes, mode) = self.surviving_file(id);
                        fs::write(&path, bytes)?;
                        fs::set_permissions(&path, Permissions::from_mode(mode))?;
                        written.insert(id, path);
                    }
                },
            }
        }
        Ok(())
    }

    fn surviving_file(&mut self, id: FileId) -> (Vec<u8>, u32) {
        let file = &self.files[id];
        let mut bytes = file.durable.clone();
        let modes = [file.durable_mode, file.mode];
        let writes: Vec<(u64, Vec<u8>)> = file.doubtful.iter().chain(&file.pending).cloned().collect();
        for (offset, write) in writes {
            match self.below(4) {
                0 => {}
                1 => {
                    let torn = self.part(&write);
                    apply(&mut bytes, offset, torn);
                    // The size was written, and not all of the bytes.
                    let len = bytes.len().max(offset as usize + write.len());
                    bytes.resize(len, 0);
                }
                2 => {
                    let torn = self.part(&write);
                    apply(&mut bytes, offset, torn);
                }
                _ => apply(&mut bytes, offset, &write),
            }
        }
        (bytes, modes[self.below(2)])
    }
}

fn apply(bytes: &mut Vec<u8>, offset: u64, write: &[u8]) {
    let end = offset as usize + write.len();
    if bytes.len() < end {
        bytes.resize(end, 0);
    }
    bytes[offset as usize..end].copy_from_slice(write);
}
