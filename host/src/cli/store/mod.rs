//! `weightmill store`.

mod built_by;
mod doctor;
mod export;
mod gc;
mod layout;
mod list;
mod remove;
mod show;

use std::process::ExitCode;

use clap::Subcommand;

pub(super) use export::export;

use super::args::Global;
use crate::digest::ActionKey;
use crate::error::{Code, Error, Result};
use crate::store::EntryInfo;

/// The store.
#[derive(Subcommand)]
pub(super) enum StoreCommand {
    /// Entries: size, what is shared, last use, model, tensor parallel rank
    Ls(list::Args),
    /// An entry: blocks, shards, tensors, who built it
    #[command(after_help = "Examples:\n  weightmill store show 9f3c1d2a\n  weightmill store show 9f3c1d2a --json")]
    Show {
        /// The key, or the beginning of it
        key: String,
    },
    /// The store's folder, or an entry's shards
    Path {
        /// The key, or the beginning of it
        key: Option<String>,
    },
    /// Write entries into a folder (an OCI image layout) for hosts that reach no registry
    Export(layout::ExportArgs),
    /// Read entries from such a folder
    Import(layout::ImportArgs),
    /// Evict entries by size and age, and remove what nothing reaches
    Gc(gc::Args),
    /// Remove entries, and what only they are made of
    Rm(remove::Args),
    /// Find and explain what is wrong with the store; exits 3 if something is and stays so
    Doctor(doctor::Args),
}

pub(super) fn run(global: &Global, command: &StoreCommand) -> Result<ExitCode> {
    match command {
        StoreCommand::Ls(args) => list::run(global, args),
        StoreCommand::Show { key } => show::show(global, key),
        StoreCommand::Path { key } => show::path(global, key.as_deref()),
        StoreCommand::Export(args) => layout::export(global, args),
        StoreCommand::Import(args) => layout::import(global, args),
        StoreCommand::Gc(args) => gc::run(global, args),
        StoreCommand::Rm(args) => remove::run(global, args),
        StoreCommand::Doctor(args) => doctor::run(global, args),
    }
}

/// The error for a key that has no entry.
pub(super) fn missing(key: &ActionKey) -> Error {
    Error::new(Code::SourceUnavailable, format!("the store has no entry {key}"))
        .hint("`weightmill store ls` lists the keys")
}

/// A row of a table about entries that go: key, size, model.
fn describe(key: &ActionKey, entries: &[EntryInfo], model: &str) -> Vec<String> {
    let size = entries.iter().find(|entry| entry.key == *key).map_or(0, |entry| entry.size_bytes);
    vec![key.short(), super::output::bytes(size), model.to_string()]
}
