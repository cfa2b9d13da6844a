//! `[names]` and `[[tie]]`: dropping, keeping, aliasing and renaming.

use std::collections::BTreeMap;

use super::fields::{self, Fields, Item};
use super::glob::Glob;
use super::rename::Rule;
use super::source::{Source, Spot};
use crate::error::{Code, Error, Result, nearest};
use crate::tensor::TensorName;

/// The most rename rules of a recipe.
const MAX_RULES: usize = 256;

/// What becomes of source tensors that no step took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Unmatched {
    #[default]
    Keep,
    Drop,
    Error,
}

/// The `[names]` of a recipe.
#[derive(Clone, Debug)]
pub(super) struct Names {
    drop: Vec<Glob>,
    rename: Vec<Rule>,
    pub(super) unmatched: Unmatched,
    pub(super) unmatched_spot: Spot,
}

impl Default for Names {
    fn default() -> Self {
        Names { drop: Vec::new(), rename: Vec::new(), unmatched: Unmatched::Keep, unmatched_spot: Spot::at(0) }
    }
}

impl Names {
    pub(super) fn read(source: &Source, item: &Item<'_>) -> Result<Self> {
        let fields = Fields::open_item(source, "[names]", item, &["drop", "rename", "unmatched"])?;
        let mut names = Names::default();
        if let Some(item) = fields.get("drop") {
            names.drop = fields::strings(source, "drop", item)?.into_iter().map(Glob::new).collect();
        }
        if let Some(item) = fields.get("rename") {
            let rules = fields::array(source, "rename", item)?;
            if rules.len() > MAX_RULES {
                return Err(source.invalid(Spot::of(item), format!("'rename' has more than {MAX_RULES} rules")));
            }
            names.rename = rules.iter().map(|item| Rule::read(source, item)).collect::<Result<_>>()?;
        }
        if let Some(item) = fields.get("unmatched") {
            names.unmatched_spot = Spot::of(item);
            names.unmatched = match fields::string(source, "unmatched", item)? {
                "keep" => Unmatched::Keep,
                "drop" => Unmatched::Drop,
                "error" => Unmatched::Error,
                other => {
                    let error = source.invalid(
                        Spot::of(item),
                        format!("'unmatched' is '{}'; expected 'keep', 'drop' or 'error'", fields::shown(other)),
                    );
                    return Err(match nearest(other, ["keep", "drop", "error"]) {
                        Some(near) => error.hint(format!("did you mean '{near}'?")),
                        None => error,
                    });
                }
            };
        }
        Ok(names)
    }

    /// Whether a source tensor is left out from the start.
    pub(super) fn drops(&self, name: &TensorName) -> bool {
        self.drop.iter().any(|glob| glob.matches(name.as_str()))
    }

    /// Runs all rules, in sequence, over all names of the result, and checks
    /// the result as a whole.
    ///
    /// # Errors
    /// `bad_tensor_name`, `duplicate_output`.
    pub(super) fn rename_all<'n>(
        &self,
        source: &Source,
        names: impl IntoIterator<Item = &'n TensorName>,
    ) -> Result<BTreeMap<&'n TensorName, TensorName>> {
        let mut renamed = BTreeMap::new();
        let mut taken: BTreeMap<TensorName, &TensorName> = BTreeMap::new();
        for name in names {
            let (last_rule, new) = self.rename(source, name)?;
            if let Some(other) = taken.insert(new.clone(), name) {
                let error = Error::new(
                    Code::DuplicateOutput,
                    format!("'{other}' and '{name}' would both be named '{new}' after renaming"),
                );
                let rule = last_rule.or(self.rename(source, other)?.0);
                return Err(match rule {
                    Some(rule) => error.at(source.locate(rule.spot)),
                    None => error,
                });
            }
            renamed.insert(name, new);
        }
        Ok(renamed)
    }

    /// The final name, and the last rule that changed it.
    fn rename(&self, source: &Source, name: &TensorName) -> Result<(Option<&Rule>, TensorName)> {
        let mut current: Option<String> = None;
        let mut last = None;
        for rule in &self.rename {
            let at_rule = |e: Error| e.at(source.locate(rule.spot));
            if let Some(new) = rule.apply(current.as_deref().unwrap_or(name.as_str())).map_err(at_rule)? {
                current = Some(new);
                last = Some(rule);
            }
        }
        let Some(new) = current else {
            return Ok((None, name.clone()));
        };
        let new = TensorName::new(&new).map_err(|e| {
            let e = e.context(format!("renaming '{name}'"));
            match last {
                Some(rule) => e.at(source.locate(rule.spot)),
                None => e,
            }
        })?;
        Ok((last, new))
    }
}

/// A `[[tie]]`: a second name for a tensor.
#[derive(Clone, Debug)]
pub(super) struct Tie {
    alias: TensorName,
    alias_spot: Spot,
    of: String,
    of_spot: Spot,
}

impl Tie {
    pub(super) fn read(source: &Source, item: &Item<'_>) -> Result<Self> {
        let fields = Fields::open_item(source, "a tie", item, &["alias", "of"])?;
        let (alias, of) = (fields.require("alias")?, fields.require("of")?);
        let name = fields::string(source, "alias", alias)?;
        Ok(Tie {
            alias: TensorName::new(name).map_err(|e| e.at(source.locate(Spot::of(alias))))?,
            alias_spot: Spot::of(alias),
            of: fields::string(source, "of", of)?.to_owned(),
            of_spot: Spot::of(of),
        })
    }
}

/// The aliases that the ties make beside the tensors that are there.
/// `gone` says why a name that once was there is not any more.
///
/// # Errors
/// `tie_invalid`, `duplicate_output`.
pub(super) fn make_aliases<T>(
    source: &Source,
    ties: &[Tie],
    tensors: &BTreeMap<TensorName, T>,
    gone: impl Fn(&str) -> Option<String>,
) -> Result<BTreeMap<TensorName, TensorName>> {
    let mut aliases = BTreeMap::new();
    for tie in ties {
        let Some((of, _)) = tensors.get_key_value(tie.of.as_str()) else {
            return Err(invalid_tie(source, tie, ties, tensors.keys(), gone));
        };
        let twice = tensors.contains_key(&tie.alias) || aliases.insert(tie.alias.clone(), of.clone()).is_some();
        if twice {
            return Err(Error::new(
                Code::DuplicateOutput,
                format!("the alias '{}' has the name of something that is there", tie.alias),
            )
            .hint("leave that tensor out with names.drop, or remove the tie")
            .at(source.locate(tie.alias_spot)));
        }
    }
    Ok(aliases)
}

fn invalid_tie<'n>(
    source: &Source,
    tie: &Tie,
    ties: &[Tie],
    names: impl Iterator<Item = &'n TensorName>,
    gone: impl Fn(&str) -> Option<String>,
) -> Error {
    let what = format!("the tie of '{}' needs a tensor '{}'", tie.alias, fields::shown(&tie.of));
    let (why, hint) = if ties.iter().any(|other| other.alias.as_str() == tie.of) {
        ("which is an alias itself".to_owned(), Some("name the tensor that it stands for".to_owned()))
    } else if let Some(why) = gone(&tie.of) {
        (why, None)
    } else {
        // A hint is worth looking through a thousand names, not a million.
        let near = nearest(&tie.of, names.map(TensorName::as_str).take(10_000));
        ("which is not there".to_owned(), near.map(|near| format!("did you mean '{near}'?")))
    };
    let error = Error::new(Code::TieInvalid, format!("{what}, {why}")).at(source.locate(tie.of_spot));
    match hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}
