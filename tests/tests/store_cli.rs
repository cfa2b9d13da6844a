//! The store through the program: eviction, repair, verification, reuse, and
//! what happens where it cannot be used.

#[path = "store/modes.rs"]
mod modes;
#[path = "store/world.rs"]
mod world;

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::Value;
use weightmill::digest::ActionKey;
use weightmill::progress::Silent;
use weightmill::store::Claim;
use weightmill::store::document::EntryDocument;
use world::{BLOCKS, SHARDED, World, text, texts};

/// Changes a byte of a read-only file.
fn damage(path: &Path, at: u64) {
    let file = fs::OpenOptions::new().read(true).write(true).open(path).or_else(|_| {
        fs::set_permissions(path, Permissions::from_mode(0o644))?;
        fs::OpenOptions::new().read(true).write(true).open(path)
    });
    let file = file.unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    file.set_permissions(Permissions::from_mode(0o444)).unwrap();
}

#[test]
fn gc_goes_by_last_use_and_respects_keep_dry_run_and_leases() {
    let world = World::new();
    let built: Vec<Value> = (1..=3).map(|seed| world.build_of(&world.other_checkpoint(seed, &[]), &[])).collect();
    let keys: Vec<String> = built.iter().map(|b| text(&b["key"])).collect();
    let [a, b, c] = [&keys[0], &keys[1], &keys[2]];
    // Last used three, two and one hour ago.
    for (key, hours) in keys.iter().zip([3, 2, 1]) {
        let when = SystemTime::now() - Duration::from_secs(hours * 3600);
        for record in ["entries", "state/leased"] {
            File::open(world.store.join(record).join(key)).unwrap().set_modified(when).unwrap();
        }
    }
    let listed = world.ask(&["store", "ls"]).ok();
    let row = &listed["entries"][0];
    assert_eq!(row["provenance"]["tp_size"], 1);
    assert!(text(&row["provenance"]["model"]).starts_with("model-"), "{row}");
    let total: u64 = listed["entries"].as_array().unwrap().iter().map(|e| e["bytes"].as_u64().unwrap()).sum();

    let less = (total - 1).to_string();
    let dry = world.ask(&["store", "gc", "--max-size", &less, "--dry-run"]).ok();
    assert_eq!(texts(&dry["evicted"]), [a.as_str()], "the least recently used goes");
    assert!(dry["bytes_freed"].as_u64().unwrap() > 0);
    assert_eq!(world.keys().len(), 3, "a dry run removes nothing");
    assert!(world.ask(&["verify", "--all"]).ok()["damaged"].as_array().unwrap().is_empty());

    let kept = world.ask(&["store", "gc", "--max-size", &less, "--keep", &a[..12]]).ok();
    assert_eq!(texts(&kept["evicted"]), [b.as_str()], "the next one, for the oldest is kept");
    let aged = world.ask(&["store", "gc", "--max-age", "90min"]).ok();
    assert_eq!(texts(&aged["evicted"]), [a.as_str()]);
    assert_eq!(world.keys(), [c.as_str()]);

    let lease = world.lease(c);
    let held = world.ask(&["store", "gc", "--max-size", "0"]).ok();
    assert_eq!((texts(&held["evicted"]).len(), texts(&held["in_use"])), (0, vec![c.clone()]));
    let refused = world.ask(&["store", "rm", c]);
    assert_eq!((refused.status, refused.code()), (3, "lock_timeout"));
    assert!(refused.message().contains("in use"), "{}", refused.stderr);
    drop(lease);
    let unknown = world.ask(&["store", "rm", c, a]);
    assert_eq!((unknown.status, unknown.code()), (1, "source_unavailable"));
    assert_eq!(world.keys().len(), 1, "a list with an unknown key removes nothing");
    assert_eq!(texts(&world.ask(&["store", "rm", &c[..8]]).ok()["evicted"]), [c.as_str()]);
    assert_eq!(world.keys().len(), 0);
    assert_eq!(fs::read_dir(world.store.join("blobs/sha256")).unwrap().count(), 0);
    let unkept = world.ask(&["store", "gc", "--keep", a]);
    assert_eq!(unkept.status, 0, "a whole key may be kept that is not there: {}", unkept.stderr);
}

#[test]
fn the_doctor_finds_repairs_and_says_what_only_a_person_can_do() {
    let world = World::new();
    let built = world.build(&[]);
    assert_eq!(world.ask(&["store", "doctor"]).ok()["healthy"], true);

    let shown = world.ask(&["store", "show", &text(&built["key"])]).ok();
    let gone = text(&shown["entry"]["shards"][2]["leaves"]);
    fs::remove_file(world.store.join("blobs/sha256").join(gone)).unwrap();
    let changed = PathBuf::from(text(&shown["paths"][4]));
    fs::set_permissions(&changed, Permissions::from_mode(0o644)).unwrap();
    let work = world.store.join("tmp").join(format!("{}.99999.7", text(&built["key"])));
    fs::create_dir(&work).unwrap();
    fs::write(world.store.join("blobs/sha256").join("0".repeat(64)), "left over").unwrap();

    let found = world.ask(&["store", "doctor"]);
    assert_eq!((found.status, &found.json["healthy"]), (3, &Value::Bool(false)));
    let whats: Vec<String> = found.json["findings"].as_array().unwrap().iter().map(|f| text(&f["what"])).collect();
    for what in ["not whole", "mode 0644", "whose builder is dead", "no entry and no module reaches"] {
        assert!(whats.iter().any(|w| w.contains(what)), "{what}: {whats:?}");
    }
    let again = world.ask(&["store", "doctor"]);
    assert_eq!(again.json, found.json, "a look repairs nothing");

    let fixed = world.ask(&["store", "doctor", "--fix"]);
    assert_eq!(fixed.status, 0, "{}", fixed.stderr);
    assert!(fixed.json["findings"].as_array().unwrap().iter().all(|f| f["repaired"] == true));
    assert!(!work.exists());
    let after = world.ask(&["store", "doctor", "--fix"]);
    assert_eq!(after.status, 0);
    let rebuilt = world.build(&[]);
    assert_eq!((&rebuilt["outcome"], &rebuilt["content_digest"]), (&"built".into(), &built["content_digest"]));
    assert_eq!(world.ask(&["store", "doctor"]).ok()["findings"], Value::Array(Vec::new()));

    fs::write(world.store.join("entries/note.txt"), "mine").unwrap();
    let theirs = world.ask(&["store", "doctor", "--fix"]);
    assert_eq!((theirs.status, theirs.json["findings"].as_array().unwrap().len()), (3, 1));
    assert_eq!(theirs.json["findings"][0]["repair"], Value::Null);
    assert!(world.store.join("entries/note.txt").exists());
}

#[test]
fn corruption_is_named_put_aside_and_rebuilt_with_equal_content() {
    let world = World::new();
    let built = world.build(&[]);
    let key = text(&built["key"]);
    let shown = world.ask(&["store", "show", &key]).ok();
    let tensor = shown["entry"]["tensors"].as_array().unwrap().iter().find(|t| t["name"] == "layers.3.down").unwrap();
    let shard = PathBuf::from(text(&shown["paths"][tensor["shard"].as_u64().unwrap() as usize]));
    let good = fs::read(&shard).unwrap();
    damage(&shard, tensor["offset"].as_u64().unwrap() + 20_000);

    let found = world.ask(&["verify", "--entry", &key[..10]]);
    assert_eq!((found.status, found.code()), (3, "corrupt_blob"));
    assert!(
        found.message().contains("tensor 'layers.3.down' differs within its bytes 16384..24576"),
        "{}",
        found.stderr
    );
    assert!(text(&found.json["error"]["hint"]).contains("weightmill build"));
    assert_eq!(found.json["damaged"][0]["entry"], key.as_str());
    assert!(!shard.exists(), "it is in quarantine");
    assert_eq!(fs::read_dir(world.store.join("quarantine")).unwrap().count(), 2, "the blob and a note");
    assert_eq!(world.ask(&["verify", "--all"]).status, 3, "the entry is not whole now");

    let rebuilt = world.build(&[]);
    assert_eq!((&rebuilt["outcome"], &rebuilt["content_digest"]), (&"built".into(), &built["content_digest"]));
    assert_eq!(rebuilt["blocks_reused"], BLOCKS - 1, "only the damaged block is computed");
    assert_eq!(fs::read(&shard).unwrap(), good);
    let audit = world.ask(&["verify", "--all"]).ok();
    assert_eq!((&audit["entries"], &audit["shards"]), (&1.into(), &BLOCKS.into()));

    // Two at once are both told; and a build that meets damage repairs it.
    let paths = texts(&shown["paths"]);
    damage(Path::new(&paths[1]), 5000);
    damage(Path::new(&paths[6]), 5000);
    let both = world.ask(&["verify", "--entry", &key]);
    assert_eq!((both.status, both.json["damaged"].as_array().unwrap().len()), (3, 2), "{}", both.stderr);
    world.build(&[]);
    damage(Path::new(&paths[7]), 5000);
    let met = world.build(&[]);
    assert_eq!((&met["outcome"], &met["content_digest"]), (&"built".into(), &built["content_digest"]));
    world.ask(&["verify", "--entry", &key]).ok();
}

#[test]
fn a_rebuild_compares_every_tensor_or_a_sample() {
    let world = World::new();
    let built = world.build(&["--tp-size", "2", "--tp-rank", "1"]);
    let key = text(&built["key"]);
    let rank = ["--tp-size", "2", "--tp-rank", "1"];
    for engine in ["wasmtime", "wasmi"] {
        let equal = world.rebuild(&key, &world.checkpoint, &[&rank[..], &["--engine", engine]].concat()).ok();
        let rebuild = &equal["rebuild"];
        assert_eq!((&rebuild["equal"], &rebuild["engine"]), (&true.into(), &engine.into()));
        assert_eq!((&rebuild["tensors"], &rebuild["content_digest"]), (&built["tensors"], &built["content_digest"]));
    }
    let sample = world.rebuild(&key, &world.checkpoint, &[&rank[..], &["--sample", "5%"]].concat()).ok();
    assert_eq!(texts(&sample["rebuild"]["blocks"]).len(), 1, "at least one block");
    assert_eq!(sample["rebuild"]["content_digest"], Value::Null);
    assert_eq!(sample["rebuild"]["engine"], "wasmi", "a sample is checked by another engine than the builder's");

    let other_rank = world.rebuild(&key, &world.checkpoint, &["--tp-size", "2"]);
    assert_eq!((other_rank.status, other_rank.code()), (1, "source_unavailable"));
    let other_source = world.rebuild(&key, &world.other_checkpoint(1, &[6]), &rank);
    assert_eq!((other_source.status, other_source.code()), (1, "source_unavailable"));
    let nothing = world.ask(&["verify", "--entry", &"0".repeat(64)]);
    assert_eq!((nothing.status, nothing.code()), (1, "source_unavailable"));
    assert_eq!(world.keys(), [key.as_str()], "nothing was written");

    lie(&world, &key, "layers.5.down");
    world.ask(&["verify", "--entry", &key]).ok();
    let lied = world.rebuild(&key, &world.checkpoint, &rank);
    assert_eq!((lied.status, lied.code()), (3, "identity_collision"), "{}", lied.stderr);
    let differing = lied.json["rebuild"]["differing"].as_array().unwrap();
    assert_eq!((differing.len(), &differing[0]["tensor"]), (1, &"layers.5.down".into()));
    let all = world.rebuild(&key, &world.checkpoint, &[&rank[..], &["--sample", "100%"]].concat());
    assert_eq!(all.code(), "identity_collision");
}

/// Replaces an entry by one that is whole, but has other bytes in a tensor.
fn lie(world: &World, key: &str, tensor: &str) {
    let store = world.open();
    let key: ActionKey = key.parse().unwrap();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let (mut document, shards): (EntryDocument, Vec<Vec<u8>>) = {
        let lease = world.lease(&key.to_string());
        let shards = (0..lease.shards()).map(|s| fs::read(lease.shard_path(s)).unwrap()).collect();
        (lease.document().clone(), shards)
    };
    let action = store.action(&key).unwrap().unwrap();
    store.remove(&key, &Silent).unwrap();
    let Claim::Build(publication) = store.claim(&key, &action, &Silent).unwrap() else { panic!("it was removed") };
    for (index, layout) in document.layouts().unwrap().iter().enumerate() {
        let mut writer = publication.create_shard(layout).unwrap();
        for (number, placed) in layout.tensors().iter().enumerate() {
            let mut bytes = shards[index][placed.offset as usize..placed.end() as usize].to_vec();
            if placed.name.as_str() == tensor {
                bytes[100] ^= 1;
            }
            writer.tensor(number, &bytes, None).unwrap();
        }
        let finished = writer.finish().unwrap();
        document.shards[index] = finished.record;
        for made in finished.tensors {
            document.tensors.iter_mut().find(|t| t.name == made.name).unwrap().digest = made.digest;
        }
    }
    document.content_digest = document.compute_content_digest();
    publication.commit(document, &serde_json::json!({}), &pool, &Silent).unwrap();
}

#[test]
fn ranks_and_fine_tunes_share_the_blocks_that_are_equal() {
    let world = World::new();
    let first = world.build(&["--tp-size", "2", "--tp-rank", "0"]);
    assert_eq!((&first["blocks"], &first["blocks_reused"]), (&BLOCKS.into(), &0.into()));
    let second = world.build(&["--tp-size", "2", "--tp-rank", "1"]);
    assert_eq!(second["blocks_reused"], BLOCKS - SHARDED, "what no tp step touches is shared by the ranks");
    assert!(second["bytes_deduplicated"].as_u64().unwrap() > 0);
    assert_ne!(first["content_digest"], second["content_digest"]);

    let base = world.build(&[]);
    let tuned = world.build_of(&world.other_checkpoint(1, &[2, 5]), &[]);
    assert_eq!(tuned["blocks_reused"], BLOCKS - 2, "two layers are computed");
    let shards = |built: &Value| -> Vec<String> {
        built["shards"].as_array().unwrap().iter().map(|s| text(&s["digest"])).collect()
    };
    let shared = shards(&base).iter().filter(|digest| shards(&tuned).contains(digest)).count();
    assert_eq!(shared, BLOCKS - 2);
    assert!(tuned["source_bytes_read"].as_u64() > base["bytes"].as_u64(), "the source was hashed, and two layers read");

    // What is shared is as good as what is not.
    let fresh = World::new();
    let alone = fresh.build_of(&fresh.other_checkpoint(1, &[2, 5]), &[]);
    assert_eq!((&alone["blocks_reused"], &alone["content_digest"]), (&0.into(), &tuned["content_digest"]));
    assert_eq!(shards(&alone), shards(&tuned));
}

#[test]
fn check_source_hashes_what_is_known_already() {
    let world = World::new();
    // Until its times have settled, a file is not remembered.
    std::thread::sleep(Duration::from_millis(100));
    let built = world.build(&[]);
    let hit = world.build(&[]);
    assert_eq!((&hit["outcome"], &hit["source_bytes_read"]), (&"hit".into(), &0.into()));
    let checked = world.build(&["--check-source"]);
    let all = fs::metadata(&world.checkpoint).unwrap().len();
    let read = checked["source_bytes_read"].as_u64().unwrap();
    assert!(read > all * 9 / 10 && read <= all, "{read} of {all}");
    assert_eq!((&checked["outcome"], &checked["key"]), (&"hit".into(), &built["key"]));
}
