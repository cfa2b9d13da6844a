//! [`Storage`] as the operating system does it.

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags, Timespec, Timestamps};

use super::{FilesystemKind, Sharing, Space, Storage};

/// The operating system's files.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemStorage;

fn open(path: &Path, flags: OFlags, mode: u32) -> io::Result<File> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    Ok(File::from(rustix::fs::open(path, flags, Mode::from_raw_mode(mode as _))?))
}

impl Storage for SystemStorage {
    fn open_read(&self, path: &Path) -> io::Result<File> {
        open(path, OFlags::RDONLY | OFlags::NONBLOCK, 0)
    }

    fn create_new(&self, path: &Path, mode: u32) -> io::Result<File> {
        open(path, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL, mode)
    }

    fn open_lock(&self, path: &Path) -> io::Result<File> {
        let writable = open(path, OFlags::RDWR | OFlags::CREATE | OFlags::NONBLOCK, 0o644);
        writable.or_else(|refused| self.open_read(path).map_err(|_| refused))
    }

    fn try_lock(&self, file: &File, sharing: Sharing) -> io::Result<bool> {
        let taken = match sharing {
            Sharing::Shared => fs2::FileExt::try_lock_shared(file),
            Sharing::Exclusive => fs2::FileExt::try_lock_exclusive(file),
        };
        match taken {
            Ok(()) => Ok(true),
            Err(e) if e.raw_os_error() == fs2::lock_contended_error().raw_os_error() => Ok(false),
            Err(e) => Err(e),
        }
    }

    fn read_at(&self, file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        file.read_at(buffer, offset)
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
        file.write_at(bytes, offset)
    }

    fn set_mode(&self, file: &File, mode: u32) -> io::Result<()> {
        Ok(rustix::fs::fchmod(file, Mode::from_raw_mode(mode as _))?)
    }

    fn sync_file(&self, file: &File) -> io::Result<()> {
        file.sync_all()
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        open(path, OFlags::RDONLY | OFlags::DIRECTORY, 0)?.sync_all()
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        Ok(rustix::fs::link(from, to)?)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        Ok(rustix::fs::rename(from, to)?)
    }

    fn unlink(&self, path: &Path) -> io::Result<()> {
        Ok(rustix::fs::unlink(path)?)
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        Ok(rustix::fs::mkdir(path, Mode::from_raw_mode(0o755))?)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        Ok(rustix::fs::rmdir(path)?)
    }

    fn touch(&self, path: &Path) -> io::Result<()> {
        let now = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW };
        let times = Timestamps { last_access: now, last_modification: now };
        let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
        Ok(rustix::fs::utimensat(rustix::fs::CWD, path, &times, flags)?)
    }

    fn metadata(&self, path: &Path) -> io::Result<Metadata> {
        std::fs::symlink_metadata(path)
    }

    fn file_metadata(&self, file: &File) -> io::Result<Metadata> {
        file.metadata()
    }

    fn read_dir(&self, path: &Path) -> io::Result<Vec<OsString>> {
        let mut names = std::fs::read_dir(path)?
            .map(|entry| entry.map(|entry| entry.file_name()))
            .collect::<io::Result<Vec<_>>>()?;
        names.sort_unstable();
        Ok(names)
    }

    fn kind(&self, path: &Path) -> io::Result<FilesystemKind> {
        filesystem_kind(path)
    }

    fn space(&self, path: &Path) -> io::Result<Space> {
        Ok(Space { free_bytes: fs2::available_space(path)? })
    }
}

/// Filesystems whose locks are not seen by other hosts, or whose syncs and
/// links another machine or a user's process answers for, by the magic number
/// that `statfs` gives.
#[cfg(target_os = "linux")]
const FOREIGN: &[(u32, &str)] = &[
    (0x0000_6969, "NFS"),
    (0x6573_5546, "FUSE"),
    (0xFF53_4D42, "CIFS"),
    (0xFE53_4D42, "SMB2"),
    (0x0000_517B, "SMB"),
    (0x0102_1997, "9P"),
    (0x00C3_6400, "Ceph"),
    (0x0BD0_0BD0, "Lustre"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
    (0x0116_1970, "GFS2"),
    (0x7461_636F, "OCFS2"),
    (0x5346_414F, "AFS"),
    (0x6B41_4653, "kAFS"),
    (0x7375_7245, "Coda"),
    (0x0000_564C, "NCP"),
    (0x786F_4256, "a VirtualBox shared folder"),
    (0xBACB_ACBC, "a VMware shared folder"),
];

#[cfg(target_os = "linux")]
fn filesystem_kind(path: &Path) -> io::Result<FilesystemKind> {
    // `f_type` is a signed word on some targets: the numbers have 32 bits.
    let magic = rustix::fs::statfs(path)?.f_type as u64 as u32;
    let name = FOREIGN.iter().find(|(number, _)| *number == magic).map(|(_, name)| *name);
    Ok(name.map_or(FilesystemKind::Local, FilesystemKind::Foreign))
}

/// Elsewhere no claim of durability is made, so nothing is refused.
#[cfg(not(target_os = "linux"))]
fn filesystem_kind(path: &Path) -> io::Result<FilesystemKind> {
    std::fs::metadata(path)?;
    Ok(FilesystemKind::Local)
}
