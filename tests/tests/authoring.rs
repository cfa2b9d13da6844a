//! What authors of modules do: start one, build it, test it, check it; in C,
//! too. The guide's code is compiled here, so that the page cannot rot.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use safetensors::Dtype;
use serde_json::{Value, json};
use weightmill_tests::{Tensor, program, repository, run, seeded_bytes, write_safetensors};

/// One build folder for every crate that is made here.
fn build_folder() -> PathBuf {
    repository().join("target/authoring")
}

/// Runs `weightmill module` in `folder`, with `--json`.
fn module<S: AsRef<OsStr>>(folder: &Path, arguments: impl IntoIterator<Item = S>) -> (i32, Value, String) {
    let mut command = Command::new(program());
    command.current_dir(folder).env("CARGO_TARGET_DIR", build_folder()).arg("module").args(arguments).arg("--json");
    let output = command.output().expect("the program starts");
    let json = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code().unwrap_or(-1), json, String::from_utf8_lossy(&output.stderr).into_owned())
}

#[track_caller]
fn succeed<S: AsRef<OsStr>>(folder: &Path, arguments: impl IntoIterator<Item = S>) -> Value {
    let (status, json, stderr) = module(folder, arguments);
    assert_eq!(status, 0, "{json:#}\n{stderr}");
    json
}

/// Starts a module in `folder`, on this repository's SDK and with its
/// dependencies' versions.
fn start(folder: &Path, name: &str) -> PathBuf {
    let sdk = repository().join("guest-sdk");
    succeed(folder, ["new".as_ref(), name.as_ref(), "--sdk".as_ref(), sdk.as_os_str()]);
    let made = folder.join(name);
    std::fs::copy(repository().join("Cargo.lock"), made.join("Cargo.lock")).unwrap();
    made
}

/// The crate's own tests.
fn cargo_test(folder: &Path) {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(folder).env("CARGO_TARGET_DIR", build_folder()).args(["test", "--quiet"]);
    let output = command.output().expect("cargo starts");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("test result: ok"), "{said}");
}

/// The blocks of a Markdown file in one language.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let opening = format!("```{language}\n");
    let pieces = page.split(&opening).skip(1);
    pieces.map(|rest| rest.split("```").next().expect("split gives a first piece").to_string()).collect()
}

fn guide() -> String {
    std::fs::read_to_string(repository().join("docs/authoring.md")).unwrap()
}

#[test]
fn a_new_module_builds_and_passes_its_own_tests() {
    let folder = tempfile::tempdir().unwrap();
    let made = start(folder.path(), "half-swap");
    assert_eq!(
        std::fs::read_to_string(made.join("src/lib.rs")).unwrap(),
        blocks(&guide(), "rust")[0],
        "the guide's first module"
    );
    cargo_test(&made);
    let built = succeed(&made, ["build"]);
    let path = build_folder().join("weightmill/half-swap.wasm");
    assert_eq!((built["name"].as_str(), built["path"].as_str()), (Some("half-swap"), path.to_str()));
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(built["bytes"], bytes.len());
    for path in [repository(), made.canonicalize().unwrap()] {
        let path = path.as_os_str().as_encoded_bytes();
        assert!(!bytes.windows(path.len()).any(|w| w == path), "a path of this machine");
    }
    for engine in ["wasmtime", "wasmi", "pulley"] {
        let tested = succeed(&made, ["test", "--engine", engine]);
        assert_eq!(
            (tested["failed"].as_u64(), tested["vectors"].as_array().map(Vec::len)),
            (Some(0), Some(2)),
            "{tested:#}"
        );
        assert_eq!(tested["digest"], built["digest"]);
    }
    let checked = succeed(&made, ["check".as_ref(), path.as_os_str(), "--vectors".as_ref(), "vectors".as_ref()]);
    assert_eq!((checked["ok"].as_bool(), checked["applications"].as_u64()), (Some(true), Some(1)), "{checked:#}");
    assert_eq!(checked["warnings"], json!([]));

    the_guides_vector_and_recipe_work(&made);

    // A vector that does not hold: exit 1, and the first element that differs.
    let wrong: Vec<u8> = [4_u16, 5, 6, 7, 0, 1, 9, 3].iter().flat_map(|n| n.to_le_bytes()).collect();
    write_safetensors(&made.join("vectors/rows/expected.safetensors"), &[("w", Dtype::U16, vec![4, 2], wrong)]);
    let (status, report, _) = module(&made, ["test"]);
    let failures = report["vectors"][1]["failures"].as_array().unwrap();
    assert_eq!((status, report["failed"].as_u64(), failures.len()), (1, Some(1), 4), "{report:#}");
    assert_eq!(
        failures[0]["difference"],
        json!({"element": 6, "index": [3, 0], "got": "2", "expected": "9", "bytes": 1})
    );

    // One that names another error than it gets.
    let case = json!({"inputs": {"w": "w"}, "outputs": ["w"], "error": {"code": "bad_params"}});
    std::fs::write(made.join("vectors/odd/case.json"), case.to_string()).unwrap();
    assert_eq!(module(&made, ["test"]).1["failed"], 2);

    // One without an answer is asked for, and written when told to.
    std::fs::remove_file(made.join("vectors/rows/expected.safetensors")).unwrap();
    std::fs::remove_dir_all(made.join("vectors/odd")).unwrap();
    let (status, refused, _) = module(&made, ["test"]);
    assert_eq!((status, refused["error"]["code"].as_str()), (1, Some("vector_invalid")));
    succeed(&made, ["test", "--write-expected"]);
    assert_eq!(succeed(&made, ["test"])["failed"], 0);
}

/// The vector and the recipe of the guide, on the module that it starts with.
fn the_guides_vector_and_recipe_work(swap: &Path) {
    let case: Value = serde_json::from_str(&blocks(&guide(), "json")[0]).unwrap();
    let own: Value = serde_json::from_slice(&std::fs::read(swap.join("vectors/rows/case.json")).unwrap()).unwrap();
    assert_eq!(case, own);
    std::fs::create_dir_all(swap.join("target/weightmill")).unwrap();
    std::fs::copy(build_folder().join("weightmill/half-swap.wasm"), swap.join("target/weightmill/half-swap.wasm"))
        .unwrap();
    assert_eq!(succeed(swap, ["check", "target/weightmill/half-swap.wasm"])["applications"], 1, "vectors of the crate");
    std::fs::write(swap.join("recipe.toml"), &blocks(&guide(), "toml")[0]).unwrap();
    let name = "transformer.norm_out.linear.weight";
    write_safetensors(&swap.join("x.safetensors"), &[(name, Dtype::U8, vec![4], vec![1, 2, 3, 4])]);
    let arguments = ["digest", "--recipe", "recipe.toml", "--checkpoint", "x.safetensors"];
    let ran = run(arguments.map(|a| if a.contains('.') { swap.join(a).into_os_string() } else { a.into() })).ok();
    write_safetensors(&swap.join("y.safetensors"), &[(name, Dtype::U8, vec![4], vec![3, 4, 1, 2])]);
    let plain = run(["digest".as_ref(), "--checkpoint".as_ref(), swap.join("y.safetensors").as_os_str()]).ok();
    assert_eq!(ran["content_digest"], plain["content_digest"]);
}

#[test]
fn the_guides_arithmetic_module_computes() {
    let folder = tempfile::tempdir().unwrap();
    let made = start(folder.path(), "row-scale");
    std::fs::write(made.join("src/lib.rs"), &blocks(&guide(), "rust")[1]).unwrap();
    cargo_test(&made);
    std::fs::remove_dir_all(made.join("vectors")).unwrap();
    let vector = |name: &str, case: Value, w: &[f32], expected: Option<&[f32]>| {
        let vector = made.join("vectors").join(name);
        std::fs::create_dir_all(&vector).unwrap();
        std::fs::write(vector.join("case.json"), case.to_string()).unwrap();
        let bytes = |numbers: &[f32]| numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let columns = w.len() / 3;
        let input =
            [("w", Dtype::F32, vec![3, columns], bytes(w)), ("s", Dtype::F32, vec![3], bytes(&[1.0, 2.0, -0.5]))];
        write_safetensors(&vector.join("input.safetensors"), &input);
        if let Some(expected) = expected {
            write_safetensors(
                &vector.join("expected.safetensors"),
                &[("w", Dtype::F32, vec![3, columns], bytes(expected))],
            );
        }
    };
    let case = json!({"inputs": {"w": "w", "scale": "s"}, "outputs": ["w"]});
    let w: Vec<f32> = (0..3000_u16).map(f32::from).collect();
    let expected: Vec<f32> = w.iter().zip(0..).map(|(x, k)| x * [1.0, 2.0, -0.5][k / 1000]).collect();
    vector("scaled", case.clone(), &w, Some(&expected));
    let mut refused = case;
    refused["error"] = json!({"code": "bad_data", "message": "NaN at flat index 2 of w"});
    vector("nan", refused, &[0.0, 1.0, f32::NAN], None);
    assert_eq!(succeed(&made, ["test"])["failed"], 0);
    assert_eq!(succeed(&made, ["test", "--engine", "wasmi"])["failed"], 0);
    let path = build_folder().join("weightmill/row-scale.wasm");
    let checked = succeed(&made, ["check".as_ref(), path.as_os_str(), "--vectors".as_ref(), "vectors".as_ref()]);
    let state = checked["findings"].as_array().unwrap().iter().find(|f| f["check"] == "state").unwrap();
    assert!(state["detail"].as_str().unwrap().starts_with("none: "), "{checked:#}");
}

#[test]
fn what_cannot_be_built_is_refused_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |arguments: &[&str], code: &str, part: &str| {
        let (status, json, stderr) = module(folder.path(), arguments);
        assert_eq!((status, json["error"]["code"].as_str()), (1, Some(code)), "{arguments:?}: {stderr}");
        assert!(json["error"]["message"].as_str().unwrap().contains(part), "{json:#}");
        assert!(json["error"]["hint"].is_string(), "{json:#}");
    };
    refused(&["new", "Half"], "bad_params", "'Half' is no name");
    refused(&["new", "a", "--sdk", "nowhere"], "bad_params", "there is no SDK at nowhere");
    std::fs::create_dir(folder.path().join("there")).unwrap();
    refused(&["new", "there"], "bad_params", "is there already");
    refused(&["build", "there"], "module_build_failed", "there is no crate at there");
    refused(&["test", "there"], "module_build_failed", "there is no crate");
    let made = start(folder.path(), "broken");
    let manifest = std::fs::read_to_string(made.join("Cargo.toml")).unwrap();
    std::fs::write(made.join("Cargo.toml"), manifest.replace("\"cdylib\", ", "")).unwrap();
    refused(&["build", "broken"], "module_build_failed", "has no cdylib");
    std::fs::write(made.join("Cargo.toml"), manifest).unwrap();
    std::fs::write(made.join("src/lib.rs"), "fn not_rust(").unwrap();
    refused(&["build", "broken"], "module_build_failed", "does not build");
    refused(&["test", "cast"], "vector_invalid", "no vectors/");
    refused(&["test", "cast", "--vectors", "there"], "vector_invalid", "no folder with a case.json");
    std::fs::create_dir(folder.path().join("there/x")).unwrap();
    std::fs::write(folder.path().join("there/x/case.json"), r#"{"inputs":{"w":3},"outputs":[]}"#).unwrap();
    refused(&["test", "cast", "--vectors", "there"], "vector_invalid", "a tensor's name or a list of names");
}

#[test]
fn shipped_modules_pass_their_check() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["cast", "fp8-quantize", "qkv-fuse"] {
        let checked = succeed(folder.path(), ["check", name]);
        assert_eq!((checked["ok"].as_bool(), &checked["warnings"]), (Some(true), &json!([])), "{checked:#}");
        assert!(checked["applications"].as_u64() > Some(0));
    }
}

/// A module that writes a global, a table and memory, and traps if it finds
/// anything there, computes as if it had not tried; its author is told.
#[test]
fn keeping_state_gains_nothing_and_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let hostile = repository().join("tests/hostile/modules/ok-carries-state.wat");
    std::fs::write(folder.path().join("keeps.wasm"), wat::parse_file(hostile).unwrap()).unwrap();
    let vector = folder.path().join("vectors/copies");
    std::fs::create_dir_all(&vector).unwrap();
    std::fs::write(vector.join("case.json"), r#"{"inputs":{"in":"t"},"outputs":["out"]}"#).unwrap();
    let bytes = seeded_bytes(1, 64);
    write_safetensors(&vector.join("input.safetensors"), &[("t", Dtype::F32, vec![16], bytes.clone())]);
    write_safetensors(&vector.join("expected.safetensors"), &[("out", Dtype::F32, vec![16], bytes)]);
    assert_eq!(succeed(folder.path(), ["test", "./keeps.wasm"])["failed"], 0);
    let checked = succeed(folder.path(), ["check", "./keeps.wasm"]);
    let warnings = checked["warnings"].as_array().unwrap();
    assert!(
        warnings.iter().any(|w| w.as_str().unwrap().contains("keeps state between tiles and gains nothing")),
        "{checked:#}"
    );
}

#[test]
fn pack_adds_metadata_that_holds() {
    let folder = tempfile::tempdir().unwrap();
    let bare = repository().join("tests/hostile/modules/abi-no-metadata.wat");
    std::fs::write(folder.path().join("bare.wasm"), wat::parse_file(bare).unwrap()).unwrap();
    let meta = |text: &str| std::fs::write(folder.path().join("meta.json"), text).unwrap();
    let pack = ["pack", "--meta", "meta.json", "bare.wasm", "packed.wasm"];
    for (text, part) in [
        ("{", "no JSON"),
        (r#"{"abi":2,"name":"a","version":"1.0.0"}"#, "abi 2"),
        (r#"{"abi":1,"name":"A","version":"1.0.0"}"#, "name 'A'"),
    ] {
        meta(text);
        let (status, refused, _) = module(folder.path(), pack);
        assert_eq!((status, refused["error"]["code"].as_str()), (4, Some("module_bad_abi")), "{text}");
        assert!(refused["error"]["message"].as_str().unwrap().contains(part), "{refused:#}");
        assert!(!folder.path().join("packed.wasm").exists(), "{text}");
    }
    meta("{\"abi\": 1,\n \"name\": \"packed\", \"version\": \"1.2.3\"}");
    let packed = succeed(folder.path(), pack);
    let inspected = succeed(folder.path(), ["inspect", "./packed.wasm"]);
    assert_eq!((&inspected["metadata"]["name"], &inspected["digest"]), (&json!("packed"), &packed["digest"]));
    let (status, refused, _) = module(folder.path(), ["pack", "--meta", "meta.json", "packed.wasm", "twice.wasm"]);
    assert_eq!(status, 4);
    assert!(refused["error"]["message"].as_str().unwrap().contains("two custom sections"), "{refused:#}");
}

/// The content that a recipe with this module makes of every BF16 there is.
fn widened(folder: &Path, module: &str, engine: &str, tile_bytes: &str) -> String {
    let recipe = format!(
        "recipe = 1\nname = \"widen\"\n[[step]]\nmodule = \"{module}\"\ninputs = {{ w = \"{{name}}\" }}\n\
         outputs = {{ w = \"{{name}}\" }}\nparams = {{ dtype = \"F32\" }}\n"
    );
    std::fs::write(folder.join("recipe.toml"), recipe).unwrap();
    let (recipe, checkpoint) = (folder.join("recipe.toml"), folder.join("x.safetensors"));
    let arguments: [&OsStr; 9] = [
        "digest".as_ref(),
        "--recipe".as_ref(),
        recipe.as_ref(),
        "--checkpoint".as_ref(),
        checkpoint.as_ref(),
        "--engine".as_ref(),
        engine.as_ref(),
        "--tile-bytes".as_ref(),
        tile_bytes.as_ref(),
    ];
    run(arguments).ok()["content_digest"].as_str().unwrap().to_string()
}

fn clang_for_wasm() -> bool {
    let targets = Command::new("clang").arg("--print-targets").output();
    let known = targets.is_ok_and(|o| String::from_utf8_lossy(&o.stdout).contains("wasm32"));
    known && Command::new("wasm-ld").arg("--version").output().is_ok_and(|o| o.status.success())
}

#[test]
fn a_module_in_c_equals_the_one_in_rust() {
    let folder = tempfile::tempdir().unwrap();
    let every: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let tensors: [Tensor<'_>; 4] = [
        ("every", Dtype::BF16, vec![256, 256], every),
        ("odd", Dtype::BF16, vec![3, 5, 7], seeded_bytes(3, 210)),
        ("scalar", Dtype::BF16, vec![], seeded_bytes(4, 2)),
        ("empty", Dtype::BF16, vec![0, 4], vec![]),
    ];
    write_safetensors(&folder.path().join("x.safetensors"), &tensors);
    let source = repository().join("tests/c-module");
    std::fs::copy(source.join("widen.wasm"), folder.path().join("committed.wasm")).unwrap();
    let mut modules = vec!["./committed.wasm"];
    if clang_for_wasm() {
        let built =
            Command::new("sh").arg(source.join("build.sh")).arg(folder.path()).env("WEIGHTMILL", program()).output();
        let built = built.expect("sh starts");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        modules.push("./widen.wasm");
    } else {
        eprintln!("skipped: building widen.c, which needs clang and wasm-ld; the committed module is tested");
    }
    let expected = widened(folder.path(), "cast", "wasmtime", "1MiB");
    for module in modules {
        for (engine, tile_bytes) in [("wasmtime", "1MiB"), ("wasmtime", "100"), ("wasmi", "30000"), ("pulley", "1MiB")]
        {
            assert_eq!(widened(folder.path(), module, engine, tile_bytes), expected, "{module} {engine} {tile_bytes}");
        }
    }
    let ran =
        run(["module", "inspect"].map(OsStr::new).into_iter().chain([source.join("widen.wasm").as_os_str()])).ok();
    assert_eq!(ran["metadata"]["name"], "widen");
}

#[test]
fn shipped_modules_pass_their_vectors_on_both_engines() {
    let transforms = repository().join("transforms");
    let dist = std::fs::read_dir(transforms.join("dist")).unwrap().map(|entry| entry.unwrap().path());
    let mut modules: Vec<PathBuf> = dist.filter(|path| path.extension() == Some(OsStr::new("wasm"))).collect();
    modules.sort();
    assert_eq!(modules.len(), 20);
    for path in modules {
        let name = path.file_stem().unwrap();
        let vectors = transforms.join(name).join("vectors");
        for engine in ["wasmtime", "wasmi"] {
            let arguments = ["test".as_ref(), name, "--vectors".as_ref(), vectors.as_os_str()];
            let json = succeed(&transforms, arguments.into_iter().chain(["--engine".as_ref(), engine.as_ref()]));
            assert_eq!(json["failed"], 0, "{json:#}");
            assert_eq!(json["engine"], engine);
        }
    }
}
