//! What is measured: a recipe step for every shipped module, with inputs of a
//! given size.

use crate::tensor::Dtype;

/// A transform to measure.
pub(super) struct Case {
    /// The shipped module.
    pub(super) module: &'static str,
    /// What stands behind the module's name in the table.
    pub(super) variant: &'static str,
    /// The inputs: name, dtype, shape.
    pub(super) inputs: Vec<(String, Dtype, Vec<u64>)>,
    /// Roles and patterns, as TOML.
    pub(super) roles: (&'static str, &'static str),
    /// Parameters, as TOML.
    pub(super) params: String,
}

impl Case {
    /// The module, and which of its forms.
    pub(super) fn name(&self) -> String {
        match self.variant {
            "" => self.module.to_string(),
            variant => format!("{}, {variant}", self.module),
        }
    }

    /// The recipe.
    pub(super) fn recipe(&self) -> String {
        let (inputs, outputs) = self.roles;
        format!(
            "recipe = 1\nname = \"bench\"\n[[step]]\nmodule = \"{}\"\ninputs = {{ {inputs} }}\noutputs = {{ {outputs} }}\nparams = {{ {} }}\n",
            self.module, self.params
        )
    }
}

/// A case for every module; large inputs have about `bytes`.
pub(super) fn all(bytes: u64) -> Vec<Case> {
    const COLUMNS: u64 = 4096;
    sized(bytes / (2 * COLUMNS), COLUMNS)
}

/// A case for every module, with about so many `rows`, and `columns`, a
/// multiple of 128.
pub(super) fn sized(rows: u64, columns: u64) -> Vec<Case> {
    // A multiple of 3 × 128 × 8.
    let rows = rows.next_multiple_of(3 * 1024).max(3 * 1024);
    let one = |module, variant, dtype, shape: Vec<u64>, params: &str| Case {
        module,
        variant,
        inputs: vec![("t".into(), dtype, shape)],
        roles: ("w = \"t\"", "w = \"o\""),
        params: params.into(),
    };
    let (bf16, f32, f8) = (Dtype::BF16, Dtype::F32, Dtype::F8_E4M3);
    let third = rows / 3;
    let head = |what: u64| format!("num_heads = {}, num_kv_heads = {}, head_dim = 128", what / 128, what / 128);
    let experts = 8;
    let width = third / experts;
    let named = |names: &[&str], dtype: Dtype, shape: &[u64]| -> Vec<(String, Dtype, Vec<u64>)> {
        names.iter().map(|n| ((*n).to_string(), dtype, shape.to_vec())).collect()
    };
    let mut stack = Vec::new();
    for e in 0..experts {
        stack.extend(named(&[&format!("e.{e}.w1"), &format!("e.{e}.w3")], bf16, &[width, columns]));
        stack.extend(named(&[&format!("e.{e}.w2")], bf16, &[columns, width]));
    }
    let quantised = |scheme: &str, scale: Vec<u64>| Case {
        module: "fp8-dequantize",
        variant: if scheme == "block" { "block" } else { "tensor" },
        inputs: vec![("t".into(), f8, vec![2 * rows, columns]), ("s".into(), f32, scale)],
        roles: ("w = \"t\", scale = \"s\"", "w = \"o\""),
        params: format!("scheme = \"{scheme}\", dtype = \"BF16\""),
    };
    let to_fp8 = |variant, scheme: &str| Case {
        roles: ("w = \"t\"", "w = \"o\", scale = \"os\""),
        ..one("fp8-quantize", variant, bf16, vec![rows, columns], &format!("scheme = \"{scheme}\""))
    };
    let packed = 4 * rows;
    vec![
        Case {
            roles: ("qkv = \"t\"", "qkv = \"o\""),
            ..one(
                "qkv-regroup",
                "",
                bf16,
                vec![rows, columns],
                &format!("groups = {}, q_per_group = 1, head_dim = 128", rows / 384),
            )
        },
        Case {
            module: "qkv-fuse",
            variant: "",
            inputs: named(&["q", "k", "v"], bf16, &[third, columns]),
            roles: ("q = \"q\", k = \"k\", v = \"v\"", "qkv = \"o\""),
            params: head(third),
        },
        Case {
            roles: ("qkv = \"t\"", "q = \"q\", k = \"k\", v = \"v\""),
            ..one("qkv-split", "", bf16, vec![rows, columns], &head(third))
        },
        one(
            "rope-permute",
            "",
            bf16,
            vec![rows, columns],
            &format!("num_heads = {}, head_dim = 128, to = \"interleaved\"", rows / 128),
        ),
        Case {
            module: "gate-up",
            variant: "interleave",
            inputs: named(&["t"], bf16, &[rows, columns]),
            roles: ("gate_up = \"t\"", "gate_up = \"o\""),
            params: "op = \"interleave\"".into(),
        },
        Case {
            module: "moe-stack",
            variant: "",
            inputs: stack,
            roles: ("w1 = \"e.{*e}.w1\", w3 = \"e.{*e}.w3\", w2 = \"e.{*e}.w2\"", "w13 = \"w13\", w2 = \"w2\""),
            params: String::new(),
        },
        Case {
            module: "concat",
            variant: "",
            inputs: named(&["t.0", "t.1", "t.2"], bf16, &[third, columns]),
            roles: ("w = \"t.{*i}\"", "w = \"o\""),
            params: "dim = 0".into(),
        },
        one("slice", "", bf16, vec![rows, columns], &format!("dim = 0, start = 5, stop = {}", rows - 3)),
        one("permute", "transpose", bf16, vec![rows, columns], "dims = [1, 0]"),
        one("tp-shard", "pad", bf16, vec![rows - 7, columns], "dim = 0, pad_to = 64"),
        one(
            "pad-head",
            "columns",
            bf16,
            vec![rows, columns],
            &format!("num_heads = {}, from = 128, to = 160, rope = false, dim = 1", columns / 128),
        ),
        one("cast", "F32 to BF16", f32, vec![rows / 2, columns], "dtype = \"BF16\""),
        one("cast", "F32 to F16", f32, vec![rows / 2, columns], "dtype = \"F16\""),
        one("cast", "BF16 to F32", bf16, vec![rows, columns], "dtype = \"F32\""),
        to_fp8("tensor", "tensor"),
        to_fp8("channel", "channel"),
        to_fp8("block", "block"),
        quantised("tensor", vec![1]),
        quantised("block", vec![(2 * rows).div_ceil(128), columns / 128]),
        Case {
            module: "fp8-fnuz",
            variant: "",
            inputs: vec![("t".into(), f8, vec![2 * rows, columns]), ("s".into(), f32, vec![1])],
            roles: ("w = \"t\", scale = \"s\"", "w = \"o\", scale = \"os\""),
            params: String::new(),
        },
        Case {
            module: "mxfp4-dequantize",
            variant: "",
            inputs: vec![
                ("b".into(), Dtype::U8, vec![2 * rows, columns / 16, 16]),
                // Seeded U8 stays below 128, so no scale is the NaN, 255.
                ("s".into(), Dtype::U8, vec![2 * rows, columns / 16]),
            ],
            roles: ("blocks = \"b\", scales = \"s\"", "w = \"o\""),
            params: "dtype = \"BF16\"".into(),
        },
        Case {
            module: "gptq-dequantize",
            variant: "",
            inputs: vec![
                ("q".into(), Dtype::I32, vec![packed / 8, columns / 2]),
                ("z".into(), Dtype::I32, vec![packed / 128, columns / 16]),
                ("s".into(), Dtype::F16, vec![packed / 128, columns / 2]),
            ],
            roles: ("qweight = \"q\", qzeros = \"z\", scales = \"s\"", "w = \"o\""),
            params: "bits = 4, group_size = 128, v1 = true, dtype = \"BF16\"".into(),
        },
        Case {
            module: "awq-dequantize",
            variant: "",
            inputs: vec![
                ("q".into(), Dtype::I32, vec![packed, columns / 16]),
                ("z".into(), Dtype::I32, vec![packed / 128, columns / 16]),
                ("s".into(), Dtype::F16, vec![packed / 128, columns / 2]),
            ],
            roles: ("qweight = \"q\", qzeros = \"z\", scales = \"s\"", "w = \"o\""),
            params: "bits = 4, group_size = 128, dtype = \"BF16\"".into(),
        },
        Case {
            module: "weight-norm-fold",
            variant: "",
            inputs: vec![("g".into(), f32, vec![rows / 2]), ("v".into(), f32, vec![rows / 2, columns])],
            roles: ("g = \"g\", v = \"v\"", "w = \"o\""),
            params: "dim = 0".into(),
        },
        Case {
            module: "lora-merge",
            variant: "rank 8",
            inputs: vec![
                ("w".into(), bf16, vec![rows, columns]),
                ("a".into(), f32, vec![8, columns]),
                ("b".into(), f32, vec![rows, 8]),
            ],
            roles: ("w = \"w\", a = \"a\", b = \"b\"", "w = \"o\""),
            params: "scale = 0.5".into(),
        },
    ]
}
