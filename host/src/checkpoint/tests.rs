use std::fs;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use tempfile::TempDir;

use super::hostile::{file, tensor};
use super::*;
use crate::digest::{LEAF_BYTES, LeafHasher, TensorDigest};
use crate::progress::{Progress, Silent};

fn pool() -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap()
}

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn code_of(path: &Path) -> (Code, String) {
    let error = Checkpoint::open(path).unwrap_err();
    (error.code(), error.message().to_string())
}

/// A file of U8 tensors with these bytes.
fn shard(tensors: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let (mut rows, mut data) = (Vec::new(), Vec::new());
    for (name, bytes) in tensors {
        let begin = data.len() as u64;
        data.extend_from_slice(bytes);
        rows.push(tensor(name, "U8", &format!("[{}]", bytes.len()), begin, data.len() as u64));
    }
    let mut whole = file(&format!("{{{}}}", rows.join(",")), 0);
    whole.append(&mut data);
    whole
}

/// Tensors of interesting sizes, all different.
fn sample() -> Vec<(&'static str, Vec<u8>)> {
    let sizes = [("e", 0), ("one", 1), ("leaf", LEAF_BYTES), ("more", LEAF_BYTES + 1), ("big", 3_500_001), ("z", 77)];
    sizes.map(|(name, len)| (name, (0..len).map(|i| (i * 13 + i / 255 + len) as u8).collect())).to_vec()
}

fn digests(path: &Path) -> SourceDigests {
    source_digests(&Checkpoint::open(path).unwrap(), &NoCache, &pool(), &Silent).unwrap()
}

fn by_the_book(bytes: &[u8]) -> TensorDigest {
    let mut hasher = LeafHasher::default();
    hasher.update(bytes);
    hasher.finish().0
}

#[test]
fn digests_are_those_of_the_bytes() {
    let folder = folder();
    let path = folder.path().join("model.safetensors");
    fs::write(&path, shard(&sample())).unwrap();
    let found = digests(&path);
    assert_eq!(found.bytes_read, sample().iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>());
    assert_eq!(found.by_name.len(), sample().len());
    for (name, bytes) in sample() {
        assert_eq!(found.by_name[name], by_the_book(&bytes), "{name}");
    }
}

#[test]
fn a_split_over_three_files_changes_nothing() {
    let (one, three, indexed) = (folder(), folder(), folder());
    fs::write(one.path().join("model.safetensors"), shard(&sample())).unwrap();
    let mut map = serde_json::Map::new();
    for (number, part) in sample().chunks(2).enumerate() {
        let name = format!("model-{number}.safetensors");
        // In the indexed one the tensors lie in another order.
        let reversed: Vec<_> = part.iter().rev().cloned().collect();
        fs::write(three.path().join(&name), shard(part)).unwrap();
        fs::write(indexed.path().join(&name), shard(&reversed)).unwrap();
        map.extend(part.iter().map(|(tensor, _)| (tensor.to_string(), name.clone().into())));
    }
    let index = serde_json::json!({"metadata": {}, "weight_map": map}).to_string();
    fs::write(indexed.path().join("model.safetensors.index.json"), index).unwrap();
    let whole = digests(one.path());
    assert_eq!(whole, digests(three.path()));
    assert_eq!(whole, digests(indexed.path()));
    assert_eq!(Checkpoint::open(indexed.path()).unwrap().files().len(), 3);
}

#[test]
fn config_is_found_beside_the_file_and_in_the_folder() {
    let folder = folder();
    let path = folder.path().join("model.safetensors");
    fs::write(&path, shard(&sample())).unwrap();
    assert_eq!(Checkpoint::open(&path).unwrap().config(), None);
    fs::write(folder.path().join("config.json"), r#"{"n":3}"#).unwrap();
    for path in [&path, folder.path()] {
        let checkpoint = Checkpoint::open(path).unwrap();
        assert_eq!(checkpoint.config().unwrap()["n"], 3);
        assert_eq!(checkpoint.path(), path);
    }
    fs::write(folder.path().join("config.json"), " ".repeat((4 << 20) + 1)).unwrap();
    let (code, message) = code_of(&path);
    assert_eq!(code, Code::CheckpointInvalid);
    assert!(message.contains("config.json\" has more than"), "{message}");
}

#[test]
fn what_is_no_regular_file_is_refused_at_once() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    let made = std::process::Command::new("mkfifo").arg(at("fifo.safetensors")).status().unwrap();
    assert!(made.success());
    let _socket = std::os::unix::net::UnixListener::bind(at("socket.safetensors")).unwrap();
    symlink("/dev/zero", at("zero.safetensors")).unwrap();
    symlink("/dev/tty", at("tty.safetensors")).unwrap();
    symlink("loop.safetensors", at("loop.safetensors")).unwrap();
    symlink("gone", at("dangling.safetensors")).unwrap();
    fs::create_dir(at("sub.safetensors")).unwrap();
    let began = Instant::now();
    for (name, part) in [
        ("fifo.safetensors", "a FIFO"),
        ("socket.safetensors", "a socket"),
        ("zero.safetensors", "a device"),
        ("tty.safetensors", "a device"),
        ("loop.safetensors", "a loop of symbolic links"),
        ("dangling.safetensors", "a symbolic link to something that is not there"),
        ("none.safetensors", "does not exist"),
        ("fifo.safetensors/x", "not a directory"),
        ("nul\0", "holds a NUL"),
        (&"n".repeat(300), "too long"),
    ] {
        let (code, message) = code_of(&at(name));
        assert_eq!(code, Code::CheckpointInvalid, "{name}");
        assert!(message.contains(part), "{name}: {message}");
        if name.contains(['/', '\0']) || name.len() > 200 || name.starts_with("none") {
            continue;
        }
        // The same in a folder, where the name is found and not given.
        let alone = self::folder();
        fs::rename(at(name), alone.path().join("m.safetensors")).unwrap();
        let in_folder = code_of(alone.path());
        if name != "loop.safetensors" {
            assert_eq!(in_folder.0, Code::CheckpointInvalid);
            assert!(in_folder.1.contains(part), "{name}: {}", in_folder.1);
        }
        fs::rename(alone.path().join("m.safetensors"), at(name)).unwrap();
    }
    assert_eq!(code_of(folder.path()).0, Code::CheckpointInvalid);
    assert!(began.elapsed() < Duration::from_secs(10));
}

#[test]
fn linked_snapshots_work() {
    let cache = folder();
    let snapshot = cache.path().join("snapshots/rev");
    let blobs = cache.path().join("blobs");
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(&blobs).unwrap();
    fs::write(blobs.join("abc"), shard(&sample())).unwrap();
    fs::write(blobs.join("def"), r#"{"n":1}"#).unwrap();
    symlink("../../blobs/abc", snapshot.join("model.safetensors")).unwrap();
    symlink("../../blobs/def", snapshot.join("config.json")).unwrap();
    for path in [snapshot.clone(), snapshot.join("model.safetensors")] {
        assert!(Checkpoint::open(&path).unwrap().config().is_some());
        assert_eq!(digests(&path).by_name["z"], by_the_book(&sample()[5].1));
    }
    // A link that leads elsewhere now is another file.
    let checkpoint = Checkpoint::open(&snapshot).unwrap();
    fs::write(blobs.join("new"), shard(&sample())).unwrap();
    fs::remove_file(snapshot.join("model.safetensors")).unwrap();
    symlink("../../blobs/new", snapshot.join("model.safetensors")).unwrap();
    let error = checkpoint.files()[0].check_unchanged().unwrap_err();
    assert_eq!(error.code(), Code::SourceChanged);
    assert!(error.message().contains("replaced"), "{error}");
}

/// What can happen to a file while it is open, and what is said about it.
type Change = (&'static str, fn(&Path), &'static str);

const CHANGES: &[Change] = &[
    ("truncated", |path| fs::OpenOptions::new().write(true).open(path).unwrap().set_len(100).unwrap(), "shrank"),
    ("emptied", |path| drop(fs::File::create(path).unwrap()), "shrank"),
    ("appended to", |path| fs::OpenOptions::new().append(true).open(path).unwrap().write_all(b"x").unwrap(), "grew"),
    ("written to", |path| fs::OpenOptions::new().write(true).open(path).unwrap().write_all(b"x").unwrap(), "written"),
    (
        "written with its times put back",
        |path| {
            let mut file = fs::OpenOptions::new().write(true).open(path).unwrap();
            let modified = file.metadata().unwrap().modified().unwrap();
            file.write_all(b"x").unwrap();
            file.set_modified(modified).unwrap();
        },
        "written",
    ),
    ("removed", |path| fs::remove_file(path).unwrap(), "removed"),
    (
        "replaced",
        |path| {
            let other = path.with_extension("new");
            fs::copy(path, &other).unwrap();
            fs::rename(other, path).unwrap();
        },
        "replaced",
    ),
];

/// Does something at the first sign of progress.
struct Meddler<F: Fn() + Sync> {
    done: AtomicBool,
    what: F,
}

impl<F: Fn() + Sync> Progress for Meddler<F> {
    fn advance(&self, _: u64) {
        if !self.done.swap(true, Ordering::SeqCst) {
            (self.what)();
        }
    }
}

#[test]
fn a_file_that_changes_is_noticed() {
    for (what, change, said) in CHANGES {
        for while_hashing in [false, true] {
            let folder = folder();
            let path = folder.path().join("m.safetensors");
            fs::write(&path, shard(&sample())).unwrap();
            let checkpoint = Checkpoint::open(&path).unwrap();
            let cache = MemoryCache::default();
            let meddler = Meddler { done: AtomicBool::new(!while_hashing), what: || change(&path) };
            if !while_hashing {
                change(&path);
                let error = checkpoint.files()[0].check_unchanged().unwrap_err();
                assert!(error.message().contains(said), "{what}: {error}");
            }
            let error = source_digests(&checkpoint, &cache, &pool(), &meddler).unwrap_err();
            assert_eq!(error.code(), Code::SourceChanged, "{what}: {error}");
            assert!(cache.records.lock().unwrap().is_empty(), "{what}: nothing may be kept");
        }
    }
}

#[test]
fn reading_past_the_end_is_a_change_of_the_file() {
    let folder = folder();
    let path = folder.path().join("m.safetensors");
    fs::write(&path, shard(&sample())).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let size = checkpoint.files()[0].identity().size_bytes;
    let mut buf = [0; 4];
    checkpoint.files()[0].read_exact_at(&mut buf, size - 4).unwrap();
    for offset in [size - 3, size, size + (1 << 40)] {
        let error = checkpoint.files()[0].read_exact_at(&mut buf, offset).unwrap_err();
        assert_eq!(error.code(), Code::SourceChanged, "{offset}");
    }
}

/// Opening returns only when a further change would be seen.
#[test]
fn a_fresh_file_is_waited_for() {
    let folder = folder();
    let path = folder.path().join("m.safetensors");
    for _ in 0..5 {
        fs::write(&path, shard(&sample())).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let (seconds, nanos) = checkpoint.files()[0].identity().changed;
        let changed = SystemTime::UNIX_EPOCH + Duration::new(seconds as u64, nanos);
        assert!(changed.elapsed().unwrap() >= Duration::from_millis(50));
        let mut file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all(&[1]).unwrap();
        assert_eq!(checkpoint.files()[0].check_unchanged().unwrap_err().code(), Code::SourceChanged);
    }
}

#[derive(Default)]
struct MemoryCache {
    records: Mutex<Vec<(FileIdentity, BTreeMap<TensorName, TensorDigest>)>>,
}

impl DigestCache for MemoryCache {
    fn load(&self, file: &FileIdentity) -> Option<BTreeMap<TensorName, TensorDigest>> {
        self.records.lock().unwrap().iter().find(|(known, _)| known == file).map(|(_, digests)| digests.clone())
    }

    fn save(&self, file: &FileIdentity, digests: &BTreeMap<TensorName, TensorDigest>) {
        self.records.lock().unwrap().push((file.clone(), digests.clone()));
    }
}

#[test]
fn a_known_file_is_not_read() {
    let folder = folder();
    for (number, part) in sample().chunks(2).enumerate() {
        fs::write(folder.path().join(format!("{number}.safetensors")), shard(part)).unwrap();
    }
    let cache = MemoryCache::default();
    let run = || source_digests(&Checkpoint::open(folder.path()).unwrap(), &cache, &pool(), &Silent).unwrap();
    let cold = run();
    assert_eq!(cache.records.lock().unwrap().len(), 3);
    let warm = run();
    assert_eq!(warm, SourceDigests { bytes_read: 0, ..cold.clone() });

    // A touched file is read again, the others are not; the digests stay.
    let touched = folder.path().join("0.safetensors");
    fs::File::open(&touched).unwrap().set_modified(SystemTime::now()).unwrap();
    let again = run();
    assert_eq!(again, SourceDigests { bytes_read: 1, ..cold });
}

#[test]
fn a_record_about_other_tensors_is_ignored() {
    let folder = folder();
    fs::write(folder.path().join("m.safetensors"), shard(&sample())).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let right = source_digests(&checkpoint, &NoCache, &pool(), &Silent).unwrap();
    let mut fewer = right.by_name.clone();
    fewer.remove("z");
    let mut more = right.by_name.clone();
    more.insert(TensorName::new("y").unwrap(), right.by_name["z"]);
    let mut other = fewer.clone();
    other.insert(TensorName::new("y").unwrap(), right.by_name["z"]);
    for wrong in [fewer, more, other] {
        let cache = MemoryCache::default();
        cache.save(checkpoint.files()[0].identity(), &wrong);
        assert_eq!(source_digests(&checkpoint, &cache, &pool(), &Silent).unwrap(), right);
    }
}

#[test]
fn a_timestamp_in_the_future_is_never_cached() {
    let folder = folder();
    let path = folder.path().join("m.safetensors");
    fs::write(&path, shard(&sample())).unwrap();
    let future = SystemTime::now() + Duration::from_secs(3600);
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_modified(future).unwrap();
    let cache = MemoryCache::default();
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert!(!checkpoint.files()[0].is_cacheable());
    let right = source_digests(&checkpoint, &cache, &pool(), &Silent).unwrap();
    assert!(cache.records.lock().unwrap().is_empty());
    // Nor is a record taken.
    let wrong = right.by_name.keys().map(|name| (name.clone(), TensorDigest::of(b""))).collect();
    cache.save(checkpoint.files()[0].identity(), &wrong);
    assert_eq!(source_digests(&checkpoint, &cache, &pool(), &Silent).unwrap(), right);
}

struct Watcher {
    advanced: AtomicU64,
    total: AtomicU64,
    stop_after: u64,
}

impl Progress for Watcher {
    fn stage(&self, _: &str, total_bytes: u64) {
        self.total.store(total_bytes, Ordering::SeqCst);
    }

    fn advance(&self, bytes: u64) {
        self.advanced.fetch_add(bytes, Ordering::SeqCst);
    }

    fn cancelled(&self) -> bool {
        self.advanced.load(Ordering::SeqCst) >= self.stop_after
    }
}

#[test]
fn progress_is_told_and_can_stop() {
    let folder = folder();
    fs::write(folder.path().join("m.safetensors"), shard(&sample())).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let watch = |stop_after| {
        let watcher = Watcher { advanced: AtomicU64::new(0), total: AtomicU64::new(0), stop_after };
        let result = source_digests(&checkpoint, &NoCache, &pool(), &watcher);
        (result, watcher.advanced.into_inner(), watcher.total.into_inner())
    };
    let (result, advanced, total) = watch(u64::MAX);
    assert_eq!((result.unwrap().bytes_read, total), (checkpoint.tensor_bytes(), checkpoint.tensor_bytes()));
    assert_eq!(advanced, total);
    let (result, advanced, total) = watch(1);
    assert_eq!(result.unwrap_err().code(), Code::Interrupted);
    assert!(advanced < total);
}

/// Throughput against plain reading and hashing; run with `--ignored`.
#[test]
#[ignore = "a measurement"]
fn speed() {
    use crate::digest::sha256;
    let folder = folder();
    let path = folder.path().join("m.safetensors");
    let len = 1_usize << 30;
    let json = format!("{{{}}}", tensor("w", "U8", &format!("[{len}]"), 0, len as u64));
    let mut whole = file(&json, 0);
    whole.resize(whole.len() + len, 7);
    fs::write(&path, &whole).unwrap();
    let began = Instant::now();
    whole.chunks(1 << 20).for_each(|piece| assert_ne!(sha256(piece), [0; 32]));
    let plain = began.elapsed();
    drop(whole);
    let checkpoint = Checkpoint::open(&path).unwrap();
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let began = Instant::now();
        source_digests(&checkpoint, &NoCache, &pool, &Silent).unwrap();
        println!("{threads} threads: {:?}; plain SHA-256 on one: {plain:?}", began.elapsed());
    }
}
