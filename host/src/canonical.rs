//! Canonical JSON (RFC 8785): the one spelling of a document that is hashed.

use serde::Serialize;

use crate::error::{Code, Error, Result};

/// The largest integer that a canonical document may hold, either sign.
pub const MAX_INTEGER: u64 = (1 << 53) - 1;

/// The canonical bytes of a document.
///
/// # Errors
/// `bad_params` if it holds an integer beyond ±(2⁵³−1) or something that JSON
/// cannot say.
pub fn to_canonical(document: &impl Serialize) -> Result<Vec<u8>> {
    let value = serde_json::to_value(document)
        .map_err(|e| Error::new(Code::BadParams, format!("a value cannot be written as JSON: {e}")))?;
    check_numbers(&value)?;
    serde_json_canonicalizer::to_vec(&value)
        .map_err(|e| Error::new(Code::BadParams, format!("a value has no canonical JSON form: {e}")))
}

fn check_numbers(value: &serde_json::Value) -> Result<()> {
    match value {
        serde_json::Value::Number(n) => {
            let magnitude = n.as_u64().or_else(|| n.as_i64().map(i64::unsigned_abs));
            match magnitude {
                Some(m) if m > MAX_INTEGER => {
                    Err(Error::new(Code::BadParams, format!("the integer {n} is beyond ±(2^53-1)"))
                        .hint("write it as a string or a float"))
                }
                _ => Ok(()),
            }
        }
        serde_json::Value::Array(items) => items.iter().try_for_each(check_numbers),
        serde_json::Value::Object(map) => map.values().try_for_each(check_numbers),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn keys_are_sorted_and_numbers_have_one_form() {
        let bytes = to_canonical(&json!({"b": 1.0, "a": [true, null, "é\n"], "c": 1e21, "d": 0.3})).unwrap();
        assert_eq!(String::from_utf8(bytes).unwrap(), "{\"a\":[true,null,\"é\\n\"],\"b\":1,\"c\":1e+21,\"d\":0.3}");
    }

    #[test]
    fn integers_beyond_the_exact_range_are_refused() {
        assert!(to_canonical(&json!(9_007_199_254_740_991_u64)).is_ok());
        for n in [json!(9_007_199_254_740_992_u64), json!(-9_007_199_254_740_992_i64)] {
            assert_eq!(to_canonical(&n).unwrap_err().code(), Code::BadParams);
        }
    }
}
