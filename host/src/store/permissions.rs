//! Whose files the store believes.
//!
//! Digests say what a blob must be, but a process that maps a verified file
//! must also know that nobody else changes it afterwards. So every file of the
//! store that is used must be
//! - a regular file, not a symbolic link, a pipe or a device;
//! - not writable by others. Group write permission is accepted: who is in the
//!   group was decided by the owner, and private groups with umask 002 are
//!   common. Blobs themselves are written with mode 0444;
//! - owned by root, by the user of the process, or by the owner of the store's
//!   root folder. So an init container that builds as root serves a process
//!   that runs as another user, and a user's own store works as it is.
//!
//! The same holds for the root folder. It anchors the rest, since whoever may
//! write to it could exchange any folder below it.

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use crate::error::{Code, Error, Result};

/// Permission bit: others may write.
const WRITABLE_BY_OTHERS: u32 = 0o002;

/// The users whose files are believed.
#[derive(Clone, Debug)]
pub(crate) struct Trust {
    users: BTreeSet<u32>,
}

impl Trust {
    /// Trust for a store with this root folder.
    ///
    /// # Errors
    /// `io_error` if it is no folder; `entry_not_trusted` if others may write
    /// to it.
    pub(crate) fn of_root(root: &Path, metadata: &Metadata) -> Result<Self> {
        if !metadata.is_dir() {
            return Err(Error::io(root.display(), "expected a folder for the store, found something else")
                .hint("choose another store with --store or WEIGHTMILL_STORE"));
        }
        refuse_writable_by_others(root, metadata.mode())?;
        Ok(Trust { users: [0, rustix::process::geteuid().as_raw(), metadata.uid()].into() })
    }

    /// Checks a file of the store.
    ///
    /// # Errors
    /// `entry_not_trusted`, saying what is wrong with it.
    pub(crate) fn check(&self, path: &Path, metadata: &Metadata) -> Result<()> {
        let kind = metadata.file_type();
        if !kind.is_file() {
            let found = match () {
                () if kind.is_symlink() => "a symbolic link",
                () if kind.is_dir() => "a folder",
                () if kind.is_fifo() => "a pipe",
                () => "something else",
            };
            return Err(not_trusted(path, format!("expected a regular file, found {found}"))
                .hint("nothing of weightmill makes that: remove it, and look at who can write to the store"));
        }
        refuse_writable_by_others(path, metadata.mode())?;
        if !self.users.contains(&metadata.uid()) {
            let users: Vec<String> = self.users.iter().map(u32::to_string).collect();
            let what = format!("it is owned by user {}, expected one of {}", metadata.uid(), users.join(", "));
            return Err(not_trusted(path, what)
                .hint("its owner could change it while it is used: chown it to the owner of the store, or remove it"));
        }
        Ok(())
    }
}

fn refuse_writable_by_others(path: &Path, mode: u32) -> Result<()> {
    if mode & WRITABLE_BY_OTHERS == 0 {
        return Ok(());
    }
    Err(not_trusted(path, format!("it is writable by others (mode {:04o})", mode & 0o7777))
        .hint(format!("run `chmod o-w {}` if you trust what it holds", path.display())))
}

fn not_trusted(path: &Path, what: String) -> Error {
    Error::new(Code::EntryNotTrusted, format!("{} is not trusted: {what}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn kinds_modes_and_owners() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("blob");
        fs::write(&path, "x").unwrap();
        let trust = Trust::of_root(dir.path(), &fs::metadata(dir.path()).unwrap()).unwrap();
        let check = |path: &Path| trust.check(path, &fs::symlink_metadata(path).unwrap());
        for (mode, good) in [(0o444, true), (0o600, true), (0o664, true), (0o666, false), (0o602, false)] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert_eq!(check(&path).is_ok(), good, "{mode:o}");
        }
        fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(check(&link).unwrap_err().message().contains("symbolic link"));
        assert!(check(dir.path()).unwrap_err().message().contains("a folder"));
        let strangers = Trust { users: BTreeSet::from([u32::MAX - 1]) };
        let refused = strangers.check(&path, &fs::metadata(&path).unwrap()).unwrap_err();
        assert_eq!(refused.code(), Code::EntryNotTrusted);
    }

    #[test]
    fn a_root_that_anyone_may_change_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).unwrap();
        let refused = Trust::of_root(dir.path(), &fs::metadata(dir.path()).unwrap()).unwrap_err();
        assert_eq!(refused.code(), Code::EntryNotTrusted);
    }
}
