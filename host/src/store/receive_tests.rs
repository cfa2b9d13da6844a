//! Documents from elsewhere that lie about what is in the store.

use std::path::Path;

use super::document::EntryDocument;
use super::fixture::{Sample, fast_dir, open, pool};
use super::{Claim, Publication, Store, Verify, check_leaves};
use crate::error::{Code, Result};
use crate::progress::Silent;

fn ours() -> Sample {
    Sample::new("ours", 100_000, 7)
}

/// Tensors of the same names and shapes, other bytes.
fn theirs() -> Sample {
    Sample::new("theirs", 100_000, 8)
}

/// An entry as another store has it: its document, and a blob by its digest.
fn elsewhere(root: &Path) -> (EntryDocument, Store) {
    let store = open(root);
    theirs().publish(&store).unwrap();
    let document = theirs().lease(&store).unwrap().unwrap().document().clone();
    (document, store)
}

fn claim(store: &Store, sample: &Sample) -> Publication {
    match store.claim(&sample.key, &sample.action, &Silent).unwrap() {
        Claim::Build(publication) => publication,
        Claim::Found => panic!("it is not there yet"),
    }
}

fn put_leaves(publication: &Publication, document: &EntryDocument, shard: usize, from: &Store) {
    let digest = &document.shards[shard].leaves;
    let leaves = std::fs::read(from.0.paths.blob(digest)).unwrap();
    publication.put_small(digest, &leaves, &Silent).unwrap();
}

fn take(publication: &Publication, document: &EntryDocument, shard: usize) -> Result<bool> {
    let layouts = document.layouts().unwrap();
    publication.take_shard(document, shard, &layouts[shard], pool(), &Silent)
}

#[test]
fn a_shard_that_was_verified_is_not_what_another_document_calls_it() {
    let (here, there) = (fast_dir(), fast_dir());
    let store = open(here.path());
    ours().publish(&store).unwrap();
    let lease = ours().lease(&store).unwrap().unwrap();
    let (mut document, other) = elsewhere(there.path());
    // Their tensors and leaf list, our shard: of the same size and header, and
    // verified since this boot.
    assert_eq!(document.shards[1].size, lease.document().shards[1].size);
    document.shards[1].digest = lease.document().shards[1].digest;
    let publication = claim(&store, &theirs());
    put_leaves(&publication, &document, 1, &other);
    assert_eq!(take(&publication, &document, 1).unwrap_err().code(), Code::DigestMismatch);
    // With our leaf list it is whole, but the list is not of their tensors.
    document.shards[1].leaves = lease.document().shards[1].leaves;
    assert!(!take(&publication, &document, 1).unwrap());
    let leaves = lease.leaf_list(1, &Silent).unwrap();
    let refused = check_leaves(&document, 1, &document.layouts().unwrap()[1], &leaves);
    assert_eq!(refused.unwrap_err().code(), Code::DigestMismatch);
    // Nobody has lost anything by it.
    assert!(store.quarantined().unwrap().is_empty());
    ours().assert_is(&store.lease(&ours().key, Verify::Always, pool(), &Silent).unwrap().unwrap());
}

#[test]
fn a_shard_of_another_header_is_refused_and_stays() {
    let (here, there) = (fast_dir(), fast_dir());
    let store = open(here.path());
    ours().publish(&store).unwrap();
    let (mut document, other) = elsewhere(there.path());
    // The shard "rest" is the same in both: its size makes the claim credible.
    let rest = document.shards[0].clone();
    (document.shards[1].digest, document.shards[1].size) = (rest.digest, rest.size);
    let layouts = elsewhere(there.path()).0.layouts().unwrap();
    let publication = claim(&store, &theirs());
    put_leaves(&publication, &document, 1, &other);
    let taken = publication.take_shard(&document, 1, &layouts[1], pool(), &Silent);
    assert_eq!(taken.unwrap_err().code(), Code::DigestMismatch);
    assert!(store.quarantined().unwrap().is_empty());
    ours().assert_is(&ours().lease(&store).unwrap().unwrap());
}

#[test]
fn received_blocks_are_offered_only_if_somebody_vouched_for_the_document() {
    for vouched in [false, true] {
        let (here, there) = (fast_dir(), fast_dir());
        let store = open(here.path());
        let (document, other) = elsewhere(there.path());
        let publication = claim(&store, &theirs());
        for (shard, layout) in document.layouts().unwrap().iter().enumerate() {
            let record = &document.shards[shard];
            put_leaves(&publication, &document, shard, &other);
            let leaves = std::fs::read(other.0.paths.blob(&record.leaves)).unwrap();
            let bytes = std::fs::read(other.0.paths.blob(&record.digest)).unwrap();
            let mut reception = publication.receive(&record.digest, record.size, &Silent).unwrap().unwrap();
            reception.append(&bytes).unwrap();
            reception.finish_shard(record, layout, &leaves, pool(), &Silent).unwrap();
            assert!(take(&publication, &document, shard).unwrap());
        }
        let blocks: Vec<_> = document.blocks.iter().map(|block| block.action).collect();
        let by = serde_json::json!({ "pulled_from": "a registry" });
        publication.commit_received(document, &by, vouched, pool(), &Silent).unwrap();
        theirs().assert_is(&theirs().lease(&store).unwrap().unwrap());
        assert!(blocks.iter().all(|block| store.block(block).is_some() == vouched));
    }
}

#[test]
fn an_unfinished_blob_that_a_crash_left_read_only_is_received_again() {
    use std::os::unix::fs::PermissionsExt;
    let (here, there) = (fast_dir(), fast_dir());
    let store = open(here.path());
    let (document, other) = elsewhere(there.path());
    let record = &document.shards[1];
    let bytes = std::fs::read(other.0.paths.blob(&record.digest)).unwrap();
    let publication = claim(&store, &theirs());
    let mut reception = publication.receive(&record.digest, record.size, &Silent).unwrap().unwrap();
    reception.append(&bytes[..50_000]).unwrap();
    drop(reception);
    let partial = find(here.path(), 50_000);
    std::fs::set_permissions(&partial, std::fs::Permissions::from_mode(0o444)).unwrap();
    let mut reception = publication.receive(&record.digest, record.size, &Silent).unwrap().unwrap();
    assert_eq!(reception.received_bytes(), 0);
    reception.append(&bytes).unwrap();
    assert_eq!(reception.digest_so_far(), record.digest);
}

/// The one file below `folder` of so many bytes.
fn find(folder: &Path, len: u64) -> std::path::PathBuf {
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let metadata = entry.metadata().unwrap();
            match metadata.is_dir() {
                true => folders.push(entry.path()),
                false if metadata.len() == len => return entry.path(),
                false => {}
            }
        }
    }
    panic!("no file has {len} bytes")
}
