#!/usr/bin/env python3
"""Writes golden cases: `make_golden.py OUT SEED SCALE [--keep-existing]`. Needs numpy, ml_dtypes, safetensors.

A case is a small checkpoint, a recipe, and the tensors that it must give, or the error. The references are reshapes,
transposes and concatenations by numpy, never a module's own formulas, so a case checks what a transform means. Equal
arguments give equal bytes; SEED changes the values, SCALE the sizes. casefile.py describes the files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import attention
import layout
import naming
import numeric
import refusals
from casefile import CaseSet


def main() -> None:
    """Writes the cases that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("scale", type=int)
    parser.add_argument("--keep-existing", action="store_true", help="leave cases alone whose folders exist")
    options = parser.parse_args()
    cases = CaseSet(options.out, options.seed, options.scale, options.keep_existing)
    for module in (attention, layout, numeric, naming, refusals):
        module.write(cases)
    print(f"{cases.written} cases written to {options.out}")


if __name__ == "__main__":
    main()
