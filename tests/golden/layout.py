"""Cases of the other modules that move bytes: gate-up, moe-stack, concat, slice, permute, tp-shard."""

from __future__ import annotations

from typing import Any

import numpy as np

from casefile import BF16, F16, F32, Case, CaseSet


def share(x: np.ndarray, size: int, rank: int, axis: int = 0) -> np.ndarray:
    """One rank's equal part of an axis."""
    return np.split(x, size, axis)[rank]


# ── gate-up ──


def uneven(extent: int) -> int:
    """A tp size that does not divide an extent."""
    return next(n for n in range(5, 2 * extent + 6) if extent % n)


def fused_halves(gate: np.ndarray, up: np.ndarray, size: int, rank: int, dim: int) -> np.ndarray:
    """[gate_t; up_t] along `dim`."""
    return np.concatenate([share(gate, size, rank, dim), share(up, size, rank, dim)], dim)


def gate_up_two_inputs(cases: CaseSet) -> None:
    """op = "fuse" of weights, biases and stacked experts."""
    s = cases.scale
    shapes = {
        "": ((12 * s, 16), 0, BF16),
        "-bias": ((12 * s,), 0, F32),
        "-stacked": ((3, 4 * s, 5), 1, F16),
        "-stacked-bias": ((3, 4 * s), 1, BF16),
    }
    for suffix, (shape, dim, dtype) in shapes.items():
        with cases.case(f"gate-up-fuse{suffix}") as c:
            gate, up = c.tensor("m.3.gate", *shape, dtype=dtype), c.tensor("m.3.up", *shape, dtype=dtype)
            params = {"op": "fuse"} | ({"dim": dim} if dim else {})
            c.step("gate-up", {"gate": "m.{i}.gate", "up": "m.{i}.up"}, {"gate_up": "m.{i}.gu"}, **params)
            for size in (1, 2, 4):
                for rank in range(size):
                    c.expect({"m.3.gu": fused_halves(gate, up, size, rank, dim)}, size, rank)
            c.refuse("module_rejected_input", uneven(gate.shape[dim]))


def gate_up_one_input(cases: CaseSet) -> None:
    """shard, swap, interleave, deinterleave, along the first and the second dimension."""
    s = cases.scale
    shapes = {"": ((6 * s, 16), 0), "-bias": ((6 * s,), 0), "-dim1": ((2, 6 * s, 5), 1), "-dim1-bias": ((2, 6 * s), 1)}
    for suffix, (shape, dim) in shapes.items():
        for op in ("shard", "swap", "interleave", "deinterleave"):
            with cases.case(f"gate-up-{op}{suffix}") as c:
                gate, up = c.floats(*shape), c.floats(*shape)
                fused = np.concatenate([gate, up], dim)
                pairs = np.stack([gate, up], dim + 1).reshape(fused.shape)
                source = pairs if op == "deinterleave" else fused
                c.put("x", source)
                c.same("gate-up", "gate_up", "x", **({"op": op} | ({"dim": dim} if dim else {})))
                whole = {
                    "shard": fused,
                    "swap": np.concatenate([up, gate], dim),
                    "interleave": pairs,
                    "deinterleave": fused,
                }[op]
                c.expect({"x": whole})
                for rank in range(3):
                    c.expect({"x": fused_halves(gate, up, 3, rank, dim) if op == "shard" else whole}, 3, rank)
    with cases.case("gate-up-dim1") as c:
        w = c.tensor("w", 2, 4, 4)
        c.same("gate-up", "gate_up", "w", op="swap", dim=1)
        c.expect({"w": np.roll(w, 2, 1)})
    with cases.case("gate-up-interleave-shard") as c:
        gate, up = c.floats(4, 3 * s), c.floats(4, 3 * s)
        c.put("x", np.concatenate([gate, up]))
        c.same("gate-up", "gate_up", "x", op="interleave")
        c.same("tp-shard", "w", "x", dim=0)
        for rank in range(2):
            pairs = np.stack([share(gate, 2, rank), share(up, 2, rank)], 1)
            c.expect({"x": pairs.reshape(4, 3 * s)}, 2, rank)


# ── moe-stack ──

EXPERT = {"w1": "w1", "w3": "w3", "w2": "w2"}


def add_experts(c: Case, count: int, inner: int, model: int, prefix: str = "e") -> dict[str, np.ndarray]:
    """Experts' tensors in the checkpoint; the result is each part stacked."""
    stacked = {}
    for part in EXPERT:
        shape = (model, inner) if part == "w2" else (inner, model)
        stacked[part] = np.stack([c.tensor(f"{prefix}.{i}.{part}", *shape) for i in range(count)])
    return stacked


def moe(cases: CaseSet) -> None:
    """Numeric order beyond nine, both orders of w13, physical-to-logical lists, tp."""
    s = cases.scale
    variants: dict[str, tuple[int, int, int, dict[str, Any]]] = {
        "moe-stack": (12, 4 * s, 8, {}),
        "moe-experts": (5, 2, 3, {"order": "w3w1", "experts": [4, 0, 0, 3]}),
        "moe-w3w1": (3, 6 * s, 5, {"order": "w3w1"}),
        "moe-experts-tp": (11, 4, 3 * s, {"experts": [10, 1, 0, 1, 9, 2, 2], "order": "w1w3"}),
    }
    for name, (count, inner, model, params) in variants.items():
        with cases.case(name) as c:
            stacked = add_experts(c, count, inner, model, "l.0.e")
            c.step(
                "moe-stack",
                {part: f"l.{{i}}.e.{{*e}}.{part}" for part in EXPERT},
                {"w13": "l.{i}.w13", "w2": "l.{i}.w2"},
                **params,
            )
            picked = {part: x[params.get("experts", slice(None))] for part, x in stacked.items()}
            first, second = ("w3", "w1") if params.get("order") == "w3w1" else ("w1", "w3")
            for size in (1, 2):
                for rank in range(size):
                    w13 = np.concatenate([share(picked[p], size, rank, 1) for p in (first, second)], 1)
                    c.expect({"l.0.w13": w13, "l.0.w2": share(picked["w2"], size, rank, 2)}, size, rank)
            c.refuse("module_rejected_input", uneven(inner))


# ── concat, slice, permute, tp-shard ──


def concat_and_slice(cases: CaseSet) -> None:
    """Lists in numeric order on any axis; slices of any axis; every rank gets the whole."""
    s = cases.scale
    for name, dim, shapes in (
        ("concat-rows", 0, [(i + 1, 3) for i in range(12)]),
        ("concat-columns", 1, [(4, s), (4, 5), (4, 2)]),
        ("concat-vectors", 0, [(3 * s,), (1,), (4,)]),
        ("concat-last", 2, [(2, 3, 1), (2, 3, 4 * s)]),
        ("concat-one", 0, [(2, 3)]),
    ):
        with cases.case(name) as c:
            parts = [c.tensor(f"x.{i}", *shape) for i, shape in enumerate(shapes)]
            c.step("concat", {"w": "x.{*n}"}, {"w": "x"}, dim=dim)
            c.expect({"x": np.concatenate(parts, dim)})
            c.expect({"x": np.concatenate(parts, dim)}, 2, 1)
    for name, dim, start, stop, shape in (
        ("slice-rows", 0, 2, 5, (7, 3 * s)),
        ("slice-columns", 1, 0, 3, (4 * s, 7)),
        ("slice-last", 2, 3, 4, (2, 3 * s, 4)),
        ("slice-vector", 0, 1, 4 * s, (5 * s,)),
        ("slice-all", 1, 0, 6, (3, 6)),
    ):
        with cases.case(name) as c:
            w = c.tensor("w", *shape, dtype=F16)
            c.same("slice", "w", "w", dim=dim, start=start, stop=stop)
            part = w.take(range(start, stop), dim)
            c.expect({"w": part})
            c.expect({"w": part}, 3, 2)
    with cases.case("concat-slice") as c:
        a, b = c.tensor("x.0", 3, 4, 5), c.tensor("x.1", 3, 2 * s, 5)
        c.put("y", b)
        c.step("concat", {"w": "x.{*n}"}, {"w": "x"}, dim=1)
        c.same("slice", "w", "y", dim=1, start=1, stop=2)
        c.expect({"x": np.concatenate([a, b], 1), "y": b[:, 1:2]})


def permute(cases: CaseSet) -> None:
    """Transposes, patch embeddings, stacked experts, reshapes that keep or infer an extent."""
    s = cases.scale
    variants = {
        "conv1d": ((6 * s, 10), [1, 0], None, BF16),
        "patch": ((5, 3, 2, 4, 4 * s), [0, 2, 3, 4, 1], [5, -1], F16),
        "patch-2d": ((6, 3, 2, 2 * s), None, [0, -1], F32),
        "experts": ((3, 4, 6 * s), [0, 2, 1], None, BF16),
        "keep": ((2, 3 * s, 4, 5), [2, 0, 1, 3], [0, 0, -1], BF16),
        "unsqueeze": ((4 * s,), None, [-1, 1], F32),
        "split-heads": ((4 * 3, 2 * s), None, [4, 3, -1], BF16),
        "identity": ((3, 5), [0, 1], None, BF16),
        "bytes": ((7, 5 * s), [1, 0], None, np.dtype(np.uint8)),
        "wide": ((33, 65), [1, 0], [-1], np.dtype(np.int64)),
        "reverse": ((2, 3, 4, 5), [3, 2, 1, 0], None, F16),
    }
    for name, (shape, dims, reshape, dtype) in variants.items():
        with cases.case(f"permute-{name}") as c:
            w = c.put("w", (c.floats(*shape, dtype=F32) * 20).astype(np.int8).astype(dtype))
            moved = w.transpose(dims) if dims else w
            if reshape:
                moved = moved.reshape([moved.shape[i] if n == 0 else n for i, n in enumerate(reshape)])
            c.same("permute", "w", "w", **({"dims": dims} if dims else {}), **({"reshape": reshape} if reshape else {}))
            c.expect({"w": moved})
            c.expect({"w": moved}, 2, 1)


def tp_shard(cases: CaseSet) -> None:
    """Any dimension, padding at tp 1 and above."""
    s = cases.scale
    variants = {
        "vocab-pad": ((10 * s + 3, 6), 0, 8, BF16, (1, 4)),
        "tp-columns": ((7, 12 * s), 1, None, BF16, (1, 3)),
        "tp-pad-columns": ((3, 5 * s), 1, 6, F32, (1, 2, 3)),
        "tp-pad-vector": ((9,), 0, 4 * s, F16, (1, 4)),
        "tp-pad-none": ((8, 3 * s), 0, 8, BF16, (1, 2, 8)),
        "tp-third": ((2, 3, 6 * s), 2, None, np.dtype(np.uint8), (1, 2, 6)),
        "tp-vector": ((12 * s,), 0, None, F32, (1, 4)),
    }
    for name, (shape, dim, pad_to, dtype, sizes) in variants.items():
        with cases.case(name) as c:
            w = c.put("w", (c.floats(*shape, dtype=F32) * 20).astype(np.int8).astype(dtype))
            pad = [(0, 0)] * len(shape)
            if pad_to:
                pad[dim] = (0, -shape[dim] % pad_to)
            whole = np.pad(w, pad)
            c.same("tp-shard", "w", "w", dim=dim, **({"pad_to": pad_to} if pad_to else {}))
            for size in sizes:
                for rank in range(size):
                    c.expect({"w": share(whole, size, rank, dim)}, size, rank)
            c.refuse("module_rejected_input", uneven(whole.shape[dim]))


def write(cases: CaseSet) -> None:
    """Every case of this file."""
    for family in (gate_up_two_inputs, gate_up_one_input, moe, concat_and_slice, permute, tp_shard):
        family(cases)
