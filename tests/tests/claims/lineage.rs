//! `explain`.

use std::fs;

use serde_json::{Value, json};
use weightmill_tests::{run_recipe, write_safetensors};

use crate::setting::{Setting, tensors, text};

fn explain(setting: &Setting, key: &str, tensor: &str, more: &[&str]) -> Value {
    setting.ask(&[&["explain", "--entry", key, "--tensor", tensor], more].concat()).ok()
}

#[test]
fn a_chain_is_followed_to_the_bytes_that_it_reads() {
    let setting = Setting::new();
    let key = setting.build(&setting.checkpoint(), &["--tp-size", "2", "--tp-rank", "1"]);
    let found = explain(&setting, &key, "h.1.up", &[]);
    assert_eq!((&found["tensor"]["dtype"], &found["tensor"]["block"]), (&json!("BF16"), &json!("h.1.")));
    assert_eq!(found["from"], json!({"step": 0, "output": "w"}));
    let steps = found["steps"].as_array().unwrap();
    let names: Vec<String> = steps.iter().map(|s| text(&s["module"]["name"])).collect();
    assert_eq!(names, ["cast", "tp-shard"]);
    assert_eq!((&steps[0]["params"], &steps[0]["recipe_step"]), (&json!({"dtype": "BF16"}), &json!(3)));
    assert_eq!((&steps[0]["outputs"][0]["how"], &steps[1]["outputs"][0]["how"]), (&json!("computed"), &json!("moved")));
    assert_eq!(steps[1]["outputs"][0]["name"], "h.1.shard");
    assert_eq!((&steps[1]["tp"], &steps[0]["tp"]), (&json!({"rank": 1, "size": 2}), &Value::Null));
    assert_eq!(steps[1]["captures"], json!({"i": "1"}));
    assert_eq!(steps[0]["inputs"][0]["from"], json!({"step": 1, "output": "w"}));
    // The upper half of 64 rows of 16 floats.
    let half = 64 * 16 * 4 / 2;
    assert_eq!(steps[0]["inputs"][0]["ranges"], json!([[0, half]]));
    let source = &found["sources"][0];
    assert_eq!(
        (&source["name"], &source["ranges"], &source["file"]),
        (&json!("h.1.up"), &json!([[half, 2 * half]]), &Value::Null)
    );
    let digests = setting.ask(&["digest", "--checkpoint", &setting.arg("base.safetensors")]).ok();
    assert_eq!(source["digest"], digests["tensors"]["h.1.up"]["digest"]);
    assert_eq!(found["names_known"], true);

    let passed = explain(&setting, &key, "h.0.norm", &[]);
    assert_eq!((&passed["from"], &passed["steps"]), (&json!({"source": 0}), &json!([])));
    assert_eq!(
        (&passed["sources"][0]["name"], &passed["sources"][0]["ranges"]),
        (&json!("h.0.norm"), &json!([[0, 96]]))
    );
    let alias = explain(&setting, &key, "head", &[]);
    assert_eq!((&alias["tensor"]["alias_of"], &alias["sources"][0]["name"]), (&json!("embed"), &json!("embed")));
}

/// The ranges are those bytes whose change changes the tensor.
#[test]
fn bytes_outside_the_ranges_change_nothing_and_every_range_matters() {
    let setting = Setting::new();
    let digest_of = |checkpoint: &std::path::Path, tensor: &str| {
        let rank = ["--tp-size", "2", "--tp-rank", "0"];
        let digests = run_recipe("digest", &setting.recipe(), checkpoint, &setting.at("nowhere"), &rank).ok();
        text(&digests["tensors"][tensor]["digest"])
    };
    let key = setting.build(&setting.checkpoint(), &["--tp-size", "2", "--tp-rank", "0"]);
    for (tensor, source, len) in [("h.0.up", "h.0.up", 64 * 16 * 4_u64), ("h.0.qkv", "h.0.qkv", 96 * 24 * 2)] {
        let found = explain(&setting, &key, tensor, &[]);
        let ranges: Vec<(u64, u64)> = serde_json::from_value(found["sources"][0]["ranges"].clone()).unwrap();
        assert_eq!(found["sources"].as_array().unwrap().len(), 1);
        let unchanged = digest_of(&setting.checkpoint(), tensor);
        let inside = |at: u64| ranges.iter().any(|(start, end)| (*start..*end).contains(&at));
        // The top byte of a float: no rounding hides a change of it.
        for at in (1..8).map(|i| i * len / 8 - 1).chain([3, len - 1]) {
            let path = setting.changed("probe.safetensors", source, |bytes| bytes[at as usize] ^= 1);
            assert_eq!(digest_of(&path, tensor) != unchanged, inside(at), "{tensor}, byte {at} of {source}");
        }
    }
}

#[test]
fn a_checkpoint_adds_files_and_is_compared_with_the_entry() {
    let setting = Setting::new();
    let key = setting.build(&setting.checkpoint(), &[]);
    let found = explain(&setting, &key, "h.0.qkv", &["--checkpoint", &setting.arg("base.safetensors")]);
    let file = &found["sources"][0]["file"];
    assert_eq!(file["name"], setting.arg("base.safetensors"));
    let bytes = fs::read(setting.checkpoint()).unwrap();
    let wanted = tensors().into_iter().find(|t| t.0 == "h.0.qkv").unwrap().3;
    let offset = file["offset"].as_u64().unwrap() as usize;
    assert_eq!(bytes[offset..offset + wanted.len()], wanted);
    assert_eq!(file["ranges"], json!([[offset, offset + wanted.len()]]));

    let other = setting.changed("other.safetensors", "h.0.qkv", |bytes| bytes[5] ^= 1);
    let words = ["explain", "--entry", &key, "--tensor", "h.0.qkv", "--checkpoint", other.to_str().unwrap()];
    let refused = setting.ask(&words);
    assert_eq!((refused.status, refused.code()), (1, "source_unavailable"), "{}", refused.stderr);
    // What the tensor does not come from does not matter.
    let elsewhere = setting.changed("elsewhere.safetensors", "h.1.qkv", |bytes| bytes[5] ^= 1);
    explain(&setting, &key, "h.0.qkv", &["--checkpoint", elsewhere.to_str().unwrap()]);
}

#[test]
fn without_names_there_are_digests_and_a_checkpoint_finds_the_names() {
    let setting = Setting::new();
    let key = setting.build(&setting.checkpoint(), &[]);
    let named = explain(&setting, &key, "h.0.up", &[]);
    let folder = setting.store().join("provenance").join(&key);
    let lineage = fs::read_dir(&folder).unwrap().map(|f| f.unwrap().path());
    let lineage: Vec<_> = lineage.filter(|p| p.to_str().unwrap().ends_with(".lineage.json")).collect();
    assert_eq!(lineage.len(), 1);
    // A changed record is not believed; it is none.
    let altered = fs::read_to_string(&lineage[0]).unwrap().replace("h.0.up", "h.9.up");
    fs::write(&lineage[0], altered).unwrap();
    for _ in 0..2 {
        let found = explain(&setting, &key, "h.0.up", &[]);
        assert_eq!((&found["names_known"], &found["sources"][0]["name"]), (&json!(false), &Value::Null));
        assert_eq!(found["sources"][0]["digest"], named["sources"][0]["digest"]);
        assert_eq!(found["sources"][0]["ranges"], named["sources"][0]["ranges"]);
        assert_eq!(found["steps"][0]["module"], named["steps"][0]["module"]);
        let located = explain(&setting, &key, "h.0.up", &["--checkpoint", &setting.arg("base.safetensors")]);
        assert_eq!(located["sources"][0]["name"], "h.0.up");
        let _ = fs::remove_dir_all(&folder);
    }
    write_safetensors(&setting.at("small.safetensors"), &tensors()[..1]);
    let words = ["explain", "--entry", &key, "--tensor", "h.0.up", "--checkpoint", &setting.arg("small.safetensors")];
    assert_eq!(setting.ask(&words).code(), "source_unavailable");
}

#[test]
fn a_module_that_is_not_at_hand_is_said_to_be_missing() {
    let setting = Setting::new();
    fs::copy(weightmill_tests::repository().join("tests/c-module/widen.wasm"), setting.at("widen.wasm")).unwrap();
    let recipe = "recipe = 1\nname = \"own\"\n\n[[step]]\nmodule = \"./widen.wasm\"\ninputs = { w = \"embed\" }\noutputs = { w = \"wide\" }\nparams = { dtype = \"F32\" }\n\n[[step]]\nmodule = \"cast\"\ninputs = { w = \"wide\" }\noutputs = { w = \"embed\" }\nparams = { dtype = \"F16\" }\n";
    fs::write(setting.recipe(), recipe).unwrap();
    let key = setting.build(&setting.checkpoint(), &[]);
    let blind = explain(&setting, &key, "embed", &[]);
    assert_eq!((&blind["steps"][0]["planned"], &blind["steps"][1]["planned"]), (&json!(false), &json!(false)));
    assert_eq!(text(&blind["steps"][1]["module"]["name"]), "widen", "recorded by the build");
    assert_eq!((&blind["sources"][0]["name"], &blind["sources"][0]["ranges"]), (&json!("embed"), &Value::Null));
    for more in [["--module", &setting.arg("widen.wasm")], ["--recipe", &setting.arg("small.toml")]] {
        let seen = explain(&setting, &key, "embed", &more);
        assert_eq!(seen["steps"][1]["outputs"][0]["dtype"], "F32");
        assert_eq!(seen["sources"][0]["ranges"], json!([[0, 20 * 24 * 2]]), "{more:?}");
    }
}

#[test]
fn what_is_not_there_is_named() {
    let setting = Setting::new();
    let key = setting.build(&setting.checkpoint(), &[]);
    let unknown = setting.ask(&["explain", "--entry", &key, "--tensor", "h.0.qvk"]);
    assert_eq!((unknown.status, unknown.code()), (1, "missing_input"));
    assert!(unknown.json["error"]["hint"].as_str().unwrap().contains("did you mean h.0.qkv"), "{}", unknown.stderr);
    fs::remove_file(setting.store().join("actions").join(format!("{key}.json"))).unwrap();
    let no_action = setting.ask(&["explain", "--entry", &key, "--tensor", "h.0.qkv"]);
    assert_eq!((no_action.status, no_action.code()), (1, "source_unavailable"));
}
