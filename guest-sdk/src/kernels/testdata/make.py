"""Writes the reference data of the kernels' tests beside this file.

An independent reference: numpy and ml_dtypes do the conversions and the
arithmetic, in the order that the kernels' documentation gives. Only NaNs are
made by hand, from the documented rules, because numpy and ml_dtypes treat their
payloads differently on purpose. Run it with numpy and ml_dtypes installed; the
output does not depend on their versions, and is committed.

Every file is a plain little-endian array; `tests.rs` knows the shapes.
"""

import os

import ml_dtypes as md
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
F, H, B, F8 = np.float32, np.float16, md.bfloat16, md.float8_e4m3fn
rng = np.random.default_rng(20240607)
CANONICAL = np.uint32(0x7FC00000)


def save(name, *arrays):
    with open(os.path.join(HERE, name + ".bin"), "wb") as file:
        for array in arrays:
            file.write(np.ascontiguousarray(array).tobytes())


def bits(array):
    return array.view({4: np.uint32, 2: np.uint16, 1: np.uint8}[array.dtype.itemsize])


def to_bf16(x):
    """f32 to BF16 bits."""
    u = bits(x)
    return np.where(np.isnan(x), (u >> 16) | 0x40, bits(x.astype(B))).astype(np.uint16)


def to_f16(x):
    """f32 to F16 bits."""
    u = bits(x)
    nan = ((u >> 16) & 0x8000) | 0x7E00 | ((u >> 13) & 0x3FF)
    return np.where(np.isnan(x), nan, bits(x.astype(H))).astype(np.uint16)


def from_f16(h):
    """F16 bits to f32."""
    u = h.astype(np.uint32)
    nan = ((u & 0x8000) << 16) | 0x7F800000 | ((u & 0x3FF) << 13)
    return np.where((u & 0x7FFF) > 0x7C00, nan, bits(h.view(H).astype(F))).astype(np.uint32).view(F)


def canonical(x):
    return np.where(np.isnan(x), CANONICAL, bits(x)).view(F)


def f32_patterns():
    """Every class of f32: each exponent with the mantissas at which some
    conversion ties or carries, both signs, the overflow thresholds, NaNs with
    payloads, and random bits up to 32,768 patterns."""
    mantissas = [0, 1, 2, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FFFF, 0x80000, 0x80001,
                 0x180000, 0x3FFFFF, 0x400000, 0x700000, 0x780000, 0x7F8000, 0x7FFFFF]
    made = [s << 31 | e << 23 | m for s in (0, 1) for e in range(256) for m in mantissas]
    near = [0x477FE000, 0x477FF000, 0x47800000, 0x7F7F8000, 0x43E00000, 0x43E80000, 0x33000000, 0x33800000, 0x38800000,
            0x3C800000, 0x3B000000, 0x3A800000]
    made += [n + d for n in near for d in range(-3, 4)]
    made += [0x7F800001, 0xFF800001, 0x7FA00000, 0x7FC12345, 0xFFFFFFFF, 0x7F802000, 0x7F801FFF]
    return np.concatenate([np.array(made, np.uint32), rng.integers(0, 1 << 32, 32768 - len(made), np.uint32)]).view(F)


def casts():
    x = f32_patterns()
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    as_bf16 = (every.astype(np.uint32) << 16).view(F)
    save("f32", x)
    save("f32_to_bf16", to_bf16(x))
    save("f32_to_f16", to_f16(x))
    save("bf16_to_f16", to_f16(as_bf16))
    save("f16_to_f32", from_f16(every))
    save("f16_to_bf16", to_bf16(from_f16(every)))
    return x


def fp8(x):
    x = x[np.isfinite(x)]
    codes = np.arange(256, dtype=np.uint8).view(F8)
    scales = np.array([1, 0.37, 2.0**-126, 448, 1e30, 3e-5], F)
    save("fp8_quantize", scales, *(np.clip(x * (F(1) / s), F(-448), F(448)).astype(F8) for s in scales))
    scales = np.array([1, 0.37, 0.013, 3.4e38, 2.0**-110, 2.0**-111, 2.0**110, 2.0**111, 2.0**-126, 1e-42, 0, -0.37,
                       np.inf, -np.inf, np.nan, 1.9999999], F)
    products = [canonical(codes.astype(F) * s) for s in scales]
    save("fp8_dequantize", scales, *products, *map(to_bf16, products))


def mxfp4():
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
    table = np.concatenate([table, -table])
    save("mxfp4", *((table * 2.0 ** (s - 127)).astype(F).astype(B) for s in range(255)))


def four_bit():
    """K 96, N 24, groups of 16: codes, zeros (15 included), scales in the
    three formats, g_idx; then for each scale format and each output format the
    results of gptq v1, gptq, gptq v1 with g_idx, awq."""
    K, N, g = 96, 24, 16
    q, z = rng.integers(0, 16, (K, N)), rng.integers(0, 16, (K // g, N))
    z[0, :4] = 15
    s = (rng.standard_normal((K // g, N)) * 10.0 ** rng.integers(-6, 3, (K // g, N))).astype(F)
    s[1, :6] = [0, -0.0, np.inf, np.nan, 1e-7, 3e38]
    s[2, :4] = [6e-8, 65504, 1e-5, -65504]
    g_idx = rng.permutation(np.arange(K) // g).astype(np.int32)

    def pack(nibbles, order):
        nibbles = nibbles.reshape(*nibbles.shape[:-1], -1, 8).astype(np.uint32)
        return sum(nibbles[..., order[i]] << np.uint32(4 * i) for i in range(8)).astype(np.uint32)

    plain, awq = list(range(8)), [0, 2, 4, 6, 1, 3, 5, 7]
    save("int4_codes", pack(np.ascontiguousarray(q.T), plain).T, pack(z, plain), pack(q, awq), pack(z, awq), g_idx)
    row = np.arange(K) // g
    with np.errstate(all="ignore"):
        stored = {"f32": s, "f16": to_f16(s).view(H), "bf16": to_bf16(s).view(B)}
        for name, scales in stored.items():
            f = scales.astype(F)
            results = [canonical(f[i] * (q - (z[i] + plus)).astype(F))
                       for i, plus in ((row, 1), (row, 0), (g_idx, 1), (row, 0))]
            save("int4_" + name, scales, *results, *map(to_f16, results), *map(to_bf16, results))


def rows():
    """weight-norm-fold: 11 rows of 37; lora-merge: 13 × 43, rank 5."""
    with np.errstate(all="ignore"):
        v = (rng.standard_normal((11, 37)) * 10.0 ** rng.integers(-8, 8, (11, 1))).astype(F)
        v[3, 5], v[4, 6], v[5, 7] = np.inf, np.nan, 1e25
        g = rng.standard_normal(11).astype(F)
        total = np.zeros(11, F)
        for j in range(37):
            total = total + v[:, j] * v[:, j]
        factor = canonical(g / canonical(np.sqrt(total)))
        save("weight_norm", g, v, canonical(v * factor[:, None]))

        w, a, b = (rng.standard_normal(shape).astype(F) for shape in ((13, 43), (5, 43), (13, 5)))
        w[1, 2], a[2, 3], b[4, 1] = np.nan, np.inf, 1e38
        w[5, 6] = np.uint32(0xFFA12345).view(F)
        total = np.zeros(w.shape, F)
        for k in range(5):
            total = total + b[:, k:k + 1] * a[k:k + 1]
        save("lora", w, a, b, canonical(w + canonical(F(0.3) * total)))


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        fp8(casts())
    mxfp4()
    four_bit()
    rows()
