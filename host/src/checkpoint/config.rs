//! `config.json`: the model's own description, for a recipe's parameters.

use std::path::Path;

use serde_json::Value;

use super::{file, json_problem};
use crate::error::{Code, Error, Result};

/// The file's name.
const NAME: &str = "config.json";
/// Real ones have a few KiB; with a table of labels, up to one or two MiB.
const LIMIT_BYTES: u64 = 4 << 20;

/// Reads it from `folder`, if it is there.
pub(super) fn read(folder: &Path) -> Result<Option<Value>> {
    let path = folder.join(NAME);
    let Some(bytes) = file::read_small(&path, LIMIT_BYTES)? else { return Ok(None) };
    parse(&bytes).map(Some).map_err(|e| e.context(format_args!("{path:?}")))
}

/// Parses it: a JSON object, in which Python's `NaN`, `Infinity` and
/// `-Infinity` may stand for numbers. They become strings of that spelling, so
/// that a recipe that asks for one is told what it got.
fn parse(bytes: &[u8]) -> Result<Value> {
    let invalid = |what: String| {
        Err(Error::new(Code::CheckpointInvalid, what).hint("correct the file, or fetch the checkpoint again"))
    };
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(e) => return invalid(format!("is not UTF-8: wrong byte at {}", e.valid_up_to())),
    };
    match serde_json::from_str(&quote_python_numbers(text)) {
        Ok(value @ Value::Object(_)) => Ok(value),
        Ok(_) => invalid("is JSON, but not an object".into()),
        Err(e) => invalid(format!("is not JSON: {}", json_problem(&e))),
    }
}

/// Puts the number words that Python's writer uses, and JSON does not have,
/// between quotes.
fn quote_python_numbers(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len());
    let mut rest = text;
    let mut in_string = false;
    while let Some(first) = rest.chars().next() {
        let word = ["NaN", "Infinity", "-Infinity"].into_iter().find(|w| !in_string && rest.starts_with(w));
        let taken = match (word, first) {
            (Some(word), _) => {
                quoted.extend(["\"", word, "\""]);
                rest = &rest[word.len()..];
                continue;
            }
            (None, '\\') if in_string => 1 + rest[1..].chars().next().map_or(0, char::len_utf8),
            (None, '"') => {
                in_string = !in_string;
                1
            }
            (None, other) => other.len_utf8(),
        };
        quoted.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn python_numbers_become_strings() {
        let text = r#"{"a":[0.0,Infinity,-Infinity],"b":NaN,"c":"NaN \" Infinity","d\\":-1,"é":"\u00e9"}"#;
        assert_eq!(
            parse(text.as_bytes()).unwrap(),
            json!({"a": [0.0, "Infinity", "-Infinity"], "b": "NaN", "c": "NaN \" Infinity", "d\\": -1, "é": "é"})
        );
    }

    #[test]
    fn what_is_not_an_object_is_refused() {
        let deep = [b'['; 100_000];
        for bad in [&b""[..], b"{", b"[]", b"NaN", b"{\"a\":01}", b"{\"a\":Infinit}", b"\xff{}", b"{\"\\", &deep] {
            assert_eq!(parse(bad).unwrap_err().code(), Code::CheckpointInvalid, "{bad:?}");
        }
    }

    #[test]
    fn integers_keep_their_type() {
        assert!(parse(br#"{"n":32}"#).unwrap()["n"].is_u64());
        assert!(parse(br#"{"n":32.0}"#).unwrap()["n"].is_f64());
    }
}
