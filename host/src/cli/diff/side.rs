//! One side of a comparison: a table, and where its bytes are.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

use super::Row;
use crate::checkpoint::{Checkpoint, DigestCache, NoCache, source_digests};
use crate::cli::args::{Global, RecipeArgs, RemoteArgs, TpArgs, WorkArgs};
use crate::cli::made::Made;
use crate::cli::progress::Bar;
use crate::cli::session::{self, Session};
use crate::digest::{ContentDigest, LeafHasher, TensorDigest};
use crate::error::{Code, Error, Result};
use crate::execute::DigestTable;
use crate::sandbox::EngineName;
use crate::store::{Lease, Verify};
use crate::tensor::{Dtype, TensorName, TensorType};

/// One side of a comparison.
pub(super) struct Side {
    pub(super) table: DigestTable,
    pub(super) bytes: Option<Bytes>,
}

/// Where bytes are.
pub(super) enum Bytes {
    Entry(Lease),
    Checkpoint(Checkpoint),
    /// Made when they are asked for.
    Made(Box<Made>),
}

/// Where the arguments say that a side's bytes are.
pub(super) struct Named<'a> {
    pub(super) entry: Option<&'a str>,
    pub(super) checkpoint: Option<&'a Path>,
    pub(super) recipe: Option<&'a Path>,
    pub(super) engine: Option<EngineName>,
    pub(super) tp: TpArgs,
    pub(super) work: &'a WorkArgs,
}

/// A tensor's bytes, read from the beginning to the end.
pub(super) struct Reader<'a> {
    name: &'a TensorName,
    expected: TensorDigest,
    place: Place<'a>,
    hasher: LeafHasher,
    at: u64,
}

enum Place<'a> {
    Shard { file: Arc<File>, path: PathBuf, offset: u64 },
    Source { checkpoint: &'a Checkpoint, file: usize, offset: u64 },
    Memory(Vec<u8>),
}

impl Side {
    /// A side from a table, or what is named: at least one of these.
    pub(super) fn open(global: &Global, table: Option<&PathBuf>, named: &Named<'_>, bar: &Bar) -> Result<Self> {
        let table = table.map(|path| load(path)).transpose()?;
        let bytes = match (named.entry, named.checkpoint, &table) {
            (Some(entry), ..) => {
                let store = session::wanted_store(global)?;
                let key = session::find_key(&store, entry)?;
                let lease = store.lease(&key, Verify::Never, &session::pool(None)?, bar)?;
                Some(Bytes::Entry(lease.ok_or_else(|| crate::cli::store::missing(&key))?))
            }
            (None, Some(checkpoint), _) => Some(match named.recipe {
                Some(recipe) => Bytes::Made(Box::new(make(global, recipe, checkpoint, named)?)),
                None => Bytes::Checkpoint(Checkpoint::open(checkpoint)?),
            }),
            (None, None, Some(table)) => entry_of_content(global, &table.content_digest(), bar)?.map(Bytes::Entry),
            (None, None, None) => None,
        };
        let table = match (table, &bytes) {
            (Some(table), _) => table,
            (None, Some(bytes)) => bytes.table(global, bar)?,
            (None, None) => return Err(Error::new(Code::BadParams, "there is nothing to compare")),
        };
        Ok(Side { table, bytes })
    }
}

fn make(global: &Global, recipe: &Path, checkpoint: &Path, named: &Named<'_>) -> Result<Made> {
    let args = RecipeArgs {
        recipe: recipe.to_path_buf(),
        checkpoint: checkpoint.to_path_buf(),
        tp: named.tp,
        remote: RemoteArgs::default(),
    };
    // Modules that were pulled are in the store; entries are not looked at.
    let session = Session::open(&args, session::existing_store(global)?.as_ref(), named.engine)?;
    Made::plan(&session, named.work.jobs, session::memory_budget(named.work))
}

/// An entry that has the content, if the store has one.
fn entry_of_content(global: &Global, content: &ContentDigest, bar: &Bar) -> Result<Option<Lease>> {
    let Some(store) = session::existing_store(global)? else { return Ok(None) };
    let same = |entry: &crate::store::EntryInfo| entry.document.as_ref().is_ok_and(|d| d.content_digest == *content);
    match store.entries()?.iter().find(|entry| same(entry)) {
        Some(entry) => store.lease(&entry.key, Verify::Never, &session::pool(None)?, bar),
        None => Ok(None),
    }
}

/// Reads what `weightmill digest --json` wrote.
fn load(path: &Path) -> Result<DigestTable> {
    #[derive(Deserialize)]
    struct Document {
        content_digest: ContentDigest,
        tensors: BTreeMap<TensorName, RowDocument>,
    }
    #[derive(Deserialize)]
    struct RowDocument {
        dtype: Dtype,
        shape: Vec<u64>,
        digest: TensorDigest,
    }
    let wrong = |what: String| {
        Error::new(Code::CheckpointInvalid, format!("{} is no digest table: {what}", path.display()))
            .hint("`weightmill digest --json` writes one")
    };
    let bytes = std::fs::read(path).map_err(|e| Error::io(format!("reading {}", path.display()), e))?;
    let document: Document = serde_json::from_slice(&bytes).map_err(|e| wrong(e.to_string()))?;
    let mut table = DigestTable::default();
    for (name, row) in document.tensors {
        let tensor =
            TensorType::new(row.dtype, row.shape).ok_or_else(|| wrong(format!("the size of {name} is not whole")))?;
        table.0.insert(name, (tensor, row.digest));
    }
    if table.content_digest() != document.content_digest {
        let computed = table.content_digest();
        return Err(wrong(format!("its content digest is {}, its rows give {computed}", document.content_digest)));
    }
    Ok(table)
}

impl Bytes {
    fn table(&self, global: &Global, bar: &Bar) -> Result<DigestTable> {
        match self {
            Bytes::Entry(lease) => Ok(DigestTable::of_document(lease.document())),
            Bytes::Made(made) => made.table(bar),
            Bytes::Checkpoint(checkpoint) => {
                let store = session::existing_store(global)?;
                let cache: &dyn DigestCache = store.as_ref().map_or(&NoCache, |store| store);
                let digests = source_digests(checkpoint, cache, &session::pool(None)?, bar)?;
                Ok(DigestTable::of_checkpoint(checkpoint, &digests))
            }
        }
    }

    /// Opens a tensor that the table has as `row`.
    ///
    /// # Errors
    /// `source_unavailable` if it is not there, or something else is.
    pub(super) fn open<'a>(&'a self, name: &'a TensorName, row: &Row, bar: &Bar) -> Result<Reader<'a>> {
        let found = match self {
            Bytes::Entry(lease) => {
                let document = lease.document();
                let of = document.aliases.iter().find(|a| a.name == *name).map_or(name, |a| &a.of);
                document.tensors.iter().find(|t| t.name == *of).map(|t| {
                    let shard = t.shard as usize;
                    let (file, path) = (lease.shard_file(shard).clone(), lease.shard_path(shard).to_path_buf());
                    (TensorType::new(t.dtype, t.shape.clone()), Place::Shard { file, path, offset: t.offset })
                })
            }
            Bytes::Made(made) => match made.find(name) {
                Some(wanted) if wanted.tensor == row.0 => {
                    Some((Some(wanted.tensor.clone()), Place::Memory(made.bytes(wanted, bar)?)))
                }
                // Its bytes would be of no use.
                Some(wanted) => Some((Some(wanted.tensor.clone()), Place::Memory(Vec::new()))),
                None => None,
            },
            Bytes::Checkpoint(checkpoint) => checkpoint
                .tensors()
                .get(name)
                .map(|t| (Some(t.tensor.clone()), Place::Source { checkpoint, file: t.file, offset: t.offset })),
        };
        match found {
            Some((Some(tensor), place)) if tensor == row.0 => {
                Ok(Reader { name, expected: row.1, place, hasher: LeafHasher::default(), at: 0 })
            }
            Some((Some(tensor), _)) => Err(unavailable(format!("{name} is {tensor}, the table has {}", row.0))),
            _ => Err(unavailable(format!("there is no tensor {name}"))),
        }
    }
}

fn unavailable(what: String) -> Error {
    Error::new(Code::SourceUnavailable, format!("the bytes are not those of the table: {what}"))
        .hint("name the entry or the checkpoint that the table was made of")
}

impl Reader<'_> {
    /// The next bytes, all of `buffer`.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> Result<()> {
        match &self.place {
            Place::Shard { file, path, offset } => file
                .read_exact_at(buffer, offset + self.at)
                .map_err(|e| Error::io(format!("reading {}", path.display()), e))?,
            Place::Source { checkpoint, file, offset } => {
                checkpoint.files()[*file].read_exact_at(buffer, offset + self.at)?;
            }
            // In range: nobody reads more than a tensor has.
            Place::Memory(bytes) => buffer.copy_from_slice(&bytes[self.at as usize..][..buffer.len()]),
        }
        self.at += buffer.len() as u64;
        self.hasher.update(buffer);
        Ok(())
    }

    /// Checks that what was read is what the table says.
    ///
    /// # Errors
    /// `source_unavailable`.
    pub(super) fn finish(self) -> Result<()> {
        let found = self.hasher.finish().0;
        if found == self.expected {
            return Ok(());
        }
        Err(unavailable(format!("{} hashes to {found}, the table has {}", self.name, self.expected)))
    }
}
