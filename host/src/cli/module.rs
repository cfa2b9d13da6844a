//! `weightmill module`.

use std::path::Path;
use std::process::ExitCode;

use clap::Subcommand;

use super::args::Global;
use super::output;
use super::session;
use crate::error::Result;
use crate::modules::{Library, SHIPPED, parse_argument};
use crate::sandbox::{EngineName, Module, engine};

/// Modules.
#[derive(Subcommand)]
pub(super) enum ModuleCommand {
    /// The shipped modules, and those in the store
    Ls,
    /// A module's metadata, exports, size and digest, without running it
    #[command(after_help = "Examples:\n  weightmill module inspect cast\n  weightmill module inspect ./mine.wasm --json")]
    Inspect {
        /// A shipped name, a path, or sha256:<hex>
        module: String,
    },
    /// Check a module against every static rule, and compile it
    #[command(after_help = "Examples:\n  weightmill module check ./mine.wasm")]
    Check {
        /// A shipped name, a path, or sha256:<hex>
        module: String,
    },
}

pub(super) fn run(global: &Global, command: &ModuleCommand) -> Result<ExitCode> {
    match command {
        ModuleCommand::Ls => list(global),
        ModuleCommand::Inspect { module } => inspect(global, &*load(global, module)?),
        ModuleCommand::Check { module } => check(global, &*load(global, module)?),
    }
}

fn load(global: &Global, text: &str) -> Result<std::sync::Arc<Module>> {
    Library::new(session::existing_store(global)?).load(&parse_argument(text)?, Path::new("."))
}

fn list(global: &Global) -> Result<ExitCode> {
    let mut rows = Vec::new();
    let mut documents = Vec::new();
    let mut add = |module: &Module, place: &str| {
        let metadata = module.metadata();
        let tp = if metadata.uses_tp { "yes" } else { "" };
        rows.push(vec![
            metadata.name.clone(),
            metadata.version.clone(),
            module.digest().short(),
            tp.to_string(),
            place.to_string(),
            metadata.summary.clone(),
        ]);
        documents.push(serde_json::json!({
            "name": metadata.name, "version": metadata.version, "digest": module.digest(),
            "uses_tp": metadata.uses_tp, "summary": metadata.summary, "from": place,
        }));
    };
    for shipped in SHIPPED {
        add(&Module::parse(shipped.bytes)?, "shipped");
    }
    if let Some(store) = session::existing_store(global)? {
        let library = Library::new(Some(store.clone()));
        for digest in store.modules()? {
            add(&*library.load(&crate::recipe::ModuleRef::Stored(digest), Path::new("."))?, "store");
        }
    }
    if global.json {
        output::json(&serde_json::json!({ "modules": documents }));
    } else {
        output::line(output::table(&["module", "version", "sha256", "tp", "from", "summary"], &[], &rows));
    }
    Ok(ExitCode::SUCCESS)
}

fn inspect(global: &Global, module: &Module) -> Result<ExitCode> {
    let metadata = module.metadata();
    if global.json {
        let exports: Vec<_> =
            module.exports().iter().map(|e| serde_json::json!({ "name": e.name, "type": e.what })).collect();
        output::json(&serde_json::json!({
            "digest": module.digest(),
            "bytes": module.bytes().len(),
            "metadata": metadata,
            "exports": exports,
            "float_arithmetic": module.has_float_arithmetic(),
            "functions": module.functions(),
            "code_bytes": module.code_bytes(),
            "data_bytes": module.data_bytes(),
            "memory_bytes": module.memory_bytes(),
            "memory_bytes_max": module.memory_bytes_max(),
        }));
        return Ok(ExitCode::SUCCESS);
    }
    let yes = |b: bool| if b { "yes" } else { "no" };
    let mut lines = vec![
        format!("{} {}  {}", metadata.name, metadata.version, metadata.summary),
        format!("sha256            {}", module.digest()),
        format!("size              {} bytes: {} functions, {} bytes of code, {} of data",
            module.bytes().len(), module.functions(), module.code_bytes(), module.data_bytes()),
        format!("memory            {} bytes at the start", module.memory_bytes()),
        format!("tensor parallel   {}", yes(metadata.uses_tp)),
        format!("float arithmetic  {}", yes(module.has_float_arithmetic())),
        format!("fuel per byte     {}", metadata.fuel_per_byte),
        format!("licence           {}", metadata.licence),
        format!("source            {}", metadata.source),
        "exports".to_string(),
    ];
    lines.extend(module.exports().iter().map(|e| format!("  {:<16}{}", e.name.escape_debug(), e.what)));
    output::line(lines.join("\n"));
    Ok(ExitCode::SUCCESS)
}

fn check(global: &Global, module: &Module) -> Result<ExitCode> {
    engine(EngineName::Wasmtime)?.compile(module)?;
    if global.json {
        output::json(&serde_json::json!({ "digest": module.digest(), "name": module.metadata().name, "ok": true }));
    } else {
        output::line(format!("{} {}: every static rule holds, and it compiles", module.metadata().name, module.metadata().version));
    }
    Ok(ExitCode::SUCCESS)
}
