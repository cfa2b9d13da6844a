//! Registries that lie, break and hang, and pulls that are killed: each has its
//! code, nothing becomes visible, and the next pull succeeds.

use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use weightmill_tests::Ran;

use crate::front::{Answer, Front, Request, Upstream};
use crate::server::Server;
use crate::world::{User, World, number, text};

pub(crate) const NAME: &str = "weights/small";

/// A registry with an entry, and somebody who wants it.
pub(crate) struct Scene {
    pub(crate) world: World,
    pub(crate) server: Server,
    pub(crate) entry: Value,
    pub(crate) user: User,
}

impl Scene {
    pub(crate) fn new() -> Option<Self> {
        let world = World::new();
        let server = Server::start(world.folder.path())?;
        world.checkpoint("base", 400, None);
        let builder = world.user("builder");
        let entry = world.build(&builder, "base", &[]).ok();
        builder.run(&["push", text(&entry, "key"), &server.repository(NAME)]).ok();
        let user = world.user("user");
        Some(Scene { world, server, entry, user })
    }

    pub(crate) fn front(&self, rule: impl Fn(&Request, &Upstream) -> Option<Answer> + Send + Sync + 'static) -> Front {
        Front::start(self.server.port(), rule)
    }

    pub(crate) fn pull(&self, from: &str, more: &[&str]) -> Ran {
        let mut arguments = vec!["pull", text(&self.entry, "key"), from, "--trust-registry"];
        arguments.extend(more);
        self.user.run(&arguments)
    }

    /// A pull through a front fails with a code and leaves nothing to see;
    /// then the true registry is asked.
    fn fails_with(&self, code: &str, front: &Front, more: &[&str]) -> Ran {
        let failed = self.pull(&front.repository(NAME), more);
        assert_eq!(failed.code(), code, "{}", failed.stderr);
        self.nothing_visible();
        failed
    }

    fn nothing_visible(&self) {
        assert_eq!(self.user.names("entries"), Vec::<String>::new());
        assert_eq!(self.user.names("actions"), Vec::<String>::new());
        for (name, bytes) in self.user.blobs() {
            let hash = sha256(&bytes);
            assert_eq!(name, hash, "what has a name is what it says");
        }
    }

    fn then_succeeds(&self) {
        let pulled = self.pull(&self.server.repository(NAME), &[]).ok();
        assert_eq!(text(&pulled, "outcome"), "pulled");
        assert_eq!(pulled["content_digest"], self.entry["content_digest"]);
        assert_eq!(self.user.names("tmp"), Vec::<String>::new());
        self.user.run(&["verify", "--all"]).ok();
        assert_eq!(self.user.run(&["store", "doctor"]).status, 0);
    }
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest;
    sha2::Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn a_flipped_byte_is_caught_and_named() {
    let Some(scene) = Scene::new() else { return };
    // In every kind of blob, one after the other: those of a large and of a
    // small size, and documents.
    for (least, most) in [(100_000, usize::MAX), (0, 100_000)] {
        let front = scene.front(move |request, upstream| {
            let mut answer = upstream.ask(request);
            if request.is_blob() && (least..most).contains(&answer.body.len()) {
                let middle = answer.body.len() / 2;
                answer.body[middle] ^= 1;
            }
            Some(answer)
        });
        let failed = scene.fails_with("digest_mismatch", &front, &[]);
        let blob = front.requests().iter().rfind(|r| r.is_blob()).map(|r| r.path.clone()).unwrap();
        assert!(failed.message().contains("sha256:"), "{} after {blob}", failed.message());
    }
    scene.then_succeeds();
}

#[test]
fn a_shard_on_the_disk_of_the_registry_rots() {
    let Some(scene) = Scene::new() else { return };
    let shard = scene.entry["shards"].as_array().unwrap().iter().max_by_key(|s| number(s, "bytes")).unwrap();
    let file = scene.server.blob(text(shard, "digest"));
    let good = std::fs::read(&file).unwrap();
    let mut bad = good.clone();
    let last = bad.len() - 1;
    bad[last] ^= 0x80;
    std::fs::write(&file, bad).unwrap();
    let failed = scene.pull(&scene.server.repository(NAME), &[]);
    assert_eq!(failed.code(), "digest_mismatch");
    assert!(failed.message().contains(text(shard, "digest")), "{}", failed.message());
    scene.nothing_visible();
    std::fs::write(&file, good).unwrap();
    scene.then_succeeds();
}

#[test]
fn what_is_cut_off_is_continued_or_refused() {
    let Some(scene) = Scene::new() else { return };
    // Never more than so much at once, with a length that promises all: the
    // pull goes on from where it was.
    let front = scene.front(|request, upstream| {
        let mut answer = upstream.ask(request);
        if request.is_blob() && answer.body.len() > 60_000 {
            answer.header("content-length", &answer.body.len().to_string());
            answer.cut_at = Some(60_000);
        }
        Some(answer)
    });
    let pulled = scene.pull(&front.repository(NAME), &["--registry-retries", "20", "--connections", "1"]).ok();
    assert_eq!(pulled["content_digest"], scene.entry["content_digest"]);
    assert!(front.requests().iter().any(|r| r.headers.get("range").is_some_and(|range| range == "bytes=60000-")));

    // Nothing of what is asked for ever comes.
    let other = Scene::new().unwrap();
    let front = other.front(|request, upstream| {
        let mut answer = upstream.ask(request);
        if request.is_blob() && answer.body.len() > 60_000 {
            answer.header("content-length", &answer.body.len().to_string());
            answer.cut_at = Some(0);
        }
        Some(answer)
    });
    other.fails_with("network_error", &front, &["--registry-retries", "1"]);
    // A length that is a lie: less comes than the manifest says.
    let front = other.front(|request, upstream| {
        let mut answer = upstream.ask(request);
        if request.is_blob() && answer.body.len() > 60_000 {
            answer.body.truncate(60_000);
            answer.headers.retain(|(name, _)| name != "content-length");
        }
        Some(answer)
    });
    other.fails_with("network_error", &front, &["--registry-retries", "0"]);
    // More comes than the manifest says.
    let front = other.front(|request, upstream| {
        let mut answer = upstream.ask(request);
        if request.is_blob() && answer.body.len() > 60_000 {
            answer.body.extend_from_slice(b"more");
            answer.headers.retain(|(name, _)| name != "content-length");
        }
        Some(answer)
    });
    other.fails_with("digest_mismatch", &front, &[]);
    other.then_succeeds();
}

#[test]
fn a_registry_without_ranges_is_asked_from_the_start() {
    let Some(scene) = Scene::new() else { return };
    let front = scene.front(|request, upstream| {
        let mut whole = request.clone();
        whole.headers.remove("range");
        let mut answer = upstream.ask(&whole);
        let seen = request.headers.contains_key("range");
        if request.is_blob() && answer.body.len() > 60_000 && !seen {
            answer.header("content-length", &answer.body.len().to_string());
            answer.cut_at = Some(60_000);
        }
        Some(answer)
    });
    let pulled = scene.pull(&front.repository(NAME), &[]).ok();
    assert_eq!(pulled["content_digest"], scene.entry["content_digest"]);
    scene.user.run(&["verify", "--all"]).ok();
}

#[test]
fn lies_about_digests_and_keys() {
    let Some(scene) = Scene::new() else { return };
    let wrong = format!("sha256:{}", "ab".repeat(32));
    let said = wrong.clone();
    let front = scene.front(move |request, upstream| {
        let mut answer = upstream.ask(request);
        if request.is_manifest() {
            answer.header("docker-content-digest", &said);
        }
        Some(answer)
    });
    scene.fails_with("digest_mismatch", &front, &[]);

    // Another entry under the key that was asked for: nothing in it is
    // altered, and it is not what was asked for.
    scene.world.checkpoint("tuned", 400, Some(1));
    let builder = scene.world.user("builder");
    let tuned = scene.world.build(&builder, "tuned", &[]).ok();
    builder.run(&["push", text(&tuned, "key"), &scene.server.repository(NAME)]).ok();
    let (asked, given) = (text(&scene.entry, "key").to_owned(), text(&tuned, "key").to_owned());
    let front = scene.front(move |request, upstream| {
        let mut other = request.clone();
        other.path = other.path.replace(&asked, &given);
        Some(upstream.ask(&other))
    });
    scene.fails_with("digest_mismatch", &front, &[]);

    // A document of the right key whose action is another one's.
    let forged = forge(&scene, &tuned);
    let front = scene.front(move |request, upstream| Some(forged(request, upstream)));
    scene.fails_with("digest_mismatch", &front, &[]);
    scene.then_succeeds();
}

/// A registry that gives the tuned entry for the base's key, with a document
/// and a manifest that say so and hash to what they should.
fn forge(scene: &Scene, tuned: &Value) -> impl Fn(&Request, &Upstream) -> Answer + Send + Sync + 'static {
    let builder = scene.world.at("builder/store");
    let (base_key, tuned_key) = (text(&scene.entry, "key").to_owned(), text(tuned, "key").to_owned());
    let record: Value =
        serde_json::from_slice(&std::fs::read(builder.join("entries").join(&tuned_key)).unwrap()).unwrap();
    let digest = text(&record, "digest").strip_prefix("sha256:").unwrap().to_owned();
    let document = std::fs::read_to_string(builder.join("blobs/sha256").join(&digest)).unwrap();
    // Of one length, so the form stays canonical.
    let forged = document.replace(&tuned_key, &base_key).into_bytes();
    let forged_digest = sha256(&forged);
    move |request, upstream| {
        if request.path.ends_with(&forged_digest) {
            return Answer::new(200, &[], if request.method == "HEAD" { b"" } else { &forged });
        }
        let mut other = request.clone();
        other.path = other.path.replace(&base_key, &tuned_key);
        let mut answer = upstream.ask(&other);
        if request.is_manifest() && answer.status == 200 {
            let mut manifest: Value = serde_json::from_slice(&answer.body).unwrap();
            manifest["config"]["digest"] = json!(format!("sha256:{forged_digest}"));
            answer.body = serde_json::to_vec(&manifest).unwrap();
            answer.header("content-length", &answer.body.len().to_string());
            answer.header("docker-content-digest", &format!("sha256:{}", sha256(&answer.body)));
        }
        answer
    }
}

#[test]
fn trusted_content_pins_every_byte_of_every_shard() {
    let Some(scene) = Scene::new() else { return };
    // The content digest is right and so are the tensors' digests and leaf
    // lists; but the document names another file as the shard, which has the
    // same size and header. Only the leaf hashes can tell.
    let builder = scene.world.at("builder/store");
    let key = text(&scene.entry, "key").to_owned();
    let record: Value = serde_json::from_slice(&std::fs::read(builder.join("entries").join(&key)).unwrap()).unwrap();
    let digest = text(&record, "digest").strip_prefix("sha256:").unwrap().to_owned();
    let document = std::fs::read_to_string(builder.join("blobs/sha256").join(&digest)).unwrap();
    let shard = scene.entry["shards"].as_array().unwrap().iter().max_by_key(|s| number(s, "bytes")).unwrap();
    let mut bytes = std::fs::read(builder.join("blobs/sha256").join(text(shard, "digest"))).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    let (old, new) = (text(shard, "digest").to_owned(), sha256(&bytes));
    let forged = document.replace(&old, &new).into_bytes();
    let forged_digest = sha256(&forged);
    let front = scene.front(move |request, upstream| {
        if request.path.ends_with(&forged_digest) {
            return Some(Answer::new(200, &[], &forged));
        }
        if request.path.ends_with(&new) {
            return Some(Answer::new(200, &[], &bytes));
        }
        let mut answer = upstream.ask(request);
        if request.is_manifest() && answer.status == 200 {
            let text = String::from_utf8(answer.body).unwrap().replace(&old, &new);
            let mut manifest: Value = serde_json::from_str(&text).unwrap();
            manifest["config"]["digest"] = json!(format!("sha256:{forged_digest}"));
            answer.body = serde_json::to_vec(&manifest).unwrap();
            answer.header("content-length", &answer.body.len().to_string());
            answer.header("docker-content-digest", &format!("sha256:{}", sha256(&answer.body)));
        }
        Some(answer)
    });
    let content = text(&scene.entry, "content_digest").to_owned();
    let failed = scene.user.run(&["pull", text(&scene.entry, "key"), &front.repository(NAME), "--content", &content]);
    assert_eq!(failed.code(), "digest_mismatch", "{}", failed.stderr);
    assert!(failed.message().contains("differs within its bytes"), "{}", failed.message());
    scene.nothing_visible();
    scene.then_succeeds();
}

#[test]
fn busy_and_broken_registries_are_asked_again_and_then_given_up() {
    let Some(scene) = Scene::new() else { return };
    for status in [429, 503] {
        let front = scene.front(move |_, _| {
            Some(Answer::new(status, &[("retry-after", "0")], b"{\"errors\":[{\"code\":\"X\",\"message\":\"later\"}]}"))
        });
        let failed = scene.fails_with("registry_refused", &front, &["--registry-retries", "2"]);
        assert!(failed.message().contains(&format!("{status}: X later")), "{}", failed.message());
        assert_eq!(front.requests().len(), 3);
        // Longer than anybody should wait.
        let front = scene.front(move |_, _| Some(Answer::new(status, &[("retry-after", "86400")], b"")));
        scene.fails_with("registry_refused", &front, &[]);
        assert_eq!(front.requests().len(), 1);
    }
    let front = scene.front(|_, _| Some(Answer::new(403, &[], b"")));
    scene.fails_with("registry_refused", &front, &[]);
    assert_eq!(front.requests().len(), 1, "no is no");

    // Busy at every second request only.
    let front = scene.front(|request, upstream| {
        let busy = request.number % 2 == 0;
        Some(if busy { Answer::new(429, &[("retry-after", "0")], b"") } else { upstream.ask(request) })
    });
    let pulled = scene.pull(&front.repository(NAME), &["--connections", "1"]).ok();
    assert_eq!(text(&pulled, "outcome"), "pulled");
}

#[test]
fn silence_ends() {
    let Some(scene) = Scene::new() else { return };
    let brief = ["--registry-timeout", "1", "--registry-retries", "1"];
    let front = scene.front(|_, _| None);
    scene.fails_with("registry_timeout", &front, &brief);
    // In the middle of a blob.
    let front = scene.front(|request, upstream| {
        let mut answer = upstream.ask(request);
        if request.is_blob() && answer.body.len() > 60_000 {
            answer.header("content-length", &answer.body.len().to_string());
            answer.stall_at = Some(50_000);
        }
        Some(answer)
    });
    scene.fails_with("registry_timeout", &front, &brief);
    scene.then_succeeds();
}

#[test]
fn documents_without_end_are_refused() {
    let Some(scene) = Scene::new() else { return };
    let front = scene.front(|request, upstream| {
        let mut answer = upstream.ask(request);
        if request.is_manifest() {
            answer.body = vec![b' '; 17 << 20];
            answer.headers.retain(|(name, _)| name != "content-length");
        }
        Some(answer)
    });
    scene.fails_with("registry_refused", &front, &[]);
    for nonsense in [
        &b"[]"[..],
        b"{}",
        b"not json",
        b"{\"schemaVersion\":2,\"config\":{\"mediaType\":\"x\",\"digest\":\"../../x\",\"size\":1},\"layers\":[]}",
    ] {
        let front = scene.front(move |request, upstream| {
            let mut answer = upstream.ask(request);
            if request.is_manifest() {
                answer = Answer::new(200, &[], nonsense);
            }
            Some(answer)
        });
        scene.fails_with("registry_refused", &front, &[]);
    }
}

#[test]
fn a_killed_pull_is_continued() {
    let Some(scene) = Scene::new() else { return };
    let total = number(&scene.entry, "bytes");
    // Gives half of each large blob and then waits, so that the pull can be
    // killed at a known place.
    let front = scene.front(|request, upstream| {
        let mut answer = upstream.ask(request);
        if request.is_blob() && answer.body.len() > 60_000 {
            answer.header("content-length", &answer.body.len().to_string());
            answer.stall_at = Some(answer.body.len() / 2);
        }
        Some(answer)
    });
    let mut child = scene
        .user
        .command(&["pull", text(&scene.entry, "key"), &front.repository(NAME), "--trust-registry"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let partial = || -> u64 {
        let names = scene.user.names("tmp");
        let files = names.iter().filter(|name| name.ends_with(".partial"));
        files.map(|name| std::fs::metadata(scene.user.store().join("tmp").join(name)).map_or(0, |m| m.len())).sum()
    };
    let start = Instant::now();
    while partial() < total / 3 {
        assert!(start.elapsed() < Duration::from_secs(60), "the pull does not come so far");
        assert_eq!(child.try_wait().unwrap(), None, "the pull ended by itself");
        std::thread::sleep(Duration::from_millis(5));
    }
    // SIGKILL: nothing is cleaned up.
    child.kill().unwrap();
    child.wait().unwrap();
    scene.nothing_visible();
    let there = partial();
    assert!(there >= total / 3);

    let pulled = scene.pull(&scene.server.repository(NAME), &[]).ok();
    assert_eq!(text(&pulled, "outcome"), "pulled");
    let received = number(&pulled, "bytes_received");
    assert!(received <= total - there, "received {received} of {total} where {there} were there");
    assert_eq!(scene.user.names("tmp"), Vec::<String>::new());
    scene.user.run(&["verify", "--all"]).ok();
    assert_eq!(scene.user.run(&["store", "doctor"]).status, 0);
}

#[test]
fn an_unfinished_download_that_rotted_is_made_anew() {
    let Some(scene) = Scene::new() else { return };
    let shard = scene.entry["shards"].as_array().unwrap().iter().max_by_key(|s| number(s, "bytes")).unwrap();
    // As a crash of the machine may leave it: bytes that were never written.
    scene.user.run(&["store", "ls"]);
    let store = scene.user.store();
    scene.pull("oci://127.0.0.1:1/weights/small", &["--registry-retries", "0"]);
    std::fs::write(store.join("tmp").join(format!("{}.partial", text(shard, "digest"))), vec![0; 70_000]).unwrap();
    scene.then_succeeds();
}
