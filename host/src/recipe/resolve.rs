//! A recipe and a checkpoint's names, types and config.json into a
//! [`Resolution`].

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::blocks::form_blocks;
use super::group::{Candidates, Group, Ungroupable};
use super::names::{Unmatched, make_aliases};
use super::parse::Recipe;
use super::resolution::{Application, Facts, Input, Origin, Output, Resolution};
use super::step::Step;
use crate::error::{Code, Error, Result};
use crate::tensor::{TensorName, TensorType};

/// How many names an error lists.
const LISTED: usize = 5;

/// Applies a recipe to a checkpoint's tensors. `config` is the checkpoint's
/// config.json, if it has one.
///
/// # Errors
/// Every error has the place in the recipe:
/// - `missing_input`, `step_matched_nothing`, `unmatched_tensor`: the
///   checkpoint does not have what the recipe is about, or has more;
/// - `duplicate_output`, `bad_tensor_name`, `tie_invalid`: names do not work out;
/// - `missing_config`, `bad_params`: a `$config` expression has no value;
/// - `recipe_invalid`: a pattern is too ambiguous, or a block would be named
///   `rest`;
/// - what `facts` says.
pub fn resolve(
    recipe: &Recipe,
    sources: &BTreeMap<TensorName, TensorType>,
    config: Option<&Value>,
    facts: &mut dyn Facts,
) -> Result<Resolution> {
    let mut work = Work::begin(recipe, sources, config, facts);
    for (index, step) in recipe.steps.iter().enumerate() {
        work.apply(index, step).map_err(|e| e.context(step.label()).at(step.at().clone()))?;
    }
    work.settle_unmatched()?;
    work.finish()
}

/// The state between steps.
struct Work<'a> {
    recipe: &'a Recipe,
    config: Option<&'a Value>,
    types: Types<'a>,
    /// Its `tensors` are what is there now, under the names of now.
    result: Resolution,
    /// Source tensors that an application took.
    taken: BTreeSet<TensorName>,
    /// Names that left the result, and the step that took them.
    consumed: BTreeMap<TensorName, usize>,
}

/// Types of sources and, when asked for, of outputs.
struct Types<'a> {
    sources: &'a BTreeMap<TensorName, TensorType>,
    facts: &'a mut dyn Facts,
    known: BTreeMap<usize, BTreeMap<String, TensorType>>,
}

impl Types<'_> {
    fn of(&mut self, origin: &Origin, so_far: &Resolution) -> Result<&TensorType> {
        let (application, role) = match origin {
            Origin::Source(name) => return self.sources.get(name).ok_or_else(|| unknown_type(name.as_str())),
            Origin::Output { application, role } => (*application, role),
        };
        if !self.known.contains_key(&application) {
            let made_by = &so_far.applications[application];
            let outputs = self.facts.outputs(made_by, so_far);
            let outputs = outputs.map_err(|e| {
                e.context(format!("'where' asks for the outputs of step {}", made_by.step + 1)).at(made_by.at.clone())
            })?;
            self.known.insert(application, outputs);
        }
        self.known.get(&application).and_then(|outputs| outputs.get(role)).ok_or_else(|| unknown_type(role))
    }
}

/// The plan of a module lacks an output that was asked for.
fn unknown_type(what: &str) -> Error {
    Error::new(Code::ModuleBadPlan, format!("the type of '{what}' is asked for, but nothing says it"))
}

impl<'a> Work<'a> {
    fn begin(
        recipe: &'a Recipe,
        sources: &'a BTreeMap<TensorName, TensorType>,
        config: Option<&'a Value>,
        facts: &'a mut dyn Facts,
    ) -> Self {
        let mut result = Resolution { layout: recipe.layout, guards: recipe.guards.clone(), ..Resolution::default() };
        for name in sources.keys() {
            match recipe.names.drops(name) {
                true => result.sources.dropped.push(name.clone()),
                false => drop(result.tensors.insert(name.clone(), Origin::Source(name.clone()))),
            }
        }
        let types = Types { sources, facts, known: BTreeMap::new() };
        Work { recipe, config, types, result, taken: BTreeSet::new(), consumed: BTreeMap::new() }
    }

    fn apply(&mut self, index: usize, step: &'a Step) -> Result<()> {
        let source = &self.recipe.source;
        let (types, result) = (&mut self.types, &self.result);
        let filtered = |role: usize| step.each.is_none_or(|each| each == role);
        let candidates = Candidates::find(step, source, &result.tensors, |role, name, origin| {
            Ok(!filtered(role)
                || (step.filter.accepts_name(name.as_str())
                    && (!step.filter.looks_at_types() || step.filter.accepts_type(types.of(origin, result)?))))
        })?;
        if candidates.is_empty() {
            return if step.optional { Ok(()) } else { Err(self.matched_nothing(step)?) };
        }
        let count = step.lists.count.as_ref().map(|count| count.evaluate(source, self.config)).transpose()?;
        let groups = candidates.group(count).map_err(|why| self.explain_ungroupable(step, why))?;
        let params = step.params.evaluate(source, self.config)?;
        let applications =
            groups.iter().map(|group| self.application(index, step, &params, group)).collect::<Result<Vec<_>>>()?;
        self.take_effect(step, applications)
    }

    fn application(&self, index: usize, step: &Step, params: &Value, group: &Group<'_>) -> Result<Application> {
        let value_of = |capture: &str| step.captures.iter().position(|name| name == capture).map(|i| group.values[i]);
        let inputs = group.members.iter().map(|member| {
            let role = &step.inputs[member.role];
            let origin = self.result.tensors[member.name].clone();
            Input {
                role: role.name.clone(),
                index: member.index,
                list: role.list.is_some(),
                name: member.name.clone(),
                origin,
            }
        });
        let outputs = step.outputs.iter().map(|role| {
            let name = TensorName::new(&role.pattern.render(value_of));
            let name = name.map_err(|e| e.at(self.recipe.source.locate(role.spot)))?;
            Ok(Output { role: role.name.clone(), name })
        });
        Ok(Application {
            step: index,
            captures: step.captures.iter().cloned().zip(group.values.iter().map(|v| (*v).to_owned())).collect(),
            module: step.module().clone(),
            params: params.clone(),
            tp: step.tp(),
            inputs: inputs.collect(),
            outputs: outputs.collect::<Result<_>>()?,
            at: step.at().clone(),
        })
    }

    /// Takes the step's inputs out of the result, and puts its outputs in.
    /// All applications of a step saw the state before it.
    fn take_effect(&mut self, step: &Step, applications: Vec<Application>) -> Result<()> {
        for input in applications.iter().flat_map(|application| &application.inputs) {
            if let Origin::Source(name) = &input.origin {
                self.taken.insert(name.clone());
            }
            if !step.keep_inputs && self.result.tensors.remove(&input.name).is_some() {
                self.consumed.insert(input.name.clone(), step.number());
            }
        }
        // Kept inputs still make room for an output of their own application.
        let replaced = applications.iter().flat_map(|application| {
            let is_input = |name: &TensorName| application.inputs.iter().any(|input| input.name == *name);
            application.outputs.iter().map(|output| &output.name).filter(move |name| is_input(name))
        });
        for name in replaced {
            self.result.tensors.remove(name);
        }
        for application in applications {
            let position = self.result.applications.len();
            for (output, role) in application.outputs.iter().zip(&step.outputs) {
                let origin = Origin::Output { application: position, role: output.role.clone() };
                if let Some(there) = self.result.tensors.insert(output.name.clone(), origin) {
                    return Err(self.duplicate(&output.name, &there).at(self.recipe.source.locate(role.spot)));
                }
                self.consumed.remove(&output.name);
            }
            self.result.applications.push(application);
        }
        Ok(())
    }

    fn duplicate(&self, name: &TensorName, there: &Origin) -> Error {
        let error =
            |what: &str| Error::new(Code::DuplicateOutput, format!("the output '{name}' has the name of {what}"));
        match there {
            Origin::Source(_) => {
                error("a tensor that is there").hint("leave that one out with names.drop, or choose another name")
            }
            Origin::Output { application, .. } => {
                let made_by = self.result.applications.get(*application);
                let what = match made_by {
                    Some(made_by) => format!("an output of step {}", made_by.step + 1),
                    None => "another output of the same application".to_owned(),
                };
                error(&what).hint("use all captures of the step in the name, or choose another name")
            }
        }
    }

    fn matched_nothing(&self, step: &Step) -> Result<Error> {
        let source = &self.recipe.source;
        let unfiltered = Candidates::find(step, source, &self.result.tensors, |_, _, _| Ok(true))?;
        if !unfiltered.is_empty() {
            return Ok(Error::new(Code::StepMatchedNothing, "'where' leaves none of the tensors that match")
                .hint("write optional = true if that is as it should be"));
        }
        let patterns = step.inputs.iter().enumerate().filter(|(position, _)| step.defines_applications(*position));
        let patterns: Vec<String> =
            patterns.take(LISTED).map(|(_, role)| format!("'{}'", role.pattern.text())).collect();
        Ok(Error::new(Code::StepMatchedNothing, format!("no tensor matches {}", patterns.join(" or ")))
            .hint("write optional = true if that may be"))
    }

    fn explain_ungroupable(&self, step: &Step, why: Ungroupable) -> Error {
        let error = why.error.at(self.recipe.source.locate(step.inputs[why.role].spot));
        let Some(expected) = why.expected else {
            return error;
        };
        if self.result.tensors.contains_key(expected.as_str()) {
            return error.hint(format!("'{expected}' is there, but 'where' leaves it out"));
        }
        match self.gone(&expected) {
            Some(why) => error.hint(format!("'{expected}' is a tensor {why}")),
            None => error,
        }
    }

    /// Why a name that once was there is not any more.
    fn gone(&self, name: &str) -> Option<String> {
        if let Some(step) = self.consumed.get(name) {
            return Some(format!("that step {step} took (keep_inputs = true keeps it)"));
        }
        let listed = |names: &[TensorName]| names.binary_search_by(|known| known.as_str().cmp(name)).is_ok();
        if listed(&self.result.sources.dropped) {
            return Some("that names.drop leaves out".to_owned());
        }
        listed(&self.result.sources.unmatched_dropped).then(|| "that unmatched = \"drop\" leaves out".to_owned())
    }

    /// Source tensors that no application took are kept, dropped or refused.
    fn settle_unmatched(&mut self) -> Result<()> {
        let names = &self.recipe.names;
        if names.unmatched == Unmatched::Keep {
            return Ok(());
        }
        let is_unmatched = |origin: &Origin| matches!(origin, Origin::Source(name) if !self.taken.contains(name));
        let unmatched: Vec<TensorName> = self
            .result
            .tensors
            .iter()
            .filter(|(_, origin)| is_unmatched(origin))
            .map(|(name, _)| name.clone())
            .collect();
        if names.unmatched == Unmatched::Error && !unmatched.is_empty() {
            let listed: Vec<&str> = unmatched.iter().take(LISTED).map(TensorName::as_str).collect();
            let more = if unmatched.len() > LISTED { ", …" } else { "" };
            return Err(Error::new(
                Code::UnmatchedTensor,
                format!("no step takes {} of the source tensors: {}{more}", unmatched.len(), listed.join(", ")),
            )
            .hint("add a step for them, leave them out with names.drop, or write unmatched = \"keep\"")
            .at(self.recipe.source.locate(names.unmatched_spot)));
        }
        for name in &unmatched {
            self.result.tensors.remove(name);
        }
        self.result.sources.unmatched_dropped = unmatched;
        Ok(())
    }

    /// Ties, renaming, blocks.
    fn finish(mut self) -> Result<Resolution> {
        let Recipe { source, ties, names, blocks, .. } = self.recipe;
        let aliases = make_aliases(source, ties, &self.result.tensors, |name| self.gone(name))?;
        let passed_through = self.result.tensors.values().filter_map(|origin| match origin {
            Origin::Source(name) => Some(name.clone()),
            Origin::Output { .. } => None,
        });
        self.result.sources.passed_through = passed_through.collect();
        let renamed = names.rename_all(source, self.result.tensors.keys().chain(aliases.keys()))?;
        let tensors =
            self.result.tensors.iter().map(|(name, origin)| (renamed[name].clone(), origin.clone())).collect();
        self.result.aliases = aliases.iter().map(|(alias, of)| (renamed[alias].clone(), renamed[of].clone())).collect();
        self.result.tensors = tensors;
        self.result.blocks = form_blocks(source, blocks, self.result.tensors.keys())?;
        Ok(self.result)
    }
}
