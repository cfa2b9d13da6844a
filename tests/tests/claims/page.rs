//! `docs/digests.md`: its program is run as it stands there.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::setting::{Setting, is_there, text};

/// The one Python program of the page.
fn program() -> String {
    let page = fs::read_to_string(weightmill_tests::repository().join("docs/digests.md")).unwrap();
    let (_, rest) = page.split_once("```python\n").expect("the page has a program");
    let (program, rest) = rest.split_once("```").expect("it ends");
    assert!(!rest.contains("```python"), "the page has one program");
    program.to_string()
}

#[test]
fn anyone_can_recompute_the_digests_with_the_program_of_the_page() {
    if !is_there("python3", "--version") {
        return;
    }
    let setting = Setting::new();
    let key = setting.build(&setting.checkpoint(), &[]);
    fs::write(setting.at("check.py"), program()).unwrap();
    let digests = setting.ask(&["digest", "--entry", &key]).ok();
    fs::write(setting.at("digests.json"), digests.to_string()).unwrap();
    let shown = setting.ask(&["store", "path", &key]).ok();
    let shards: Vec<String> = shown["paths"].as_array().unwrap().iter().map(text).collect();
    let check = |table: &str, files: &[String]| {
        let output =
            Command::new("python3").arg(setting.at("check.py")).arg(setting.at(table)).args(files).output().unwrap();
        let texts = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        (output.status.success(), texts.concat())
    };
    let (good, said) = check("digests.json", &shards);
    assert!(good, "{said}");
    let rows = digests["tensors"].as_object().unwrap().len();
    assert!(said.contains(&format!("{} of {rows} tensors", rows - 1)), "all but the alias have bytes: {said}");
    // A checkpoint's own table, over its own file.
    let source = setting.ask(&["digest", "--checkpoint", &setting.arg("base.safetensors")]).ok();
    fs::write(setting.at("source.json"), source.to_string()).unwrap();
    assert!(check("source.json", &[setting.arg("base.safetensors")]).0);

    // It can say no: of a table, and of bytes.
    let mut wrong: Value = digests.clone();
    wrong["tensors"]["embed"]["shape"][0] = 21.into();
    fs::write(setting.at("wrong.json"), wrong.to_string()).unwrap();
    assert!(!check("wrong.json", &[]).0);
    let mut bytes = fs::read(&shards[0]).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(setting.at("changed.safetensors"), bytes).unwrap();
    assert!(!check("digests.json", &[setting.arg("changed.safetensors")]).0);
}
