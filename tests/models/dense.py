"""Dense models with q, k, v apart, or fused without groups."""

from __future__ import annotations

from typing import Any

import numpy as np
from casefile import BF16, F32, Case
from numeric import convert

from model import VOCABULARY, Model, numbered

QKV = ("q", "k", "v")


def decoder_config(model_type: str, **more: Any) -> dict[str, Any]:
    """The keys that the Llama-like families share."""
    return {
        "model_type": model_type,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-05,
        **more,
    }


def decoder_attention(m: Model, layer: str, hidden: int, heads: tuple[int, int, int], bias: bool = False) -> None:
    """self_attn with fused q, k, v, and the two norms of a layer."""
    p = f"{layer}self_attn."
    m.fuse([f"{p}{x}_proj.weight" for x in QKV], f"{p}qkv_proj.weight", heads, hidden)
    if bias:
        m.fuse([f"{p}{x}_proj.bias" for x in QKV], f"{p}qkv_proj.bias", heads)
    m.parted(f"{p}o_proj.weight", hidden, heads[0] * heads[2], axis=1)
    m.whole(f"{layer}input_layernorm.weight", hidden)
    m.whole(f"{layer}post_attention_layernorm.weight", hidden)


def decoder_mlp(m: Model, prefix: str, inner: int, hidden: int) -> None:
    """A gated MLP with gate and up fused."""
    m.gate_up([f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"], f"{prefix}gate_up_proj.weight", inner, hidden)
    m.parted(f"{prefix}down_proj.weight", hidden, inner, axis=1)


def decoder_ends(m: Model, hidden: int) -> None:
    """Embedding, last norm, output projection."""
    m.vocabulary("model.embed_tokens.weight", hidden)
    m.whole("model.norm.weight", hidden)
    m.vocabulary("lm_head.weight", hidden)


def llama(case: Case) -> None:
    """GQA with two KV heads, so that at tp 4 ranks share them; an old export's buffer."""
    hidden, heads, inner = 32, (8, 2, 4), 48
    config = decoder_config(
        "llama",
        hidden_size=hidden,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=inner,
        tie_word_embeddings=False,
    )
    m = Model(case, "llama", config)
    decoder_ends(m, hidden)
    for i in range(2):
        p = f"model.layers.{i}."
        decoder_attention(m, p, hidden, heads)
        decoder_mlp(m, p + "mlp.", inner, hidden)
        m.source(p + "self_attn.rotary_emb.inv_freq", 2, dtype=F32)
    case.files = 2
    m.finish(numbered("model.layers.", 2))


def qwen2(case: Case) -> None:
    """Biases on q, k, v; the output projection tied and absent from the files."""
    hidden, heads, inner = 24, (4, 2, 6), 40
    config = decoder_config(
        "qwen2",
        hidden_size=hidden,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=inner,
        tie_word_embeddings=True,
    )
    m = Model(case, "qwen2", config)
    m.vocabulary("model.embed_tokens.weight", hidden)
    m.alias("lm_head.weight", "model.embed_tokens.weight")
    m.whole("model.norm.weight", hidden)
    for i in range(2):
        p = f"model.layers.{i}."
        decoder_attention(m, p, hidden, heads, bias=True)
        decoder_mlp(m, p + "mlp.", inner, hidden)
    m.finish(numbered("model.layers.", 2))


def qwen3(case: Case) -> None:
    """Heads wider than hidden_size / num_attention_heads; norms of q and k."""
    hidden, heads, inner = 24, (4, 4, 8), 40
    config = decoder_config(
        "qwen3",
        hidden_size=hidden,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        intermediate_size=inner,
        tie_word_embeddings=False,
    )
    m = Model(case, "qwen3", config)
    decoder_ends(m, hidden)
    for i in range(2):
        p = f"model.layers.{i}."
        decoder_attention(m, p, hidden, heads)
        m.whole(p + "self_attn.q_norm.weight", 8)
        m.whole(p + "self_attn.k_norm.weight", 8)
        decoder_mlp(m, p + "mlp.", inner, hidden)
    m.finish(numbered("model.layers.", 2))


def phi3(case: Case) -> None:
    """QKV and gate-up fused in the checkpoint."""
    hidden, heads, kv_heads, d, inner = 32, 8, 4, 4, 40
    config = decoder_config(
        "phi3",
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        tie_word_embeddings=False,
    )
    m = Model(case, "phi3", config)
    decoder_ends(m, hidden)
    for i in range(2):
        p = f"model.layers.{i}."
        qkv = m.source(p + "self_attn.qkv_proj.weight", (heads + 2 * kv_heads) * d, hidden)
        q, k, v = np.split(qkv, [heads * d, (heads + kv_heads) * d])
        m.give_heads(p + "self_attn.qkv_proj.weight", (q, k, v), (heads, kv_heads, d))
        m.parted(p + "self_attn.o_proj.weight", hidden, hidden, axis=1)
        gate, up = np.split(m.source(p + "mlp.gate_up_proj.weight", 2 * inner, hidden), 2)
        m.give_both(p + "mlp.gate_up_proj.weight", gate, up)
        m.parted(p + "mlp.down_proj.weight", hidden, inner, axis=1)
        m.whole(p + "input_layernorm.weight", hidden)
        m.whole(p + "post_attention_layernorm.weight", hidden)
    m.finish(numbered("model.layers.", 2))


def gpt2(case: Case) -> None:
    """Conv1D weights [in, out], in F32; the causal mask dropped; a tie."""
    hidden, heads, inner = 16, 4, 64
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": hidden,
        "n_head": heads,
        "n_layer": 2,
        "n_inner": None,
        "n_positions": 8,
        "n_ctx": 8,
        "vocab_size": VOCABULARY,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-05,
    }
    m = Model(case, "gpt2", config, F32)
    m.renamed = lambda name: name if name == "lm_head.weight" else f"transformer.{name}"
    m.vocabulary("wte.weight", hidden)
    m.alias("lm_head.weight", "wte.weight")
    m.whole("wpe.weight", 8, hidden)
    for i in range(2):
        p = f"h.{i}."
        m.affine(p + "ln_1", hidden)
        m.affine(p + "ln_2", hidden)
        for kind, x in (
            ("weight", m.source(p + "attn.c_attn.weight", hidden, 3 * hidden).T),
            ("bias", m.source(p + "attn.c_attn.bias", 3 * hidden)),
        ):
            parts = np.split(x, 3)
            m.give_heads(f"{p}attn.c_attn.{kind}", parts, (heads, heads, hidden // heads))
        for name, rows, cols, axis in (
            ("attn.c_proj", hidden, hidden, 1),
            ("mlp.c_fc", hidden, inner, 0),
            ("mlp.c_proj", inner, hidden, 1),
        ):
            w = m.source(f"{p}{name}.weight", rows, cols).T
            m.give_part(f"{p}{name}.weight", w, axis)
        m.whole(p + "attn.c_proj.bias", hidden)
        m.parted(p + "mlp.c_fc.bias", inner)
        m.whole(p + "mlp.c_proj.bias", hidden)
        case.put(p + "attn.bias", np.tri(8, dtype=F32)[None, None])
    m.affine("ln_f", hidden)
    m.finish(numbered("transformer.h.", 2))


def minilm(case: Case) -> None:
    """BERT in F32: fused QKV, everything but LayerNorm and the integer position_ids to BF16."""
    hidden, heads, inner, layers = 16, 4, 24, 6
    config = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "max_position_embeddings": 8,
        "type_vocab_size": 2,
        "vocab_size": VOCABULARY,
        "layer_norm_eps": 1e-12,
    }
    m = Model(case, "minilm", config, F32)

    def cast(name: str, *shape: int) -> None:
        m.give_whole(name, convert(m.source(name, *shape), BF16))

    ids = case.put("embeddings.position_ids", np.arange(8, dtype=np.int64)[None])
    m.give_whole("embeddings.position_ids", ids)
    for name, rows in (("word", VOCABULARY), ("position", 8), ("token_type", 2)):
        cast(f"embeddings.{name}_embeddings.weight", rows, hidden)
    m.affine("embeddings.LayerNorm", hidden)
    for i in range(layers):
        p = f"encoder.layer.{i}."
        for kind, tail in (("weight", [hidden]), ("bias", [])):
            sources = [f"{p}attention.self.{x}.{kind}" for x in ("query", "key", "value")]
            m.fuse(sources, f"{p}attention.self.qkv.{kind}", (heads, heads, hidden // heads), *tail, cast=BF16)
        for name, rows, cols in (
            ("attention.output", hidden, hidden),
            ("intermediate", inner, hidden),
            ("output", hidden, inner),
        ):
            cast(f"{p}{name}.dense.weight", rows, cols)
            cast(f"{p}{name}.dense.bias", rows)
        m.affine(p + "attention.output.LayerNorm", hidden)
        m.affine(p + "output.LayerNorm", hidden)
    cast("pooler.dense.weight", hidden, hidden)
    cast("pooler.dense.bias", hidden)
    m.sizes = (1, 2)
    m.finish(numbered("encoder.layer.", layers))
