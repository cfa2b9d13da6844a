//! Registries that lead elsewhere, dawdle, or do not know what they said: who
//! asks is told to nobody else, and what can be had otherwise is.

use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use crate::access::docker_config;
use crate::front::{Answer, Front, Request};
use crate::server::Server;
use crate::world::{User, World, text};

const NAME: &str = "weights/small";

/// A registry with an entry, and who pushed it.
fn entry(world: &World) -> Option<(Server, User, Value)> {
    let server = Server::start(world.folder.path())?;
    world.checkpoint("base", 400, None);
    let builder = world.user("builder");
    let entry = world.build(&builder, "base", &[]).ok();
    builder.run(&["push", text(&entry, "key"), &server.repository(NAME)]).ok();
    Some((server, builder, entry))
}

#[test]
fn blobs_are_followed_and_credentials_stay() {
    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    let reference = |front: &Front| format!("{}:1", front.repository("acme/cast"));
    world.user("author").run(&["module", "push", "cast", &format!("{}:1", server.repository("acme/cast"))]).ok();

    // A registry that wants a password and keeps its blobs elsewhere.
    let leading = |to: u16, what: fn(&Request) -> bool| {
        Front::start(server.port(), move |request, upstream| {
            if request.headers.get("authorization").is_none_or(|value| value != "Basic YWRhOnNlY3JldA==") {
                return Some(Answer::new(401, &[("www-authenticate", "Basic realm=\"tests\"")], b"{}"));
            }
            if what(request) {
                let location = format!("http://127.0.0.1:{to}{}", request.path);
                return Some(Answer::new(307, &[("location", &location)], b"elsewhere"));
            }
            Some(upstream.ask(request))
        })
    };
    let ada = |name: &str, front: &Front| {
        let user = world.user(name);
        let auth = format!("{{\"auths\":{{\"127.0.0.1:{}\":{{\"auth\":\"YWRhOnNlY3JldA==\"}}}}}}", front.port());
        docker_config(&user, &auth);
        user
    };
    let told = |front: &Front| front.requests().iter().any(|r| r.headers.contains_key("authorization"));

    let storage = Front::start(server.port(), |request, upstream| Some(upstream.ask(request)));
    let front = leading(storage.port(), Request::is_blob);
    ada("followed", &front).run(&["module", "pull", &reference(&front)]).ok();
    assert!(storage.requests().iter().any(Request::is_blob) && !told(&storage));

    // A storage that asks who it is, and would take the answer.
    let trap = Front::start(server.port(), |request, upstream| {
        let challenge = format!("Bearer realm=\"http://{}/token\", Basic realm=\"trap\"", request.headers["host"]);
        match request.headers.contains_key("authorization") {
            true => Some(upstream.ask(request)),
            false => Some(Answer::new(401, &[("www-authenticate", &challenge)], b"{}")),
        }
    });
    let front = leading(trap.port(), Request::is_blob);
    let refused = ada("trapped", &front).run(&["module", "pull", &reference(&front)]);
    assert_eq!(refused.code(), "registry_refused", "{}", refused.stderr);
    assert!(refused.message().contains("redirected to 127.0.0.1"), "{}", refused.message());
    assert!(!told(&trap) && trap.requests().len() == 1);

    // What a tag means is said by the registry itself.
    let storage = Front::start(server.port(), |request, upstream| Some(upstream.ask(request)));
    let front = leading(storage.port(), |request| request.path.contains("/manifests/"));
    assert_eq!(ada("misled", &front).run(&["module", "pull", &reference(&front)]).code(), "registry_refused");
    assert_eq!(storage.requests().len(), 0);

    // In a circle.
    let front = Front::start(server.port(), |request, upstream| match request.is_blob() {
        true => Some(Answer::new(302, &[("location", &request.path)], b"")),
        false => Some(upstream.ask(request)),
    });
    let refused = world.user("circling").run(&["module", "pull", &reference(&front)]);
    assert_eq!(refused.code(), "registry_refused");
    assert_eq!(front.requests().iter().filter(|r| r.is_blob()).count(), 6);
}

#[test]
fn a_token_that_trickles_is_given_up() {
    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    let front = Front::start(server.port(), |request, _| {
        if request.path.starts_with("/token") {
            let mut token = Answer::new(200, &[], &[b' '; 4000]);
            token.trickles = true;
            return Some(token);
        }
        let challenge = format!("Bearer realm=\"http://{}/token\"", request.headers["host"]);
        Some(Answer::new(401, &[("www-authenticate", &challenge)], b"{}"))
    });
    let brief = ["--registry-timeout", "1", "--registry-retries", "0"];
    let from = format!("{}:1", front.repository("acme/cast"));
    let failed = world.user("user").run(&[&["module", "pull", from.as_str()], &brief[..]].concat());
    assert_eq!(failed.code(), "registry_timeout", "{}", failed.stderr);
}

#[test]
fn a_range_that_is_refused_is_asked_for_from_the_start() {
    let world = World::new();
    let Some((server, _, entry)) = entry(&world) else { return };
    let refused = AtomicBool::new(false);
    let front = Front::start(server.port(), move |request, upstream| {
        if request.headers.contains_key("range") {
            refused.store(true, Ordering::SeqCst);
            return Some(Answer::new(416, &[], b""));
        }
        let mut answer = upstream.ask(request);
        if request.is_blob() && answer.body.len() > 60_000 && !refused.load(Ordering::SeqCst) {
            answer.header("content-length", &answer.body.len().to_string());
            answer.cut_at = Some(60_000);
        }
        Some(answer)
    });
    let user = world.user("user");
    let pull = ["pull", text(&entry, "key"), &front.repository(NAME), "--trust-registry", "--connections", "1"];
    let pulled = user.run(&[&pull[..], &["--registry-retries", "3"]].concat()).ok();
    assert_eq!(pulled["content_digest"], entry["content_digest"]);
    assert!(front.requests().iter().any(|r| r.headers.contains_key("range")));
    user.run(&["verify", "--all"]).ok();
}

#[test]
fn a_silent_mirror_is_asked_once() {
    let world = World::new();
    let Some((server, _, entry)) = entry(&world) else { return };
    let mirror = Front::start(server.port(), |_, _| None);
    let place = format!("127.0.0.1:{}", mirror.port());
    let pull = ["pull", text(&entry, "key"), &server.repository(NAME), "--trust-registry", "--mirror", &place];
    let brief = ["--registry-timeout", "1", "--connections", "1"];
    let pulled = world.user("user").run(&[&pull[..], &brief].concat()).ok();
    assert_eq!(pulled["content_digest"], entry["content_digest"]);
    assert_eq!(mirror.requests().len(), 1);
}

#[test]
fn who_may_not_mount_uploads() {
    let world = World::new();
    let Some((server, builder, entry)) = entry(&world) else { return };
    for (status, name) in [(401, "weights/first"), (403, "weights/second")] {
        let front = Front::start(server.port(), move |request, upstream| match request.path.contains("mount=") {
            true => Some(Answer::new(status, &[], b"")),
            false => Some(upstream.ask(request)),
        });
        let push = ["push", text(&entry, "key"), &front.repository(name), "--mount-from", NAME];
        assert_eq!(text(&builder.run(&push).ok(), "outcome"), "pushed");
        assert!(front.requests().iter().any(|r| r.path.contains("mount=")));
        let user = world.user(&format!("user{status}"));
        user.run(&["pull", text(&entry, "key"), &server.repository(name), "--trust-registry"]).ok();
    }
    for bad in ["a b", "../x", "a&from=b", "A", ""] {
        let push = ["push", text(&entry, "key"), &server.repository("weights/third"), "--mount-from", bad];
        assert_eq!(builder.run(&push).code(), "bad_params", "{bad:?}");
    }
}
