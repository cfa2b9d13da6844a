//! `weightmill module pack`: the metadata section, for languages that cannot
//! emit one.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use weightmill_guest::abi::{METADATA_SECTION, limits};

use crate::cli::args::Global;
use crate::cli::output;
use crate::error::{Code, Error, Result};
use crate::modules::read_module;
use crate::sandbox::Module;

const EXAMPLES: &str = "Examples:
  weightmill module pack --meta widen.json widen.raw.wasm widen.wasm

The metadata is one JSON object, such as
  {\"abi\": 1, \"name\": \"widen\", \"version\": \"1.0.0\", \"summary\": \"BF16 to F32\",
   \"licence\": \"Apache-2.0\"}
What is written has passed every static rule.";

/// Add the metadata section to a module.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Args {
    /// The metadata, a JSON file
    #[arg(long, value_name = "FILE")]
    meta: PathBuf,
    /// What the compiler wrote
    #[arg(value_name = "IN.wasm")]
    input: PathBuf,
    /// The module to write
    #[arg(value_name = "OUT.wasm")]
    output: PathBuf,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let metadata = read_metadata(&args.meta)?;
    let mut bytes = read_module(&args.input)?;
    append_section(&mut bytes, METADATA_SECTION, &metadata);
    let module = Module::parse(bytes).map_err(|e| e.context(args.input.display()))?;
    write(&args.output, module.bytes())?;
    let path = args.output.display().to_string();
    if global.json {
        output::json(&serde_json::json!({ "path": path, "bytes": module.bytes().len(), "digest": module.digest() }));
    } else {
        output::line(format!("{path}  {} bytes\nsha256 {}", module.bytes().len(), module.digest()));
    }
    Ok(ExitCode::SUCCESS)
}

/// The metadata as one line, keys sorted, so that its layout in the file does
/// not change the module's digest.
fn read_metadata(path: &Path) -> Result<Vec<u8>> {
    let bytes = std::fs::read(path).map_err(|e| Error::io(format!("reading {}", path.display()), e))?;
    if bytes.len() > limits::METADATA_BYTES {
        let message = format!("{} has {} bytes, more than {}", path.display(), bytes.len(), limits::METADATA_BYTES);
        return Err(Error::new(Code::ModuleTooLarge, message));
    }
    let value: serde_json::Value = serde_json::from_slice(&bytes).map_err(|e| {
        Error::new(Code::ModuleBadAbi, format!("{} is no JSON: {e}", path.display()))
            .hint("the metadata is one object with abi, name and version")
    })?;
    Ok(value.to_string().into_bytes())
}

/// Appends a custom section: id 0, the size of the rest, the name's length, the
/// name, the content (WebAssembly 1.0, §5.5.3).
fn append_section(module: &mut Vec<u8>, name: &str, content: &[u8]) {
    let mut body = Vec::with_capacity(name.len() + content.len() + 5);
    // In range: a constant name, and content within METADATA_BYTES.
    push_leb128(&mut body, name.len() as u32);
    body.extend_from_slice(name.as_bytes());
    body.extend_from_slice(content);
    module.push(0);
    push_leb128(module, body.len() as u32);
    module.append(&mut body);
}

/// Unsigned LEB128: seven bits a byte, lowest first, the top bit on all but
/// the last.
fn push_leb128(out: &mut Vec<u8>, mut value: u32) {
    loop {
        let low = (value & 0x7F) as u8;
        value >>= 7;
        if value == 0 {
            out.push(low);
            return;
        }
        out.push(low | 0x80);
    }
}

/// Writes a file whole or not at all.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let io = |e: std::io::Error| Error::io(format!("writing {}", path.display()), e);
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}.partial", std::process::id()));
    std::fs::write(&temporary, bytes).and_then(|()| std::fs::rename(&temporary, path)).map_err(io)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leb128_is_that_of_the_specification() {
        for (value, wire) in [(0, &[0][..]), (127, &[0x7F]), (128, &[0x80, 1]), (624_485, &[0xE5, 0x8E, 0x26])] {
            let mut out = Vec::new();
            push_leb128(&mut out, value);
            assert_eq!(out, wire, "{value}");
        }
    }

    #[test]
    fn a_packed_module_has_its_metadata() {
        let bare = wat::parse_str(
            r#"(module (memory (export "memory") 1) (global (export "wm_panic") i32 (i32.const 0))
                (func (export "wm_abi_v1")) (func (export "wm_alloc") (param i32) (result i32) i32.const 0)
                (func (export "wm_plan") (param i32 i32) (result i64) i64.const 0)
                (func (export "wm_run") (param i32) (result i64) i64.const 0))"#,
        )
        .unwrap();
        assert_eq!(Module::parse(bare.clone()).unwrap_err().code(), Code::ModuleBadAbi);
        // Long enough for a two-byte size.
        let metadata = format!(r#"{{"abi":1,"name":"bare","version":"1.2.3","summary":"{}"}}"#, "s".repeat(200));
        let mut packed = bare;
        append_section(&mut packed, METADATA_SECTION, metadata.as_bytes());
        let module = Module::parse(packed.clone()).unwrap();
        assert_eq!((module.metadata().name.as_str(), module.metadata().version.as_str()), ("bare", "1.2.3"));
        append_section(&mut packed, METADATA_SECTION, metadata.as_bytes());
        assert!(Module::parse(packed).unwrap_err().message().contains("two custom sections"));
    }
}
