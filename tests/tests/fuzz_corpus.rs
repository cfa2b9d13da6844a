//! The committed inputs of the fuzz targets, without a fuzzer.

use std::path::{Path, PathBuf};

use weightmill_tests::fuzz::TARGETS;
use weightmill_tests::repository;

/// Inputs of a target, ascending by name.
fn inputs(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
}

/// Runs every input of the corpus, and those that once found something.
fn replay(name: &str) {
    let target = TARGETS.iter().find(|target| target.name == name).unwrap();
    let corpus = inputs(&repository().join("fuzz/corpus").join(name));
    assert!(corpus.len() >= 10, "the corpus of {name} has {} inputs", corpus.len());
    let found = inputs(&repository().join("fuzz/found").join(name));
    for (path, input) in corpus.iter().chain(&found) {
        let outcome = std::panic::catch_unwind(|| (target.run)(input));
        assert!(outcome.is_ok(), "{}", path.display());
    }
}

#[test]
fn header() {
    replay("header");
}

#[test]
fn host() {
    replay("host");
}

#[test]
fn module() {
    replay("module");
}

#[test]
fn plan() {
    replay("plan");
}

#[test]
fn recipe() {
    replay("recipe");
}

#[test]
fn every_target_is_replayed_and_has_a_way_in() {
    let mut files: Vec<String> = std::fs::read_dir(repository().join("fuzz/fuzz_targets"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    let expected: Vec<String> = TARGETS.iter().map(|target| format!("{}.rs", target.name)).collect();
    assert_eq!(files, expected);
}
