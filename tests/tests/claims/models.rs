//! `explain` over the shipped recipes: every tensor of every small model.

use std::fs;
use std::path::Path;

use serde_json::Value;
use weightmill_tests::{repository, run, run_recipe};

use crate::setting::text;

/// How often each byte value occurs in some ranges of a file.
fn histogram(file: &[u8], ranges: &[(usize, usize)]) -> [u64; 256] {
    let mut counts = [0; 256];
    for (start, end) in ranges {
        file[*start..*end].iter().for_each(|byte| counts[usize::from(*byte)] += 1);
    }
    counts
}

/// Explains a tensor and compares the ranges with the bytes that are there: of
/// a tensor whose bytes were only moved, every source byte in the ranges is
/// somewhere in it.
fn check(tensor: &str, found: &Value, moved: &mut u32, exact: &mut u32) {
    assert_eq!(found["names_known"], true, "{tensor}");
    let steps = found["steps"].as_array().unwrap();
    assert!(steps.iter().all(|step| step["planned"] == true), "{tensor}");
    let only_moved = steps.iter().all(|s| s["outputs"].as_array().unwrap().iter().all(|o| o["how"] == "moved"));
    let sources = found["sources"].as_array().unwrap();
    let mut from = [0; 256];
    for source in sources {
        let ranges: Vec<(usize, usize)> = serde_json::from_value(source["file"]["ranges"].clone()).unwrap();
        let file = fs::read(text(&source["file"]["name"])).unwrap();
        let counts = histogram(&file, &ranges);
        from.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    assert!(from.iter().sum::<u64>() > 0, "{tensor} comes from nothing");
    if !only_moved {
        return;
    }
    *moved += 1;
    let shard = &found["tensor"]["shard"];
    let (offset, len) = (shard["offset"].as_u64().unwrap() as usize, shard["bytes"].as_u64().unwrap() as usize);
    let file = fs::read(text(&found["shard_path"])).unwrap();
    let made = histogram(&file, &[(offset, offset + len)]);
    for (value, (used, there)) in from.iter().zip(made).enumerate() {
        assert!(*used <= there, "{tensor}: {used} source bytes of {value:#x}, {there} in the result");
    }
    *exact += u32::from(from == made);
}

#[test]
fn every_tensor_of_every_recipe_is_explained_by_bytes_that_are_in_it() {
    let cases = repository().join("tests/models/cases");
    let (mut tensors, mut moved, mut exact) = (0, 0, 0);
    for model in fs::read_dir(&cases).unwrap().map(|entry| entry.unwrap().path()) {
        let name = model.file_name().unwrap().to_str().unwrap().to_string();
        let recipe = repository().join("recipes").join(format!("{name}.toml"));
        let checkpoint = model.join("checkpoint");
        let folder = tempfile::tempdir().unwrap();
        let rank = ["--tp-size", "2", "--tp-rank", "1"];
        let built = run_recipe("build", &recipe, &checkpoint, folder.path(), &rank).ok();
        let key = text(&built["key"]);
        let shown =
            run([Path::new("store"), Path::new("show"), Path::new(&key), Path::new("--store"), folder.path()]).ok();
        let paths = shown["paths"].as_array().unwrap();
        for record in shown["entry"]["tensors"].as_array().unwrap() {
            let tensor = text(&record["name"]);
            let words = ["explain", "--entry", &key, "--tensor", &tensor, "--checkpoint"].map(Path::new);
            let more = [checkpoint.as_path(), Path::new("--store"), folder.path()];
            let mut found = run(words.iter().chain(&more)).ok();
            assert_eq!(found["tensor"]["digest"], record["digest"]);
            found["shard_path"] = paths[record["shard"].as_u64().unwrap() as usize].clone();
            check(&format!("{name}: {tensor}"), &found, &mut moved, &mut exact);
            tensors += 1;
        }
    }
    assert!(
        tensors > 300 && moved > tensors / 2 && exact > moved * 3 / 4,
        "{tensors} tensors, {moved} moved, {exact} exact"
    );
}
