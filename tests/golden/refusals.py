"""Cases that must be refused: every input code that a recipe and a checkpoint can provoke at build time.

`source_changed` needs a file that changes while it is read and `source_unavailable` an entry that outlived its source;
neither is a matter of data alone, so no case here has them.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from casefile import BF16, F8, F32, Case, CaseSet
from layout import EXPERT, add_experts

FUSE: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 2}
Q = {"qkv": "l.{i}.q"}
W = {"w": "l.{i}.q"}
REGROUP: dict[str, Any] = {"groups": 2, "q_per_group": 1, "head_dim": 2}
MOE = ({part: f"e.{{*e}}.{part}" for part in EXPERT}, {"w13": "w13", "w2": "w2"})


def two(c: Case) -> None:
    """The checkpoint of most refusals: two tensors of layer 0."""
    c.put("l.0.k", c.tensor("l.0.q", 12, 8))


def steps(cases: CaseSet) -> None:
    """What the steps and their parameters get wrong."""
    variants = [
        ("missing-input", "missing_input", "qkv-fuse", {p: f"l.{{i}}.{p}" for p in "qkv"}, {"qkv": "l.{i}.qkv"}, FUSE),
        ("nothing", "step_matched_nothing", "cast", {"w": "zzz.{i}"}, {"w": "zzz.{i}"}, {"dtype": "BF16"}),
        ("shape", "module_rejected_input", "qkv-regroup", Q, Q, REGROUP | {"groups": 5}),
        ("param", "bad_params", "qkv-regroup", Q, Q, {"grups": 2, "q_per_group": 1, "head_dim": 2}),
        ("param-missing", "bad_params", "qkv-regroup", Q, Q, {"groups": 2, "q_per_group": 1}),
        ("param-type", "bad_params", "qkv-regroup", Q, Q, REGROUP | {"groups": "two"}),
        ("param-order", "bad_params", "qkv-regroup", Q, Q, REGROUP | {"order": "qqv"}),
        ("param-bool", "bad_params", "qkv-regroup", Q, Q, REGROUP | {"kv_replication": 1}),
        ("param-zero", "bad_params", "qkv-regroup", Q, Q, REGROUP | {"groups": 0}),
        ("param-dtype", "bad_params", "cast", W, W, {"dtype": "F64"}),
        ("param-op", "bad_params", "gate-up", {"gate_up": "l.{i}.q"}, {"gate_up": "l.{i}.q"}, {"op": "fold"}),
        ("param-to", "bad_params", "rope-permute", W, W, {"num_heads": 2, "head_dim": 6, "to": "paired"}),
        ("duplicate", "duplicate_output", "cast", W, {"w": "l.0.k"}, {"dtype": "F32"}),
        ("config", "missing_config", "cast", W, W, {"dtype": "$config.nope"}),
        ("module", "module_not_found", "no-such-module", W, W, {}),
        ("module-file", "module_not_found", "./absent.wasm", W, W, {}),
        ("module-digest", "module_not_found", "sha256:" + "0" * 64, W, W, {}),
        ("output-name", "bad_tensor_name", "cast", W, {"w": "__pad__.{i}"}, {"dtype": "F32"}),
        ("capture-unknown", "recipe_invalid", "cast", W, {"w": "l.{j}.q"}, {"dtype": "F32"}),
    ]
    for name, code, module, inputs, outputs, params in variants:
        with cases.case(f"bad-{name}") as c:
            two(c)
            c.step(module, inputs, outputs, **params)
            c.refuse(code)
    with cases.case("bad-two-outputs") as c:
        two(c)
        for source in ("q", "k"):
            c.step("cast", {"w": f"l.{{i}}.{source}"}, {"w": "l.{i}.x"}, dtype="F32")
        c.refuse("duplicate_output")
    with cases.case("bad-applications-collide") as c:
        for i in range(2):
            c.tensor(f"l.{i}.w", 2)
        c.step("cast", {"w": "l.{i}.w"}, {"w": "w"}, dtype="F32")
        c.refuse("duplicate_output")
    with cases.case("bad-step-consumed") as c:
        two(c)
        for _ in range(2):
            c.step("cast", W, {"w": "l.{i}.x"}, dtype="F32")
        c.refuse("step_matched_nothing")
    with cases.case("bad-where-nothing") as c:
        two(c)
        c.same("cast", "w", "{p...}", dtype="F32", extra='where = { dtype = ["I8"] }\n')
        c.refuse("step_matched_nothing")


def lists(cases: CaseSet) -> None:
    """Lists that are not whole."""
    for name, gone, extra, code in (
        ("moe-uneven", ["e.2.w3"], "", "missing_input"),
        ("moe-gap", [f"e.2.{p}" for p in EXPERT], "", "missing_input"),
        ("moe-start", [f"e.0.{p}" for p in EXPERT], "", "missing_input"),
        ("moe-uneven-sparse", ["e.2.w3"], "sparse = true\n", "missing_input"),
        ("moe-count", [f"e.4.{p}" for p in EXPERT], "count = 5\n", "missing_input"),
    ):
        with cases.case(f"bad-{name}") as c:
            add_experts(c, 5, 2, 3)
            for tensor in gone:
                del c.inputs[tensor]
            c.step("moe-stack", *MOE, extra=extra)
            c.refuse(code)


def configs(cases: CaseSet) -> None:
    """Expressions over config.json that have no value."""
    for name, document, expression, code in (
        ("config-no-file", None, "$config.heads", "missing_config"),
        ("config-inexact", {"a": 7, "b": 2}, "$config.a / $config.b", "bad_params"),
        ("config-by-zero", {"a": 7, "b": 0}, "$config.a / $config.b", "bad_params"),
        ("config-type", {"a": "x", "b": 2}, "$config.a * $config.b", "bad_params"),
        ("config-deep", {"a": {"b": 2}}, "$config.a.c", "missing_config"),
    ):
        with cases.case(f"bad-{name}") as c:
            two(c)
            c.config = document
            c.same("qkv-regroup", "qkv", "l.{i}.q", **(REGROUP | {"groups": expression}))
            c.refuse(code)


CAST = '[[step]]\nmodule = "cast"\ninputs = { w = "a" }\noutputs = { w = "a" }\n'


def recipe_text(cases: CaseSet) -> None:
    """What stands in the recipe beside its steps."""
    variants = [
        ("field", "recipe_invalid", '[namez]\ndrop = ["a"]'),
        ("syntax", "recipe_invalid", "[names\ndrop = []"),
        ("step-field", "recipe_invalid", CAST.replace("outputs", "output")),
        ("where-field", "recipe_invalid", CAST + 'where = { dtypes = ["F32"] }'),
        ("unmatched-word", "recipe_invalid", '[names]\nunmatched = "ignore"'),
        ("rename-group", "recipe_invalid", '[names]\nrename = [["^(a)$", "$2"]]'),
        ("rename-regex", "recipe_invalid", '[names]\nrename = [["^(a$", "b"]]'),
        ("max-shard-text", "recipe_invalid", '[layout]\nmax_shard = "much"'),
        ("guard-number", "recipe_invalid", "[guards]\nranks = 2"),
        ("capture-syntax", "recipe_invalid", CAST.replace('"a"', '"a.{i"', 1)),
        ("date", "recipe_invalid", CAST + "params = { dtype = 1979-05-27 }"),
        ("integer", "recipe_invalid", CAST + "params = { dtype = 9007199254740993 }"),
        ("infinity", "recipe_invalid", CAST + "params = { dtype = inf }"),
        ("rename", "duplicate_output", '[names]\nrename = [["^a$", "b"]]'),
        ("rename-merge", "duplicate_output", '[names]\nrename = [["[ab]", "x"]]'),
        ("rename-pad", "bad_tensor_name", '[names]\nrename = [["^a$", "__pad__.a"]]'),
        ("tie", "tie_invalid", '[[tie]]\nalias = "x"\nof = "y"'),
        ("tie-dropped", "tie_invalid", '[names]\ndrop = ["b"]\n\n[[tie]]\nalias = "x"\nof = "b"'),
        ("tie-taken", "duplicate_output", '[[tie]]\nalias = "b"\nof = "a"'),
        ("tie-twice", "duplicate_output", '[[tie]]\nalias = "x"\nof = "a"\n\n[[tie]]\nalias = "x"\nof = "b"'),
        ("unmatched", "unmatched_tensor", CAST + 'params = { dtype = "F32" }\n\n[names]\nunmatched = "error"'),
    ]
    for name, code, text in variants:
        with cases.case(f"bad-{name}") as c:
            c.put("b", c.tensor("a", 6, 4))
            c.text(text)
            c.refuse(code)


def inputs(cases: CaseSet) -> None:
    """Shapes, dtypes and tp sizes that modules refuse."""
    variants: list[tuple[str, np.ndarray, str, str, dict[str, Any], int]] = [
        ("cast-integer", np.zeros((2, 2), np.int32), "cast", "w", {"dtype": "F32"}, 1),
        ("pad", np.zeros((6, 4), BF16), "tp-shard", "w", {"dim": 0, "pad_to": 3}, 4),
        ("tp-shard", np.zeros((6, 4), BF16), "tp-shard", "w", {"dim": 1}, 3),
        ("regroup-tp", np.zeros((36, 4), BF16), "qkv-regroup", "qkv", {"groups": 3, "q_per_group": 2, "head_dim": 3}, 2),
        ("rope-shape", np.zeros((13, 4), BF16), "rope-permute", "w", {"num_heads": 3, "head_dim": 4, "to": "half"}, 1),
        ("pad-head-shape", np.zeros((13, 4), BF16), "pad-head", "w", {"num_heads": 3, "from": 4, "to": 8}, 1),
        ("gate-up-odd", np.zeros((5, 4), BF16), "gate-up", "gate_up", {"op": "swap"}, 1),
        ("slice-out", np.zeros((5, 4), BF16), "slice", "w", {"dim": 0, "start": 2, "stop": 6}, 1),
        ("permute-reshape", np.zeros((5, 4), BF16), "permute", "w", {"reshape": [3, -1]}, 1),
        ("quantize-integer", np.zeros((5, 4), np.int32), "fp8-quantize", "w", {"scheme": "tensor"}, 1),
    ]
    for name, w, module, role, params, size in variants:
        with cases.case(f"bad-{name}") as c:
            c.put("w", w)
            outputs = {role: "w"} | ({"scale": "s"} if module == "fp8-quantize" else {})
            c.step(module, {role: "w"}, outputs, **params)
            c.refuse("module_rejected_input", size, size - 1)
    with cases.case("bad-fuse-mixed-dtypes") as c:
        for part, dtype in (("q", BF16), ("k", BF16), ("v", F32)):
            c.tensor(part, 4, 3, dtype=dtype)
        c.step("qkv-fuse", {p: p for p in "qkv"}, {"qkv": "qkv"}, **FUSE)
        c.refuse("module_rejected_input")
    with cases.case("bad-concat-shapes") as c:
        c.tensor("x.0", 2, 3)
        c.tensor("x.1", 2, 4)
        c.step("concat", {"w": "x.{*n}"}, {"w": "x"}, dim=0)
        c.refuse("module_rejected_input")


def data(cases: CaseSet) -> None:
    """Values that arithmetic cannot take."""
    for scheme in ("tensor", "channel", "block"):
        for name, value in (("nan", np.nan), ("inf", -np.inf)):
            with cases.case(f"bad-fp8-{name}" if (scheme, name) == ("tensor", "nan") else f"bad-fp8-{scheme}-{name}") as c:
                c.tensor("w", 4, 4, dtype=F32)[2, 1] = value
                c.step("fp8-quantize", {"w": "w"}, {"w": "w", "scale": "s"}, scheme=scheme)
                c.refuse("bad_data")
    for module, code, params in (
        ("fp8-dequantize", 0xFF, {"scheme": "tensor", "dtype": "F32"}),
        ("fp8-fnuz", 0x7F, {}),
    ):
        with cases.case(f"bad-{module}-nan") as c:
            c.put("w", np.array([1, 2, code, 3], np.uint8).view(F8).reshape(2, 2))
            c.put("s", np.ones(1, F32))
            c.step(
                module,
                {"w": "w", "scale": "s"},
                {"w": "w"} | ({"scale": "s"} if module == "fp8-fnuz" else {}),
                **params,
            )
            c.refuse("bad_data")
    with cases.case("bad-mx-nan") as c:
        c.put("b", np.zeros((1, 1, 16), np.uint8))
        c.put("s", np.full((1, 1), 255, np.uint8))
        c.step("mxfp4-dequantize", {"blocks": "b", "scales": "s"}, {"w": "w"}, dtype="BF16")
        c.refuse("bad_data")
    with cases.case("bad-zero-norm") as c:
        c.tensor("g", 3, dtype=F32)
        c.tensor("v", 3, 4, dtype=F32)[1] = 0
        c.step("weight-norm-fold", {"g": "g", "v": "v"}, {"w": "w"}, dim=0)
        c.refuse("bad_data")


# ── checkpoints ──


def raw_file(header: dict | bytes, data: bytes = b"", header_bytes: int | None = None) -> bytes:
    """A safetensors file, well formed or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if header_bytes is None else header_bytes) + text + data


def u8(name: str, begin: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict:
    """A header's entry for one tensor."""
    return {name: {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}}


def checkpoints(cases: CaseSet) -> None:
    """Files that are malformed, contradict each other, or hold names that are refused."""
    good = raw_file(u8("a", 0, 4), b"abcd")
    index = json.dumps({"metadata": {}, "weight_map": {"a": "x.safetensors"}}).encode()
    repeated = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}'
    indexes = {f"{name}.safetensors.index.json": index for name in "ab"}
    model_index = "model.safetensors.index.json"
    variants: list[tuple[str, str, dict[str, bytes]]] = [
        ("empty-folder", "checkpoint_invalid", {"readme.txt": b"nothing here"}),
        ("truncated", "checkpoint_invalid", {"x.safetensors": good[:-1]}),
        ("trailing", "checkpoint_invalid", {"x.safetensors": good + b"x"}),
        ("short-file", "checkpoint_invalid", {"x.safetensors": b"\0\0\0"}),
        ("header-length", "checkpoint_invalid", {"x.safetensors": raw_file(u8("a", 0, 4), b"abcd", 1 << 60)}),
        ("header-json", "checkpoint_invalid", {"x.safetensors": raw_file(b'{"a":', b"abcd")}),
        ("header-list", "checkpoint_invalid", {"x.safetensors": raw_file(b"[]")}),
        ("hole", "checkpoint_invalid", {"x.safetensors": raw_file(u8("a", 0, 2) | u8("b", 3, 4), b"abcd")}),
        ("overlap", "checkpoint_invalid", {"x.safetensors": raw_file(u8("a", 0, 3) | u8("b", 2, 4), b"abcd")}),
        ("backwards", "checkpoint_invalid", {"x.safetensors": raw_file(u8("a", 4, 0, [4]), b"abcd")}),
        ("size", "checkpoint_invalid", {"x.safetensors": raw_file(u8("a", 0, 4, [5]), b"abcd")}),
        ("dtype", "checkpoint_invalid", {"x.safetensors": raw_file(u8("a", 0, 4, dtype="U9"), b"abcd")}),
        ("overflow", "checkpoint_invalid", {"x.safetensors": raw_file(u8("a", 0, 4, [1 << 33, 1 << 33]), b"abcd")}),
        ("negative", "checkpoint_invalid", {"x.safetensors": raw_file(u8("a", 0, 4, [-4]), b"abcd")}),
        ("twice", "checkpoint_invalid", {"x.safetensors": raw_file(repeated, b"abcd")}),
        ("two-files", "checkpoint_invalid", {"x.safetensors": good, "y.safetensors": good}),
        ("two-indexes", "checkpoint_invalid", {"x.safetensors": good} | indexes),
        ("index-file", "checkpoint_invalid", {"y.safetensors": good, model_index: index}),
        ("index-tensor", "checkpoint_invalid", {"x.safetensors": good, model_index: index.replace(b'"a"', b'"b"')}),
        ("index-json", "checkpoint_invalid", {"x.safetensors": good, model_index: b"{"}),
        ("index-escape", "checkpoint_invalid", {"x.safetensors": good, model_index: index.replace(b"x.s", b"../x.s")}),
        ("pad-name", "bad_tensor_name", {"x.safetensors": raw_file(u8("__pad__.weight", 0, 4), b"abcd")}),
        ("control-name", "bad_tensor_name", {"x.safetensors": raw_file(u8("a\nb", 0, 4), b"abcd")}),
        ("long-name", "bad_tensor_name", {"x.safetensors": raw_file(u8("n" * 4097, 0, 4), b"abcd")}),
    ]
    for name, code, files in variants:
        with cases.case(f"bad-checkpoint-{name}") as c:
            c.extra_files = files
            c.refuse(code)


def write(cases: CaseSet) -> None:
    """Every case of this file."""
    for family in (steps, lists, configs, recipe_text, inputs, data, checkpoints):
        family(cases)
