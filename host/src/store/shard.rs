//! The form of a shard: an ordinary safetensors file with aligned data.
//!
//! ```text
//! 0        8                     data_start (a multiple of 4,096)
//! ├ length ┼ JSON ┬ spaces ──────┼ tensor 0 ┬ filler ┬ tensor 1 ┬ …
//! └ little-endian, of JSON+spaces┘          └ zeros up to a multiple of 256
//! ```
//!
//! Layout version [`LAYOUT_VERSION`]. Its bytes are a function of the tensors'
//! names, types and data alone:
//! - tensors stand in ascending order of their names, each at the next multiple
//!   of 256 bytes; one of no bytes too;
//! - where that leaves a hole, a filler tensor `__pad__.N` of dtype `U8` names
//!   it (the format forbids holes) with N counting from 0; its bytes are zero;
//! - the header lists tensors and fillers in file order, each as
//!   `"name":{"dtype":…,"shape":[…],"data_offsets":[…]}` without spaces, and
//!   has no `__metadata__`: readers that ask for it see that there is none;
//! - spaces after the JSON bring the data to a multiple of 4,096 bytes: a page,
//!   and what direct reads and memory registration want.
//!
//! The layout is known from names and types before any data is, so it serves
//! the writer, and it is recomputed from the entry document whenever a shard
//! is opened and compared with the file.

use crate::digest::{HASH_BYTES, leaf_count};
use crate::error::{Code, Error, Result};
use crate::tensor::{PAD_PREFIX, TensorName, TensorType};

/// The version of the shard form; part of every action.
pub const LAYOUT_VERSION: u32 = 1;
/// What the data of a shard begins on a multiple of.
pub const DATA_ALIGNMENT_BYTES: u64 = 4096;
/// What every tensor begins on a multiple of.
pub const TENSOR_ALIGNMENT_BYTES: u64 = 256;
/// The longest header that the stock reader takes, and so the longest written.
const HEADER_LIMIT_BYTES: u64 = 100_000_000;
/// The largest file: offsets stay exact in JSON.
const SHARD_LIMIT_BYTES: u64 = crate::canonical::MAX_INTEGER;

/// Where a tensor is in its shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedTensor {
    /// Its name.
    pub name: TensorName,
    /// What it is.
    pub ty: TensorType,
    /// First byte in the file.
    pub offset: u64,
    /// Position of its first leaf in the shard's leaf list, counted in leaves.
    pub first_leaf: u64,
}

impl PlacedTensor {
    /// The byte after its last one, in the file.
    pub fn end(&self) -> u64 {
        self.offset + self.ty.len_bytes()
    }
}

/// Everything about a shard but its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardLayout {
    header: Vec<u8>,
    tensors: Vec<PlacedTensor>,
    size_bytes: u64,
    leaves: u64,
}

impl ShardLayout {
    /// Places tensors, which are given in ascending order of their names.
    ///
    /// # Errors
    /// `recipe_invalid` if the header or the file would be larger than a
    /// reader takes; `duplicate_output` if the names are not ascending.
    pub fn new(tensors: impl IntoIterator<Item = (TensorName, TensorType)>) -> Result<Self> {
        let mut placed: Vec<PlacedTensor> = Vec::new();
        let mut fillers = Vec::new();
        let (mut at, mut leaves) = (0_u64, 0_u64);
        for (name, ty) in tensors {
            if let Some(last) = placed.last().filter(|last| last.name >= name) {
                let message =
                    format!("the tensors of a shard are not in ascending order: '{}' before '{name}'", last.name);
                return Err(Error::new(Code::DuplicateOutput, message));
            }
            let offset = at.next_multiple_of(TENSOR_ALIGNMENT_BYTES);
            if offset > at {
                fillers.push((at, offset));
            }
            at = offset.checked_add(ty.len_bytes()).filter(|end| *end <= SHARD_LIMIT_BYTES).ok_or_else(|| {
                Error::new(Code::RecipeInvalid, format!("a shard is larger than {SHARD_LIMIT_BYTES} bytes at '{name}'"))
                    .hint("lower max_shard in the recipe's [layout]")
            })?;
            let first_leaf = leaves;
            leaves += leaf_count(ty.len_bytes());
            placed.push(PlacedTensor { name, ty, offset, first_leaf });
        }
        let header = header(&placed, &fillers);
        let data_start = header.len() as u64;
        if data_start - 8 > HEADER_LIMIT_BYTES {
            let message = format!("a shard's header has {} bytes, more than {HEADER_LIMIT_BYTES}", data_start - 8);
            return Err(Error::new(Code::RecipeInvalid, message)
                .hint("divide the tensors into more blocks, or lower max_shard in the recipe's [layout]"));
        }
        placed.iter_mut().for_each(|t| t.offset += data_start);
        Ok(ShardLayout { header, tensors: placed, size_bytes: data_start + at, leaves })
    }

    /// The file's first bytes, up to its data.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// Where the data begins.
    pub fn data_start(&self) -> u64 {
        self.header.len() as u64
    }

    /// The tensors in file order.
    pub fn tensors(&self) -> &[PlacedTensor] {
        &self.tensors
    }

    /// Size of the file.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// How many leaves its tensors have together.
    pub fn leaves(&self) -> u64 {
        self.leaves
    }

    /// Size of the leaf list.
    pub fn leaf_list_bytes(&self) -> u64 {
        self.leaves * HASH_BYTES as u64
    }

    /// The fillers, as ranges of the file.
    pub fn fillers(&self) -> impl Iterator<Item = std::ops::Range<u64>> {
        self.tensors.windows(2).map(|pair| pair[0].end()..pair[1].offset).filter(|range| !range.is_empty())
    }
}

fn header(tensors: &[PlacedTensor], fillers: &[(u64, u64)]) -> Vec<u8> {
    let mut json = String::from("{");
    let mut put = |name: &str, dtype: &str, shape: &[u64], begin: u64, end: u64| {
        let separator = if json.len() > 1 { "," } else { "" };
        let name = serde_json::Value::from(name);
        let shape: Vec<String> = shape.iter().map(u64::to_string).collect();
        json.push_str(&format!(
            "{separator}{name}:{{\"dtype\":\"{dtype}\",\"shape\":[{}],\"data_offsets\":[{begin},{end}]}}",
            shape.join(",")
        ));
    };
    let mut holes = fillers.iter().enumerate().peekable();
    for tensor in tensors {
        if let Some((n, (begin, end))) = holes.next_if(|(_, (_, end))| *end <= tensor.offset) {
            put(&format!("{PAD_PREFIX}{n}"), "U8", &[end - begin], *begin, *end);
        }
        put(tensor.name.as_str(), tensor.ty.dtype().as_str(), tensor.ty.shape(), tensor.offset, tensor.end());
    }
    json.push('}');
    let total = (8 + json.len() as u64).next_multiple_of(DATA_ALIGNMENT_BYTES);
    let mut bytes = (total - 8).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes.resize(total as usize, b' ');
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Dtype;

    fn layout(rows: &[(&str, Dtype, &[u64])]) -> ShardLayout {
        ShardLayout::new(rows.iter().map(|(name, dtype, shape)| {
            (TensorName::new(name).unwrap(), TensorType::new(*dtype, shape.to_vec()).unwrap())
        }))
        .unwrap()
    }

    #[test]
    fn the_bytes_of_version_1() {
        let layout = layout(&[("a", Dtype::F32, &[3]), ("b\"é", Dtype::U8, &[]), ("c", Dtype::BF16, &[0, 4])]);
        let json = concat!(
            r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"#,
            r#""__pad__.0":{"dtype":"U8","shape":[244],"data_offsets":[12,256]},"#,
            r#""b\"é":{"dtype":"U8","shape":[],"data_offsets":[256,257]},"#,
            r#""__pad__.1":{"dtype":"U8","shape":[255],"data_offsets":[257,512]},"#,
            r#""c":{"dtype":"BF16","shape":[0,4],"data_offsets":[512,512]}}"#
        );
        assert_eq!(layout.header()[..8], 4088_u64.to_le_bytes());
        assert_eq!(std::str::from_utf8(&layout.header()[8..]).unwrap().trim_end(), json);
        assert_eq!((layout.data_start(), layout.size_bytes(), layout.leaves()), (4096, 4096 + 512, 2));
        assert_eq!(layout.fillers().collect::<Vec<_>>(), [4108..4352, 4353..4608]);
    }

    #[test]
    fn the_stock_reader_opens_every_shape_of_shard() {
        let long = "n".repeat(4000);
        let shards: &[&[(&str, Dtype, &[u64])]] = &[
            &[],
            &[("z", Dtype::F32, &[0])],
            &[("a", Dtype::U8, &[256]), ("b", Dtype::U8, &[1])],
            &[("a", Dtype::F32, &[0]), ("b", Dtype::F32, &[0]), ("c", Dtype::F4, &[3, 2]), ("d", Dtype::F64, &[0])],
            &[(&long, Dtype::F8_E4M3, &[5000]), ("o", Dtype::I64, &[7, 1]), ("p", Dtype::BOOL, &[1, 1, 3])],
        ];
        for rows in shards {
            let layout = layout(rows);
            let mut file = layout.header().to_vec();
            file.resize(layout.size_bytes() as usize, 7);
            let read = safetensors::SafeTensors::deserialize(&file).unwrap();
            for tensor in layout.tensors() {
                let view = read.tensor(tensor.name.as_str()).unwrap();
                assert_eq!(view.dtype().to_string(), tensor.ty.dtype().as_str());
                let shape: Vec<u64> = view.shape().iter().map(|n| *n as u64).collect();
                assert_eq!(shape, tensor.ty.shape());
                assert_eq!(view.data().len() as u64, tensor.ty.len_bytes());
                if !view.data().is_empty() {
                    let offset = view.data().as_ptr() as usize - file.as_ptr() as usize;
                    assert_eq!(offset as u64, tensor.offset);
                }
                assert_eq!(tensor.offset % TENSOR_ALIGNMENT_BYTES, 0);
            }
            assert_eq!(layout.data_start() % DATA_ALIGNMENT_BYTES, 0);
            assert_eq!(read.names().len(), rows.len() + layout.fillers().count());
        }
    }

    #[test]
    fn what_no_reader_would_take_is_refused() {
        let row = |name: &str, len| (TensorName::new(name).unwrap(), TensorType::new(Dtype::U8, vec![len]).unwrap());
        let twice = ShardLayout::new([row("a", 1), row("a", 1)]).unwrap_err();
        assert_eq!(twice.code(), Code::DuplicateOutput);
        let most = (1 << 53) - 1;
        assert_eq!(ShardLayout::new([row("a", most), row("b", most)]).unwrap_err().code(), Code::RecipeInvalid);
    }
}
