//! Every kind of inconsistency is found, explained, and gone after a repair.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::fixture::{Sample, fast_dir, open, pool};
use super::*;
use crate::digest::{ActionKey, BlobDigest, ModuleDigest, RecordDigest};
use crate::progress::Silent;

fn sample() -> Sample {
    Sample::new("one", 50_000, 1)
}

fn overwrite(path: &Path, bytes: &[u8]) {
    fs::remove_file(path).unwrap();
    fs::write(path, bytes).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o444)).unwrap();
}

/// What is done to a sound store, and words of the finding that it must give.
struct Case {
    harm: fn(&Store) -> PathBuf,
    finding: &'static str,
    repairable: bool,
}

fn shard(store: &Store) -> PathBuf {
    sample().lease(store).unwrap().unwrap().shard_path(1).to_owned()
}

fn document(store: &Store) -> PathBuf {
    store.0.paths.blob(sample().lease(store).unwrap().unwrap().document_digest())
}

const CASES: &[Case] = &[
    Case {
        harm: |s| {
            fs::remove_file(shard(s)).unwrap();
            s.0.paths.entry(&sample().key)
        },
        finding: "block 'h.0.': its shard",
        repairable: true,
    },
    Case {
        harm: |s| {
            overwrite(&shard(s), b"short");
            s.0.paths.entry(&sample().key)
        },
        finding: "it has 5 bytes, expected",
        repairable: true,
    },
    Case {
        harm: |s| {
            overwrite(&document(s), b"{}");
            s.0.paths.entry(&sample().key)
        },
        finding: "is corrupt",
        repairable: true,
    },
    Case {
        harm: |s| {
            fs::write(s.0.paths.entry(&sample().key), "torn").unwrap();
            s.0.paths.entry(&sample().key)
        },
        finding: "its record is torn",
        repairable: true,
    },
    Case {
        harm: |s| {
            fs::write(s.0.paths.action(&sample().key), "{}").unwrap();
            s.0.paths.entry(&sample().key)
        },
        finding: "hashes to",
        repairable: true,
    },
    Case {
        harm: |s| {
            fs::set_permissions(shard(s), Permissions::from_mode(0o644)).unwrap();
            shard(s)
        },
        finding: "mode 0644, expected 0444",
        repairable: true,
    },
    Case {
        harm: |s| {
            let path = s.0.paths.leased(&sample().key);
            let file = fs::OpenOptions::new().append(true).create(true).open(&path).unwrap();
            file.set_modified(SystemTime::now() + Duration::from_secs(86_400)).unwrap();
            path
        },
        finding: "in the future",
        repairable: true,
    },
    Case {
        harm: |s| {
            let path = s.0.paths.blob(&BlobDigest::of(b"lost"));
            fs::write(&path, "lost").unwrap();
            path
        },
        finding: "reaches this blob of 4 bytes",
        repairable: true,
    },
    Case {
        harm: |s| {
            let path = s.0.paths.tmp().join(format!("{}.1.1", sample().key));
            fs::create_dir(&path).unwrap();
            path
        },
        finding: "whose builder is dead",
        repairable: true,
    },
    Case {
        harm: |s| {
            let path = s.0.paths.new_entry(&sample().key);
            fs::write(&path, "").unwrap();
            path
        },
        finding: "was being written",
        repairable: true,
    },
    Case {
        harm: |s| {
            let path = s.0.paths.action(&ActionKey::of(b"other"));
            fs::write(&path, "{}").unwrap();
            path
        },
        finding: "an action without an entry",
        repairable: true,
    },
    Case {
        harm: |s| {
            let path = s.0.paths.facts(&RecordDigest::of(b"x"));
            fs::write(&path, "{\"half").unwrap();
            path
        },
        finding: "torn or corrupt",
        repairable: true,
    },
    Case {
        harm: |s| {
            let path = s.0.paths.module(&ModuleDigest::of(b"gone"));
            fs::write(&path, "{}").unwrap();
            path
        },
        finding: "its bytes are gone",
        repairable: true,
    },
    Case {
        harm: |s| {
            let path = s.root().join("facts");
            fs::remove_dir_all(&path).unwrap();
            path
        },
        finding: "a folder of the store is missing",
        repairable: true,
    },
    Case {
        harm: |s| {
            let path = s.root().join("entries/README");
            fs::write(&path, "hello").unwrap();
            path
        },
        finding: "somebody else put it here",
        repairable: false,
    },
    Case {
        harm: |s| {
            let path = s.root().join("blobs");
            fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
            path
        },
        finding: "writable by others",
        repairable: false,
    },
];

#[test]
fn every_inconsistency_is_found_and_repaired() {
    for case in CASES {
        let dir = fast_dir();
        let store = open(dir.path());
        sample().publish(&store).unwrap();
        assert_eq!(store.doctor(false, &Silent).unwrap(), [], "a sound store");
        let path = (case.harm)(&store);
        let found = store.doctor(false, &Silent).unwrap();
        let of_case: Vec<_> = found.iter().filter(|f| f.path == path && f.what.contains(case.finding)).collect();
        assert_eq!(of_case.len(), 1, "'{}' at {} in {found:?}", case.finding, path.display());
        assert_eq!(of_case[0].repair.is_some(), case.repairable);
        assert!(!of_case[0].repaired);

        let repaired = store.doctor(true, &Silent).unwrap();
        assert!(repaired.iter().all(|f| f.repaired == f.repair.is_some()), "{repaired:?}");
        // What was moved aside stays for one more look.
        store.doctor(true, &Silent).unwrap();
        let left = store.doctor(false, &Silent).unwrap();
        assert_eq!(left.is_empty(), case.repairable, "'{}' leaves {left:?}", case.finding);
        sample().publish(&store).unwrap();
        sample().assert_is(&sample().lease(&store).unwrap().unwrap());
    }
}

#[test]
fn everything_is_verified_once_and_damage_is_named() {
    let dir = fast_dir();
    let store = open(dir.path());
    let (one, two) = (sample(), Sample::new("two", 60_000, 2));
    one.publish(&store).unwrap();
    two.publish(&store).unwrap();
    let module = store.put_module(b"module", &Silent).unwrap();
    let audit = store.verify_all(pool(), &Silent).unwrap();
    assert_eq!((audit.entries, audit.modules, audit.shards), (2, 1, 3), "the shared shard counts once");
    assert!(audit.damaged.is_empty() && audit.bytes > 150_000);

    let path = shard(&store);
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    overwrite(&path, &bytes);
    overwrite(&store.0.paths.blob(&BlobDigest::of(b"module")), b"Module");
    let audit = store.verify_all(pool(), &Silent).unwrap();
    let roots: Vec<Root> = audit.damaged.iter().map(|(root, _)| *root).collect();
    assert_eq!(roots, [Root::Entry(one.key), Root::Module(module)]);
    assert!(audit.damaged[0].1.message().contains("'h.0.w' differs within its bytes 49152..50000"), "{audit:?}");
    assert_eq!(store.quarantined().unwrap().len(), 2);
    two.assert_is(&two.lease(&store).unwrap().unwrap());
    assert!(one.lease(&store).unwrap().is_none());
}
