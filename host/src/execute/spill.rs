//! An intermediate tensor that is kept whole: in memory up to a budget, then
//! in a file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Code, Error, Result};

/// Where spills go.
pub struct SpillRoom<'a> {
    budget_bytes: u64,
    used_bytes: Arc<AtomicU64>,
    open_file: Box<dyn Fn() -> Result<File> + Send + Sync + 'a>,
}

impl<'a> SpillRoom<'a> {
    /// Keeps `budget_bytes` in memory; what goes beyond goes into files that
    /// `open_file` makes.
    pub fn new(budget_bytes: u64, open_file: impl Fn() -> Result<File> + Send + Sync + 'a) -> Self {
        SpillRoom { budget_bytes, used_bytes: Arc::default(), open_file: Box::new(open_file) }
    }

    /// Keeps `budget_bytes` in memory, and refuses what goes beyond.
    pub fn memory_only(budget_bytes: u64) -> Self {
        Self::new(budget_bytes, move || {
            Err(Error::new(
                Code::InsufficientMemory,
                format!("intermediate tensors need more than the memory budget of {budget_bytes} bytes"),
            )
            .hint("raise --memory-budget, or use a store, whose disk then holds them"))
        })
    }

    pub(super) fn create(&self, len: u64) -> Result<SpillWriter> {
        let before = self.used_bytes.fetch_add(len, Ordering::AcqRel);
        let claim = Claim { used_bytes: self.used_bytes.clone(), len };
        let memory = before.checked_add(len).is_some_and(|total| total <= self.budget_bytes);
        let place = match usize::try_from(len).ok().filter(|_| memory) {
            Some(len) => Place::Memory(Vec::with_capacity(len), claim),
            None => {
                drop(claim);
                Place::File((self.open_file)()?)
            }
        };
        Ok(SpillWriter { place, written: 0 })
    }
}

/// Memory that is accounted for.
struct Claim {
    used_bytes: Arc<AtomicU64>,
    len: u64,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.used_bytes.fetch_sub(self.len, Ordering::AcqRel);
    }
}

enum Place {
    /// The claim is given back with the memory.
    Memory(Vec<u8>, #[expect(dead_code, reason = "held for its drop")] Claim),
    File(File),
}

pub(super) struct SpillWriter {
    place: Place,
    written: u64,
}

impl SpillWriter {
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.place {
            Place::Memory(memory, _) => memory.extend_from_slice(bytes),
            Place::File(file) => file.write_all_at(bytes, self.written).map_err(|e| {
                let code =
                    if e.kind() == std::io::ErrorKind::StorageFull { Code::InsufficientDisk } else { Code::IoError };
                Error::new(code, format!("writing an intermediate tensor: {e}"))
            })?,
        }
        self.written += bytes.len() as u64;
        Ok(())
    }

    pub(super) fn finish(self) -> Spill {
        Spill(self.place)
    }
}

/// A whole intermediate tensor.
pub(super) struct Spill(Place);

impl Spill {
    pub(super) fn read_exact_at(&self, out: &mut [u8], offset: u64) -> Result<()> {
        match &self.0 {
            Place::Memory(memory, _) => {
                // In range: plans are checked, and the spill has the tensor's length.
                out.copy_from_slice(&memory[offset as usize..offset as usize + out.len()]);
                Ok(())
            }
            Place::File(file) => {
                file.read_exact_at(out, offset).map_err(|e| Error::io("reading an intermediate tensor", e))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spill(room: &SpillRoom, len: usize) -> Result<Spill> {
        let mut writer = room.create(len as u64)?;
        for piece in (0..len).map(|i| i as u8).collect::<Vec<_>>().chunks(7) {
            writer.append(piece)?;
        }
        Ok(writer.finish())
    }

    fn check(spill: &Spill) {
        let mut out = [0; 5];
        spill.read_exact_at(&mut out, 11).unwrap();
        assert_eq!(out, [11, 12, 13, 14, 15]);
    }

    #[test]
    fn what_is_over_the_budget_goes_to_a_file_and_comes_back() {
        let room = SpillRoom::new(100, || Ok(tempfile::tempfile().unwrap()));
        let first = spill(&room, 60).unwrap();
        let second = spill(&room, 60).unwrap();
        assert!(matches!((&first.0, &second.0), (Place::Memory(..), Place::File(_))));
        check(&first);
        check(&second);
        drop(first);
        assert!(matches!(spill(&room, 100).unwrap().0, Place::Memory(..)));
    }

    #[test]
    fn memory_only_refuses() {
        let room = SpillRoom::memory_only(100);
        assert_eq!(spill(&room, 101).err().map(|e| e.code()), Some(Code::InsufficientMemory));
        check(&spill(&room, 100).unwrap());
    }
}
