//! Entries in a folder, for hosts that reach no registry; and what a stock tool
//! makes of it.

use std::process::Command;

use serde_json::Value;

use crate::server::{Server, has};
use crate::world::{User, World, text};

#[test]
fn an_entry_goes_through_a_folder_and_a_stock_tool() {
    let world = World::new();
    let (one, two, three) = (world.user("one"), world.user("two"), world.user("three"));
    let entry = world.build(&one, "base", &[]).ok();
    let key = text(&entry, "key");
    let folder = world.at("out").to_string_lossy().into_owned();
    let exported = one.run(&["store", "export", "--oci", &folder, &key[..8]]).ok();
    assert_eq!(text(&exported["entries"][0], "key"), key);
    let again = one.run(&["store", "export", "--oci", &folder, "--all"]).ok();
    assert_eq!(again["entries"][0]["manifest"], exported["entries"][0]["manifest"]);
    assert_eq!(again["entries"][0]["bytes_written"], 0);

    assert_eq!(two.run(&["store", "import", "--oci", &folder]).code(), "entry_not_trusted");
    assert_eq!(two.names("entries"), Vec::<String>::new());
    let imported = two.run(&["store", "import", "--oci", &folder, "--content", text(&entry, "content_digest")]).ok();
    assert_eq!(text(&imported["entries"][0], "outcome"), "imported");
    assert_eq!(two.blobs(), one.blobs());
    two.run(&["verify", "--all"]).ok();
    let hit = two.run(&["store", "import", "--oci", &folder, "--trust-registry"]).ok();
    assert_eq!(text(&hit["entries"][0], "outcome"), "hit");

    if !has("skopeo") {
        return;
    }
    let skopeo = |arguments: &[&str]| {
        let output = Command::new("skopeo").args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    let raw = skopeo(&["inspect", "--raw", &format!("oci:{folder}:{key}")]);
    let manifest: Value = serde_json::from_slice(&raw).unwrap();
    assert_eq!(manifest["artifactType"], "application/vnd.weightmill.entry.v1");
    assert_eq!(manifest["layers"][0]["mediaType"], "application/vnd.cncf.model.weight.v1.raw");
    let copy = world.at("copy").to_string_lossy().into_owned();
    skopeo(&["--insecure-policy", "copy", &format!("oci:{folder}:{key}"), &format!("oci:{copy}:{key}")]);
    three.run(&["store", "import", "--oci", &copy, "--trust-registry"]).ok();
    assert_eq!(three.blobs(), one.blobs());

    // From a folder into a registry by the tool, and from there by weightmill:
    // the same manifest as weightmill's own push.
    let Some(server) = Server::start(world.folder.path()) else { return };
    let repository = server.repository("weights/small");
    let to = format!("{}:{key}", repository.replace("oci://", "docker://"));
    skopeo(&["--insecure-policy", "copy", "--dest-tls-verify=false", &format!("oci:{folder}:{key}"), &to]);
    let pushed = one.run(&["push", key, &repository]).ok();
    assert_eq!(text(&pushed, "outcome"), "present");
    let four = world.user("four");
    four.run(&["pull", key, &repository, "--trust-registry"]).ok();
    assert_eq!(four.blobs(), one.blobs());
}

#[test]
fn an_altered_folder_is_refused() {
    let world = World::new();
    let one = world.user("one");
    let entry = world.build(&one, "base", &[]).ok();
    let folder = world.at("out").to_string_lossy().into_owned();
    one.run(&["store", "export", "--oci", &folder, text(&entry, "key")]).ok();
    let blobs = world.at("out/blobs/sha256");
    let import = |user: &User| user.run(&["store", "import", "--oci", &folder, "--trust-registry"]);
    for (n, blob) in std::fs::read_dir(&blobs).unwrap().enumerate() {
        // A store that has the blob already would not read it.
        let two = world.user(&format!("user-{n}"));
        let path = blob.unwrap().path();
        let good = std::fs::read(&path).unwrap();
        let mut bad = good.clone();
        let last = bad.len() - 1;
        bad[last] ^= 1;
        // The export is a hard link to the store's own file: a new one.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, &bad).unwrap();
        let refused = import(&two);
        assert_eq!(refused.code(), "digest_mismatch", "{}: {}", path.display(), refused.stderr);
        assert_eq!(two.names("entries"), Vec::<String>::new());
        std::fs::write(&path, &good).unwrap();
    }
    let two = world.user("two");
    import(&two).ok();
    assert_eq!(two.blobs(), one.blobs());
    assert_eq!(two.run(&["store", "import", "--oci", world.at("base").to_str().unwrap()]).code(), "io_error");
    let base = world.at("base").to_string_lossy().into_owned();
    assert_eq!(
        one.run(&["store", "export", "--oci", &base, "--all"]).code(),
        "io_error",
        "a folder with something else in it"
    );
}
