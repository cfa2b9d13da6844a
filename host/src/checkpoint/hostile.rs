//! The checkpoints in `tests/hostile/checkpoints`: made here, committed there.
//!
//! `WEIGHTMILL_BLESS=1 cargo test hostile` writes them again. Without it the
//! tests compare what is committed with what is made, and open every case. The
//! end-to-end tests go through the same cases by way of `cases.json`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::Checkpoint;
use crate::digest::LEAF_BYTES;
use crate::error::Code;
use crate::tensor::Dtype;

/// A checkpoint, what is wrong with it, and what opening it gives.
pub(super) struct Case {
    /// File or folder.
    pub(super) path: String,
    what: String,
    code: Option<Code>,
    /// Path and content of each file.
    pub(super) files: Vec<(String, Vec<u8>)>,
}

/// A safetensors file of this header and so many bytes of data.
pub(super) fn file(json: &str, data_len: usize) -> Vec<u8> {
    with_length(json.len() as u64, json.as_bytes(), data_len)
}

fn with_length(length: u64, header: &[u8], data_len: usize) -> Vec<u8> {
    let data = (0..data_len).map(|i| (i * 31 + i / LEAF_BYTES) as u8);
    length.to_le_bytes().into_iter().chain(header.iter().copied()).chain(data).collect()
}

/// One tensor of a header.
pub(super) fn tensor(name: &str, dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
}

/// Every committed case.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = damaged_headers();
    cases.extend(damaged_tensors());
    cases.extend(damaged_folders());
    cases.extend(odd_but_valid());
    cases
}

fn single(name: &str, what: &str, code: impl Into<Option<Code>>, bytes: Vec<u8>) -> Case {
    let path = format!("{name}.safetensors");
    Case { path: path.clone(), what: what.into(), code: code.into(), files: vec![(path, bytes)] }
}

fn damaged_headers() -> Vec<Case> {
    let invalid = |name, what, bytes| single(name, what, Code::CheckpointInvalid, bytes);
    let header = |name, what, json: &str| invalid(name, what, file(json, 0));
    let good = tensor("a", "U8", "[4]", 0, 4);
    vec![
        invalid("empty", "no byte at all", vec![]),
        invalid("seven-bytes", "shorter than the header's length", vec![1; 7]),
        invalid("length-2-63", "header of 2^63 bytes", with_length(1 << 63, b"{}", 0)),
        invalid("length-max", "header of 2^64-1 bytes", with_length(u64::MAX, b"{}", 0)),
        invalid("length-over-limit", "header of 100,000,001 bytes", with_length(100_000_001, b"{}", 0)),
        invalid("length-over-file", "header longer than the file", with_length(3, b"{}", 0)),
        invalid("length-zero", "header of 0 bytes", with_length(0, b"{}", 0)),
        invalid("length-cuts-json", "the header's length cuts the JSON", with_length(1, b"{}", 0)),
        header("spaces", "only spaces", &" ".repeat(64)),
        header("leading-space", "the JSON does not begin at once", " {}"),
        header("newline-padding", "padded with something other than spaces", "{}\n\n"),
        header("nul-padding", "padded with something other than spaces", "{}\0\0"),
        invalid("not-utf8", "a byte that is not UTF-8", with_length(7, b"{\"\xff\":0}", 0)),
        header("not-json", "no JSON", "{tensors}"),
        header("array", "a list instead of an object", "[]"),
        header("two-objects", "something behind the object", "{}{}"),
        header("open-end", "the JSON breaks off", r#"{"a":{"dtype":"U8""#),
        header("nested-lists", "20,000 lists in each other", &format!(r#"{{"a":{}}}"#, "[".repeat(20_000))),
        header(
            "nested-objects",
            "10,000 objects in each other",
            &format!("{}{}", r#"{"a":"#.repeat(10_000), "}".repeat(10_000)),
        ),
        invalid("duplicate-tensor", "a tensor twice", file(&format!("{{{good},{good}}}"), 4)),
        invalid(
            "duplicate-escaped",
            "a tensor twice, once with an escape",
            file(&format!("{{{},{}}}", tensor("a", "U8", "[4]", 0, 4), tensor("\\u0061", "U8", "[4]", 4, 8)), 8),
        ),
        invalid(
            "duplicate-field",
            "a field twice",
            file(r#"{"a":{"dtype":"U8","shape":[4],"shape":[4],"data_offsets":[0,4]}}"#, 4),
        ),
        header("duplicate-metadata", "the metadata twice", r#"{"__metadata__":{},"__metadata__":{}}"#),
        header("duplicate-metadata-key", "a key of the metadata twice", r#"{"__metadata__":{"k":"1","k":"2"}}"#),
        header("metadata-number", "metadata that is no string", r#"{"__metadata__":{"k":1}}"#),
        header("metadata-null", "metadata that is no object", r#"{"__metadata__":null}"#),
        header("metadata-nested", "metadata that is no string", r#"{"__metadata__":{"k":{"k":"v"}}}"#),
        invalid(
            "unknown-field",
            "a field that the format does not have",
            file(r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"strides":[1]}}"#, 4),
        ),
        invalid("missing-dtype", "no dtype", file(r#"{"a":{"shape":[4],"data_offsets":[0,4]}}"#, 4)),
        invalid("missing-shape", "no shape", file(r#"{"a":{"dtype":"U8","data_offsets":[0,4]}}"#, 4)),
        invalid("missing-offsets", "no data_offsets", file(r#"{"a":{"dtype":"U8","shape":[4]}}"#, 4)),
    ]
}

fn damaged_tensors() -> Vec<Case> {
    let one = |name, what, row: String, data_len| {
        single(name, what, Code::CheckpointInvalid, file(&format!("{{{row}}}"), data_len))
    };
    let two = |name, what, first: (u64, u64), second: (u64, u64), data_len: usize| {
        let row = |name, (begin, end): (u64, u64)| tensor(name, "U8", &format!("[{}]", end - begin), begin, end);
        one(name, what, [row("a", first), row("b", second)].join(","), data_len)
    };
    let named = |file_name, what, name: &str| {
        single(file_name, what, Code::BadTensorName, file(&format!("{{{}}}", tensor(name, "U8", "[4]", 0, 4)), 4))
    };
    vec![
        one("truncated", "the last byte is missing", tensor("a", "U8", "[4]", 0, 4), 3),
        one("truncated-all", "all of the data is missing", tensor("a", "U8", "[4]", 0, 4), 0),
        one("trailing-byte", "a byte behind the last tensor", tensor("a", "U8", "[4]", 0, 4), 5),
        one("dtype-unknown", "a dtype that the format does not have", tensor("a", "U128", "[4]", 0, 64), 64),
        one("dtype-lower-case", "a dtype in lower case", tensor("a", "f32", "[1]", 0, 4), 4),
        one(
            "dtype-number",
            "a dtype that is no string",
            r#""a":{"dtype":8,"shape":[4],"data_offsets":[0,4]}"#.into(),
            4,
        ),
        one("shape-negative", "a negative extent", tensor("a", "U8", "[-4]", 0, 4), 4),
        one("shape-float", "an extent that is no integer", tensor("a", "U8", "[4.0]", 0, 4), 4),
        one("shape-2-64", "an extent of 2^64", tensor("a", "U8", "[18446744073709551616]", 0, 4), 4),
        one(
            "shape-overflow",
            "extents whose product overflows to 0",
            tensor("a", "U8", "[4294967296,4294967296]", 0, 0),
            0,
        ),
        one(
            "shape-bits-overflow",
            "a size in bits that overflows",
            tensor("a", "F64", "[288230376151711744]", 0, 0),
            0,
        ),
        one("shape-2-53", "2^53 bytes", tensor("a", "U8", "[9007199254740992]", 0, 9_007_199_254_740_992), 4),
        one("shape-65", "65 dimensions", tensor("a", "U8", &format!("[1{}]", ",1".repeat(64)), 0, 1), 1),
        one("shape-string", "a shape that is no list", tensor("a", "U8", "\"4\"", 0, 4), 4),
        one("sub-byte-odd", "three 4-bit elements", tensor("a", "F4", "[3]", 0, 2), 2),
        one("sub-byte-rounded-up", "three 6-bit elements in 3 bytes", tensor("a", "F6_E2M3", "[3]", 0, 3), 3),
        one("offsets-one", "one offset", r#""a":{"dtype":"U8","shape":[4],"data_offsets":[4]}"#.into(), 4),
        one("offsets-three", "three offsets", r#""a":{"dtype":"U8","shape":[4],"data_offsets":[0,2,4]}"#.into(), 4),
        one("offsets-reversed", "the end before the beginning", tensor("a", "U8", "[4]", 4, 0), 4),
        one("offsets-outside", "offsets behind the file's end", tensor("a", "U8", "[4]", 4, 8), 4),
        one("offsets-max", "offsets near 2^64", tensor("a", "U8", "[4]", u64::MAX - 4, u64::MAX), 4),
        one(
            "offsets-negative",
            "a negative offset",
            r#""a":{"dtype":"U8","shape":[4],"data_offsets":[-4,0]}"#.into(),
            4,
        ),
        one("size-mismatch", "offsets that do not fit dtype and shape", tensor("a", "F32", "[4]", 0, 4), 4),
        one("hole-first", "bytes before the first tensor", tensor("a", "U8", "[4]", 1, 5), 5),
        two("hole-between", "bytes between two tensors", (0, 4), (5, 8), 8),
        two("overlap", "tensors that share bytes", (0, 4), (3, 8), 8),
        two("overlap-whole", "tensors that are the same bytes", (0, 4), (0, 4), 4),
        two("overlap-inside", "a tensor inside another", (0, 8), (2, 4), 8),
        two("empty-inside", "a tensor without bytes inside another", (0, 8), (4, 4), 8),
        one("name-surrogate", "half of a surrogate pair in a name", tensor("\\ud800", "U8", "[4]", 0, 4), 4),
        named("name-empty", "an empty name", ""),
        named("name-newline", "a newline in a name", "a\\nb"),
        named("name-nul", "a NUL in a name", "a\\u0000b"),
        named("name-escape", "a terminal's escape sequence in a name", "\\u001b[2J"),
        named("name-delete", "U+007F in a name", "a\u{7f}"),
        named("name-c1", "U+0085 in a name", "a\u{85}"),
        named("name-4097", "a name of 4,097 bytes", &"n".repeat(4097)),
        named("pad-word", "a reserved name that is no filler's", "__pad__.weight"),
        named("pad-no-number", "a reserved name that is no filler's", "__pad__."),
        single(
            "pad-f32",
            "a filler's name, but not U8",
            Code::BadTensorName,
            file(&format!("{{{}}}", tensor("__pad__.0", "F32", "[1]", 0, 4)), 4),
        ),
    ]
}

fn folder(name: &str, what: &str, code: impl Into<Option<Code>>, files: &[(&str, Vec<u8>)]) -> Case {
    let files = files.iter().map(|(file, bytes)| (format!("{name}/{file}"), bytes.clone())).collect();
    Case { path: name.into(), what: what.into(), code: code.into(), files }
}

fn damaged_folders() -> Vec<Case> {
    const INDEX: &str = "model.safetensors.index.json";
    let shard = |name| file(&format!("{{{}}}", tensor(name, "U8", "[4]", 0, 4)), 4);
    let index = |name, what, code, json: &str| {
        folder(name, what, code, &[(INDEX, json.into()), ("1.safetensors", shard("a")), ("2.safetensors", shard("b"))])
    };
    let bad_index = |name, what, json: &str| index(name, what, Code::CheckpointInvalid, json);
    let config = |name, what, json: &str| {
        let files = [("config.json", json.into()), ("model.safetensors", shard("a"))];
        folder(name, what, Code::CheckpointInvalid, &files)
    };
    let good = r#"{"weight_map":{"a":"1.safetensors","b":"2.safetensors"}}"#;
    vec![
        folder("no-tensors", "no safetensors file", Code::CheckpointInvalid, &[("pytorch_model.bin", vec![0x80, 2])]),
        folder(
            "same-tensor-twice",
            "no index, and a tensor in two files",
            Code::CheckpointInvalid,
            &[("1.safetensors", shard("a")), ("2.safetensors", shard("a"))],
        ),
        folder(
            "folder-as-file",
            "a folder with a file's name",
            Code::CheckpointInvalid,
            &[("model.safetensors/inner.safetensors", shard("a"))],
        ),
        folder(
            "several-indexes",
            "two indexes",
            Code::CheckpointInvalid,
            &[(INDEX, good.into()), ("other.safetensors.index.json", good.into()), ("1.safetensors", shard("a"))],
        ),
        bad_index(
            "index-missing-file",
            "a file that is not there",
            r#"{"weight_map":{"a":"1.safetensors","b":"2.safetensors","c":"3.safetensors"}}"#,
        ),
        bad_index(
            "index-missing-tensor",
            "a tensor that is in no file",
            r#"{"weight_map":{"a":"1.safetensors","b":"2.safetensors","c":"2.safetensors"}}"#,
        ),
        bad_index("index-wrong-file", "files swapped", r#"{"weight_map":{"a":"2.safetensors","b":"1.safetensors"}}"#),
        folder(
            "index-unlisted-tensor",
            "a tensor of a listed file is not listed",
            Code::CheckpointInvalid,
            &[
                (INDEX, br#"{"weight_map":{"a":"1.safetensors"}}"#.to_vec()),
                (
                    "1.safetensors",
                    file(&format!("{{{},{}}}", tensor("a", "U8", "[4]", 0, 4), tensor("b", "U8", "[4]", 4, 8)), 8),
                ),
            ],
        ),
        bad_index(
            "index-duplicate-tensor",
            "a tensor listed twice",
            r#"{"weight_map":{"a":"1.safetensors","b":"2.safetensors","a":"2.safetensors"}}"#,
        ),
        bad_index(
            "index-duplicate-map",
            "two maps",
            r#"{"weight_map":{"a":"1.safetensors"},"weight_map":{"b":"2.safetensors"}}"#,
        ),
        bad_index("index-no-map", "no map", r#"{"metadata":{"total_size":8}}"#),
        bad_index("index-empty-map", "an empty map", r#"{"weight_map":{}}"#),
        bad_index("index-not-json", "no JSON", "weight_map"),
        bad_index("index-nested", "20,000 lists in each other", &format!(r#"{{"metadata":{}"#, "[".repeat(20_000))),
        bad_index("index-parent", "a file outside, by `..`", r#"{"weight_map":{"a":"../scalar.safetensors"}}"#),
        bad_index("index-absolute", "a file outside, by its full path", r#"{"weight_map":{"a":"/etc/passwd"}}"#),
        bad_index("index-subfolder", "a file in a folder", r#"{"weight_map":{"a":"./1.safetensors"}}"#),
        bad_index("index-no-name", "an empty file name", r#"{"weight_map":{"a":""}}"#),
        bad_index("index-nul-name", "a NUL in a file name", r#"{"weight_map":{"a":"1.safetensors\u0000"}}"#),
        index(
            "index-bad-tensor-name",
            "a newline in a name",
            Code::BadTensorName,
            r#"{"weight_map":{"a\n":"1.safetensors"}}"#,
        ),
        config("config-not-json", "config.json breaks off", r#"{"hidden_size": 64,"#),
        config("config-array", "config.json is a list", "[64]"),
        config(
            "config-nested",
            "config.json with 20,000 lists in each other",
            &format!(r#"{{"a":{}"#, "[".repeat(20_000)),
        ),
    ]
}

fn odd_but_valid() -> Vec<Case> {
    let valid = |name, what, rows: &[String], data_len| {
        single(name, what, None, file(&format!("{{{}}}", rows.join(",")), data_len))
    };
    let mut end = 0;
    let every_dtype: Vec<String> = Dtype::ALL
        .iter()
        .map(|dtype| {
            // Eight elements have as many bytes as one has bits.
            let begin = end;
            end += dtype.bits();
            tensor(&format!("t.{dtype}"), dtype.as_str(), "[4,2]", begin, end)
        })
        .collect();
    let shard = |name| file(&format!("{{{}}}", tensor(name, "U8", "[4]", 0, 4)), 4);
    vec![
        valid("scalar", "a tensor without dimensions", &[tensor("a", "F32", "[]", 0, 4)], 4),
        valid(
            "zero-size",
            "tensors without bytes at the beginning, between others, and at the end",
            &[
                tensor("a", "F32", "[0]", 0, 0),
                tensor("b", "U8", "[4]", 0, 4),
                tensor("c", "F32", "[3,0,2]", 4, 4),
                tensor("d", "U8", "[4]", 4, 8),
                tensor("e", "F4", "[0]", 8, 8),
            ],
            8,
        ),
        single("nothing", "no tensor", None, file("{}", 0)),
        single("padded", "padded with spaces", None, file("{}      ", 0)),
        valid("every-dtype", "all element types", &every_dtype, end as usize),
        valid(
            "odd-names",
            "names that are no file names, but only names",
            &[
                tensor("../../etc/passwd", "U8", "[1]", 0, 1),
                tensor("/", "U8", "[1]", 1, 2),
                tensor("a b", "U8", "[1]", 2, 3),
                tensor("\\\"é\\\\", "U8", "[1]", 3, 4),
                tensor("__pad__", "U8", "[1]", 4, 5),
            ],
            5,
        ),
        valid("name-4096", "a name of 4,096 bytes", &[tensor(&"n".repeat(4096), "U8", "[1]", 0, 1)], 1),
        valid(
            "fillers",
            "filler tensors, which are left out",
            &[
                tensor("__pad__.0", "U8", "[3]", 0, 3),
                tensor("a", "U8", "[1]", 3, 4),
                tensor("__pad__.1", "U8", "[4]", 4, 8),
            ],
            8,
        ),
        valid(
            "unsorted",
            "tensors in another order than their bytes, at odd offsets",
            &[tensor("b", "F32", "[2]", 1, 9), tensor("a", "U8", "[1]", 0, 1)],
            9,
        ),
        folder(
            "index-passes-over",
            "a file that the index does not name, and hidden files",
            None,
            &[
                ("model.safetensors.index.json", br#"{"metadata":{},"weight_map":{"a":"1.safetensors"}}"#.to_vec()),
                ("1.safetensors", shard("a")),
                ("consolidated.safetensors", shard("a")),
                (".2.safetensors", vec![1]),
                (".model.safetensors.index.json", vec![1]),
            ],
        ),
        folder(
            "config-python-numbers",
            "config.json with Infinity and NaN, as Python writes them",
            None,
            &[("config.json", br#"{"limit":[0.0,Infinity],"x":NaN}"#.to_vec()), ("model.safetensors", shard("a"))],
        ),
    ]
}

fn committed() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/hostile/checkpoints")
}

/// Everything in the folder, by its path there.
fn made() -> BTreeMap<String, Vec<u8>> {
    let cases = cases();
    let code = |case: &Case| case.code.map(Code::as_str);
    let mut readme = String::from(README_HEAD);
    for case in &cases {
        let opens = code(case).map_or("opens".into(), |code| format!("`{code}`"));
        readme.push_str(&format!("| `{}` | {} | {opens} |\n", case.path, case.what));
    }
    let rows: Vec<_> = cases
        .iter()
        .map(|case| serde_json::json!({"path": case.path, "what": case.what, "code": code(case)}))
        .collect();
    let list = serde_json::to_string_pretty(&rows).expect("a list of strings is JSON") + "\n";
    let mut made = BTreeMap::from([
        (".gitattributes".into(), b"* -text\n".to_vec()),
        ("README.md".into(), readme.into_bytes()),
        ("cases.json".into(), list.into_bytes()),
    ]);
    for (path, bytes) in cases.into_iter().flat_map(|case| case.files) {
        assert!(made.insert(path.clone(), bytes).is_none(), "{path} is made twice");
    }
    made
}

const README_HEAD: &str = "\
# Hostile checkpoints

Small checkpoints that are damaged, lie or try to get somewhere they must not, and some that only look so. Opening one
gives the error code of the last column, with exit status 1, quickly and in bounded memory; nothing panics and nothing
is written. `cases.json` lists the same cases for programs (`code` is null where the checkpoint opens).

All of it, this page included, is made by `host/src/checkpoint/hostile.rs`:
`WEIGHTMILL_BLESS=1 cargo test -p weightmill hostile` writes it, and the same test without the variable compares.
What is large (a header of 100 MB of spaces, 10^5 tensors), what a repository cannot hold (FIFOs, sockets, devices,
loops of links) and what takes time (files that grow or shrink) is made in the unit tests beside it.

| file or folder | what is odd | opening it |
| --- | --- | --- |
";

fn files_below(folder: &Path, prefix: &str, found: &mut BTreeMap<String, Vec<u8>>) {
    for item in std::fs::read_dir(folder).unwrap() {
        let item = item.unwrap();
        let name = format!("{prefix}{}", item.file_name().into_string().unwrap());
        if item.file_type().unwrap().is_dir() {
            files_below(&item.path(), &format!("{name}/"), found);
        } else {
            found.insert(name, std::fs::read(item.path()).unwrap());
        }
    }
}

#[test]
fn what_is_committed_is_what_is_made() {
    let (made, root) = (made(), committed());
    if std::env::var_os("WEIGHTMILL_BLESS").is_some() {
        let _ = std::fs::remove_dir_all(&root);
        for (path, bytes) in &made {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        }
    }
    let mut found = BTreeMap::new();
    files_below(&root, "", &mut found);
    assert_eq!(found.keys().collect::<Vec<_>>(), made.keys().collect::<Vec<_>>());
    for (path, bytes) in &made {
        assert!(&found[path] == bytes, "{path} differs; see hostile.rs");
    }
}

#[test]
fn every_case_gives_its_code() {
    let folder = tempfile::tempdir().unwrap();
    for case in cases() {
        for (path, bytes) in &case.files {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        }
    }
    for case in cases() {
        let opened = Checkpoint::open(&folder.path().join(&case.path));
        let code = opened.as_ref().err().map(|e| e.code());
        assert_eq!(code, case.code, "{}: {:?}", case.path, opened.as_ref().err());
        if let Err(error) = opened {
            assert!(!error.message().contains(char::is_control), "{}: {error}", case.path);
            assert!(error.message().len() < 1000, "{}: {error}", case.path);
            assert!(error.message().contains(folder.path().to_str().unwrap()), "{}: {error}", case.path);
        }
    }
}

/// Whatever opens here opens in the stock reader too, and says the same.
#[test]
fn the_stock_reader_agrees_with_what_opens() {
    let folder = tempfile::tempdir().unwrap();
    for case in cases().into_iter().filter(|c| c.code.is_none() && c.path.ends_with(".safetensors")) {
        let path = folder.path().join(&case.path);
        let bytes = &case.files[0].1;
        std::fs::write(&path, bytes).unwrap();
        let ours = Checkpoint::open(&path).unwrap();
        let stock = safetensors::SafeTensors::deserialize(bytes).unwrap();
        let fillers = stock.names().iter().filter(|name| name.starts_with("__pad__.")).count();
        assert_eq!(ours.tensors().len() + fillers, stock.len(), "{}", case.path);
        for (name, tensor) in ours.tensors() {
            let view = stock.tensor(name.as_str()).unwrap();
            let mut bytes = vec![0; tensor.tensor.len_bytes() as usize];
            ours.files()[tensor.file].read_exact_at(&mut bytes, tensor.offset).unwrap();
            assert_eq!((view.data(), view.dtype().to_string()), (&bytes[..], tensor.tensor.dtype().to_string()));
        }
    }
}
