//! Lists of signatures: of several pages, with strangers in them, or not to be
//! had at all.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::front::{Answer, Front, Request};
use crate::modules::{plan, recipe_with};
use crate::server::Server;
use crate::world::{World, text};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";

fn is_list(request: &Request) -> bool {
    request.path.contains("/referrers/") || request.path.contains("/manifests/sha256-")
}

fn stranger() -> Value {
    json!({
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "digest": format!("sha512:{}", "ab".repeat(64)),
        "size": 7,
    })
}

fn index_of(manifests: &[Value]) -> Vec<u8> {
    serde_json::to_vec(&json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": manifests })).unwrap()
}

#[test]
fn a_module_is_pulled_though_its_signatures_cannot_be() {
    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    let (_, public) = world.key("acme");
    let pushed =
        world.user("author").run(&["module", "push", "cast", &format!("{}:1", server.repository("acme/cast"))]);
    let manifest = text(&pushed.ok(), "manifest").to_owned();
    // Longer than anybody waits.
    let front = Front::start(server.port(), |request, upstream| match is_list(request) {
        true => Some(Answer::new(503, &[("retry-after", "86400")], b"")),
        false => Some(upstream.ask(request)),
    });
    let reference = format!("{}:1", front.repository("acme/cast"));
    let pinned = recipe_with(&world, "pinned", &format!("{reference}@{manifest}"));
    let user = world.user("user");
    plan(&world, &user, &pinned, &[]).ok();
    assert!(front.requests().iter().any(is_list));
    let tagged = recipe_with(&world, "tagged", &reference);
    let other = world.user("other");
    other.trust_key(&public);
    for _ in 0..2 {
        let refused = plan(&world, &other, &tagged, &[]);
        assert_eq!(refused.code(), "module_not_trusted");
        assert!(
            refused.message().contains("could not be read") && refused.message().contains("503"),
            "{}",
            refused.stderr
        );
    }

    // Pauses that are asked for end with the time for all of it.
    let front = Front::start(server.port(), |request, upstream| match is_list(request) {
        true => Some(Answer::new(429, &[("retry-after", "100")], b"")),
        false => Some(upstream.ask(request)),
    });
    let from = format!("{}:1", front.repository("acme/cast"));
    let start = Instant::now();
    world.user("patient").run(&["module", "pull", &from, "--registry-timeout", "1"]).ok();
    assert!(start.elapsed() < Duration::from_secs(60));

    // Who may not read the list finds none.
    let front = Front::start(server.port(), |request, upstream| match () {
        () if request.path.contains("/referrers/") => Some(Answer::new(404, &[], b"")),
        () if is_list(request) => Some(Answer::new(401, &[], b"")),
        () => Some(upstream.ask(request)),
    });
    let hidden = recipe_with(&world, "hidden", &format!("{}:1", front.repository("acme/cast")));
    let refused = plan(&world, &user, &hidden, &[]);
    assert_eq!(refused.code(), "module_not_trusted");
    assert!(!refused.message().contains("could not be read"), "{}", refused.message());
}

#[test]
fn strangers_and_pages_hide_no_signature() {
    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    let (key, public) = world.key("acme");
    let reference = format!("{}:1", server.repository("acme/cast"));
    let author = world.user("author");
    author.run(&["module", "push", "cast", &reference, "--sign", &key]).ok();
    // The first page has a stranger only; the second what the tag lists.
    let front = Front::start(server.port(), |request, upstream| {
        let Some((before, subject)) = request.path.split_once("/referrers/sha256:") else {
            return Some(upstream.ask(request));
        };
        let Some(subject) = subject.strip_suffix("?page=2") else {
            let next = format!("<{}?page=2>; rel=\"next\"", request.path);
            return Some(Answer::new(200, &[("content-type", INDEX), ("link", &next)], &index_of(&[stranger()])));
        };
        let tag = format!("{before}/manifests/sha256-{subject}");
        let listed = upstream.ask(&request.sending("GET", &tag, b""));
        Some(Answer::new(200, &[("content-type", INDEX)], &listed.body))
    });
    let user = world.user("user");
    user.trust_key(&public);
    let pulled = user.run(&["module", "pull", &format!("{}:1", front.repository("acme/cast"))]).ok();
    assert_eq!(text(&pulled, "trusted"), "signed by release");

    // A list without end.
    let front = Front::start(server.port(), |request, upstream| match request.path.contains("/referrers/") {
        true => {
            let next = format!("<{}>; rel=\"next\"", request.path);
            Some(Answer::new(200, &[("content-type", INDEX), ("link", &next)], &index_of(&[stranger()])))
        }
        false => Some(upstream.ask(request)),
    });
    let endless = world.user("endless").run(&["module", "pull", &format!("{}:1", front.repository("acme/cast"))]).ok();
    assert_eq!(endless["signatures"], 0);
    assert_eq!(front.requests().iter().filter(|r| r.path.contains("/referrers/")).count(), 8);
}

#[test]
fn what_strangers_listed_by_tag_stays() {
    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    let (key, _) = world.key("acme");
    let list = Mutex::new(index_of(&[stranger()]));
    let front = Front::start(server.port(), move |request, upstream| {
        if !request.path.contains("/manifests/sha256-") {
            return Some(upstream.ask(request));
        }
        let mut list = list.lock().unwrap();
        if request.method == "PUT" {
            *list = request.body().to_vec();
            return Some(Answer::new(201, &[], b""));
        }
        Some(Answer::new(200, &[("content-type", INDEX)], &list))
    });
    let to = format!("{}:1", front.repository("acme/cast"));
    world.user("author").run(&["module", "push", "cast", &to, "--sign", &key]).ok();
    let requests = front.requests();
    let put = requests.iter().rfind(|r| r.method == "PUT" && is_list(r)).unwrap();
    let put: Value = serde_json::from_slice(put.body()).unwrap();
    let listed = put["manifests"].as_array().unwrap();
    assert!(listed.len() == 2 && listed.contains(&stranger()), "{put}");
}
