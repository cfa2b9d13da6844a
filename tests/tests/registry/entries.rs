//! Entries: one host builds, others pull; only what differs moves; only what
//! somebody trusted vouches for is used.

use std::path::Path;

use serde_json::Value;

use crate::server::Server;
use crate::world::{User, World, number, text};

fn pull(user: &User, key: &str, from: &str, more: &[&str]) -> weightmill_tests::Ran {
    let mut arguments = vec!["pull", key, from];
    arguments.extend(more);
    user.run(&arguments)
}

fn built(world: &World, user: &User, checkpoint: &str) -> Value {
    let built = world.build(user, checkpoint, &[]).ok();
    assert_eq!(text(&built, "outcome"), "built");
    built
}

#[test]
fn an_entry_comes_back_byte_for_byte_and_two_builders_push_one_manifest() {
    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    let (one, two, three) = (world.user("one"), world.user("two"), world.user("three"));
    let repository = server.repository("weights/small");
    let entry = built(&world, &one, "base");
    let (key, content) = (text(&entry, "key"), text(&entry, "content_digest"));
    let pushed = one.run(&["push", key, &repository]).ok();
    assert_eq!(text(&pushed, "outcome"), "pushed");
    assert_eq!(number(&pushed, "bytes_spared"), 0);

    // Another engine, other threads, another host: one manifest.
    let again = world.build(&two, "base", &["--jobs", "1"]).ok();
    assert_eq!(again["key"], entry["key"]);
    let present = two.run(&["push", &key[..8], &repository]).ok();
    assert_eq!((text(&present, "outcome"), &present["manifest"]), ("present", &pushed["manifest"]));
    assert_eq!(number(&present, "bytes_sent"), 0);

    let pulled = pull(&three, key, &repository, &["--content", content]).ok();
    assert_eq!(text(&pulled, "outcome"), "pulled");
    assert_eq!(number(&pulled, "bytes_present"), 0);
    assert_eq!(three.blobs(), one.blobs(), "every blob, byte for byte");
    assert_eq!(three.names("entries"), one.names("entries"));
    assert_eq!(three.names("tmp"), Vec::<String>::new());
    assert!(three.run(&["verify", "--all"]).ok().is_object());
    assert!(three.run(&["store", "doctor"]).status == 0);
    // The builder's own lookup finds it, and reads no tensor.
    world.build(&three, "base", &[]).ok();
    let hit = world.build(&three, "base", &[]).ok();
    assert_eq!((text(&hit, "outcome"), number(&hit, "source_bytes_read")), ("hit", 0));
    assert_eq!(text(&pull(&three, key, &repository, &[]).ok(), "outcome"), "hit");
}

#[test]
fn an_entry_is_used_if_somebody_trusted_vouches_for_it() {
    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    let (builder, user) = (world.user("builder"), world.user("user"));
    let repository = server.repository("weights/small");
    let entry = built(&world, &builder, "base");
    let (key, content) = (text(&entry, "key"), text(&entry, "content_digest"));
    builder.run(&["push", key, &repository]).ok();

    let refused = pull(&user, key, &repository, &[]);
    assert_eq!((refused.code(), refused.status), ("entry_not_trusted", 3));
    let hint = text(&refused.json["error"], "hint").to_owned();
    assert!(hint.contains(&format!("key = \"{key}\"\ncontent = \"{content}\"")), "{hint}");
    assert_eq!(user.names("entries"), Vec::<String>::new());
    let wrong = "ab".repeat(32);
    assert_eq!(pull(&user, key, &repository, &["--content", &wrong]).code(), "entry_not_trusted");
    user.trust(&format!("[[entry]]\nkey = \"{key}\"\ncontent = \"{wrong}\"\n"));
    assert_eq!(pull(&user, key, &repository, &[]).code(), "entry_not_trusted");

    // What the hint says is enough.
    user.trust(&format!("[[entry]]\nkey = \"{key}\"\ncontent = \"{content}\"\n"));
    assert_eq!(text(&pull(&user, key, &repository, &[]).ok(), "trusted"), "listed by digest");

    let believer = world.user("believer");
    assert_eq!(text(&pull(&believer, key, &repository, &["--trust-registry"]).ok(), "outcome"), "pulled");

    // A signed statement: from whom the user trusts, and about this entry.
    let ((key_file, public), (stranger, _)) = (world.key("release"), world.key("stranger"));
    let attested = world.user("attested");
    attested.trust_key(&public);
    builder.run(&["push", key, &repository, "--sign", &stranger]).ok();
    assert_eq!(pull(&attested, key, &repository, &[]).code(), "entry_not_trusted");
    builder.run(&["push", key, &repository, "--sign", &key_file]).ok();
    assert_eq!(text(&pull(&attested, key, &repository, &[]).ok(), "trusted"), "signed by release");
}

#[test]
fn a_fine_tune_moves_only_its_changed_blocks() {
    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    world.checkpoint("tuned", 40, Some(1));
    let (builder, user) = (world.user("builder"), world.user("user"));
    let repository = server.repository("weights/small");
    let (base, tuned) = (built(&world, &builder, "base"), built(&world, &builder, "tuned"));
    builder.run(&["push", text(&base, "key"), &repository]).ok();
    let pushed = builder.run(&["push", text(&tuned, "key"), &repository]).ok();
    let of_block = |entry: &Value, name: &str| {
        let shards = entry["shards"].as_array().unwrap();
        shards.iter().find(|s| s["block"] == name).map(|s| (number(s, "bytes"), s["digest"].clone())).unwrap()
    };
    assert_ne!(of_block(&tuned, "h.1."), of_block(&base, "h.1."));
    // One shard, its leaf list, the action, the document.
    assert_eq!(number(&pushed, "blobs_sent"), 4);
    assert_eq!(number(&pushed, "blobs_present"), 6);

    pull(&user, text(&base, "key"), &repository, &["--trust-registry"]).ok();
    let pulled = pull(&user, text(&tuned, "key"), &repository, &["--trust-registry"]).ok();
    assert_eq!(number(&pulled, "bytes_received"), of_block(&tuned, "h.1.").0);
    assert_eq!(number(&pulled, "bytes_present") + number(&pulled, "bytes_received"), number(&tuned, "bytes"));

    // Into another repository of the registry the blobs are mounted.
    let other = server.repository("weights/other");
    let mounted = builder.run(&["push", text(&base, "key"), &other, "--mount-from", "weights/small"]).ok();
    assert_eq!(number(&mounted, "blobs_mounted"), 10);
    assert_eq!(number(&mounted, "bytes_sent"), 0);
}

#[test]
fn one_node_builds_and_the_others_pull() {
    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    let (key_file, public) = world.key("release");
    let repository = server.repository("weights/small");
    let (first, second, third) = (world.user("first"), world.user("second"), world.user("third"));
    let built = world.build(&first, "base", &["--remote", &repository, "--push", "--sign", &key_file]).ok();
    assert_eq!((text(&built, "outcome"), text(&built["remote"], "outcome")), ("built", "absent"));
    assert_eq!(text(&built["push"], "outcome"), "pushed");

    second.trust_key(&public);
    let pulled = world.build(&second, "base", &["--remote", &repository]).ok();
    assert_eq!((text(&pulled, "outcome"), &pulled["content_digest"]), ("pulled", &built["content_digest"]));
    assert_eq!(pulled["remote"]["trusted"], "signed by release");
    assert_eq!(second.blobs(), first.blobs());
    let hit = world.build(&second, "base", &["--remote", &repository]).ok();
    assert_eq!((text(&hit, "outcome"), hit["remote"].is_null()), ("hit", true), "the store is asked first");

    // Without trust, and without a registry, the entry is made.
    let refused = world.build(&third, "base", &["--remote", &repository]).ok();
    assert_eq!((text(&refused, "outcome"), text(&refused["remote"], "code")), ("built", "entry_not_trusted"));
    server.stop();
    let fourth = world.user("fourth");
    let alone = world.build(&fourth, "base", &["--remote", &repository, "--registry-retries", "0"]).ok();
    assert_eq!((text(&alone, "outcome"), text(&alone["remote"], "code")), ("built", "network_error"));
}

#[test]
fn a_node_without_the_checkpoint_finds_the_entry_by_recipe_and_source() {
    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    let (key_file, public) = world.key("release");
    let repository = server.repository("weights/small");
    let (builder, node, stranger) = (world.user("builder"), world.user("node"), world.user("stranger"));
    let source = "acme/small@0123abcd";
    let built = world
        .build(&builder, "base", &["--remote", &repository, "--push", "--source", source, "--sign", &key_file])
        .ok();
    assert_eq!(text(&built["push"]["reference"], "source"), source);

    let recipe = world.at("recipe.toml").to_string_lossy().into_owned();
    let sought = |user: &User, source: &str, more: &[&str]| {
        let mut arguments = vec!["pull", &repository, "--recipe", &recipe, "--source", source];
        arguments.extend(more);
        user.run(&arguments)
    };
    std::fs::remove_dir_all(world.at("base")).unwrap();
    assert_eq!(sought(&stranger, source, &[]).code(), "entry_not_trusted");
    node.trust_key(&public);
    assert_eq!(sought(&node, "acme/small@4567", &[]).code(), "source_unavailable");
    assert_eq!(sought(&node, source, &["--tp-size", "2"]).code(), "source_unavailable");
    let pulled = sought(&node, source, &[]).ok();
    assert_eq!((text(&pulled, "outcome"), &pulled["key"]), ("pulled", &built["key"]));
    assert_eq!(pulled["reference_signed_by"], "release");
    let listed = node.run(&["store", "ls"]).ok()["entries"][0]["provenance"].clone();
    assert_eq!((text(&listed, "recipe"), text(&listed, "model"), number(&listed, "tp_size")), ("small", source, 1));
    assert_eq!(node.blobs(), builder.blobs());
    let content = text(&built, "content_digest").to_owned();
    assert_eq!(text(&sought(&stranger, source, &["--content", &content]).ok(), "outcome"), "pulled");

    // Another recipe is another question.
    let other = world.at("other.toml");
    std::fs::write(&other, format!("{}\n# changed\n", std::fs::read_to_string(Path::new(&recipe)).unwrap())).unwrap();
    let asked = node.run(&["pull", &repository, "--recipe", other.to_str().unwrap(), "--source", source]);
    assert_eq!(asked.code(), "source_unavailable");
}

#[test]
fn a_reference_is_published_for_the_entry_that_the_recipe_makes() {
    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    world.checkpoint("tuned", 40, Some(1));
    let builder = world.user("builder");
    let repository = server.repository("weights/small");
    let base = built(&world, &builder, "base");
    let recipe = world.at("recipe.toml").to_string_lossy().into_owned();
    let push = |checkpoint: &str| {
        let checkpoint = world.at(checkpoint).to_string_lossy().into_owned();
        builder.run(&[
            "push",
            text(&base, "key"),
            &repository,
            "--recipe",
            &recipe,
            "--checkpoint",
            &checkpoint,
            "--source",
            "acme/small@1",
        ])
    };
    assert_eq!(push("tuned").code(), "source_unavailable");
    let pushed = push("base").ok();
    assert!(text(&pushed["reference"], "tag").starts_with("ref-"));
}

#[test]
fn a_content_that_is_named_holds_for_what_is_there_already() {
    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    let (builder, user) = (world.user("builder"), world.user("user"));
    let repository = server.repository("weights/small");
    let entry = built(&world, &builder, "base");
    let (key, content) = (text(&entry, "key"), text(&entry, "content_digest"));
    builder.run(&["push", key, &repository]).ok();
    let wrong = "cd".repeat(32);

    // A hit of the store is compared as well: by pull, and by build.
    pull(&user, key, &repository, &["--content", content]).ok();
    let refused = pull(&user, key, &repository, &["--content", &wrong]);
    assert_eq!(refused.code(), "identity_collision");
    let message = text(&refused.json["error"], "message");
    assert!(message.contains(content) && message.contains(&wrong), "{message}");
    let refused = world.build(&user, "base", &["--remote", &repository, "--content", &wrong]);
    assert_eq!(refused.code(), "identity_collision");
    assert_eq!(text(&pull(&user, key, &repository, &["--content", content]).ok(), "outcome"), "hit");
    assert_eq!(
        text(&world.build(&user, "base", &["--remote", &repository, "--content", content]).ok(), "outcome"),
        "hit"
    );

    // So is what is built because the registry has nothing of that content.
    let other = world.user("other");
    let refused = world.build(&other, "base", &["--remote", &repository, "--content", &wrong]);
    assert_eq!(refused.code(), "identity_collision");
}

#[test]
fn only_what_was_built_here_is_pushed_by_a_build() {
    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    let (key_file, _) = world.key("release");
    let (builder, user) = (world.user("builder"), world.user("user"));
    let (repository, other) = (server.repository("weights/small"), server.repository("weights/other"));
    let entry = built(&world, &builder, "base");
    builder.run(&["push", text(&entry, "key"), &repository]).ok();
    // Pulled in this build, and found in the store by the next one.
    let sign = ["--push", "--sign", key_file.as_str()];
    let pulled = world.build(&user, "base", &[&["--remote", &repository, "--trust-registry"], &sign[..]].concat()).ok();
    assert_eq!((text(&pulled, "outcome"), &pulled["push"]), ("pulled", &Value::Null));
    let hit = world.build(&user, "base", &[&["--remote", &other], &sign[..]].concat());
    assert!(
        hit.stderr.contains("it was not built here") || hit.stderr.contains("was not built here"),
        "{}",
        hit.stderr
    );
    let hit = hit.ok();
    assert_eq!((text(&hit, "outcome"), &hit["push"]), ("hit", &Value::Null));
    assert_eq!(pull(&builder, text(&entry, "key"), &other, &["--trust-registry"]).json["outcome"], "hit");
    let nobody = world.user("nobody");
    assert_eq!(pull(&nobody, text(&entry, "key"), &other, &["--trust-registry"]).code(), "source_unavailable");
    // The builder's own is pushed.
    let hit = world.build(&builder, "base", &[&["--remote", &other], &sign[..]].concat()).ok();
    assert_eq!((text(&hit, "outcome"), text(&hit["push"], "outcome")), ("hit", "pushed"));
}

#[cfg(unix)]
#[test]
fn what_others_can_change_says_nothing_about_trust() {
    use std::os::unix::fs::PermissionsExt as _;

    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    let (key_file, public) = world.key("release");
    let (builder, user) = (world.user("builder"), world.user("user"));
    let repository = server.repository("weights/small");
    let entry = built(&world, &builder, "base");
    builder.run(&["push", text(&entry, "key"), &repository, "--sign", &key_file]).ok();
    user.trust_key(&public);
    let mode = |file: &Path, mode: u32| std::fs::set_permissions(file, std::fs::Permissions::from_mode(mode)).unwrap();
    let rules = user.home().join(".config/weightmill/trust.toml");
    for file in [Path::new(&public), &rules] {
        for open in [0o622, 0o662, 0o646] {
            mode(file, open);
            let refused = pull(&user, text(&entry, "key"), &repository, &[]);
            assert_eq!(refused.code(), "bad_params", "{} {open:o}", file.display());
            let hint = text(&refused.json["error"], "hint");
            assert!(hint.contains("chmod go-w") && hint.contains(file.to_str().unwrap()), "{hint}");
        }
        mode(file, 0o644);
    }
    assert_eq!(text(&pull(&user, text(&entry, "key"), &repository, &[]).ok(), "trusted"), "signed by release");
}
