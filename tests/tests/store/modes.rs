//! Stores that cannot be used: busy, read-only, full, on a foreign filesystem.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use weightmill_tests::{Ran, program, run_recipe};

use crate::world::{BLOCKS, World, text};

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
    let good =
        elsewhere.build_of(&world.checkpoint, &["--export", &elsewhere.folder.path().join("good").to_string_lossy()]);
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
         {{ {ROLE}=fuse {} modes::role --exact --nocapture <&3 >/dev/null 2>&1 3<&- & }} && exec 3<&-",
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
