//! Users of a registry: each with a home, a store and a trust of their own.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use safetensors::Dtype;
use serde_json::Value;
use weightmill_tests::{Ran, Tensor, program, repository, seeded_bytes, write_safetensors};

pub(crate) const RECIPE: &str = r#"
recipe = 1
name = "small"

[[step]]
module = "cast"
inputs = { w = "h.{i}.mlp" }
outputs = { w = "h.{i}.mlp" }
params = { dtype = "BF16" }

[blocks]
patterns = ["h.{i}."]
"#;

/// Layers of the checkpoint.
pub(crate) const LAYERS: usize = 3;

pub(crate) struct World {
    pub(crate) folder: tempfile::TempDir,
}

/// Somebody who runs the program.
pub(crate) struct User {
    home: PathBuf,
    variables: Vec<(String, String)>,
}

impl World {
    pub(crate) fn new() -> Self {
        let world = World { folder: tempfile::tempdir().unwrap() };
        std::fs::write(world.at("recipe.toml"), RECIPE).unwrap();
        world.checkpoint("base", 40, None);
        world
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A checkpoint with layers of `rows` × 256 floats. `tuned` is a layer that
    /// differs from the base.
    pub(crate) fn checkpoint(&self, name: &str, rows: usize, tuned: Option<usize>) -> PathBuf {
        let names: Vec<String> = (0..LAYERS).map(|i| format!("h.{i}.mlp")).collect();
        let mut tensors: Vec<Tensor<'_>> = vec![("wte", Dtype::BF16, vec![50, 24], seeded_bytes(9, 50 * 24 * 2))];
        for (i, name) in names.iter().enumerate() {
            let seed = if tuned == Some(i) { 1000 } else { i as u64 };
            // Finite: the exponent's top bit is cleared.
            let mut bytes = seeded_bytes(seed, rows * 256 * 4);
            bytes.chunks_exact_mut(4).for_each(|v| v[3] &= 0xBF);
            tensors.push((name, Dtype::F32, vec![rows, 256], bytes));
        }
        let folder = self.at(name);
        std::fs::create_dir_all(&folder).unwrap();
        write_safetensors(&folder.join("model.safetensors"), &tensors);
        folder
    }

    pub(crate) fn user(&self, name: &str) -> User {
        let home = self.at(name);
        std::fs::create_dir_all(home.join(".config/weightmill")).unwrap();
        User { home, variables: Vec::new() }
    }

    /// A new ed25519 key: the private and the public file.
    pub(crate) fn key(&self, name: &str) -> (String, String) {
        let (private, public) = (self.at(&format!("{name}.pem")), self.at(&format!("{name}.pub")));
        let openssl = |arguments: &[&OsStr]| {
            let done = Command::new("openssl").args(arguments).stderr(Stdio::null()).status();
            assert!(done.expect("openssl is there").success());
        };
        let word = OsStr::new;
        openssl(&[word("genpkey"), word("-algorithm"), word("ed25519"), word("-out"), private.as_ref()]);
        openssl(&[word("pkey"), word("-in"), private.as_ref(), word("-pubout"), word("-out"), public.as_ref()]);
        (private.to_string_lossy().into(), public.to_string_lossy().into())
    }

    /// `weightmill build` of a checkpoint by a user.
    pub(crate) fn build(&self, user: &User, checkpoint: &str, more: &[&str]) -> Ran {
        let (recipe, checkpoint) = (self.at("recipe.toml"), self.at(checkpoint));
        let mut arguments =
            vec!["build", "--recipe", recipe.to_str().unwrap(), "--checkpoint", checkpoint.to_str().unwrap()];
        arguments.extend(more);
        user.run(&arguments)
    }
}

impl User {
    pub(crate) fn set(&mut self, name: &str, value: impl Into<String>) {
        self.variables.push((name.into(), value.into()));
    }

    pub(crate) fn trust(&self, text: &str) {
        std::fs::write(self.home.join(".config/weightmill/trust.toml"), format!("trust = 1\n{text}")).unwrap();
    }

    pub(crate) fn trust_key(&self, public: &str) {
        self.trust(&format!("[[key]]\nname = \"release\"\nfile = \"{public}\"\n"));
    }

    pub(crate) fn home(&self) -> &Path {
        &self.home
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.home.join("store")
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(program());
        // Nothing of the user who runs the tests: no proxies, no credentials.
        command.env_clear();
        if let Some(path) = std::env::var_os("PATH") {
            command.env("PATH", path);
        }
        command.env("HOME", &self.home).args(arguments).arg("--json").arg("--store").arg(self.store());
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Ran {
        let output = self.command(arguments).output().expect("the program starts");
        Ran {
            status: output.status.code().unwrap_or(-1),
            json: serde_json::from_slice(&output.stdout).unwrap_or(Value::Null),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// The names in a folder of the store.
    pub(crate) fn names(&self, folder: &str) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.store().join(folder)) else { return Vec::new() };
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// All blobs of the store with their bytes.
    pub(crate) fn blobs(&self) -> Vec<(String, Vec<u8>)> {
        let folder = self.store().join("blobs/sha256");
        self.names("blobs/sha256")
            .into_iter()
            .map(|name| (name.clone(), std::fs::read(folder.join(&name)).unwrap()))
            .collect()
    }
}

/// A shipped module's file.
pub(crate) fn shipped(name: &str) -> String {
    repository().join(format!("transforms/dist/{name}.wasm")).to_string_lossy().into_owned()
}

pub(crate) fn text<'a>(document: &'a Value, field: &str) -> &'a str {
    document[field].as_str().unwrap_or_else(|| panic!("no {field} in {document}"))
}

pub(crate) fn number(document: &Value, field: &str) -> u64 {
    document[field].as_u64().unwrap_or_else(|| panic!("no {field} in {document}"))
}
