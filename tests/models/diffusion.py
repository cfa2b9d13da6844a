"""Diffusion transformers."""

from __future__ import annotations

import numpy as np
from casefile import BF16, F16, F32, Case

from dense import QKV
from model import Model, numbered


def minimax_h3(case: Case) -> None:
    """The DiT: F32 at the edges, BF16 inside; heads wider than the model; the token refiner in "rest"."""
    hidden, heads, d, inner, time = 16, 4, 8, 24, 8
    config = {
        "hidden_size": hidden,
        "num_layers": 3,
        "token_refiner_num_layers": 1,
        "num_attention_heads": heads,
        "attention_head_dim": d,
        "ffn_hidden_size": inner,
        "latents_dim": 6,
        "audio_latents_dim": 8,
        "patch_size": [1, 2, 2],
        "text_dim": 20,
        "timestep_input_dim": 16,
        "time_embed_hidden_size": hidden,
        "time_embed_dim": time,
        "rope_inv_freq_len": 1,
        "adaln_out_features": 18 * hidden,
        "final_adaln_out_features": 2 * hidden,
        "norm_eps": 1e-05,
        "qk_norm_eps": 1e-05,
    }
    m = Model(case, "minimax-h3", config)
    for name, rows, cols, dtype in (
        ("video_patch_proj", hidden, 24, F32),
        ("audio_patch_proj", hidden, 8, F32),
        ("condition_proj", hidden, 20, BF16),
        ("time_embedder.proj_in", hidden, 16, F32),
        ("time_embedder.proj_out", time, hidden, F32),
        ("final_layer.adaln_proj.linear", 2 * hidden, time, BF16),
        ("final_layer.video_out", 24, hidden, F32),
        ("final_layer.audio_out", 8, hidden, F32),
    ):
        m.whole(f"{name}.weight", rows, cols, dtype=dtype)
        m.whole(f"{name}.bias", rows, dtype=dtype)
    m.whole("final_layer.norm.weight", hidden)
    m.whole("token_refiner.final_norm.weight", hidden)
    m.whole("rope.inv_freq", 1, dtype=F32)
    for p in ("token_refiner.blocks.0.", "blocks.0.", "blocks.1.", "blocks.2."):
        m.whole(p + "norm1.weight", hidden)
        m.whole(p + "norm2.weight", hidden)
        m.whole(p + "attn.q_norm.weight", d)
        m.whole(p + "attn.k_norm.weight", d)
        m.grouped(p + "attn.qkv_proj.weight", heads, 1, d, hidden)
        m.parted(p + "attn.out_proj.weight", hidden, heads * d, axis=1)
        gate, up = np.split(m.source(p + "mlp.fc1.weight", 2 * inner, hidden), 2)
        m.give_both(p + "mlp.fc1.weight", gate, up)
        m.parted(p + "mlp.fc2.weight", hidden, inner, axis=1)
        if p.startswith("blocks"):
            m.whole(p + "adaln_proj.linear.weight", 18 * hidden, time)
            m.whole(p + "adaln_proj.linear.bias", 18 * hidden)
    case.files = 2
    m.finish(numbered("blocks.", 3))


def sd3(case: Case) -> None:
    """Two streams; the last block has no text output; halves swapped; the patch embedding as a matrix."""
    heads, d, channels, patch, text = 4, 4, 4, 2, 20
    hidden, inner = heads * d, 4 * heads * d
    config = {
        "_class_name": "SD3Transformer2DModel",
        "num_attention_heads": heads,
        "attention_head_dim": d,
        "num_layers": 24,
        "in_channels": channels,
        "out_channels": channels,
        "patch_size": patch,
        "joint_attention_dim": text,
        "caption_projection_dim": hidden,
        "pooled_projection_dim": 10,
        "pos_embed_max_size": 3,
        "sample_size": 4,
    }
    m = Model(case, "sd3", config, F16)

    def linear(name: str, rows: int, cols: int) -> None:
        m.whole(f"{name}.weight", rows, cols)
        m.whole(f"{name}.bias", rows)

    def swapped(name: str, rows: int, cols: int) -> None:
        for kind, tail in (("weight", (cols,)), ("bias", ())):
            m.give_whole(f"{name}.linear.{kind}", np.roll(m.source(f"{name}.linear.{kind}", rows, *tail), rows // 2, 0))

    def row_parallel(name: str, cols: int) -> None:
        m.parted(f"{name}.weight", hidden, cols, axis=1)
        m.whole(f"{name}.bias", hidden)

    def feed_forward(name: str) -> None:
        m.parted(f"{name}.net.0.proj.weight", inner, hidden)
        m.parted(f"{name}.net.0.proj.bias", inner)
        row_parallel(f"{name}.net.2", inner)

    m.whole("pos_embed.pos_embed", 1, 9, hidden)
    convolution = m.source("pos_embed.proj.weight", hidden, channels, patch, patch).transpose(0, 2, 3, 1).reshape(hidden, -1)
    m.give_whole("pos_embed.proj.weight", convolution)
    m.whole("pos_embed.proj.bias", hidden)
    linear("time_text_embed.timestep_embedder.linear_1", hidden, 16)
    linear("time_text_embed.timestep_embedder.linear_2", hidden, hidden)
    linear("time_text_embed.text_embedder.linear_1", hidden, 10)
    linear("time_text_embed.text_embedder.linear_2", hidden, hidden)
    linear("context_embedder", hidden, text)
    swapped("norm_out", 2 * hidden, hidden)
    linear("proj_out", patch * patch * channels, hidden)
    for layer in (0, 23):
        p, last = f"transformer_blocks.{layer}.", layer == 23
        for kind, tail in (("weight", (hidden,)), ("bias", ())):
            m.fuse([f"{p}attn.to_{x}.{kind}" for x in QKV], f"{p}attn.to_qkv.{kind}", (heads, heads, d), *tail)
            m.fuse([f"{p}attn.add_{x}_proj.{kind}" for x in QKV], f"{p}attn.add_kv_proj.{kind}", (heads, heads, d), *tail)
        row_parallel(p + "attn.to_out.0", hidden)
        linear(p + "norm1.linear", 6 * hidden, hidden)
        feed_forward(p + "ff")
        if last:
            swapped(p + "norm1_context", 2 * hidden, hidden)
        else:
            row_parallel(p + "attn.to_add_out", hidden)
            linear(p + "norm1_context.linear", 6 * hidden, hidden)
            feed_forward(p + "ff_context")
    m.finish(["transformer_blocks.0.", "transformer_blocks.23."])
