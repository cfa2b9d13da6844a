//! The store as its users see it.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::fixture::{Sample, open, pool};
use super::*;
use crate::digest::{ActionKey, BlobDigest, BlockKey, sha256};
use crate::progress::Silent;

fn names(dir: PathBuf) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn damage(path: &Path, change: impl FnOnce(&fs::File)) {
    fs::set_permissions(path, Permissions::from_mode(0o644)).unwrap();
    change(&fs::OpenOptions::new().write(true).open(path).unwrap());
    fs::set_permissions(path, Permissions::from_mode(0o444)).unwrap();
}

#[test]
fn a_build_is_published_found_and_leased() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir.path().join("deep/store"));
    let sample = Sample::new("one", 200_000, 7);
    assert!(sample.lease(&store).unwrap().is_none());
    let published = sample.publish(&store).unwrap().unwrap();
    assert_eq!((published.shards_new, published.shards_deduplicated, published.shards_reused), (2, 0, 0));
    assert!(sample.publish(&store).unwrap().is_none(), "found");

    let lease = sample.lease(&store).unwrap().unwrap();
    sample.assert_is(&lease);
    assert_eq!(*lease.document_digest(), published.document_digest);
    assert_eq!(lease.leaf_list(1, &Silent).unwrap().len(), 200_000_usize.div_ceil(16_384) * 32);
    assert_eq!(lease.map_shard(1).unwrap().len_bytes(), lease.shard_layout(1).size_bytes());

    // What is on the disk is what the documentation says.
    let root = store.root();
    let hex = sample.key.to_string();
    assert_eq!(names(root.join("entries")), [hex.as_str()]);
    let record = fs::read_to_string(root.join("entries").join(&hex)).unwrap();
    let document = fs::read(root.join("blobs/sha256").join(published.document_digest.to_string())).unwrap();
    assert_eq!(record, format!("{{\"digest\":\"sha256:{}\",\"size\":{}}}", published.document_digest, document.len()));
    assert_eq!(fs::read(root.join("actions").join(format!("{hex}.json"))).unwrap(), sample.action);
    assert_eq!(names(root.join("tmp")), [""; 0]);
    assert_eq!(names(root.join("provenance").join(&hex)).len(), 1);
    assert_eq!(store.provenance(&sample.key).unwrap(), [serde_json::json!({"engine": "none"})]);
    for name in names(root.join("blobs/sha256")) {
        let path = root.join("blobs/sha256").join(&name);
        assert_eq!(BlobDigest::of(&fs::read(&path).unwrap()).to_string(), name);
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!((metadata.mode() & 0o7777, metadata.nlink()), (0o444, 1));
    }
    let shard = fs::read(lease.shard_path(0)).unwrap();
    let read = safetensors::SafeTensors::deserialize(&shard).unwrap();
    assert_eq!(read.tensor("c").unwrap().data(), sample.blocks[0].2[2].bytes);
}

#[test]
fn blocks_are_reused_and_equal_shards_are_one_file() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let (one, two) = (Sample::new("one", 50_000, 1), Sample::new("two", 60_000, 2));
    one.publish(&store).unwrap().unwrap();

    // "rest" is the same block in both: written, and found at the commit.
    let published = two.publish(&store).unwrap().unwrap();
    assert_eq!((published.shards_new, published.shards_deduplicated, published.shards_reused), (1, 1, 0));
    let [one_lease, two_lease] = [&one, &two].map(|sample| sample.lease(&store).unwrap().unwrap());
    let inode = |lease: &Lease| lease.shard_file(0).metadata().unwrap().ino();
    assert_eq!(inode(&one_lease), inode(&two_lease));

    // In the third it is not even computed.
    let three = Sample::new("three", 70_000, 3);
    let rest = BlockKey::of(b"rest");
    let block = store.block(&rest).unwrap();
    assert_eq!(block.shards[0].record, one_lease.document().shards[0]);
    assert_eq!(store.block(&BlockKey::of(b"unknown")), None);
    let Claim::Build(publication) = store.claim(&three.key, &three.action, &Silent).unwrap() else { panic!("found") };
    assert!(publication.reuse_block(&block, pool(), &Silent).unwrap());
    let published = three.build(publication, &BTreeMap::from([(rest, block.shards[0].clone())])).unwrap();
    assert_eq!((published.shards_new, published.shards_deduplicated, published.shards_reused), (1, 0, 1));
    assert_eq!(published.bytes_deduplicated, block.shards[0].record.size);
    three.assert_is(&three.lease(&store).unwrap().unwrap());

    // A known block whose shard has rotted is not taken.
    damage(one_lease.shard_path(0), |file| file.write_all_at(b"!", 5000).unwrap());
    let four = Sample::new("four", 10, 4);
    let Claim::Build(publication) = store.claim(&four.key, &four.action, &Silent).unwrap() else { panic!("found") };
    assert!(!publication.reuse_block(&block, pool(), &Silent).unwrap());
    assert_eq!(store.block(&rest), None);
    four.build(publication, &BTreeMap::new()).unwrap();
    four.assert_is(&four.lease(&store).unwrap().unwrap());
}

#[test]
fn every_kind_of_damage_is_found_named_and_rebuilt() {
    type Change = fn(&fs::File);
    let changes: [(&str, Change, &str); 6] = [
        (
            "shard",
            |f| f.write_all_at(b"x", 4096 + 70_000).unwrap(),
            "tensor 'h.0.w' differs within its bytes 65536..81920",
        ),
        ("shard", |f| f.write_all_at(b"{ ", 8).unwrap(), "its header is not"),
        ("shard", |f| f.set_len(4096 + 70_000).unwrap(), "it has 74096 bytes, expected 204096"),
        ("filler", |f| f.write_all_at(b"x", 4096 + 150).unwrap(), "byte 4246 of it, in a filler, is not zero"),
        ("leaves", |f| f.write_all_at(b"x", 3).unwrap(), "hash to"),
        ("document", |f| f.write_all_at(b" ", 0).unwrap(), "hash to"),
    ];
    for (what, change, expected) in changes {
        let dir = tempfile::tempdir().unwrap();
        let store = open(dir.path());
        let sample = Sample::new("one", 200_000, 7);
        let published = sample.publish(&store).unwrap().unwrap();
        let lease = sample.lease(&store).unwrap().unwrap();
        let shards = &lease.document().shards;
        let digest = match what {
            "shard" => shards[1].digest,
            "filler" => shards[0].digest,
            "leaves" => shards[1].leaves,
            _ => published.document_digest,
        };
        let old = lease.shard_file(1).clone();
        damage(&dir.path().join("blobs/sha256").join(digest.to_string()), change);

        let found = sample.lease(&store).unwrap_err();
        assert_eq!(found.code(), Code::CorruptBlob, "{what}: {found}");
        assert!(found.message().contains(expected), "{what}: {found}");
        assert_eq!(store.quarantined().unwrap().iter().map(|q| q.digest).collect::<Vec<_>>(), [digest]);
        assert!(sample.lease(&store).unwrap().is_none(), "{what}: no whole entry is left");
        sample.publish(&store).unwrap().unwrap();
        let new = sample.lease(&store).unwrap().unwrap();
        sample.assert_is(&new);
        if what == "shard" {
            assert_ne!(old.metadata().unwrap().ino(), new.shard_file(1).metadata().unwrap().ino());
        }
    }
}

#[test]
fn first_verifies_once_and_after_every_change() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let sample = Sample::new("one", 100_000, 7);
    sample.publish(&store).unwrap();
    let lease = |verify| store.lease(&sample.key, verify, pool(), &Silent);
    let first = lease(Verify::First).unwrap().unwrap();
    assert_eq!(names(dir.path().join("state/first")).len(), 2);
    let path = first.shard_path(1).to_owned();
    let mut shard = first.document().shards[1].clone();
    let verified = || store.0.is_verified(&first.document().shards[1], &fs::metadata(&path).unwrap());
    assert!(verified());
    shard.leaves = first.document().shards[0].leaves;
    assert!(!store.0.is_verified(&shard, &fs::metadata(&path).unwrap()), "another leaf list has not verified it");
    damage(&path, |file| file.write_all_at(b"x", 5000).unwrap());
    assert!(!verified(), "its change time is another now");
    assert!(lease(Verify::Never).unwrap().is_some(), "never looks at no byte of the data");
    assert_eq!(lease(Verify::First).unwrap_err().code(), Code::CorruptBlob);
    // Leases that were taken before read on.
    assert_eq!(first.shard_file(1).metadata().unwrap().len(), first.shard_layout(1).size_bytes());
}

#[test]
fn a_rebuild_with_other_content_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let (one, other) = (Sample::new("one", 50_000, 1), Sample::new("one", 50_000, 2));
    let first = one.publish(&store).unwrap().unwrap();
    let path = one.lease(&store).unwrap().unwrap().shard_path(1).to_owned();
    damage(&path, |file| file.write_all_at(b"x", 5000).unwrap());
    assert_eq!(one.lease(&store).unwrap_err().code(), Code::CorruptBlob);

    let refused = other.publish(&store).unwrap_err();
    assert_eq!(refused.code(), Code::IdentityCollision);
    assert!(refused.message().contains(&first.document_digest.to_string()), "{refused}");
    assert_eq!(refused.message().matches("content ").count(), 2, "{refused}");
    assert_eq!(names(dir.path().join("tmp")), [""; 0]);
    one.publish(&store).unwrap().unwrap();
    one.assert_is(&one.lease(&store).unwrap().unwrap());
}

#[test]
fn stale_work_is_removed_by_the_next_builder() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let sample = Sample::new("one", 10, 1);
    let stale = dir.path().join("tmp").join(format!("{}.1.2", sample.key));
    fs::create_dir(&stale).unwrap();
    fs::write(stale.join("shard.0"), "x").unwrap();
    let other = dir.path().join("tmp").join(format!("{}.1.2", ActionKey::of(b"other")));
    fs::create_dir(&other).unwrap();
    fs::write(dir.path().join("entries").join(format!(".{}.new", sample.key)), "x").unwrap();
    sample.publish(&store).unwrap().unwrap();
    assert!(!stale.exists() && other.exists());
    assert_eq!(names(dir.path().join("entries")), [sample.key.to_string()]);
}

#[test]
fn a_build_that_is_given_up_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let sample = Sample::new("one", 10, 1);
    let Claim::Build(publication) = store.claim(&sample.key, &sample.action, &Silent).unwrap() else { panic!("found") };
    let scratch = publication.scratch_file().unwrap();
    scratch.write_all_at(b"spilled", 1 << 20).unwrap();
    let layout = ShardLayout::new([]).unwrap();
    let unfinished = publication.create_shard(&layout).unwrap();
    assert_eq!(publication.reserve(u64::MAX).unwrap_err().code(), Code::InsufficientDisk);
    drop(publication);
    assert_eq!(names(dir.path().join("tmp")).len(), 1, "a writer still owns it");
    drop(unfinished);
    assert_eq!(names(dir.path().join("tmp")), [""; 0]);
    sample.publish(&store).unwrap().unwrap();
}

#[test]
fn a_busy_key_times_out_and_a_waiter_finds_the_entry() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample::new("one", 10_000, 1);
    let store = open(dir.path());
    let Claim::Build(publication) = store.claim(&sample.key, &sample.action, &Silent).unwrap() else { panic!("found") };
    let hasty = StoreOptions { lock_timeout: Duration::from_millis(30), ..StoreOptions::default() };
    let hasty = Store::open(dir.path(), hasty).unwrap();
    assert_eq!(hasty.claim(&sample.key, &sample.action, &Silent).unwrap_err().code(), Code::LockTimeout);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| sample.publish(&store));
        std::thread::sleep(Duration::from_millis(20));
        sample.build(publication, &BTreeMap::new()).unwrap();
        assert!(waiter.join().unwrap().unwrap().is_none(), "found");
    });
}

#[test]
fn wrong_pieces_are_refused_and_any_pieces_give_the_same_shard() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let sample = Sample::new("one", 1_000_000, 1);
    let Claim::Build(publication) = store.claim(&sample.key, &sample.action, &Silent).unwrap() else { panic!("found") };
    let tensors = &sample.blocks[0].2;
    let layout = ShardLayout::new(tensors.iter().map(|t| (t.name.clone(), t.ty.clone()))).unwrap();
    let writer = || publication.create_shard(&layout).unwrap();
    assert!(writer().tensor(0, &[0; 101], None).unwrap_err().message().contains("1 bytes too many"));
    assert!(writer().tensor(2, b"x", None).unwrap_err().message().contains("lacks 100 bytes"));
    assert!(writer().tensor(3, b"", None).is_err());
    assert!(writer().finish().unwrap_err().message().contains("'a' lacks"));
    let mut records = Vec::new();
    for cut in [1, 999, 16_384, 300_000] {
        let mut writer = writer();
        for (index, tensor) in tensors.iter().enumerate() {
            tensor.bytes.chunks(cut).for_each(|piece| writer.tensor(index, piece, None).unwrap());
        }
        records.push(writer.finish().unwrap());
    }
    records.dedup();
    assert_eq!(records.len(), 1);
    let mut file = layout.header().to_vec();
    for (placed, tensor) in layout.tensors().iter().zip(tensors) {
        file.resize(placed.offset as usize, 0);
        file.extend_from_slice(&tensor.bytes);
    }
    assert_eq!(*records[0].record.digest.as_bytes(), sha256(&file));
}

#[test]
fn files_of_strangers_are_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let sample = Sample::new("one", 10_000, 1);
    sample.publish(&store).unwrap();
    let lease = sample.lease(&store).unwrap().unwrap();
    let path = lease.shard_path(1).to_owned();
    fs::set_permissions(&path, Permissions::from_mode(0o446)).unwrap();
    assert_eq!(sample.lease(&store).unwrap_err().code(), Code::EntryNotTrusted);
    fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();
    let aside = dir.path().join("aside");
    fs::rename(&path, &aside).unwrap();
    std::os::unix::fs::symlink(&aside, &path).unwrap();
    let refused = sample.lease(&store).unwrap_err();
    assert_eq!(refused.code(), Code::EntryNotTrusted);
    assert!(refused.message().contains("a symbolic link"), "{refused}");
    assert!(store.quarantined().unwrap().is_empty());
}

#[test]
fn a_store_of_another_version_is_refused_and_a_torn_marker_is_not() {
    let dir = tempfile::tempdir().unwrap();
    assert!(Store::open_existing(dir.path(), StoreOptions::default()).unwrap().is_none());
    assert_eq!(names(dir.path().to_owned()), [""; 0]);
    open(dir.path());
    assert!(Store::open_existing(dir.path(), StoreOptions::default()).unwrap().is_some());
    fs::write(dir.path().join("format"), "weightmill store 2\n").unwrap();
    let refused = Store::open(dir.path(), StoreOptions::default()).unwrap_err();
    assert!(refused.message().contains("expected 'weightmill store 1', found 'weightmill store 2'"), "{refused}");
    fs::write(dir.path().join("format"), "").unwrap();
    open(dir.path());
}
