//! From candidate tensors to a step's applications.
//!
//! Each role's matches are put into a map from the values of its captures.
//! The combinations of values that define applications are looked up in every
//! role's map (by the captures that the role uses), so the work is that of the
//! matches, not of their product.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use super::natural::Natural;
use super::source::Source;
use super::step::{InputRole, ListRules, Step};
use crate::error::{Code, Error, Result};
use crate::tensor::TensorName;

/// The most inputs that the applications of one step may have together: what
/// several applications share is counted for each.
const MAX_INPUTS: usize = 1 << 22;

/// The values of a role's captures, or of a step's, in the step's order.
type Values<'a> = Vec<Natural<'a>>;

/// A role's matches: for each combination of values the tensors by list value.
/// A plain role has one tensor, under the empty value.
type Matches<'a> = BTreeMap<Values<'a>, BTreeMap<Natural<'a>, &'a TensorName>>;

/// The tensors that may fill each role of a step.
pub(super) struct Candidates<'a> {
    step: &'a Step,
    /// By position of the role.
    roles: Vec<Matches<'a>>,
}

/// An application's tensors.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Group<'a> {
    /// By position of the step's capture.
    pub(super) values: Vec<&'a str>,
    pub(super) members: Vec<Member<'a>>,
}

/// A tensor in a role.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Member<'a> {
    /// Position of the role.
    pub(super) role: usize,
    pub(super) index: u64,
    pub(super) name: &'a TensorName,
}

impl<'a> Candidates<'a> {
    /// Matches tensors against the step's roles. `accepts` has the last word
    /// on a tensor that fits the pattern of a role.
    pub(super) fn find<T>(
        step: &'a Step,
        source: &Source,
        tensors: &'a BTreeMap<TensorName, T>,
        mut accepts: impl FnMut(usize, &'a TensorName, &'a T) -> Result<bool>,
    ) -> Result<Self> {
        let mut roles = Vec::with_capacity(step.inputs.len());
        for (position, role) in step.inputs.iter().enumerate() {
            let prefix = role.pattern.literal_prefix();
            let mut matches = Matches::new();
            let from_prefix = tensors.range::<str, _>((Bound::Included(prefix), Bound::Unbounded));
            for (name, tensor) in from_prefix.take_while(|(name, _)| name.as_str().starts_with(prefix)) {
                let found = role.pattern.match_whole(name.as_str()).map_err(|e| e.at(source.locate(role.spot)))?;
                if let Some(found) = found
                    && accepts(position, name, tensor)?
                {
                    let values = role.uses.iter().map(|(_, in_pattern)| Natural(found.values[*in_pattern])).collect();
                    let list_value = Natural(role.list.map_or("", |in_pattern| found.values[in_pattern]));
                    matches.entry(values).or_default().insert(list_value, name);
                }
            }
            roles.push(matches);
        }
        Ok(Candidates { step, roles })
    }

    /// The combinations that define applications, in natural order.
    fn combinations(&self) -> BTreeSet<Values<'a>> {
        let defining = (0..self.roles.len()).filter(|position| self.step.defines_applications(*position));
        defining.flat_map(|position| self.roles[position].keys().cloned()).collect()
    }

    /// Whether nothing defines an application.
    pub(super) fn is_empty(&self) -> bool {
        self.combinations().is_empty()
    }

    /// The applications, in the natural order of their captures' values.
    ///
    /// # Errors
    /// `missing_input`, naming the tensor that was expected, or `recipe_invalid`
    /// if there are too many inputs; without a location.
    pub(super) fn group(&self, count: Option<u64>) -> Result<Vec<Group<'a>>, Ungroupable> {
        let mut inputs = 0;
        let mut groups = Vec::new();
        for values in self.combinations() {
            let members = self.collect(&values, count)?;
            inputs += members.len();
            if inputs > MAX_INPUTS {
                let message = format!("the applications have more than {MAX_INPUTS} inputs together");
                return Err(Ungroupable { expected: None, role: 0, error: Error::new(Code::RecipeInvalid, message) });
            }
            groups.push(Group { values: values.iter().map(|value| value.0).collect(), members });
        }
        Ok(groups)
    }

    fn collect(&self, values: &Values<'a>, count: Option<u64>) -> Result<Vec<Member<'a>>, Ungroupable> {
        let found: Vec<Option<&BTreeMap<Natural<'a>, &'a TensorName>>> = (0..self.roles.len())
            .map(|position| {
                let used: Values<'a> =
                    self.step.inputs[position].uses.iter().map(|(in_step, _)| values[*in_step]).collect();
                self.roles[position].get(&used)
            })
            .collect();
        let lists = self.list_values(&found);
        for (position, role) in self.step.inputs.iter().enumerate() {
            if found[position].is_none() && !role.optional {
                let first =
                    role.list_name().map(|list| lists.get(list).and_then(|values| values.first()).map_or("0", |v| v.0));
                return Err(self.missing(values, position, first, ""));
            }
        }
        for (list, all) in &lists {
            self.check_even(values, &found, list, all)?;
            self.check_numbers(values, list, all, count)?;
        }
        let mut members = Vec::new();
        for (position, tensors) in found.iter().enumerate() {
            let tensors = tensors.iter().flat_map(|tensors| tensors.values());
            members.extend(tensors.zip(0..).map(|(name, index)| Member { role: position, index, name }));
        }
        Ok(members)
    }

    /// All values of each list capture, over the roles that use it.
    fn list_values(
        &self,
        found: &[Option<&BTreeMap<Natural<'a>, &'a TensorName>>],
    ) -> BTreeMap<&'a str, BTreeSet<Natural<'a>>> {
        let mut lists: BTreeMap<&str, BTreeSet<Natural<'_>>> = BTreeMap::new();
        for (role, tensors) in self.step.inputs.iter().zip(found) {
            if let (Some(list), Some(tensors)) = (role.list_name(), tensors) {
                lists.entry(list).or_default().extend(tensors.keys());
            }
        }
        lists
    }

    /// All roles of a list must have the same values.
    fn check_even(
        &self,
        values: &Values<'a>,
        found: &[Option<&BTreeMap<Natural<'a>, &'a TensorName>>],
        list: &str,
        all: &BTreeSet<Natural<'a>>,
    ) -> Result<(), Ungroupable> {
        for (position, role) in self.step.inputs.iter().enumerate() {
            if let (Some(name), Some(tensors)) = (role.list_name(), found[position])
                && name == list
                && let Some(lacking) = all.iter().find(|value| !tensors.contains_key(value))
            {
                return Err(self.missing(values, position, Some(lacking.0), ", which another role of the list has"));
            }
        }
        Ok(())
    }

    /// Numbers run from 0 without a gap, and there are as many values as
    /// `count` says.
    fn check_numbers(
        &self,
        values: &Values<'a>,
        list: &str,
        all: &BTreeSet<Natural<'a>>,
        count: Option<u64>,
    ) -> Result<(), Ungroupable> {
        let ListRules { sparse, .. } = self.step.lists;
        let Some(position) = self.step.inputs.iter().position(|role| role.list_name() == Some(list)) else {
            return Ok(());
        };
        let numbers: Vec<(&str, &str)> = all.iter().filter_map(|value| Some((value.0, value.digits()?))).collect();
        let written = |number: usize| {
            let padded =
                numbers.iter().find(|(text, digits)| text.len() > digits.len()).map_or(0, |(text, _)| text.len());
            format!("{number:0padded$}")
        };
        if !sparse {
            for (expected, (text, digits)) in numbers.iter().enumerate() {
                if *digits != expected.to_string() {
                    let value = written(expected);
                    let why = match expected > 0 && numbers[expected - 1].1 == *digits {
                        true => format!(": '{}' and '{text}' are the same number", numbers[expected - 1].0),
                        false => format!(": the numbers of a list run from 0 without a gap, and '{text}' comes next"),
                    };
                    return Err(self.missing(values, position, Some(&value), &why));
                }
            }
        }
        let Some(count) = count else {
            return Ok(());
        };
        let has = all.len() as u64;
        if has < count {
            let next = (!sparse).then(|| written(numbers.len()));
            return Err(self.missing(
                values,
                position,
                next.as_deref(),
                &format!(": the list has {has} values, 'count' says {count}"),
            ));
        }
        match usize::try_from(count).ok().and_then(|count| all.iter().nth(count)) {
            None => Ok(()),
            Some(first) => {
                let role = &self.step.inputs[position];
                let message = format!(
                    "the list of '{}' has {has} values where 'count' says {count}: '{}' is too many",
                    role.name,
                    self.name_of(values, role, Some(first.0)),
                );
                Err(Ungroupable { expected: None, role: position, error: Error::new(Code::MissingInput, message) })
            }
        }
    }

    fn missing(&self, values: &Values<'a>, position: usize, list_value: Option<&str>, why: &str) -> Ungroupable {
        let role = &self.step.inputs[position];
        let expected = self.name_of(values, role, list_value);
        let error =
            Error::new(Code::MissingInput, format!("the input '{}' needs a tensor '{expected}'{why}", role.name));
        Ungroupable { expected: Some(expected), role: position, error }
    }

    fn name_of(&self, values: &Values<'a>, role: &InputRole, list_value: Option<&str>) -> String {
        let list = role.list_name();
        role.pattern.render(|capture| match self.step.captures.iter().position(|name| name == capture) {
            Some(position) => Some(values[position].0),
            None if list == Some(capture) => list_value,
            None => None,
        })
    }
}

/// Why the candidates make no applications: mostly, an input is missing.
#[derive(Debug)]
pub(super) struct Ungroupable {
    /// The tensor, where there is one name for it.
    pub(super) expected: Option<String>,
    /// Position of the role.
    pub(super) role: usize,
    pub(super) error: Error,
}
