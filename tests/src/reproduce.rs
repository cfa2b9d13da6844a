//! Everything that is computed here, on every engine and in every way: the
//! table behind `cargo xtask reproduce`.
//!
//! A row is a form of a shipped module over generated tensors, or all golden
//! cases that use one module. A cell is the content digest of what came out:
//! for an engine and a number of jobs, with three tile sizes, in order and
//! shuffled, which must all agree before there is a digest at all. V8 has no
//! jobs, and leaves out golden cases whose result has a NaN.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::Value;
use sha2::{Digest as _, Sha256};
use weightmill::bench::checkpoint::write_tensors;
use weightmill::bench::samples;
use weightmill::checkpoint::Checkpoint;
use weightmill::execute::TILE_BYTES;
use weightmill::recipe::{ModuleRef, Recipe};
use weightmill::sandbox::{EngineName, engine};
use weightmill_guest::abi::{ABI_VERSION, Tp};

use crate::execution::{Host, Setting};
use crate::golden::rows;
use crate::v8::{Answer, V8};

/// Columns of the generated tensors: small enough for interpreters, large
/// enough for thousands of tiles.
const COLUMNS: u64 = 128;
/// Version of what is computed and how the last line is made from it.
const FORMAT: u32 = 1;

/// What is carried out, and under which name.
struct Work {
    name: String,
    cases: Vec<Case>,
    /// No tile is asked to be smaller.
    tile_bytes_min: u64,
}

/// A recipe over a checkpoint.
struct Case {
    recipe: Recipe,
    checkpoint: Arc<Checkpoint>,
    tp: Tp,
    /// Whether V8 has to give the same bits.
    exact: bool,
}

/// A column: an engine, and how many jobs, if it has any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// The engine.
    pub engine: String,
    /// Threads that compute.
    pub jobs: Option<usize>,
}

/// A row: a digest for each column, or what went wrong.
#[derive(Clone, Debug)]
pub struct Row {
    /// The module and its form.
    pub name: String,
    /// One a column.
    pub cells: Vec<Result<String, String>>,
}

impl Row {
    /// The digest, if all columns have the same.
    pub fn agreed(&self) -> Option<&str> {
        let first = self.cells.first()?.as_deref().ok()?;
        self.cells.iter().all(|cell| cell.as_deref() == Ok(first)).then_some(first)
    }
}

/// The whole table.
#[derive(Clone, Debug)]
pub struct Report {
    /// The engines and their versions.
    pub engines: Vec<String>,
    /// The columns.
    pub columns: Vec<Column>,
    /// The rows.
    pub rows: Vec<Row>,
}

/// Computes everything; `told` hears which column is next. `quick` takes one
/// tile size for each number of jobs, which gives the same digests if all is
/// well, and finds less if it is not.
///
/// # Panics
/// If the cases cannot be read or written: they are committed, or made in a
/// temporary folder.
pub fn run(quick: bool, told: &dyn Fn(&str)) -> Report {
    let folder = tempfile::tempdir().expect("there is a temporary folder");
    told("making the generated checkpoints");
    let mut works = generated(&folder);
    works.extend(golden());
    let (mut engines, mut columns) = (Vec::new(), Vec::new());
    let mut table: Vec<Vec<Result<String, String>>> = vec![Vec::new(); works.len()];
    for name in EngineName::ALL {
        let version = engine(*name).map_or_else(|e| e.to_string(), |engine| engine.version());
        engines.push(format!("{name} {version}", name = name.as_str()));
        let host = Host::new(*name);
        for jobs in [1, 2, 8] {
            told(&format!("{}, {jobs} jobs", name.as_str()));
            columns.push(Column { engine: name.as_str().into(), jobs: Some(jobs) });
            for (work, cells) in works.iter().zip(&mut table) {
                cells.push(on_host(&host, work, jobs, quick));
            }
        }
    }
    if let Some(v8) = V8::find() {
        told("V8");
        engines.push(format!("v8 {}", v8.version));
        columns.push(Column { engine: "v8".into(), jobs: None });
        let host = Host::new(EngineName::Wasmi);
        for (cell, cells) in on_v8(&v8, &host, &works, quick).into_iter().zip(&mut table) {
            cells.push(cell);
        }
    }
    let rows = works.into_iter().zip(table).map(|(work, cells)| Row { name: work.name, cells });
    Report { engines, columns, rows: rows.collect() }
}

/// One work for each form of a module, of tensors from a fixed seed.
fn generated(folder: &tempfile::TempDir) -> Vec<Work> {
    let samples = samples(COLUMNS);
    let paths: Vec<PathBuf> = (0..samples.len()).map(|i| folder.path().join(format!("{i}.safetensors"))).collect();
    for (sample, path) in samples.iter().zip(&paths) {
        write_tensors(path, &sample.tensors).expect("a sample can be written");
    }
    let work = |(sample, path): (weightmill::bench::Sample, PathBuf)| {
        let recipe = Recipe::parse(&sample.recipe, &path.with_extension("toml")).expect("a sample's recipe is right");
        let checkpoint = Arc::new(Checkpoint::open(&path).expect("what was written can be opened"));
        // Every tile is an instance: with a few bytes each they would be a million.
        Work {
            name: sample.name,
            cases: vec![Case { recipe, checkpoint, tp: Tp::ONE, exact: true }],
            tile_bytes_min: 1024,
        }
    };
    samples.into_iter().zip(paths).map(work).collect()
}

/// The golden cases that go well, by the modules that they use.
fn golden() -> Vec<Work> {
    let mut works: BTreeMap<String, Vec<Case>> = BTreeMap::new();
    for row in rows("tests/golden/cases").into_iter().filter(|row| row.expected.is_ok()) {
        let recipe = Recipe::load(&row.recipe).expect("a golden recipe is right");
        let names: BTreeSet<&str> = recipe
            .steps()
            .iter()
            .filter_map(|step| match step.module() {
                ModuleRef::Shipped(name) => Some(name.as_str()),
                _ => None,
            })
            .collect();
        let name = match names.len() {
            0 => "golden: no module".to_string(),
            1 => format!("golden: {}", names.into_iter().collect::<String>()),
            _ => "golden: several modules".to_string(),
        };
        let checkpoint = Arc::new(Checkpoint::open(&row.checkpoint).expect("a golden checkpoint is right"));
        let exact = !row.expected.as_deref().is_ok_and(crate::golden::has_nan);
        works.entry(name).or_default().push(Case { recipe, checkpoint, tp: row.tp, exact });
    }
    // Named by what V8 can be held to as well.
    let split = |(name, cases): (String, Vec<Case>)| {
        let (exact, with_nans): (Vec<Case>, Vec<Case>) = cases.into_iter().partition(|case| case.exact);
        let work = |name, cases| Work { name, cases, tile_bytes_min: 1 };
        [work(format!("{name}, with NaNs"), with_nans), work(name, exact)]
    };
    works.into_iter().flat_map(split).filter(|work| !work.cases.is_empty()).collect()
}

/// The digest of a work on an engine: the same for all settings.
fn on_host(host: &Host, work: &Work, jobs: usize, quick: bool) -> Result<String, String> {
    let mut agreed: Option<String> = None;
    let wanted = |setting: &Setting| setting.jobs == jobs && (!quick || setting.tile_bytes == TILE_BYTES);
    for mut setting in Setting::ALL.into_iter().filter(wanted) {
        setting.tile_bytes = setting.tile_bytes.max(work.tile_bytes_min);
        let mut digests = Vec::new();
        for case in &work.cases {
            let table = host.table(&case.recipe, &case.checkpoint, case.tp, setting).map_err(|e| e.to_string())?;
            digests.push(table.content_digest().to_string());
        }
        let digest = combined(digests);
        match &agreed {
            Some(other) if *other != digest => {
                return Err(format!("{setting:?} gives {digest}, another setting {other}"));
            }
            _ => agreed = Some(digest),
        }
    }
    agreed.ok_or_else(|| "there is no setting".into())
}

fn on_v8(v8: &V8, host: &Host, works: &[Work], quick: bool) -> Vec<Result<String, String>> {
    let settings = &[(TILE_BYTES, None), (4096, Some(7)), (16, Some(8))][..if quick { 1 } else { 3 }];
    let mut jobs: Vec<Value> = Vec::new();
    let mut aliases = Vec::new();
    let exact = |work: &Work| work.cases.iter().all(|case| case.exact);
    for work in works.iter().filter(|work| exact(work)) {
        for (tile_bytes, seed) in settings.iter().copied() {
            let tile_bytes = work.tile_bytes_min.max(tile_bytes);
            for case in &work.cases {
                let outline = host.outline(&case.recipe, &case.checkpoint, case.tp, tile_bytes);
                let outline = outline.expect("what ran on other engines resolves");
                jobs.push(v8.job(&outline, tile_bytes, seed).expect("what ran on other engines plans"));
                aliases.push(outline.resolution.aliases.clone());
            }
        }
    }
    let tables = v8.run(&jobs).into_iter().zip(aliases).map(|(answer, aliases)| content_digest(answer, &aliases));
    let mut digests = tables.collect::<Vec<_>>().into_iter();
    works
        .iter()
        .map(|work| {
            if !exact(work) {
                return Err(NOT_COMPARED.to_string());
            }
            let each: Vec<String> = settings
                .iter()
                .map(|_| Ok(combined(digests.by_ref().take(work.cases.len()).collect::<Result<Vec<_>, String>>()?)))
                .collect::<Result<_, String>>()?;
            match each.as_slice() {
                [first, rest @ ..] if rest.iter().all(|other| other == first) => Ok(first.clone()),
                _ => Err(format!("tile sizes give {each:?}")),
            }
        })
        .collect()
}

/// The cell of an engine that a row is not for.
pub const NOT_COMPARED: &str = "not compared";

/// The content digest, by its specification.
fn content_digest(
    answer: Answer,
    aliases: &BTreeMap<weightmill::tensor::TensorName, weightmill::tensor::TensorName>,
) -> Result<String, String> {
    let mut table = answer?;
    for (alias, of) in aliases {
        let row = table.get(of.as_str()).cloned().ok_or_else(|| format!("{of} is missing"))?;
        table.insert(alias.to_string(), row);
    }
    let mut hasher = Sha256::new();
    for (name, row) in &table {
        let shape = serde_json::to_string(&row.shape).map_err(|e| e.to_string())?;
        hasher.update(format!("{name}\0{}\0{shape}\0{}\n", row.dtype, row.digest));
    }
    Ok(hex(&hasher.finalize()))
}

/// One digest stands for itself, several for the hash of their list.
fn combined(digests: Vec<String>) -> String {
    match digests.as_slice() {
        [one] => one.clone(),
        _ => hex(&Sha256::digest(digests.join("\n"))),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Report {
    /// Whether a row's cells that are compared are all the same.
    fn compared(row: &Row) -> Row {
        let kept = row.cells.iter().filter(|cell| cell.as_ref().err().map(String::as_str) != Some(NOT_COMPARED));
        Row { name: row.name.clone(), cells: kept.cloned().collect() }
    }

    /// Rows whose cells are not all the same.
    pub fn differing(&self) -> Vec<&Row> {
        self.rows.iter().filter(|row| Self::compared(row).agreed().is_none()).collect()
    }

    /// The table, for people.
    pub fn table(&self) -> String {
        let width = self.rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
        let mut text = String::new();
        let heading = self.columns.iter().map(|column| match column.jobs {
            Some(jobs) => format!("{} {jobs}", column.engine),
            None => column.engine.clone(),
        });
        let heading: Vec<String> = heading.map(|text| format!("{text:<10}")).collect();
        let _ = writeln!(text, "{:width$}  {}", "module", heading.join("  ").trim_end());
        for row in &self.rows {
            let cells = row.cells.iter().map(|cell| match cell {
                Ok(digest) => digest[..10].to_string(),
                Err(why) if why == NOT_COMPARED => format!("{:<10}", "-"),
                Err(_) => format!("{:<10}", "FAILED"),
            });
            let _ = writeln!(text, "{:width$}  {}", row.name, cells.collect::<Vec<_>>().join("  ").trim_end());
        }
        text
    }

    /// The line that two hosts compare; `None` if a row does not agree. Neither
    /// engines nor their versions are in it: they must not matter.
    pub fn line(&self) -> Option<String> {
        let mut hasher = Sha256::new();
        for row in &self.rows {
            hasher.update(format!("{}\0{}\n", row.name, Self::compared(row).agreed()?));
        }
        Some(format!(
            "weightmill {} abi {ABI_VERSION} reproduce {FORMAT} rows {} sha256 {}",
            env!("CARGO_PKG_VERSION"),
            self.rows.len(),
            hex(&hasher.finalize())
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(cells: &[Result<&str, &str>]) -> Report {
        let cells = cells.iter().map(|cell| cell.map(String::from).map_err(String::from)).collect();
        Report { engines: vec![], columns: vec![], rows: vec![Row { name: "r".into(), cells }] }
    }

    #[test]
    fn a_line_needs_rows_that_agree() {
        let (a, b) = ("a".repeat(64), "b".repeat(64));
        assert!(report(&[Ok(&a), Ok(&b)]).line().is_none());
        assert!(report(&[Ok(&a), Err("trap")]).line().is_none());
        assert!(report(&[Err(NOT_COMPARED)]).line().is_none());
        let (two, three) = (report(&[Ok(&a), Ok(&a)]), report(&[Ok(&a), Ok(&a), Err(NOT_COMPARED)]));
        assert!(two.line().is_some() && two.line() == three.line(), "engines that are missing do not matter");
        assert_ne!(two.line(), report(&[Ok(&b), Ok(&b)]).line());
        assert_eq!(report(&[Ok(&a), Ok(&b)]).differing().len(), 1);
    }
}
