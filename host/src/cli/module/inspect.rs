//! `weightmill module inspect`.

use std::process::ExitCode;

use crate::cli::args::Global;
use crate::cli::output;
use crate::error::Result;
use crate::sandbox::Module;

pub(super) fn run(global: &Global, module: &Module) -> Result<ExitCode> {
    if global.json {
        output::json(&document(module));
    } else {
        print(module);
    }
    Ok(ExitCode::SUCCESS)
}

fn document(module: &Module) -> serde_json::Value {
    let exports: Vec<_> =
        module.exports().iter().map(|e| serde_json::json!({ "name": e.name, "type": e.what })).collect();
    serde_json::json!({
        "digest": module.digest(),
        "bytes": module.bytes().len(),
        "metadata": module.metadata(),
        "exports": exports,
        "float_arithmetic": module.has_float_arithmetic(),
        "functions": module.functions(),
        "code_bytes": module.code_bytes(),
        "data_bytes": module.data_bytes(),
        "memory_bytes": module.memory_bytes(),
        "memory_bytes_max": module.memory_bytes_max(),
        "compile_work": module.compile_work(),
    })
}

fn print(module: &Module) {
    let metadata = module.metadata();
    let yes = |b: bool| if b { "yes" } else { "no" };
    let most = module.memory_bytes_max().map(|max| format!(", at most {max}")).unwrap_or_default();
    let mut lines = vec![
        format!("{} {}  {}", metadata.name, metadata.version, metadata.summary),
        format!("sha256            {}", module.digest()),
        format!(
            "size              {} bytes: {}, {} bytes of code, {} of data",
            module.bytes().len(),
            output::count(module.functions() as usize, "function"),
            module.code_bytes(),
            module.data_bytes()
        ),
        format!("memory            {} bytes at the start{most}", module.memory_bytes()),
        format!("tensor parallel   {}", yes(metadata.uses_tp)),
        format!("float arithmetic  {}", yes(module.has_float_arithmetic())),
        format!("fuel per byte     {}", metadata.fuel_per_byte),
        format!("licence           {}", metadata.licence),
        format!("source            {}", metadata.source),
        "exports".to_string(),
    ];
    lines.extend(module.exports().iter().map(|export| {
        let name: String = export.name.escape_debug().collect();
        format!("  {name:<16}{}", export.what)
    }));
    output::line(lines.join("\n"));
}
