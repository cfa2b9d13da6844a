//! The digest cache for checkpoint files.
//!
//! One record for each (device, inode), so that a file that changes replaces
//! its own record and the folder stays as small as the checkpoints are many.
//! The record holds the whole identity it was made for (size, times of the
//! last change of content and of attributes) and is taken for no other. That
//! an identity stands for a content is the caller's part: it must not save
//! digests of a file that changed so recently that a later change could carry
//! the same times.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Store;
use super::records::Kind;
use crate::checkpoint::{DigestCache, FileIdentity};
use crate::digest::{RecordDigest, TensorDigest};
use crate::tensor::TensorName;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SourceRecord {
    file: FileIdentity,
    tensors: BTreeMap<TensorName, TensorDigest>,
}

impl Store {
    fn source_path(&self, file: &FileIdentity) -> PathBuf {
        let name = format!("weightmill source v1\n{}\n{}\n", file.device, file.inode);
        self.0.paths.source(&RecordDigest::of(name.as_bytes()))
    }
}

impl DigestCache for Store {
    fn load(&self, file: &FileIdentity) -> Option<BTreeMap<TensorName, TensorDigest>> {
        let record: SourceRecord = self.0.read_record(&self.source_path(file), Kind::Source)?;
        (record.file == *file).then_some(record.tensors)
    }

    fn save(&self, file: &FileIdentity, digests: &BTreeMap<TensorName, TensorDigest>) {
        let record = SourceRecord { file: file.clone(), tensors: digests.clone() };
        // A cache that cannot be written keeps nothing.
        let _ = self.0.write_record(&self.source_path(file), Kind::Source, &record);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoreOptions;

    #[test]
    fn a_record_is_for_one_identity() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), StoreOptions::default()).unwrap();
        let file = FileIdentity {
            device: 3,
            inode: u64::MAX,
            size_bytes: 10,
            modified: (-5, 999_999_999),
            changed: (1_700_000_000, 1),
        };
        let digests = BTreeMap::from([(TensorName::new("é\"").unwrap(), TensorDigest::of(b"x"))]);
        assert_eq!(store.load(&file), None);
        store.save(&file, &digests);
        assert_eq!(store.load(&file), Some(digests.clone()));
        let changed = [
            FileIdentity { size_bytes: 11, ..file.clone() },
            FileIdentity { modified: (-5, 0), ..file.clone() },
            FileIdentity { changed: (1_700_000_000, 2), ..file.clone() },
            FileIdentity { device: 4, ..file.clone() },
            FileIdentity { inode: 1, ..file.clone() },
        ];
        for other in &changed {
            assert_eq!(store.load(other), None, "{other:?}");
        }
        store.save(&changed[0], &digests);
        assert_eq!(store.load(&file), None, "the newer record replaced the older");
    }
}
