//! Which files a checkpoint consists of.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::file;
use super::index::{self, Index};
use crate::error::{Code, Error, Result};

const TENSORS_SUFFIX: &str = ".safetensors";
const INDEX_SUFFIX: &str = ".safetensors.index.json";

/// The files of a checkpoint.
pub(super) struct Layout {
    /// Where `config.json` would be.
    pub(super) folder: PathBuf,
    /// Files with tensors, ascending by name.
    pub(super) files: Vec<PathBuf>,
    /// The index and where it is.
    pub(super) index: Option<(PathBuf, Index)>,
}

/// Finds the files of the checkpoint at `path`.
pub(super) fn find(path: &Path) -> Result<Layout> {
    let metadata = std::fs::metadata(path).map_err(|e| file::cannot_open(path, e))?;
    if metadata.is_dir() {
        return find_in_folder(path);
    }
    if path.file_name().is_some_and(|name| has_suffix(name, INDEX_SUFFIX)) {
        return Err(Error::new(Code::CheckpointInvalid, format!("{path:?} is an index, not a checkpoint"))
            .hint("name the folder that it is in"));
    }
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    };
    Ok(Layout { folder, files: vec![path.to_path_buf()], index: None })
}

fn find_in_folder(folder: &Path) -> Result<Layout> {
    let (mut tensor_files, mut indexes) = (BTreeSet::new(), BTreeSet::new());
    for item in std::fs::read_dir(folder).map_err(|e| file::cannot_open(folder, e))? {
        let name = item.map_err(|e| Error::io(format_args!("cannot list {folder:?}"), e))?.file_name();
        if name.as_bytes().starts_with(b".") {
            continue;
        }
        if has_suffix(&name, INDEX_SUFFIX) {
            indexes.insert(folder.join(name));
        } else if has_suffix(&name, TENSORS_SUFFIX) {
            tensor_files.insert(folder.join(name));
        }
    }
    let folder = folder.to_path_buf();
    match (indexes.pop_first(), indexes.pop_first()) {
        (None, _) if tensor_files.is_empty() => {
            Err(Error::new(Code::CheckpointInvalid, format!("there is no *{TENSORS_SUFFIX} file in {folder:?}"))
                .hint("a checkpoint is a .safetensors file, or a folder with some; other formats must be converted"))
        }
        (None, _) => Ok(Layout { folder, files: tensor_files.into_iter().collect(), index: None }),
        (Some(path), None) => {
            let index = index::read(&path)?;
            let mut files = Vec::new();
            for (name, example) in index.files() {
                let file = folder.join(name);
                if matches!(std::fs::symlink_metadata(&file), Err(e) if e.kind() == std::io::ErrorKind::NotFound) {
                    return Err(Error::new(
                        Code::CheckpointInvalid,
                        format!("{path:?}: the index says that '{example}' is in {name:?}, but there is no such file"),
                    )
                    .hint("fetch the file, or the whole checkpoint, again"));
                }
                files.push(file);
            }
            Ok(Layout { folder, files, index: Some((path, index)) })
        }
        (Some(first), Some(second)) => {
            let mut names = format!("{first:?}, {second:?}");
            for other in indexes.iter().take(8) {
                names.push_str(&format!(", {other:?}"));
            }
            Err(Error::new(Code::CheckpointInvalid, format!("the folder has several indexes: {names}"))
                .hint("keep one, or name one of the .safetensors files"))
        }
    }
}

fn has_suffix(name: &OsStr, suffix: &str) -> bool {
    name.as_bytes().ends_with(suffix.as_bytes())
}
