//! `diff` with values.

use std::fs;

use serde_json::{Value, json};
use weightmill_tests::{Ran, run};

use crate::setting::{Setting, tensors, text};

fn diff(setting: &Setting, words: &[&str]) -> Ran {
    setting.ask(&[&["diff"], words].concat())
}

fn save(setting: &Setting, name: &str, words: &[&str]) -> String {
    let digests = setting.ask(&[&["digest"], words].concat()).ok();
    fs::write(setting.at(name), digests.to_string()).unwrap();
    setting.arg(name)
}

fn only(ran: &Ran) -> &Value {
    assert_eq!(ran.status, 1, "{}", ran.stderr);
    let differences = ran.json["differences"].as_array().unwrap();
    assert_eq!(differences.len(), 1, "{}", ran.json);
    &differences[0]
}

#[test]
fn the_first_differing_element_is_shown_with_both_values() {
    let setting = Setting::new();
    // Elements 37 and 1000 of 64 x 16 floats: (37 + 1) / 8 at [2, 5].
    let change = |bytes: &mut Vec<u8>| {
        bytes[4 * 37..4 * 38].copy_from_slice(&(-1.5_f32).to_le_bytes());
        bytes[4 * 1000] ^= 1;
    };
    let other = setting.changed("other.safetensors", "h.0.up", change);
    let (a, b) = (setting.build(&setting.checkpoint(), &[]), setting.build(&other, &[]));
    let expect = |ran: &Ran, value_a: &str, bits_a: &str, value_b: &str, bits_b: &str, count: u64| {
        let found = only(ran);
        assert_eq!((&found["tensor"], &found["what"]), (&json!("h.0.up"), &json!("bytes")));
        let elements = &found["elements"];
        assert_eq!((&elements["first"], &elements["position"]), (&json!(37), &json!([2, 5])));
        assert_eq!(elements["a"], json!({"value": value_a, "bits": bits_a}));
        assert_eq!(elements["b"], json!({"value": value_b, "bits": bits_b}));
        assert_eq!((&elements["differing"], &elements["total"]), (&json!(count), &json!(1024)));
    };
    // The entries hold BF16, where the change of the second element is lost.
    let tables = [save(&setting, "a.json", &["--entry", &a]), save(&setting, "b.json", &["--entry", &b])];
    expect(&diff(&setting, &[&tables[0], &tables[1]]), "4.625", "0x4094", "-1.5", "0xbfc0", 1);
    expect(&diff(&setting, &["--a-entry", &a, "--b-entry", &b]), "4.625", "0x4094", "-1.5", "0xbfc0", 1);
    expect(&diff(&setting, &["--a-entry", &b, &tables[0]]), "-1.5", "0xbfc0", "4.625", "0x4094", 1);
    // The checkpoints hold F32.
    let (base, other) = (setting.arg("base.safetensors"), other.to_str().unwrap().to_string());
    let checkpoints = ["--a-checkpoint", &base, "--b-checkpoint", &other];
    expect(&diff(&setting, &checkpoints), "4.625", "0x40940000", "-1.5", "0xbfc00000", 2);
    let table = save(&setting, "base.json", &["--checkpoint", &base]);
    let mixed = diff(&setting, &[&table, "--b-checkpoint", &other]);
    assert_eq!(only(&mixed)["elements"], Value::Null, "where the bytes of a are is not said");
    let table_b = save(&setting, "other.json", &["--checkpoint", &other]);
    let words = [&[table.as_str(), &table_b], &checkpoints[..]].concat();
    expect(&diff(&setting, &words), "4.625", "0x40940000", "-1.5", "0xbfc00000", 2);
    // Made again, by an engine that is named.
    let recipe = setting.recipe().to_str().unwrap().to_string();
    let made = ["--b-recipe", &recipe, "--b-checkpoint", &other, "--b-engine", "wasmi"];
    expect(&diff(&setting, &[&["--a-entry", a.as_str()], &made[..]].concat()), "4.625", "0x4094", "-1.5", "0xbfc0", 1);
    let words = [&[tables[0].as_str(), &tables[1]], &made[..]].concat();
    expect(&diff(&setting, &words), "4.625", "0x4094", "-1.5", "0xbfc0", 1);
    assert_eq!(diff(&setting, &[&["--a-entry", b.as_str()], &made[..]].concat()).ok()["equal"], true);
    let poor = [&["--a-entry", a.as_str()], &made[..], &["--memory-budget", "100"]].concat();
    assert_eq!(diff(&setting, &poor).code(), "insufficient_memory");
    let none = diff(&setting, &["--a-entry", &a, "--b-entry", &b, "--values", "0"]);
    assert_eq!(only(&none)["elements"], Value::Null);

    let text = run_text(&setting, &["diff", "--a-entry", &a, "--b-entry", &b]);
    assert!(
        text.contains("h.0.up [2, 5] (element 37): a 4.625 (0x4094), b -1.5 (0xbfc0); 1 of 1024 elements differ"),
        "{text}"
    );
}

fn run_text(setting: &Setting, words: &[&str]) -> String {
    let output = std::process::Command::new(weightmill_tests::program())
        .args(words)
        .arg("--store")
        .arg(setting.store())
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn without_bytes_the_tables_are_compared() {
    let setting = Setting::new();
    let mut rows = tensors();
    rows.retain(|t| t.0 != "h.1.norm");
    rows[0].2 = vec![24, 20];
    rows.push(("new", safetensors::Dtype::U8, vec![1], vec![7]));
    let up = rows.iter_mut().find(|t| t.0 == "h.0.up").unwrap();
    up.1 = safetensors::Dtype::I32;
    rows.iter_mut().find(|t| t.0 == "h.0.qkv").unwrap().3[0] ^= 1;
    weightmill_tests::write_safetensors(&setting.at("other.safetensors"), &rows);
    let a = save(&setting, "a.json", &["--checkpoint", &setting.arg("base.safetensors")]);
    let b = save(&setting, "b.json", &["--checkpoint", &setting.arg("other.safetensors")]);
    let found = diff(&setting, &[&a, &b]);
    let what: Vec<(String, String)> =
        found.json["differences"].as_array().unwrap().iter().map(|d| (text(&d["tensor"]), text(&d["what"]))).collect();
    let expected =
        [("embed", "shape"), ("h.0.qkv", "bytes"), ("h.0.up", "dtype"), ("h.1.norm", "missing"), ("new", "extra")];
    assert_eq!(what, expected.map(|(t, w)| (t.to_string(), w.to_string())));
    let differences = &found.json["differences"];
    assert_eq!(
        (&differences[1]["elements"], &differences[3]["b"], &differences[4]["a"]),
        (&Value::Null, &Value::Null, &Value::Null)
    );
    assert_eq!((&differences[0]["a"]["shape"], &differences[0]["b"]["shape"]), (&json!([20, 24]), &json!([24, 20])));
    let text = run_text(&setting, &["diff", &a, &b]);
    assert!(text.contains("the bytes of a are not at hand") && text.contains("5 of 8 tensors differ"), "{text}");
    assert_eq!(diff(&setting, &[&a, &a]).ok()["equal"], true);
}

#[test]
fn bytes_that_are_not_the_tables_are_refused() {
    let setting = Setting::new();
    let other = setting.changed("other.safetensors", "h.0.up", |bytes| bytes[0] ^= 1);
    let third = setting.changed("third.safetensors", "h.0.up", |bytes| bytes[1] ^= 1);
    let (base, other, third) = (setting.arg("base.safetensors"), other.to_str().unwrap(), third.to_str().unwrap());
    let (a, b) =
        (save(&setting, "a.json", &["--checkpoint", &base]), save(&setting, "b.json", &["--checkpoint", other]));
    let wrong = diff(&setting, &[&a, &b, "--a-checkpoint", &base, "--b-checkpoint", third]);
    assert_eq!((wrong.status, wrong.code()), (1, "source_unavailable"), "{}", wrong.stderr);
    assert!(wrong.message().contains("b: the bytes are not those of the table"), "{}", wrong.stderr);
    for words in
        [&[a.as_str()][..], &[], &[&a, "--a-checkpoint", &base, "--b-checkpoint", other], &["--a-checkpoint", &base]]
    {
        let unclear = diff(&setting, words);
        assert!((unclear.status, unclear.code()) == (1, "bad_params"), "{words:?}: {}", unclear.stderr);
    }
    assert_eq!(run(["diff", "missing.json", &b]).code(), "io_error");
}
