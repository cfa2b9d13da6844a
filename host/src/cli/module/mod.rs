//! `weightmill module`: what the authors of modules need, and those who use
//! modules.
//!
//! ```text
//! new ──► a crate ──build──► NAME.wasm ──test──► golden vectors hold
//!                      pack ──┘    └────check──► rules, repeatability, state
//! ```
//!
//! `test` asks whether a module computes what its author says it does, through
//! the executor that builds entries. `check` asks whether it can be relied on
//! at all: the same bytes again, in any order, cut in any way.

mod build;
mod check;
mod difference;
mod inspect;
mod ls;
mod new;
mod pack;
mod pull;
mod push;
mod reused;
mod samples;
mod test;
mod tiles;
mod update;
mod vectors;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Subcommand;

use super::args::Global;
use super::session;
use crate::error::Result;
use crate::modules::{Library, parse_argument};
use crate::recipe::ModuleRef;
use crate::sandbox::Module;

/// Modules.
#[derive(Subcommand)]
pub(super) enum ModuleCommand {
    /// Start a module: a crate that builds and passes its own tests
    New(new::Args),
    /// Build a module's crate for WebAssembly, and check the result
    Build(build::Args),
    /// Run a module's golden vectors through the real host
    Test(test::Args),
    /// Check a module: static rules, repeatability, state between tiles
    Check(check::Args),
    /// Add the metadata section to a module that is not made with the SDK
    Pack(pack::Args),
    /// Push a module to an OCI registry
    Push(push::Args),
    /// Pull a module from an OCI registry into the store
    Pull(pull::Args),
    /// Resolve the tags in a recipe anew and record what they point to now
    Update(update::Args),
    /// The shipped modules, and those in the store
    #[command(after_help = "Examples:\n  weightmill module ls\n  weightmill module ls --json")]
    Ls,
    /// A module's metadata, exports, size and digest, without running it
    #[command(
        after_help = "Examples:\n  weightmill module inspect cast\n  weightmill module inspect ./mine.wasm --json"
    )]
    Inspect {
        /// A shipped name, a path, or sha256:<hex>
        module: String,
    },
}

pub(super) fn run(global: &Global, command: &ModuleCommand) -> Result<ExitCode> {
    match command {
        ModuleCommand::New(args) => new::run(global, args),
        ModuleCommand::Build(args) => build::run(global, args),
        ModuleCommand::Test(args) => test::run(global, args),
        ModuleCommand::Check(args) => check::run(global, args),
        ModuleCommand::Pack(args) => pack::run(global, args),
        ModuleCommand::Push(args) => push::run(global, args),
        ModuleCommand::Pull(args) => pull::run(global, args),
        ModuleCommand::Update(args) => update::run(global, args),
        ModuleCommand::Ls => ls::run(global),
        ModuleCommand::Inspect { module } => inspect::run(global, load(global, module)?.as_ref()),
    }
}

/// The module that a person wrote on the command line.
fn load(global: &Global, text: &str) -> Result<Arc<Module>> {
    Library::new(session::existing_store(global)?).load(&parse_argument(text)?, Path::new("."))
}

/// Where a module's vectors lie unless `--vectors` says so: in `vectors/`
/// beside the file, or in that of the crate in whose `target/weightmill/` the
/// file is.
fn vectors_near(text: &str) -> Option<PathBuf> {
    let Ok(ModuleRef::Path(path)) = parse_argument(text) else { return None };
    let folder = path.parent()?;
    let of_crate = folder.ends_with("target/weightmill").then(|| folder.join("../../vectors"));
    [Some(folder.join("vectors")), of_crate].into_iter().flatten().find(|found| found.is_dir())
}
