"""Cases of the modules that know about heads: qkv-regroup, qkv-fuse, qkv-split, rope-permute, pad-head.

The references split a weight into axes (group, part, row …) by `reshape` and move whole axes; they share no index
arithmetic with the modules.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from casefile import BF16, F16, F32, CaseSet

Parts = dict[str, np.ndarray]


def ungroup(grouped: np.ndarray, groups: int, m: int, d: int, order: str = "qkv") -> Parts:
    """A grouped tensor as q, k, v of shape [groups, heads of the part, d, …]."""
    heads = {"q": m, "k": 1, "v": 1}
    axes = grouped.reshape(groups, m + 2, d, *grouped.shape[1:])
    at, parts = 0, {}
    for part in order:
        parts[part] = axes[:, at : at + heads[part]]
        at += heads[part]
    return parts


def rows(part: np.ndarray) -> np.ndarray:
    """[groups, heads, d, …] as rows."""
    return part.reshape(-1, *part.shape[3:])


def fused(parts: Parts, rank: int = 0, size: int = 1) -> np.ndarray:
    """[Q; K; V] of one rank's share of the groups."""
    return np.concatenate([rows(np.split(parts[part], size)[rank]) for part in "qkv"])


def fuse_rank(q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: tuple[int, int, int], size: int, rank: int) -> np.ndarray:
    """[Q_t; K_t; V_t] of separate q, k, v; ranks share a KV head where there are more ranks than KV heads."""
    num_heads, num_kv_heads, d = heads
    kv_of_query_head = np.arange(num_heads) // (num_heads // num_kv_heads)
    if size <= num_kv_heads:
        mine = np.split(np.arange(num_kv_heads), size)[rank]
    else:
        mine = np.unique(np.split(kv_of_query_head, size)[rank])
    by_head = lambda x, n: x.reshape(n, d, *x.shape[1:])  # noqa: E731
    picked = [
        np.split(by_head(q, num_heads), size)[rank],
        by_head(k, num_kv_heads)[mine],
        by_head(v, num_kv_heads)[mine],
    ]
    return np.concatenate([p.reshape(-1, *p.shape[2:]) for p in picked])


def interleave_rope(w: np.ndarray, heads: int, d: int, rotary: int) -> np.ndarray:
    """The rotary rows of each head from [first half; second half] to pairs."""
    out = w.reshape(heads, d, *w.shape[1:]).copy()
    halves = out[:, :rotary].reshape(heads, 2, rotary // 2, *w.shape[1:])
    out[:, :rotary] = halves.swapaxes(1, 2).reshape(heads, rotary, *w.shape[1:])
    return out.reshape(w.shape)


def pad_heads(w: np.ndarray, heads: int, old: int, new: int, rope: bool) -> np.ndarray:
    """Heads of `old` rows enlarged to `new` rows with zeros; with rope, each half on its own."""
    x = w.reshape(heads, old, *w.shape[1:])
    pieces = np.split(x, 2, axis=1) if rope else [x]
    room = new // len(pieces)
    padded = [np.pad(p, [(0, 0), (0, room - p.shape[1])] + [(0, 0)] * (w.ndim - 1)) for p in pieces]
    return np.concatenate(padded, 1).reshape(heads * new, *w.shape[1:])


# ── qkv-regroup ──


def regroup(cases: CaseSet) -> None:
    """Every family of groups, weights and biases together, at every tp size that divides."""
    s = cases.scale
    families = [
        ("neox", 4 * s, 1, 8, 24, "qkv", BF16),
        ("falcon40b", 4, 3, 4 * s, 40, "qkv", BF16),
        ("mqa", 1, 6, 8, 16 * s, "qkv", BF16),
        ("codegen", 4, 1, 12 * s, 48, "qvk", BF16),
        ("progen2", 8, 1, 3 * s, 7, "qvk", F32),
        ("kqv", 6, 2, 2 * s, 5, "kqv", F16),
        ("vkq", 2, 5, 3, 3 * s, "vkq", np.dtype(np.uint8)),
        ("one-row-heads", 12, 1, 1, 2 * s, "qkv", BF16),
    ]
    for name, groups, m, d, cols, order, dtype in families:
        with cases.case(f"qkv-regroup-{name}") as c:
            w = c.put("h.0.qkv.weight", c.floats(groups * (m + 2) * d, cols, dtype=F32).astype(np.int8).astype(dtype))
            b = c.tensor("h.0.qkv.bias", groups * (m + 2) * d, dtype=F32)
            params: dict[str, Any] = {"groups": groups, "q_per_group": m, "head_dim": d}
            if order != "qkv":
                params["order"] = order
            for kind in ("weight", "bias"):
                c.same("qkv-regroup", "qkv", f"h.{{i}}.qkv.{kind}", **params)
            pw, pb = ungroup(w, groups, m, d, order), ungroup(b, groups, m, d, order)
            for size in (n for n in (1, 2, 3, 4) if groups % n == 0):
                for rank in range(size):
                    c.expect({"h.0.qkv.weight": fused(pw, rank, size), "h.0.qkv.bias": fused(pb, rank, size)}, size, rank)
    regroup_back(cases)
    kv_replication(cases)


def regroup_back(cases: CaseSet) -> None:
    """direction = "group", and a trailing shape of two dimensions."""
    s = cases.scale
    for name, order in (("inverse", "qkv"), ("inverse-qvk", "qvk")):
        with cases.case(f"qkv-regroup-{name}") as c:
            groups, m, d = 4, 3, 4 * s
            grouped = c.floats(groups * (m + 2) * d, 40)
            c.put("h.0.qkv.weight", fused(ungroup(grouped, groups, m, d, order)))
            c.same(
                "qkv-regroup",
                "qkv",
                "h.{i}.qkv.weight",
                groups=groups,
                q_per_group=m,
                head_dim=d,
                order=order,
                direction="group",
            )
            c.expect({"h.0.qkv.weight": grouped})
            c.refuse("module_rejected_input", 2)
    with cases.case("qkv-regroup-3d") as c:
        w = c.tensor("w", 2 * 4 * 3, 3, 2 * s)
        c.same("qkv-regroup", "qkv", "w", groups=2, q_per_group=2, head_dim=3, direction="degroup", kv_replication=False)
        for rank in range(2):
            c.expect({"w": fused(ungroup(w, 2, 2, 3), rank, 2)}, 2, rank)


def kv_replication(cases: CaseSet) -> None:
    """More ranks than groups: each rank has a share of one group's query heads and its K and V."""
    s = cases.scale
    for name, groups, m, sizes, refused in (("", 2, 4, (4, 8), 24), ("-g3", 3, 6, (3, 6, 9), 4)):
        with cases.case(f"qkv-kv-replication{name}") as c:
            d = 4 * s
            w = c.tensor("w", groups * (m + 2) * d, 10)
            c.same("qkv-regroup", "qkv", "w", groups=groups, q_per_group=m, head_dim=d, kv_replication=True)
            x = w.reshape(groups, m + 2, d, 10)
            for size in sizes:
                ranks_a_group = size // groups
                for rank in range(size):
                    group, share = divmod(rank, ranks_a_group)
                    q = np.split(x[group, :m], ranks_a_group)[share].reshape(-1, 10)
                    c.expect({"w": np.concatenate([q, x[group, m], x[group, m + 1]])}, size, rank)
            c.refuse("module_rejected_input", refused)
    with cases.case("bad-kv-replication-off") as c:
        c.tensor("w", 2 * 6 * 2, 3)
        c.same("qkv-regroup", "qkv", "w", groups=2, q_per_group=4, head_dim=2)
        c.refuse("module_rejected_input", 4)
    with cases.case("bad-fused-as-grouped") as c:
        w = c.tensor("w", 6 * 4 * s, 10)
        c.same("qkv-regroup", "qkv", "w", groups=1, q_per_group=4, head_dim=4 * s)
        c.expect({"w": w})
        c.refuse("module_rejected_input", 2)


# ── qkv-fuse, qkv-split ──


def fuse(cases: CaseSet) -> None:
    """MHA, GQA and MQA; weights and biases; KV heads shared by ranks."""
    s = cases.scale
    for name, heads, kv_heads, d, sizes in (
        ("gqa", 8, 2, 4 * s, (1, 2, 4, 8)),
        ("mha", 6, 6, 2 * s, (1, 2, 3, 6)),
        ("mqa", 4, 1, 3 * s, (1, 2, 4)),
        ("gqa3", 12, 3, 2 * s, (1, 3, 6)),
    ):
        with cases.case(f"qkv-fuse-{name}") as c:
            n = {"q": heads * d, "k": kv_heads * d, "v": kv_heads * d}
            w = {x: c.tensor(f"l.7.{x}.weight", n[x], 32) for x in "qkv"}
            b = {x: c.tensor(f"l.7.{x}.bias", n[x], dtype=F16) for x in "qkv"}
            for kind in ("weight", "bias"):
                c.step(
                    "qkv-fuse",
                    {x: f"l.{{i}}.{x}.{kind}" for x in "qkv"},
                    {"qkv": f"l.{{i}}.qkv.{kind}"},
                    num_heads=heads, num_kv_heads=kv_heads, head_dim=d,
                )  # fmt: skip
            for size in sizes:
                for rank in range(size):
                    dims = (heads, kv_heads, d)
                    c.expect(
                        {
                            "l.7.qkv.weight": fuse_rank(w["q"], w["k"], w["v"], dims, size, rank),
                            "l.7.qkv.bias": fuse_rank(b["q"], b["k"], b["v"], dims, size, rank),
                        },
                        size,
                        rank,
                    )
            c.refuse("module_rejected_input", 5)


def split(cases: CaseSet) -> None:
    """qkv-split of weights and biases; every rank gets the whole."""
    s = cases.scale
    for name, kind in (("qkv-split", "weight"), ("qkv-split-bias", "bias")):
        with cases.case(name) as c:
            heads, kv_heads, d = 8, 2, 4 * s
            tail = (32,) if kind == "weight" else ()
            parts = {
                "q": c.floats(heads * d, *tail),
                "k": c.floats(kv_heads * d, *tail),
                "v": c.floats(kv_heads * d, *tail),
            }
            c.put("a.qkv", np.concatenate(list(parts.values())))
            c.step(
                "qkv-split",
                {"qkv": "a.qkv"},
                {x: f"a.{x}" for x in "qkv"},
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=d,
            )
            whole = {f"a.{x}": parts[x] for x in "qkv"}
            c.expect(whole)
            c.expect(whole, 4, 3)
    with cases.case("fused-qkv-tp") as c:
        heads, kv_heads, d, cols = 4, 2, 6, 8 * s
        params = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": d}
        q, k, v = (c.floats(n * d, cols) for n in (heads, kv_heads, kv_heads))
        names = ["l.1.qkv", "l.12.qkv"]
        for name in names:
            c.put(name, np.concatenate([q, k, v]))
        patterns = {x: f"l.{{i}}.{x}" for x in "qkv"}
        c.step("qkv-split", {"qkv": "l.{i}.qkv"}, patterns, **params)
        c.step("qkv-fuse", patterns, {"qkv": "l.{i}.qkv"}, **params)
        for size in (1, 2):
            for rank in range(size):
                c.expect(dict.fromkeys(names, fuse_rank(q, k, v, (heads, kv_heads, d), size, rank)), size, rank)


# ── rope-permute, pad-head ──


def rope(cases: CaseSet) -> None:
    """Both directions, partial rotation, biases, odd trailing extents, tp by heads."""
    s = cases.scale
    shapes = {
        "": (3, 8 * s, 4 * s, (20,)),
        "-bias": (4, 6, 6, ()),
        "-odd": (2, 10 * s, 6, (3, 7)),
        "-pair": (5, 2, 2, (1,)),
    }
    for suffix, (heads, d, rotary, tail) in shapes.items():
        for to in ("interleaved", "half"):
            with cases.case(f"rope-{to}{suffix}") as c:
                half = c.floats(heads * d, *tail, dtype=F32 if suffix else BF16)
                pairs = interleave_rope(half, heads, d, rotary)
                source, want = (half, pairs) if to == "interleaved" else (pairs, half)
                c.put("q", source)
                params = {"num_heads": heads, "head_dim": d, "to": to} | ({"rotary_dim": rotary} if rotary != d else {})
                c.same("rope-permute", "w", "q", **params)
                for size in (n for n in (1, 2) if heads % n == 0):
                    for rank in range(size):
                        c.expect({"q": np.split(want, size)[rank]}, size, rank)
                if heads % 2:
                    c.refuse("module_rejected_input", 2)
    with cases.case("rope-tp") as c:
        q = c.tensor("q", 4 * 6, 8 * s)
        c.same("rope-permute", "w", "q", num_heads=4, head_dim=6, to="interleaved")
        for rank in range(4):
            c.expect({"q": np.split(interleave_rope(q, 4, 6, 6), 4)[rank]}, 4, rank)
    with cases.case("rope-then-fuse") as c:
        heads, kv_heads, d, cols = 4, 2, 6, 8 * s
        q, k, v = c.tensor("q", heads * d, cols), c.tensor("k", kv_heads * d, cols), c.tensor("v", kv_heads * d, cols)
        for name, n in (("q", heads), ("k", kv_heads)):
            c.same("rope-permute", "w", name, num_heads=n, head_dim=d, to="interleaved", extra="tp = false\n")
        c.step("qkv-fuse", {x: x for x in "qkv"}, {"qkv": "qkv"}, num_heads=heads, num_kv_heads=kv_heads, head_dim=d)
        q, k = interleave_rope(q, heads, d, d), interleave_rope(k, kv_heads, d, d)
        for size in (1, 2):
            for rank in range(size):
                c.expect({"qkv": fuse_rank(q, k, v, (heads, kv_heads, d), size, rank)}, size, rank)


def pad_head(cases: CaseSet) -> None:
    """Rows and columns, with and without rope, weights and biases."""
    s = cases.scale
    with cases.case("pad-head-rope") as c:
        w = c.tensor("w", 2 * 6, 4 * s)
        c.same("pad-head", "w", "w", **{"num_heads": 2, "from": 6, "to": 10, "rope": True})
        c.expect({"w": pad_heads(w, 2, 6, 10, True)})
    with cases.case("pad-head-columns") as c:
        w = c.tensor("w", 7, 3 * 5)
        c.same("pad-head", "w", "w", **{"num_heads": 3, "from": 5, "to": 8, "rope": False, "dim": 1})
        c.expect({"w": pad_heads(w.T, 3, 5, 8, False).T})
    for rope_ in (False, True):
        name = "rope" if rope_ else "plain"
        with cases.case(f"pad-head-{name}-all") as c:
            heads, old, new = 3, 4 * s, 6 * s
            params = {"num_heads": heads, "from": old, "to": new} | ({"rope": True} if rope_ else {})
            w, b = c.tensor("w", heads * old, 5, dtype=F32), c.tensor("b", heads * old, dtype=F16)
            o = c.tensor("o", 5, heads * old)
            for tensor in ("w", "b"):
                c.same("pad-head", "w", tensor, **params)
            c.same("pad-head", "w", "o", **params, dim=1)
            want = {
                "w": pad_heads(w, heads, old, new, rope_),
                "b": pad_heads(b, heads, old, new, rope_),
                "o": pad_heads(o.T, heads, old, new, rope_).T,
            }
            c.expect(want)
            c.expect(want, 2, 1)
    with cases.case("pad-head-same") as c:
        w = c.tensor("w", 2 * 6, 3)
        c.same("pad-head", "w", "w", **{"num_heads": 2, "from": 6, "to": 6, "rope": True})
        c.expect({"w": w})


def write(cases: CaseSet) -> None:
    """Every case of this file."""
    for family in (regroup, fuse, split, rope, pad_head):
        family(cases)
