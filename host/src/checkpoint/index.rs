//! `*.safetensors.index.json`: which tensor is in which file.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Component, Path};
use std::sync::Arc;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use super::header::Text;
use super::{excerpt, file, json_problem};
use crate::error::{Code, Error, Result};
use crate::tensor::TensorName;

/// Several times what a model of 10¹² parameters needs.
const LIMIT_BYTES: u64 = 64 << 20;

/// A parsed index: not empty; file names are plain names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    /// The file of each tensor.
    pub weight_map: BTreeMap<TensorName, Arc<str>>,
}

impl Index {
    /// The files, ascending, each with the first tensor that is said to be in
    /// it.
    pub(super) fn files(&self) -> BTreeMap<&str, &TensorName> {
        let mut files = BTreeMap::new();
        for (tensor, file) in &self.weight_map {
            files.entry(&**file).or_insert(tensor);
        }
        files
    }
}

pub(super) fn read(path: &Path) -> Result<Index> {
    let bytes = file::read_small(path, LIMIT_BYTES)?
        .ok_or_else(|| Error::new(Code::SourceChanged, "was removed while it was read"));
    bytes.and_then(|bytes| parse(&bytes)).map_err(|e| e.context(format_args!("{path:?}")))
}

/// Parses an index.
///
/// # Errors
/// `checkpoint_invalid`, `bad_tensor_name`.
pub fn parse(bytes: &[u8]) -> Result<Index> {
    let invalid = |what: String| Error::new(Code::CheckpointInvalid, what).hint("the index is damaged: fetch it again");
    let text = std::str::from_utf8(bytes)
        .map_err(|e| invalid(format!("the index is not UTF-8: wrong byte at {}", e.valid_up_to())))?;
    let Document { weight_map } = serde_json::from_str(text)
        .map_err(|e| invalid(format!("expected {{\"weight_map\": {{tensor: file}}}}: {}", json_problem(&e))))?;
    let mut names: BTreeSet<Arc<str>> = BTreeSet::new();
    let mut index = Index { weight_map: BTreeMap::new() };
    for (tensor, file) in weight_map {
        let tensor = TensorName::new(&tensor)?;
        if !is_plain_file_name(&file) {
            return Err(invalid(format!(
                "the index says that '{tensor}' is in '{}', expected the name of a file in the same folder",
                excerpt(&file)
            )));
        }
        let file = match names.get(&*file) {
            Some(known) => known.clone(),
            None => {
                let name: Arc<str> = (*file).into();
                names.insert(name.clone());
                name
            }
        };
        if index.weight_map.insert(tensor.clone(), file).is_some() {
            return Err(invalid(format!("the index lists '{tensor}' twice")));
        }
    }
    if index.weight_map.is_empty() {
        return Err(invalid("the index lists no tensor".into()));
    }
    Ok(index)
}

fn is_plain_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let plain = matches!(components.next(), Some(Component::Normal(only)) if only == name);
    plain && components.next().is_none() && !name.chars().any(char::is_control)
}

/// The parts of the JSON that count, with repetitions still in it.
struct Document<'de> {
    weight_map: Vec<(Cow<'de, str>, Cow<'de, str>)>,
}

impl<'de> Deserialize<'de> for Document<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Document<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with weight_map")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let mut weight_map = None;
                let mut seen = BTreeSet::new();
                while let Some(Text(key)) = map.next_key()? {
                    if key == "weight_map" {
                        weight_map = Some(map.next_value::<WeightMap<'de>>()?.0);
                    } else {
                        map.next_value::<IgnoredAny>()?;
                    }
                    if let Some(twice) = seen.replace(key) {
                        return Err(M::Error::custom(format_args!("the key '{}' is there twice", excerpt(&twice))));
                    }
                }
                weight_map
                    .map(|weight_map| Document { weight_map })
                    .ok_or_else(|| M::Error::missing_field("weight_map"))
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

struct WeightMap<'de>(Vec<(Cow<'de, str>, Cow<'de, str>)>);

impl<'de> Deserialize<'de> for WeightMap<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Rows;
        impl<'de> Visitor<'de> for Rows {
            type Value = WeightMap<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of file names by tensor name")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let mut rows = Vec::new();
                while let Some((Text(tensor), Text(file))) = map.next_entry()? {
                    rows.push((tensor, file));
                }
                Ok(WeightMap(rows))
            }
        }
        deserializer.deserialize_map(Rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn real_ones_parse() {
        let index = parse(br#"{"metadata":{"total_size":5},"weight_map":{"b":"2.safetensors","a":"1.safetensors"}}"#);
        let index = index.unwrap();
        let files: Vec<_> = index.files().into_iter().map(|(f, t)| (f, t.as_str())).collect();
        assert_eq!(files, [("1.safetensors", "a"), ("2.safetensors", "b")]);
    }

    #[test]
    fn each_lie_is_refused() {
        let cases: &[(&str, &str)] = &[
            ("", "EOF"),
            ("[]", "expected an object"),
            ("{}", "missing field `weight_map`"),
            (r#"{"weight_map":{}}"#, "lists no tensor"),
            (r#"{"weight_map":{"a":1}}"#, "line 1"),
            (r#"{"weight_map":{"a":"f","a":"f"}}"#, "'a' twice"),
            (r#"{"weight_map":{"a":"f"},"weight_map":{"a":"f"}}"#, "'weight_map' is there twice"),
            (r#"{"x":1,"weight_map":{"a":"f"},"x":[]}"#, "'x' is there twice"),
            (r#"{"weight_map":{"a":"f"}} {}"#, "trailing characters"),
        ];
        for (text, part) in cases {
            let error = parse(text.as_bytes()).unwrap_err();
            assert_eq!(error.code(), Code::CheckpointInvalid, "{text}");
            assert!(error.message().contains(part), "{text}: {error}");
        }
        let deep = format!("{{\"x\":{}", "[".repeat(1_000_000));
        assert_eq!(parse(deep.as_bytes()).unwrap_err().code(), Code::CheckpointInvalid);
        assert_eq!(parse(b"{\"\xff\":1}").unwrap_err().code(), Code::CheckpointInvalid);
    }

    #[test]
    fn file_names_stay_in_the_folder() {
        for bad in ["", ".", "..", "/etc/passwd", "../m", "a/b", "a/", "./a", "a\\u0000", "a\\n"] {
            let text = format!(r#"{{"weight_map":{{"t":"{bad}"}}}}"#);
            assert_eq!(parse(text.as_bytes()).unwrap_err().code(), Code::CheckpointInvalid, "{bad}");
        }
    }

    #[test]
    fn tensor_names_are_checked() {
        for bad in ["", "a\\nb", "__pad__.0"] {
            let text = format!(r#"{{"weight_map":{{"{bad}":"f"}}}}"#);
            assert_eq!(parse(text.as_bytes()).unwrap_err().code(), Code::BadTensorName, "{bad}");
        }
    }
}
