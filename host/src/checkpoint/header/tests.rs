use super::*;

fn parsed(json: &str, data_len: u64) -> Result<Header> {
    parse(PREFIX_BYTES as u64 + json.len() as u64 + data_len, json.as_bytes())
}

/// Refused with this code, and a message that holds `part`.
fn refused(json: &str, data_len: u64, code: Code, part: &str) {
    let error = parsed(json, data_len).expect_err(json);
    assert_eq!(error.code(), code, "{json}: {error}");
    assert!(error.message().contains(part), "{json}: {error}");
    assert!(!error.message().contains(char::is_control), "{json}: {error}");
}

fn tensor(name: &str, dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
}

#[test]
fn places_are_absolute() {
    let json = r#"{"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},
        "__metadata__":{"format":"pt"},"a":{"shape":[],"data_offsets":[0,4],"dtype":"F32"}}   "#;
    let header = parsed(json, 16).unwrap();
    let start = 8 + json.len() as u64;
    assert_eq!(header.data_start, start);
    let rows: Vec<_> = header.tensors.iter().map(|(n, p)| (n.as_str(), p.tensor.to_string(), p.offset)).collect();
    assert_eq!(rows, [("a", "F32 []".to_string(), start), ("b", "BF16 [2, 3]".to_string(), start + 4)]);
}

#[test]
fn every_dtype_is_known() {
    for dtype in Dtype::ALL {
        let len = dtype.bits();
        let json = format!("{{{}}}", tensor("t", dtype.as_str(), "[8]", 0, len));
        let header = parsed(&json, len).unwrap();
        assert_eq!(header.tensors["t"].tensor.dtype(), *dtype);
    }
}

#[test]
fn tensors_without_bytes_sit_on_boundaries() {
    let at = |place| {
        let rows =
            [tensor("a", "U8", "[4]", 0, 4), tensor("e", "U8", "[0]", place, place), tensor("z", "U8", "[2]", 4, 6)];
        parsed(&format!("{{{}}}", rows.join(",")), 6)
    };
    for boundary in [0, 4, 6] {
        assert_eq!(at(boundary).unwrap().tensors["e"].tensor.len_bytes(), 0);
    }
    for inside in [1, 3, 5] {
        let error = at(inside).unwrap_err();
        assert_eq!(error.code(), Code::CheckpointInvalid);
        assert!(error.message().contains("overlap"), "{error}");
    }
}

#[test]
fn fillers_are_left_out_and_only_fillers() {
    let json = format!("{{{},{}}}", tensor("__pad__.12", "U8", "[3]", 0, 3), tensor("a", "U8", "[1]", 3, 4));
    let header = parsed(&json, 4).unwrap();
    assert_eq!((header.tensors.len(), header.filler_bytes), (1, 3));
    for (name, dtype) in [("__pad__.0", "I8"), ("__pad__.", "U8"), ("__pad__.x", "U8"), ("__pad__.1.w", "U8")] {
        refused(&format!("{{{}}}", tensor(name, dtype, "[1]", 0, 1)), 1, Code::BadTensorName, "__pad__.");
    }
    let twice = format!("{{{},{}}}", tensor("__pad__.0", "U8", "[1]", 0, 1), tensor("__pad__.0", "U8", "[1]", 1, 2));
    refused(&twice, 2, Code::CheckpointInvalid, "twice");
}

#[test]
fn messages_name_the_tensor_and_the_numbers() {
    let cases: &[(String, u64, &str)] = &[
        (tensor("a", "F32", "[2]", 0, 4), 4, "'a' has 4 bytes (0 to 4), but F32 [2] takes 8"),
        (tensor("a", "f32", "[1]", 0, 4), 4, "'a' has the unknown dtype 'f32'"),
        (tensor("a", "F4", "[3]", 0, 2), 2, "'a' is F4 [3]: not a whole number of bytes"),
        (tensor("a", "U8", "[4294967296,4294967296]", 0, 0), 0, "'a' is U8"),
        (tensor("a", "U8", "[4]", 0, 4), 3, "'a' has the bytes 0 to 4 of the data, which has 3"),
        (tensor("a", "U8", "[4]", 4, 0), 4, "'a' has the bytes 4 to 0"),
        (tensor("a", "U8", "[4]", 0, 4), 5, "the tensors end at byte 4 of the data, but the file at 5"),
        (tensor("a", "U8", "[4]", 1, 5), 5, "bytes 0 to 1 of the data, before the tensor 'a'"),
        (tensor("a", "U8", "[-1]", 0, 4), 4, "'a': invalid value: integer `-1`"),
        (tensor("a", "U8", "[1.0]", 0, 4), 4, "'a': invalid type: floating point `1.0`"),
        (tensor("a", "U8", "[18446744073709551616]", 0, 4), 4, "'a': invalid type"),
        (tensor("a", "U8", &format!("[1{}]", ",1".repeat(64)), 0, 1), 1, "more than 64 numbers"),
        (r#""a":{"dtype":"U8","shape":[4],"data_offsets":[0,2,4]}"#.into(), 4, "more than 2 numbers"),
        (r#""a":{"dtype":"U8","shape":[4],"data_offsets":[0]}"#.into(), 4, "fewer than 2 numbers"),
        (r#""a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":0}"#.into(), 4, "'a': has the unknown field 'x'"),
        (r#""a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"shape":[4]}"#.into(), 4, "'a': has shape twice"),
        (r#""a":{"dtype":"U8","data_offsets":[0,4]}"#.into(), 4, "'a': missing field `shape`"),
        (r#""a":[0,4]"#.into(), 4, "'a': invalid type: sequence"),
        (r#""__metadata__":{"k":1}"#.into(), 0, "'__metadata__': invalid type: integer"),
        (r#""__metadata__":null"#.into(), 0, "'__metadata__': invalid type: null"),
        (r#""__metadata__":{"k":"","k":""}"#.into(), 0, "has 'k' twice"),
        (r#""__metadata__":{},"__metadata__":{}"#.into(), 0, "is there twice"),
        ([tensor("a", "U8", "[1]", 0, 1), tensor("\\u0061", "U8", "[1]", 1, 2)].join(","), 2, "'a' is there twice"),
        ([tensor("a", "U8", "[3]", 0, 3), tensor("b", "U8", "[3]", 2, 5)].join(","), 5, "'a' and 'b' overlap"),
        ([tensor("a", "U8", "[3]", 0, 3), tensor("b", "U8", "[3]", 0, 3)].join(","), 3, "'a' and 'b' overlap"),
        ([tensor("a", "U8", "[3]", 0, 3), tensor("b", "U8", "[1]", 4, 5)].join(","), 5, "bytes 3 to 4"),
    ];
    for (body, data_len, part) in cases {
        refused(&format!("{{{body}}}"), *data_len, Code::CheckpointInvalid, part);
    }
}

#[test]
fn only_one_object_padded_with_spaces() {
    assert!(parsed("{}   ", 0).is_ok());
    for (bad, part) in [
        ("", "not a JSON object"),
        ("    ", "not a JSON object"),
        (" {}", "not a JSON object"),
        ("{}\n", "not a JSON object"),
        ("{}\0", "not a JSON object"),
        ("[]", "not a JSON object"),
        ("{} {}", "trailing characters"),
        ("{\"a\"}", "line 1"),
    ] {
        refused(bad, 0, Code::CheckpointInvalid, part);
    }
    let error = parse(12, b"{\"\xff\"").unwrap_err();
    assert!(error.message().contains("wrong byte at 2"), "{error}");
}

#[test]
fn names_are_checked() {
    for name in ["", "a\\nb", "\\u0000", "\\u001b[2J", "\\u0085", &"x".repeat(4097)] {
        refused(&format!("{{{}}}", tensor(name, "U8", "[1]", 0, 1)), 1, Code::BadTensorName, "name");
    }
    refused(&format!("{{{}}}", tensor("\\ud800", "U8", "[1]", 0, 1)), 1, Code::CheckpointInvalid, "line 1");
}

#[test]
fn the_length_is_not_trusted() {
    assert_eq!(header_len(108, 100_u64.to_le_bytes()).unwrap(), 100);
    assert_eq!(header_len(1 << 40, (LIMIT_BYTES as u64).to_le_bytes()).unwrap(), LIMIT_BYTES);
    for (file_len, len) in [(107, 100), (0, 1), (1 << 40, LIMIT_BYTES as u64 + 1), (u64::MAX, 1 << 63), (9, u64::MAX)] {
        assert_eq!(header_len(file_len, len.to_le_bytes()).unwrap_err().code(), Code::CheckpointInvalid);
    }
    assert_eq!(parse(9, b"{}").unwrap_err().code(), Code::CheckpointInvalid);
}

#[test]
fn nesting_and_long_strings_cost_nothing_extra() {
    let deep = "[".repeat(1 << 20) + &"]".repeat(1 << 20);
    let objects = "{\"a\":".repeat(1 << 20) + "0" + &"}".repeat(1 << 20);
    let long = format!("\"{}\"", "y".repeat(1 << 20));
    for inner in [&deep, &objects, &long] {
        for body in [
            format!(r#""a":{inner}"#),
            format!(r#""__metadata__":{inner}"#),
            format!(r#""__metadata__":{{"k":{inner}}}"#),
            format!(r#""a":{{"dtype":{inner},"shape":[],"data_offsets":[0,1]}}"#),
            format!(r#""a":{{"dtype":"U8","shape":{inner},"data_offsets":[0,1]}}"#),
            format!(r#""a":{{"dtype":"U8","shape":[],"x":{inner},"data_offsets":[0,1]}}"#),
        ] {
            if inner == &long && body.contains("\"k\"") {
                assert!(parsed(&format!("{{{body}}}"), 0).is_ok());
                continue;
            }
            let error = parsed(&format!("{{{body}}}"), 1).unwrap_err();
            assert_eq!(error.code(), Code::CheckpointInvalid);
            assert!(error.message().len() < 1000, "{}", error.message().len());
        }
    }
}

#[test]
fn a_hundred_thousand_tensors_parse_quickly() {
    let count = 100_000;
    let rows: Vec<String> =
        (0..count).map(|i| tensor(&format!("model.layers.{i}.w"), "F16", "[2,1]", 4 * i, 4 * i + 4)).collect();
    let json = format!("{{{}}}", rows.join(","));
    let began = std::time::Instant::now();
    assert_eq!(parsed(&json, 4 * count).unwrap().tensors.len() as u64, count);
    assert!(began.elapsed().as_secs() < 5, "{:?}", began.elapsed());
    refused(&json, 4 * count - 1, Code::CheckpointInvalid, "model.layers.99999.w");
}

#[test]
fn a_hundred_megabytes_of_spaces_are_one_message() {
    let spaces = vec![b' '; LIMIT_BYTES];
    let error = parse(8 + spaces.len() as u64, &spaces).unwrap_err();
    assert_eq!(error.code(), Code::CheckpointInvalid);
    let mut padded = spaces;
    padded[..2].copy_from_slice(b"{}");
    assert!(parse(8 + padded.len() as u64, &padded).is_ok());
}
