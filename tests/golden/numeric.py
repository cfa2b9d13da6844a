"""Cases of the modules that compute: casts, FP8, MXFP4, GPTQ, AWQ, weight norm, LoRA.

numpy and ml_dtypes round to nearest even, which is what the modules must do; they treat NaN payloads differently, so every
conversion that can meet a NaN is made here on bit patterns.
"""

from __future__ import annotations

import numpy as np

from casefile import BF16, F8, F8_FNUZ, F16, F32, Case, CaseSet

f32 = np.float32

# ── casts ──

EDGES_F32 = [
    0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00000001, 0x80000000, 0x7F800000, 0xFF800000, 0x00008000,
    0x00018000, 0x807FFFFF, 0x33000000, 0x33000001, 0x33800000, 0x387FC000, 0x387FE000, 0x38800000, 0x477FE000,
    0x477FEFFF, 0x477FF000, 0xC77FF000, 0x7F7F7FFF, 0x7F7F8000, 0xBF818000,
]  # fmt: skip
NANS_F32 = [0x7F800001, 0x7FC12345, 0xFFFFFFFF, 0xFF800001, 0x7FC00000, 0x7FBFFFFF, 0xFFA0FFFF]
BITS = {BF16: np.uint16, F16: np.uint16, F32: np.uint32}


def bits_of(x: np.ndarray) -> np.ndarray:
    """The bit patterns of a float array."""
    return np.asarray(x, order="C").view(BITS[x.dtype])


def widen(x: np.ndarray) -> np.ndarray:
    """BF16 or F16 to F32: exact; a NaN keeps its sign and its bits, shifted."""
    if x.dtype == F32:
        return x
    u = bits_of(x).astype(np.uint32)
    if x.dtype == BF16:
        return (u << 16).view(F32)
    nan = (u & 0x8000) << 16 | 0x7F800000 | (u & 0x3FF) << 13
    is_nan = (u & 0x7FFF) > 0x7C00
    with np.errstate(invalid="ignore"):
        return np.where(is_nan, nan, bits_of(x.astype(F32))).astype(np.uint32).view(F32)


def narrow(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """F32 to BF16 or F16: nearest even, and the NaN rules of `cast`."""
    if dtype == F32:
        return x
    u = bits_of(x)
    if dtype == BF16:
        nan = u >> 16 | 0x40
    else:
        nan = (u >> 16 & 0x8000) | 0x7E00 | (u & 0x7FFFFF) >> 13
    with np.errstate(all="ignore"):
        rounded = bits_of(x.astype(dtype))
    return np.where(np.isnan(x), nan, rounded).astype(np.uint16).view(dtype)


def convert(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """What `cast` makes of x: to the own dtype nothing changes, else by way of F32."""
    return x if x.dtype == dtype else narrow(widen(x), dtype)


NAME = {BF16: "BF16", F16: "F16", F32: "F32"}


def spread(c: Case, count: int) -> np.ndarray:
    """F32 values of all magnitudes, with the edge cases first."""
    edges = np.array(EDGES_F32, np.uint32).view(F32)
    scale = f32(10) ** c.rng.integers(-44, 38, count).astype(F32)
    return np.concatenate([edges, (c.rng.standard_normal(count).astype(F32) * scale).astype(F32)])


def casts(cases: CaseSet) -> None:
    """Every pair of dtypes, with NaNs of every kind; chains of casts."""
    s = cases.scale
    with cases.case("cast-bf16") as c:
        w, norm = c.put("w", spread(c, 500 * s)), c.tensor("norm", 8, dtype=F32)
        c.same("cast", "w", "{path...}", dtype="BF16", extra='where = { dtype = ["F32"], not = ["norm"] }\n')
        c.expect({"w": convert(w, BF16), "norm": norm})
    with cases.case("cast-f16") as c:
        w = c.put("w", spread(c, 500 * s))
        c.same("cast", "w", "w", dtype="F16")
        c.expect({"w": convert(w, F16)})
    nans = np.array(NANS_F32, np.uint32).view(F32)
    for name, dtype in (("cast-nan", BF16), ("cast-nan-f16", F16)):
        with cases.case(name) as c:
            c.put("w", nans)
            c.same("cast", "w", "w", dtype=NAME[dtype])
            c.expect({"w": convert(nans, dtype)})
    for source in (BF16, F16, F32):
        for target in (BF16, F16, F32):
            with cases.case(f"cast-{NAME[source]}-{NAME[target]}".lower()) as c:
                patterns = c.rng.integers(0, 1 << 16, 600 * s).astype(np.uint16)
                if source == F32:
                    low = c.rng.integers(0, 1 << 16, 600 * s).astype(np.uint32)
                    w = (patterns.astype(np.uint32) << 16 | low).view(F32)
                else:
                    special = [
                        0,
                        0x8000,
                        0x7C00,
                        0xFC00,
                        0x7C01,
                        0x7E01,
                        0xFFFF,
                        0x7F80,
                        0xFF80,
                        0x7F81,
                        1,
                        0x8001,
                        0x3FF,
                    ]
                    w = np.concatenate([np.array(special, np.uint16), patterns]).view(source)
                c.put("w", w)
                c.same("cast", "w", "w", dtype=NAME[target])
                c.expect({"w": convert(w, target)})
    chains(cases)


def chains(cases: CaseSet) -> None:
    """Casts after casts, with ties where each rounds again; shapes with no elements and no dimensions."""
    s = cases.scale
    with cases.case("cast-chain") as c:
        ties = np.array([0x3F807FFF, 0x3F808000, 0x3F817FFF, 0x3F80F000, 0x3F801000, 0x3F803000, 0x38001000], np.uint32)
        w = c.put("a", np.concatenate([ties.view(F32), c.floats(200 * s, dtype=F32)]))
        c.step("cast", {"w": "a"}, {"w": "b"}, dtype="F16")
        c.step("cast", {"w": "b"}, {"w": "c"}, dtype="BF16")
        c.step("cast", {"w": "c"}, {"w": "d"}, dtype="F32")
        c.expect({"d": convert(convert(convert(w, F16), BF16), F32)})
    with cases.case("cast-shapes") as c:
        shapes = {"scalar": (), "empty": (0,), "empty2": (3, 0, 2), "cube": (2, 3 * s, 5), "one": (1, 1, 1, 1)}
        inputs = {name: c.tensor(name, *shape, dtype=F32) for name, shape in shapes.items()}
        c.same("cast", "w", "{n}", dtype="BF16")
        want = {name: convert(x, BF16) for name, x in inputs.items()}
        c.expect(want)
        c.expect(want, 2, 1)


# ── FP8 ──


def quantise(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Saturating x · (1/scale) as e4m3fn; both operations rounded to F32."""
    product = (widen(x) * (f32(1) / scale).astype(F32)).astype(F32)
    return np.clip(product, f32(-448), f32(448)).astype(F8)


def scale_of(amax: np.ndarray) -> np.ndarray:
    """The scale of a tensor or a row: 1 where everything is 0."""
    with np.errstate(under="ignore"):
        scale = np.maximum((amax / f32(448)).astype(F32), f32(2.0**-126))
    return np.where(amax == 0, f32(1), scale).astype(F32)


def block_amax(x: np.ndarray) -> np.ndarray:
    """The largest magnitude of every 128 × 128 block, edges included."""
    padded = np.pad(np.abs(widen(x)), [(0, -n % 128) for n in x.shape])
    return padded.reshape(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128).max((1, 3))


def block_scale(x: np.ndarray, ue8m0: bool) -> np.ndarray:
    """Block scales; with ue8m0 the smallest power of two that is not below."""
    scale = (np.maximum(block_amax(x), f32(1e-4)) / f32(448)).astype(F32)
    if not ue8m0:
        return scale
    fraction, exponent = np.frexp(scale)
    return np.ldexp(f32(1), np.where(fraction == 0.5, exponent - 1, exponent)).astype(F32)


def over_blocks(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Block scales repeated over the elements."""
    return np.repeat(np.repeat(scale, 128, 0), 128, 1)[: shape[0], : shape[1]]


def fp8_quantize(cases: CaseSet) -> None:
    """Every scheme; channels of 1-D, 2-D and 3-D tensors; every input dtype."""
    s = cases.scale
    step_out = {"w": "w", "scale": "w_scale"}
    for suffix, dtype, shape in (("", BF16, (130 * s, 200)), ("-f16", F16, (7, 3 * s)), ("-f32", F32, (3, 50 * s))):
        with cases.case(f"fp8-tensor{suffix}") as c:
            w = c.tensor("w", *shape, dtype=dtype)
            w[0] = 0
            c.step("fp8-quantize", {"w": "w"}, step_out, scheme="tensor")
            scale = scale_of(np.abs(widen(w)).max().reshape(1))
            for size, rank in ((1, 0), (2, 1)):
                c.expect({"w": quantise(w, scale), "w_scale": scale}, size, rank)
    channels: dict[str, tuple[np.dtype, tuple[int, ...]]] = {
        "": (BF16, (130 * s, 200)),
        "-1d": (F32, (40 * s,)),
        "-3d": (F16, (5, 6, 7 * s)),
        "-4d": (BF16, (3, 2, 2, 5 * s)),
    }
    for suffix, (dtype, channel_shape) in channels.items():
        with cases.case(f"fp8-channel{suffix}") as c:
            w = c.tensor("w", *channel_shape, dtype=dtype)
            w[0] = 0
            c.step("fp8-quantize", {"w": "w"}, step_out, scheme="channel")
            scale = scale_of(np.abs(widen(w)).reshape(channel_shape[0], -1).max(1, keepdims=True))
            q = quantise(w, scale.reshape(-1, *[1] * (len(channel_shape) - 1)))
            c.expect({"w": q, "w_scale": scale})
    for suffix, ue8m0, dtype, shape in (
        ("", False, BF16, (130 * s, 200)),
        ("-ue8m0", True, BF16, (130 * s, 200)),
        ("-small", False, F32, (3, 5 * s)),
        ("-edge", True, F32, (1, 257)),
    ):
        with cases.case(f"fp8-block{suffix}") as c:
            w = c.tensor("w", *shape, dtype=dtype)
            w[0, :130] = 0
            c.step(
                "fp8-quantize",
                {"w": "w"},
                {"w": "w", "scale": "w_scale_inv"},
                scheme="block",
                **({"ue8m0": True} if ue8m0 else {}),
            )
            scale = block_scale(w, ue8m0)
            c.expect({"w": quantise(w, over_blocks(scale, w.shape)), "w_scale_inv": scale})
    fp8_extremes(cases)


def fp8_extremes(cases: CaseSet) -> None:
    """Exact powers of two, floors of the scale, zeros, the largest numbers."""
    with cases.case("fp8-block-exact") as c:
        w = np.zeros((256, 256), BF16)
        w[:128, :128] = 448.0 * 0.25
        w[130, 5] = 1e-30
        c.put("w", w)
        c.step("fp8-quantize", {"w": "w"}, {"w": "w", "scale": "s"}, scheme="block", ue8m0=True)
        scale = block_scale(w, True)
        c.expect({"w": quantise(w, over_blocks(scale, w.shape)), "s": scale})
    values = {
        "tiny": [1e-38, -2e-38, 0, 5e-39],
        "zero": [0.0, -0.0, 0.0],
        "huge": [3.4028235e38, -1e38, 2e35, -0.0, 1.0],
        "ties": [448.0, 17.0, 19.0, 0.0009765625, 0.0029296875, 432.0, -416.0, 0.00048828125],
    }
    for name, row in values.items():
        for scheme in ("tensor", "channel"):
            with cases.case(f"fp8-{name}" if scheme == "tensor" else f"fp8-{name}-channel") as c:
                w = c.put("w", np.array([row], F32))
                c.step("fp8-quantize", {"w": "w"}, {"w": "w", "scale": "s"}, scheme=scheme)
                scale = scale_of(np.abs(w).max(1, keepdims=True))
                c.expect({"w": quantise(w, scale), "s": scale.reshape(1) if scheme == "tensor" else scale})


def codes(c: Case, *shape: int) -> np.ndarray:
    """FP8 codes without the two that are NaN."""
    q = c.rng.integers(0, 256, shape).astype(np.uint8)
    q[(q & 0x7F) == 0x7F] = 0x80
    return q


def spread_scale(scheme: str, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A scale in a form that broadcasts over its weight."""
    if scheme == "block":
        return over_blocks(scale, shape)
    return scale.reshape([-1 if scheme == "channel" else 1] + [1] * (len(shape) - 1))


def fp8_dequantize(cases: CaseSet) -> None:
    """Every scheme and scale shape, to both dtypes."""
    s = cases.scale
    variants = [
        ("tensor", "tensor", (9, 40), (1,), F32),
        ("tensor-scalar", "tensor", (9, 7 * s), (), BF16),
        ("channel", "channel", (9, 40), (9, 1), F32),
        ("channel-bf16", "channel", (3 * s, 5), (3 * s, 1), BF16),
        ("channel-1d", "channel", (11 * s,), (11 * s, 1), F32),
        ("channel-3d", "channel", (4, 3, 5 * s), (4, 1), BF16),
        ("block", "block", (130 * s, 200), None, BF16),
        ("block-f32", "block", (129, 3 * s), None, F32),
    ]
    for name, scheme, shape, scale_shape, dtype in variants:
        with cases.case(f"fp8-dequant-{name}") as c:
            q = c.put("w", codes(c, *shape).view(F8))
            if scale_shape is None:
                scale_shape = tuple(-(-n // 128) for n in shape)
            scale = c.put("s", np.abs(c.floats(*scale_shape, dtype=F32)) + f32(0.01))
            c.step("fp8-dequantize", {"w": "w", "scale": "s"}, {"w": "w"}, scheme=scheme, dtype=NAME[dtype])
            spread = spread_scale(scheme, scale, shape)
            c.expect({"w": narrow((q.astype(F32) * spread).astype(F32), dtype)})
    for name, shape, scale_shape in (("fp8-fnuz", (400 * s,), (1,)), ("fp8-fnuz-2d", (5, 7 * s), (5, 1))):
        with cases.case(name) as c:
            q, scale = codes(c, *shape), np.abs(c.floats(*scale_shape, dtype=F32)) + f32(0.01)
            c.put("w", q.view(F8))
            c.put("s", scale)
            c.step("fp8-fnuz", {"w": "w", "scale": "s"}, {"w": "w", "scale": "s"})
            c.expect({"w": np.where(q == 0x80, 0, q).astype(np.uint8).view(F8_FNUZ), "s": scale * f32(2)})


# ── 4-bit formats ──

MXFP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)


def mxfp4_values(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The values of E2M1 nibbles, low one first, times 2^(scale − 127)."""
    table = np.concatenate([MXFP4_VALUES, -MXFP4_VALUES])
    nibbles = np.stack([table[blocks & 15], table[blocks >> 4]], -1).reshape(*blocks.shape[:-1], 32)
    with np.errstate(over="ignore"):
        values = np.ldexp(nibbles, scales[..., None].astype(np.int32) - 127).astype(F32)
    return values.reshape(*blocks.shape[:-2], -1)


def mxfp4(cases: CaseSet) -> None:
    """Several ranks, and scales from the smallest to the largest."""
    s = cases.scale
    variants = {
        "": ((2, 6 * s, 3), 110, 140),
        "-matrix": ((5 * s, 2), 120, 130),
        "-5d": ((2, 1, 3, 2 * s), 100, 150),
        "-range": ((2, 64), 0, 255),
    }
    for suffix, (shape, low, high) in variants.items():
        with cases.case(f"mxfp4{suffix}") as c:
            blocks = c.put("b", c.rng.integers(0, 256, (*shape, 16)).astype(np.uint8))
            scales = c.put("s", c.rng.integers(low, high, shape).astype(np.uint8))
            c.step("mxfp4-dequantize", {"blocks": "b", "scales": "s"}, {"w": "w"}, dtype="BF16")
            want = {"w": narrow(mxfp4_values(blocks, scales), BF16)}
            c.expect(want)
            c.expect(want, 2, 1)


def pack_nibbles(values: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Eight 4-bit numbers along an axis to one I32; nibble i holds number order[i]."""
    eights = np.moveaxis(values, axis, -1)
    eights = eights.reshape(*eights.shape[:-1], -1, 8).astype(np.uint32)
    words = np.zeros(eights.shape[:-1], np.uint32)
    for i, number in enumerate(order):
        words |= eights[..., number] << np.uint32(4 * i)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def gptq(cases: CaseSet) -> None:
    """v1 and v2, with and without g_idx, every output dtype, every scale dtype."""
    s = cases.scale
    variants = [
        ("gptq", 64, 16 * s, 32, True, "random", F16, F16),
        ("gptq-v1-true", 64, 8, 16, True, None, F32, BF16),
        ("gptq-v1-false", 64, 8, 16, False, None, F32, BF16),
        ("gptq-f32", 32, 8 * s, 8, False, "random", BF16, F32),
        ("gptq-one-group", 40, 8, 40, True, "plain", F16, F32),
    ]
    for name, k, n, group, v1, g_idx, scale_dtype, dtype in variants:
        with cases.case(name) as c:
            q, z = c.rng.integers(0, 16, (k, n)), c.rng.integers(0, 16, (k // group, n))
            z[0, :3] = 15
            scales = np.abs(c.floats(k // group, n, dtype=scale_dtype)) + scale_dtype.type(0.0625)
            groups = np.arange(k) // group
            inputs = {"qweight": "qw", "qzeros": "qz", "scales": "s"}
            if g_idx:
                groups = c.rng.permutation(groups) if g_idx == "random" else groups
                c.put("g", groups.astype(np.int32))
                inputs["g_idx"] = "g"
            c.put("qw", pack_nibbles(q, 0))
            c.put("qz", pack_nibbles(z, 1))
            c.put("s", scales)
            c.step("gptq-dequantize", inputs, {"w": "w"}, bits=4, group_size=group, v1=v1, dtype=NAME[dtype])
            whole = q - (z[groups] + (1 if v1 else 0))
            c.expect({"w": narrow((widen(scales)[groups] * whole.astype(F32)).astype(F32), dtype)})


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(cases: CaseSet) -> None:
    """Every output dtype and scale dtype."""
    s = cases.scale
    for name, k, n, group, scale_dtype, dtype in (
        ("awq", 64, 16 * s, 32, F16, F16),
        ("awq-bf16", 32, 8, 8, F16, BF16),
        ("awq-f32", 24 * s, 24, 12, BF16, F32),
        ("awq-f32-scales", 16, 8 * s, 16, F32, F16),
    ):
        with cases.case(name) as c:
            q, z = c.rng.integers(0, 16, (k, n)), c.rng.integers(0, 16, (k // group, n))
            scales = c.put("s", np.abs(c.floats(k // group, n, dtype=scale_dtype)) + scale_dtype.type(0.0625))
            c.put("qw", pack_nibbles(q, 1, AWQ_ORDER))
            c.put("qz", pack_nibbles(z, 1, AWQ_ORDER))
            c.step(
                "awq-dequantize",
                {"qweight": "qw", "qzeros": "qz", "scales": "s"},
                {"w": "w"},
                bits=4,
                group_size=group,
                dtype=NAME[dtype],
            )
            groups = np.arange(k) // group
            c.expect({"w": narrow((widen(scales)[groups] * (q - z[groups]).astype(F32)).astype(F32), dtype)})


# ── merges ──


def weight_norm(cases: CaseSet) -> None:
    """g as [O] and as [O, 1, …]; F32, F16 and BF16."""
    s = cases.scale
    for name, v_shape, g_shape, v_dtype, g_dtype in (
        ("weight-norm", (9, 5, 7 * s), (9, 1, 1), F32, F32),
        ("weight-norm-flat-g", (6, 11 * s), (6,), F32, F32),
        ("weight-norm-bf16", (4, 3, 5 * s), (4, 1, 1), BF16, BF16),
        ("weight-norm-f16", (5, 8 * s), (5, 1), F16, F32),
    ):
        with cases.case(name) as c:
            g, v = c.tensor("g", *g_shape, dtype=g_dtype), c.tensor("v", *v_shape, dtype=v_dtype)
            c.step("weight-norm-fold", {"g": "g", "v": "v"}, {"w": "w"}, dim=0)
            flat = widen(v).reshape(v_shape[0], -1)
            squares = np.zeros(v_shape[0], F32)
            for column in flat.T:
                squares = (squares + (column * column).astype(F32)).astype(F32)
            ratio = (widen(g).reshape(-1) / np.sqrt(squares).astype(F32)).astype(F32)
            c.expect({"w": narrow((flat * ratio[:, None]).astype(F32).reshape(v_shape), v_dtype)})


def lora(cases: CaseSet) -> None:
    """Every dtype of w; a scale that F32 cannot hold; rank 1."""
    s = cases.scale
    for name, out, rank, cols, w_dtype, ab_dtype, scale in (
        ("lora", 24, 5, 16 * s, BF16, F32, 0.75),
        ("lora-f32", 20, 64, 30, F32, F32, 0.3),
        ("lora-f16", 7, 3, 9 * s, F16, BF16, 2),
        ("lora-rank-1", 5 * s, 1, 4, F32, F16, 0.1),
    ):
        with cases.case(name) as c:
            w = c.tensor("w", out, cols, dtype=w_dtype)
            a, b = c.tensor("a", rank, cols, dtype=ab_dtype), c.tensor("b", out, rank, dtype=ab_dtype)
            c.step("lora-merge", {"w": "w", "a": "a", "b": "b"}, {"w": "w"}, scale=scale)
            product = np.zeros(w.shape, F32)
            for r in range(rank):
                product = (product + (widen(b)[:, r, None] * widen(a)[r]).astype(F32)).astype(F32)
            c.expect({"w": narrow((widen(w) + (f32(scale) * product).astype(F32)).astype(F32), w_dtype)})


def write(cases: CaseSet) -> None:
    """Every case of this file."""
    for family in (casts, fp8_quantize, fp8_dequantize, mxfp4, gptq, awq, weight_norm, lora):
        family(cases)
