//! The fault model, carried out: every operation of a publication, a reuse, a
//! repair and an eviction is the last one before a crash, or fails.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use super::document::EntryDocument;
use super::fixture::{Sample, copy_folder, fast_dir, open_on, pool};
use super::storage::model::{At, Fault, FaultyStorage, Plan};
use super::*;
use crate::digest::{BlobDigest, BlockKey};
use crate::progress::Silent;

/// A store before the fault, and what is done to it.
struct Scenario {
    name: &'static str,
    before: fn(&Path),
    /// Whether it published something itself.
    act: fn(&Store) -> Result<bool>,
}

fn old() -> Sample {
    Sample::new("old", 30_000, 1)
}

fn new() -> Sample {
    Sample::new("new", 40_000, 2)
}

/// A build that takes the block "rest" from the store.
fn publish_with_reuse(store: &Store, sample: &Sample) -> Result<bool> {
    let rest = BlockKey::of(b"rest");
    let Claim::Build(publication) = store.claim(&sample.key, &sample.action, &Silent)? else { return Ok(false) };
    let mut given = BTreeMap::new();
    if let Some(block) = store.block(&rest)
        && publication.reuse_block(&block, pool(), &Silent)?
    {
        given.insert(rest, block.shards[0].clone());
    }
    sample.build(publication, &given).map(|_| true)
}

/// The new entry as another store has it: its document and its blobs.
fn elsewhere() -> &'static (EntryDocument, BTreeMap<BlobDigest, Vec<u8>>) {
    static ELSEWHERE: OnceLock<(EntryDocument, BTreeMap<BlobDigest, Vec<u8>>)> = OnceLock::new();
    ELSEWHERE.get_or_init(|| {
        let dir = fast_dir();
        let store = quick(dir.path());
        new().publish(&store).unwrap();
        let document = new().lease(&store).unwrap().unwrap().document().clone();
        let read = |digest: &BlobDigest| std::fs::read(store.0.paths.blob(digest)).unwrap();
        let blobs = document.shards.iter().flat_map(|s| [s.digest, s.leaves]).map(|d| (d, read(&d))).collect();
        (document, blobs)
    })
}

/// Receives the new entry, of every shard only so many bytes if `most` says so.
fn pull(store: &Store, most: Option<usize>) -> Result<bool> {
    let (document, blobs) = elsewhere();
    let Claim::Build(publication) = store.claim(&new().key, &new().action, &Silent)? else { return Ok(false) };
    for (shard, layout) in document.layouts()?.iter().enumerate() {
        let record = &document.shards[shard];
        let take = || publication.take_shard(document, shard, layout, pool(), &Silent);
        if take()? {
            continue;
        }
        let (bytes, leaves) = (&blobs[&record.digest], &blobs[&record.leaves]);
        check_leaves(document, shard, layout, leaves)?;
        publication.put_small(&record.leaves, leaves, &Silent)?;
        if let Some(mut reception) = publication.receive(&record.digest, record.size, &Silent)? {
            loop {
                let end = most.unwrap_or(bytes.len());
                for piece in bytes[reception.received_bytes() as usize..end].chunks(16_384) {
                    reception.append(piece)?;
                }
                if most.is_some() || reception.digest_so_far() == record.digest {
                    break;
                }
                assert!(reception.is_continued(), "only what a crash left may be wrong");
                reception.restart()?;
            }
            if most.is_some() {
                continue;
            }
            reception.finish_shard(record, layout, leaves, pool(), &Silent)?;
        }
        if !take()? {
            return Err(Error::new(Code::CorruptBlob, "a shard that was received is not there"));
        }
    }
    if most.is_some() {
        return Ok(false);
    }
    publication.commit_received(document.clone(), &serde_json::json!({"pulled": true}), true, pool(), &Silent)?;
    Ok(true)
}

fn rot(root: &Path, sample: &Sample) {
    use std::os::unix::fs::PermissionsExt;
    let store = quick(root);
    let path = sample.lease(&store).unwrap().unwrap().shard_path(1).to_owned();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"rot", 10_000).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o444)).unwrap();
}

const SCENARIOS: [Scenario; 7] = [
    Scenario {
        name: "the first publication, in a new store",
        before: |_| {},
        act: |store| Ok(new().publish(store)?.is_some()),
    },
    Scenario {
        name: "a publication that shares a block",
        before: |root| assert!(old().publish(&quick(root)).unwrap().is_some()),
        act: |store| Ok(new().publish(store)?.is_some()),
    },
    Scenario {
        name: "a publication that reuses a block",
        before: |root| assert!(old().publish(&quick(root)).unwrap().is_some()),
        act: |store| publish_with_reuse(store, &new()),
    },
    Scenario {
        name: "a pull beside an entry that shares a block",
        before: |root| assert!(old().publish(&quick(root)).unwrap().is_some()),
        act: |store| pull(store, None),
    },
    Scenario {
        name: "a pull that goes on with an unfinished one",
        before: |root| assert!(!pull(&quick(root), Some(20_000)).unwrap()),
        act: |store| pull(store, None),
    },
    Scenario {
        name: "finding a corrupt blob and rebuilding it",
        before: |root| {
            assert!(old().publish(&quick(root)).unwrap().is_some());
            assert!(new().publish(&quick(root)).unwrap().is_some());
            rot(root, &new());
        },
        act: |store| {
            let found = new().lease(store);
            if found.as_ref().is_err_and(|e| e.code() != Code::CorruptBlob) {
                return found.map(|_| false);
            }
            Ok(new().publish(store)?.is_some())
        },
    },
    Scenario {
        name: "an eviction",
        before: |root| {
            assert!(old().publish(&quick(root)).unwrap().is_some());
            assert!(new().publish(&quick(root)).unwrap().is_some());
        },
        act: |store| {
            let policy = GcPolicy { max_size_bytes: Some(0), keep: [old().key].into(), ..GcPolicy::default() };
            store.gc(&policy, &Silent).map(|_| false)
        },
    },
];

/// A store that syncs nothing to the real disk, and so is fast.
fn quick(root: &Path) -> Store {
    open_on(root, Arc::new(FaultyStorage::new(root, Plan::default()).unwrap())).unwrap()
}

/// What must hold of a store after a fault, whatever it was.
fn assert_sound(root: &Path, had_old: bool, done: bool) {
    let store = quick(root);
    if had_old {
        old().assert_is(&old().lease(&store).unwrap().expect("what was published before is there"));
    }
    let found = match new().lease(&store) {
        // Rot that was there before may be found once more.
        Err(e) if e.code() == Code::CorruptBlob && had_old && !done => new().lease(&store).unwrap(),
        other => other.unwrap(),
    };
    assert!(found.is_some() || !done, "what commit said is published is there");
    found.iter().for_each(|lease| new().assert_is(lease));
    drop(found);
    new().publish(&store).unwrap();
    new().assert_is(&new().lease(&store).unwrap().expect("the next build succeeds"));
    store.doctor(true, &Silent).unwrap();
    assert_eq!(store.doctor(false, &Silent).unwrap(), [], "a second look finds nothing");
    new().assert_is(&new().lease(&store).unwrap().expect("the doctor does no harm"));
}

fn run(scenario: &Scenario, template: &Path, plan: Plan) -> bool {
    let (root, after) = (fast_dir(), fast_dir());
    copy_folder(template, root.path()).unwrap();
    let storage = Arc::new(FaultyStorage::new(root.path(), plan).unwrap());
    let result = open_on(root.path(), storage.clone()).and_then(|store| (scenario.act)(&store));
    let reached = match plan.fault {
        Some((At::Change(n), _)) => storage.changes() >= n,
        Some((At::Read(n), _)) => storage.reads() >= n,
        None => false,
    };
    if let Err(error) = &result {
        assert!(reached, "{error}");
        let codes = [Code::IoError, Code::InsufficientDisk, Code::CorruptBlob, Code::LockTimeout];
        assert!(codes.contains(&error.code()), "{error}");
    }
    let done = matches!(result, Ok(true));
    let had_old = had_old(template);
    storage.reboot(root.path(), after.path()).unwrap();
    assert_sound(after.path(), had_old, done);
    // Without a crash the process, or another one, goes on in the same folder.
    if !matches!(plan.fault, Some((_, Fault::Crash))) {
        assert_sound(root.path(), had_old, done);
    }
    reached
}

fn had_old(template: &Path) -> bool {
    template.join("entries").join(old().key.to_string()).exists()
}

/// Runs a scenario with the fault at every operation.
fn enumerate(seeds: std::ops::Range<u64>, at: fn(u64) -> At, fault: Fault, short: bool) {
    let mut total = 0;
    for scenario in &SCENARIOS {
        let template = fast_dir();
        (scenario.before)(template.path());
        for seed in seeds.clone() {
            let mut n = 1;
            loop {
                let plan = Plan { seed: seed.wrapping_mul(1_000_003) + n, fault: Some((at(n), fault)), short };
                let outcome = std::panic::catch_unwind(|| run(scenario, template.path(), plan));
                match outcome {
                    Ok(true) => n += 1,
                    Ok(false) => break,
                    Err(_) => panic!("{}: it goes wrong with {plan:?}", scenario.name),
                }
            }
            total += n - 1;
        }
    }
    assert!(total > 20, "only {total} operations");
}

#[test]
fn a_crash_at_any_operation_leaves_no_entry_or_a_whole_one() {
    enumerate(0..3, At::Change, Fault::Crash, false);
}

#[test]
fn a_crash_amid_short_reads_and_writes_does_no_harm() {
    enumerate(100..101, At::Change, Fault::Crash, true);
}

#[test]
fn an_error_of_any_operation_is_survived() {
    enumerate(200..201, At::Change, Fault::Io, false);
}

#[test]
fn a_full_disk_at_any_operation_is_survived() {
    enumerate(300..301, At::Change, Fault::Full, false);
}

#[test]
fn an_error_of_any_read_is_survived() {
    enumerate(400..401, At::Read, Fault::Io, false);
}
