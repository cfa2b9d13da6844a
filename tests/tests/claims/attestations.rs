//! `attest` and `verify --attestation`, also against openssl.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};
use weightmill::attest::{PAYLOAD_TYPE, SigningKey, pae, sign};
use weightmill::store::{Store, StoreOptions};
use weightmill_tests::{Ran, run, run_recipe, write_safetensors};

use crate::setting::{Setting, is_there, parse, tensors, text};

/// PKCS#8 of an ed25519 secret (RFC 8410).
fn private_pem(secret: u8) -> String {
    let mut der = vec![0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
    der.extend([secret; 32]);
    format!("-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n", base64(&der))
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let word = three.iter().fold(0_u32, |word, byte| word << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        for i in 0..4 {
            let digit = DIGITS[(word >> (18 - 6 * i)) as usize & 63] as char;
            text.push(if i <= three.len() { digit } else { '=' });
        }
    }
    text
}

fn write_keys(setting: &Setting, name: &str, secret: u8) {
    let key = SigningKey::from_secret(&[secret; 32]);
    fs::write(setting.at(&format!("{name}.pem")), private_pem(secret)).unwrap();
    fs::write(setting.at(&format!("{name}.pub")), key.public().to_pem().unwrap()).unwrap();
}

fn openssl(arguments: &[&str]) {
    let output = Command::new("openssl").args(arguments).output().unwrap();
    assert!(output.status.success(), "openssl {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A built entry, with its statement signed by the key `us`.
fn attested() -> (Setting, String) {
    let setting = Setting::new();
    let key = setting.build(&setting.checkpoint(), &[]);
    write_keys(&setting, "us", 1);
    write_keys(&setting, "other", 2);
    setting
        .ask(&["attest", "--entry", &key, "--key", &setting.arg("us.pem"), "--out", &setting.arg("signed.json")])
        .ok();
    setting.ask(&["attest", "--entry", &key, "--out", &setting.arg("statement.json")]).ok();
    (setting, key)
}

fn verify(setting: &Setting, file: &str, more: &[&str]) -> Ran {
    setting.ask(&[&["verify", "--attestation", &setting.arg(file)], more].concat())
}

#[test]
fn a_statement_says_what_the_store_says() {
    let (setting, key) = attested();
    let statement = parse(&setting.at("statement.json"));
    assert_eq!(statement["_type"], "https://in-toto.io/Statement/v1");
    let shown = setting.ask(&["store", "show", &key]).ok();
    let predicate = &statement["predicate"];
    assert_eq!(
        (&predicate["key"], &predicate["content_digest"]),
        (&key.clone().into(), &shown["entry"]["content_digest"])
    );
    let shards: Vec<&Value> = shown["entry"]["shards"].as_array().unwrap().iter().map(|s| &s["digest"]).collect();
    let attested: Vec<&Value> = predicate["shards"].as_array().unwrap().iter().map(|s| &s["digest"]).collect();
    assert_eq!(attested, shards);
    let modules: Vec<String> = predicate["modules"].as_array().unwrap().iter().map(|m| text(&m["name"])).collect();
    assert_eq!(modules.len(), 3, "{modules:?}");
    assert!(["cast", "qkv-regroup", "tp-shard"].iter().all(|name| modules.iter().any(|m| m == name)));
    let built = &predicate["builds"][0];
    for field in ["engine", "engine_version", "target", "host_triple", "program"] {
        assert!(built[field].is_string(), "{field}: {built}");
    }
    assert!(built["fuel"].as_u64() > Some(0) && built["built_at_unix_s"].as_u64() > Some(0));
    assert_eq!(built["lineage"], Value::Null);
    // The subject is the entry document, a file of the store.
    let document = text(&statement["subject"][0]["digest"]["sha256"]);
    let bytes = fs::read(setting.store().join("blobs/sha256").join(&document)).unwrap();
    assert_eq!(weightmill::digest::BlobDigest::of(&bytes).to_string(), document);
    let parsed: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!((&parsed["key"], &statement["subject"][0]["name"]), (&key.clone().into(), &key.clone().into()));
    // Without --out the same goes to standard output, and the bytes are stable.
    let printed = setting.ask(&["attest", "--entry", &key]).ok();
    assert_eq!(printed, statement);
}

#[test]
fn a_signed_statement_is_verified_and_anything_else_is_refused() {
    let (setting, key) = attested();
    let us = setting.arg("us.pub");
    let good = verify(&setting, "signed.json", &["--trusted-key", &us]).ok();
    assert_eq!(
        (&good["attestation"]["signature"], &good["attestation"]["key"]),
        (&"trusted".into(), &key.clone().into())
    );
    assert_eq!(good["attestation"]["signed_by"][0], SigningKey::from_secret(&[1; 32]).public().id().to_string());
    verify(
        &setting,
        "signed.json",
        &["--entry", &key, "--trusted-key", &setting.arg("other.pub"), "--trusted-key", &us],
    )
    .ok();
    let unchecked = verify(&setting, "signed.json", &[]).ok();
    assert_eq!(unchecked["attestation"]["signature"], "unchecked");
    assert_eq!(verify(&setting, "statement.json", &[]).ok()["attestation"]["signature"], "none");

    let refused = |ran: &Ran, status: i32, code: &str, part: &str| {
        assert_eq!((ran.status, ran.code()), (status, code), "{}", ran.stderr);
        assert!(ran.message().contains(part), "{}", ran.stderr);
        assert!(ran.json["error"]["hint"].is_string(), "{}", ran.stderr);
    };
    let other = setting.arg("other.pub");
    refused(
        &verify(&setting, "signed.json", &["--trusted-key", &other]),
        3,
        "entry_not_trusted",
        "no trusted key signed it",
    );
    refused(&verify(&setting, "statement.json", &["--trusted-key", &us]), 3, "entry_not_trusted", "not signed");
    refused(
        &verify(&setting, "signed.json", &["--trusted-key", &setting.arg("us.pem")]),
        1,
        "attestation_invalid",
        "public key",
    );
    refused(&verify(&setting, "small.toml", &[]), 1, "attestation_invalid", "no DSSE envelope");
    refused(&verify(&setting, "missing.json", &[]), 1, "attestation_invalid", "cannot be read");
    let no_key = setting.ask(&["attest", "--entry", &key, "--key", &us]);
    refused(&no_key, 1, "attestation_invalid", "private key");

    // Another payload under the same signature, and another signature.
    let envelope = parse(&setting.at("signed.json"));
    let mut statement = parse(&setting.at("statement.json"));
    statement["predicate"]["content_digest"] = "0".repeat(64).into();
    let mut tampered = envelope.clone();
    tampered["payload"] = base64(statement.to_string().as_bytes()).into();
    fs::write(setting.at("tampered.json"), tampered.to_string()).unwrap();
    refused(&verify(&setting, "tampered.json", &["--trusted-key", &us]), 3, "entry_not_trusted", "does not fit");
    let mut tampered = envelope.clone();
    tampered["signatures"][0]["sig"] = base64(&[7; 64]).into();
    fs::write(setting.at("tampered.json"), tampered.to_string()).unwrap();
    refused(&verify(&setting, "tampered.json", &["--trusted-key", &us]), 3, "entry_not_trusted", "does not fit");
    // A true signature under something that is no statement.
    let key_us = SigningKey::from_secret(&[1; 32]);
    for (payload_type, payload) in [(PAYLOAD_TYPE, "{}"), ("text/plain", "{}")] {
        fs::write(setting.at("odd.json"), sign(payload_type, payload.as_bytes(), &key_us).to_json().unwrap()).unwrap();
        refused(&verify(&setting, "odd.json", &["--trusted-key", &us]), 1, "attestation_invalid", "");
    }
    // A lie, truly signed.
    fs::write(setting.at("lie.json"), sign(PAYLOAD_TYPE, statement.to_string().as_bytes(), &key_us).to_json().unwrap())
        .unwrap();
    refused(&verify(&setting, "lie.json", &["--trusted-key", &us]), 3, "digest_mismatch", "the content");
    // The entry of another key.
    let ranked = setting.build(&setting.checkpoint(), &["--tp-size", "2"]);
    refused(
        &verify(&setting, "signed.json", &["--entry", &ranked, "--trusted-key", &us]),
        3,
        "digest_mismatch",
        "the key",
    );
    setting.ask(&["store", "rm", &key]).ok();
    refused(&verify(&setting, "signed.json", &["--trusted-key", &us]), 1, "source_unavailable", "has no entry");
}

#[test]
fn damage_is_found_behind_a_true_attestation() {
    let (setting, key) = attested();
    let shown = setting.ask(&["store", "show", &key]).ok();
    let path = std::path::PathBuf::from(text(&shown["paths"][1]));
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::remove_file(&path).unwrap();
    fs::write(&path, bytes).unwrap();
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o444)).unwrap();
    let damaged = verify(&setting, "signed.json", &["--trusted-key", &setting.arg("us.pub")]);
    assert_eq!((damaged.status, damaged.code()), (3, "corrupt_blob"), "{}", damaged.stderr);
}

#[test]
fn another_host_rebuilds_what_is_attested_without_a_store() {
    let (setting, _) = attested();
    // The same tensors over two files, in another order.
    fs::create_dir(setting.at("split")).unwrap();
    for part in 0..2 {
        let own: Vec<_> = tensors().into_iter().rev().skip(part).step_by(2).collect();
        write_safetensors(&setting.at(&format!("split/{part}.safetensors")), &own);
    }
    let (file, us) = (setting.arg("signed.json"), setting.arg("us.pub"));
    let rebuild = |file: &str, checkpoint: &str, more: &[&str]| {
        let words = [&["--attestation", file, "--trusted-key", &us, "--rebuild"], more].concat();
        run_recipe("verify", &setting.recipe(), &setting.at(checkpoint), &setting.at("nowhere"), &words)
    };
    for engine in ["wasmtime", "wasmi"] {
        let made = rebuild(&file, "split", &["--engine", engine]).ok();
        assert_eq!((&made["rebuild"]["equal"], &made["rebuild"]["engine"]), (&true.into(), &engine.into()));
        assert_eq!(made["rebuild"]["content_digest"], made["attestation"]["content_digest"]);
    }
    assert!(!setting.at("nowhere").exists(), "no store was made");
    setting.changed("changed.safetensors", "h.1.norm", |bytes| bytes[0] ^= 1);
    let other = rebuild(&file, "changed.safetensors", &[]);
    assert_eq!((other.status, other.code()), (1, "source_unavailable"), "{}", other.stderr);
    let rank = rebuild(&file, "split", &["--tp-size", "2"]);
    assert_eq!(rank.code(), "source_unavailable");
    let sample = rebuild(&file, "split", &["--sample", "50%"]);
    assert_eq!((sample.status, sample.code()), (1, "bad_params"));

    let mut statement = parse(&setting.at("statement.json"));
    statement["predicate"]["content_digest"] = "0".repeat(64).into();
    let lie = sign(PAYLOAD_TYPE, statement.to_string().as_bytes(), &SigningKey::from_secret(&[1; 32]));
    fs::write(setting.at("lie.json"), lie.to_json().unwrap()).unwrap();
    let lied = rebuild(&setting.arg("lie.json"), "split", &[]);
    assert_eq!((lied.status, lied.code()), (3, "digest_mismatch"), "{}", lied.stderr);
    assert_eq!(lied.json["rebuild"]["equal"], false);
}

#[test]
fn openssl_and_this_program_accept_each_other() {
    if !is_there("openssl", "version") {
        return;
    }
    let (setting, key) = attested();
    let path = |name: &str| setting.arg(name);
    openssl(&["genpkey", "-algorithm", "ed25519", "-out", &path("ssl.pem")]);
    openssl(&["pkey", "-in", &path("ssl.pem"), "-pubout", "-out", &path("ssl.pub")]);

    // Ours, with openssl's key, verified by openssl.
    let signed = ["attest", "--entry", &key, "--key", &path("ssl.pem"), "--out", &path("ours.json")];
    let told = setting.ask(&signed).ok();
    let envelope = parse(&setting.at("ours.json"));
    let payload = fs::read(setting.at("statement.json")).unwrap();
    let payload = payload.strip_suffix(b"\n").unwrap();
    assert_eq!(text(&envelope["payload"]), base64(payload));
    assert_eq!(
        (text(&envelope["payloadType"]), &envelope["signatures"][0]["keyid"]),
        (PAYLOAD_TYPE.to_string(), &told["signed_by"])
    );
    fs::write(setting.at("pae"), pae(PAYLOAD_TYPE, payload)).unwrap();
    fs::write(setting.at("sig.b64"), text(&envelope["signatures"][0]["sig"])).unwrap();
    openssl(&["base64", "-d", "-A", "-in", &path("sig.b64"), "-out", &path("sig")]);
    openssl(&[
        "pkeyutl",
        "-verify",
        "-pubin",
        "-inkey",
        &path("ssl.pub"),
        "-rawin",
        "-in",
        &path("pae"),
        "-sigfile",
        &path("sig"),
    ]);
    // The key's id is the hash of its DER.
    openssl(&["pkey", "-in", &path("ssl.pem"), "-pubout", "-outform", "DER", "-out", &path("der")]);
    let id = weightmill::digest::KeyId::of(&fs::read(setting.at("der")).unwrap());
    assert_eq!(told["signed_by"], id.to_string());

    // Openssl's, over the same encoding, verified by us.
    openssl(&["pkeyutl", "-sign", "-inkey", &path("ssl.pem"), "-rawin", "-in", &path("pae"), "-out", &path("sig2")]);
    let signature = fs::read(setting.at("sig2")).unwrap();
    let theirs =
        json!({"payloadType": PAYLOAD_TYPE, "payload": base64(payload), "signatures": [{"sig": base64(&signature)}]});
    fs::write(setting.at("theirs.json"), theirs.to_string()).unwrap();
    let good = verify(&setting, "theirs.json", &["--trusted-key", &path("ssl.pub")]).ok();
    assert_eq!(good["attestation"]["signature"], "trusted");

    // A plain statement with a signature of its own, raw and as base64.
    openssl(&[
        "pkeyutl",
        "-sign",
        "-inkey",
        &path("ssl.pem"),
        "-rawin",
        "-in",
        &path("statement.json"),
        "-out",
        &path("raw"),
    ]);
    fs::write(setting.at("raw.b64"), format!("{}\n", base64(&fs::read(setting.at("raw")).unwrap()))).unwrap();
    for signature in ["raw", "raw.b64"] {
        let signed =
            verify(&setting, "statement.json", &["--signature", &path(signature), "--trusted-key", &path("ssl.pub")]);
        assert_eq!(signed.ok()["attestation"]["signature"], "trusted", "{signature}");
    }
    let other = verify(&setting, "statement.json", &["--signature", &path("raw"), "--trusted-key", &path("us.pub")]);
    assert_eq!(other.code(), "entry_not_trusted");
    let no_signature =
        verify(&setting, "statement.json", &["--signature", &path("small.toml"), "--trusted-key", &path("us.pub")]);
    assert_eq!(no_signature.code(), "attestation_invalid");
}

#[test]
fn an_entry_without_an_action_or_provenance_can_be_attested() {
    let setting = Setting::new();
    let key = setting.build(&setting.checkpoint(), &[]);
    fs::remove_dir_all(setting.store().join("provenance").join(&key)).unwrap();
    fs::remove_file(setting.store().join("actions").join(format!("{key}.json"))).unwrap();
    let statement = setting.ask(&["attest", "--entry", &key]).ok();
    assert_eq!((&statement["predicate"]["modules"], &statement["predicate"]["builds"]), (&json!([]), &json!([])));
    fs::write(setting.at("statement.json"), statement.to_string()).unwrap();
    verify(&setting, "statement.json", &["--entry", &key]).ok();
    assert!(Store::open_existing(&setting.store(), StoreOptions::default()).unwrap().is_some());
    assert_eq!(run(["attest", "--entry", &key, "--store", &setting.arg("nowhere")]).status, 3);
}
