//! `weightmill diff`.

mod elements;
mod side;
mod values;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;

use elements::Differing;
use side::{Named, Side};

use super::args::{Global, TpArgs, WorkArgs};
use super::digest::engine_name;
use super::output::{self, Style};
use super::progress::Bar;
use crate::digest::TensorDigest;
use crate::error::{Code, Error, Result};
use crate::progress::Progress;
use crate::sandbox::EngineName;
use crate::tensor::{TensorName, TensorType};

const EXAMPLES: &str = "Examples:
  weightmill digest --entry 9f3c1d2a --json > a.json
  weightmill digest --recipe R --checkpoint C --engine wasmi --json > b.json
  weightmill diff a.json b.json
  weightmill diff --a-entry 9f3c1d2a --b-checkpoint exported/
  weightmill diff a.json --b-entry 07aa41c5 --json
  weightmill diff --a-entry 9f3c1d2a --b-recipe R --b-checkpoint C --b-engine wasmi

Where both sides' bytes are at hand, the first differing element is shown with both values. They are
at hand if an entry of the store has the table's content, or if options say where they are: an
entry, a checkpoint, or a recipe that is run over a checkpoint. A side that is named so needs no
table.

Exits 0 when equal, 1 when not.";

/// How many differing elements are shown to people.
const SHOWN: usize = 10;

/// What differs between two digest tables.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Outputs of `weightmill digest --json`: a, then b; one is enough if the other side is named
    /// below
    #[arg(value_name = "TABLE", num_args = 0..=2)]
    tables: Vec<PathBuf>,
    /// The entry of the store that a is: its key, or the beginning of it
    #[arg(long, value_name = "KEY", conflicts_with = "a_checkpoint")]
    a_entry: Option<String>,
    /// The checkpoint that a is, or with --a-recipe is made from
    #[arg(long, value_name = "PATH")]
    a_checkpoint: Option<PathBuf>,
    /// The recipe that makes a
    #[arg(long, value_name = "FILE", requires = "a_checkpoint")]
    a_recipe: Option<PathBuf>,
    /// The engine that makes a: wasmtime, wasmi or pulley
    #[arg(long, value_name = "ENGINE", value_parser = engine_name, requires = "a_recipe")]
    a_engine: Option<EngineName>,
    /// The entry of the store that b is
    #[arg(long, value_name = "KEY", conflicts_with = "b_checkpoint")]
    b_entry: Option<String>,
    /// The checkpoint that b is, or with --b-recipe is made from
    #[arg(long, value_name = "PATH")]
    b_checkpoint: Option<PathBuf>,
    /// The recipe that makes b
    #[arg(long, value_name = "FILE", requires = "b_checkpoint")]
    b_recipe: Option<PathBuf>,
    /// The engine that makes b: wasmtime, wasmi or pulley
    #[arg(long, value_name = "ENGINE", value_parser = engine_name, requires = "b_recipe")]
    b_engine: Option<EngineName>,
    #[command(flatten)]
    tp: TpArgs,
    /// Look into the bytes of at most so many differing tensors
    #[arg(long, value_name = "N", default_value_t = 20)]
    values: usize,
    #[command(flatten)]
    work: WorkArgs,
}

/// A tensor that is not the same on both sides.
struct Difference<'a> {
    tensor: &'a TensorName,
    what: What,
    a: Option<&'a Row>,
    b: Option<&'a Row>,
    elements: Option<Differing>,
}

type Row = (TensorType, TensorDigest);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Missing,
    Extra,
    Dtype,
    Shape,
    Bytes,
}

impl What {
    fn as_str(self) -> &'static str {
        match self {
            What::Missing => "missing",
            What::Extra => "extra",
            What::Dtype => "dtype",
            What::Shape => "shape",
            What::Bytes => "bytes",
        }
    }
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let bar = Bar::new();
    let (a, b) = sides(global, args, &bar)?;
    let names: BTreeSet<&TensorName> = a.table.0.keys().chain(b.table.0.keys()).collect();
    let mut differences: Vec<Difference<'_>> =
        names.iter().filter_map(|name| difference(name, a.table.0.get(*name), b.table.0.get(*name))).collect();
    if let (Some(from_a), Some(from_b)) = (&a.bytes, &b.bytes) {
        let of_bytes = || differences.iter().filter(|d| d.what == What::Bytes).take(args.values);
        bar.stage("comparing", 2 * of_bytes().filter_map(|d| d.a).map(|(tensor, _)| tensor.len_bytes()).sum::<u64>());
        for difference in differences.iter_mut().filter(|d| d.what == What::Bytes).take(args.values) {
            let (Some(row_a), Some(row_b)) = (difference.a, difference.b) else { continue };
            let a = from_a.open(difference.tensor, row_a, &bar).map_err(|e| e.context("a"))?;
            let b = from_b.open(difference.tensor, row_b, &bar).map_err(|e| e.context("b"))?;
            difference.elements = Some(elements::compare(&row_a.0, a, b, &bar)?);
        }
    }
    bar.clear();
    if global.json {
        output::json(&serde_json::json!({
            "equal": differences.is_empty(),
            "a": a.table.content_digest(),
            "b": b.table.content_digest(),
            "differences": differences.iter().map(document).collect::<Vec<_>>(),
        }));
    } else if differences.is_empty() {
        let content = a.table.content_digest().short();
        output::line(format!("equal: {}, content {content}", output::count(names.len(), "tensor")));
    } else {
        print(&differences, names.len(), &a, &b);
    }
    Ok(ExitCode::from(u8::from(!differences.is_empty())))
}

/// Both sides, from tables and from what is named.
fn sides(global: &Global, args: &Args, bar: &Bar) -> Result<(Side, Side)> {
    let named_a = args.a_entry.is_some() || args.a_checkpoint.is_some();
    let named_b = args.b_entry.is_some() || args.b_checkpoint.is_some();
    let (table_a, table_b) = match (args.tables.as_slice(), named_a, named_b) {
        ([a, b], ..) => (Some(a), Some(b)),
        ([table], false, true) => (Some(table), None),
        ([table], true, false) => (None, Some(table)),
        ([], true, true) => (None, None),
        _ => {
            return Err(Error::new(Code::BadParams, "it is not clear which two sides to compare").hint(
                "write two tables, or one table and the other side as --a-entry, --a-checkpoint, --b-entry or --b-checkpoint, or name both sides so",
            ));
        }
    };
    let named =
        |entry, checkpoint, recipe, engine| Named { entry, checkpoint, recipe, engine, tp: args.tp, work: &args.work };
    let of_a = named(args.a_entry.as_deref(), args.a_checkpoint.as_deref(), args.a_recipe.as_deref(), args.a_engine);
    let of_b = named(args.b_entry.as_deref(), args.b_checkpoint.as_deref(), args.b_recipe.as_deref(), args.b_engine);
    let a = Side::open(global, table_a, &of_a, bar).map_err(|e| e.context("a"))?;
    let b = Side::open(global, table_b, &of_b, bar).map_err(|e| e.context("b"))?;
    Ok((a, b))
}

fn difference<'a>(tensor: &'a TensorName, a: Option<&'a Row>, b: Option<&'a Row>) -> Option<Difference<'a>> {
    let what = match (a, b) {
        (Some(a), Some(b)) if a == b => return None,
        (Some((a, _)), Some((b, _))) if a.dtype() != b.dtype() => What::Dtype,
        (Some((a, _)), Some((b, _))) if a.shape() != b.shape() => What::Shape,
        (Some(_), Some(_)) => What::Bytes,
        (Some(_), None) => What::Missing,
        (None, _) => What::Extra,
    };
    Some(Difference { tensor, what, a, b, elements: None })
}

fn document(difference: &Difference<'_>) -> serde_json::Value {
    let row = |row: Option<&Row>| {
        row.map(|(tensor, digest)| {
            serde_json::json!({ "dtype": tensor.dtype(), "shape": tensor.shape(), "digest": digest })
        })
    };
    serde_json::json!({
        "tensor": difference.tensor,
        "what": difference.what.as_str(),
        "a": row(difference.a),
        "b": row(difference.b),
        "elements": difference.elements.as_ref().map(Differing::document),
    })
}

fn print(differences: &[Difference<'_>], tensors: usize, a: &Side, b: &Side) {
    let rows: Vec<Vec<String>> = differences
        .iter()
        .map(|d| {
            let side = |row: Option<&Row>| match (row, d.what) {
                (None, _) => "–".to_string(),
                (Some((_, digest)), What::Bytes) => digest.short(),
                (Some((tensor, _)), _) => tensor.to_string(),
            };
            vec![d.tensor.to_string(), d.what.as_str().into(), side(d.a), side(d.b)]
        })
        .collect();
    output::line(output::table(&["tensor", "differs in", "a", "b"], &[], &rows));
    let style = Style::stdout();
    let looked_into = || differences.iter().filter_map(|d| Some((d.tensor, d.elements.as_ref()?)));
    for (tensor, elements) in looked_into().take(SHOWN) {
        output::line(format!("{} {elements}", style.bold(tensor.as_str())));
    }
    let hidden = looked_into().count().saturating_sub(SHOWN);
    if hidden > 0 {
        output::line(format!("and {hidden} more (--json lists all)"));
    }
    output::line(format!("{} of {} differ", differences.len(), output::count(tensors, "tensor")));
    if differences.iter().any(|d| d.what == What::Bytes) {
        for (name, _) in [("a", a), ("b", b)].iter().filter(|(_, side)| side.bytes.is_none()) {
            output::line(format!(
                "the bytes of {name} are not at hand: --{name}-entry or --{name}-checkpoint names them"
            ));
        }
    }
}
