//! The store through the program: eviction, repair, verification, reuse, and
//! what happens where it cannot be used.

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use safetensors::Dtype;
use serde_json::Value;
use weightmill::digest::ActionKey;
use weightmill::progress::Silent;
use weightmill::store::document::EntryDocument;
use weightmill::store::{Claim, Lease, Store, StoreOptions, Verify};
use weightmill_tests::{Ran, Tensor, program, run, run_recipe, seeded_bytes, write_safetensors};

const LAYERS: usize = 8;
/// Every layer, and `rest`.
const BLOCKS: usize = LAYERS + 1;
/// Layers with an odd number have a tensor that the recipe shards.
const SHARDED: usize = LAYERS / 2;
const RECIPE: &str = r#"
recipe = 1
name = "small"

[[step]]
module  = "tp-shard"
inputs  = { w = "layers.{i}.up" }
outputs = { w = "layers.{i}.up" }
params  = { dim = 0 }

[[step]]
module  = "cast"
inputs  = { w = "embed" }
outputs = { w = "embed" }
params  = { dtype = "BF16" }

[blocks]
patterns = ["layers.{i}."]
"#;

/// A recipe, a checkpoint and a store that is not there yet.
struct World {
    folder: tempfile::TempDir,
    recipe: PathBuf,
    checkpoint: PathBuf,
    store: PathBuf,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let recipe = folder.path().join("small.toml");
        fs::write(&recipe, RECIPE).unwrap();
        let checkpoint = folder.path().join("base.safetensors");
        write_model(&checkpoint, 1, &[]);
        let store = folder.path().join("store");
        World { folder, recipe, checkpoint, store }
    }

    /// Another checkpoint, whose layers in `tuned` differ from those of `seed`.
    fn other_checkpoint(&self, seed: u64, tuned: &[usize]) -> PathBuf {
        let path = self.folder.path().join(format!("model-{seed}-{}.safetensors", tuned.len()));
        write_model(&path, seed, tuned);
        path
    }

    fn build(&self, more: &[&str]) -> Value {
        self.build_of(&self.checkpoint, more)
    }

    fn build_of(&self, checkpoint: &Path, more: &[&str]) -> Value {
        run_recipe("build", &self.recipe, checkpoint, &self.store, more).ok()
    }

    /// A command about the store.
    fn ask(&self, words: &[&str]) -> Ran {
        run(words.iter().map(OsStr::new).chain([OsStr::new("--store"), self.store.as_os_str()]))
    }

    /// `verify --rebuild` of an entry.
    fn rebuild(&self, key: &str, checkpoint: &Path, more: &[&str]) -> Ran {
        let mut words = vec!["--entry", key, "--rebuild"];
        words.extend(more);
        run_recipe("verify", &self.recipe, checkpoint, &self.store, &words)
    }

    fn open(&self) -> Store {
        Store::open(&self.store, StoreOptions::default()).unwrap()
    }

    fn lease(&self, key: &str) -> Lease {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        self.open().lease(&key.parse().unwrap(), Verify::Never, &pool, &Silent).unwrap().expect("it is there")
    }

    fn keys(&self) -> Vec<String> {
        let listed = self.ask(&["store", "ls"]).ok();
        listed["entries"].as_array().unwrap().iter().map(|e| text(&e["key"])).collect()
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("expected a text, found {value}")).to_string()
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(text).collect()
}

fn write_model(path: &Path, seed: u64, tuned: &[usize]) {
    let embed: Vec<u8> = (0..64 * 64).flat_map(|i| (seed as f32 + i as f32 / 3.0).to_le_bytes()).collect();
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = vec![("embed".into(), Dtype::F32, vec![64, 64], embed)];
    for layer in 0..LAYERS {
        let seed = seed * 100 + layer as u64 + if tuned.contains(&layer) { 50 } else { 0 };
        let mut add = |name: &str, rows: usize, salt: u64| {
            let bytes = seeded_bytes(seed * 10 + salt, rows * 128 * 2);
            tensors.push((format!("layers.{layer}.{name}"), Dtype::BF16, vec![rows, 128], bytes));
        };
        add("norm", 1, 1);
        add("down", 96, 2);
        if layer % 2 == 1 {
            add("up", 64, 3);
        }
    }
    let rows: Vec<Tensor<'_>> = tensors.iter().map(|(n, d, s, b)| (n.as_str(), *d, s.clone(), b.clone())).collect();
    write_safetensors(path, &rows);
}

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
        let file = File::options().write(true).open(world.store.join("state/leased").join(key)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(hours * 3600)).unwrap();
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
    assert!(found.message().contains("tensor 'layers.3.down' differs within its bytes 16384..24576"), "{}", found.stderr);
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

/// Fallback and failure for one broken store; `good` is a build elsewhere.
fn falls_back(world: &World, good: &Value, code: &str, wrap: &dyn Fn(&str, &[&str]) -> Ran) {
    let preferred = wrap("build", &["--mode", "preferred"]);
    assert_eq!(preferred.status, 0, "{code}: {}", preferred.stderr);
    assert_eq!((&preferred.json["outcome"], &preferred.json["code"]), (&"fallback".into(), &code.into()));
    assert_eq!(preferred.json["content_digest"], good["content_digest"]);
    assert_eq!(preferred.json["shards"], good["shards"], "the files are the same to the byte");
    let required = wrap("build", &["--mode", "required"]);
    assert_eq!((required.status, required.code()), (3, code), "{}", required.stderr);
    let loaded = wrap("load", &["--device", "host", "--staging", "4MiB", "--check-copy-back"]);
    assert_eq!(loaded.status, 0, "{code}: {}", loaded.stderr);
    assert_eq!((&loaded.json["outcome"], &loaded.json["code"]), (&"fallback".into(), &code.into()));
    assert!(loaded.json["h2d_bytes"].as_u64().unwrap() > 0);
    assert!(world.checkpoint.exists());
}

#[test]
fn a_busy_store_is_done_without_or_is_an_error() {
    let world = World::new();
    let elsewhere = World::new();
    let good = elsewhere.build_of(&world.checkpoint, &["--export", &elsewhere.folder.path().join("good").to_string_lossy()]);
    world.open();
    let lock = File::create(world.store.join("locks/store")).unwrap();
    lock.lock().unwrap();
    let start = Instant::now();
    falls_back(&world, &good, "lock_timeout", &|command, more| {
        run_recipe(command, &world.recipe, &world.checkpoint, &world.store, &[more, &["--lock-timeout", "1"]].concat())
    });
    assert!(start.elapsed() < Duration::from_secs(60), "waits are bounded");

    let out = world.folder.path().join("out");
    world.build(&["--mode", "preferred", "--lock-timeout", "0", "--export", &out.to_string_lossy()]);
    let names: Vec<_> = fs::read_dir(&out).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), BLOCKS + 1);
    for name in names {
        let good = fs::read(elsewhere.folder.path().join("good").join(&name)).unwrap();
        assert!(fs::read(out.join(&name)).unwrap() == good, "{name:?} differs");
    }
    let poor = ["--mode", "preferred", "--lock-timeout", "0", "--memory-budget", "1kB"];
    let poor = run_recipe("build", &world.recipe, &world.checkpoint, &world.store, &poor);
    assert_eq!((poor.status, poor.code()), (3, "insufficient_memory"));
    assert!(poor.message().contains("lock_timeout"), "it says why memory was needed: {}", poor.message());

    // What is there already needs no lock on the store.
    lock.unlock().unwrap();
    world.build(&[]);
    lock.lock().unwrap();
    assert_eq!(world.build(&["--lock-timeout", "0"])["outcome"], "hit");
}

#[test]
fn disabled_does_not_touch_the_store() {
    let world = World::new();
    let load = |more: &[&str]| run_recipe("load", &world.recipe, &world.checkpoint, &world.store, more);
    let loaded = load(&["--mode", "disabled", "--device", "host", "--staging", "4MiB", "--check-copy-back"]).ok();
    assert_eq!(loaded["outcome"], "disabled");
    assert!(!world.store.exists());
    let refused = load(&["--mode", "disabled", "--verify", "device"]);
    assert_eq!((refused.status, refused.code()), (1, "bad_params"));
    let built = run_recipe("build", &world.recipe, &world.checkpoint, &world.store, &["--mode", "disabled"]);
    assert_eq!((built.status, built.code()), (1, "bad_params"));
    assert!(!world.store.exists());
}

/// Whether this user may make mount namespaces.
fn may_mount() -> bool {
    let may = Command::new("unshare").args(["--user", "--map-root-user", "--mount", "true"]).output();
    let may = may.is_ok_and(|output| output.status.success());
    if !may {
        println!("skipped: this user may not make a mount namespace");
    }
    may
}

/// Runs `command` of the recipe in a mount namespace that `script` prepares.
fn in_namespace(world: &World, script: &str, command: &str, more: &[&str]) -> Ran {
    let script = format!("{script} && exec \"$0\" \"$@\"");
    let mut unshare = Command::new("unshare");
    unshare.args(["--user", "--map-root-user", "--mount", "sh", "-c", &script]).arg(program());
    unshare.args([command, "--json", "--recipe"]).arg(&world.recipe).arg("--checkpoint").arg(&world.checkpoint);
    unshare.arg("--store").arg(&world.store).args(more).stdin(Stdio::null());
    let output = unshare.output().unwrap();
    Ran {
        status: output.status.code().unwrap_or(-1),
        json: serde_json::from_slice(&output.stdout).unwrap_or(Value::Null),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_read_only_store_serves_hits_and_is_done_without_otherwise() {
    if !may_mount() {
        return;
    }
    let world = World::new();
    let good = World::new().build_of(&world.checkpoint, &[]);
    let at = world.store.display();
    let read_only = format!("mount --bind {at} {at} && mount -o remount,ro,bind {at}");
    let wrap = |command: &str, more: &[&str]| in_namespace(&world, &read_only, command, more);
    // An empty folder, then a store without the entry.
    fs::create_dir(&world.store).unwrap();
    falls_back(&world, &good, "io_error", &wrap);
    world.build_of(&world.other_checkpoint(2, &[]), &[]);
    falls_back(&world, &good, "io_error", &wrap);
    world.build(&[]);
    let hit = wrap("build", &["--mode", "required"]).ok();
    assert_eq!((&hit["outcome"], &hit["content_digest"]), (&"hit".into(), &good["content_digest"]));
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_done_without_wherever_it_fills_up() {
    if !may_mount() {
        return;
    }
    let world = World::new();
    let good = World::new().build_of(&world.checkpoint, &[]);
    fs::create_dir(&world.store).unwrap();
    let small = |options: &str| format!("mount -t tmpfs -o mode=755,{options} none {}", world.store.display());
    let wrap = |command: &str, more: &[&str]| in_namespace(&world, &small("size=100k"), command, more);
    falls_back(&world, &good, "insufficient_disk", &wrap);

    // The check beforehand sees neither the records around the blobs, nor how
    // many files there may be: there it is writing, linking or making a folder
    // that fails.
    let bytes: u64 = good["bytes"].as_u64().unwrap();
    let sizes = (0..7).map(|n| format!("size={}", bytes + n * 24 * 1024));
    let files = [4, 12, 24, 36, 44, 60].map(|n| format!("size=64m,nr_inodes={n}"));
    let mut outcomes = Vec::new();
    for options in sizes.chain(files) {
        let ran = in_namespace(&world, &small(&options), "build", &["--mode", "preferred"]);
        assert_eq!(ran.status, 0, "{options}: {}", ran.stderr);
        assert_eq!(ran.json["content_digest"], good["content_digest"], "{options}");
        match text(&ran.json["outcome"]).as_str() {
            "fallback" => assert_eq!(ran.json["code"], "insufficient_disk", "{options}"),
            other => assert_eq!(other, "built", "{options}"),
        }
        outcomes.push(text(&ran.json["outcome"]));
    }
    for outcome in ["built", "fallback"] {
        assert!(outcomes.iter().any(|o| o == outcome), "{outcomes:?}");
    }
}

const ROLE: &str = "WEIGHTMILL_TEST_ROLE";

/// What this binary does as the server of a FUSE filesystem; nothing in the
/// test run itself. Its standard input is `/dev/fuse`.
#[test]
fn role() {
    if std::env::var(ROLE).is_ok_and(|role| role == "fuse") {
        serve_an_empty_folder();
    }
}

/// Answers the requests that a look at the root makes, in the form that
/// `linux/fuse.h` gives: a header of 40 bytes (length, operation, number, …)
/// in, one of 16 (length, error, number) out.
fn serve_an_empty_folder() {
    use std::os::fd::AsFd;
    let mut device = File::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut request = vec![0; 1 << 17];
    while let Ok(n) = device.read(&mut request) {
        assert!(n >= 40);
        let word = |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let mut body: Vec<u8> = Vec::new();
        let mut error = 0_i32;
        match word(&request, 4) {
            // INIT: version 7.31, and at most so many bytes at once.
            26 => {
                body.resize(64, 0);
                body[0..4].copy_from_slice(&7_u32.to_le_bytes());
                body[4..8].copy_from_slice(&31_u32.to_le_bytes());
                body[20..24].copy_from_slice(&4096_u32.to_le_bytes());
            }
            // GETATTR: a folder of the namespace's root.
            3 => {
                body.resize(104, 0);
                body[16..24].copy_from_slice(&1_u64.to_le_bytes());
                body[76..80].copy_from_slice(&0o040_755_u32.to_le_bytes());
                body[80..84].copy_from_slice(&2_u32.to_le_bytes());
            }
            // STATFS.
            17 => body.resize(80, 0),
            // FORGET and INTERRUPT take no answer.
            2 | 36 | 42 => continue,
            // LOOKUP: no such name. The rest: not implemented.
            1 => error = -2,
            _ => error = -38,
        }
        let mut answer = ((16 + body.len()) as u32).to_le_bytes().to_vec();
        answer.extend_from_slice(&error.to_le_bytes());
        answer.extend_from_slice(&request[8..16]);
        answer.extend_from_slice(&body);
        if device.write(&answer).is_err() {
            break;
        }
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_fuse_filesystem_is_refused_or_done_without() {
    if !may_mount() {
        return;
    }
    let world = World::new();
    let good = World::new().build_of(&world.checkpoint, &[]);
    fs::create_dir(&world.store).unwrap();
    let this = std::env::current_exe().unwrap();
    let mount = format!(
        "exec 3<>/dev/fuse && mount -i -t fuse -o fd=3,rootmode=40000,user_id=0,group_id=0 none {} && \
         {{ {ROLE}=fuse {} role --exact --nocapture <&3 >/dev/null 2>&1 3<&- & }} && exec 3<&-",
        world.store.display(),
        this.display()
    );
    let probe = in_namespace(&world, &mount, "plan", &[]);
    if probe.status != 0 {
        println!("skipped: no FUSE filesystem can be mounted here: {}", probe.stderr);
        return;
    }
    falls_back(&world, &good, "unsupported_filesystem", &|command, more| in_namespace(&world, &mount, command, more));
    assert_eq!(fs::read_dir(&world.store).unwrap().count(), 0);
}
