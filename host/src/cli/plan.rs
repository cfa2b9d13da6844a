//! `weightmill plan`.

use std::collections::BTreeMap;
use std::process::ExitCode;

use super::args::{Global, RecipeArgs};
use super::output::{self, Style};
use super::session::{self, Session};
use crate::error::Result;
use crate::execute::{Graph, Outline, Step, arrange};
use crate::plan::Body;
use crate::recipe::Origin;

const EXAMPLES: &str = "Examples:
  weightmill plan --recipe recipes/gpt-neox.toml --checkpoint pythia-160m
  weightmill plan --recipe recipes/llama.toml --checkpoint llama-3-8b --tp-size 8 --tp-rank 0 --json";

/// What would be done. Reads no tensor.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
}

/// How many outputs of a module are made in which way.
#[derive(Default)]
struct Use {
    applications: usize,
    views: usize,
    tiles: usize,
    bytes: u64,
    dtypes: std::collections::BTreeSet<String>,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let store = session::existing_store(global)?;
    let session = Session::open(&args.recipe, store.as_ref(), None)?;
    let outline = session.outline()?;
    let steps = outline.steps()?;
    let uses = uses(&steps);
    let graph = Graph::new(outline.checkpoint().clone(), steps);
    let shards = arrange(&graph, &outline.resolution)?;
    if global.json {
        output::json(&document(&outline, &graph, &shards, &uses)?);
        return Ok(ExitCode::SUCCESS);
    }
    output::line(headline(&outline));
    output::line(summary(&outline, &uses));
    let rows: Vec<Vec<String>> = outline
        .resolution
        .blocks
        .iter()
        .enumerate()
        .map(|(i, block)| {
            let bytes =
                shards.iter().filter(|s| s.block == i).flat_map(|s| &s.tensors).map(|w| w.tensor.len_bytes()).sum();
            let count = shards.iter().filter(|s| s.block == i).count();
            vec![block.name.clone(), block.tensors.len().to_string(), count.to_string(), output::bytes(bytes)]
        })
        .collect();
    output::line(output::table(&["block", "tensors", "shards", "size"], &[1, 2, 3], &rows));
    if args.tensors {
        let rows: Vec<Vec<String>> = shards
            .iter()
            .flat_map(|s| &s.tensors)
            .map(|w| vec![w.name.to_string(), w.tensor.to_string(), from(&outline, &w.name)])
            .collect();
        output::line("");
        output::line(output::table(&["tensor", "type", "from"], &[], &rows));
    }
    Ok(ExitCode::SUCCESS)
}

fn uses(steps: &[Step]) -> BTreeMap<String, Use> {
    let mut uses: BTreeMap<String, Use> = BTreeMap::new();
    for step in steps {
        let entry = uses.entry(step.module.clone()).or_default();
        entry.applications += 1;
        for target in &step.plan.targets[..step.plan.outputs] {
            entry.bytes += target.tensor.len_bytes();
            match &target.body {
                Body::View(_) => entry.views += 1,
                Body::Tiles(_) => {
                    entry.tiles += 1;
                    entry.dtypes.insert(target.tensor.dtype().to_string());
                }
            }
        }
    }
    uses
}

/// The first line: recipe, tensors, blocks, tensor parallel size.
pub(super) fn headline(outline: &Outline<'_>) -> String {
    let resolution = &outline.resolution;
    let tp = outline.tp();
    let rank = if tp.size > 1 { format!(" rank {}", tp.rank) } else { String::new() };
    let recipe = Style::stdout().bold(outline.recipe().name());
    format!(
        "{recipe} · {} · {} · tp {}{rank}",
        output::count(resolution.tensors.len(), "tensor"),
        output::count(resolution.blocks.len(), "block"),
        tp.size
    )
}

fn summary(outline: &Outline<'_>, uses: &BTreeMap<String, Use>) -> String {
    let mut parts: Vec<String> = uses
        .iter()
        .map(|(module, u)| {
            let how = match (u.views, u.tiles) {
                (_, 0) => "moved".to_string(),
                (0, _) => format!("computed ({})", u.dtypes.iter().cloned().collect::<Vec<_>>().join(", ")),
                _ => "moved and computed".to_string(),
            };
            format!("{module} {} × {how}, {}", u.applications, output::bytes(u.bytes))
        })
        .collect();
    let through = outline.resolution.tensors.values().filter(|o| matches!(o, Origin::Source(_))).count();
    parts.push(format!("{through} pass through"));
    if !outline.resolution.aliases.is_empty() {
        parts.push(format!("{} tied", outline.resolution.aliases.len()));
    }
    let dropped = outline.resolution.sources.dropped.len() + outline.resolution.sources.unmatched_dropped.len();
    if dropped > 0 {
        parts.push(format!("{dropped} dropped"));
    }
    parts.join("   ")
}

fn from(outline: &Outline<'_>, name: &crate::tensor::TensorName) -> String {
    match outline.resolution.tensors.get(name) {
        Some(Origin::Source(source)) => source.to_string(),
        Some(Origin::Output { application, role }) => {
            let application = &outline.resolution.applications[*application];
            let inputs: Vec<&str> = application.inputs.iter().map(|i| i.name.as_str()).collect();
            let shown = if inputs.len() > 4 { format!("{} tensors", inputs.len()) } else { inputs.join(", ") };
            format!("{:?}.{role}({shown})", application.module)
        }
        None => String::new(),
    }
}

fn document(
    outline: &Outline<'_>,
    graph: &Graph,
    shards: &[crate::execute::ShardPlan],
    uses: &BTreeMap<String, Use>,
) -> Result<serde_json::Value> {
    let resolution = &outline.resolution;
    let (mut moved, mut computed, mut through) = (0_u64, 0_u64, 0_u64);
    let mut tensors = Vec::new();
    for wanted in shards.iter().flat_map(|s| s.tensors.iter().map(move |w| (s.block, w))) {
        let (block, wanted) = wanted;
        let len = wanted.tensor.len_bytes();
        let how = graph.how(wanted.source);
        match how {
            "computed" => computed += len,
            "moved" => moved += len,
            _ => through += len,
        }
        let origin = match &resolution.tensors[&wanted.name] {
            Origin::Source(name) => serde_json::json!({ "source": name }),
            Origin::Output { application, role } => {
                let inputs = &resolution.applications[*application].inputs;
                let names: Vec<_> = inputs.iter().map(|i| &i.name).collect();
                let module = outline.modules[*application].metadata().name.clone();
                serde_json::json!({ "module": module, "output": role, "inputs": names })
            }
        };
        tensors.push(serde_json::json!({
            "name": wanted.name, "dtype": wanted.tensor.dtype(), "shape": wanted.tensor.shape(), "bytes": len,
            "block": resolution.blocks[block].name, "how": how, "from": origin,
        }));
    }
    let blocks: Vec<_> = resolution.blocks.iter().enumerate().map(|(i, block)| {
        let own = shards.iter().filter(|s| s.block == i);
        let bytes: u64 = own.clone().flat_map(|s| &s.tensors).map(|w| w.tensor.len_bytes()).sum();
        serde_json::json!({ "name": block.name, "tensors": block.tensors.len(), "shards": own.count(), "bytes": bytes })
    }).collect();
    let modules: BTreeMap<_, _> = uses.iter().map(|(name, u)| {
        (name, serde_json::json!({ "applications": u.applications, "views": u.views, "tiles": u.tiles, "bytes": u.bytes }))
    }).collect();
    Ok(serde_json::json!({
        "recipe": outline.recipe().name(),
        "tp": outline.tp(),
        "source_bytes": outline.checkpoint().tensor_bytes(),
        "bytes": moved + computed + through,
        "bytes_moved": moved,
        "bytes_computed": computed,
        "bytes_passed_through": through,
        "modules": modules,
        "blocks": blocks,
        "tensors": tensors,
        "aliases": resolution.aliases,
        "dropped": resolution.sources.dropped,
        "unmatched_dropped": resolution.sources.unmatched_dropped,
    }))
}
