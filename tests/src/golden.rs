//! The golden cases: small checkpoints, recipes, and what must come of them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use weightmill::digest::{leaf_hashes, tensor_digest};
use weightmill::error::Result;
use weightmill::execute::DigestTable;
use weightmill::tensor::{TensorName, TensorType};
use weightmill_guest::abi::Tp;

use crate::repository;

/// One row of a case: a checkpoint, a recipe, a rank.
#[derive(Clone, Debug)]
pub struct Row {
    /// The case's name.
    pub case: String,
    /// The recipe's file.
    pub recipe: PathBuf,
    /// The checkpoint's folder or file.
    pub checkpoint: PathBuf,
    /// Tensor parallel size and rank.
    pub tp: Tp,
    /// The file with the tensors that must come out, or the error's code.
    pub expected: std::result::Result<PathBuf, String>,
}

/// Name to type and digest, as text.
pub type TextTable = BTreeMap<String, (String, String)>;

/// The rows of every case under `folder`, which is in the repository.
///
/// # Panics
/// If the cases cannot be read, or are few.
pub fn rows(folder: &str) -> Vec<Row> {
    let folder = repository().join(folder);
    let mut cases: Vec<PathBuf> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
    cases.sort();
    let mut rows = Vec::new();
    for case in cases.iter().filter(|c| c.join("cases.json").exists()) {
        let listed: Vec<Value> = serde_json::from_slice(&std::fs::read(case.join("cases.json")).unwrap()).unwrap();
        for row in listed {
            let recipe = row["recipe"].as_str().unwrap_or("recipe.toml");
            let size = row["tp_size"].as_u64().unwrap_or(1);
            rows.push(Row {
                case: case.file_name().unwrap().to_string_lossy().into_owned(),
                recipe: case.join(recipe),
                checkpoint: case.join(row["checkpoint"].as_str().unwrap_or("checkpoint")),
                tp: Tp { rank: row["tp_rank"].as_u64().unwrap_or(0), size },
                expected: match row["error"].as_str() {
                    Some(code) => Err(code.to_string()),
                    None => Ok(case.join(row["expected"].as_str().unwrap())),
                },
            });
        }
    }
    assert!(rows.len() > 20, "{} has only {} rows", folder.display(), rows.len());
    rows
}

/// The table of a file, read by the stock reader and hashed by the book.
///
/// # Panics
/// If it cannot be read.
pub fn table_of(path: &Path) -> TextTable {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let row = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let digest = tensor_digest(view.data().len() as u64, &leaf_hashes(view.data()));
        let kind = format!("{} {:?}", serde_json::to_value(view.dtype()).unwrap().as_str().unwrap(), view.shape());
        (name, (kind, digest.to_string()))
    };
    file.tensors().into_iter().map(row).collect()
}

/// Whether a tensor of a file has a NaN.
///
/// # Panics
/// If it cannot be read.
pub fn has_nan(path: &Path) -> bool {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    file.tensors().iter().any(|(_, view)| {
        let dtype = serde_json::to_value(view.dtype()).unwrap().as_str().unwrap().to_string();
        with_one_nan(&dtype, view.data()).1
    })
}

/// The bytes with every NaN of a float dtype replaced by the canonical one, and
/// whether there is one: what engines that do not make NaNs canonical can be
/// held to.
pub fn with_one_nan(dtype: &str, bytes: &[u8]) -> (Vec<u8>, bool) {
    let (size, exponent, mantissa, nan): (usize, u64, u64, u64) = match dtype {
        "F16" => (2, 0x7C00, 0x03FF, 0x7E00),
        "BF16" => (2, 0x7F80, 0x007F, 0x7FC0),
        "F32" => (4, 0x7F80_0000, 0x007F_FFFF, 0x7FC0_0000),
        "F64" => (8, 0x7FF0_0000_0000_0000, 0x000F_FFFF_FFFF_FFFF, 0x7FF8_0000_0000_0000),
        "F8_E4M3" => (1, 0x7F, 0x7F, 0x7F),
        _ => return (bytes.to_vec(), false),
    };
    let (mut out, mut found) = (bytes.to_vec(), false);
    for element in out.chunks_exact_mut(size) {
        let mut wide = [0; 8];
        wide[..size].copy_from_slice(element);
        let bits = u64::from_le_bytes(wide);
        if bits & exponent == exponent && bits & mantissa != 0 {
            element.copy_from_slice(&nan.to_le_bytes()[..size]);
            found = true;
        }
    }
    (out, found)
}

/// A table as text.
pub fn text_of(table: &DigestTable) -> TextTable {
    let of = |(name, (tensor, digest)): (&TensorName, &(TensorType, _))| {
        (name.to_string(), (tensor.to_string(), format!("{digest}")))
    };
    table.0.iter().map(of).collect()
}

impl Row {
    /// What a message calls it.
    pub fn place(&self) -> String {
        format!("{} tp {}/{}", self.case, self.tp.rank, self.tp.size)
    }

    /// What is wrong with a result, if anything.
    pub fn fault(&self, got: Result<DigestTable>) -> Option<String> {
        let place = self.place();
        match (got, &self.expected) {
            (Ok(_), Err(code)) => Some(format!("{place}: no error, expected {code}")),
            (Err(e), Err(code)) if e.code().as_str() == code => None,
            (Err(e), Err(code)) => Some(format!("{place}: expected {code}, got {e}")),
            (Err(e), Ok(_)) => Some(format!("{place}: {e}")),
            (Ok(table), Ok(expected)) => {
                let (got, want) = (text_of(&table), table_of(expected));
                (got != want).then(|| format!("{place}: got {got:#?}, expected {want:#?}"))
            }
        }
    }
}
