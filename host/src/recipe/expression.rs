//! `$config` expressions: values taken from the checkpoint's config.json.
//!
//! ```text
//! expression = "$config." path { ("*" | "/") operand } [ "??" JSON literal ]
//! operand    = "$config." path | integer
//! path       = key { "." key }
//! ```
//!
//! Operators go left to right and a division must be exact. The literal stands
//! for the whole expression if the file, or any key in it, is missing; a key
//! whose value is `null` is there.

use serde_json::Value;

use crate::canonical::MAX_INTEGER;
use crate::error::{Code, Error, Result, nearest};

/// What an expression begins with.
pub(super) const PREFIX: &str = "$config.";
/// The file that expressions are about.
const FILE: &str = "config.json";
/// How many operands an expression may have.
const MAX_OPERANDS: usize = 32;

/// A parsed expression.
#[derive(Clone, Debug)]
pub(super) struct Expression {
    text: String,
    first: Operand,
    rest: Vec<(Operator, Operand)>,
    fallback: Option<Value>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operator {
    Times,
    Over,
}

#[derive(Clone, Debug)]
enum Operand {
    /// Keys from the root of config.json.
    Path(Vec<String>),
    Integer(i64),
}

impl Expression {
    /// Reads a text that begins with [`PREFIX`].
    ///
    /// # Errors
    /// `recipe_invalid`, without a location.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let refuse = |why: &str| {
            Error::new(Code::RecipeInvalid, format!("the expression '{text}' {why}")).hint(
                "operands are $config.dotted.path or an integer, operators * and /, and ?? with a JSON literal may end it; \
                 write $$ for a text that begins with $",
            )
        };
        let (arithmetic, fallback) = match text.split_once("??") {
            None => (text, None),
            Some((arithmetic, literal)) => {
                let value = serde_json::from_str::<Value>(literal)
                    .map_err(|_| refuse(&format!("has '{}' after ??, which is no JSON literal", literal.trim())))?;
                if !within_range(&value) {
                    return Err(refuse("has an integer beyond ±(2^53-1)"));
                }
                (arithmetic, Some(value))
            }
        };
        let mut operands = arithmetic.split(['*', '/']).map(|operand| {
            let operand = operand.trim();
            read_operand(operand).ok_or_else(|| refuse(&format!("has '{operand}' where an operand is expected")))
        });
        let first = operands.next().unwrap_or_else(|| Err(refuse("is empty")))?;
        let operators = arithmetic.chars().filter_map(|c| match c {
            '*' => Some(Operator::Times),
            '/' => Some(Operator::Over),
            _ => None,
        });
        let rest =
            operators.zip(operands).map(|(operator, operand)| Ok((operator, operand?))).collect::<Result<Vec<_>>>()?;
        if rest.len() >= MAX_OPERANDS {
            return Err(refuse(&format!("has more than {MAX_OPERANDS} operands")));
        }
        Ok(Expression { text: text.to_owned(), first, rest, fallback })
    }

    /// The value for a checkpoint's config.json (`None`: there is no such
    /// file). The JSON type is kept.
    ///
    /// # Errors
    /// `missing_config`, or `bad_params` for arithmetic that has no exact
    /// integer result; without a location.
    pub(super) fn evaluate(&self, config: Option<&Value>) -> Result<Value> {
        match self.compute(config) {
            Err(error) if error.code() == Code::MissingConfig => match &self.fallback {
                Some(value) => Ok(value.clone()),
                None => Err(error),
            },
            result => result,
        }
    }

    fn compute(&self, config: Option<&Value>) -> Result<Value> {
        let value = self.first.value(config)?;
        if self.rest.is_empty() {
            return match within_range(&value) {
                true => Ok(value),
                false => Err(self.bad("has an integer beyond ±(2^53-1)")),
            };
        }
        // All keys are looked up before anything is computed, so that a
        // missing one is found whatever the others are.
        let rest = self.rest.iter().map(|(operator, operand)| Ok((operator, operand, operand.value(config)?)));
        let rest = rest.collect::<Result<Vec<_>>>()?;
        let mut result = self.integer(&self.first, &value)?;
        for (operator, operand, value) in rest {
            let value = self.integer(operand, &value)?;
            result = match operator {
                Operator::Times => result.checked_mul(value).ok_or_else(|| self.bad("overflows"))?,
                Operator::Over if value == 0 => return Err(self.bad("divides by zero")),
                Operator::Over if result % value != 0 => {
                    return Err(self.bad(&format!("divides {result} by {value}, which is not exact")));
                }
                Operator::Over => result / value,
            };
        }
        match i64::try_from(result) {
            Ok(result) if result.unsigned_abs() <= MAX_INTEGER => Ok(result.into()),
            _ => Err(self.bad(&format!("gives {result}, which is beyond ±(2^53-1)"))),
        }
    }

    fn integer(&self, operand: &Operand, value: &Value) -> Result<i128> {
        value.as_i64().map(i128::from).or_else(|| value.as_u64().map(i128::from)).ok_or_else(|| {
            let found = match value {
                Value::Null => "null",
                Value::Bool(_) => "a boolean",
                Value::Number(_) => "a number that is no integer",
                Value::String(_) => "a string",
                Value::Array(_) => "an array",
                Value::Object(_) => "an object",
            };
            self.bad(&format!("computes with {}, which is {found}, not an integer", operand.written()))
        })
    }

    fn bad(&self, why: &str) -> Error {
        Error::new(Code::BadParams, format!("the expression '{}' {why}", self.text))
    }
}

impl Operand {
    fn written(&self) -> String {
        match self {
            Operand::Path(keys) => format!("{PREFIX}{}", keys.join(".")),
            Operand::Integer(n) => n.to_string(),
        }
    }

    fn value(&self, config: Option<&Value>) -> Result<Value> {
        let keys = match self {
            Operand::Integer(n) => return Ok((*n).into()),
            Operand::Path(keys) => keys,
        };
        let path = keys.join(".");
        let Some(mut value) = config else {
            return Err(Error::new(
                Code::MissingConfig,
                format!("'{path}' is asked for, but the checkpoint has no {FILE}"),
            )
            .hint(format!("put {FILE} beside the tensors, or end the expression with ?? and a value")));
        };
        for key in keys {
            value = match value.get(key) {
                Some(inner) => inner,
                None => {
                    let known = value.as_object().map(|map| map.keys().map(String::as_str)).into_iter().flatten();
                    let hint = match nearest(key, known) {
                        Some(near) => format!("did you mean '{near}'?"),
                        None => "end the expression with ?? and a value if the key may be missing".to_owned(),
                    };
                    let part = if keys.len() > 1 { format!(" (there is no '{key}')") } else { String::new() };
                    return Err(Error::new(Code::MissingConfig, format!("{FILE} has no '{path}'{part}")).hint(hint));
                }
            };
        }
        Ok(value.clone())
    }
}

fn read_operand(text: &str) -> Option<Operand> {
    if let Some(path) = text.strip_prefix(PREFIX) {
        let keys: Vec<String> = path.split('.').map(str::to_owned).collect();
        let is_key = |key: &String| !key.is_empty() && key.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '-');
        return keys.iter().all(is_key).then_some(Operand::Path(keys));
    }
    let digits = text.strip_prefix('-').unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    text.parse().ok().filter(|n: &i64| n.unsigned_abs() <= MAX_INTEGER).map(Operand::Integer)
}

/// Whether canonical JSON can say all its integers.
fn within_range(value: &Value) -> bool {
    match value {
        Value::Number(n) => n.as_u64().or_else(|| n.as_i64().map(i64::unsigned_abs)).is_none_or(|m| m <= MAX_INTEGER),
        Value::Array(items) => items.iter().all(within_range),
        Value::Object(map) => map.values().all(within_range),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config() -> Value {
        json!({
            "hidden": 48, "heads": 8, "eps": 1e-5, "eight": 8.0, "act": "silu", "none": null, "zero": 0, "minus": -3,
            "flag": true, "big": 9_007_199_254_740_991_u64, "huge": 9_007_199_254_740_992_u64,
            "text": {"heads": 2, "list": [1, 2]}, "nested": {"deep": [9_007_199_254_740_992_u64]}, "a-b": 1
        })
    }

    fn eval(text: &str) -> Result<Value> {
        Expression::parse(text)?.evaluate(Some(&config()))
    }

    #[test]
    fn a_single_path_keeps_its_json_type() {
        for (text, want) in [
            ("$config.hidden", json!(48)),
            ("$config.text.heads", json!(2)),
            ("$config.eps", json!(1e-5)),
            ("$config.act", json!("silu")),
            ("$config.none", json!(null)),
            ("$config.none ?? 3", json!(null)),
            ("$config.flag", json!(true)),
            ("$config.text", json!({"heads": 2, "list": [1, 2]})),
            ("$config.a-b", json!(1)),
        ] {
            assert_eq!(eval(text).unwrap(), want, "{text}");
        }
        assert!(eval("$config.eight").unwrap().is_f64());
    }

    #[test]
    fn operators_go_left_to_right_and_are_exact() {
        for (text, want) in [
            ("$config.hidden / $config.heads", 6),
            ("$config.hidden/$config.heads*2", 12),
            ("$config.hidden * 2 / 32", 3),
            ("$config.heads * $config.minus", -24),
            ("$config.heads * -2", -16),
            ("$config.big * 4 / 4", 9_007_199_254_740_991_i64),
            ("$config.zero / 7", 0),
        ] {
            assert_eq!(eval(text).unwrap(), json!(want), "{text}");
        }
        for text in [
            "$config.hidden / 5",
            "$config.heads / 3 * 3",
            "$config.hidden / $config.zero",
            "$config.big * 2",
            "$config.big * $config.big * $config.big",
            "$config.act * 2",
            "$config.none * 2",
            "$config.eps * 2",
            "$config.eight / 2",
            "$config.flag * 2",
            "$config.text * 2",
            "$config.huge",
            "$config.nested",
            "$config.hidden / 5 ?? 1",
        ] {
            assert_eq!(eval(text).unwrap_err().code(), Code::BadParams, "{text}");
        }
    }

    #[test]
    fn a_literal_stands_for_what_is_missing() {
        for (text, want) in [
            ("$config.nope ?? 8", json!(8)),
            ("$config.nope??8", json!(8)),
            ("$config.nope ?? -8", json!(-8)),
            ("$config.nope ?? \"a ?? b\"", json!("a ?? b")),
            ("$config.nope ?? [1, {\"a\": null}]", json!([1, {"a": null}])),
            ("$config.hidden / $config.nope ?? 64", json!(64)),
            ("$config.act / $config.nope ?? 64", json!(64)),
            ("$config.hidden.deeper ?? true", json!(true)),
            ("$config.heads ?? 64", json!(8)),
        ] {
            assert_eq!(eval(text).unwrap(), want, "{text}");
        }
        assert_eq!(Expression::parse("$config.a.b ?? 1").unwrap().evaluate(None).unwrap(), json!(1));
        assert!(eval("$config.nope ?? 1.0").unwrap().is_f64());
    }

    #[test]
    fn missing_names_the_path_the_file_and_the_nearest_key() {
        let error = eval("$config.text.head").unwrap_err();
        assert_eq!(error.code(), Code::MissingConfig);
        assert!(error.message().contains("text.head") && error.message().contains("config.json"), "{error}");
        assert_eq!(error.hint_text(), Some("did you mean 'heads'?"));
        let error = Expression::parse("$config.text.head").unwrap().evaluate(None).unwrap_err();
        assert_eq!(error.code(), Code::MissingConfig);
        assert!(error.message().contains("text.head") && error.message().contains("config.json"), "{error}");
        assert_eq!(eval("$config.hidden / $config.nope").unwrap_err().code(), Code::MissingConfig);
    }

    #[test]
    fn malformed_expressions_are_refused() {
        for text in [
            "$config.",
            "$config.a.",
            "$config..a",
            "$config.a b",
            "$config.a + 1",
            "$config.a *",
            "$config.a * * 2",
            "$config.a / (2)",
            "$config.a * 1.5",
            "$config.a * 99999999999999999999",
            "$config.a * 9007199254740992",
            "$config.a ? 1",
            "$config.a ??",
            "$config.a ?? x",
            "$config.a ?? 1 2",
            "$config.a ?? 9007199254740992",
            "$config.a * config.b",
            "$config.a * $config",
            &format!("$config.a{}", " * 1".repeat(32)),
        ] {
            assert_eq!(Expression::parse(text).unwrap_err().code(), Code::RecipeInvalid, "{text}");
        }
    }
}
