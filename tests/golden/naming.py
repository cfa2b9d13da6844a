"""Cases of the recipe itself: captures, lists, filters, configuration, names, ties, blocks, files, chains."""

from __future__ import annotations

from typing import Any

import numpy as np

from attention import fused, ungroup
from casefile import BF16, F8, F16, F32, Case, CaseSet
from layout import EXPERT, add_experts
from numeric import codes, convert, pack_nibbles

REGROUP: dict[str, Any] = {"groups": 2, "q_per_group": 1, "head_dim": 2}


def regrouped(w: np.ndarray) -> np.ndarray:
    """What qkv-regroup makes of w with REGROUP."""
    return fused(ungroup(w, 2, 1, 2))


def to_f32(x: np.ndarray) -> np.ndarray:
    """A cast to F32."""
    return convert(x, F32)


# ── names, ties ──


def names(cases: CaseSet) -> None:
    """drop, rename (groups, chains, all matches), unmatched."""
    with cases.case("names") as c:
        x, b = c.tensor("t.a.0.x", 12, 8), c.tensor("t.b", 8, 8)
        c.tensor("t.a.0.rotary_emb.inv_freq", 8, 8)
        c.same("cast", "w", "t.a.{i}.x", dtype="F32")
        c.text('[names]\ndrop = ["*.inv_freq"]\nrename = [["^t\\\\.(.*)$", "model.$1"]]')
        c.expect({"model.a.0.x": to_f32(x), "model.b": b})
    with cases.case("rename-chain") as c:
        x, y = c.tensor("a.x", 12, 8), c.tensor("a.y", 3, 8)
        c.text('[names]\nrename = [["^a\\\\.", "b."], ["^b\\\\.x$", "c"]]')
        c.expect({"c": x, "b.y": y})
    with cases.case("rename-groups") as c:
        want = {}
        for layer in (0, 11):
            for part in ("q", "k"):
                want[f"enc.{part}_proj.L{layer}x.weight"] = c.tensor(f"transformer.h.{layer}.attn.{part}.weight", 2, 3)
        want["m_m_a"] = c.tensor("m.m.a", 2)
        c.text(
            "[names]\nrename = ["
            "['^transformer\\.h\\.(?P<layer>\\d+)\\.attn\\.(.)\\.(?P<leaf>\\w+)$', 'enc.${2}_proj.L${layer}x.$leaf'], "
            "['m\\.', 'm_']]"
        )
        c.expect(want)
    with cases.case("rename-swap") as c:
        a, b = c.tensor("a", 2), c.tensor("b", 3)
        c.text('[names]\nrename = [["^a$", "t"], ["^b$", "a"], ["^t$", "b"]]')
        c.expect({"b": a, "a": b})
    with cases.case("drop-globs") as c:
        keep = {"a.b": c.tensor("a.b", 2), "ab.c.d": c.tensor("ab.c.d", 3)}
        for name in ("a.x.y.bias", "z", "q.1.w"):
            c.tensor(name, 4)
        c.text('[names]\ndrop = ["a.*.bias", "z", "q*w", "nothing.*"]')
        c.expect(keep)
    with cases.case("keep-and-drop") as c:
        w = c.tensor("a", 6, 4)
        c.put("b", w)
        c.tensor("c", 2, 4)
        c.step("cast", {"w": "a"}, {"w": "a32"}, dtype="F32", extra="keep_inputs = true\n")
        c.same("cast", "w", "zz", dtype="F32", extra="optional = true\n")
        c.text('[names]\nunmatched = "drop"')
        c.expect({"a": w, "a32": to_f32(w)})
    with cases.case("unmatched-error-passes") as c:
        a, b = c.tensor("a", 2, 3), c.tensor("b", 3)
        c.tensor("c", 4)
        c.same("cast", "w", "{n}", dtype="F32")
        c.text('[names]\nunmatched = "error"\ndrop = ["c"]')
        c.expect({"a": to_f32(a), "b": to_f32(b)})
    with cases.case("unicode-names") as c:
        want = {"层.é.w": to_f32(c.tensor("层.é.w", 2, 2)), "a b/c": c.tensor("a b/c", 3), "Z": c.tensor("Z", 1)}
        c.same("cast", "w", "层.{x}.w", dtype="F32")
        c.expect(want)


def ties(cases: CaseSet) -> None:
    """Aliases of sources, of outputs, after renames, two of one tensor, with chains before them."""
    with cases.case("tie") as c:
        w = c.tensor("emb", 12, 8)
        c.text('[[tie]]\nalias = "lm_head.weight"\nof = "emb"')
        c.expect({"emb": w, "lm_head.weight": w})
    with cases.case("tie-rename") as c:
        w = c.tensor("t.emb", 12, 8)
        c.text('[[tie]]\nalias = "t.head"\nof = "t.emb"\n\n[names]\nrename = [["^t[.]", "m."]]')
        c.expect({"m.emb": w, "m.head": w})
    with cases.case("tie-chain") as c:
        w = c.tensor("emb", 10, 4, dtype=F32)
        c.same("cast", "w", "emb", dtype="BF16")
        c.same("tp-shard", "w", "emb", dim=0, pad_to=4)
        c.text('[[tie]]\nalias = "head"\nof = "emb"\n\n[[tie]]\nalias = "decoder"\nof = "emb"')
        c.text('[blocks]\npatterns = ["emb", "head"]')
        padded = np.pad(convert(w, BF16), [(0, 2), (0, 0)])
        for size in (1, 2, 4):
            for rank in range(size):
                c.expect(dict.fromkeys(("emb", "head", "decoder"), np.split(padded, size)[rank]), size, rank, blocks=["emb"])
    with cases.case("tie-replaces-dropped") as c:
        w = c.tensor("emb", 3, 4)
        c.put("head", w.copy())
        c.text('[names]\ndrop = ["head"]\n\n[[tie]]\nalias = "head"\nof = "emb"')
        c.expect({"emb": w, "head": w})


# ── captures ──


def captures(cases: CaseSet) -> None:
    """Several captures, shared roles, optional roles, `each`, lists with gaps."""
    s = cases.scale
    with cases.case("captures-two") as c:
        fused_heads: dict[tuple[int, int], list[np.ndarray]] = {}
        for layer, head in ((0, 1), (0, 10), (3, 1)):
            for part in ("q", "k", "v"):
                fused_heads.setdefault((layer, head), []).append(c.tensor(f"l.{layer}.h.{head}.{part}", 2, 3 * s))
        c.step(
            "qkv-fuse",
            {p: f"l.{{i}}.h.{{j}}.{p}" for p in "qkv"},
            {"qkv": "h{j}.l{i}"},
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
        )
        c.expect({f"h{head}.l{layer}": np.concatenate(parts) for (layer, head), parts in fused_heads.items()})
    with cases.case("captures-path") as c:
        want = {}
        for name in ("w.x", "a.w.x", "a.b.c.w.x"):
            value = c.tensor(name, 2, dtype=F32)
            want["out." + name.removesuffix(".x")] = convert(value, BF16)
        want["x"] = c.tensor("x", 2)
        c.step("cast", {"w": "{p...}.x"}, {"w": "out.{p...}"}, dtype="BF16")
        c.expect(want)
    with cases.case("shared-role") as c:
        scale = c.put("s", np.array([0.37], F32))
        want = {}
        for i in (0, 2, 10):
            q = c.put(f"l.{i}.w", codes(c, 3, 5).view(F8))
            want[f"l.{i}.w"] = (q.astype(F32) * scale[0]).astype(F32)
        c.step("fp8-dequantize", {"w": "l.{i}.w", "scale": "s"}, {"w": "l.{i}.w"}, scheme="tensor", dtype="F32")
        c.expect(want)
    with cases.case("shared-role-partly") as c:
        want = {}
        for layer in (0, 1):
            g = c.tensor(f"l.{layer}.g", 4, dtype=F32)
            for j in (0, 1, 2):
                v = np.zeros((4, 8), F32)
                v[:, c.rng.integers(0, 8)] = 2.0
                c.put(f"l.{layer}.v.{j}", v)
                want[f"l.{layer}.w.{j}"] = (v * (g / np.float32(2))[:, None]).astype(F32)
        c.step("weight-norm-fold", {"g": "l.{i}.g", "v": "l.{i}.v.{j}"}, {"w": "l.{i}.w.{j}"})
        c.expect(want)
    with cases.case("each-role") as c:
        a, b = c.tensor("l.0.w", 12, 8), c.tensor("l.1.w", 3, 8)
        c.tensor("l.1.w.a", 2, 8, dtype=F32)
        c.put("l.1.w.b", np.zeros((3, 2), F32))
        inputs = {"w": "{p...}.w", "a": "{p...}.w.a", "b": "{p...}.w.b"}
        c.step("lora-merge", inputs, {"w": "{p...}.w"}, scale=1.0, extra='each = "a"\n')
        c.expect({"l.0.w": a, "l.1.w": b})
    optional_role(cases)
    lists(cases)


def optional_role(cases: CaseSet) -> None:
    """A role with `?` is there for one layer and not for the other."""
    with cases.case("optional-role") as c:
        want = {}
        for layer in (0, 1):
            q = c.rng.integers(0, 16, (16, 8))
            c.put(f"l.{layer}.qweight", pack_nibbles(q, 0))
            c.put(f"l.{layer}.qzeros", pack_nibbles(np.full((2, 8), 8), 1))
            scales = c.put(f"l.{layer}.scales", np.abs(c.floats(2, 8, dtype=F32)) + np.float32(0.5))
            groups = np.arange(16) // 8
            if layer:
                groups = c.put("l.1.g_idx", c.rng.permutation(groups).astype(np.int32))
            want[f"l.{layer}.weight"] = (scales[groups] * (q - 8).astype(F32)).astype(F32)
        inputs = {r: f"l.{{i}}.{r}" for r in ("qweight", "qzeros", "scales")} | {"g_idx?": "l.{i}.g_idx"}
        c.step("gptq-dequantize", inputs, {"w": "l.{i}.weight"}, bits=4, group_size=8, dtype="F32")
        c.expect(want)


def lists(cases: CaseSet) -> None:
    """Lists that start late or have gaps, lists of a fixed count, list captures beside others."""
    moe = ({part: f"e.{{*e}}.{part}" for part in EXPERT}, {"w13": "w13", "w2": "w2"})
    with cases.case("list-sparse") as c:
        stacked = add_experts(c, 12, 2, 3)
        kept = [1, 2, 9, 10, 11]
        for i in set(range(12)) - set(kept):
            for part in EXPERT:
                del c.inputs[f"e.{i}.{part}"]
        c.step("moe-stack", *moe, extra="sparse = true\n")
        c.expect({"w13": np.concatenate([stacked["w1"][kept], stacked["w3"][kept]], 1), "w2": stacked["w2"][kept]})
    with cases.case("list-count") as c:
        c.config = {"moe": {"experts": 6, "shared": 2}}
        stacked = add_experts(c, 3, 2, 3)
        c.step("moe-stack", *moe, extra='count = "$config.moe.experts / $config.moe.shared"\n')
        c.expect({"w13": np.concatenate([stacked["w1"], stacked["w3"]], 1), "w2": stacked["w2"]})
    with cases.case("list-words") as c:
        parts = {name: c.tensor(f"p.{name}.w", n + 1, 2) for n, name in enumerate(("10", "9", "b", "B"))}
        c.step("concat", {"w": "p.{*n}.w"}, {"w": "w"}, dim=0, extra="sparse = true\n")
        c.expect({"w": np.concatenate([parts[name] for name in ("9", "10", "B", "b")])})
    with cases.case("list-per-layer") as c:
        want = {}
        for layer, count in ((0, 2), (7, 3)):
            want[f"l.{layer}.w"] = np.concatenate([c.tensor(f"l.{layer}.p.{i}", 2, 3) for i in range(count)], 1)
        c.step("concat", {"w": "l.{i}.p.{*n}"}, {"w": "l.{i}.w"}, dim=1)
        c.expect(want)


def filters(cases: CaseSet) -> None:
    """where: dtype, ndim, only, not; on sources and on what an earlier step made; with `each`."""
    with cases.case("where-ndim") as c:
        m, v, t = c.tensor("a.m", 2, 3), c.tensor("a.v", 3), c.tensor("a.t", 2, 3, 4)
        c.same("cast", "w", "{p...}", dtype="F32", extra="where = { ndim = [2, 3] }\n")
        c.expect({"a.m": to_f32(m), "a.v": v, "a.t": to_f32(t)})
    with cases.case("where-only-not") as c:
        names = ["h.0.w", "h.0.norm.w", "h.1.w", "g.w", "h.1.b"]
        values = {name: c.tensor(name, 2, 2) for name in names}
        c.same("cast", "w", "{p...}", dtype="F32", extra='where = { only = ["h.*", "zzz"], not = ["*norm*", "*.b"] }\n')
        c.expect({name: to_f32(x) if name in ("h.0.w", "h.1.w") else x for name, x in values.items()})
    with cases.case("where-all") as c:
        x = c.tensor("a", 4, dtype=F16)
        others = {
            "b": c.tensor("b", 4, dtype=F32),
            "c": c.tensor("c", 2, 2, dtype=F16),
            "d": c.tensor("d", 4, dtype=F16),
        }
        c.same(
            "cast",
            "w",
            "{n}",
            dtype="BF16",
            extra='where = { dtype = ["F16", "BF16"], ndim = [1], only = ["a", "b", "c"], not = ["d"] }\n',
        )
        c.expect({"a": convert(x, BF16), **others})
    with cases.case("where-after-step") as c:
        a, b = c.tensor("a", 4, dtype=F32), c.tensor("b", 4, dtype=F16)
        c.same("cast", "w", "a", dtype="F16")
        c.same("cast", "w", "{n}", dtype="BF16", extra='where = { dtype = ["F16"] }\n')
        c.expect({"a": convert(convert(a, F16), BF16), "b": convert(b, BF16)})
    with cases.case("where-after-view") as c:
        w = c.tensor("w", 12, 3, dtype=F32)
        c.step("qkv-split", {"qkv": "w"}, {p: f"s.{p}" for p in "qkv"}, num_heads=4, num_kv_heads=1, head_dim=2)
        c.same("cast", "w", "s.{n}", dtype="BF16", extra='where = { ndim = [2], not = ["s.v"] }\n')
        c.expect({"s.q": convert(w[:8], BF16), "s.k": convert(w[8:10], BF16), "s.v": w[10:]})


# ── configuration, chains, tp ──


def config(cases: CaseSet) -> None:
    """Dotted paths, arithmetic from left to right, JSON types, defaults."""
    variants: list[tuple[str, dict[str, Any] | None, dict[str, Any]]] = [
        ("config", {"text": {"heads": 2}}, {"groups": "$config.text.heads"}),
        ("config-default", {"x": 1}, {"groups": "$config.nope ?? 2"}),
        ("config-no-file", None, {"groups": "$config.nope.deep ?? 2"}),
        ("config-left-to-right", {"a": 6, "b": 4, "c": 12}, {"groups": "$config.a * $config.b / $config.c"}),
        ("config-integers", {"a": 8}, {"groups": "$config.a / 2 / 2", "head_dim": "$config.a * 3 / 12"}),
        ("config-types", {"o": "qkv", "r": False}, {"order": "$config.o", "kv_replication": "$config.r"}),
        ("config-default-json", {}, {"order": '$config.o ?? "qkv"', "kv_replication": "$config.r ?? false"}),
        ("config-unused-default", {"g": 2}, {"groups": "$config.g ?? 77"}),
    ]
    for name, document, params in variants:
        with cases.case(name) as c:
            w = c.tensor("h.0.qkv", 12, 8)
            c.config = document
            c.same("qkv-regroup", "qkv", "h.{i}.qkv", **(REGROUP | params))
            c.expect({"h.0.qkv": regrouped(w)})
    with cases.case("config-list") as c:
        c.config = {"map": {"order": [2, 0, 1, 1]}}
        stacked = add_experts(c, 3, 2, 3)
        c.step("moe-stack", {p: f"e.{{*e}}.{p}" for p in EXPERT}, {"w13": "w13", "w2": "w2"}, experts="$config.map.order")
        picked = {p: x[[2, 0, 1, 1]] for p, x in stacked.items()}
        c.expect({"w13": np.concatenate([picked["w1"], picked["w3"]], 1), "w2": picked["w2"]})


def chains(cases: CaseSet) -> None:
    """Steps that read what earlier ones made: views of views, casts of views, views of casts, sharded once."""
    s = cases.scale
    with cases.case("chain") as c:
        w = c.tensor("h.0.qkv", 12, 8)
        c.same("qkv-regroup", "qkv", "h.{i}.qkv", **REGROUP)
        c.step("cast", {"w": "h.{i}.qkv"}, {"w": "h.{i}.qkv32"}, dtype="F32")
        c.expect({"h.0.qkv32": to_f32(regrouped(w))})
    with cases.case("chain-views") as c:
        w = c.tensor("w", 6 * s, 5)
        c.same("permute", "w", "w", dims=[1, 0])
        c.same("slice", "w", "w", dim=1, start=s, stop=5 * s)
        c.same("gate-up", "gate_up", "w", op="interleave", dim=1)
        c.same("permute", "w", "w", dims=[1, 0])
        half = w[s : 5 * s].reshape(2, 2 * s, 5)
        c.expect({"w": half.swapaxes(0, 1).reshape(4 * s, 5)})
    with cases.case("chain-view-of-tiles") as c:
        w = c.tensor("w", 8, 6 * s, dtype=F32)
        c.same("cast", "w", "w", dtype="BF16")
        c.same("tp-shard", "w", "w", dim=1)
        for rank in range(3):
            c.expect({"w": np.split(convert(w, BF16), 3, 1)[rank]}, 3, rank)
    with cases.case("chain-tp-once") as c:
        w = c.tensor("w", 4 * 3 * 2, 3)
        c.same("qkv-regroup", "qkv", "w", groups=4, q_per_group=1, head_dim=2, extra="tp = false\n")
        c.same("tp-shard", "w", "w", dim=0)
        whole = fused(ungroup(w, 4, 1, 2))
        for rank in range(2):
            c.expect({"w": np.split(whole, 2)[rank]}, 2, rank)
    with cases.case("chain-one-source-twice") as c:
        w = c.tensor("w", 4, 6)
        c.step("slice", {"w": "w"}, {"w": "top"}, dim=0, start=0, stop=1, extra="keep_inputs = true\n")
        c.step("slice", {"w": "w"}, {"w": "rest"}, dim=0, start=1, stop=4)
        c.expect({"top": w[:1], "rest": w[1:]})
    with cases.case("guards") as c:
        w = c.tensor("w", 2, 2)
        c.text('[guards]\nsequence_parallel = "ulysses:2"\nanything = "ünïcode"')
        c.expect({"w": w})


# ── files and blocks ──


def layers(c: Case, groups: int, m: int, d: int, cols: int) -> dict[int, dict[str, np.ndarray]]:
    """Three layers with a grouped QKV and a norm; by tp size what rank size − 1 gets."""
    want: dict[int, dict[str, np.ndarray]] = {1: {}, 2: {}}
    for i in (0, 2, 10):
        w, norm = c.tensor(f"h.{i}.attn.qkv", groups * (m + 2) * d, cols), c.tensor(f"h.{i}.norm", cols, dtype=F32)
        for size in want:
            want[size] |= {f"h.{i}.attn.w": fused(ungroup(w, groups, m, d), size - 1, size), f"h.{i}.norm": norm}
    embedding = c.tensor("wte", 11, cols)
    for size in want:
        want[size]["wte"] = embedding
    return want


def files_and_blocks(cases: CaseSet) -> None:
    """Several files with and without an index; blocks in stream order; shards of a limited size."""
    s = cases.scale
    for name, index in (("layers", True), ("layers-no-index", False)):
        with cases.case(name) as c:
            c.files, c.index, c.config = 3, index, {"hidden": 48, "heads": 8}
            want = layers(c, 4, 2, 6, 18 * s)
            params = {"groups": 4, "q_per_group": 2, "head_dim": "$config.hidden / $config.heads"}
            c.step("qkv-regroup", {"qkv": "h.{i}.attn.qkv"}, {"qkv": "h.{i}.attn.w"}, **params)
            c.text('[blocks]\npatterns = ["h.{i}."]')
            for size, tensors in want.items():
                c.expect(tensors, size, size - 1, blocks=["rest", "h.0.", "h.2.", "h.10."])
    with cases.case("blocks-two-patterns") as c:
        names = ["dec.10.w", "dec.9.w", "enc.1.x.w", "enc.0.w", "enc.0.b", "final", "dec.9.b"]
        values = {name: c.tensor(name, 3, s) for name in names}
        c.text('[blocks]\npatterns = ["enc.{i}.", "dec.{i}.", "enc."]')
        c.expect(values, blocks=["rest", "enc.0.", "enc.1.", "dec.9.", "dec.10."])
    with cases.case("blocks-first-pattern-wins") as c:
        values = {name: c.tensor(name, 3, s) for name in ("a.0.w", "a.1.w", "a.x.y", "b")}
        c.text('[blocks]\npatterns = ["a.1.", "a.{i}.", "b"]')
        c.expect(values, blocks=["a.1.", "a.0.", "a.x.", "b"])
    with cases.case("blocks-after-rename") as c:
        values = {f"layers.{i}.w": c.tensor(f"h.{i}.w", 3, s) for i in (1, 0)}
        c.text('[names]\nrename = [["^h\\\\.", "layers."]]\n\n[blocks]\npatterns = ["layers.{i}."]')
        c.expect(values, blocks=["layers.0.", "layers.1."])
    with cases.case("max-shard") as c:
        names = ["h.0.a", "h.0.b", "h.0.c", "z", "y"]
        values = {name: c.put(name, c.rng.integers(0, 256, 7_000).astype(np.uint8)) for name in names}
        c.text('[blocks]\npatterns = ["h.{i}."]\n\n[layout]\nmax_shard = "12KiB"')
        c.expect(values, blocks=["rest", "rest", "h.0.", "h.0.", "h.0."])


def write(cases: CaseSet) -> None:
    """Every case of this file."""
    for family in (names, ties, captures, filters, config, chains, files_and_blocks):
        family(cases)
