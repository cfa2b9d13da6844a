//! The main job through the program: what a key depends on, hits, streams,
//! memory, and what bad modules come to.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use safetensors::Dtype;
use serde_json::Value;
use weightmill_tests::{Tensor, program, run, run_recipe, seeded_bytes, write_safetensors};

/// A folder with a small GPT-NeoX-like checkpoint, a recipe and a store.
struct Bench {
    folder: tempfile::TempDir,
}

const RECIPE: &str = r#"
recipe = 1
name = "small"

[[step]]
module = "qkv-regroup"
inputs = { qkv = "h.{i}.qkv" }
outputs = { qkv = "h.{i}.qkv" }
params = { groups = 4, q_per_group = 1, head_dim = 8 }

[[step]]
module = "cast"
inputs = { w = "h.{i}.mlp" }
outputs = { w = "h.{i}.mlp" }
params = { dtype = "BF16" }

[blocks]
patterns = ["h.{i}."]
"#;

fn tensors() -> Vec<Tensor<'static>> {
    let names = [("h.0.qkv", "h.0.mlp"), ("h.1.qkv", "h.1.mlp"), ("h.2.qkv", "h.2.mlp")];
    let mut tensors = vec![("wte", Dtype::BF16, vec![50, 24], seeded_bytes(9, 50 * 24 * 2))];
    for (i, (qkv, mlp)) in names.into_iter().enumerate() {
        tensors.push((qkv, Dtype::BF16, vec![96, 24], seeded_bytes(i as u64, 96 * 24 * 2)));
        // Finite F32: the exponent's top bit is cleared.
        let mut bytes = seeded_bytes(100 + i as u64, 40 * 24 * 4);
        bytes.chunks_exact_mut(4).for_each(|v| v[3] &= 0xBF);
        tensors.push((mlp, Dtype::F32, vec![40, 24], bytes));
    }
    tensors
}

impl Bench {
    fn new() -> Self {
        let bench = Bench { folder: tempfile::tempdir().unwrap() };
        std::fs::create_dir(bench.at("one")).unwrap();
        write_safetensors(&bench.at("one/model.safetensors"), &tensors());
        std::fs::write(bench.at("recipe.toml"), RECIPE).unwrap();
        bench
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn build(&self, checkpoint: &str, more: &[&str]) -> Value {
        run_recipe("build", &self.at("recipe.toml"), &self.at(checkpoint), &self.at("store"), more).ok()
    }
}

fn text<'a>(document: &'a Value, field: &str) -> &'a str {
    document[field].as_str().unwrap_or_else(|| panic!("no {field} in {document}"))
}

#[test]
fn a_hit_reads_no_tensor_and_the_key_depends_on_content_only() {
    let bench = Bench::new();
    let first = bench.build("one", &[]);
    assert_eq!(text(&first, "outcome"), "built");
    let source: u64 = tensors().iter().map(|t| t.3.len() as u64).sum();
    assert_eq!(first["source_bytes_read"].as_u64(), Some(2 * source), "once to hash, once to transform");
    assert_eq!(first["blocks"], 4);

    let hit = bench.build("one", &[]);
    assert_eq!((text(&hit, "outcome"), hit["source_bytes_read"].as_u64()), ("hit", Some(0)));
    assert_eq!(hit["key"], first["key"]);

    // Touched, and copied under another name.
    let model = bench.at("one/model.safetensors");
    let file = std::fs::File::options().append(true).open(&model).unwrap();
    file.set_modified(std::time::SystemTime::now()).unwrap();
    drop(file);
    assert_eq!(bench.build("one", &[])["key"], first["key"]);
    std::fs::create_dir(bench.at("copy")).unwrap();
    std::fs::copy(&model, bench.at("copy/other.safetensors")).unwrap();
    assert_eq!(bench.build("copy", &[])["outcome"], "hit");

    // The same tensors over three files, in another order.
    std::fs::create_dir(bench.at("three")).unwrap();
    for part in 0..3 {
        let own: Vec<_> = tensors().into_iter().rev().skip(part).step_by(3).collect();
        write_safetensors(&bench.at(&format!("three/{part}.safetensors")), &own);
    }
    assert_eq!(bench.build("three", &["--jobs", "3"])["key"], first["key"]);

    // One byte.
    let mut changed = tensors();
    changed[3].3[1000] ^= 1;
    std::fs::create_dir(bench.at("changed")).unwrap();
    write_safetensors(&bench.at("changed/model.safetensors"), &changed);
    let other = bench.build("changed", &[]);
    assert_ne!(other["key"], first["key"]);
    assert_eq!(other["blocks_reused"], 3, "only one block has another action");

    // Rank, size and jobs.
    let ranks: Vec<Value> =
        ["0", "1"].iter().map(|rank| bench.build("one", &["--tp-size", "2", "--tp-rank", rank])).collect();
    assert_ne!(ranks[0]["key"], ranks[1]["key"]);
    assert_ne!(ranks[0]["key"], first["key"]);
    assert_eq!(ranks[1]["blocks_reused"], 1, "the block without a tp-using step is the same on every rank");
    assert_eq!(bench.build("one", &["--jobs", "7"])["outcome"], "hit");
}

#[test]
fn shards_open_in_stock_readers_and_have_the_digests_that_are_told() {
    let bench = Bench::new();
    let built = bench.build("one", &["--export", bench.at("out").to_str().unwrap()]);
    let digests = run(["digest", "--entry", text(&built, "key"), "--store", bench.at("store").to_str().unwrap()]).ok();
    assert_eq!(digests["content_digest"], built["content_digest"]);
    let mut seen = 0;
    for shard in built["shards"].as_array().unwrap() {
        let path = bench.at("store/blobs/sha256").join(text(shard, "digest"));
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(weightmill::digest::BlobDigest::of(&bytes).to_string(), text(shard, "digest"));
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (name, view) in file.tensors().into_iter().filter(|(name, _)| !name.starts_with("__pad__.")) {
            let digest = weightmill::digest::tensor_digest(
                view.data().len() as u64,
                &weightmill::digest::leaf_hashes(view.data()),
            );
            assert_eq!(digests["tensors"][&name]["digest"], digest.to_string());
            assert_eq!((view.data().as_ptr() as usize - bytes.as_ptr() as usize) % 256, 0, "{name} is aligned");
            seen += 1;
        }
    }
    assert_eq!(seen, tensors().len());
    // What was exported is a checkpoint with the same tensors.
    let exported = run(["digest", "--checkpoint", bench.at("out").to_str().unwrap()]).ok();
    assert_eq!(exported["content_digest"], built["content_digest"]);
    // And the Python package reads it, where there is one.
    let Some(python) = std::env::var_os("WEIGHTMILL_PYTHON") else {
        eprintln!("skipped: no Python with safetensors (WEIGHTMILL_PYTHON)");
        return;
    };
    let script = "import sys, safetensors\nfor p in sys.argv[1:]:\n  f = safetensors.safe_open(p, 'np')\n  [f.get_slice(k).get_shape() for k in f.keys()]\n";
    let shards = std::fs::read_dir(bench.at("out")).unwrap().map(|e| e.unwrap().path());
    let shards: Vec<_> = shards.filter(|p| p.extension().is_some_and(|e| e == "safetensors")).collect();
    assert!(Command::new(python).args(["-c", script]).args(shards).status().unwrap().success());
}

#[test]
fn blocks_are_streamed_and_verified_where_they_arrive() {
    let bench = Bench::new();
    for more in [
        &["--passes", "3", "--verify", "device"][..],
        &["--registration", "off", "--slots", "3", "--resident", "1", "--check-copy-back"],
        &["--mode", "disabled", "--check-copy-back"],
        &["--pin-limit", "0"],
    ] {
        let loaded = run_recipe("load", &bench.at("recipe.toml"), &bench.at("one"), &bench.at("store"), more).ok();
        let bytes = loaded["h2d_bytes"].as_u64().unwrap();
        assert!(bytes > 0 && loaded["h2d_copies"].as_u64() > Some(0), "{loaded}");
        assert!(loaded["passes"].as_array().unwrap().iter().all(|p| p["ms"].as_f64() > Some(0.0)), "{loaded}");
        if more.contains(&"device") {
            assert_eq!(loaded["verify"]["device"]["blocks"], 12, "four blocks, three passes: {loaded}");
        }
    }
    let refused = run_recipe(
        "load",
        &bench.at("recipe.toml"),
        &bench.at("one"),
        &bench.at("store"),
        &["--mode", "disabled", "--verify", "device"],
    );
    assert_eq!((refused.status, refused.code()), (1, "bad_params"));
    let no_gpu =
        run_recipe("load", &bench.at("recipe.toml"), &bench.at("one"), &bench.at("store"), &["--device", "cuda:99"]);
    assert_eq!((no_gpu.status, no_gpu.code()), (3, "no_device"), "{}", no_gpu.stderr);
}

#[test]
fn digests_of_another_engine_agree_and_diff_says_what_differs() {
    let bench = Bench::new();
    let built = bench.build("one", &[]);
    let save = |name: &str, document: &Value| std::fs::write(bench.at(name), document.to_string()).unwrap();
    let entry = run(["digest", "--entry", text(&built, "key"), "--store", bench.at("store").to_str().unwrap()]).ok();
    save("entry.json", &entry);
    let wasmi =
        run_recipe("digest", &bench.at("recipe.toml"), &bench.at("one"), &bench.at("nowhere"), &["--engine", "wasmi"])
            .ok();
    save("wasmi.json", &wasmi);
    assert!(!bench.at("nowhere").exists(), "an engine that is named touches no store");
    let compare = |a: &str, b: &str| run([Path::new("diff"), &bench.at(a), &bench.at(b)]);
    assert_eq!(compare("entry.json", "wasmi.json").ok()["equal"], true);
    let source = run(["digest", "--checkpoint", bench.at("one").to_str().unwrap()]).ok();
    save("source.json", &source);
    let different = compare("entry.json", "source.json");
    assert_eq!(different.status, 1);
    let kinds: Vec<&str> = different.json["differences"].as_array().unwrap().iter().map(|d| text(d, "what")).collect();
    assert_eq!(kinds.iter().filter(|k| **k == "dtype").count(), 3, "the cast ones: {kinds:?}");
    assert_eq!(kinds.iter().filter(|k| **k == "bytes").count(), 3, "the regrouped ones: {kinds:?}");
}

#[test]
fn two_processes_that_build_one_key_publish_one_entry() {
    let bench = Bench::new();
    let spawn = || {
        Command::new(program())
            .args(["build", "--json", "--recipe"])
            .arg(bench.at("recipe.toml"))
            .arg("--checkpoint")
            .arg(bench.at("one"))
            .arg("--store")
            .arg(bench.at("store"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let children: Vec<_> = (0..4).map(|_| spawn()).collect();
    let mut outcomes: Vec<String> = Vec::new();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        outcomes.push(text(&document, "outcome").to_string());
    }
    outcomes.sort();
    assert_eq!(outcomes, ["built", "hit", "hit", "hit"]);
    assert_eq!(std::fs::read_dir(bench.at("store/entries")).unwrap().count(), 1);
    assert_eq!(std::fs::read_dir(bench.at("store/tmp")).unwrap().count(), 0);
}

/// A module of ABI 1 around `plan` and `run`, with a panic buffer.
fn module(plan: &str, run: &str, more: &str) -> Vec<u8> {
    let metadata = r#"{\22abi\22:1,\22name\22:\22bad\22,\22version\22:\221.0.0\22}"#;
    let wat = format!(
        r#"(module
            (memory (export "memory") 4)
            (func (export "wm_abi_v1"))
            (func (export "wm_alloc") (param i32) (result i32) i32.const 65536)
            (func (export "wm_plan") (param i32 i32) (result i64) {plan})
            (func (export "wm_run") (param i32) (result i64) {run})
            (global (export "wm_panic") i32 (i32.const 16))
            (@custom "weightmill" "{metadata}")
            {more})"#
    );
    wat::parse_str(wat).unwrap()
}

/// A plan that answers `json`.
fn answering(json: &str) -> (String, String) {
    let plan = format!("i64.const {}", (1024_i64 << 32) | json.len() as i64);
    (plan, format!("(data (i32.const 1024) \"{}\")", json.replace('"', "\\22")))
}

#[test]
fn bad_modules_have_codes_of_their_own_and_write_nothing() {
    let good = r#"{"outputs":[{"role":"w","dtype":"BF16","shape":[50,24],"tiles":[{"len":2400,"inputs":[[{"copy":0,"len":2400}]]}]}]}"#;
    let with = |json: &str, run: &str, more: &str| {
        let (plan, data) = answering(json);
        module(&plan, run, &format!("{data}{more}"))
    };
    let plan_of = |json: &str| with(json, "i64.const 0", "");
    let panic = "(data (i32.const 16) \"\\0c\\00\\00\\00out of tuits\")";
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("module_has_imports", wat::parse_str(r#"(module (import "env" "now" (func)))"#).unwrap(), "now"),
        ("module_out_of_fuel", module("(loop br 0) unreachable", "unreachable", ""), "fuel"),
        ("module_out_of_fuel", with(good, "(loop br 0) unreachable", ""), "wte"),
        (
            "module_out_of_memory",
            module("(drop (memory.grow (i32.const 60000))) unreachable", "unreachable", ""),
            "memory",
        ),
        ("module_trapped", with(good, "unreachable", panic), "out of tuits"),
        ("module_trapped", with(good, "unreachable", panic), "wte"),
        ("module_bad_plan", plan_of(&good.replace("2400", "2398")), "2398 bytes where the tensor has 2400"),
        ("module_bad_plan", plan_of(&good.replace("\"len\":2400,\"inputs\"", "\"len\":2402,\"inputs\"")), "2402"),
        ("module_bad_plan", plan_of(&good.replace("{\"copy\":0,", "{\"copy\":0,\"offset\":2,")), "up to byte 2402"),
        ("module_bad_plan", plan_of(&good.replace("[50,24]", "[4294967296,2147483648]")), "2^53-1"),
        ("module_bad_answer", plan_of("{not json"), "no plan"),
        ("module_bad_abi", b"\0asm\x01\0\0\0".to_vec(), ""),
    ];
    for (code, wasm, what) in cases {
        let bench = Bench::new();
        std::fs::write(bench.at("bad.wasm"), wasm).unwrap();
        std::fs::write(
            bench.at("recipe.toml"),
            "recipe = 1\nname = \"bad\"\n[[step]]\nmodule = \"./bad.wasm\"\ninputs = { w = \"wte\" }\noutputs = { w = \"wte\" }\n",
        )
        .unwrap();
        let ran = run_recipe("build", &bench.at("recipe.toml"), &bench.at("one"), &bench.at("store"), &[]);
        assert_eq!((ran.status, ran.code()), (4, code), "{what}: {}", ran.stderr);
        assert!(ran.message().contains(what), "{code} should say '{what}': {}", ran.message());
        for folder in ["entries", "tmp", "blobs/sha256"] {
            assert_eq!(std::fs::read_dir(bench.at("store").join(folder)).unwrap().count(), 0, "{code}: {folder}");
        }
    }
}

#[test]
fn an_error_says_where_in_the_recipe() {
    let bench = Bench::new();
    std::fs::write(bench.at("recipe.toml"), RECIPE.replace("groups = 4", "grups = 4")).unwrap();
    let ran = run_recipe("build", &bench.at("recipe.toml"), &bench.at("one"), &bench.at("store"), &[]);
    assert_eq!((ran.status, ran.code()), (1, "bad_params"));
    assert_eq!(
        (&ran.json["error"]["at"]["line"], &ran.json["error"]["at"]["column"]),
        (&9.into(), &20.into()),
        "{}",
        ran.json
    );
    assert!(ran.json["error"]["hint"].as_str().unwrap().contains("groups"), "{}", ran.json);
}

/// Peak resident memory of a finished child, in bytes.
fn peak_bytes(arguments: &[&std::ffi::OsStr]) -> (i32, u64, Vec<u8>) {
    let mut child = Command::new(program()).args(arguments).stdout(Stdio::piped()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    let code = loop {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find(|l| l.starts_with("VmHWM:"));
        peak = line.and_then(|l| l.split_whitespace().nth(1)?.parse::<u64>().ok()).map_or(peak, |k| peak.max(k * 1024));
        if let Some(status) = child.try_wait().unwrap() {
            break status.code().unwrap_or(-1);
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    let mut out = Vec::new();
    std::io::Read::read_to_end(&mut child.stdout.take().unwrap(), &mut out).unwrap();
    (code, peak, out)
}

/// 4 GiB of grouped QKV, sparse but for a few bytes of each head, is built in
/// bounded memory, and every digest is right.
#[test]
fn four_gib_are_built_in_bounded_memory() {
    use std::os::unix::fs::FileExt;
    const GROUPS: u64 = 64;
    const ROWS: u64 = 128;
    const COLUMNS: u64 = 21_846;
    const ROW_BYTES: u64 = COLUMNS * 2;
    let bench = Bench::new();
    let layers = 4;
    let tensor_bytes = GROUPS * 3 * ROWS * ROW_BYTES;
    let header: Vec<String> = (0..layers)
        .map(|i| {
            let (from, to) = (i * tensor_bytes, (i + 1) * tensor_bytes);
            format!(
                r#""h.{i}.qkv":{{"dtype":"BF16","shape":[{},{COLUMNS}],"data_offsets":[{from},{to}]}}"#,
                GROUPS * 3 * ROWS
            )
        })
        .collect();
    let mut header = format!("{{{}}}", header.join(",")).into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    std::fs::create_dir(bench.at("big")).unwrap();
    let file = std::fs::File::create(bench.at("big/model.safetensors")).unwrap();
    file.write_all_at(&(header.len() as u64).to_le_bytes(), 0).unwrap();
    file.write_all_at(&header, 8).unwrap();
    let start = 8 + header.len() as u64;
    file.set_len(start + layers * tensor_bytes).unwrap();
    assert!(layers * tensor_bytes >= 4 << 30);
    let mark = |layer: u64, group: u64, part: u64| seeded_bytes(layer * 1000 + group * 3 + part, 64);
    for layer in 0..layers {
        for group in 0..GROUPS {
            for part in 0..3 {
                let at = start + layer * tensor_bytes + (group * 3 + part) * ROWS * ROW_BYTES + 777 * part;
                file.write_all_at(&mark(layer, group, part), at).unwrap();
            }
        }
    }
    std::fs::write(
        bench.at("recipe.toml"),
        format!("recipe = 1\nname = \"big\"\n[[step]]\nmodule = \"qkv-regroup\"\ninputs = {{ qkv = \"h.{{i}}.qkv\" }}\noutputs = {{ qkv = \"h.{{i}}.qkv\" }}\nparams = {{ groups = {GROUPS}, q_per_group = 1, head_dim = {ROWS} }}\n[blocks]\npatterns = [\"h.{{i}}.\"]\n"),
    )
    .unwrap();
    let (recipe, big, store) = (bench.at("recipe.toml"), bench.at("big"), bench.at("store"));
    let arguments: [&std::ffi::OsStr; 8] = [
        "build".as_ref(),
        "--json".as_ref(),
        "--recipe".as_ref(),
        recipe.as_ref(),
        "--checkpoint".as_ref(),
        big.as_ref(),
        "--store".as_ref(),
        store.as_ref(),
    ];
    let (code, peak, out) = peak_bytes(&arguments);
    let built: Value = serde_json::from_slice(&out).unwrap();
    assert_eq!(code, 0, "{built}");
    assert!(peak < 512 << 20, "peak resident memory was {peak} bytes");
    let digests = run(["digest", "--entry", text(&built, "key"), "--store", store.to_str().unwrap()]).ok();
    // By the book: [Q; K; V], each part of each group one after the other.
    for layer in 0..layers {
        let mut hasher = weightmill::digest::LeafHasher::default();
        let mut piece = vec![0; (ROWS * ROW_BYTES) as usize];
        for part in 0..3 {
            for group in 0..GROUPS {
                piece.fill(0);
                piece[777 * part as usize..][..64].copy_from_slice(&mark(layer, group, part));
                hasher.update(&piece);
            }
        }
        let want = hasher.finish().0.to_string();
        assert_eq!(digests["tensors"][format!("h.{layer}.qkv")]["digest"], want.as_str(), "layer {layer}");
    }
}
