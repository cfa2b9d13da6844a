//! `weightmill module ls`.

use std::path::Path;
use std::process::ExitCode;

use crate::cli::args::Global;
use crate::cli::{output, session};
use crate::error::Result;
use crate::modules::{Library, SHIPPED};
use crate::recipe::ModuleRef;
use crate::sandbox::Module;

pub(super) fn run(global: &Global) -> Result<ExitCode> {
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
            add(&*library.load(&ModuleRef::Stored(digest), Path::new("."))?, "store");
        }
    }
    if global.json {
        output::json(&serde_json::json!({ "modules": documents }));
    } else {
        output::line(output::table(&["module", "version", "sha256", "tp", "from", "summary"], &[], &rows));
    }
    Ok(ExitCode::SUCCESS)
}
