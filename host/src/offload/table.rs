//! Which ranges a device has registered: what a driver does not check, or
//! reports as nothing better than "invalid value".

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::error::{Code, Error, Result};
use crate::mapping::FileMap;

use super::device::{Access, DeviceInfo};
use super::ranges::{PAGE_BYTES, PageRange};

/// By the mapping's address and the range's first byte.
type Ranges = BTreeMap<(usize, u64), (PageRange, Weak<FileMap>)>;

/// The registered ranges of a device.
#[derive(Default)]
pub(super) struct RegistrationTable(Mutex<Ranges>);

impl RegistrationTable {
    fn lock(&self) -> MutexGuard<'_, Ranges> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a range may be registered: the device can do that, the mapping
    /// is of the right kind and long enough, no part is registered already.
    pub(super) fn check_new(&self, info: &DeviceInfo, map: &FileMap, range: PageRange, access: Access) -> Result<()> {
        let supported = match access {
            Access::ReadOnly => info.registers_read_only,
            Access::ReadWrite => info.registers_writable,
        };
        if !supported {
            return Err(refused(map, range, "the device cannot register such memory"));
        }
        if map.is_writable() != (access == Access::ReadWrite) {
            return Err(refused(map, range, "the mapping is not of the kind that is asked for"));
        }
        if range.end() > map.len_bytes().next_multiple_of(PAGE_BYTES) {
            return Err(refused(map, range, "the file is shorter"));
        }
        let table = self.lock();
        let mut of_map = table.range((map.address(), 0)..=(map.address(), u64::MAX)).map(|(_, (r, _))| r);
        if of_map.any(|r| r.clip(range.start(), range.len()).is_some()) {
            return Err(refused(map, range, "a part of it is registered already"));
        }
        Ok(())
    }

    pub(super) fn insert(&self, map: &Arc<FileMap>, range: PageRange) {
        self.lock().insert((map.address(), range.start()), (range, Arc::downgrade(map)));
    }

    /// Whether exactly this range is registered.
    pub(super) fn check_known(&self, map: &FileMap, range: PageRange) -> Result<()> {
        match self.lock().get(&(map.address(), range.start())) {
            Some((found, _)) if *found == range => Ok(()),
            _ => Err(refused(map, range, "it is not registered")),
        }
    }

    pub(super) fn remove(&self, map: &FileMap, range: PageRange) {
        self.lock().remove(&(map.address(), range.start()));
    }

    /// Whether these bytes lie in one registration.
    pub(super) fn check_copy(&self, map: &FileMap, from: &Range<u64>) -> Result<()> {
        let len = from.end.saturating_sub(from.start);
        let table = self.lock();
        let before = table.range((map.address(), 0)..=(map.address(), from.start)).next_back();
        match before.and_then(|(_, (range, _))| range.clip(from.start, len)) {
            Some(whole) if whole == *from => Ok(()),
            _ => Err(Error::io(
                "copying from a registered range",
                format!("bytes {}..{} of {} lie in no one registration", from.start, from.end, map.path().display()),
            )),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.lock().values().map(|(range, _)| range.len()).sum()
    }

    /// Whether a range is registered whose mapping is gone.
    pub(super) fn has_dangling(&self) -> bool {
        self.lock().values().any(|(_, map)| map.strong_count() == 0)
    }
}

/// The error for a range.
pub(super) fn refused(map: &FileMap, range: PageRange, why: &str) -> Error {
    let (path, start, end) = (map.path().display(), range.start(), range.end());
    Error::new(Code::RegistrationFailed, format!("{path}, bytes {start}..{end}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offload::{Device, HostDevice};
    use std::io::Write;

    fn map(len: usize) -> Arc<FileMap> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![1; len]).unwrap();
        Arc::new(FileMap::read_only(Arc::new(file), "x").unwrap())
    }

    #[test]
    fn ranges_neither_overlap_nor_span() {
        let device = HostDevice::default();
        let (table, map, other) = (RegistrationTable::default(), map(20_000), map(20_000));
        let range = |from, len| PageRange::around(from, len).unwrap();
        let new = |map: &FileMap, r, access| table.check_new(device.info(), map, r, access);
        new(&map, range(4096, 8192), Access::ReadOnly).unwrap();
        table.insert(&map, range(4096, 8192));
        assert!(new(&map, range(0, 4097), Access::ReadOnly).is_err());
        assert!(new(&map, range(8192, 1), Access::ReadOnly).is_err());
        assert!(new(&map, range(12288, 8192), Access::ReadWrite).is_err(), "the mapping is read-only");
        assert!(new(&map, range(12288, 8193), Access::ReadOnly).is_err(), "beyond the end");
        new(&map, range(12288, 8192), Access::ReadOnly).unwrap();
        new(&other, range(4096, 8192), Access::ReadOnly).unwrap();
        table.insert(&map, range(12288, 4096));

        table.check_copy(&map, &(5000..12288)).unwrap();
        assert!(table.check_copy(&map, &(5000..12289)).is_err(), "it spans two registrations");
        assert!(table.check_copy(&map, &(4095..5000)).is_err());
        assert!(table.check_copy(&other, &(5000..6000)).is_err());

        assert!(table.check_known(&map, range(4096, 4096)).is_err());
        table.check_known(&map, range(4096, 8192)).unwrap();
        assert_eq!(table.bytes(), 12288);
        assert!(!table.has_dangling());
        drop(map);
        assert!(table.has_dangling());
    }
}
