//! Shared pieces of the end-to-end tests.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

pub mod execution;
pub mod fuzz;
pub mod golden;
pub mod reproduce;
pub mod v8;

/// The program under test: `WEIGHTMILL_BIN`, or the one that was built beside
/// the tests.
///
/// # Panics
/// If there is none: `cargo xtask test` builds it first.
pub fn program() -> PathBuf {
    if let Some(program) = std::env::var_os("WEIGHTMILL_BIN") {
        return program.into();
    }
    let own = std::env::current_exe().expect("a running test has a path");
    let folder = own.ancestors().nth(2).expect("tests are in target/<profile>/deps");
    let program = folder.join("weightmill");
    assert!(program.exists(), "{} is not built; run `cargo build --workspace`", program.display());
    program
}

/// The repository.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the repository").to_path_buf()
}

/// What a run of the program came to.
#[derive(Debug)]
pub struct Ran {
    /// Exit status; -1 after a signal.
    pub status: i32,
    /// The document on standard output; null if there is none.
    pub json: Value,
    /// Standard error.
    pub stderr: String,
}

impl Ran {
    /// The document of a run that succeeded.
    ///
    /// # Panics
    /// If it failed.
    pub fn ok(self) -> Value {
        assert_eq!(self.status, 0, "{}", self.stderr);
        self.json
    }

    /// The error's code.
    pub fn code(&self) -> &str {
        self.json["error"]["code"].as_str().unwrap_or("")
    }

    /// The error's message.
    pub fn message(&self) -> &str {
        self.json["error"]["message"].as_str().unwrap_or("")
    }
}

/// Runs the program with `--json`.
pub fn run<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Ran {
    let output = Command::new(program()).args(arguments).arg("--json").output().expect("the program starts");
    Ran {
        status: output.status.code().unwrap_or(-1),
        json: serde_json::from_slice(&output.stdout).unwrap_or(Value::Null),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Runs `command` of a recipe over a checkpoint with a store.
pub fn run_recipe(command: &str, recipe: &Path, checkpoint: &Path, store: &Path, more: &[&str]) -> Ran {
    let mut arguments: Vec<&OsStr> = vec![command.as_ref(), "--recipe".as_ref(), recipe.as_ref()];
    arguments.extend([OsStr::new("--checkpoint"), checkpoint.as_ref(), OsStr::new("--store"), store.as_ref()]);
    arguments.extend(more.iter().map(OsStr::new));
    run(arguments)
}

/// A tensor to write: name, dtype, shape, bytes.
pub type Tensor<'a> = (&'a str, safetensors::Dtype, Vec<usize>, Vec<u8>);

/// Writes a safetensors file with the stock writer.
///
/// # Panics
/// If it cannot be written.
pub fn write_safetensors(path: &Path, tensors: &[Tensor<'_>]) {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        let view = safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes).expect("bytes fit the shape");
        (*name, view)
    });
    let bytes = safetensors::serialize(views, None).expect("tensors can be written");
    std::fs::write(path, bytes).expect("the file can be written");
}

/// `len` seeded bytes.
pub fn seeded_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 56) as u8
        })
        .collect()
}
