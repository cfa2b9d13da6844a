//! `weightmill diff`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde::Deserialize;

use super::args::Global;
use super::output;
use crate::digest::{ContentDigest, TensorDigest, content_digest};
use crate::error::{Code, Error, Result};
use crate::tensor::{Dtype, TensorName};

const EXAMPLES: &str = "Examples:
  weightmill digest --entry 9f3c1d2a --json > a.json
  weightmill digest --recipe R --checkpoint C --engine wasmi --json > b.json
  weightmill diff a.json b.json

Exits 0 when equal, 1 when not.";

/// What differs between two digest tables.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Output of `weightmill digest --json`
    a: PathBuf,
    /// Output of `weightmill digest --json`
    b: PathBuf,
}

#[derive(Deserialize)]
struct Table {
    content_digest: ContentDigest,
    tensors: BTreeMap<TensorName, Row>,
}

#[derive(Deserialize, PartialEq)]
struct Row {
    dtype: Dtype,
    shape: Vec<u64>,
    digest: TensorDigest,
}

impl Table {
    fn load(path: &Path) -> Result<Self> {
        let wrong = |what: String| {
            Error::new(Code::CheckpointInvalid, format!("{} is no digest table: {what}", path.display()))
                .hint("`weightmill digest --json` writes one")
        };
        let bytes = std::fs::read(path).map_err(|e| Error::io(format!("reading {}", path.display()), e))?;
        let table: Table = serde_json::from_slice(&bytes).map_err(|e| wrong(e.to_string()))?;
        let rows = table.tensors.iter().map(|(name, row)| (name.as_str(), row.dtype, row.shape.as_slice(), row.digest));
        let computed = content_digest(rows);
        if computed != table.content_digest {
            return Err(wrong(format!("its content digest is {}, its rows give {computed}", table.content_digest)));
        }
        Ok(table)
    }
}

#[derive(serde::Serialize)]
struct Difference<'a> {
    tensor: &'a TensorName,
    what: &'static str,
    a: Option<String>,
    b: Option<String>,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let (a, b) = (Table::load(&args.a)?, Table::load(&args.b)?);
    let names: BTreeSet<&TensorName> = a.tensors.keys().chain(b.tensors.keys()).collect();
    let differences: Vec<Difference<'_>> =
        names.iter().filter_map(|name| difference(name, a.tensors.get(*name), b.tensors.get(*name))).collect();
    if global.json {
        output::json(&serde_json::json!({
            "equal": differences.is_empty(),
            "a": a.content_digest,
            "b": b.content_digest,
            "differences": differences,
        }));
    } else if differences.is_empty() {
        output::line(format!("equal: {}, content {}", output::count(names.len(), "tensor"), a.content_digest.short()));
    } else {
        let rows: Vec<Vec<String>> = differences
            .iter()
            .map(|d| {
                let side = |s: &Option<String>| s.clone().unwrap_or_else(|| "–".into());
                vec![d.tensor.to_string(), d.what.into(), side(&d.a), side(&d.b)]
            })
            .collect();
        output::line(output::table(&["tensor", "differs in", "a", "b"], &[], &rows));
        output::line(format!("{} of {} differ", differences.len(), output::count(names.len(), "tensor")));
    }
    Ok(ExitCode::from(u8::from(!differences.is_empty())))
}

fn difference<'a>(tensor: &'a TensorName, a: Option<&Row>, b: Option<&Row>) -> Option<Difference<'a>> {
    let kind = |row: &Row| format!("{} {:?}", row.dtype, row.shape);
    let (what, a, b) = match (a, b) {
        (Some(a), Some(b)) if a == b => return None,
        (Some(a), Some(b)) if (a.dtype, &a.shape) != (b.dtype, &b.shape) => ("type", Some(kind(a)), Some(kind(b))),
        (Some(a), Some(b)) => ("bytes", Some(a.digest.short()), Some(b.digest.short())),
        (a, b) => ("presence", a.map(kind), b.map(kind)),
    };
    Some(Difference { tensor, what, a, b })
}
