//! Who built an entry: `store ls --built-by`, and what a build records.

use std::fs;

use serde_json::{Value, json};

use crate::setting::{Setting, text};

fn keys(listed: &Value) -> Vec<String> {
    listed["entries"].as_array().unwrap().iter().map(|e| text(&e["key"])).collect()
}

fn built_by(setting: &Setting, range: &str) -> (Vec<String>, Value) {
    let listed = setting.ask(&["store", "ls", "--built-by", range]).ok();
    (keys(&listed), listed["unknown"].clone())
}

#[test]
fn entries_of_an_engine_release_are_found_with_those_that_share_its_blocks() {
    let setting = Setting::new();
    let first = setting.build(&setting.checkpoint(), &[]);
    let listed = setting.ask(&["store", "ls"]).ok();
    let row = &listed["entries"][0];
    let engines: Vec<&str> = row["engines"].as_array().unwrap().iter().map(|e| e.as_str().unwrap()).collect();
    assert!(
        matches!(engines.as_slice(), [wasmi, wasmtime] if wasmi.starts_with("wasmi ") && wasmtime.starts_with("wasmtime ")),
        "{engines:?}"
    );
    assert_eq!(row["engines_complete"], true);
    let version = text(&row["provenance"]["engine_version"]);
    for field in
        ["program", "engine", "target", "host_triple", "host", "plan_engine", "plan_engine_version", "recipe", "model"]
    {
        assert!(row["provenance"][field].is_string(), "{field}");
    }
    assert!(row["provenance"]["target"].as_str().unwrap().starts_with(std::env::consts::ARCH));
    assert!(row["provenance"]["fuel"].as_u64() > Some(0));
    let time = row["provenance"]["built_at_unix_s"].as_u64().unwrap();
    assert!(time > 1_600_000_000, "{time}");

    assert_eq!(built_by(&setting, &format!("wasmtime ={version}")), (vec![first.clone()], json!([])));
    assert_eq!(built_by(&setting, &format!("wasmtime <{version}")).0, [""; 0]);
    assert_eq!(built_by(&setting, "pulley").0, [""; 0]);
    assert_eq!(built_by(&setting, "wasmi").0, [first.as_str()]);

    // As if an older release had built the first entry, and so its blocks.
    let old = "47.9.9";
    rewrite(&setting, &first, |built| {
        built["engine_version"] = old.into();
        built["engines"] = json!([{"engine": "wasmtime", "version": old}]);
    });
    age_blocks(&setting, &version, old);
    let tuned = setting.changed("tuned.safetensors", "h.1.norm", |bytes| bytes[0] ^= 1);
    let second = setting.build(&tuned, &[]);
    let mut both = vec![first.clone(), second.clone()];
    both.sort();
    assert_eq!(built_by(&setting, "wasmtime <48").0, both, "the second took blocks of the first");
    assert_eq!(built_by(&setting, &format!("wasmtime ={version}")).0, [second.as_str()]);

    // An entry of which nothing is known is neither listed nor forgotten.
    fs::remove_dir_all(setting.store().join("provenance").join(&first)).unwrap();
    assert_eq!(built_by(&setting, "wasmtime <48"), (vec![second], json!([first])));

    let refused = setting.ask(&["store", "ls", "--built-by", "wasmtme <48"]);
    assert_eq!(refused.status, 2);
    assert!(refused.stderr.contains("did you mean wasmtime"), "{}", refused.stderr);
}

/// Rewrites the provenance document of an entry.
fn rewrite(setting: &Setting, key: &str, change: impl Fn(&mut Value)) {
    let folder = setting.store().join("provenance").join(key);
    for file in fs::read_dir(folder).unwrap().map(|f| f.unwrap().path()) {
        if !file.to_str().unwrap().ends_with(".lineage.json") {
            let mut built = crate::setting::parse(&file);
            change(&mut built);
            fs::write(&file, built.to_string()).unwrap();
        }
    }
}

/// Gives the records of all blocks another version of the engine.
fn age_blocks(setting: &Setting, version: &str, old: &str) {
    let mut changed = 0;
    for file in fs::read_dir(setting.store().join("blocks")).unwrap().map(|f| f.unwrap().path()) {
        let text = fs::read_to_string(&file).unwrap();
        let json = text
            .lines()
            .next()
            .unwrap()
            .replace(&format!("\"version\":\"{version}\""), &format!("\"version\":\"{old}\""));
        changed += u32::from(!text.starts_with(&json));
        let checksum = weightmill::digest::sha256(format!("weightmill record block v1\n{json}").as_bytes());
        let checksum = weightmill::digest::RecordDigest::from_bytes(checksum);
        fs::write(&file, format!("{json}\nsha256:{checksum}\n")).unwrap();
    }
    assert_eq!(changed, 3, "the block of each layer, and the rest");
}
