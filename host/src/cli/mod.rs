//! The command line. Each subcommand is a file here; they print one JSON
//! document on standard output with `--json`, a text for people without, and
//! progress on standard error where that is a terminal.

mod args;
mod attest;
mod bench;
mod build;
mod diff;
mod digest;
mod explain;
mod load;
mod made;
mod module;
mod output;
mod plan;
mod progress;
mod publish;
mod session;
mod store;
mod tmpfs;
mod verify;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::error::{Code, Error, Result};

const EXAMPLES: &str = "Examples:
  weightmill plan  --recipe recipes/gpt-neox.toml --checkpoint pythia-160m
  weightmill build --recipe recipes/gpt-neox.toml --checkpoint pythia-160m
  weightmill load  --recipe recipes/gpt-neox.toml --checkpoint pythia-160m --passes 3
  weightmill digest --entry KEY --json
  weightmill explain --entry KEY --tensor NAME
  weightmill attest --entry KEY --key key.pem --out entry.dsse.json

Exit status: 0 done, 1 wrong input, 2 wrong usage, 3 the machine, store, device
or network, 4 a module. Errors carry a stable code, with --json as a document.";

/// Turns a checkpoint into the tensor layout that a serving process wants,
/// once, and streams that layout to the GPU.
#[derive(Parser)]
#[command(name = "weightmill", version, after_help = EXAMPLES, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    global: args::Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// What would be done: outputs, sources, bytes moved and computed, blocks. Reads no tensor
    Plan(plan::Args),
    /// Make the entry, or find it
    Build(build::Args),
    /// Make or find the entry, and stream its blocks to a device
    Load(load::Args),
    /// The table of tensor digests of a checkpoint, an entry, or a recipe run by a named engine
    Digest(digest::Args),
    /// What differs between two digest tables; exits 1 if anything does
    Diff(diff::Args),
    /// Which source bytes, modules and parameters made a tensor of an entry
    Explain(explain::Args),
    /// Whether the bytes of entries are what they must be, or what another host says; also by
    /// making them again
    Verify(verify::Args),
    /// A statement about an entry, signed or for other tools to sign
    Attest(attest::Args),
    /// Push an entry to an OCI registry
    Push(publish::push::Args),
    /// Pull an entry from an OCI registry into the store
    Pull(publish::pull::Args),
    /// The store: list, show, evict, repair
    #[command(subcommand)]
    Store(store::StoreCommand),
    /// Modules: list, inspect, check
    #[command(subcommand)]
    Module(module::ModuleCommand),
    /// Measure against a baseline in the same run
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// (internal) tries a registration, for the parent to kill if it hangs
    #[command(name = "__probe-registration", hide = true)]
    ProbeRegistration {
        /// What the parent passes on.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

/// Runs the program on the process's own arguments.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let json = cli.global.json;
    match run(cli) {
        Ok(status) => status,
        Err(error) => {
            report(&error, json);
            if error.code() == Code::RegistrationHung {
                // The driver may hold locks that nothing gives back: any
                // cleanup could hang as well.
                crate::offload::exit_without_cleanup(status_of(&error));
            }
            ExitCode::from(status_of(&error))
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode> {
    let global = &cli.global;
    match cli.command {
        Command::Plan(args) => plan::run(global, &args),
        Command::Build(args) => build::run(global, &args),
        Command::Load(args) => load::run(global, &args),
        Command::Digest(args) => digest::run(global, &args),
        Command::Diff(args) => diff::run(global, &args),
        Command::Explain(args) => explain::run(global, &args),
        Command::Verify(args) => verify::run(global, &args),
        Command::Attest(args) => attest::run(global, &args),
        Command::Push(args) => publish::push::run(global, &args),
        Command::Pull(args) => publish::pull::run(global, &args),
        Command::Store(command) => store::run(global, &command),
        Command::Module(command) => module::run(global, &command),
        Command::Bench(command) => bench::run(global, &command),
        Command::ProbeRegistration { arguments } => Ok(crate::offload::probe_child_main(
            crate::offload::CudaDevice::open,
            arguments.into_iter().map(std::ffi::OsString::from),
        )),
    }
}

/// The exit status of an error: its fault's, and 130 after Ctrl-C.
fn status_of(error: &Error) -> u8 {
    if error.code() == Code::Interrupted { 130 } else { error.code().fault().exit_status() }
}

fn report(error: &Error, json: bool) {
    if json {
        output::json(&serde_json::json!({ "error": output::error_document(error) }));
    }
    let style = output::Style::stderr();
    let at = error.location().map(|at| format!("{at}: ")).unwrap_or_default();
    eprintln!("{}{at}{} [{}]", style.red("error: "), error.message(), error.code());
    if let Some(hint) = error.hint_text() {
        eprintln!("{}{hint}", style.green(" hint: "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
