"""Language models whose checkpoints hold a grouped QKV."""

from __future__ import annotations

import numpy as np
from casefile import F16, F32, Case

from model import VOCABULARY, Model, numbered


def gpt_neox(case: Case) -> None:
    """Pythia: F16, buffers that are dropped."""
    hidden, heads, inner = 24, 4, 32
    config = {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": 2,
        "intermediate_size": inner,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
        "torch_dtype": "float16",
        "use_parallel_residual": True,
    }
    m = Model(case, "gpt-neox", config, F16)
    m.vocabulary("gpt_neox.embed_in.weight", hidden)
    for i in range(2):
        p = f"gpt_neox.layers.{i}."
        m.affine(p + "input_layernorm", hidden)
        m.affine(p + "post_attention_layernorm", hidden)
        m.grouped(p + "attention.query_key_value.weight", heads, 1, hidden // heads, hidden)
        m.grouped(p + "attention.query_key_value.bias", heads, 1, hidden // heads)
        m.parted(p + "attention.dense.weight", hidden, hidden, axis=1)
        m.whole(p + "attention.dense.bias", hidden)
        m.parted(p + "mlp.dense_h_to_4h.weight", inner, hidden)
        m.parted(p + "mlp.dense_h_to_4h.bias", inner)
        m.parted(p + "mlp.dense_4h_to_h.weight", hidden, inner, axis=1)
        m.whole(p + "mlp.dense_4h_to_h.bias", hidden)
        case.put(p + "attention.bias", np.tri(6, dtype=np.bool_)[None, None])
        case.put(p + "attention.masked_bias", np.array(-1e4, F16))
        m.source(p + "attention.rotary_emb.inv_freq", 3, dtype=F32)
    m.affine("gpt_neox.final_layer_norm", hidden)
    m.vocabulary("embed_out.weight", hidden)
    m.finish(numbered("gpt_neox.layers.", 2))


def bloom(case: Case) -> None:
    """BLOOM-560m: names without a prefix, a norm after the embedding, a tie."""
    hidden, heads = 16, 4
    config = {
        "model_type": "bloom",
        "architectures": ["BloomForCausalLM"],
        "hidden_size": hidden,
        "n_head": heads,
        "n_layer": 2,
        "n_inner": None,
        "vocab_size": VOCABULARY,
        "layer_norm_epsilon": 1e-05,
        "torch_dtype": "float16",
    }
    m = Model(case, "bloom", config, F16)
    m.renamed = lambda name: name if name == "lm_head.weight" else f"transformer.{name}"
    m.vocabulary("word_embeddings.weight", hidden)
    m.alias("lm_head.weight", "word_embeddings.weight")
    m.affine("word_embeddings_layernorm", hidden)
    for i in range(2):
        p = f"h.{i}."
        m.affine(p + "input_layernorm", hidden)
        m.affine(p + "post_attention_layernorm", hidden)
        m.grouped(p + "self_attention.query_key_value.weight", heads, 1, hidden // heads, hidden)
        m.grouped(p + "self_attention.query_key_value.bias", heads, 1, hidden // heads)
        m.parted(p + "self_attention.dense.weight", hidden, hidden, axis=1)
        m.whole(p + "self_attention.dense.bias", hidden)
        m.parted(p + "mlp.dense_h_to_4h.weight", 4 * hidden, hidden)
        m.parted(p + "mlp.dense_h_to_4h.bias", 4 * hidden)
        m.parted(p + "mlp.dense_4h_to_h.weight", hidden, 4 * hidden, axis=1)
        m.whole(p + "mlp.dense_4h_to_h.bias", hidden)
    m.affine("ln_f", hidden)
    m.finish(numbered("transformer.h.", 2))


def falcon_40b(case: Case) -> None:
    """Two KV heads of four query heads each; at tp 4 two ranks share a group."""
    hidden, heads, kv_heads = 16, 8, 2
    config = {
        "model_type": "falcon",
        "architectures": ["FalconForCausalLM"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "num_hidden_layers": 2,
        "new_decoder_architecture": True,
        "bias": False,
        "alibi": False,
        "parallel_attn": True,
        "vocab_size": VOCABULARY,
        "torch_dtype": "bfloat16",
    }
    m = Model(case, "falcon-40b", config)
    embedding = m.vocabulary("transformer.word_embeddings.weight", hidden)
    case.put("lm_head.weight", embedding.copy())
    m.alias("lm_head.weight", "transformer.word_embeddings.weight")
    for i in range(2):
        p = f"transformer.h.{i}."
        m.affine(p + "ln_attn", hidden)
        m.affine(p + "ln_mlp", hidden)
        m.grouped(p + "self_attention.query_key_value.weight", kv_heads, heads // kv_heads, hidden // heads, hidden)
        m.parted(p + "self_attention.dense.weight", hidden, hidden, axis=1)
        m.parted(p + "mlp.dense_h_to_4h.weight", 4 * hidden, hidden)
        m.parted(p + "mlp.dense_4h_to_h.weight", hidden, 4 * hidden, axis=1)
    m.affine("transformer.ln_f", hidden)
    m.finish(numbered("transformer.h.", 2))


def internlm2(case: Case) -> None:
    """wqkv by KV heads, w1 and w3 as gate and up."""
    hidden, heads, kv_heads, inner = 32, 8, 2, 48
    config = {
        "model_type": "internlm2",
        "architectures": ["InternLM2ForCausalLM"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 2,
        "intermediate_size": inner,
        "bias": False,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
        "torch_dtype": "bfloat16",
    }
    m = Model(case, "internlm2", config)
    m.vocabulary("model.tok_embeddings.weight", hidden)
    for i in range(2):
        p = f"model.layers.{i}."
        m.whole(p + "attention_norm.weight", hidden)
        m.whole(p + "ffn_norm.weight", hidden)
        m.grouped(p + "attention.wqkv.weight", kv_heads, heads // kv_heads, hidden // heads, hidden)
        m.parted(p + "attention.wo.weight", hidden, hidden, axis=1)
        m.gate_up(
            [p + "feed_forward.w1.weight", p + "feed_forward.w3.weight"],
            p + "feed_forward.gate_up_proj.weight",
            inner,
            hidden,
        )
        m.parted(p + "feed_forward.w2.weight", hidden, inner, axis=1)
    m.whole("model.norm.weight", hidden)
    m.vocabulary("output.weight", hidden)
    m.finish(numbered("model.layers.", 2))


def codegen(case: Case) -> None:
    """Four groups of (q, v, k), each of two heads."""
    hidden, heads = 16, 8
    config = {
        "model_type": "codegen",
        "architectures": ["CodeGenForCausalLM"],
        "n_embd": hidden,
        "n_head": heads,
        "n_layer": 2,
        "n_inner": None,
        "n_positions": 16,
        "n_ctx": 16,
        "rotary_dim": 2,
        "vocab_size": VOCABULARY,
        "torch_dtype": "float16",
        "tie_word_embeddings": False,
    }
    m = Model(case, "codegen", config, F16)
    m.vocabulary("transformer.wte.weight", hidden)
    for i in range(2):
        p = f"transformer.h.{i}."
        m.affine(p + "ln_1", hidden)
        m.grouped(p + "attn.qkv_proj.weight", 4, 1, hidden // 4, hidden, order="qvk")
        m.parted(p + "attn.out_proj.weight", hidden, hidden, axis=1)
        m.parted(p + "mlp.fc_in.weight", 4 * hidden, hidden)
        m.parted(p + "mlp.fc_in.bias", 4 * hidden)
        m.parted(p + "mlp.fc_out.weight", hidden, 4 * hidden, axis=1)
        m.whole(p + "mlp.fc_out.bias", hidden)
        case.put(p + "attn.causal_mask", np.tri(4, dtype=np.bool_)[None, None])
    m.affine("transformer.ln_f", hidden)
    m.vocabulary("lm_head.weight", hidden)
    m.vocabulary("lm_head.bias")
    m.finish(numbered("transformer.h.", 2))
