//! A recipe's step: a module, and patterns for its roles.

use std::collections::BTreeMap;

use serde_json::Value;
use toml::de::DeValue;

use super::expression::{Expression, PREFIX};
use super::fields::{self, Fields, Item};
use super::filter::Filter;
use super::module_ref::ModuleRef;
use super::params::Params;
use super::pattern::{Form, Pattern};
use super::source::{Source, Spot};
use crate::error::{Code, Error, Location, Result, nearest};

const KNOWN: &[&str] =
    &["module", "inputs", "outputs", "params", "where", "each", "optional", "sparse", "count", "keep_inputs", "tp"];

/// A step.
///
/// Its captures are those of its input roles without the list captures, in
/// order of first appearance in the roles sorted by name.
#[derive(Clone, Debug)]
pub struct Step {
    number: usize,
    at: Location,
    module: ModuleRef,
    module_at: Location,
    pub(super) captures: Vec<String>,
    /// Sorted by name.
    pub(super) inputs: Vec<InputRole>,
    /// Sorted by name.
    pub(super) outputs: Vec<OutputRole>,
    pub(super) params: Params,
    pub(super) filter: Filter,
    /// The input role whose matches alone define the applications.
    pub(super) each: Option<usize>,
    /// Whether it may be applied to nothing.
    pub(super) optional: bool,
    pub(super) keep_inputs: bool,
    pub(super) lists: ListRules,
    tp: bool,
}

/// An input role and the tensors that may fill it.
#[derive(Clone, Debug)]
pub(super) struct InputRole {
    /// Without the `?`.
    pub(super) name: String,
    pub(super) optional: bool,
    pub(super) pattern: Pattern,
    pub(super) spot: Spot,
    /// The step's captures that it uses: their position in the step, ascending,
    /// and in the pattern.
    pub(super) uses: Vec<(usize, usize)>,
    /// The list capture's position in the pattern.
    pub(super) list: Option<usize>,
}

impl InputRole {
    pub(super) fn list_name(&self) -> Option<&str> {
        self.list.map(|position| self.pattern.captures()[position].name.as_str())
    }
}

/// An output role and the name that it makes.
#[derive(Clone, Debug)]
pub(super) struct OutputRole {
    pub(super) name: String,
    pub(super) pattern: Pattern,
    pub(super) spot: Spot,
}

/// What is asked of a step's lists.
#[derive(Clone, Debug, Default)]
pub(super) struct ListRules {
    /// Gaps, and another start than 0, are fine.
    pub(super) sparse: bool,
    pub(super) count: Option<Count>,
}

/// `count`, which may need config.json.
#[derive(Clone, Debug)]
pub(super) enum Count {
    Exactly(u64),
    Expression(Expression, Spot),
}

impl Count {
    fn read(source: &Source, item: &Item<'_>) -> Result<Self> {
        let spot = Spot::of(item);
        match item.get_ref() {
            DeValue::String(text) if text.starts_with(PREFIX) => {
                let expression = Expression::parse(text).map_err(|e| e.at(source.locate(spot)))?;
                Ok(Count::Expression(expression, spot))
            }
            DeValue::Integer(_) => Ok(Count::Exactly(fields::natural(source, "count", item)?)),
            _ => Err(fields::wrong_type(source, "count", "an integer or a $config expression", item)),
        }
    }

    /// How many values each list must have.
    ///
    /// # Errors
    /// `missing_config` or `bad_params`, at the expression.
    pub(super) fn evaluate(&self, source: &Source, config: Option<&Value>) -> Result<u64> {
        match self {
            Count::Exactly(count) => Ok(*count),
            Count::Expression(expression, spot) => {
                let value = expression.evaluate(config).and_then(|value| {
                    value.as_u64().ok_or_else(|| {
                        Error::new(Code::BadParams, format!("expected a number of list values, found {value}"))
                    })
                });
                value.map_err(|e| e.context("'count'").at(source.locate(*spot)))
            }
        }
    }
}

impl Step {
    /// Its number, from 1.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Where it begins.
    pub fn at(&self) -> &Location {
        &self.at
    }

    /// The module that it runs.
    pub fn module(&self) -> &ModuleRef {
        &self.module
    }

    /// Where its module is named.
    pub fn module_at(&self) -> &Location {
        &self.module_at
    }

    /// Whether the tensor parallel size and rank reach the module.
    pub fn tp(&self) -> bool {
        self.tp
    }

    /// The input roles, sorted, with their patterns as written.
    pub fn input_roles(&self) -> impl Iterator<Item = (&str, &str)> {
        self.inputs.iter().map(|role| (role.name.as_str(), role.pattern.text()))
    }

    /// The output roles, sorted, with their names as written.
    pub fn output_roles(&self) -> impl Iterator<Item = (&str, &str)> {
        self.outputs.iter().map(|role| (role.name.as_str(), role.pattern.text()))
    }

    /// Whether the matches of an input role say which applications there are.
    pub(super) fn defines_applications(&self, role: usize) -> bool {
        match self.each {
            Some(each) => each == role,
            None => self.inputs[role].uses.len() == self.captures.len(),
        }
    }

    /// What messages call it.
    pub(super) fn label(&self) -> String {
        format!("step {} ({})", self.number, self.module)
    }

    pub(super) fn read(source: &Source, number: usize, item: &Item<'_>) -> Result<Self> {
        let fields = Fields::open_item(source, "a step", item, KNOWN)?;
        let module_item = fields.require("module")?;
        let module_at = source.locate(Spot::of(module_item));
        let module =
            ModuleRef::parse(fields::string(source, "module", module_item)?).map_err(|e| e.at(module_at.clone()))?;
        let mut inputs = read_inputs(source, fields.require("inputs")?)?;
        let captures = collect_captures(source, &inputs)?;
        for role in &mut inputs {
            role.place_captures(&captures);
        }
        let outputs = read_outputs(source, fields.require("outputs")?, &inputs, &captures)?;
        let each = fields.get("each").map(|item| find_role(source, item, &inputs)).transpose()?;
        check_a_role_uses_all(source, Spot::of(item), fields.get("each"), &inputs, each, &captures)?;
        let lists = read_list_rules(source, &fields, &inputs)?;
        Ok(Step {
            number,
            at: source.locate(Spot::of(item)),
            module,
            module_at,
            captures,
            inputs,
            outputs,
            params: match fields.get("params") {
                Some(item) => Params::read(source, fields::table(source, "params", item)?)?,
                None => Params::default(),
            },
            filter: fields.get("where").map(|item| Filter::read(source, item)).transpose()?.unwrap_or_default(),
            each,
            optional: fields.boolean("optional")?.unwrap_or(false),
            keep_inputs: fields.boolean("keep_inputs")?.unwrap_or(false),
            lists,
            tp: fields.boolean("tp")?.unwrap_or(true),
        })
    }
}

impl InputRole {
    fn place_captures(&mut self, step_captures: &[String]) {
        for (in_pattern, capture) in self.pattern.captures().iter().enumerate() {
            match step_captures.iter().position(|name| *name == capture.name) {
                Some(in_step) if capture.form != Form::List => self.uses.push((in_step, in_pattern)),
                _ => self.list = Some(in_pattern),
            }
        }
        self.uses.sort_unstable();
    }
}

fn read_pattern(source: &Source, role: &str, item: &Item<'_>) -> Result<Pattern> {
    Pattern::parse(fields::string(source, role, item)?).map_err(|e| e.at(source.locate(Spot::of(item))))
}

fn check_role_name(source: &Source, spot: Spot, name: &str) -> Result<()> {
    let plain = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'));
    match plain {
        true => Ok(()),
        false => Err(source.invalid(spot, format!("'{}' is no name for a role", fields::shown(name))).hint(
            "a role's name has ASCII letters, digits, '_', '-' and '.'; a '?' behind an input role makes it optional",
        )),
    }
}

fn read_inputs(source: &Source, item: &Item<'_>) -> Result<Vec<InputRole>> {
    let mut roles = BTreeMap::new();
    for (key, item) in fields::table(source, "inputs", item)?.iter() {
        let written: &str = key.get_ref();
        let (name, optional) = match written.strip_suffix('?') {
            Some(name) => (name, true),
            None => (written, false),
        };
        check_role_name(source, Spot::of(key), name)?;
        let pattern = read_pattern(source, name, item)?;
        if pattern.captures().iter().filter(|capture| capture.form == Form::List).count() > 1 {
            return Err(source
                .invalid(Spot::of(item), format!("the role '{name}' has two list captures; a list runs over one")));
        }
        let role =
            InputRole { name: name.to_owned(), optional, pattern, spot: Spot::of(item), uses: Vec::new(), list: None };
        if roles.insert(name.to_owned(), role).is_some() {
            return Err(source.invalid(Spot::of(key), format!("the role '{name}' stands twice, once with a '?'")));
        }
    }
    match roles.is_empty() {
        true => Err(source.invalid(Spot::of(item), "a step has no inputs")),
        false => Ok(roles.into_values().collect()),
    }
}

/// The step's captures; each must have one form in all roles.
fn collect_captures(source: &Source, inputs: &[InputRole]) -> Result<Vec<String>> {
    let mut forms: BTreeMap<&str, Form> = BTreeMap::new();
    let mut captures = Vec::new();
    for role in inputs {
        for capture in role.pattern.captures() {
            match forms.insert(&capture.name, capture.form) {
                Some(form) if form != capture.form => {
                    return Err(source.invalid(
                        role.spot,
                        format!("the capture '{}' has another form here than in another role", capture.name),
                    ));
                }
                None if capture.form != Form::List => captures.push(capture.name.clone()),
                _ => {}
            }
        }
    }
    Ok(captures)
}

fn read_outputs(
    source: &Source,
    item: &Item<'_>,
    inputs: &[InputRole],
    captures: &[String],
) -> Result<Vec<OutputRole>> {
    let mut roles = BTreeMap::new();
    for (key, item) in fields::table(source, "outputs", item)?.iter() {
        let name: &str = key.get_ref();
        check_role_name(source, Spot::of(key), name)?;
        let pattern = read_pattern(source, name, item)?;
        for capture in pattern.captures() {
            let collected = inputs.iter().any(|role| role.list_name() == Some(&capture.name));
            let why = match capture.form {
                _ if collected => "is a list: an application has no single value for it",
                Form::List => "is a list, which no input collects",
                _ if captures.contains(&capture.name) => continue,
                _ => "is in no input",
            };
            let error = source.invalid(
                Spot::of(item),
                format!("the output '{name}' uses {}, but '{}' {why}", capture.written(), capture.name),
            );
            return Err(match nearest(&capture.name, captures.iter().map(String::as_str)) {
                Some(near) if !collected => error.hint(format!("did you mean '{near}'?")),
                _ => error,
            });
        }
        roles.insert(name.to_owned(), OutputRole { name: name.to_owned(), pattern, spot: Spot::of(item) });
    }
    match roles.is_empty() {
        true => Err(source.invalid(Spot::of(item), "a step has no outputs")),
        false => Ok(roles.into_values().collect()),
    }
}

fn find_role(source: &Source, item: &Item<'_>, inputs: &[InputRole]) -> Result<usize> {
    let name = fields::string(source, "each", item)?;
    inputs.iter().position(|role| role.name == name).ok_or_else(|| {
        let error =
            source.invalid(Spot::of(item), format!("'each' names '{}', which is no input role", fields::shown(name)));
        match nearest(name, inputs.iter().map(|role| role.name.as_str())) {
            Some(near) => error.hint(format!("did you mean '{near}'?")),
            None => error,
        }
    })
}

/// Applications are found by roles that use every capture: one must, and with
/// `each` it is that one.
fn check_a_role_uses_all(
    source: &Source,
    step: Spot,
    each_item: Option<&Item<'_>>,
    inputs: &[InputRole],
    each: Option<usize>,
    captures: &[String],
) -> Result<()> {
    let uses_all = |role: &InputRole| role.uses.len() == captures.len();
    let all = captures.join(", ");
    match each {
        Some(each) if !uses_all(&inputs[each]) => Err(source.invalid(
            each_item.map_or(step, Spot::of),
            format!("'each' names '{}', which does not use all captures of the step ({all})", inputs[each].name),
        )),
        None if !inputs.iter().any(uses_all) => {
            Err(source.invalid(step, format!("no input role uses all captures of the step ({all})")))
        }
        _ => Ok(()),
    }
}

fn read_list_rules(source: &Source, fields: &Fields<'_>, inputs: &[InputRole]) -> Result<ListRules> {
    let has_list = inputs.iter().any(|role| role.list.is_some());
    for field in ["sparse", "count"] {
        if let Some(item) = fields.get(field)
            && !has_list
        {
            return Err(source
                .invalid(Spot::of(item), format!("'{field}' is about lists, but no input has a list capture"))
                .hint("a list capture is written {*e}"));
        }
    }
    Ok(ListRules {
        sparse: fields.boolean("sparse")?.unwrap_or(false),
        count: fields.get("count").map(|item| Count::read(source, item)).transpose()?,
    })
}
