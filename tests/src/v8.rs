//! V8, through node and `tests/v8/weightmill.mjs`: an engine and an executor
//! that were written from the ABI's specification and share no code with the
//! host. The host's part is the recipe: which tensors go into which module.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use serde::Deserialize;
use serde_json::{Value, json};
use weightmill::error::Result;
use weightmill::execute::Outline;
use weightmill::recipe::Origin;
use weightmill::sandbox::Module;
use weightmill::tensor::TensorType;

use crate::repository;

/// The oldest node whose V8 knows everything that modules may use.
const MAJOR_MIN: u32 = 18;

/// A node that is there.
pub struct V8 {
    /// node's and V8's versions.
    pub version: String,
    folder: tempfile::TempDir,
}

/// A row of what the script answers.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Row {
    /// Element type.
    pub dtype: String,
    /// Extents.
    pub shape: Vec<u64>,
    /// Digest of the bytes as they are.
    pub digest: String,
    /// Digest of the bytes with every NaN replaced by the canonical one.
    pub digest_with_one_nan: String,
}

/// A table, or why there is none.
pub type Answer = std::result::Result<BTreeMap<String, Row>, String>;

impl V8 {
    /// The node on the path; `None`, with the reason on standard error, if
    /// there is none that will do.
    pub fn find() -> Option<V8> {
        let script = "console.log(process.versions.node + ' ' + process.versions.v8)";
        let output = Command::new("node").args(["-e", script]).output();
        let Some(output) = output.ok().filter(|output| output.status.success()) else {
            eprintln!("skipped: there is no node, so nothing is compared with V8");
            return None;
        };
        let text = String::from_utf8_lossy(&output.stdout).trim().to_string();
        let major = text.split('.').next().and_then(|major| major.parse::<u32>().ok());
        if major < Some(MAJOR_MIN) {
            eprintln!("skipped: node {text} is older than {MAJOR_MIN}, so nothing is compared with V8");
            return None;
        }
        let (node, v8) = text.split_once(' ').unwrap_or((&text, ""));
        Some(V8 { version: format!("{v8}, node {node}"), folder: tempfile::tempdir().ok()? })
    }

    /// What the script has to do for an outline. Files are named as they are,
    /// so they must be there when it runs.
    ///
    /// # Errors
    /// None that resolving has not ruled out.
    ///
    /// # Panics
    /// If a module cannot be written to the temporary folder.
    pub fn job(&self, outline: &Outline<'_>, tile_bytes: u64, seed: Option<u64>) -> Result<Value> {
        let checkpoint = outline.checkpoint();
        let typed = |tensor: &TensorType| (tensor.dtype().as_str(), tensor.shape().to_vec());
        let from = |origin: &Origin| match origin {
            Origin::Source(name) => {
                let source = &checkpoint.tensors()[name];
                let (dtype, shape) = typed(&source.tensor);
                json!({ "file": checkpoint.files()[source.file].path(), "offset": source.offset, "dtype": dtype, "shape": shape })
            }
            Origin::Output { application, role } => json!({ "application": application, "role": role }),
        };
        let steps = outline.steps()?;
        let type_of = |origin: &Origin| match origin {
            Origin::Source(name) => typed(&checkpoint.tensors()[name].tensor),
            Origin::Output { application, role } => {
                let plan = &steps[*application].plan;
                let target = plan.output(role).expect("a checked plan has its outputs");
                typed(&plan.targets[target].tensor)
            }
        };
        let resolution = &outline.resolution;
        let applications = resolution.applications.iter().zip(&outline.modules).map(|(application, module)| {
            let inputs = application.inputs.iter().map(|input| {
                let (dtype, shape) = type_of(&input.origin);
                json!({ "role": input.role, "index": input.index, "dtype": dtype, "shape": shape, "from": from(&input.origin) })
            });
            let tp = if application.tp { outline.tp() } else { weightmill_guest::abi::Tp::ONE };
            json!({
                "module": self.module_file(module),
                "params": application.params,
                "tp": tp,
                "inputs": inputs.collect::<Vec<_>>(),
                "outputs": application.outputs.iter().map(|output| &output.role).collect::<Vec<_>>(),
            })
        });
        let tensors = resolution.tensors.iter().map(|(name, origin)| json!({ "name": name, "from": from(origin) }));
        Ok(json!({
            "applications": applications.collect::<Vec<_>>(),
            "tensors": tensors.collect::<Vec<_>>(),
            "tile_bytes": tile_bytes,
            "seed": seed,
        }))
    }

    fn module_file(&self, module: &Module) -> PathBuf {
        let path = self.folder.path().join(format!("{}.wasm", module.digest()));
        if !path.exists() {
            std::fs::write(&path, module.bytes()).expect("a module can be written to a temporary folder");
        }
        path
    }

    /// Runs jobs in one node process.
    ///
    /// # Panics
    /// If node fails as a whole.
    pub fn run(&self, jobs: &[Value]) -> Vec<Answer> {
        let path = self.folder.path().join("jobs.json");
        std::fs::write(&path, Value::from(jobs).to_string()).expect("the jobs can be written");
        let script = repository().join("tests/v8/weightmill.mjs");
        let output = Command::new("node").arg(script).arg(&path).output().expect("node starts");
        assert!(output.status.success(), "node: {}", String::from_utf8_lossy(&output.stderr));
        #[derive(Deserialize)]
        struct Document {
            tensors: Option<BTreeMap<String, Row>>,
            error: Option<String>,
        }
        let documents: Vec<Document> = serde_json::from_slice(&output.stdout).expect("the script answers JSON");
        assert_eq!(documents.len(), jobs.len());
        documents.into_iter().map(|d| d.tensors.ok_or_else(|| d.error.unwrap_or_default())).collect()
    }
}
