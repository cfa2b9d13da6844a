//! What stands between: mirrors, proxies that break uploads, somebody else's
//! push, a user who stops.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::front::{Answer, Front, Request};
use crate::hostile::{NAME, Scene};
use crate::server::Server;
use crate::world::{World, text};

#[test]
fn mirrors_serve_blobs_and_need_not_be_trusted() {
    let Some(scene) = Scene::new() else { return };
    let blobs = |front: &Front| front.requests().iter().filter(|r| r.is_blob()).count();
    let pull = |name: &str, registry: &Front, mirror: &Front| {
        let user = scene.world.user(name);
        let mirror = format!("127.0.0.1:{}", mirror.port());
        let arguments =
            ["pull", text(&scene.entry, "key"), &registry.repository(NAME), "--trust-registry", "--mirror", &mirror];
        let pulled = user.run(&arguments).ok();
        assert_eq!(pulled["content_digest"], scene.entry["content_digest"]);
        user.run(&["verify", "--all"]).ok();
    };
    let honest = || scene.front(|request, upstream| Some(upstream.ask(request)));
    // One that has everything is asked for every blob, and for nothing else.
    let (registry, mirror) = (honest(), honest());
    pull("good", &registry, &mirror);
    assert_eq!(blobs(&registry), 0);
    assert!(blobs(&mirror) > 5 && mirror.requests().iter().all(|r| r.is_blob() && r.path.contains("?ns=127.0.0.1:")));
    // One that has nothing.
    let (registry, mirror) = (honest(), scene.front(|_, _| Some(Answer::new(404, &[], b""))));
    pull("empty", &registry, &mirror);
    assert!(blobs(&registry) > 5);
    // One that lies, one that breaks off, and one that gives too much.
    for (name, harm) in [("lying", 0), ("breaking", 1), ("endless", 2)] {
        let mirror = scene.front(move |request, upstream| {
            let mut answer = upstream.ask(request);
            if answer.body.len() > 60_000 {
                answer.header("content-length", &answer.body.len().to_string());
                match harm {
                    0 => answer.body[7000] ^= 1,
                    1 => answer.cut_at = Some(50_000),
                    _ => {
                        answer.body.extend_from_slice(b"more");
                        answer.headers.retain(|(name, _)| name != "content-length");
                    }
                }
            }
            Some(answer)
        });
        let registry = honest();
        pull(name, &registry, &mirror);
        assert!(blobs(&registry) > 0 && blobs(&mirror) > 0);
    }
}

#[test]
fn a_collision_in_the_registry_replaces_nothing() {
    let Some(scene) = Scene::new() else { return };
    let builder = scene.world.user("builder");
    let front = scene.front(|request, upstream| {
        let mut answer = upstream.ask(request);
        if request.method == "HEAD" && request.path.contains("/manifests/") {
            answer.header("docker-content-digest", &format!("sha256:{}", "cd".repeat(32)));
        }
        Some(answer)
    });
    let refused = builder.run(&["push", text(&scene.entry, "key"), &front.repository(NAME)]);
    assert_eq!(refused.code(), "identity_collision");
    assert!(front.requests().iter().all(|r| r.method != "PUT"), "nothing was put");
}

#[test]
fn a_broken_upload_is_continued_or_made_anew() {
    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    world.checkpoint("base", 400, None);
    let (builder, user) = (world.user("builder"), world.user("user"));
    let entry = world.build(&builder, "base", &[]).ok();
    fn is_upload(request: &Request) -> bool {
        request.method == "PUT" && request.path.contains("/blobs/uploads/")
    }
    // Takes nothing at first, and does not say how far it came.
    let front = Front::start(server.port(), |request, upstream| {
        let busy = is_upload(request) && request.number % 3 == 0;
        Some(if busy { Answer::new(502, &[("retry-after", "0")], b"") } else { upstream.ask(request) })
    });
    let push = |front: &Front, name: &str| {
        let pushed = builder.run(&["push", text(&entry, "key"), &front.repository(name), "--connections", "1"]).ok();
        assert_eq!(text(&pushed, "outcome"), "pushed");
    };
    push(&front, "weights/anew");
    user.run(&["pull", text(&entry, "key"), &server.repository("weights/anew"), "--trust-registry"]).ok();
    assert_eq!(user.blobs(), builder.blobs());

    // Takes half of the first large blob, and says so when asked. (Another
    // registry: this one has the blobs.)
    let second = world.at("second");
    std::fs::create_dir_all(&second).unwrap();
    let server = Server::start(&second).unwrap();
    let reached: std::sync::Mutex<Option<(usize, String)>> = std::sync::Mutex::new(None);
    let front = Front::start(server.port(), move |request, upstream| {
        let mut reached = reached.lock().unwrap();
        if is_upload(request) && request.body().len() > 60_000 && reached.is_none() {
            let half = request.body().len() / 2;
            let path = request.path.rsplit_once("&digest=").unwrap().0;
            let taken = upstream.ask(&request.sending("PATCH", path, &request.body()[..half]));
            assert_eq!(taken.status, 202);
            let location = taken.headers.iter().find(|(name, _)| name == "location").unwrap().1.clone();
            *reached = Some((half, location));
            return Some(Answer::new(503, &[("retry-after", "0")], b""));
        }
        let asks = request.method == "GET" && request.path.contains("/uploads/");
        if let (true, Some((half, location))) = (asks, &*reached) {
            return Some(Answer::new(204, &[("range", &format!("0-{}", half - 1)), ("location", location)], b""));
        }
        Some(upstream.ask(request))
    });
    let other = world.user("other");
    push(&front, "weights/continued");
    let patches: Vec<Request> = front.requests().into_iter().filter(|r| r.method == "PATCH").collect();
    assert_eq!(patches.len(), 1);
    assert!(!patches[0].headers["content-range"].starts_with("0-"), "only the rest is sent");
    other.run(&["pull", text(&entry, "key"), &server.repository("weights/continued"), "--trust-registry"]).ok();
    assert_eq!(other.blobs(), builder.blobs());
}

#[test]
fn a_pull_that_the_user_stops_ends_at_once_and_is_continued() {
    let Some(scene) = Scene::new() else { return };
    let front = scene.front(|request, upstream| {
        let mut answer = upstream.ask(request);
        if request.is_blob() && answer.body.len() > 60_000 {
            answer.header("content-length", &answer.body.len().to_string());
            answer.stall_at = Some(50_000);
        }
        Some(answer)
    });
    let mut command =
        scene.user.command(&["pull", text(&scene.entry, "key"), &front.repository(NAME), "--trust-registry"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // It waits for bytes that do not come: the registry's timeout is a minute.
    let large = |r: &Request| r.is_blob() && r.number > 3;
    while !front.requests().iter().any(large) || scene.user.names("tmp").iter().all(|name| !name.ends_with(".partial"))
    {
        assert_eq!(child.try_wait().unwrap(), None, "the pull ended by itself");
        std::thread::sleep(Duration::from_millis(5));
    }
    let start = Instant::now();
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(start.elapsed() < Duration::from_secs(30), "it waited for the registry");
    assert_eq!(scene.user.names("entries"), Vec::<String>::new());
    let pulled = scene.pull(&scene.server.repository(NAME), &[]).ok();
    assert_eq!(text(&pulled, "outcome"), "pulled");
    assert_eq!(scene.user.names("tmp"), Vec::<String>::new());
}
