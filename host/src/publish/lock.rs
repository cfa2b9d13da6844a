//! `weightmill.lock`: what the tags in a folder's recipes meant when they were
//! resolved.
//!
//! It stands beside the recipes and is meant to be committed with them. It
//! makes builds repeatable and lets them work offline; it does not authorise
//! anything, since it comes along with the recipe.
//!
//! Several processes may resolve the recipes of one folder at once, as the ranks
//! of a tensor parallel run do. Whoever writes holds a lock on the folder (its
//! kernel lock: no file is left beside the recipes), reads what is there then,
//! adds its own rows and renames the whole into place. Where a filesystem has no
//! such locks the file is still whole always; a row may get lost, and is found
//! anew by the next run.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::reference::Reference;
use crate::digest::{BlobDigest, ModuleDigest};
use crate::error::{Code, Error, Result};
use crate::progress::{Progress, Silent};

/// The longest wait for another process that writes.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The file's name.
pub const LOCK_FILE: &str = "weightmill.lock";
const FORMAT: u32 = 1;
const LIMIT_BYTES: u64 = 4 << 20;
const HEADING: &str = "\
# Which modules the references in this folder's recipes mean. Written by
# weightmill; commit it. `weightmill module update` moves it, --locked forbids that.
lock = 1
";

/// What a reference means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Locked {
    /// The manifest.
    pub manifest: BlobDigest,
    /// The module.
    pub module: ModuleDigest,
}

/// A folder's lock file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockFile {
    path: PathBuf,
    rows: BTreeMap<String, Locked>,
    /// What was set since it was read.
    changed: BTreeSet<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    lock: u32,
    #[serde(default)]
    module: Vec<Row>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    reference: String,
    manifest: String,
    module: String,
}

impl LockFile {
    /// The lock file of a folder, empty if there is none.
    ///
    /// # Errors
    /// `recipe_invalid` if it is malformed; `io_error`.
    pub fn load(folder: &Path) -> Result<Self> {
        let path = folder.join(LOCK_FILE);
        let failed = |e| Error::io(format_args!("{} cannot be read", path.display()), e);
        let text = match std::fs::metadata(&path) {
            Ok(metadata) if metadata.is_file() && metadata.len() <= LIMIT_BYTES => {
                std::fs::read_to_string(&path).map_err(failed)?
            }
            Ok(_) => return Err(malformed(&path, format!("it is no regular file of at most {LIMIT_BYTES} bytes"))),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Ok(LockFile { path, rows: BTreeMap::new(), changed: BTreeSet::new() });
            }
            Err(e) => return Err(failed(e)),
        };
        LockFile::parse(&text, path)
    }

    fn parse(text: &str, path: PathBuf) -> Result<Self> {
        let document: Document =
            toml::from_str(text).map_err(|e| malformed(&path, e.message().trim().replace('\n', ", ")))?;
        if document.lock != FORMAT {
            return Err(malformed(
                &path,
                format!("it is lock format {}; this program reads format {FORMAT}", document.lock),
            ));
        }
        let mut rows = BTreeMap::new();
        for row in document.module {
            let reference = Reference::parse(&row.reference).map_err(|e| malformed(&path, e.message().to_owned()))?;
            let manifest = row.manifest.strip_prefix("sha256:").and_then(|hex| hex.parse().ok());
            let module = row.module.strip_prefix("sha256:").and_then(|hex| hex.parse().ok());
            let (Some(manifest), Some(module)) = (manifest, module) else {
                return Err(malformed(&path, format!("'{reference}' has a digest that is none")));
            };
            if reference.digest.is_some_and(|digest| digest != manifest) {
                return Err(malformed(&path, format!("'{reference}' is said to have the manifest sha256:{manifest}")));
            }
            if rows.insert(reference.to_string(), Locked { manifest, module }).is_some() {
                return Err(malformed(&path, format!("'{reference}' stands in it twice")));
            }
        }
        Ok(LockFile { path, rows, changed: BTreeSet::new() })
    }

    /// What a reference means, if that is known.
    pub fn get(&self, reference: &Reference) -> Option<Locked> {
        self.rows.get(&reference.to_string()).copied()
    }

    /// Sets what a reference means: whether that changed anything.
    pub fn set(&mut self, reference: &Reference, locked: Locked) -> bool {
        let reference = reference.to_string();
        let changed = self.rows.insert(reference.clone(), locked) != Some(locked);
        if changed {
            self.changed.insert(reference);
        }
        changed
    }

    /// Records what a reference means unless that is recorded already, and says
    /// what is recorded then.
    ///
    /// # Errors
    /// `io_error`; `lock_timeout`; `interrupted`; `recipe_invalid` if the file
    /// is malformed.
    pub fn record(folder: &Path, reference: &Reference, locked: Locked, progress: &dyn Progress) -> Result<Locked> {
        let _held = hold(folder, TIMEOUT, progress)?;
        let mut file = LockFile::load(folder)?;
        if let Some(there) = file.get(reference) {
            return Ok(there);
        }
        file.set(reference, locked);
        file.replace()?;
        Ok(locked)
    }

    /// Writes what was set to the file, whole or not at all. What others wrote
    /// since it was read stays.
    ///
    /// # Errors
    /// `io_error`; `lock_timeout`; `recipe_invalid` if the file has become
    /// malformed.
    pub fn write(&self) -> Result<()> {
        let folder = self.path.parent().unwrap_or(Path::new(""));
        let _held = hold(folder, TIMEOUT, &Silent)?;
        let mut file = LockFile::load(folder)?;
        for reference in &self.changed {
            file.rows.insert(reference.clone(), self.rows[reference]);
        }
        file.replace()
    }

    fn replace(&self) -> Result<()> {
        let failed = |e| {
            Error::io(format_args!("{} cannot be written", self.path.display()), e)
                .hint("pin the module by digest in the recipe, or make the folder writable")
        };
        let temporary = self.path.with_extension(format!("lock.{}.new", std::process::id()));
        let written = std::fs::File::create(&temporary)
            .and_then(|mut file| file.write_all(self.to_text().as_bytes()).and_then(|()| file.sync_all()))
            .and_then(|()| std::fs::rename(&temporary, &self.path));
        written.map_err(|e| {
            let _ = std::fs::remove_file(&temporary);
            failed(e)
        })
    }

    /// References, digests: nothing in them needs escaping.
    fn to_text(&self) -> String {
        let row = |(reference, locked): (&String, &Locked)| {
            let Locked { manifest, module } = locked;
            format!(
                "\n[[module]]\nreference = \"{reference}\"\nmanifest = \"sha256:{manifest}\"\nmodule = \"sha256:{module}\"\n"
            )
        };
        HEADING.chars().collect::<String>() + &self.rows.iter().map(row).collect::<String>()
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Holds a folder against other processes that write its lock file. `None` if
/// the folder cannot be locked, as on some network filesystems.
fn hold(folder: &Path, timeout: Duration, progress: &dyn Progress) -> Result<Option<File>> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let Ok(file) = File::open(folder) else { return Ok(None) };
    let start = Instant::now();
    loop {
        match fs2::FileExt::try_lock_exclusive(&file) {
            Ok(()) => return Ok(Some(file)),
            Err(e) if e.raw_os_error() == fs2::lock_contended_error().raw_os_error() => {}
            Err(_) => return Ok(None),
        }
        if progress.cancelled() {
            return Err(Error::new(Code::Interrupted, format!("stopped while waiting for {}", folder.display())));
        }
        if start.elapsed() >= timeout {
            let message = format!(
                "another process holds the folder {} of the lock file for more than {} s",
                folder.display(),
                timeout.as_secs()
            );
            return Err(Error::new(Code::LockTimeout, message)
                .hint(format!("`fuser -v {}` shows which: wait for it, or end it", folder.display())));
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn malformed(path: &Path, what: String) -> Error {
    Error::new(Code::RecipeInvalid, format!("the lock file {} is malformed: {what}", path.display()))
        .hint("delete it and run `weightmill module update`, or restore it from version control")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_does_not_depend_on_order() {
        let dir = tempfile::tempdir().unwrap();
        let tag = Reference::parse("oci://r.io/a:v1").unwrap();
        let manifest = BlobDigest::of(b"m");
        let pinned = Reference::parse("oci://r.io/b:v1").unwrap().pinned(manifest);
        let locked = Locked { manifest, module: ModuleDigest::of(b"w") };
        let mut texts = Vec::new();
        for order in [[&tag, &pinned], [&pinned, &tag]] {
            let mut file = LockFile::load(dir.path()).unwrap();
            for reference in order {
                file.set(reference, locked);
            }
            assert!(!file.set(&tag, locked), "again is no change");
            file.write().unwrap();
            let again = LockFile::load(dir.path()).unwrap();
            assert_eq!(again.rows, file.rows);
            assert_eq!(again.get(&pinned), Some(locked));
            assert_eq!(again.get(&Reference::parse("oci://r.io/b:v1").unwrap()), None);
            texts.push(std::fs::read_to_string(file.path()).unwrap());
            std::fs::remove_file(file.path()).unwrap();
        }
        assert_eq!(texts[0], texts[1]);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "no temporary is left");
    }

    #[test]
    fn those_who_write_at_once_lose_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let reference = |i: usize| Reference::parse(&format!("oci://r.io/m{i}:v")).unwrap();
        let locked = |i: usize| Locked { manifest: BlobDigest::of(&[i as u8]), module: ModuleDigest::of(b"w") };
        // Each has read the file before any wrote it.
        let mut files: Vec<LockFile> = (0..4).map(|_| LockFile::load(dir.path()).unwrap()).collect();
        for (i, file) in files.iter_mut().enumerate() {
            file.set(&reference(i), locked(i));
        }
        thread::scope(|scope| {
            for file in &files {
                scope.spawn(|| file.write().unwrap());
            }
            for i in 4..8 {
                let dir = dir.path();
                scope.spawn(move || {
                    assert_eq!(LockFile::record(dir, &reference(i), locked(i), &Silent).unwrap(), locked(i));
                });
            }
        });
        let all = LockFile::load(dir.path()).unwrap();
        assert!((0..8).all(|i| all.get(&reference(i)) == Some(locked(i))));
        // The first to record is right; who updates means to change.
        assert_eq!(LockFile::record(dir.path(), &reference(0), locked(9), &Silent).unwrap(), locked(0));
        let mut update = LockFile::load(dir.path()).unwrap();
        update.set(&reference(0), locked(9));
        update.write().unwrap();
        assert_eq!(LockFile::load(dir.path()).unwrap().get(&reference(0)), Some(locked(9)));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn the_wait_for_another_process_ends() {
        let dir = tempfile::tempdir().unwrap();
        let held = hold(dir.path(), TIMEOUT, &Silent).unwrap();
        assert!(held.is_some());
        let refused = hold(dir.path(), Duration::ZERO, &Silent).unwrap_err();
        assert_eq!(refused.code(), Code::LockTimeout);
        drop(held);
        assert!(hold(dir.path(), Duration::ZERO, &Silent).unwrap().is_some());
        assert!(hold(&dir.path().join("absent"), TIMEOUT, &Silent).unwrap().is_none());
    }

    #[test]
    fn malformed_files_are_refused() {
        let (a, b) = ("ab".repeat(32), "cd".repeat(32));
        let row = |reference: &str, manifest: &str| {
            format!("[[module]]\nreference = \"{reference}\"\nmanifest = \"{manifest}\"\nmodule = \"sha256:{b}\"\n")
        };
        let good = format!("sha256:{a}");
        let twice = row("oci://r.io/a:v", &good).repeat(2);
        for bad in [
            String::new(),
            "lock = 2".into(),
            "lock = 1\nx = 1".into(),
            format!("lock = 1\n{}", row("r.io/a:v", &good)),
            format!("lock = 1\n{}", row("oci://r.io/a:v", &a)),
            format!("lock = 1\n{}", row(&format!("oci://r.io/a@sha256:{b}"), &good)),
            format!("lock = 1\n{twice}"),
        ] {
            assert_eq!(LockFile::parse(&bad, "l".into()).unwrap_err().code(), Code::RecipeInvalid, "{bad}");
        }
    }
}
