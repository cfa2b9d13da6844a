//! From a final tensor back to the sources.
//!
//! Two passes over the applications that the tensor comes from. Forwards,
//! each is planned from metadata, so that the next one's input types are
//! known. Backwards, the bytes that are needed of each output become bytes
//! that are needed of its inputs: of a view exactly, of tiles tile by tile.

use std::collections::BTreeMap;
use std::sync::Arc;

use weightmill_guest::abi::Tp;

use super::action::{ActionText, ApplicationText, FromText};
use super::explanation::{Explanation, How, InputUse, Link, OutputUse, SourceUse, StepUse};
use super::ranges::Ranges;
use super::reads;
use super::record::{ApplicationRecord, Lineage, OriginRecord};
use crate::attest::ModuleRow;
use crate::digest::{ApplicationDigest, ModuleDigest};
use crate::error::{Code, Error, Result};
use crate::execute::TILE_BYTES;
use crate::plan::{self, Body, CheckedPlan};
use crate::sandbox::{Engine, Module, Program};
use crate::tensor::{TensorName, TensorType};

/// Steps one behind the other, at most.
const DEPTH: usize = 1024;

/// What is to be explained, and what with.
pub struct Asked<'a> {
    /// The bytes of the entry's action.
    pub action: &'a [u8],
    /// The tensor; not an alias.
    pub tensor: &'a TensorName,
    /// What the entry says that it is.
    pub tensor_type: &'a TensorType,
    /// What builds recorded of names. The first that fits is used.
    pub lineages: &'a [Lineage],
    /// A module by its digest, if it is at hand.
    pub module: &'a dyn Fn(&ModuleDigest) -> Result<Option<Arc<Module>>>,
    /// What plans run on.
    pub engine: &'a dyn Engine,
}

/// Explains a tensor.
///
/// # Errors
/// `digest_mismatch` if the action contradicts itself, `source_unavailable` if
/// it is of another version; what a module's plan says.
pub fn explain(asked: &Asked<'_>) -> Result<Explanation> {
    let action = ActionText::read(asked.action)?;
    for lineage in asked.lineages {
        if let Some(walk) = Walk::of(&action, Some(lineage), asked.tensor)? {
            return walk.explain(asked, Some(lineage));
        }
    }
    match Walk::of(&action, None, asked.tensor)? {
        Some(walk) => walk.explain(asked, None),
        None => Err(Error::new(
            Code::DigestMismatch,
            format!("the entry's action does not know its tensor {}", asked.tensor),
        )),
    }
}

/// The modules that an action uses, ascending.
///
/// # Errors
/// `source_unavailable` if it is of another version.
pub fn modules_of(action: &[u8]) -> Result<Vec<ModuleDigest>> {
    Ok(ActionText::read(action)?.modules().into_iter().collect())
}

/// The applications and sources that a tensor comes from.
struct Walk<'a> {
    action: &'a ActionText,
    lineage: Option<&'a Lineage>,
    /// Dependencies first.
    nodes: Vec<Node<'a>>,
    known: BTreeMap<(ApplicationDigest, Option<usize>), usize>,
    sources: Vec<SourceUse>,
    root: Place,
}

struct Node<'a> {
    digest: ApplicationDigest,
    text: ApplicationText,
    record: Option<&'a ApplicationRecord>,
    inputs: Vec<Place>,
}

/// Where something is in a walk.
#[derive(Clone)]
enum Place {
    Source(usize),
    Output { node: usize, role: String },
}

/// What a walk has found out about a node.
#[derive(Default)]
struct Planned {
    module: Option<Arc<Module>>,
    plan: Option<CheckedPlan>,
    /// Of each input, as far as is known.
    types: Vec<Option<TensorType>>,
    /// Bytes needed of each target.
    needed: BTreeMap<usize, Ranges>,
    /// Outputs that are needed, and whether of one it is not known how much.
    roles: BTreeMap<String, ()>,
    unknown: bool,
    /// Bytes needed of each input; `None` if that is not known.
    ranges: Vec<Option<Ranges>>,
}

impl<'a> Walk<'a> {
    /// `None` if the action has no such tensor, or the lineage does not agree
    /// with it.
    fn of(action: &'a ActionText, lineage: Option<&'a Lineage>, tensor: &TensorName) -> Result<Option<Self>> {
        let Some(from) = action.tensor(tensor) else { return Ok(None) };
        let mut walk = Walk {
            action,
            lineage,
            nodes: Vec::new(),
            known: BTreeMap::new(),
            sources: Vec::new(),
            root: Place::Source(0),
        };
        let record = match lineage.map(|lineage| lineage.tensors.get(tensor)) {
            Some(None) => return Ok(None),
            Some(Some(record)) => Some(record),
            None => None,
        };
        let Some(root) = walk.place(from, record, 0)? else { return Ok(None) };
        walk.root = root;
        Ok(Some(walk))
    }

    /// Finds out what `from` is. `record` is what the lineage says of it.
    fn place(&mut self, from: &FromText, record: Option<&'a OriginRecord>, depth: usize) -> Result<Option<Place>> {
        if depth > DEPTH {
            return Err(Error::new(
                Code::DigestMismatch,
                format!("the entry's action has more than {DEPTH} steps in a row"),
            ));
        }
        match (from, record) {
            (FromText::Source { .. }, Some(OriginRecord::Output { .. }))
            | (FromText::Output { .. }, Some(OriginRecord::Source { .. })) => Ok(None),
            (FromText::Source { dtype, shape, digest }, record) => {
                let name = record.and_then(|record| match record {
                    OriginRecord::Source { source } => Some(source.clone()),
                    OriginRecord::Output { .. } => None,
                });
                let tensor = TensorType::new(*dtype, shape.clone()).ok_or_else(|| {
                    Error::new(Code::DigestMismatch, format!("the entry's action has a tensor {dtype} {shape:?}"))
                })?;
                let same = |s: &SourceUse| s.name == name && s.tensor == tensor && s.digest == *digest;
                let found = self.sources.iter().position(same);
                Ok(Some(Place::Source(found.unwrap_or_else(|| {
                    self.sources.push(SourceUse { name, tensor, digest: *digest, ranges: Some(Ranges::default()) });
                    self.sources.len() - 1
                }))))
            }
            (FromText::Output { application, output }, record) => {
                let position = match record {
                    Some(OriginRecord::Output { application, output: role }) if role == output => Some(*application),
                    Some(_) => return Ok(None),
                    None => None,
                };
                let node = self.node(*application, position, depth)?;
                Ok(node.map(|node| Place::Output { node, role: output.clone() }))
            }
        }
    }

    fn node(&mut self, digest: ApplicationDigest, position: Option<usize>, depth: usize) -> Result<Option<usize>> {
        if let Some(known) = self.known.get(&(digest, position)) {
            return Ok(Some(*known));
        }
        let text = self.action.application(&digest)?;
        let record = match (position, self.lineage) {
            (Some(position), Some(lineage)) => match lineage.applications.get(position) {
                Some(record) if record.digest == digest && record.inputs.len() == text.inputs.len() => Some(record),
                _ => return Ok(None),
            },
            _ => None,
        };
        let mut inputs = Vec::with_capacity(text.inputs.len());
        for (number, input) in text.inputs.iter().enumerate() {
            let Some(place) = self.place(&input.from, record.map(|record| &record.inputs[number]), depth + 1)? else {
                return Ok(None);
            };
            inputs.push(place);
        }
        self.nodes.push(Node { digest, text, record, inputs });
        self.known.insert((digest, position), self.nodes.len() - 1);
        Ok(Some(self.nodes.len() - 1))
    }

    fn explain(mut self, asked: &Asked<'_>, lineage: Option<&Lineage>) -> Result<Explanation> {
        let mut planned = self.plan(asked)?;
        self.need(asked, &mut planned)?;
        let last = self.nodes.len().saturating_sub(1);
        let link = |place: &Place| match place {
            Place::Source(source) => Link::Source(*source),
            Place::Output { node, role } => Link::Output { step: last - node, role: role.clone() },
        };
        let from = link(&self.root);
        let mut steps = Vec::with_capacity(self.nodes.len());
        for (node, planned) in self.nodes.into_iter().zip(planned).rev() {
            steps.push(step(node, planned, lineage, &link));
        }
        Ok(Explanation { from, steps, sources: self.sources, named: lineage.is_some() })
    }

    /// Forwards: the plans.
    fn plan(&self, asked: &Asked<'_>) -> Result<Vec<Planned>> {
        let mut programs: BTreeMap<ModuleDigest, Arc<dyn Program>> = BTreeMap::new();
        let mut planned: Vec<Planned> = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let type_of = |place: &Place| match place {
                Place::Source(source) => Some(self.sources[*source].tensor.clone()),
                Place::Output { node, role } => {
                    let plan = planned[*node].plan.as_ref()?;
                    Some(plan.targets[plan.output(role)?].tensor.clone())
                }
            };
            let types: Vec<Option<TensorType>> = node.inputs.iter().map(type_of).collect();
            let module = (asked.module)(&node.text.module)?;
            let known: Option<Vec<&TensorType>> = types.iter().map(Option::as_ref).collect();
            let plan = match (&module, known) {
                (Some(module), Some(known)) => {
                    let program = match programs.get(&module.digest()) {
                        Some(program) => program.clone(),
                        None => {
                            let program = asked.engine.compile(module)?;
                            programs.insert(module.digest(), program.clone());
                            program
                        }
                    };
                    Some(ask(node, &known, module, program.as_ref())?)
                }
                _ => None,
            };
            planned.push(Planned { module, plan, types, ..Planned::default() });
        }
        Ok(planned)
    }

    /// Backwards: the bytes.
    fn need(&mut self, asked: &Asked<'_>, planned: &mut [Planned]) -> Result<()> {
        match &self.root {
            Place::Source(source) => {
                let source = &mut self.sources[*source];
                source.ranges = Some(Ranges::whole(source.tensor.len_bytes()));
            }
            Place::Output { node, role } => {
                let found =
                    planned[*node].plan.as_ref().and_then(|plan| Some(&plan.targets[plan.output(role)?].tensor));
                if let Some(found) = found.filter(|found| *found != asked.tensor_type) {
                    let message = format!(
                        "the module's plan for {} now says {found}, the entry has {}",
                        asked.tensor, asked.tensor_type
                    );
                    return Err(Error::new(Code::ModuleBadPlan, message)
                        .hint("the module's answers depend on more than its request, or the entry is false: verify it with --rebuild"));
                }
                planned[*node].require(role, Some(&Ranges::whole(asked.tensor_type.len_bytes())));
            }
        }
        for (number, node) in self.nodes.iter().enumerate().rev() {
            let ranges = planned[number].inputs(node.inputs.len());
            for (place, ranges) in node.inputs.iter().zip(&ranges) {
                match place {
                    Place::Source(source) => {
                        let known = self.sources[*source].ranges.take();
                        self.sources[*source].ranges = known.zip(ranges.as_ref()).map(|(mut known, more)| {
                            known.extend(more);
                            known
                        });
                    }
                    Place::Output { node, role } => planned[*node].require(role, ranges.as_ref()),
                }
            }
            planned[number].ranges = ranges;
        }
        Ok(())
    }
}

fn ask(node: &Node<'_>, types: &[&TensorType], module: &Module, program: &dyn Program) -> Result<CheckedPlan> {
    let name = &module.metadata().name;
    let inputs: Vec<plan::Input<'_>> =
        node.text.inputs.iter().zip(types).map(|(input, tensor)| (input.role.as_str(), input.index, *tensor)).collect();
    let tp = node.text.tp.unwrap_or(Tp::ONE);
    let request = plan::request(&node.text.params, &inputs, node.text.outputs.clone(), tp, TILE_BYTES)?;
    let lens: Vec<u64> = types.iter().map(|tensor| tensor.len_bytes()).collect();
    let answer = plan::ask(program, &request, &lens).map_err(|e| e.context(name))?;
    answer.map_err(|refusal| refusal.error.context(format!("{name} now refuses what the entry was made from")))
}

fn step(node: Node<'_>, planned: Planned, lineage: Option<&Lineage>, link: &dyn Fn(&Place) -> Link) -> StepUse {
    let recorded = lineage.and_then(|lineage| lineage.modules.get(&node.text.module));
    let (name, version) = match (&planned.module, recorded) {
        (Some(module), _) => (Some(module.metadata().name.clone()), Some(module.metadata().version.clone())),
        (None, Some(recorded)) => (Some(recorded.name.clone()), Some(recorded.version.clone())),
        (None, None) => (None, None),
    };
    let output = |role: &String| {
        let target = planned.plan.as_ref().and_then(|plan| Some(&plan.targets[plan.output(role)?]));
        OutputUse {
            role: role.clone(),
            name: node.record.and_then(|record| record.outputs.get(role).cloned()),
            planned: target.map(|target| {
                let how = if matches!(target.body, Body::View(_)) { How::Moved } else { How::Computed };
                (target.tensor.clone(), how)
            }),
        }
    };
    let outputs = planned.roles.keys().map(output).collect();
    let inputs = node.text.inputs.iter().zip(&node.inputs).zip(planned.types).zip(planned.ranges);
    StepUse {
        application: node.digest,
        module: ModuleRow { digest: node.text.module, name, version },
        planned: planned.plan.is_some(),
        params: node.text.params.clone(),
        tp: node.text.tp,
        recipe_step: node.record.map(|record| (record.step, record.captures.clone())),
        outputs,
        inputs: inputs
            .map(|(((input, place), tensor), ranges)| InputUse {
                role: input.role.clone(),
                index: input.index,
                link: link(place),
                tensor,
                ranges,
            })
            .collect(),
    }
}

impl Planned {
    /// Takes down that bytes of an output are needed; `None`: nobody knows
    /// which.
    fn require(&mut self, role: &str, ranges: Option<&Ranges>) {
        self.roles.insert(role.to_string(), ());
        let target = self.plan.as_ref().and_then(|plan| plan.output(role));
        match (target, ranges) {
            (Some(target), Some(ranges)) => self.needed.entry(target).or_default().extend(ranges),
            _ => self.unknown = true,
        }
    }

    /// The bytes of each input that what is needed comes from.
    fn inputs(&mut self, count: usize) -> Vec<Option<Ranges>> {
        let Some(plan) = self.plan.as_ref().filter(|_| !self.unknown) else { return vec![None; count] };
        let mut inputs = vec![Ranges::default(); count];
        for target in plan.order.iter().rev() {
            let Some(mut needed) = self.needed.get(target).cloned() else { continue };
            reads::collect(&plan.targets[*target], &mut needed, &mut inputs, &mut self.needed);
        }
        inputs.into_iter().map(Some).collect()
    }
}
