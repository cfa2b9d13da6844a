//! The safetensors header: parsed strictly, so that whatever is accepted means
//! one thing only.
//!
//! ```text
//! 0        8             8 + n                                file_len
//! │ n: u64 │ JSON, spaces │ tensor │ tensor │ …            │ tensor │
//!                         └ data_offsets count from here
//! ```
//!
//! The JSON is one object of `name: {"dtype", "shape", "data_offsets"}` and an
//! optional `__metadata__` of strings, which is checked and passed over. The
//! tensors tile the data region: no byte is left out, none is used twice, and
//! the last tensor ends where the file does. A tensor without bytes sits on a
//! boundary. Two readers of an accepted file therefore cannot disagree; every
//! accepted file is also accepted by the stock reader.
//!
//! Nothing is allocated on the header's word: not more bytes are read than the
//! file has or [`LIMIT_BYTES`] allows, and what the parser builds is a small
//! multiple of that.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use super::{SourceFile, excerpt, json_problem};
use crate::error::{Code, Error, Result};
use crate::tensor::{Dtype, PAD_PREFIX, TensorName, TensorType};

/// Bytes of the length that a file begins with.
pub const PREFIX_BYTES: usize = 8;
/// The longest header, as in the stock reader.
pub const LIMIT_BYTES: usize = 100_000_000;
/// The most dimensions of a tensor: what the common frameworks can hold.
pub const MAX_DIMS: usize = 64;

const METADATA_KEY: &str = "__metadata__";

/// What a header says about a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The tensors, fillers left out.
    pub tensors: BTreeMap<TensorName, Place>,
    /// Bytes of fillers.
    pub filler_bytes: u64,
    /// Where the data begins.
    pub data_start: u64,
}

/// A tensor's type and its place in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Element type and shape.
    pub tensor: TensorType,
    /// First byte, from the beginning of the file.
    pub offset: u64,
}

/// Reads and parses the header of an open file.
pub(super) fn read(file: &SourceFile) -> Result<Header> {
    let file_len = file.identity().size_bytes;
    let parse_file = || {
        if file_len < PREFIX_BYTES as u64 {
            return Err(invalid(format!("has {file_len} bytes, a safetensors file has at least {PREFIX_BYTES}")));
        }
        let mut prefix = [0; PREFIX_BYTES];
        file.read_exact_at(&mut prefix, 0)?;
        let mut header = vec![0; header_len(file_len, prefix)?];
        file.read_exact_at(&mut header, PREFIX_BYTES as u64)?;
        parse(file_len, &header)
    };
    parse_file().map_err(|e| e.context(format_args!("{:?}", file.path())))
}

/// The header's length, from the first bytes of a file of `file_len` bytes.
///
/// # Errors
/// `checkpoint_invalid` if it is over [`LIMIT_BYTES`] or the file is shorter.
pub fn header_len(file_len: u64, prefix: [u8; PREFIX_BYTES]) -> Result<usize> {
    let len = u64::from_le_bytes(prefix);
    if len > LIMIT_BYTES as u64 {
        return Err(invalid(format!("the header's length is {len}, more than {LIMIT_BYTES}")));
    }
    let behind = file_len.saturating_sub(PREFIX_BYTES as u64);
    if len > behind {
        return Err(invalid(format!("the header's length is {len}, but only {behind} bytes follow it")));
    }
    Ok(len as usize)
}

/// Parses the header of a file of `file_len` bytes: all the bytes behind the
/// prefix, as many as it says.
///
/// # Errors
/// `checkpoint_invalid`, `bad_tensor_name`.
pub fn parse(file_len: u64, header: &[u8]) -> Result<Header> {
    let data_start = header.len() as u64 + PREFIX_BYTES as u64;
    let Some(data_len) = file_len.checked_sub(data_start) else {
        return Err(invalid(format!("the header ends at byte {data_start}, but the file at {file_len}")));
    };
    let rows = parse_json(header)?;
    refuse_duplicates(&rows)?;

    let mut parsed = Header { tensors: BTreeMap::new(), filler_bytes: 0, data_start };
    let mut ranges = Vec::with_capacity(rows.len());
    for row in &rows {
        let tensor = row.check(data_len)?;
        let (begin, end) = (row.begin, row.end);
        ranges.push((begin, end, &*row.name));
        if is_filler(&row.name, tensor.dtype()) {
            parsed.filler_bytes += tensor.len_bytes();
        } else {
            let place = Place { tensor, offset: data_start + begin };
            parsed.tensors.insert(TensorName::new(&row.name)?, place);
        }
    }
    check_tiling(ranges, data_len)?;
    Ok(parsed)
}

/// Whether this is one of the tensors that shards are aligned with.
fn is_filler(name: &str, dtype: Dtype) -> bool {
    let number = name.strip_prefix(PAD_PREFIX);
    dtype == Dtype::U8 && number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

fn invalid(what: impl Into<String>) -> Error {
    Error::new(Code::CheckpointInvalid, what)
        .hint("the file is damaged, or no safetensors file: fetch or convert it again")
}

fn refuse_duplicates(rows: &[Row<'_>]) -> Result<()> {
    let mut names: Vec<&str> = rows.iter().map(|row| &*row.name).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(invalid(format!("the tensor '{}' is there twice", excerpt(pair[0])))),
        None => Ok(()),
    }
}

fn check_tiling(mut ranges: Vec<(u64, u64, &str)>, data_len: u64) -> Result<()> {
    ranges.sort_unstable();
    let (mut covered, mut last) = (0, "");
    for (begin, end, name) in ranges {
        if begin > covered {
            return Err(invalid(format!(
                "no tensor has the bytes {covered} to {begin} of the data, before the tensor '{}'",
                excerpt(name)
            )));
        }
        if begin < covered {
            return Err(invalid(format!(
                "the tensors '{}' and '{}' overlap: the first ends at byte {covered} of the data, the other begins at \
                 {begin}",
                excerpt(last),
                excerpt(name)
            )));
        }
        (covered, last) = (end, name);
    }
    if covered != data_len {
        return Err(invalid(format!("the tensors end at byte {covered} of the data, but the file at {data_len}")));
    }
    Ok(())
}

/// A tensor as the JSON has it.
struct Row<'de> {
    name: Cow<'de, str>,
    dtype: Cow<'de, str>,
    shape: Vec<u64>,
    begin: u64,
    end: u64,
}

impl Row<'_> {
    fn check(&self, data_len: u64) -> Result<TensorType> {
        let fail = |what: String| Err(invalid(format!("the tensor '{}' {what}", excerpt(&self.name))));
        let (begin, end) = (self.begin, self.end);
        let Ok(dtype) = self.dtype.parse::<Dtype>() else {
            return fail(format!("has the unknown dtype '{}'", excerpt(&self.dtype)));
        };
        let Some(tensor) = TensorType::new(dtype, self.shape.clone()) else {
            return fail(format!("is {dtype} {:?}: not a whole number of bytes, or too many", self.shape));
        };
        if begin > end || end > data_len {
            return fail(format!("has the bytes {begin} to {end} of the data, which has {data_len}"));
        }
        let (has, needs) = (end - begin, tensor.len_bytes());
        if has != needs {
            return fail(format!("has {has} bytes ({begin} to {end}), but {tensor} takes {needs}"));
        }
        Ok(tensor)
    }
}

fn parse_json(header: &[u8]) -> Result<Vec<Row<'_>>> {
    let text = std::str::from_utf8(header)
        .map_err(|e| invalid(format!("the header is not UTF-8: wrong byte at {}", e.valid_up_to())))?;
    let object = text.trim_end_matches(' ');
    if !object.starts_with('{') || !object.ends_with('}') {
        return Err(invalid("the header is not a JSON object, padded with spaces at the end"));
    }
    let mut current = None;
    let mut json = serde_json::Deserializer::from_str(object);
    let rows = Rows { current: &mut current }.deserialize(&mut json).and_then(|rows| json.end().map(|()| rows));
    rows.map_err(|e| {
        let problem = json_problem(&e);
        invalid(match current {
            Some(name) => format!("the header's '{}': {problem}", excerpt(&name)),
            None => format!("the header: {problem}"),
        })
    })
}

/// The header's object. Repeated names are still in what it gives.
struct Rows<'c, 'de> {
    /// What is being parsed, for the message.
    current: &'c mut Option<Cow<'de, str>>,
}

impl<'de> DeserializeSeed<'de> for Rows<'_, 'de> {
    type Value = Vec<Row<'de>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Rows<'_, 'de> {
    type Value = Vec<Row<'de>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors by name")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
        let mut rows = Vec::new();
        let mut has_metadata = false;
        while let Some(Text(name)) = map.next_key()? {
            *self.current = Some(name.clone());
            if name == METADATA_KEY {
                if std::mem::replace(&mut has_metadata, true) {
                    return Err(M::Error::custom("is there twice"));
                }
                map.next_value::<Metadata>()?;
            } else {
                rows.push(map.next_value_seed(Fields { name })?);
            }
            *self.current = None;
        }
        Ok(rows)
    }
}

/// The object of one tensor.
struct Fields<'de> {
    name: Cow<'de, str>,
}

impl<'de> DeserializeSeed<'de> for Fields<'de> {
    type Value = Row<'de>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Fields<'de> {
    type Value = Row<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Row<'de>, M::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(Text(field)) = map.next_key()? {
            let twice = match &*field {
                "dtype" => dtype.replace(map.next_value::<Text<'de>>()?.0).is_some(),
                "shape" => shape.replace(map.next_value::<Integers<MAX_DIMS>>()?.0).is_some(),
                "data_offsets" => offsets.replace(map.next_value::<Integers<2>>()?.0).is_some(),
                _ => return Err(M::Error::custom(format_args!("has the unknown field '{}'", excerpt(&field)))),
            };
            if twice {
                return Err(M::Error::custom(format_args!("has {field} twice")));
            }
        }
        let offsets = offsets.ok_or_else(|| M::Error::missing_field("data_offsets"))?;
        let [begin, end] = offsets[..] else {
            return Err(M::Error::custom("data_offsets has fewer than 2 numbers"));
        };
        Ok(Row {
            name: self.name,
            dtype: dtype.ok_or_else(|| M::Error::missing_field("dtype"))?,
            shape: shape.ok_or_else(|| M::Error::missing_field("shape"))?,
            begin,
            end,
        })
    }
}

/// The object `__metadata__`: strings only, no key twice, not kept.
struct Metadata;

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Strings;
        impl<'de> Visitor<'de> for Strings {
            type Value = Metadata;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Metadata, M::Error> {
                let mut seen = BTreeSet::new();
                while let Some((Text(key), Text(_))) = map.next_entry()? {
                    if let Some(twice) = seen.replace(key) {
                        return Err(M::Error::custom(format_args!("has '{}' twice", excerpt(&twice))));
                    }
                }
                Ok(Metadata)
            }
        }
        deserializer.deserialize_map(Strings)
    }
}

/// At most `MAX` non-negative integers; more are refused before they are kept.
struct Integers<const MAX: usize>(Vec<u64>);

impl<'de, const MAX: usize> Deserialize<'de> for Integers<MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List<const MAX: usize>(PhantomData<[(); MAX]>);
        impl<'de, const MAX: usize> Visitor<'de> for List<MAX> {
            type Value = Integers<MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of non-negative integers")
            }

            fn visit_seq<S: SeqAccess<'de>>(self, mut seq: S) -> Result<Integers<MAX>, S::Error> {
                let mut list = Vec::new();
                while let Some(number) = seq.next_element()? {
                    if list.len() == MAX {
                        return Err(S::Error::custom(format_args!("has a list of more than {MAX} numbers")));
                    }
                    list.push(number);
                }
                Ok(Integers(list))
            }
        }
        deserializer.deserialize_seq(List::<MAX>(PhantomData))
    }
}

/// A JSON string, borrowed where it holds no escapes.
pub(super) struct Text<'de>(pub(super) Cow<'de, str>);

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnyString;
        impl<'de> Visitor<'de> for AnyString {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_string())))
            }
        }
        deserializer.deserialize_str(AnyString)
    }
}

#[cfg(test)]
mod tests;
