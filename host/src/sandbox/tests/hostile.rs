//! The modules of `tests/hostile/modules`, on every engine.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::*;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    file: String,
    phase: String,
    code: Option<String>,
    message: String,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/hostile/modules")
}

fn cases() -> Vec<Case> {
    serde_json::from_slice(&std::fs::read(folder().join("cases.json")).unwrap()).unwrap()
}

fn bytes(case: &Case) -> Vec<u8> {
    wat::parse_file(folder().join(&case.file)).unwrap()
}

/// What became of a module that was parsed, in the phase of its case.
fn outcome(case: &Case, engine: &dyn Engine, module: &Module) -> Result<()> {
    let program = engine.compile(module)?;
    let plan = program.plan(REQUEST).map(|reply| assert!(!reply.answer.is_empty()));
    if case.phase != "run" {
        return plan;
    }
    plan.unwrap();
    let mut io = Bytes::default();
    match program.run(&tile(), &mut io)? {
        RunReply::Done { .. } => {
            let output = io.output.expect("the output of a finished tile is taken");
            let expected: Vec<u8> = if case.file == "ok-writes-nothing.wat" { vec![0; 64] } else { (1..65).collect() };
            assert_eq!(output, expected, "{}", case.file);
            Ok(())
        }
        RunReply::Refused { error, .. } => {
            assert!(io.output.is_none(), "the output of a refused tile is not taken");
            Err(Error::new(Code::BadData, error.message))
        }
    }
}

fn assert_as_said(case: &Case, who: &str, outcome: Result<()>) {
    match (&case.code, outcome) {
        (None, Ok(())) => {}
        (Some(code), Err(error)) => {
            assert_eq!(error.code().as_str(), code, "{} on {who}: {error}", case.file);
            assert!(error.message().contains(&case.message), "{} on {who}: {error}", case.file);
            assert!(!error.to_string().replace("\nhint: ", "").chars().any(char::is_control), "{}", case.file);
        }
        (Some(code), Ok(())) => panic!("{} on {who}: expected {code}, it went well", case.file),
        (None, Err(error)) => panic!("{} on {who}: {error}", case.file),
    }
}

#[test]
fn static_rules_refuse_what_they_should() {
    for case in cases().iter().filter(|case| case.phase == "parse") {
        let outcome = Module::parse(bytes(case)).map(drop);
        assert_as_said(case, "every engine", outcome);
    }
}

#[test]
fn every_engine_ends_every_hostile_call() {
    let engines = engines();
    for case in cases().iter().filter(|case| case.phase != "parse") {
        let module = Module::parse(bytes(case)).unwrap_or_else(|error| panic!("{}: {error}", case.file));
        for engine in &engines {
            let outcome = outcome(case, &**engine, &module);
            if case.phase == "plan-decode" {
                outcome.unwrap_or_else(|error| panic!("{} on {}: {error}", case.file, engine.name()));
            } else {
                assert_as_said(case, engine.name(), outcome);
            }
        }
    }
}

#[test]
fn every_module_has_a_case() {
    let mut files: Vec<String> = std::fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".wat"))
        .collect();
    files.sort();
    let mut listed: Vec<String> = cases().into_iter().map(|case| case.file).collect();
    listed.sort();
    assert_eq!(files, listed);
}
