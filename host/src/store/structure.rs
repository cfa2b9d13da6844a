//! What an entry document must satisfy before anything it says is believed.
//!
//! A document that arrives by its right digest is what somebody published,
//! not necessarily what weightmill writes: it may come from another version
//! or another host. So it is parsed into layouts once, here, and everything
//! after works with those.

use super::document::{EntryDocument, REST, SCHEMA, ShardRecord};
use super::shard::ShardLayout;
use crate::digest::{TensorDigest, leaf_count};
use crate::error::{Code, Error, Result};
use crate::tensor::{Dtype, TensorName, TensorType};

/// A tensor as a record of a shard gives it.
pub(crate) struct Row<'a> {
    pub(crate) name: &'a TensorName,
    pub(crate) dtype: Dtype,
    pub(crate) shape: &'a [u64],
    pub(crate) offset: u64,
}

pub(crate) fn malformed(what: impl std::fmt::Display) -> Error {
    Error::new(Code::CorruptBlob, format!("the entry document is malformed: {what}"))
        .hint("remove the entry with `weightmill store rm KEY` and build it again")
}

/// The layout of a shard that holds `rows`, after comparing it with what the
/// shard's record and the rows' offsets say.
pub(crate) fn shard_layout<'a>(record: &ShardRecord, rows: impl IntoIterator<Item = Row<'a>>) -> Result<ShardLayout> {
    let mut offsets = Vec::new();
    let mut typed = Vec::new();
    for row in rows {
        let ty = TensorType::new(row.dtype, row.shape.to_vec()).ok_or_else(|| {
            malformed(format!("'{}' has the impossible type {} {:?}", row.name, row.dtype, row.shape))
        })?;
        offsets.push(row.offset);
        typed.push((row.name.clone(), ty));
    }
    let layout = ShardLayout::new(typed).map_err(|e| malformed(e.message()))?;
    for (tensor, offset) in layout.tensors().iter().zip(offsets) {
        if tensor.offset != offset {
            return Err(malformed(format!(
                "'{}' is at {offset}, where its shard's form puts it at {}",
                tensor.name, tensor.offset
            )));
        }
    }
    if record.size != layout.size_bytes() || record.leaves_size != layout.leaf_list_bytes() {
        return Err(malformed(format!(
            "the shard {} has {} bytes and {} of leaf hashes, where its tensors take {} and {}",
            record.digest,
            record.size,
            record.leaves_size,
            layout.size_bytes(),
            layout.leaf_list_bytes()
        )));
    }
    Ok(layout)
}

impl EntryDocument {
    /// The layouts of the shards, once everything in the document has been
    /// found to hold together.
    ///
    /// # Errors
    /// `corrupt_blob`, saying what does not.
    pub fn layouts(&self) -> Result<Vec<ShardLayout>> {
        if self.schema != SCHEMA {
            return Err(malformed(format!("its schema is '{}', not '{SCHEMA}'", self.schema)));
        }
        self.check_names()?;
        self.check_blocks()?;
        let mut rows: Vec<Vec<Row<'_>>> = self.shards.iter().map(|_| Vec::new()).collect();
        for tensor in &self.tensors {
            let shard = rows.get_mut(tensor.shard as usize).ok_or_else(|| {
                malformed(format!("'{}' is in shard {} of {}", tensor.name, tensor.shard, self.shards.len()))
            })?;
            shard.push(Row { name: &tensor.name, dtype: tensor.dtype, shape: &tensor.shape, offset: tensor.offset });
        }
        let layouts =
            self.shards.iter().zip(rows).map(|(record, rows)| shard_layout(record, rows)).collect::<Result<_>>()?;
        let computed = self.compute_content_digest();
        if computed != self.content_digest {
            return Err(malformed(format!(
                "its content digest is {}, where its tables give {computed}",
                self.content_digest
            )));
        }
        Ok(layouts)
    }

    fn check_names(&self) -> Result<()> {
        let not_ascending = |name: &TensorName| malformed(format!("its names are not ascending at '{name}'"));
        if let Some(pair) = self.tensors.windows(2).find(|pair| pair[0].name >= pair[1].name) {
            return Err(not_ascending(&pair[1].name));
        }
        if let Some(pair) = self.aliases.windows(2).find(|pair| pair[0].name >= pair[1].name) {
            return Err(not_ascending(&pair[1].name));
        }
        let holds = |name: &TensorName| self.tensors.binary_search_by(|t| t.name.cmp(name)).is_ok();
        for alias in &self.aliases {
            if holds(&alias.name) {
                return Err(malformed(format!("'{}' is both a tensor and an alias", alias.name)));
            }
            if !holds(&alias.of) {
                return Err(malformed(format!("the alias '{}' is of '{}', which is no tensor", alias.name, alias.of)));
            }
        }
        Ok(())
    }

    fn check_blocks(&self) -> Result<()> {
        let mut names: Vec<&str> = self.blocks.iter().map(|b| b.name.as_str()).collect();
        if names.iter().skip(1).any(|name| *name == REST) {
            return Err(malformed(format!("the block '{REST}' is not the first")));
        }
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(malformed(format!("two blocks are named '{}'", pair[0])));
        }
        let in_order = self.blocks.iter().flat_map(|b| b.shards.iter().map(|s| *s as usize)).eq(0..self.shards.len());
        if !in_order {
            return Err(malformed("its blocks do not divide the shards in their order"));
        }
        Ok(())
    }
}

/// The digest of a tensor of a verified leaf list; `None` if the list is too
/// short.
pub(crate) fn digest_from_leaves(layout: &ShardLayout, index: usize, leaf_list: &[u8]) -> Option<TensorDigest> {
    let tensor = layout.tensors().get(index)?;
    let hash_bytes = crate::digest::HASH_BYTES;
    let begin = tensor.first_leaf as usize * hash_bytes;
    let end = begin + leaf_count(tensor.ty.len_bytes()) as usize * hash_bytes;
    Some(crate::digest::tensor_digest(tensor.ty.len_bytes(), leaf_list.get(begin..end)?))
}
