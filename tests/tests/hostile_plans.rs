//! What modules answer is hostile until proven otherwise: every plan of
//! `tests/hostile/modules` that has to be refused is, with its code, and
//! leaves nothing in a store.

use std::path::Path;

use serde::Deserialize;
use weightmill::plan;
use weightmill::sandbox::{EngineName, Module, engine};
use weightmill::tensor::{Dtype, TensorType};
use weightmill_guest::abi::Tp;
use weightmill_tests::{repository, run_recipe, seeded_bytes, write_safetensors};

#[derive(Deserialize)]
struct Case {
    file: String,
    phase: String,
    code: Option<String>,
    message: String,
}

/// The cases whose answer is refused when it is decoded or checked.
fn cases() -> Vec<(Case, Vec<u8>)> {
    let folder = repository().join("tests/hostile/modules");
    let text = std::fs::read(folder.join("cases.json")).unwrap();
    let cases: Vec<Case> = serde_json::from_slice(&text).unwrap();
    let refused = cases.into_iter().filter(|case| case.phase == "plan-decode");
    refused
        .map(|case| {
            let bytes = wat::parse_file(folder.join(&case.file)).unwrap();
            (case, bytes)
        })
        .collect()
}

#[test]
fn every_hostile_answer_is_refused_with_its_code() {
    let cases = cases();
    assert!(cases.len() > 40, "{}", cases.len());
    let tensor = TensorType::new(Dtype::F32, vec![16]).unwrap();
    let params = serde_json::json!({});
    let request = plan::request(&params, &[("in", 0, &tensor)], vec!["out".into()], Tp::ONE, 2 << 20).unwrap();
    let engine = engine(EngineName::Wasmi).unwrap();
    for (case, bytes) in cases {
        let program = engine.compile(&Module::parse(bytes).unwrap()).unwrap();
        let error = match plan::ask(program.as_ref(), &request, &[64]) {
            Err(error) => error,
            Ok(answer) => panic!("{}: {answer:?}", case.file),
        };
        assert_eq!(Some(error.code().as_str()), case.code.as_deref(), "{}: {error}", case.file);
        assert!(error.message().contains(&case.message), "{}: {error}", case.file);
        assert!(!error.message().chars().any(char::is_control), "{}: {error}", case.file);
    }
}

/// Files below a folder, but for locks and the store's own description.
fn files_below(folder: &Path) -> Vec<std::path::PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    entries
        .map(|entry| entry.unwrap().path())
        .flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] })
        .collect()
}

#[test]
fn the_program_exits_4_and_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    write_safetensors(&at("x.safetensors"), &[("t", safetensors::Dtype::F32, vec![16], seeded_bytes(1, 64))]);
    let recipe = "recipe = 1\nname = \"hostile\"\n[[step]]\nmodule = \"./x.wasm\"\n\
                  inputs = { in = \"t\" }\noutputs = { out = \"t\" }\n";
    std::fs::write(at("recipe.toml"), recipe).unwrap();
    // Every sixth: each is a process and a compilation.
    for (case, bytes) in cases().into_iter().step_by(6) {
        std::fs::write(at("x.wasm"), bytes).unwrap();
        for (command, mode) in [("build", "required"), ("load", "preferred")] {
            let ran = run_recipe(command, &at("recipe.toml"), &at("x.safetensors"), &at("store"), &["--mode", mode]);
            assert_eq!((ran.status, Some(ran.code())), (4, case.code.as_deref()), "{}: {}", case.file, ran.stderr);
            assert!(!ran.stderr.contains("panicked"), "{}: {}", case.file, ran.stderr);
        }
        for folder in ["blobs", "entries", "actions", "blocks", "facts", "tmp"] {
            assert_eq!(files_below(&at("store").join(folder)), Vec::<std::path::PathBuf>::new(), "{}", case.file);
        }
    }
}
