//! `weightmill explain`.

use std::path::PathBuf;
use std::process::ExitCode;

use super::args::Global;
use super::output::{self, Style};
use super::progress::Bar;
use super::session;
use crate::checkpoint::Checkpoint;
use crate::digest::ActionKey;
use crate::error::{Code, Error, Result, nearest};
use crate::execute::folder_of;
use crate::lineage::{self, Asked, Explanation, Found, How, Link, Ranges, SourceUse, StepUse};
use crate::modules::{Library, parse_argument};
use crate::recipe::Recipe;
use crate::sandbox::engine;
use crate::store::document::{EntryDocument, TensorRecord};
use crate::store::{Lease, Verify};
use crate::tensor::{TensorName, TensorType};

const EXAMPLES: &str = "Examples:
  weightmill explain --entry 9f3c1d2a --tensor model.layers.0.self_attn.qkv.weight
  weightmill explain --entry 9f3c1d2a --tensor lm_head.weight --checkpoint llama-3-8b
  weightmill explain --entry 9f3c1d2a --tensor h.0.w --recipe recipe.toml --json

No tensor is read, unless --checkpoint is given: then the sources are found in its files, and their
bytes compared with the digests that the entry was made from.";

/// How many ranges, sources and inputs are listed for people.
const SHOWN_RANGES: usize = 4;
const SHOWN_TENSORS: usize = 16;

/// Which source bytes, modules and parameters made a tensor.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// The entry: its key, or the beginning of it
    #[arg(long, value_name = "KEY")]
    entry: String,
    /// The tensor, by its name in the entry
    #[arg(long, value_name = "NAME")]
    tensor: String,
    /// The checkpoint that the entry was made from: adds files and offsets
    #[arg(long, value_name = "PATH")]
    checkpoint: Option<PathBuf>,
    /// The recipe that the entry was made with: where modules are that are neither shipped nor in
    /// the store
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// A module that is neither shipped nor in the store
    #[arg(long = "module", value_name = "FILE")]
    modules: Vec<String>,
}

/// A tensor of an entry.
struct Subject<'a> {
    name: TensorName,
    /// What the name is an alias of.
    alias_of: Option<&'a TensorName>,
    record: &'a TensorRecord,
    tensor: TensorType,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<ExitCode> {
    let store = session::wanted_store(global)?;
    let key = session::find_key(&store, &args.entry)?;
    let lease = store.lease(&key, Verify::Never, &session::pool(None)?, &Bar::new())?;
    let lease = lease.ok_or_else(|| super::store::missing(&key))?;
    let subject = subject(lease.document(), &args.tensor)?;
    let action = store.action(&key)?.ok_or_else(|| {
        Error::new(Code::SourceUnavailable, format!("the store has no action of the entry {key}"))
            .hint("build the entry here with its recipe and checkpoint")
    })?;

    let library = Library::new(Some(store.clone()));
    if let Some(recipe) = &args.recipe {
        let recipe = Recipe::load(recipe)?;
        let folder = folder_of(recipe.file());
        recipe.steps().iter().try_for_each(|step| library.load(step.module(), folder).map(drop))?;
    }
    for module in &args.modules {
        library.load(&parse_argument(module)?, ".".as_ref())?;
    }
    let explanation = lineage::explain(&Asked {
        action: &action,
        tensor: &subject.record.name,
        tensor_type: &subject.tensor,
        lineages: &lineage::read_all(&store, &key)?,
        module: &|digest| library.by_digest(digest),
        engine: engine(session::PLAN_ENGINE)?.as_ref(),
    })?;

    let found = match &args.checkpoint {
        Some(path) => {
            let bar = Bar::new();
            let found = lineage::locate(&Checkpoint::open(path)?, &explanation.sources, &bar)?;
            bar.clear();
            Some(found)
        }
        None => None,
    };
    let mut view = Shown { key: &key, lease: &lease, subject: &subject, explanation, found };
    if global.json {
        output::json(&view.document());
    } else {
        view.print();
    }
    Ok(ExitCode::SUCCESS)
}

fn subject<'a>(document: &'a EntryDocument, text: &str) -> Result<Subject<'a>> {
    let alias = document.aliases.iter().find(|alias| alias.name.as_str() == text);
    let name = alias.map_or(text, |alias| alias.of.as_str());
    let record = document.tensors.iter().find(|tensor| tensor.name.as_str() == name);
    let record = record.ok_or_else(|| {
        let names = document.tensors.iter().map(|t| &t.name).chain(document.aliases.iter().map(|a| &a.name));
        let message = format!("the entry has no tensor '{}'", crate::plan::printable(text));
        let error = Error::new(Code::MissingInput, message);
        match nearest(text, names.map(TensorName::as_str)) {
            Some(near) => error.hint(format!("did you mean {near}? `weightmill store show` lists all")),
            None => error.hint("`weightmill store show` lists the entry's tensors"),
        }
    })?;
    let tensor = TensorType::new(record.dtype, record.shape.clone());
    let tensor =
        tensor.ok_or_else(|| Error::new(Code::CorruptBlob, format!("the entry's tensor {name} has no size")))?;
    Ok(Subject { name: TensorName::new(text)?, alias_of: alias.map(|alias| &alias.of), record, tensor })
}

/// Everything that is shown.
struct Shown<'a> {
    key: &'a ActionKey,
    lease: &'a Lease,
    subject: &'a Subject<'a>,
    explanation: Explanation,
    found: Option<Vec<Found>>,
}

impl Shown<'_> {
    fn block(&self) -> &str {
        let blocks = &self.lease.document().blocks;
        blocks.iter().find(|b| b.shards.contains(&self.subject.record.shard)).map_or("", |b| b.name.as_str())
    }

    fn document(&mut self) -> serde_json::Value {
        let record = self.subject.record;
        let shard = &self.lease.document().shards[record.shard as usize];
        let found = self.found.take();
        let sources: Vec<_> = self
            .explanation
            .sources
            .iter_mut()
            .enumerate()
            .map(|(i, source)| {
                let found = found.as_ref().map(|found| &found[i]);
                let in_file = found.and_then(|found| Some(shifted(source.ranges.as_mut()?, found.offset)));
                serde_json::json!({
                    "name": source.name.as_ref().or(found.map(|found| &found.name)),
                    "dtype": source.tensor.dtype(),
                    "shape": source.tensor.shape(),
                    "digest": source.digest,
                    "ranges": source.ranges.as_mut().map(|ranges| ranges.spans().to_vec()),
                    "exact": source.ranges.as_ref().is_none_or(Ranges::is_exact),
                    "file": found.map(|found| serde_json::json!({
                        "name": found.file.to_string_lossy(), "offset": found.offset, "ranges": in_file,
                    })),
                })
            })
            .collect();
        let steps: Vec<_> = self.explanation.steps.iter_mut().map(step_document).collect();
        serde_json::json!({
            "entry": self.key,
            "content_digest": self.lease.document().content_digest,
            "tensor": {
                "name": self.subject.name,
                "alias_of": self.subject.alias_of,
                "dtype": record.dtype,
                "shape": record.shape,
                "digest": record.digest,
                "block": self.block(),
                "shard": { "digest": shard.digest, "offset": record.offset, "bytes": self.subject.tensor.len_bytes() },
            },
            "from": link_document(&self.explanation.from),
            "steps": steps,
            "sources": sources,
            "names_known": self.explanation.named,
        })
    }

    fn print(&mut self) {
        let style = Style::stdout();
        let (subject, record) = (self.subject, self.subject.record);
        output::line(format!("{}  {}  digest {}", style.bold(subject.name.as_str()), subject.tensor, record.digest));
        if let Some(of) = subject.alias_of {
            output::line(format!("is another name of {of}"));
        }
        output::line(format!(
            "entry {}, block {}, shard {} at byte {}",
            self.key.short(),
            self.block(),
            self.lease.document().shards[record.shard as usize].digest.short(),
            record.offset
        ));
        let sources = &self.explanation.sources;
        let names: Vec<String> = sources.iter().enumerate().map(|(i, s)| self.source_name(i, s)).collect();
        if self.explanation.steps.is_empty() {
            output::line("passed through unchanged");
        }
        for (number, step) in self.explanation.steps.iter_mut().enumerate() {
            print_step(number, step, &names);
        }
        output::line("");
        let used = |source: &SourceUse| source.ranges.as_ref().is_none_or(|ranges| !ranges.is_empty());
        let count = self.explanation.sources.iter().filter(|source| used(source)).count();
        output::line(style.bold(&output::count(count, "source tensor")));
        let found = self.found.as_deref();
        let sources = self.explanation.sources.iter_mut().enumerate();
        for (i, source) in sources.filter(|(_, source)| used(source)).take(SHOWN_TENSORS) {
            output::line(format!("  {}  {}  digest {}", names[i], source.tensor, source.digest.short()));
            let tensor = source.tensor.clone();
            output::line(format!("      {}", ranges_text(source.ranges.as_mut(), &tensor)));
            if let Some(found) = found.map(|found| &found[i]) {
                let whole = || vec![(found.offset, found.offset + tensor.len_bytes())];
                let in_file = source.ranges.as_mut().map_or_else(whole, |ranges| shifted(ranges, found.offset));
                output::line(format!("      in {}: bytes {}", found.file.display(), listed(&in_file, 1)));
            }
        }
        more(count, SHOWN_TENSORS, "source tensor");
        if count < names.len() {
            output::line(format!("  {} gave their dtype and shape, but no byte", names.len() - count));
        }
        if !self.explanation.named && found.is_none() {
            output::line(
                "the names of the sources were not recorded with this entry: --checkpoint finds them by content",
            );
        }
    }

    /// The name of a source, or what stands for it.
    fn source_name(&self, number: usize, source: &SourceUse) -> String {
        let found = self.found.as_ref().map(|found| &found[number].name);
        match source.name.as_ref().or(found) {
            Some(name) => name.to_string(),
            None => format!("(a tensor with the digest {})", source.digest.short()),
        }
    }
}

fn step_document(step: &mut StepUse) -> serde_json::Value {
    let inputs: Vec<_> = step
        .inputs
        .iter_mut()
        .map(|input| {
            serde_json::json!({
                "role": input.role,
                "index": input.index,
                "from": link_document(&input.link),
                "dtype": input.tensor.as_ref().map(TensorType::dtype),
                "shape": input.tensor.as_ref().map(TensorType::shape),
                "ranges": input.ranges.as_mut().map(|ranges| ranges.spans().to_vec()),
            })
        })
        .collect();
    let outputs = step.outputs.iter().map(|output| {
        serde_json::json!({
            "role": output.role,
            "name": output.name,
            "dtype": output.planned.as_ref().map(|(tensor, _)| tensor.dtype()),
            "shape": output.planned.as_ref().map(|(tensor, _)| tensor.shape()),
            "how": output.planned.as_ref().map(|(_, how)| how_text(*how)),
        })
    });
    serde_json::json!({
        "application": step.application,
        "module": step.module,
        "planned": step.planned,
        "params": step.params,
        "tp": step.tp,
        "recipe_step": step.recipe_step.as_ref().map(|(number, _)| number),
        "captures": step.recipe_step.as_ref().map(|(_, captures)| {
            captures.iter().map(|(name, value)| (name.clone(), value.clone().into())).collect::<serde_json::Map<_, _>>()
        }),
        "outputs": outputs.collect::<Vec<_>>(),
        "inputs": inputs,
    })
}

fn link_document(link: &Link) -> serde_json::Value {
    match link {
        Link::Source(source) => serde_json::json!({ "source": source }),
        Link::Output { step, role } => serde_json::json!({ "step": step, "output": role }),
    }
}

fn how_text(how: How) -> &'static str {
    match how {
        How::Moved => "moved",
        How::Computed => "computed",
    }
}

/// One step: module, parameters, outputs, inputs. Steps are numbered as they
/// stand here, from the tensor towards the sources.
fn print_step(number: usize, step: &mut StepUse, names: &[String]) {
    let style = Style::stdout();
    let module = &step.module;
    let name = module.name.as_deref().unwrap_or("a module whose name is not known");
    let version = module.version.as_ref().map(|v| format!(" {v}")).unwrap_or_default();
    let of_recipe = step.recipe_step.as_ref().map(|(number, captures)| {
        let captures: Vec<String> = captures.iter().map(|(name, value)| format!("{name} = {value}")).collect();
        let captures = if captures.is_empty() { String::new() } else { format!(" ({})", captures.join(", ")) };
        format!("  step {number} of the recipe{captures}")
    });
    output::line("");
    output::line(format!(
        "[{}] {}{version}  sha256:{}{}",
        number + 1,
        style.bold(name),
        module.digest.short(),
        of_recipe.unwrap_or_default()
    ));
    output::line(format!("    params  {}", step.params));
    if let Some(tp) = step.tp {
        output::line(format!("    tp      rank {} of {}", tp.rank, tp.size));
    }
    for out in &step.outputs {
        let name = out.name.as_ref().map(|name| format!("  {name}")).unwrap_or_default();
        let made = match &out.planned {
            Some((tensor, how)) => format!("  {tensor}, {}", how_text(*how)),
            None => String::new(),
        };
        output::line(format!("    output  {}{name}{made}", out.role));
    }
    for input in step.inputs.iter_mut().take(SHOWN_TENSORS) {
        let from = match &input.link {
            Link::Source(source) => names[*source].clone(),
            Link::Output { step, role } => format!("[{}].{role}", step + 1),
        };
        let role = if input.index > 0 { format!("{}[{}]", input.role, input.index) } else { input.role.clone() };
        let bytes = match &input.tensor {
            Some(tensor) => ranges_text(input.ranges.as_mut(), &tensor.clone()),
            None => "which bytes is not known".to_string(),
        };
        output::line(format!("    input   {role} = {from}: {bytes}"));
    }
    if step.inputs.len() > SHOWN_TENSORS {
        output::line(format!("            and {} more (--json lists all)", step.inputs.len() - SHOWN_TENSORS));
    }
    if !step.planned {
        output::line(format!(
            "    sha256:{} is not at hand, so which bytes it read is not known: name it with --module or --recipe",
            module.digest
        ));
    }
}

fn more(count: usize, shown: usize, what: &str) {
    if count > shown {
        output::line(format!("  and {} (--json lists all)", output::count(count - shown, &format!("more {what}"))));
    }
}

/// Ranges of a tensor's bytes, as rows of its first dimension where they are.
fn ranges_text(ranges: Option<&mut Ranges>, tensor: &TensorType) -> String {
    let Some(ranges) = ranges else { return "which bytes is not known".to_string() };
    let about = if ranges.is_exact() { "" } else { " (too many ranges to tell apart: what covers them)" };
    let len = tensor.len_bytes();
    let spans = ranges.spans();
    match spans {
        [] => return "no byte of it".to_string(),
        [(0, end)] if *end == len => return format!("all {len} bytes{about}"),
        _ => {}
    }
    let row = match tensor.shape() {
        [rows, _, ..] if *rows > 0 => len / rows,
        _ => 0,
    };
    let by_row = row > 0 && spans.iter().all(|(start, end)| start.is_multiple_of(row) && end.is_multiple_of(row));
    let (unit, shown) = if by_row { ("rows", listed(spans, row)) } else { ("bytes", listed(spans, 1)) };
    let total: u64 = spans.iter().map(|(start, end)| end - start).sum();
    format!("{unit} {shown} ({total} of {len} bytes){about}")
}

/// The first few ranges, in units of `unit` bytes.
fn listed(spans: &[(u64, u64)], unit: u64) -> String {
    let shown = spans.iter().take(SHOWN_RANGES).map(|(start, end)| format!("{}..{}", start / unit, end / unit));
    let shown = shown.collect::<Vec<_>>().join(", ");
    match spans.len().saturating_sub(SHOWN_RANGES) {
        0 => shown,
        1 => format!("{shown} and 1 more range"),
        n => format!("{shown} and {n} more ranges"),
    }
}

/// Ranges of a tensor as ranges of the file that it begins at `offset` of.
fn shifted(ranges: &mut Ranges, offset: u64) -> Vec<(u64, u64)> {
    ranges.spans().iter().map(|(start, end)| (offset + start, offset + end)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Dtype;

    #[test]
    fn ranges_read_well() {
        let tensor = TensorType::new(Dtype::BF16, vec![8, 4]).unwrap();
        let text = |spans: &[(u64, u64)]| {
            let mut ranges = Ranges::default();
            spans.iter().for_each(|(start, end)| ranges.add(*start, *end));
            ranges_text(Some(&mut ranges), &tensor)
        };
        assert_eq!(text(&[(0, 64)]), "all 64 bytes");
        assert_eq!(text(&[(8, 24), (40, 48)]), "rows 1..3, 5..6 (24 of 64 bytes)");
        assert_eq!(text(&[(8, 10), (12, 16)]), "bytes 8..10, 12..16 (6 of 64 bytes)");
        let many: Vec<(u64, u64)> = (0..8).map(|i| (8 * i, 8 * i + 2)).collect();
        assert_eq!(text(&many), "bytes 0..2, 8..10, 16..18, 24..26 and 4 more ranges (16 of 64 bytes)");
        assert_eq!(text(&[]), "no byte of it");
        assert_eq!(ranges_text(None, &tensor), "which bytes is not known");
    }
}
