#!/usr/bin/env python3
"""Checks that transformed weights still mean the same, against the real transformers library: `meaning.py BIN [NAME…]`.

For each family a tiny, randomly initialised model of the library is saved and built with the shipped recipe at one or more
tensor parallel sizes. One attention or MLP module is then computed anew, from the built tensors alone, as a serving engine
does: every rank computes its heads from its rows of the fused projection, multiplies by its columns of the output
projection, and the ranks' results are added. That sum must be what the library's own module gave for the same input.

Needs torch and transformers on the CPU, which are large, so it is not part of the default tests: without them it says that
it was skipped, and passes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import torch
    import transformers
    from safetensors import safe_open
    from safetensors.torch import save_file
    from torch import Tensor
    from torch.nn import functional
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from engine import (
        TOKENS,
        Attention,
        ClampedExperts,
        Experts,
        GatedMlp,
        Mlp,
        Rotation,
        SelfOnly,
        Weights,
        rotate_halves,
        rotate_pairs,
    )
except ImportError as missing:
    print(f"skipped: {missing.name} is not installed (pip install torch transformers safetensors)")
    print("0 passed, 0 failed, 1 skipped")
    sys.exit(0)

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

RECIPES = Path(__file__).resolve().parent.parent.parent / "recipes"
TOLERANCE = 2e-5


# ── weightmill ──


class Weightmill:
    """The program under test, with a store of its own."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.program, self.store = program, folder / "store"

    def build(self, recipe: Path, checkpoint: Path, size: int, rank: int) -> Weights:
        """Builds one rank's tensors and reads them from its shards."""
        command = [str(self.program), "build", "--json", "--store", str(self.store)]
        command += ["--recipe", str(recipe), "--checkpoint", str(checkpoint)]
        command += ["--tp-size", str(size), "--tp-rank", str(rank)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise RuntimeError(f"build exited {done.returncode}: {done.stdout.strip()} {done.stderr.strip()[-400:]}")
        weights: Weights = {}
        for shard in json.loads(done.stdout)["shards"]:
            blob = self.store / "blobs" / "sha256" / shard["digest"].removeprefix("sha256:")
            with safe_open(str(blob), framework="pt") as file:
                weights |= {name: file.get_tensor(name).float() for name in file.keys() if not name.startswith("__pad__.")}
        return weights


# ── the families ──


@dataclass(frozen=True)
class Check:
    """A module of the library's model, and the same computed from the built tensors."""

    module: str
    compute: Callable[[Tensor, list[Weights]], Tensor]


@dataclass(frozen=True)
class Family:
    """A model to make, what to compare, and the tensor parallel sizes.

    The recipe is the shipped one of the family's name, or `recipe_text`. `bf16_but`: the recipe casts to BF16 all weights
    but those whose name contains this text. `save`: how the checkpoint is written.
    """

    name: str
    make: Callable[[], Any]
    checks: list[Check]
    sizes: tuple[int, ...] = (1, 2)
    recipe_text: str = ""
    bf16_but: str = ""
    save: Callable[[Any, Path], None] = lambda model, folder: model.save_pretrained(folder)


def model_of(cls: str, config: str, **options: Any) -> Any:
    """A model of the library with random weights, biases and norms included."""
    torch.manual_seed(7)
    made = getattr(transformers, cls)(getattr(transformers, config)(**options, attn_implementation="eager"))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.3)
    return made.eval()


VOCABULARY = {"vocab_size": 60}
SMALL = VOCABULARY | {"hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 16}
GPT = {"n_embd": 32, "n_layer": 2, "n_positions": 16}
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
LLAMA = SMALL | ENDS | {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 48}


def decoder(rotate: Rotation) -> Check:
    """The attention of a Llama-like layer: 8 heads, 2 KV heads, of 4 numbers."""
    p = "model.layers.1.self_attn"
    return Check(p, Attention(f"{p}.qkv_proj", f"{p}.o_proj", 8, 2, 4, rotate))


def gated() -> Check:
    """The MLP of a Llama-like layer."""
    p = "model.layers.1.mlp"
    return Check(p, GatedMlp(f"{p}.gate_up_proj", f"{p}.down_proj"))


def gelu_tanh(x: Tensor) -> Tensor:
    """What GPT-2 calls gelu_new."""
    return functional.gelu(x, approximate="tanh")


H = "transformer.h.1"

INTERLEAVED = """
recipe = 1
name = "llama with interleaved rotary embedding"

[[step]]
module = "rope-permute"
inputs = { w = "model.layers.{i}.self_attn.q_proj.weight" }
outputs = { w = "model.layers.{i}.self_attn.q_proj.weight" }
params = { num_heads = 8, head_dim = 4, to = "interleaved" }
tp = false

[[step]]
module = "rope-permute"
inputs = { w = "model.layers.{i}.self_attn.k_proj.weight" }
outputs = { w = "model.layers.{i}.self_attn.k_proj.weight" }
params = { num_heads = 2, head_dim = 4, to = "interleaved" }
tp = false

[[step]]
module = "qkv-fuse"
outputs = { qkv = "model.layers.{i}.self_attn.qkv_proj.weight" }
params = { num_heads = 8, num_kv_heads = 2, head_dim = 4 }

[step.inputs]
q = "model.layers.{i}.self_attn.q_proj.weight"
k = "model.layers.{i}.self_attn.k_proj.weight"
v = "model.layers.{i}.self_attn.v_proj.weight"

[[step]]
module = "tp-shard"
inputs = { w = "model.layers.{i}.self_attn.o_proj.weight" }
outputs = { w = "model.layers.{i}.self_attn.o_proj.weight" }
params = { dim = 1 }
"""


def gpt_neox() -> Family:
    """Half of each head rotated; per-head QKV."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    options = SMALL | ENDS | {"num_attention_heads": 4, "intermediate_size": 48, "rotary_pct": 0.5, "rope_parameters": rope}
    p = "gpt_neox.layers.1"
    attention = Attention(f"{p}.attention.query_key_value", f"{p}.attention.dense", 4, 4, 8, rotate_halves(4))
    mlp = Mlp(f"{p}.mlp.dense_h_to_4h", f"{p}.mlp.dense_4h_to_h", functional.gelu)
    return Family(
        "gpt-neox",
        lambda: model_of("GPTNeoXForCausalLM", "GPTNeoXConfig", **options),
        [Check(f"{p}.attention", attention), Check(f"{p}.mlp", mlp)],
        sizes=(1, 2, 4),
    )


def falcon_40b() -> Family:
    """QKV by KV head; at tp 4 two ranks share each KV head."""
    options = VOCABULARY | ENDS | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "num_kv_heads": 2}
    options |= {"new_decoder_architecture": True, "parallel_attn": True, "bias": False, "alibi": False}
    p = f"{H}.self_attention"
    return Family(
        "falcon-40b",
        lambda: model_of("FalconForCausalLM", "FalconConfig", **options),
        [Check(p, Attention(f"{p}.query_key_value", f"{p}.dense", 8, 2, 4, rotate_halves(4)))],
        sizes=(1, 2, 4),
    )


def codegen() -> Family:
    """Four groups of (q, v, k); pairs rotated."""
    options = VOCABULARY | ENDS | GPT | {"n_head": 8, "n_ctx": 16, "rotary_dim": 2, "tie_word_embeddings": False}
    return Family(
        "codegen",
        lambda: model_of("CodeGenForCausalLM", "CodeGenConfig", **options),
        [
            Check(f"{H}.attn", Attention(f"{H}.attn.qkv_proj", f"{H}.attn.out_proj", 8, 8, 4, rotate_pairs(2))),
            Check(f"{H}.mlp", Mlp(f"{H}.mlp.fc_in", f"{H}.mlp.fc_out", gelu_tanh)),
        ],
        sizes=(1, 2, 4),
    )


def gpt2() -> Family:
    """Conv1D weights become linear ones. The base model has the published names, without a prefix."""
    return Family(
        "gpt2",
        lambda: model_of("GPT2Model", "GPT2Config", **VOCABULARY, **ENDS, **GPT, n_head=4),
        [
            Check("h.1.attn", Attention(f"{H}.attn.c_attn", f"{H}.attn.c_proj", 4, 4, 8)),
            Check("h.1.mlp", Mlp(f"{H}.mlp.c_fc", f"{H}.mlp.c_proj", gelu_tanh)),
        ],
    )


def llama_like() -> list[Family]:
    """The same attention and MLP in four forms."""
    checks = [decoder(rotate_halves(4)), gated()]
    untied = LLAMA | {"tie_word_embeddings": False}
    return [
        Family("llama", lambda: model_of("LlamaForCausalLM", "LlamaConfig", **untied), checks, sizes=(1, 2, 4)),
        Family(
            "llama-interleaved",
            lambda: model_of("LlamaForCausalLM", "LlamaConfig", **untied),
            [decoder(rotate_pairs(4))],
            recipe_text=INTERLEAVED,
        ),
        Family("qwen2", lambda: model_of("Qwen2ForCausalLM", "Qwen2Config", **LLAMA), checks, sizes=(1, 2, 4)),
        Family("phi3", lambda: model_of("Phi3ForCausalLM", "Phi3Config", **untied), checks),
    ]


def mixtral() -> Family:
    """Stacked experts."""
    options = LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    p = "model.layers.1.block_sparse_moe"
    return Family(
        "mixtral",
        lambda: model_of("MixtralForCausalLM", "MixtralConfig", **options),
        [Check("model.layers.1.mlp", Experts(f"{p}.gate", f"{p}.experts", 2))],
    )


def gpt_oss() -> Family:
    """MXFP4 experts: the library unpacks them, and applies the alternating rows of gate and up as they are."""
    options = LLAMA | {"head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    options |= {"intermediate_size": 64, "layer_types": ["full_attention"] * 2}
    packed: dict[str, Tensor] = {}

    def make() -> Any:
        model = model_of("GptOssForCausalLM", "GptOssConfig", **options)
        for i, rows, cols in ((i, rows, cols) for i in range(2) for rows, cols in ((128, 32), (32, 64))):
            name = f"model.layers.{i}.mlp.experts.{'gate_up_proj' if cols == 32 else 'down_proj'}"
            blocks = torch.randint(0, 256, (4, rows, cols // 32, 16), dtype=torch.uint8)
            scales = torch.randint(123, 127, (4, rows, cols // 32), dtype=torch.uint8)
            packed.update({f"{name}_blocks": blocks, f"{name}_scales": scales})
            with torch.no_grad():
                model.get_parameter(name).copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).float())
        return model

    def save(model: Any, folder: Path) -> None:
        folder.mkdir()
        kept = {name: x for name, x in model.state_dict().items() if not name.endswith(("gate_up_proj", "down_proj"))}
        save_file(kept | packed, str(folder / "model.safetensors"))
        model.config.save_pretrained(folder)

    p = "model.layers.1.mlp"
    check = Check(p, ClampedExperts(f"{p}.router", f"{p}.experts", 2))
    return Family("gpt-oss", make, [check], save=save)


def minilm() -> Family:
    """Attention that is not causal, in BF16."""
    options = {"hidden_size": 24, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 32}
    p = "encoder.layer.3.attention.self"
    return Family(
        "minilm",
        lambda: model_of("BertModel", "BertConfig", **VOCABULARY, **options, max_position_embeddings=16),
        [Check(p, SelfOnly(f"{p}.qkv", 4, 6))],
        bf16_but="LayerNorm",
    )


def families() -> list[Family]:
    """Every family that is checked."""
    return [gpt_neox(), falcon_40b(), codegen(), gpt2(), *llama_like(), mixtral(), gpt_oss(), minilm()]


# ── the comparison ──


def observe(model: Any, modules: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """What each module of the model gets and gives in one run."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        def record(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
            given = arguments[0] if arguments else keywords["hidden_states"]
            result = output[0] if isinstance(output, tuple) else output
            seen[name] = (given[0].detach(), result.reshape(TOKENS, -1).detach())

        return record

    handles = [model.get_submodule(name).register_forward_hook(hook(name), with_kwargs=True) for name in modules]
    with torch.no_grad():
        model(input_ids=torch.arange(3, 3 + TOKENS)[None])
    for handle in handles:
        handle.remove()
    return seen


def check_family(family: Family, mill: Weightmill, folder: Path) -> list[tuple[str, str | None]]:
    """For every module and size, its name and what is wrong, if anything."""
    model = family.make()
    checkpoint = folder / family.name
    family.save(model, checkpoint)
    recipe = RECIPES / f"{family.name}.toml"
    if family.recipe_text:
        recipe = folder / f"{family.name}.toml"
        recipe.write_text(family.recipe_text)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if family.bf16_but and family.bf16_but not in name:
                parameter.copy_(parameter.bfloat16().float())
    seen = observe(model, [check.module for check in family.checks])
    results: list[tuple[str, str | None]] = []
    for size in family.sizes:
        label = f"{family.name} at tp {size}"
        try:
            ranks = [mill.build(recipe, checkpoint, size, rank) for rank in range(size)]
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            results.append((label, str(error)))
            continue
        for check in family.checks:
            results.append((f"{label}, {check.module}", compare(check, ranks, *seen[check.module])))
    return results


def compare(check: Check, ranks: list[Weights], given: Tensor, want: Tensor) -> str | None:
    """How far the recomputed module is from the library's, if it is too far."""
    try:
        with torch.no_grad():
            have = check.compute(given, ranks)
    except (KeyError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    if have.shape != want.shape:
        return f"shape {tuple(have.shape)}, wanted {tuple(want.shape)}"
    far = float((have - want).abs().max() / want.abs().max())
    return None if far < TOLERANCE else f"relative difference {far:.3g}"


def main() -> int:
    """Checks the families that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    passed = failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        mill = Weightmill(options.program.resolve(), Path(temporary))
        for family in families():
            if options.names and family.name not in options.names:
                continue
            for label, wrong in check_family(family, mill, Path(temporary)):
                passed += wrong is None
                failed += wrong is not None
                print(f"{'ok' if wrong is None else 'FAILED'}  {label}{'' if wrong is None else ': ' + wrong}")
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0 or passed == 0)


if __name__ == "__main__":
    sys.exit(main())
