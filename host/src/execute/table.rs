//! A table of tensor digests: what two hosts compare.

use std::collections::BTreeMap;

use super::arrange::ShardPlan;
use super::lanes;
use super::produce::{Sink, Workshop};
use crate::checkpoint::{Checkpoint, SourceDigests};
use crate::digest::{ContentDigest, LeafHasher, TensorDigest, content_digest};
use crate::error::Result;
use crate::store::document::EntryDocument;
use crate::tensor::{TensorName, TensorType};

/// Every tensor, aliases included, with its type and digest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DigestTable(pub BTreeMap<TensorName, (TensorType, TensorDigest)>);

impl DigestTable {
    /// The table's content digest.
    pub fn content_digest(&self) -> ContentDigest {
        content_digest(
            self.0.iter().map(|(name, (tensor, digest))| (name.as_str(), tensor.dtype(), tensor.shape(), *digest)),
        )
    }

    /// Adds aliases with their targets' values.
    pub fn add_aliases<'a>(&mut self, aliases: impl IntoIterator<Item = (&'a TensorName, &'a TensorName)>) {
        for (alias, of) in aliases {
            if let Some(row) = self.0.get(of).cloned() {
                self.0.insert(alias.clone(), row);
            }
        }
    }

    /// The table of a checkpoint, from its tensors' digests.
    pub fn of_checkpoint(checkpoint: &Checkpoint, digests: &SourceDigests) -> Self {
        let rows = checkpoint.tensors().iter();
        let rows = rows
            .filter_map(|(name, source)| Some((name.clone(), (source.tensor.clone(), *digests.by_name.get(name)?))));
        DigestTable(rows.collect())
    }

    /// The table of an entry.
    pub fn of_document(document: &EntryDocument) -> Self {
        let rows = document
            .tensors
            .iter()
            .filter_map(|t| Some((t.name.clone(), (TensorType::new(t.dtype, t.shape.clone())?, t.digest))));
        let mut table = DigestTable(rows.collect());
        table.add_aliases(document.aliases.iter().map(|a| (&a.name, &a.of)));
        table
    }
}

struct Hashing(LeafHasher);

impl Sink for Hashing {
    fn piece(&mut self, bytes: &[u8], leaves: Option<&[u8]>) -> Result<()> {
        let appended = leaves.and_then(|leaves| self.0.append_leaves(bytes.len() as u64, leaves));
        if appended.is_none() {
            self.0.update(bytes);
        }
        Ok(())
    }
}

/// Makes every wanted tensor and keeps its digest only.
///
/// # Errors
/// Those of [`Workshop::make`].
pub fn hash_all(workshop: &Workshop<'_>, shards: &[ShardPlan], lanes: usize) -> Result<DigestTable> {
    shards.iter().flat_map(|s| &s.tensors).for_each(|w| workshop.graph.retain(w.source));
    let rows = lanes::run(shards.len(), lanes, |position, give_up| {
        let mut rows = Vec::new();
        for wanted in &shards[position].tensors {
            if give_up() {
                break;
            }
            let mut sink = Hashing(LeafHasher::default());
            workshop.make(wanted.source, wanted.tensor.len_bytes(), &mut sink)?;
            workshop.graph.release(wanted.source);
            rows.push((wanted.name.clone(), (wanted.tensor.clone(), sink.0.finish().0)));
        }
        Ok(rows)
    })?;
    Ok(DigestTable(rows.into_iter().flatten().collect()))
}
