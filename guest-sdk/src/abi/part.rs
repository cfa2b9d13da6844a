use alloc::vec::Vec;
use core::fmt;

use serde::de::{Deserializer, Error, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

/// A piece of a run of bytes.
///
/// ```
/// use weightmill_guest::abi::Part;
///
/// let part: Part = serde_json::from_str(r#"{"repeat":4,"parts":[{"copy":0,"len":8,"strides":[24]}]}"#).unwrap();
/// let inner = Part::Copy { copy: 0, offset: 0, len: 8, strides: vec![24] };
/// assert_eq!(part, Part::Repeat { repeat: 4, parts: vec![inner] });
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Part {
    /// Bytes of a source.
    Copy {
        /// Source number.
        copy: u64,
        /// First byte at turn 0 of every enclosing repeat.
        #[serde(skip_serializing_if = "is_zero")]
        offset: u64,
        /// Bytes.
        len: u64,
        /// What each enclosing repeat adds to the offset, outermost first.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        strides: Vec<u64>,
    },
    /// One byte value.
    Fill {
        /// The value.
        fill: u8,
        /// Bytes.
        len: u64,
    },
    /// The inner parts, several times.
    Repeat {
        /// How often.
        repeat: u64,
        /// What is repeated.
        parts: Vec<Part>,
    },
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "lowercase")]
enum Field {
    Copy,
    Offset,
    Len,
    Strides,
    Fill,
    Repeat,
    Parts,
}

/// The fields that were there; which of the three it is shows at the end.
#[derive(Default)]
struct Fields {
    copy: Option<u64>,
    offset: Option<u64>,
    len: Option<u64>,
    strides: Option<Vec<u64>>,
    fill: Option<u8>,
    repeat: Option<u64>,
    parts: Option<Vec<Part>>,
}

impl Fields {
    fn into_part<E: Error>(self) -> Result<Part, E> {
        match self {
            Fields { copy: Some(copy), offset, len: Some(len), strides, fill: None, repeat: None, parts: None } => {
                Ok(Part::Copy { copy, offset: offset.unwrap_or(0), len, strides: strides.unwrap_or_default() })
            }
            Fields {
                fill: Some(fill),
                len: Some(len),
                copy: None,
                offset: None,
                strides: None,
                repeat: None,
                parts: None,
            } => Ok(Part::Fill { fill, len }),
            Fields {
                repeat: Some(repeat),
                parts: Some(parts),
                copy: None,
                offset: None,
                len: None,
                strides: None,
                fill: None,
            } => Ok(Part::Repeat { repeat, parts }),
            _ => Err(E::custom(
                "a part has either copy and len (and offset, strides), or fill and len, or repeat and parts",
            )),
        }
    }
}

struct PartVisitor;

impl<'de> Visitor<'de> for PartVisitor {
    type Value = Part;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a part: an object with copy, fill or repeat")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Part, A::Error> {
        let mut fields = Fields::default();
        while let Some(field) = map.next_key()? {
            match field {
                Field::Copy => set(&mut fields.copy, &mut map, "copy")?,
                Field::Offset => set(&mut fields.offset, &mut map, "offset")?,
                Field::Len => set(&mut fields.len, &mut map, "len")?,
                Field::Strides => set(&mut fields.strides, &mut map, "strides")?,
                Field::Fill => set(&mut fields.fill, &mut map, "fill")?,
                Field::Repeat => set(&mut fields.repeat, &mut map, "repeat")?,
                Field::Parts => set(&mut fields.parts, &mut map, "parts")?,
            }
        }
        fields.into_part()
    }
}

fn set<'de, T: Deserialize<'de>, A: MapAccess<'de>>(
    slot: &mut Option<T>,
    map: &mut A,
    name: &'static str,
) -> Result<(), A::Error> {
    if slot.is_some() {
        return Err(A::Error::duplicate_field(name));
    }
    *slot = Some(map.next_value()?);
    Ok(())
}

/// Written by hand, because the derived reader of an untagged enum copies each
/// level of the document before it tries the variants, and then only says that
/// none of them fits.
impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Part, D::Error> {
        deserializer.deserialize_map(PartVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_survive_the_wire_in_their_shortest_form() {
        for text in [
            r#"{"copy":0,"len":5}"#,
            r#"{"copy":2,"offset":3,"len":5,"strides":[7,0,9]}"#,
            r#"{"fill":255,"len":1}"#,
            r#"{"repeat":3,"parts":[{"fill":0,"len":1},{"repeat":2,"parts":[{"copy":1,"len":1}]}]}"#,
        ] {
            let part: Part = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&part).unwrap(), text);
        }
    }

    #[test]
    fn what_is_no_part_is_refused_by_name() {
        for (text, why) in [
            (r#"{"copy":0}"#, "a part has either copy and len"),
            (r#"{"copy":0,"fill":1,"len":1}"#, "a part has either copy and len"),
            (r#"{"fill":0,"len":1,"strides":[1]}"#, "a part has either copy and len"),
            (r#"{"repeat":2,"parts":[{}]}"#, "a part has either copy and len"),
            (r#"{"fill":256,"len":1}"#, "invalid value: integer `256`, expected u8"),
            (r#"{"copy":-1,"len":1}"#, "invalid value: integer `-1`, expected u64"),
            (r#"{"copy":0,"len":1,"stride":[]}"#, "unknown field `stride`, expected one of"),
            (r#"{"copy":0,"copy":0,"len":1}"#, "duplicate field `copy`"),
            ("[]", "expected a part: an object with copy, fill or repeat"),
        ] {
            let error = serde_json::from_str::<Part>(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
