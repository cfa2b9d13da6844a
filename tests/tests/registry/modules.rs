//! Modules: what is pushed is what is pulled, tags are pinned, and what runs is
//! the user's decision.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use weightmill_tests::Ran;

use crate::server::{Server, has};
use crate::world::{RECIPE, User, World, shipped, text};

pub(crate) fn recipe_with(world: &World, name: &str, module: &str) -> PathBuf {
    let folder = world.at(name);
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("recipe.toml");
    std::fs::write(&file, RECIPE.replace("module = \"cast\"", &format!("module = \"{module}\""))).unwrap();
    file
}

pub(crate) fn plan(world: &World, user: &User, recipe: &Path, more: &[&str]) -> Ran {
    let checkpoint = world.at("base");
    let mut arguments =
        vec!["plan", "--recipe", recipe.to_str().unwrap(), "--checkpoint", checkpoint.to_str().unwrap()];
    arguments.extend(more);
    user.run(&arguments)
}

#[test]
fn a_module_comes_back_byte_for_byte_and_its_manifest_is_its_own() {
    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    let (author, user) = (world.user("author"), world.user("user"));
    let reference = format!("{}:1.0.0", server.repository("acme/cast"));
    let first = author.run(&["module", "push", "cast", &reference]).ok();
    let again = author.run(&["module", "push", &shipped("cast"), &reference]).ok();
    assert_eq!(first, again, "no time, no host, no path");
    let elsewhere = format!("{}:other", server.repository("acme/copy"));
    assert_eq!(author.run(&["module", "push", "cast", &elsewhere]).ok()["manifest"], first["manifest"]);

    let pulled = user.run(&["module", "pull", &reference]).ok();
    assert_eq!(pulled["module"], first["module"]);
    assert_eq!(pulled["manifest"], first["manifest"]);
    assert_eq!(text(&pulled, "pinned"), format!("{reference}@{}", text(&first, "manifest")));
    let bytes = std::fs::read(shipped("cast")).unwrap();
    let hex = text(&first, "module").strip_prefix("sha256:").unwrap();
    assert!(user.blobs().iter().any(|(name, blob)| name == hex && *blob == bytes));

    // The layout that other tools for wasm expect.
    if has("skopeo") {
        let source = reference.replace("oci://", "docker://");
        let raw = Command::new("skopeo").args(["inspect", "--raw", "--tls-verify=false", &source]).output().unwrap();
        let manifest: Value = serde_json::from_slice(&raw.stdout).unwrap();
        assert_eq!(manifest["config"]["mediaType"], "application/vnd.wasm.config.v0+json");
        assert_eq!(manifest["layers"].as_array().unwrap().len(), 1);
        assert_eq!(manifest["layers"][0]["mediaType"], "application/wasm");
        assert_eq!(manifest["layers"][0]["digest"], first["module"]);
        assert_eq!(manifest["annotations"]["org.opencontainers.image.title"], "cast");
        assert!(manifest["annotations"].get("org.opencontainers.image.created").is_none());
    }
}

#[test]
fn what_is_no_module_is_not_kept() {
    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    let user = world.user("user");
    let absent = user.run(&["module", "pull", &format!("{}:1", server.repository("acme/none"))]);
    assert_eq!(absent.code(), "module_not_found");
    let file = world.at("text.wasm");
    std::fs::write(&file, "no module").unwrap();
    let to = format!("{}:1", server.repository("acme/text"));
    assert_eq!(user.run(&["module", "push", file.to_str().unwrap(), &to]).status, 4);
    for bad in ["oci://127.0.0.1/a", "oci://127.0.0.1/A:1", "127.0.0.1/a:1"] {
        assert!([1, 2].contains(&user.run(&["module", "push", "cast", bad]).status), "{bad}");
    }
}

#[test]
fn a_tag_is_resolved_once_and_runs_when_the_user_says_so() {
    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    let (author, user) = (world.user("author"), world.user("user"));
    let repository = server.repository("acme/cast");
    let reference = format!("{repository}:1");
    let pushed = author.run(&["module", "push", "cast", &reference]).ok();
    let module = text(&pushed, "module").to_owned();
    let recipe = recipe_with(&world, "recipes", &reference);
    let lock = recipe.with_file_name("weightmill.lock");

    // Nobody vouches for a tag, and a lock file is nobody.
    let refused = plan(&world, &user, &recipe, &[]);
    assert_eq!((refused.code(), refused.status), ("module_not_trusted", 4));
    let hint = text(&refused.json["error"], "hint").to_owned();
    assert!(hint.contains(".config/weightmill/trust.toml") && hint.contains(&module), "{hint}");
    assert!(!lock.exists(), "what was refused is not recorded");
    let row = format!(
        "[[module]]\nreference = \"{reference}\"\nmanifest = \"{}\"\nmodule = \"{module}\"\n",
        text(&pushed, "manifest")
    );
    std::fs::write(&lock, format!("lock = 1\n{row}")).unwrap();
    std::fs::write(recipe.with_file_name("trust.toml"), format!("trust = 1\n[[module]]\ndigest = \"{module}\"\n"))
        .unwrap();
    assert_eq!(
        plan(&world, &user, &recipe, &[]).code(),
        "module_not_trusted",
        "what comes with a recipe authorises nothing"
    );
    std::fs::remove_file(&lock).unwrap();

    assert_eq!(plan(&world, &user, &recipe, &["--locked"]).code(), "module_not_found");
    for rule in [
        format!("[[module]]\ndigest = \"{module}\"\n"),
        format!("[[repository]]\nname = \"{repository}\"\n"),
        format!("[[repository]]\nname = \"oci://127.0.0.1:{}/acme/*\"\n", server.port()),
    ] {
        user.trust(&rule);
        plan(&world, &user, &recipe, &[]).ok();
    }
    let locked = std::fs::read_to_string(&lock).unwrap();
    assert!(locked.contains(&module) && locked.contains(text(&pushed, "manifest")), "{locked}");

    // The tag moves; the recipe does not until it is told to.
    let moved = author.run(&["module", "push", "permute", &reference]).ok();
    assert_ne!(moved["module"], pushed["module"]);
    plan(&world, &user, &recipe, &["--locked"]).ok();
    assert_eq!(std::fs::read_to_string(&lock).unwrap(), locked);
    let updated = user.run(&["module", "update", "--recipe", recipe.to_str().unwrap()]).ok();
    assert_eq!(updated["modules"][0]["moved"], true);
    assert_eq!(updated["modules"][0]["module"], moved["module"]);
    assert!(std::fs::read_to_string(&lock).unwrap().contains(text(&moved, "module")));
    assert_eq!(
        user.run(&["module", "update", "--recipe", recipe.to_str().unwrap()]).ok()["modules"][0]["moved"],
        false
    );

    // A lock file that names another module than the manifest has.
    std::fs::write(&lock, locked.replace(&module, text(&moved, "module"))).unwrap();
    assert_eq!(plan(&world, &user, &recipe, &[]).code(), "digest_mismatch");

    // Offline, what was pulled works.
    std::fs::write(&lock, &locked).unwrap();
    server.stop();
    plan(&world, &user, &recipe, &[]).ok();
    plan(&world, &user, &recipe, &["--locked"]).ok();
}

#[test]
fn a_pinned_module_runs_unless_only_listed_ones_may() {
    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    let (author, user) = (world.user("author"), world.user("user"));
    let reference = format!("{}:1", server.repository("acme/cast"));
    let pushed = author.run(&["module", "push", "cast", &reference]).ok();
    let pinned = recipe_with(&world, "pinned", text(&pushed, "pinned"));
    let plain = plan(&world, &user, &world.at("recipe.toml"), &[]).ok();
    let planned = plan(&world, &user, &pinned, &[]).ok();
    assert_eq!(planned["outputs"], plain["outputs"]);
    user.run(&["module", "pull", &reference]).ok();
    let stored = recipe_with(&world, "stored", text(&pushed, "module"));
    plan(&world, &user, &stored, &[]).ok();

    user.trust("remote = \"listed\"\n");
    for recipe in [&pinned, &stored] {
        assert_eq!(plan(&world, &user, recipe, &[]).code(), "module_not_trusted");
    }
    user.trust(&format!("remote = \"listed\"\n[[module]]\ndigest = \"{}\"\n", text(&pushed, "module")));
    for recipe in [&pinned, &stored] {
        plan(&world, &user, recipe, &[]).ok();
    }
    // A manifest that is not there.
    let absent = format!("{reference}@sha256:{}", "ab".repeat(32));
    assert_eq!(plan(&world, &user, &recipe_with(&world, "absent", &absent), &[]).code(), "module_not_found");
}

#[test]
fn a_signature_is_found_with_the_module_and_also_later() {
    let world = World::new();
    let Some(server) = Server::start(world.folder.path()) else { return };
    let (author, user) = (world.user("author"), world.user("user"));
    let ((key, public), (stranger, _)) = (world.key("acme"), world.key("stranger"));
    let reference = format!("{}:1", server.repository("acme/cast"));
    let plain = author.run(&["module", "push", "cast", &reference]).ok();
    let recipe = recipe_with(&world, "recipes", &reference);
    user.trust_key(&public);
    assert_eq!(plan(&world, &user, &recipe, &[]).code(), "module_not_trusted");
    let signed = author.run(&["module", "push", "cast", &reference, "--sign", &stranger]).ok();
    assert_eq!(signed["manifest"], plain["manifest"], "a signature stands beside");
    assert_eq!(plan(&world, &user, &recipe, &[]).code(), "module_not_trusted", "by nobody who is trusted");
    author.run(&["module", "push", "cast", &reference, "--sign", &key]).ok();
    plan(&world, &user, &recipe, &[]).ok();
    assert_eq!(text(&user.run(&["module", "pull", &reference]).ok(), "trusted"), "signed by release");
    server.stop();
    plan(&world, &user, &recipe, &["--locked"]).ok();
}
