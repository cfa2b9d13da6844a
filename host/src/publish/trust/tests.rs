//! Which modules may run, which entries are used, and what is no trust file.

use super::*;
use crate::attest::{PAYLOAD_TYPE, SigningKey, Subject, sign};
use crate::digest::TensorDigest;
use crate::store::document::{BlockRecord, SCHEMA};

fn trust(text: &str) -> Trust {
    Trust::parse(&format!("trust = 1\n{text}"), Path::new("/etc/trust.toml")).unwrap()
}

fn remote(signatures: Vec<String>) -> RemoteModule {
    RemoteModule {
        repository: "oci://r.io/acme/regroup".into(),
        manifest: BlobDigest::of(b"manifest"),
        module: ModuleDigest::of(b"wasm"),
        signatures,
    }
}

fn signature(key: &SigningKey, digest: ModuleDigest) -> String {
    let predicate = ModulePredicate { name: "regroup".into(), version: "1".into() };
    let statement = Statement::new(vec![Subject::sha256("regroup", digest)], MODULE_PREDICATE, predicate);
    let envelope = sign(PAYLOAD_TYPE, &statement.to_bytes().unwrap(), key);
    String::from_utf8(envelope.to_json().unwrap()).unwrap()
}

fn key_row(key: &SigningKey, uses: &str) -> String {
    format!("[[key]]\nname = \"acme\"\npem = \"\"\"{}\"\"\"\nfor = [{uses}]\n", key.public().to_pem().unwrap())
}

#[test]
fn a_tag_needs_a_rule_and_a_pin_does_not() {
    let tag = Reference::parse("oci://r.io/acme/regroup:v1").unwrap();
    let pinned = tag.pinned(BlobDigest::of(b"manifest"));
    let other = tag.pinned(BlobDigest::of(b"another"));
    let module = remote(Vec::new());
    let none = trust("");
    assert_eq!(none.judge_module(&pinned, &module).unwrap(), Grounds::Pinned);
    for reference in [&tag, &other] {
        let refused = none.judge_module(reference, &module).unwrap_err();
        assert_eq!(refused.code(), Code::ModuleNotTrusted);
        let hint = refused.hint_text().unwrap();
        assert!(hint.contains("/etc/trust.toml") && hint.contains(&module.module.to_string()), "{hint}");
    }
    let listed = trust("remote = \"listed\"");
    assert_eq!(listed.judge_module(&pinned, &module).unwrap_err().code(), Code::ModuleNotTrusted);
    assert_eq!(listed.judge_stored(&module.module).unwrap_err().code(), Code::ModuleNotTrusted);
    assert_eq!(none.judge_stored(&module.module).unwrap(), Grounds::Pinned);
    let by_digest = trust(&format!("remote = \"listed\"\n[[module]]\ndigest = \"sha256:{}\"", module.module));
    assert_eq!(by_digest.judge_module(&tag, &module).unwrap(), Grounds::Listed);
    assert_eq!(by_digest.judge_stored(&module.module).unwrap(), Grounds::Listed);
}

#[test]
fn repositories_match_whole_components() {
    let tag = Reference::parse("oci://r.io/acme/regroup:v1").unwrap();
    let judged =
        |name: &str| trust(&format!("[[repository]]\nname = \"{name}\"")).judge_module(&tag, &remote(Vec::new()));
    for name in ["oci://r.io/acme/regroup", "oci://r.io/acme/*", "oci://r.io/*"] {
        assert_eq!(judged(name).unwrap(), Grounds::Repository(name.into()));
    }
    for name in
        ["oci://r.io/acme", "oci://r.io/acme/reg", "oci://r.io/ac/*", "oci://other.io/*", "oci://r.io/acme/regroup/*"]
    {
        assert_eq!(judged(name).unwrap_err().code(), Code::ModuleNotTrusted, "{name}");
    }
    for bad in ["r.io/acme", "oci://*", "oci://r.io/a:v", "oci://r.io/a*", "/*"] {
        let text = format!("trust = 1\n[[repository]]\nname = \"{bad}\"");
        assert_eq!(Trust::parse(&text, Path::new("t")).unwrap_err().code(), Code::BadParams, "{bad}");
    }
}

#[test]
fn a_signature_counts_for_its_module_and_its_use() {
    let (acme, stranger) = (SigningKey::from_secret(&[1; 32]), SigningKey::from_secret(&[2; 32]));
    let tag = Reference::parse("oci://r.io/acme/regroup:v1").unwrap();
    let module = ModuleDigest::of(b"wasm");
    let acme_trusted = trust(&key_row(&acme, "\"modules\""));
    let judged = |signatures| acme_trusted.judge_module(&tag, &remote(signatures));
    assert_eq!(
        judged(vec![signature(&stranger, module), signature(&acme, module)]).unwrap(),
        Grounds::Key("acme".into())
    );
    let altered = signature(&acme, module).replace("\"sig\":\"", "\"sig\":\"A");
    for bad in [signature(&stranger, module), signature(&acme, ModuleDigest::of(b"x")), altered, "{}".into()] {
        assert_eq!(judged(vec![bad]).unwrap_err().code(), Code::ModuleNotTrusted);
    }
    let for_entries = trust(&key_row(&acme, "\"entries\""));
    let refused = for_entries.judge_module(&tag, &remote(vec![signature(&acme, module)]));
    assert_eq!(refused.unwrap_err().code(), Code::ModuleNotTrusted);
}

#[test]
fn a_signature_counts_for_what_it_was_made_as() {
    let acme = SigningKey::from_secret(&[1; 32]);
    let tag = Reference::parse("oci://r.io/acme/regroup:v1").unwrap();
    let predicate = ModulePredicate { name: "regroup".into(), version: "1".into() };
    let subject = vec![Subject::sha256("regroup", ModuleDigest::of(b"wasm"))];
    let statement = Statement::new(subject, MODULE_PREDICATE, predicate).to_bytes().unwrap();
    let signed = |payload_type: &str| sign(payload_type, &statement, &acme);
    let judged = |payload_type: &str| {
        let signature = String::from_utf8(signed(payload_type).to_json().unwrap()).unwrap();
        trust(&key_row(&acme, "\"modules\"")).judge_module(&tag, &remote(vec![signature]))
    };
    assert_eq!(judged(PAYLOAD_TYPE).unwrap(), Grounds::Key("acme".into()));
    assert_eq!(judged("application/json").unwrap_err().code(), Code::ModuleNotTrusted);
    let entries = trust(&key_row(&acme, "\"entries\""));
    let (as_reference, as_statement) = (signed("reference"), signed(PAYLOAD_TYPE));
    assert_eq!(entries.entry_payload(&as_reference, "reference"), Some((&statement[..], "acme".into())));
    assert_eq!(entries.entry_payload(&as_statement, "reference"), None);
    assert_eq!(trust(&key_row(&acme, "\"modules\"")).entry_payload(&as_reference, "reference"), None);
}

fn entry(key: &[u8], content: &[u8]) -> EntryDocument {
    EntryDocument {
        schema: SCHEMA.into(),
        key: ActionKey::of(key),
        content_digest: ContentDigest::of(content),
        tensors: Vec::new(),
        aliases: Vec::new(),
        blocks: Vec::<BlockRecord>::new(),
        shards: Vec::new(),
    }
}

#[test]
fn content_is_pinned_for_a_key() {
    let document = entry(b"key", b"content");
    let digest = BlobDigest::of(b"document");
    let row =
        |key: ActionKey, content: ContentDigest| trust(&format!("[[entry]]\nkey = \"{key}\"\ncontent = \"{content}\""));
    let judged = |trust: Trust| trust.judge_entry(&document, &digest, &[], "here");
    assert_eq!(judged(row(document.key, document.content_digest)).unwrap(), Grounds::Listed);
    // The same content under another key is another claim.
    for other in
        [row(ActionKey::of(b"k"), document.content_digest), row(document.key, ContentDigest::of(b"c")), trust("")]
    {
        let refused = judged(other).unwrap_err();
        assert_eq!(refused.code(), Code::EntryNotTrusted);
        assert!(refused.hint_text().unwrap().contains(&document.content_digest.to_string()));
    }
    let _ = TensorDigest::of(b"");
}

#[test]
fn an_attestation_must_be_about_the_entry() {
    let (acme, stranger) = (SigningKey::from_secret(&[1; 32]), SigningKey::from_secret(&[2; 32]));
    let (document, other) = (entry(b"key", b"content"), entry(b"key", b"other"));
    let digest = BlobDigest::of(b"document");
    let attested = |key: &SigningKey, about: &EntryDocument| {
        let statement = EntryStatement::of_entry(about, &digest, Vec::new(), Vec::new());
        sign(PAYLOAD_TYPE, &statement.to_bytes().unwrap(), key).to_json().unwrap()
    };
    let trusted = trust(&key_row(&acme, "\"entries\""));
    let judged = |envelope: Vec<u8>| trusted.judge_entry(&document, &digest, &[b"x".to_vec(), envelope], "here");
    assert_eq!(judged(attested(&acme, &document)).unwrap(), Grounds::Key("acme".into()));
    for bad in [attested(&stranger, &document), attested(&acme, &other)] {
        assert_eq!(judged(bad).unwrap_err().code(), Code::EntryNotTrusted);
    }
    let for_modules = trust(&key_row(&acme, "\"modules\""));
    let refused = for_modules.judge_entry(&document, &digest, &[attested(&acme, &document)], "here");
    assert_eq!(refused.unwrap_err().code(), Code::EntryNotTrusted);
}

#[test]
fn malformed_files_say_where() {
    let hex = "ab".repeat(32);
    for bad in [
        "",
        "trust = 2",
        "trust = 1\nremot = \"pinned\"",
        "trust = 1\nremote = \"any\"",
        "trust = 1\n[[module]]\ndigest = \"12\"",
        "trust = 1\n[[key]]\nname = \"a\"",
        "trust = 1\n[[key]]\nname = \"a\"\npem = \"x\"",
        "trust = 1\n[[entry]]\nkey = \"1\"",
        &format!("trust = 1\n[[module]]\ndigest = \"{hex}\""),
        "trust = ",
    ] {
        let error = Trust::parse(bad, Path::new("t.toml")).unwrap_err();
        assert!(matches!(error.code(), Code::BadParams | Code::AttestationInvalid), "{bad}: {error}");
    }
    let error = Trust::parse("trust = 1\nremot = 1", Path::new("t.toml")).unwrap_err();
    assert_eq!(error.location().unwrap().line, 2, "{error}");
}

#[test]
fn a_file_that_others_may_change_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trust.toml");
    assert!(Trust::read(&file).is_ok(), "none is nobody's");
    std::fs::write(&file, "trust = 1\n").unwrap();
    assert!(Trust::read(&file).is_ok());
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o666)).unwrap();
    assert_eq!(Trust::read(&file).unwrap_err().code(), Code::BadParams);
}
