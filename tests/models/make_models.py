#!/usr/bin/env python3
"""Writes a small checkpoint of each family in recipes/, and what its recipe must make of it at tp sizes 1, 2 and 4.

Usage: `make_models.py OUT [SEED]` (the committed cases: `make_models.py cases 1`). Needs numpy, ml_dtypes, safetensors.

The names, dtypes and config.json keys are those of the published models; the sizes are tiny. The cases have the form of
tests/golden, each row naming the shipped recipe, so tests/golden/check.py runs them. The references are reshapes by numpy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "golden"))

from casefile import Case, CaseSet  # noqa: E402

import dense  # noqa: E402
import diffusion  # noqa: E402
import experts  # noqa: E402
import grouped  # noqa: E402

FAMILIES: tuple[Callable[[Case], None], ...] = (
    grouped.gpt_neox,
    grouped.bloom,
    grouped.falcon_40b,
    grouped.internlm2,
    grouped.codegen,
    dense.llama,
    dense.qwen2,
    dense.qwen3,
    dense.phi3,
    dense.gpt2,
    dense.minilm,
    experts.mixtral,
    experts.qwen2_moe,
    experts.qwen3_moe,
    experts.gpt_oss,
    experts.deepseek_v3,
    diffusion.minimax_h3,
    diffusion.sd3,
)


def main() -> None:
    """Writes every family's case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("seed", type=int, nargs="?", default=1)
    options = parser.parse_args()
    cases = CaseSet(options.out, options.seed, 1)
    for family in FAMILIES:
        with cases.case(family.__name__.replace("_", "-")) as case:
            family(case)
    print(f"{cases.written} families written to {options.out}")


if __name__ == "__main__":
    main()
