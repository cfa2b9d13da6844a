//! `weightmill module test`: golden vectors through the executor that builds
//! entries.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use super::build;
use super::difference::{self, Difference};
use super::tiles::effective_tp;
use super::vectors::{self, Expected, Vector};
use crate::canonical::to_canonical;
use crate::cli::args::Global;
use crate::cli::digest::engine_name;
use crate::cli::output::{self, Style};
use crate::cli::session;
use crate::error::{Code, Error, Result};
use crate::execute::{Graph, Sink, Source, SpillRoom, Step, TILE_BYTES, Workshop, default_budget_bytes};
use crate::plan;
use crate::progress::Silent;
use crate::recipe::Origin;
use crate::sandbox::{EngineName, Module, Program, engine};
use crate::tensor::{TensorName, TensorType};

const EXAMPLES: &str = "Examples:
  weightmill module test
  weightmill module test path/to/crate --engine wasmi
  weightmill module test ./mine.wasm --vectors vectors --json

A crate is built first. A vector is a folder with case.json, input.safetensors and
expected.safetensors; every one is run with two tile sizes and with one and two
threads. Exits 1 if any differs.";

/// Run golden vectors.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Args {
    /// The crate's folder, or a module: a path, a shipped name, or sha256:<hex>
    #[arg(value_name = "PATH", default_value = ".")]
    subject: String,
    /// The folder with the vectors [default: vectors/ of the crate, or beside the module]
    #[arg(long, value_name = "DIR")]
    vectors: Option<PathBuf>,
    /// The engine that runs the module: wasmtime, wasmi or pulley
    #[arg(long, value_name = "ENGINE", value_parser = engine_name)]
    engine: Option<EngineName>,
    /// Write expected.safetensors where a vector has none: to be looked at before it is relied on
    #[arg(long)]
    write_expected: bool,
}

/// What is wrong with a vector under one setting.
#[derive(serde::Serialize)]
struct Failure {
    tile_bytes: u64,
    jobs: usize,
    output: Option<String>,
    what: String,
    difference: Option<Difference>,
}

struct Report {
    name: String,
    /// What came of it, if it is as it should be.
    outcome: String,
    failures: Vec<Failure>,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let (module, folder) = subject(global, args)?;
    let vectors = vectors::load(&folder)?;
    let name = args.engine.unwrap_or(EngineName::Wasmtime);
    let program = engine(name)?.compile(&module)?;
    let pools = [session::pool(Some(1))?, session::pool(Some(2))?];
    let bench = Bench { module: &module, program: &program, pools: &pools, write: args.write_expected };
    let reports = vectors.iter().map(|vector| bench.vector(vector)).collect::<Result<Vec<_>>>()?;
    let failed = reports.iter().filter(|report| !report.failures.is_empty()).count();
    if global.json {
        let vectors: Vec<_> = reports
            .iter()
            .map(|r| {
                serde_json::json!({
                    "name": r.name, "ok": r.failures.is_empty(), "outcome": r.outcome, "failures": r.failures,
                })
            })
            .collect();
        output::json(&serde_json::json!({
            "module": module.metadata().name, "digest": module.digest(), "engine": name.as_str(),
            "vectors": vectors, "failed": failed,
        }));
    } else {
        reports.iter().for_each(print);
        output::line(format!(
            "{} of {} on {}: {failed} failed",
            module.metadata().name,
            output::count(vectors.len(), "vector"),
            name.as_str()
        ));
    }
    Ok(ExitCode::from(u8::from(failed > 0)))
}

/// The module, built if a crate is named, and where its vectors are.
fn subject(global: &Global, args: &Args) -> Result<(Arc<Module>, PathBuf)> {
    let path = Path::new(&args.subject);
    let (module, near) = if path.is_dir() {
        (Arc::new(build::build(path)?.module), Some(path.join("vectors")))
    } else {
        (super::load(global, &args.subject)?, super::vectors_near(&args.subject))
    };
    let folder = args.vectors.clone().or(near).ok_or_else(|| {
        Error::new(Code::VectorInvalid, "there is no vectors/ beside the module").hint("name the folder with --vectors")
    })?;
    Ok((module, folder))
}

fn print(report: &Report) {
    let style = Style::stdout();
    if report.failures.is_empty() {
        output::line(format!("{}  {:<20} {}", style.green("ok  "), report.name, report.outcome));
        return;
    }
    output::line(format!("{}  {}", style.red("FAIL"), report.name));
    for failure in &report.failures {
        let output = failure.output.as_ref().map(|role| format!("{role}: ")).unwrap_or_default();
        let difference = failure.difference.as_ref().map(|d| format!(" {d}")).unwrap_or_default();
        output::line(format!(
            "        tile size {}, {}: {output}{}{difference}",
            output::bytes(failure.tile_bytes),
            output::count(failure.jobs, "thread"),
            failure.what
        ));
    }
}

type Outputs = BTreeMap<String, (TensorType, Vec<u8>)>;

/// What vectors are run on.
struct Bench<'a> {
    module: &'a Module,
    program: &'a Arc<dyn Program>,
    pools: &'a [rayon::ThreadPool],
    write: bool,
}

impl Bench<'_> {
    fn vector(&self, vector: &Vector) -> Result<Report> {
        let mut report = Report { name: vector.name.clone(), outcome: String::new(), failures: Vec::new() };
        if matches!(vector.expected, Expected::Unknown) {
            if !self.write {
                let message = format!("the vector {} has neither expected.safetensors nor an error", vector.name);
                return Err(Error::new(Code::VectorInvalid, message).hint(
                    "write what has to come out with an independent program, or let --write-expected write what does",
                ));
            }
            vector.write_expected(&self.outputs(vector, TILE_BYTES, &self.pools[0])?)?;
            report.outcome = "expected.safetensors written: check it before you rely on it".into();
            return Ok(report);
        }
        let expected = match &vector.expected {
            Expected::Tensors(expected) => {
                let read = |role: &String| Ok((role.clone(), vectors::read(expected, role)?));
                Some(vector.outputs.iter().map(read).collect::<Result<Outputs>>()?)
            }
            _ => None,
        };
        let small = (vector.input_bytes() / 16).clamp(64, TILE_BYTES);
        for tile_bytes in [TILE_BYTES, small] {
            for pool in self.pools {
                let came = self.outputs(vector, tile_bytes, pool);
                let fail = |output: Option<&str>, what: String, difference| Failure {
                    tile_bytes,
                    jobs: pool.current_num_threads(),
                    output: output.map(str::to_string),
                    what,
                    difference,
                };
                match (&expected, came) {
                    (Some(expected), Ok(outputs)) => {
                        for (role, (tensor, bytes)) in &outputs {
                            let (wanted, wanted_bytes) = &expected[role];
                            if tensor != wanted {
                                let what = format!("expected {wanted}, got {tensor}");
                                report.failures.push(fail(Some(role), what, None));
                            } else if let Some(found) = difference::first(tensor, bytes, wanted_bytes) {
                                report.failures.push(fail(Some(role), "differs,".into(), Some(found)));
                            }
                        }
                        report.outcome = output::count(outputs.len(), "output");
                    }
                    (Some(_), Err(error)) => report.failures.push(fail(None, shown(&error), None)),
                    (None, Ok(_)) => report.failures.push(fail(None, "expected an error, got outputs".into(), None)),
                    (None, Err(error)) => match &vector.expected {
                        Expected::Error { code, message }
                            if error.code() != *code || !error.message().contains(message) =>
                        {
                            let what = format!("expected '{message}' [{code}], got {}", shown(&error));
                            report.failures.push(fail(None, what, None));
                        }
                        _ => report.outcome = format!("refused: {}", shown(&error)),
                    },
                }
            }
        }
        Ok(report)
    }

    /// Runs the vector as a build would, but for the store.
    fn outputs(&self, vector: &Vector, tile_bytes: u64, pool: &rayon::ThreadPool) -> Result<Outputs> {
        let tensors = vector.source.tensors();
        let located: Vec<_> = vector.inputs.iter().map(|input| &tensors[&input.name]).collect();
        let types: Vec<plan::Input<'_>> = vector
            .inputs
            .iter()
            .zip(&located)
            .map(|(input, source)| (input.role.as_str(), input.index, &source.tensor))
            .collect();
        let tp = effective_tp(self.module, vector.tp);
        let request = plan::request(&vector.params, &types, vector.outputs.clone(), tp, tile_bytes)?;
        let lens: Vec<u64> = types.iter().map(|(_, _, tensor)| tensor.len_bytes()).collect();
        let plan = plan::ask(self.program.as_ref(), &request, &lens)?.map_err(|refusal| refusal.error)?;
        let named = |role: &String| Some((role.clone(), TensorName::new(role).ok()?));
        let step = Step {
            plan,
            program: Some(self.program.clone()),
            inputs: located
                .iter()
                .zip(&lens)
                .map(|(source, len)| Source::File { file: source.file, offset: source.offset, len: *len })
                .collect(),
            params: to_canonical(&vector.params)?,
            module: self.module.metadata().name.clone(),
            names: vector.outputs.iter().filter_map(named).collect(),
        };
        let graph = Graph::new(vector.source.clone(), vec![step]);
        let room = SpillRoom::memory_only(default_budget_bytes());
        let workshop = Workshop::new(&graph, pool, 1, &room, &Silent);
        vector
            .outputs
            .iter()
            .map(|role| {
                let (source, tensor) = graph.locate(&Origin::Output { application: 0, role: role.clone() })?;
                let mut whole = Whole(Vec::new());
                workshop.make(source, tensor.len_bytes(), &mut whole)?;
                Ok((role.clone(), (tensor, whole.0)))
            })
            .collect()
    }
}

fn shown(error: &Error) -> String {
    format!("{} [{}]", error.message(), error.code())
}

/// Keeps a tensor's bytes.
struct Whole(Vec<u8>);

impl Sink for Whole {
    fn piece(&mut self, bytes: &[u8], _: Option<&[u8]>) -> Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }
}
