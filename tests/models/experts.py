"""Mixtures of experts."""

from __future__ import annotations

import numpy as np
from casefile import BF16, F8, F32, Case
from numeric import codes, mxfp4_values, narrow, over_blocks

from dense import decoder_attention, decoder_config, decoder_ends, decoder_mlp
from model import Model, numbered


def mixtral(case: Case) -> None:
    """w1, w3, w2 of twelve experts, so that their order is numeric."""
    hidden, heads, inner, count = 16, (4, 2, 4), 8, 12
    config = decoder_config(
        "mixtral",
        hidden_size=hidden,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=inner,
        num_local_experts=count,
        tie_word_embeddings=False,
    )
    m = Model(case, "mixtral", config)
    decoder_ends(m, hidden)
    for i in range(2):
        p = f"model.layers.{i}."
        decoder_attention(m, p, hidden, heads)
        e = p + "block_sparse_moe."
        m.whole(e + "gate.weight", count, hidden)
        m.experts(
            e + "experts.{e}.{part}.weight",
            ("w1", "w3", "w2"),
            [e + "experts.w13_weight", e + "experts.w2_weight"],
            count,
            inner,
            hidden,
        )
    case.files = 3
    m.finish(numbered("model.layers.", 2))


def qwen_moe(m: Model, hidden: int, heads: tuple[int, int, int], inner: int, count: int, *, bias: bool) -> None:
    """What the two generations of Qwen-MoE share."""
    decoder_ends(m, hidden)
    for i in range(2):
        p = f"model.layers.{i}."
        decoder_attention(m, p, hidden, heads, bias=bias)
        m.whole(p + "mlp.gate.weight", count, hidden)
        names = [p + "mlp.experts.w13_weight", p + "mlp.experts.w2_weight"]
        m.experts(p + "mlp.experts.{e}.{part}.weight", ("gate_proj", "up_proj", "down_proj"), names, count, inner, hidden)


def qwen2_moe(case: Case) -> None:
    """Routed and shared experts, biases."""
    hidden, heads, inner, shared, count = 16, (4, 4, 4), 8, 24, 5
    config = decoder_config(
        "qwen2_moe",
        hidden_size=hidden,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=count,
        moe_intermediate_size=inner,
        shared_expert_intermediate_size=shared,
        intermediate_size=32,
        decoder_sparse_step=1,
        tie_word_embeddings=False,
    )
    m = Model(case, "qwen2-moe", config)
    qwen_moe(m, hidden, heads, inner, count, bias=True)
    for i in range(2):
        decoder_mlp(m, f"model.layers.{i}.mlp.shared_expert.", shared, hidden)
        m.whole(f"model.layers.{i}.mlp.shared_expert_gate.weight", 1, hidden)
    m.finish(numbered("model.layers.", 2))


def qwen3_moe(case: Case) -> None:
    """Routed experts only, and one dense layer, as mlp_only_layers allows."""
    hidden, heads, inner, count = 16, (4, 2, 8), 8, 6
    config = decoder_config(
        "qwen3_moe",
        hidden_size=hidden,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=count,
        moe_intermediate_size=inner,
        intermediate_size=32,
        mlp_only_layers=[2],
        tie_word_embeddings=False,
    ) | {"num_hidden_layers": 3}
    m = Model(case, "qwen3-moe", config)
    qwen_moe(m, hidden, heads, inner, count, bias=False)
    decoder_attention(m, "model.layers.2.", hidden, heads)
    decoder_mlp(m, "model.layers.2.mlp.", 32, hidden)
    for i in range(3):
        m.whole(f"model.layers.{i}.self_attn.q_norm.weight", 8)
        m.whole(f"model.layers.{i}.self_attn.k_norm.weight", 8)
    m.finish(numbered("model.layers.", 3))


def gpt_oss(case: Case) -> None:
    """MXFP4 experts with alternating rows of gate and up; sinks; biases."""
    hidden, heads, inner, count = 32, (4, 2, 8), 32, 3
    config = decoder_config(
        "gpt_oss",
        hidden_size=hidden,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=inner,
        num_local_experts=count,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        quantization_config={"quant_method": "mxfp4"},
    )
    m = Model(case, "gpt-oss", config)
    decoder_ends(m, hidden)

    def mxfp4(name: str, rows: int, cols: int) -> np.ndarray:
        blocks = case.put(f"{name}_blocks", case.rng.integers(0, 256, (count, rows, cols // 32, 16)).astype(np.uint8))
        scales = case.put(f"{name}_scales", case.rng.integers(118, 126, (count, rows, cols // 32)).astype(np.uint8))
        return narrow(mxfp4_values(blocks, scales), BF16)

    for i in range(2):
        p = f"model.layers.{i}."
        decoder_attention(m, p, hidden, heads, bias=True)
        m.whole(p + "self_attn.o_proj.bias", hidden)
        m.parted(p + "self_attn.sinks", 4)
        m.whole(p + "mlp.router.weight", count, hidden)
        m.whole(p + "mlp.router.bias", count)
        e = p + "mlp.experts."
        rows = mxfp4(e + "gate_up_proj", 2 * inner, hidden)
        for name, x in (
            ("gate_up_proj", rows),
            ("gate_up_proj_bias", m.source(e + "gate_up_proj_bias", count, 2 * inner)),
        ):
            m.give_both(e + name, x[:, 0::2], x[:, 1::2], 1)
        down = mxfp4(e + "down_proj", hidden, inner)
        m.give_part(e + "down_proj", down, 2)
        m.whole(e + "down_proj_bias", count, hidden)
    m.finish(numbered("model.layers.", 2))


def deepseek_v3(case: Case) -> None:
    """FP8 blocks with edges, a dense layer, a sparse layer, and a prediction layer that is dropped."""
    hidden, heads, q_rank, kv_rank, nope, rope, v, inner, count = 32, 4, 132, 8, 6, 2, 4, 8, 3
    config = decoder_config(
        "deepseek_v3",
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=q_rank,
        kv_lora_rank=kv_rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=v,
        intermediate_size=16,
        moe_intermediate_size=inner,
        n_routed_experts=count,
        n_shared_experts=1,
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
        tie_word_embeddings=False,
        quantization_config={
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        },
    ) | {"num_hidden_layers": 61}
    m = Model(case, "deepseek-v3", config)
    decoder_ends(m, hidden)

    def fp8(name: str, rows: int, cols: int) -> np.ndarray:
        q = case.put(f"{name}.weight", codes(case, rows, cols).view(F8))
        scale = np.abs(case.floats(-(-rows // 128), -(-cols // 128), dtype=F32)) * np.float32(2**-10) + np.float32(2**-14)
        case.put(f"{name}.weight_scale_inv", scale)
        return narrow((q.astype(F32) * over_blocks(scale, q.shape)).astype(F32), BF16)

    def parted(name: str, x: np.ndarray, axis: int) -> None:
        m.give_part(f"{name}.weight", x, axis)

    def mlp(prefix: str, width: int) -> None:
        gate, up = fp8(prefix + "gate_proj", width, hidden), fp8(prefix + "up_proj", width, hidden)
        m.give_both(prefix + "gate_up_proj.weight", gate, up)
        parted(prefix + "down_proj", fp8(prefix + "down_proj", hidden, width), 1)

    for layer in (0, 7):
        p = f"model.layers.{layer}."
        a = p + "self_attn."
        qkv_a = np.concatenate([fp8(a + "q_a_proj", q_rank, hidden), fp8(a + "kv_a_proj_with_mqa", kv_rank + rope, hidden)])
        m.give_whole(a + "fused_qkv_a_proj_with_mqa.weight", qkv_a)
        parted(a + "q_b_proj", fp8(a + "q_b_proj", heads * (nope + rope), q_rank), 0)
        parted(a + "kv_b_proj", fp8(a + "kv_b_proj", heads * (nope + v), kv_rank), 0)
        parted(a + "o_proj", fp8(a + "o_proj", hidden, heads * v), 1)
        m.whole(a + "q_a_layernorm.weight", q_rank)
        m.whole(a + "kv_a_layernorm.weight", kv_rank)
        m.whole(p + "input_layernorm.weight", hidden)
        m.whole(p + "post_attention_layernorm.weight", hidden)
    mlp("model.layers.0.mlp.", 16)
    e = "model.layers.7.mlp."
    m.whole(e + "gate.weight", count, hidden)
    m.whole(e + "gate.e_score_correction_bias", count, dtype=F32)
    mlp(e + "shared_experts.", inner)
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    stacks = [np.stack([fp8(f"{e}experts.{n}.{part}", *shape) for n in range(count)]) for part, shape in shapes.items()]
    m.stacked(stacks, [e + "experts.w13_weight", e + "experts.w2_weight"])
    m.source("model.layers.61.enorm.weight", hidden)
    fp8("model.layers.61.eh_proj", 4, hidden)
    case.files = 3
    m.finish(["model.layers.0.", "model.layers.7."])
