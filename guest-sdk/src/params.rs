//! Parameters: from the recipe's JSON object to a transform's fields.
//!
//! The attribute macro writes the calls; authors see [`FromParam`] only if
//! they want a parameter type of their own.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::num::NonZeroU64;

use crate::abi::Dtype;
use crate::error::{PlanError, Result, separated};

/// A type that a parameter can have.
///
/// ```
/// use weightmill_guest::params::{FromParam, Value};
/// use weightmill_guest::prelude::*;
///
/// struct Percent(f64);
///
/// impl FromParam for Percent {
///     fn expected() -> String {
///         "a percentage".into()
///     }
///     fn from_param(value: &Value) -> Option<Self> {
///         f64::from_param(value).filter(|p| (0.0..=100.0).contains(p)).map(Percent)
///     }
/// }
/// assert!(Percent::from_param(&Value::parse(b"120").unwrap()).is_none());
/// ```
pub trait FromParam: Sized {
    /// What a value must be, for messages: "a whole number of at least 0".
    fn expected() -> String;

    /// The value, or `None` if it is not what [`expected`](Self::expected) says.
    fn from_param(value: &Value) -> Option<Self>;
}

#[doc(no_inline)]
pub use crate::json::Value;

impl FromParam for bool {
    fn expected() -> String {
        "true or false".into()
    }

    fn from_param(value: &Value) -> Option<Self> {
        value.as_bool()
    }
}

macro_rules! whole_numbers {
    ($($number:ty: $get:ident, $text:literal;)+) => { $(
        impl FromParam for $number {
            fn expected() -> String {
                $text.into()
            }

            fn from_param(value: &Value) -> Option<Self> {
                value.$get().and_then(|n| n.try_into().ok())
            }
        }
    )+ };
}

whole_numbers! {
    u64: as_u64, "a whole number of at least 0";
    usize: as_u64, "a whole number of at least 0";
    i64: as_i64, "a whole number";
}

impl FromParam for NonZeroU64 {
    fn expected() -> String {
        "a whole number of at least 1".into()
    }

    fn from_param(value: &Value) -> Option<Self> {
        value.as_u64().and_then(NonZeroU64::new)
    }
}

impl FromParam for f64 {
    fn expected() -> String {
        "a number".into()
    }

    fn from_param(value: &Value) -> Option<Self> {
        value.as_f64()
    }
}

impl FromParam for f32 {
    fn expected() -> String {
        "a number".into()
    }

    fn from_param(value: &Value) -> Option<Self> {
        value.as_f64().map(|n| n as f32)
    }
}

impl FromParam for String {
    fn expected() -> String {
        "a string".into()
    }

    fn from_param(value: &Value) -> Option<Self> {
        value.as_str().map(String::from)
    }
}

impl FromParam for Dtype {
    fn expected() -> String {
        "a dtype such as \"BF16\"".into()
    }

    fn from_param(value: &Value) -> Option<Self> {
        value.as_str()?.parse().ok()
    }
}

impl<T: FromParam> FromParam for Vec<T> {
    fn expected() -> String {
        format!("a list, of each entry: {}", T::expected())
    }

    fn from_param(value: &Value) -> Option<Self> {
        value.as_array()?.iter().map(T::from_param).collect()
    }
}

/// A parameter that is one of a few words. Derived by
/// [`Choice`](weightmill_guest_macros::Choice) for enums without fields.
///
/// ```
/// use weightmill_guest::prelude::*;
///
/// #[derive(Clone, Copy, Debug, PartialEq, Eq, Choice)]
/// enum Layout {
///     Half,
///     InPairs,
///     #[choice("2d")]
///     Flat,
/// }
/// assert_eq!(Layout::InPairs.name(), "in-pairs");
/// assert_eq!(Layout::CHOICES.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["half", "in-pairs", "2d"]);
/// ```
pub trait Choice: Copy + PartialEq + 'static {
    /// Every word with its value.
    const CHOICES: &'static [(&'static str, Self)];

    /// The word of this value.
    fn name(self) -> &'static str {
        Self::CHOICES.iter().find(|(_, choice)| *choice == self).map_or("", |(name, _)| name)
    }
}

/// What [`FromParam::expected`] says of a choice.
#[doc(hidden)]
pub fn expected_choice<T: Choice>() -> String {
    let words: Vec<&str> = T::CHOICES.iter().map(|(name, _)| *name).collect();
    match words.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("\"{}\" or \"{last}\"", separated(rest, "\", \"")),
        _ => format!("\"{}\"", separated(&words, "")),
    }
}

/// [`FromParam::from_param`] of a choice.
#[doc(hidden)]
pub fn find_choice<T: Choice>(value: &Value) -> Option<T> {
    let word = value.as_str()?;
    T::CHOICES.iter().find(|(name, _)| *name == word).map(|(_, choice)| *choice)
}

/// A recipe's parameters, checked for unknown names.
#[derive(Clone, Copy, Debug)]
pub struct Params<'a> {
    members: &'a [(String, Value)],
}

impl<'a> Params<'a> {
    /// The parameters in `value`, whose names must be among `known`.
    ///
    /// # Errors
    /// If it is no JSON object or holds another name.
    ///
    /// ```
    /// use weightmill_guest::params::{Params, Value};
    ///
    /// let value = Value::parse(br#"{"grups":4}"#).unwrap();
    /// let error = Params::new(&value, &["groups", "order"]).unwrap_err();
    /// assert_eq!(error.message(), "there is no parameter grups");
    /// let hint = "did you mean groups? the parameters are groups, order";
    /// assert_eq!(error.body().hint.as_deref(), Some(hint));
    /// ```
    pub fn new(value: &'a Value, known: &[&str]) -> Result<Self> {
        let Value::Object(members) = value else {
            return Err(PlanError::param("", format!("expected an object of parameters, found {}", found(value))));
        };
        match members.iter().find(|(name, _)| !known.contains(&name.as_str())) {
            Some((name, _)) => Err(unknown(name, known)),
            None => Ok(Params { members }),
        }
    }

    /// A parameter that may be left out.
    ///
    /// # Errors
    /// If it is not of type `T`.
    ///
    /// ```
    /// use weightmill_guest::params::{Params, Value};
    ///
    /// let value = Value::parse(br#"{"groups":4}"#).unwrap();
    /// let params = Params::new(&value, &["groups", "order"]).unwrap();
    /// assert_eq!(params.optional::<u64>("groups"), Ok(Some(4)));
    /// assert_eq!(params.optional::<String>("order"), Ok(None));
    /// assert!(params.optional::<bool>("groups").is_err());
    /// ```
    pub fn optional<T: FromParam>(&self, name: &str) -> Result<Option<T>> {
        let Some((_, value)) = self.members.iter().find(|(member, _)| member == name) else { return Ok(None) };
        match T::from_param(value) {
            Some(parsed) => Ok(Some(parsed)),
            None => Err(PlanError::param(
                name,
                format!("the parameter {name} must be {}, found {}", T::expected(), found(value)),
            )),
        }
    }

    /// A parameter that must be there.
    ///
    /// # Errors
    /// If it is not there, or not of type `T`.
    ///
    /// ```
    /// use weightmill_guest::params::{Params, Value};
    ///
    /// let value = Value::parse(b"{}").unwrap();
    /// let params = Params::new(&value, &["groups"]).unwrap();
    /// let error = params.required::<u64>("groups").unwrap_err();
    /// assert_eq!(error.message(), "the parameter groups is missing: it must be a whole number of at least 0");
    /// ```
    pub fn required<T: FromParam>(&self, name: &str) -> Result<T> {
        self.optional(name)?.ok_or_else(|| {
            PlanError::param(name, format!("the parameter {name} is missing: it must be {}", T::expected()))
                .hint(format!("add {name} to the step's params"))
        })
    }
}

fn unknown(name: &str, known: &[&str]) -> PlanError {
    let error = PlanError::param(name, format!("there is no parameter {name}"));
    if known.is_empty() {
        return error.hint("this transform has no parameters");
    }
    let all = separated(known, ", ");
    error.hint(match nearest(name, known) {
        Some(near) => format!("did you mean {near}? the parameters are {all}"),
        None => format!("the parameters are {all}"),
    })
}

/// What a value is, for messages; short whatever the value.
fn found(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(b) => if *b { "true" } else { "false" }.into(),
        Value::Number(n) => n.clone(),
        Value::String(s) => {
            let shown: String = s.chars().take(40).collect();
            if shown.len() < s.len() { format!("\"{shown}…\"") } else { format!("\"{shown}\"") }
        }
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(_) => "an object".into(),
    }
}

/// The name of `known` nearest to `name`, if near enough to be what was meant.
pub(crate) fn nearest<'n>(name: &str, known: &[&'n str]) -> Option<&'n str> {
    known
        .iter()
        .map(|other| (distance(name.as_bytes(), other.as_bytes()), *other))
        .filter(|(distance, other)| *distance <= 2.max(name.len().max(other.len()) / 3))
        .min()
        .map(|(_, other)| other)
}

/// Levenshtein distance.
fn distance(a: &[u8], b: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = core::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(text: &str) -> Value {
        Value::parse(text.as_bytes()).unwrap()
    }

    fn refusal<T: FromParam>(value: &str) -> String {
        let params = json(&format!("{{\"x\":{value}}}"));
        let Err(error) = Params::new(&params, &["x"]).unwrap().required::<T>("x") else { panic!("it was taken") };
        assert_eq!(error.body().param.as_deref(), Some("x"));
        error.message().into()
    }

    #[test]
    fn types_are_not_coerced_but_whole_floats_are() {
        assert_eq!(f64::from_param(&json("3")), Some(3.0));
        assert_eq!(u64::from_param(&json("3.5")), None);
        assert_eq!(u64::from_param(&json("-1")), None);
        assert_eq!(u64::from_param(&json("\"3\"")), None);
        assert_eq!(bool::from_param(&json("1")), None);
        assert_eq!(Dtype::from_param(&json("\"bf16\"")), None);
        assert_eq!(Vec::<u64>::from_param(&json("[1, 2]")), Some(vec![1, 2]));
        assert_eq!(Vec::<u64>::from_param(&json("[1, -2]")), None);
    }

    #[test]
    fn a_refusal_says_what_was_expected_and_what_was_found() {
        assert_eq!(refusal::<u64>("-3"), "the parameter x must be a whole number of at least 0, found -3");
        assert_eq!(refusal::<bool>("\"yes\""), "the parameter x must be true or false, found \"yes\"");
        assert_eq!(refusal::<u64>("1.5"), "the parameter x must be a whole number of at least 0, found 1.5");
        assert_eq!(refusal::<String>("[1]"), "the parameter x must be a string, found a list of 1");
        let long = "é".repeat(90);
        assert!(refusal::<u64>(&format!("\"{long}\"")).len() < 160);
    }

    #[test]
    fn near_names_are_suggested() {
        assert_eq!(nearest("heads_dim", &["groups", "head_dim"]), Some("head_dim"));
        assert_eq!(nearest("zzz", &["groups", "head_dim"]), None);
        assert_eq!(distance(b"kitten", b"sitting"), 3);
    }
}
