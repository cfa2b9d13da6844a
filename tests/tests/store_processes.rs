//! The store among real processes: killed, competing, of other users, short of
//! space.
//!
//! A process is this test binary, run again with a role in its environment; it
//! then runs [`role`] alone.

#[path = "store/sample.rs"]
mod sample;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sample::{Sample, pool};
use weightmill::error::Code;
use weightmill::progress::Silent;
use weightmill::store::{GcPolicy, Lease, Store, StoreOptions, Verify};

const ROLE: &str = "WEIGHTMILL_TEST_ROLE";
const ROOT: &str = "WEIGHTMILL_TEST_ROOT";
const NUMBER: &str = "WEIGHTMILL_TEST_NUMBER";
/// Bytes of the tensor of most samples.
const LEN: usize = 400_000;
/// How many keys the crowd works on.
const KEYS: u64 = 6;

fn open(root: &Path) -> Store {
    Store::open(root, StoreOptions::default()).expect("the store opens")
}

/// A process with a role.
fn process(role: &str, root: &Path, number: u64) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
    command.args(["role", "--exact", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, role).env(ROOT, root).env(NUMBER, number.to_string());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Ends a process's input, which is what the waiting roles wait for, and gives
/// what it said.
fn finish(mut child: Child) -> String {
    drop(child.stdin.take());
    let output = child.wait_with_output().expect("the process ends");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    said
}

fn input_ended() -> bool {
    let mut rest = Vec::new();
    std::io::stdin().read_to_end(&mut rest).is_ok()
}

/// What a process of this binary does; nothing in the test run itself.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let root = std::env::var_os(ROOT).expect("a role has a root");
    let root = Path::new(&root);
    let number: u64 = std::env::var(NUMBER).ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    match role.as_str() {
        "build" => {
            let built = Sample::new(number, LEN).publish(&open(root)).expect("it is built");
            println!("{}", if built { "built" } else { "found" });
        }
        "read" => {
            let store = open(root);
            let (mut whole, mut absent) = (0, 0);
            let samples: Vec<Sample> = (0..KEYS).map(|n| Sample::new(n, LEN)).collect();
            while !root.join("stop").exists() {
                for sample in &samples {
                    match sample.check(&store).expect("no entry is ever bad") {
                        true => whole += 1,
                        false => absent += 1,
                    }
                }
            }
            println!("whole {whole} absent {absent}");
        }
        "evict" => {
            let store = open(root);
            let policy = GcPolicy { max_size_bytes: Some(3 * LEN as u64), ..GcPolicy::default() };
            let mut evicted = 0;
            while !root.join("stop").exists() {
                evicted += store.gc(&policy, &Silent).expect("gc works beside others").evicted.len();
                std::thread::sleep(Duration::from_millis(40));
            }
            println!("evicted {evicted}");
        }
        "hold" => {
            let sample = Sample::new(number, 64 << 20);
            let lease = lease(&sample, &open(root)).expect("it is there");
            let maps: Vec<_> = (0..lease.shards()).map(|s| lease.map_shard(s).expect("it can be mapped")).collect();
            maps.iter().for_each(touch);
            println!("ready");
            assert!(input_ended());
        }
        "stranger" => stranger(root),
        "small" => small(root),
        other => panic!("no role {other}"),
    }
}

/// Reads a byte of every page, so that the pages count as this process's.
#[allow(unsafe_code)]
fn touch(map: &weightmill::mapping::FileMap) {
    for at in (0..map.len_bytes() as usize).step_by(4096) {
        // SAFETY: `at` is inside the mapping, which is readable while `map`
        // lives, and the blob behind it is never truncated.
        std::hint::black_box(unsafe { map.as_ptr().add(at).read_volatile() });
    }
}

fn lease(sample: &Sample, store: &Store) -> Option<Lease> {
    store.lease(&sample.key, Verify::First, pool(), &Silent).expect("no entry is bad")
}

/// Small numbers that look random; seeded, so that a failure can be repeated
/// as far as the scheduler allows.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound.max(1)
    }
}

#[test]
fn killed_builders_beside_readers_and_gc_leave_no_bad_entry() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    // How long a build takes here, from start to end.
    let start = Instant::now();
    finish(process("build", dir.path(), 0).spawn().unwrap());
    let whole_us = start.elapsed().as_micros() as u64;
    let readers: Vec<Child> = (0..2).map(|_| process("read", dir.path(), 0).spawn().unwrap()).collect();
    let evictor = process("evict", dir.path(), 0).spawn().unwrap();

    let seed = u64::from(std::process::id());
    let mut random = Random(seed);
    let (mut killed, mut ended) = (0, 0);
    let patience = Instant::now();
    while killed < 200 {
        assert!(patience.elapsed() < Duration::from_secs(300), "seed {seed}: {killed} killed, {ended} ended");
        let pair: Vec<Child> =
            (0..2).map(|_| process("build", dir.path(), random.below(KEYS)).spawn().unwrap()).collect();
        for mut child in pair {
            std::thread::sleep(Duration::from_micros(random.below(whole_us + whole_us / 4)));
            if child.try_wait().unwrap().is_some() {
                finish(child);
                ended += 1;
            } else {
                child.kill().unwrap();
                child.wait().unwrap();
                killed += 1;
            }
        }
    }
    fs::write(dir.path().join("stop"), "").unwrap();
    let said: Vec<String> = readers.into_iter().map(finish).collect();
    let evicted = finish(evictor);
    println!("seed {seed}: {killed} killed, {ended} ended before; readers: {said:?}; {evicted}");
    fs::remove_file(dir.path().join("stop")).unwrap();

    for number in 0..KEYS {
        let sample = Sample::new(number, LEN);
        sample.publish(&store).unwrap();
        assert!(sample.check(&store).unwrap(), "seed {seed}");
    }
    assert!(store.quarantined().unwrap().is_empty(), "seed {seed}: nothing was ever found corrupt");
    store.gc(&GcPolicy::default(), &Silent).unwrap();
    assert_eq!(store.doctor(false, &Silent).unwrap(), [], "seed {seed}: gc leaves nothing behind");
    assert!(store.verify_all(pool(), &Silent).unwrap().damaged.is_empty());
}

#[test]
fn eight_builders_of_one_key_publish_once() {
    let dir = tempfile::tempdir().unwrap();
    let children: Vec<Child> = (0..8).map(|_| process("build", dir.path(), 1).spawn().unwrap()).collect();
    let said: Vec<String> = children.into_iter().map(finish).collect();
    let count = |word| said.iter().filter(|text| text.contains(word)).count();
    assert_eq!((count("built"), count("found")), (1, 7), "{said:?}");
    assert!(Sample::new(1, LEN).check(&open(dir.path())).unwrap());
    assert_eq!(fs::read_dir(dir.path().join("tmp")).unwrap().count(), 0);
    let key = Sample::new(1, LEN).key.to_string();
    assert_eq!(fs::read_dir(dir.path().join("provenance").join(key)).unwrap().count(), 1);
}

/// What of a process's memory is mapped from blobs, in KiB: its share, and
/// what it has alone.
fn mapped_kib(pid: u32) -> (u64, u64) {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let (mut of_blob, mut pss, mut private_dirty) = (false, 0, 0);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        let kib = || words.next().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
        match first {
            "Pss:" if of_blob => pss += { kib }(),
            "Private_Dirty:" if of_blob => private_dirty += { kib }(),
            _ if !first.ends_with(':') => of_blob = line.contains("blobs/sha256"),
            _ => {}
        }
    }
    (pss, private_dirty)
}

#[test]
#[cfg(target_os = "linux")]
fn processes_that_lease_one_entry_share_its_pages() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample::new(9, 64 << 20);
    sample.publish(&open(dir.path())).unwrap();
    let size_kib = (64 << 20) / 1024;
    let mut holders: Vec<Child> = Vec::new();
    let mut totals = Vec::new();
    for _ in 0..4 {
        let mut child = process("hold", dir.path(), 9).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("ready")));
        holders.push(child);
        let each: Vec<(u64, u64)> = holders.iter().map(|child| mapped_kib(child.id())).collect();
        assert!(each.iter().all(|(_, dirty)| *dirty == 0), "{each:?}");
        totals.push(each.iter().map(|(pss, _)| pss).sum::<u64>());
    }
    assert!(totals[0] >= size_kib, "all of it is mapped: {totals:?} KiB of {size_kib}");
    for pair in totals.windows(2) {
        assert!(pair[1] < pair[0] + size_kib / 100, "one more process adds less than 1 %: {totals:?} KiB");
    }
    holders.into_iter().for_each(|child| drop(finish(child)));
}

/// What a user finds who may read the store and not write to it.
fn stranger(root: &Path) {
    let store = open(root);
    let sample = Sample::new(2, LEN);
    assert!(sample.check(&store).unwrap(), "who may read it may lease it");
    let other = Sample::new(3, LEN);
    assert_eq!(other.publish(&store).unwrap_err().code(), Code::IoError);
    println!("ready");
    assert!(input_ended(), "the owner has done harm");
    let found = sample.check(&store).unwrap_err();
    assert_eq!(found.code(), Code::CorruptBlob);
    assert!(found.message().contains("could not be moved aside"), "{found}");
}

#[test]
fn another_user_leases_what_root_built_and_harms_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let exe = std::env::current_exe().unwrap();
    let reachable = exe.ancestors().skip(1).all(|p| fs::metadata(p).is_ok_and(|m| m.mode() & 0o001 != 0));
    if fs::metadata(dir.path()).unwrap().uid() != 0 || !reachable {
        println!("skipped: only root can become another user, who must reach {}", exe.display());
        return;
    }
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let root = dir.path().join("store");
    let store = open(&root);
    let sample = Sample::new(2, LEN);
    sample.publish(&store).unwrap();
    let path = lease(&sample, &store).unwrap().shard_path(1).to_owned();

    let mut child = process("stranger", &root, 2).uid(65_534).gid(65_534).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    if lines.any(|line| line.unwrap().contains("ready")) {
        let mut bytes = fs::read(&path).unwrap();
        bytes[5000] ^= 1;
        fs::write(&path, bytes).unwrap();
    }
    finish(child);
    assert!(path.exists());

    // The owner's next look repairs it. A stranger's file is not used at all.
    assert_eq!(sample.check(&store).unwrap_err().code(), Code::CorruptBlob);
    sample.publish(&store).unwrap();
    assert!(sample.check(&store).unwrap());
    std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
    assert_eq!(sample.check(&store).unwrap_err().code(), Code::EntryNotTrusted);
}

/// A store on a filesystem of 2 MiB.
fn small(root: &Path) {
    let store = open(root);
    let mut built = Vec::new();
    let full = loop {
        let sample = Sample::new(built.len() as u64, LEN);
        match sample.publish(&store) {
            Ok(_) => built.push(sample),
            Err(error) => break error,
        }
        assert!(built.len() < 20, "the disk never fills up");
    };
    assert_eq!(full.code(), Code::InsufficientDisk, "{full}");
    assert!(full.hint_text().is_some_and(|hint| hint.contains("gc")));
    for sample in &built {
        assert!(sample.check(&store).unwrap(), "what was published before is whole");
    }
    store.gc(&GcPolicy { max_size_bytes: Some(0), ..GcPolicy::default() }, &Silent).unwrap();
    let last = Sample::new(built.len() as u64, LEN);
    last.publish(&store).expect("there is room again");
    assert!(last.check(&store).unwrap());
    println!("filled after {}", built.len());
}

#[test]
#[cfg(target_os = "linux")]
fn a_small_disk_fills_up_and_gc_makes_room() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!("mount -t tmpfs -o size=2m,mode=755 none {0} && exec \"$0\" \"$@\"", dir.path().display());
    let inner = process("small", &dir.path().join("store"), 0);
    let mut command = Command::new("unshare");
    command
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", &script])
        .arg(inner.get_program())
        .args(inner.get_args());
    command.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?)))).stdin(Stdio::null());
    let may = Command::new("unshare").args(["--user", "--map-root-user", "--mount", "true"]).output();
    if !may.is_ok_and(|output| output.status.success()) {
        println!("skipped: this user may not make a mount namespace");
        return;
    }
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("filled after"), "{said}");
}
