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
    // Rows of 4,096 elements, a multiple of 3 × 128 × 8 of them, at 2 bytes.
    let rows = (bytes / 8192).next_multiple_of(3 * 1024).max(3 * 1024);
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
        stack.extend(named(&[&format!("e.{e}.w1"), &format!("e.{e}.w3")], bf16, &[width, 4096]));
        stack.extend(named(&[&format!("e.{e}.w2")], bf16, &[4096, width]));
    }
    let quantised = |scheme: &str, scale: Vec<u64>| Case {
        module: "fp8-dequantize",
        variant: if scheme == "block" { "block" } else { "tensor" },
        inputs: vec![("t".into(), f8, vec![2 * rows, 4096]), ("s".into(), f32, scale)],
        roles: ("w = \"t\", scale = \"s\"", "w = \"o\""),
        params: format!("scheme = \"{scheme}\", dtype = \"BF16\""),
    };
    let to_fp8 = |variant, scheme: &str| Case {
        roles: ("w = \"t\"", "w = \"o\", scale = \"os\""),
        ..one("fp8-quantize", variant, bf16, vec![rows, 4096], &format!("scheme = \"{scheme}\""))
    };
    let packed = 4 * rows;
    vec![
        Case {
            roles: ("qkv = \"t\"", "qkv = \"o\""),
            ..one(
                "qkv-regroup",
                "",
                bf16,
                vec![rows, 4096],
                &format!("groups = {}, q_per_group = 1, head_dim = 128", rows / 384),
            )
        },
        Case {
            module: "qkv-fuse",
            variant: "",
            inputs: named(&["q", "k", "v"], bf16, &[third, 4096]),
            roles: ("q = \"q\", k = \"k\", v = \"v\"", "qkv = \"o\""),
            params: head(third),
        },
        Case {
            roles: ("qkv = \"t\"", "q = \"q\", k = \"k\", v = \"v\""),
            ..one("qkv-split", "", bf16, vec![rows, 4096], &head(third))
        },
        one(
            "rope-permute",
            "",
            bf16,
            vec![rows, 4096],
            &format!("num_heads = {}, head_dim = 128, to = \"interleaved\"", rows / 128),
        ),
        Case {
            module: "gate-up",
            variant: "interleave",
            inputs: named(&["t"], bf16, &[rows, 4096]),
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
            inputs: named(&["t.0", "t.1", "t.2"], bf16, &[third, 4096]),
            roles: ("w = \"t.{*i}\"", "w = \"o\""),
            params: "dim = 0".into(),
        },
        one("slice", "", bf16, vec![rows, 4096], &format!("dim = 0, start = 5, stop = {}", rows - 3)),
        one("permute", "transpose", bf16, vec![rows, 4096], "dims = [1, 0]"),
        one("tp-shard", "pad", bf16, vec![rows - 7, 4096], "dim = 0, pad_to = 64"),
        one(
            "pad-head",
            "columns",
            bf16,
            vec![rows, 4096],
            "num_heads = 32, from = 128, to = 160, rope = false, dim = 1",
        ),
        one("cast", "F32 to BF16", f32, vec![rows / 2, 4096], "dtype = \"BF16\""),
        one("cast", "F32 to F16", f32, vec![rows / 2, 4096], "dtype = \"F16\""),
        one("cast", "BF16 to F32", bf16, vec![rows, 4096], "dtype = \"F32\""),
        to_fp8("tensor", "tensor"),
        to_fp8("channel", "channel"),
        to_fp8("block", "block"),
        quantised("tensor", vec![1]),
        quantised("block", vec![(2 * rows).div_ceil(128), 32]),
        Case {
            module: "fp8-fnuz",
            variant: "",
            inputs: vec![("t".into(), f8, vec![2 * rows, 4096]), ("s".into(), f32, vec![1])],
            roles: ("w = \"t\", scale = \"s\"", "w = \"o\", scale = \"os\""),
            params: String::new(),
        },
        Case {
            module: "mxfp4-dequantize",
            variant: "",
            inputs: vec![
                ("b".into(), Dtype::U8, vec![2 * rows, 256, 16]),
                // Seeded U8 stays below 128, so no scale is the NaN, 255.
                ("s".into(), Dtype::U8, vec![2 * rows, 256]),
            ],
            roles: ("blocks = \"b\", scales = \"s\"", "w = \"o\""),
            params: "dtype = \"BF16\"".into(),
        },
        Case {
            module: "gptq-dequantize",
            variant: "",
            inputs: vec![
                ("q".into(), Dtype::I32, vec![packed / 8, 4096 / 2]),
                ("z".into(), Dtype::I32, vec![packed / 128, 4096 / 16]),
                ("s".into(), Dtype::F16, vec![packed / 128, 4096 / 2]),
            ],
            roles: ("qweight = \"q\", qzeros = \"z\", scales = \"s\"", "w = \"o\""),
            params: "bits = 4, group_size = 128, v1 = true, dtype = \"BF16\"".into(),
        },
        Case {
            module: "awq-dequantize",
            variant: "",
            inputs: vec![
                ("q".into(), Dtype::I32, vec![packed, 256]),
                ("z".into(), Dtype::I32, vec![packed / 128, 256]),
                ("s".into(), Dtype::F16, vec![packed / 128, 2048]),
            ],
            roles: ("qweight = \"q\", qzeros = \"z\", scales = \"s\"", "w = \"o\""),
            params: "bits = 4, group_size = 128, dtype = \"BF16\"".into(),
        },
        Case {
            module: "weight-norm-fold",
            variant: "",
            inputs: vec![("g".into(), f32, vec![rows / 2]), ("v".into(), f32, vec![rows / 2, 4096])],
            roles: ("g = \"g\", v = \"v\"", "w = \"o\""),
            params: "dim = 0".into(),
        },
        Case {
            module: "lora-merge",
            variant: "rank 8",
            inputs: vec![
                ("w".into(), bf16, vec![rows, 4096]),
                ("a".into(), f32, vec![8, 4096]),
                ("b".into(), f32, vec![rows, 8]),
            ],
            roles: ("w = \"w\", a = \"a\", b = \"b\"", "w = \"o\""),
            params: "scale = 0.5".into(),
        },
    ]
}
