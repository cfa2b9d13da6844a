//! `weightmill module check`.
//!
//! Modules cannot break determinism: every tile has a fresh instance, and the
//! engines leave nothing open. So what this finds is a fault of an engine or a
//! plan that cuts its tiles so that the cut shows, and, as a warning, a module
//! that hopes to carry something from one tile to the next.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use super::reused::{Outcome, Reused};
use super::tiles::{Application, Made, Order, fresh, make};
use super::vectors::{self, Expected};
use super::{difference, samples};
use crate::cli::args::Global;
use crate::cli::output::{self, Style};
use crate::error::{Error, Fault, Result};
use crate::execute::TILE_BYTES;
use crate::sandbox::{EngineName, Module, Program, TileRequest, engine};

const EXAMPLES: &str = "Examples:
  weightmill module check ./mine.wasm
  weightmill module check ./mine.wasm --vectors vectors
  weightmill module check cast --json

The inputs are those of the golden vectors: --vectors, or vectors/ beside the file
or in its crate. Shipped modules bring inputs of their own. Without any, the static
rules are all that is checked. Exits 4 if the module cannot be relied on.";

/// Tiles that are tried in a used instance.
const REUSED_TILES: u32 = 64;

/// Check a module.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Args {
    /// A shipped name, a path, or sha256:<hex>
    module: String,
    /// The folder with golden vectors, whose inputs are used
    #[arg(long, value_name = "DIR")]
    vectors: Option<PathBuf>,
}

/// One line of the report.
#[derive(serde::Serialize)]
struct Finding {
    check: &'static str,
    ok: bool,
    detail: String,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let module = super::load(global, &args.module)?;
    let mut findings = vec![rules(&module)];
    let (native, interpreted, compiled) = compile(&module)?;
    findings.push(compiled);
    let mut warnings = exported_state(&module);
    let applications = applications(args, &module)?;
    if applications.is_empty() {
        warnings.push("nothing was run: there are no vectors; name their folder with --vectors".into());
    } else {
        let subject = Subject { module: &module, native: native.as_ref(), interpreted: interpreted.as_ref() };
        findings.extend(subject.compare(&applications)?);
        let (finding, warning) = subject.state(&applications)?;
        findings.push(finding);
        warnings.extend(warning);
    }
    let ok = findings.iter().all(|finding| finding.ok);
    if global.json {
        output::json(&serde_json::json!({
            "digest": module.digest(), "name": module.metadata().name, "ok": ok,
            "applications": applications.len(), "findings": findings, "warnings": warnings,
        }));
    } else {
        print(&module, &findings, &warnings);
    }
    Ok(ExitCode::from(if ok { 0 } else { Fault::Module.exit_status() }))
}

fn print(module: &Module, findings: &[Finding], warnings: &[String]) {
    let style = Style::stdout();
    output::line(format!("{} {}  sha256 {}", module.metadata().name, module.metadata().version, module.digest()));
    for finding in findings {
        let mark = if finding.ok { style.green("ok  ") } else { style.red("FAIL") };
        output::line(format!("  {mark}  {:<16} {}", finding.check, finding.detail));
    }
    for warning in warnings {
        output::line(format!("{}{warning}", style.bold("note: ")));
    }
}

fn rules(module: &Module) -> Finding {
    let what = output::count(module.functions() as usize, "function");
    let detail = format!("{what}, {} bytes, no imports; every rule holds", module.bytes().len());
    Finding { check: "static rules", ok: true, detail }
}

type Compiled = (Arc<dyn Program>, Arc<dyn Program>, Finding);

fn compile(module: &Module) -> Result<Compiled> {
    let timed = |name: EngineName| {
        let start = Instant::now();
        let program = engine(name)?.compile(module)?;
        Ok::<_, Error>((program, format!("{name} in {}", output::duration(start.elapsed()), name = name.as_str())))
    };
    let (native, first) = timed(EngineName::Wasmtime)?;
    let (interpreted, second) = timed(EngineName::Wasmi)?;
    Ok((native, interpreted, Finding { check: "compiles", ok: true, detail: format!("{first}, {second}") }))
}

/// Exports that look as if somebody would read them between calls.
fn exported_state(module: &Module) -> Vec<String> {
    let mutable = module.exports().iter().filter(|e| e.what.starts_with("mutable global"));
    mutable
        .map(|e| {
            format!(
                "it exports the mutable global '{}': nobody reads it, and its value is lost after every call",
                e.name.escape_debug()
            )
        })
        .collect()
}

fn applications(args: &Args, module: &Module) -> Result<Vec<Application>> {
    let Some(folder) = args.vectors.clone().or_else(|| super::vectors_near(&args.module)) else {
        return samples::of(module);
    };
    let vectors = vectors::load(&folder)?;
    let computed = vectors.into_iter().filter(|vector| !matches!(vector.expected, Expected::Error { .. }));
    computed
        .map(|vector| {
            let inputs = vector.inputs.iter().map(|input| {
                let (tensor, bytes) = vectors::read(&vector.source, input.name.as_str())?;
                Ok((input.role.clone(), input.index, tensor, bytes))
            });
            Ok(Application {
                inputs: inputs.collect::<Result<_>>()?,
                name: vector.name,
                params: vector.params,
                tp: vector.tp,
                outputs: vector.outputs,
            })
        })
        .collect()
}

struct Subject<'a> {
    module: &'a Module,
    native: &'a dyn Program,
    interpreted: &'a dyn Program,
}

impl Subject<'_> {
    /// A tile size that cuts an application into several tiles.
    fn small(application: &Application) -> u64 {
        (application.input_bytes() / 16).clamp(64, TILE_BYTES)
    }

    fn make(&self, program: &dyn Program, application: &Application, tile_bytes: u64, order: Order) -> Result<Made> {
        let run = &mut |request: &TileRequest<'_>, windows: &[Vec<u8>]| fresh(program, request, windows);
        make((self.module, program), application, tile_bytes, order, run)
            .map_err(|e| e.context(format!("{} of {}", application.name, self.module.metadata().name)))
    }

    /// The same bytes, whatever is changed that must not matter.
    fn compare(&self, applications: &[Application]) -> Result<Vec<Finding>> {
        let ways: [(&'static str, &dyn Program, bool, Order); 4] = [
            ("again", self.native, true, Order::Ascending),
            ("shuffled, twice", self.native, true, Order::ShuffledTwice),
            ("other tile size", self.native, false, Order::Ascending),
            ("other engine", self.interpreted, true, Order::Ascending),
        ];
        let mut wrong: [Vec<String>; 4] = Default::default();
        let mut tiles = [0; 4];
        for application in applications {
            let small = Self::small(application);
            let baseline = self.make(self.native, application, small, Order::Ascending)?;
            for (way, (_, program, keep, order)) in ways.iter().enumerate() {
                let made = self.make(*program, application, if *keep { small } else { TILE_BYTES }, *order)?;
                tiles[way] += made.tiles;
                wrong[way].extend(disagreement(application, &made, &baseline));
            }
        }
        let count = output::count(applications.len(), "application");
        Ok(ways
            .iter()
            .zip(wrong)
            .zip(tiles)
            .map(|(((check, ..), wrong), tiles)| Finding {
                check,
                ok: wrong.is_empty(),
                detail: match wrong.is_empty() {
                    true => format!("the same bytes: {count}, {}", output::count(tiles as usize, "tile")),
                    false => wrong.join("; "),
                },
            })
            .collect())
    }

    /// Whether tiles would see what earlier ones left, if a host let them.
    fn state(&self, applications: &[Application]) -> Result<(Finding, Option<String>)> {
        let (mut tried, mut kept) = (0, None);
        for application in applications {
            let Some(mut reused) = Reused::new(self.module) else { continue };
            let mut left = REUSED_TILES;
            for _ in 0..2 {
                let mut run = |request: &TileRequest<'_>, windows: &[Vec<u8>]| {
                    let own = fresh(self.native, request, windows)?;
                    if left > 0 && kept.is_none() {
                        left -= 1;
                        tried += 1;
                        kept = match reused.run(request, windows) {
                            Outcome::Bytes(bytes) if bytes == own => None,
                            Outcome::Bytes(_) => Some("compute other bytes".to_string()),
                            Outcome::Refused => Some("refuse its data".to_string()),
                            Outcome::Trapped(why) => Some(format!("trap ({})", crate::plan::printable(&why))),
                            Outcome::NoRoom => {
                                left = 0;
                                None
                            }
                        };
                    }
                    Ok(own)
                };
                make((self.module, self.native), application, Self::small(application), Order::Ascending, &mut run)?;
            }
        }
        let warning = kept.as_ref().map(|what| format!(
            "it keeps state between tiles and gains nothing: in an instance that had run another tile it would {what}, \
             but every tile has an instance of its own; what tiles share belongs into a scratch tensor"
        ));
        let detail = match (tried, &kept) {
            (_, Some(_)) => "none survives a tile, though the module keeps some".to_string(),
            (0, None) => "no tile computes, so there is none".to_string(),
            (n, None) => format!("none: {} gave the same bytes in one instance, too", output::count(n, "run")),
        };
        Ok((Finding { check: "state", ok: true, detail }, warning))
    }
}

/// How `made` is not `baseline`.
fn disagreement(application: &Application, made: &Made, baseline: &Made) -> Option<String> {
    if let Some(tile) = &made.unsteady {
        return Some(format!("{}: {tile} gave other bytes the second time", application.name));
    }
    let pairs = made.outputs.iter().zip(&baseline.outputs);
    pairs.into_iter().find_map(|((role, (tensor, bytes)), (other, (expected_tensor, expected)))| {
        if (role, tensor) != (other, expected_tensor) {
            return Some(format!("{}: {role} is {tensor}, was {other} {expected_tensor}", application.name));
        }
        difference::first(tensor, bytes, expected).map(|d| format!("{}: {role} differs, {d}", application.name))
    })
}
