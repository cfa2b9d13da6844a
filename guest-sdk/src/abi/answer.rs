use alloc::vec::Vec;
use core::fmt;

use serde::de::{Deserializer, Error, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::{PlanErrorBody, PlanOutput, Scratch};

/// What `wm_plan` answers.
///
/// ```
/// use weightmill_guest::abi::PlanAnswer;
///
/// let answer: PlanAnswer = serde_json::from_str(r#"{"error":{"kind":"tp","message":"no"}}"#).unwrap();
/// assert!(matches!(answer, PlanAnswer::Error { .. }));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum PlanAnswer {
    /// The module refuses.
    Error {
        /// Why.
        error: PlanErrorBody,
    },
    /// The outputs.
    Plan {
        /// Every requested role, in any order.
        outputs: Vec<PlanOutput>,
        /// Tensors that stay inside the plan.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        scratch: Vec<Scratch>,
    },
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "lowercase")]
enum Field {
    Error,
    Outputs,
    Scratch,
}

struct AnswerVisitor;

impl<'de> Visitor<'de> for AnswerVisitor {
    type Value = PlanAnswer;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a plan: an object with outputs, or with error")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<PlanAnswer, A::Error> {
        let (mut error, mut outputs, mut scratch) = (None, None, None);
        while let Some(field) = map.next_key()? {
            match field {
                Field::Error if error.is_some() => return Err(A::Error::duplicate_field("error")),
                Field::Outputs if outputs.is_some() => return Err(A::Error::duplicate_field("outputs")),
                Field::Scratch if scratch.is_some() => return Err(A::Error::duplicate_field("scratch")),
                Field::Error => error = Some(map.next_value()?),
                Field::Outputs => outputs = Some(map.next_value()?),
                Field::Scratch => scratch = Some(map.next_value()?),
            }
        }
        match (error, outputs, scratch) {
            (Some(error), None, None) => Ok(PlanAnswer::Error { error }),
            (None, Some(outputs), scratch) => Ok(PlanAnswer::Plan { outputs, scratch: scratch.unwrap_or_default() }),
            _ => Err(A::Error::custom("a plan has either outputs (and scratch), or error")),
        }
    }
}

/// Written by hand: see [`Part`](super::Part).
impl<'de> Deserialize<'de> for PlanAnswer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<PlanAnswer, D::Error> {
        deserializer.deserialize_map(AnswerVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_a_plan_or_an_error() {
        let both = r#"{"outputs":[],"error":{"kind":"tp","message":"m"}}"#;
        for (text, why) in [
            (both, "either outputs (and scratch), or error"),
            ("{}", "either outputs (and scratch), or error"),
            (r#"{"output":[]}"#, "unknown field `output`"),
            (r#"{"outputs":[{"role":"w","dtype":"F33","shape":[]}]}"#, "unknown variant `F33`"),
            (r#"{"outputs":[{"role":"w","dtype":"F32","shape":[],"view":[{"copy":0}]}]}"#, "a part has either"),
        ] {
            let error = serde_json::from_str::<PlanAnswer>(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
        let error = r#"{"error":{"kind":"tp","message":"m"}}"#;
        let answer: PlanAnswer = serde_json::from_str(error).unwrap();
        assert_eq!(serde_json::to_string(&answer).unwrap(), error);
    }
}
