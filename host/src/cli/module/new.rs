//! `weightmill module new`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::vectors::write_safetensors;
use crate::cli::args::Global;
use crate::cli::output;
use crate::error::{Code, Error, Result};
use crate::tensor::{Dtype, TensorType};

const EXAMPLES: &str = "Examples:
  weightmill module new half-swap
  weightmill module new half-swap --dir transforms/half-swap --sdk ../weightmill/guest-sdk

The crate swaps the halves of a tensor's dimension, has tests and golden vectors, and
says in its README what to do next.";

/// The compiler that new modules are pinned to: a module's digest is its
/// identity, and another compiler writes other bytes.
const TOOLCHAIN: &str = "1.95.0";

/// Start a module.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Args {
    /// Lower-case letters, digits and dashes
    name: String,
    /// The folder to make [default: NAME]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// A local copy of the SDK instead of the published one
    #[arg(long, value_name = "PATH")]
    sdk: Option<PathBuf>,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    check_name(&args.name)?;
    let folder = args.dir.clone().unwrap_or_else(|| args.name.clone().into());
    if folder.exists() {
        return Err(Error::new(Code::BadParams, format!("{} is there already", folder.display()))
            .hint("name another folder with --dir"));
    }
    let sdk = dependency(args.sdk.as_deref())?;
    let fill = |template: &str| {
        let filled = template.replace("{{name}}", &args.name).replace("{{type}}", &type_name(&args.name));
        filled.replace("{{sdk}}", &sdk).replace("{{toolchain}}", TOOLCHAIN)
    };
    for (path, template) in [
        ("Cargo.toml", include_str!("template/Cargo.toml.txt")),
        ("README.md", include_str!("template/README.md.txt")),
        ("rust-toolchain.toml", include_str!("template/rust-toolchain.toml.txt")),
        (".gitignore", "/target\n"),
        ("src/lib.rs", include_str!("template/lib.rs.txt")),
        ("vectors/rows/case.json", include_str!("template/rows.json")),
        ("vectors/odd/case.json", include_str!("template/odd.json")),
    ] {
        let path = folder.join(path);
        let io = |e: std::io::Error| Error::io(format!("writing {}", path.display()), e);
        std::fs::create_dir_all(path.parent().unwrap_or(&folder)).map_err(io)?;
        std::fs::write(&path, fill(template)).map_err(io)?;
    }
    write_numbers(&folder.join("vectors/rows/input.safetensors"), 4, &[0, 1, 2, 3, 4, 5, 6, 7])?;
    write_numbers(&folder.join("vectors/rows/expected.safetensors"), 4, &[4, 5, 6, 7, 0, 1, 2, 3])?;
    write_numbers(&folder.join("vectors/odd/input.safetensors"), 3, &[0, 1, 2, 3, 4, 5])?;
    let path = folder.display().to_string();
    if global.json {
        output::json(&serde_json::json!({ "path": path, "name": args.name }));
    } else {
        output::line(format!("{path}\nnext: cd {path}, cargo test, weightmill module test"));
    }
    Ok(ExitCode::SUCCESS)
}

fn check_name(name: &str) -> Result<()> {
    let good = name.len() <= 64
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    if good {
        return Ok(());
    }
    let shown: String = name.chars().take(80).flat_map(char::escape_debug).collect();
    Err(Error::new(Code::BadParams, format!("'{shown}' is no name for a module"))
        .hint("a letter, then letters, digits and dashes, all lower case, 64 at most"))
}

/// `half-swap` as a Rust type: `HalfSwap`.
fn type_name(name: &str) -> String {
    name.split('-')
        .flat_map(|word| {
            let mut letters = word.chars();
            letters.next().map(|first| first.to_ascii_uppercase()).into_iter().chain(letters)
        })
        .collect()
}

/// What stands behind `weightmill-guest =`.
fn dependency(sdk: Option<&Path>) -> Result<String> {
    let Some(path) = sdk else { return Ok(format!("\"{}\"", env!("CARGO_PKG_VERSION"))) };
    let path = path.canonicalize().ok().filter(|path| path.join("Cargo.toml").is_file());
    let path = path.ok_or_else(|| {
        let message = format!("there is no SDK at {}", sdk.unwrap_or(Path::new("")).display());
        Error::new(Code::BadParams, message).hint("--sdk names the folder guest-sdk of weightmill's repository")
    })?;
    // A JSON string of printable text is a TOML string too.
    Ok(format!("{{ path = {} }}", serde_json::json!(path.to_string_lossy())))
}

/// Rows of two U16 each.
fn write_numbers(path: &Path, rows: u64, numbers: &[u16]) -> Result<()> {
    let tensor = TensorType::new(Dtype::U16, vec![rows, 2])
        .ok_or_else(|| Error::new(Code::BadParams, "the template's tensor is too large"))?;
    let bytes = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
    write_safetensors(path, &BTreeMap::from([("w".to_string(), (tensor, bytes))]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_types() {
        assert_eq!(type_name("half-swap"), "HalfSwap");
        assert_eq!(type_name("q4-0"), "Q40");
        for bad in ["", "-a", "4bit", "Half", "a_b", "a/b", &"a".repeat(65)] {
            assert_eq!(check_name(bad).unwrap_err().code(), Code::BadParams, "{bad}");
        }
        assert!(check_name("half-swap").is_ok());
    }

    #[test]
    fn the_pinned_compiler_is_this_repositorys() {
        let own = include_str!("../../../../rust-toolchain.toml");
        assert!(own.contains(&format!("channel = \"{TOOLCHAIN}\"")), "{own}");
    }
}
