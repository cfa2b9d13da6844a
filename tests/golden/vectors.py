#!/usr/bin/env python3
"""Makes the shipped modules' vectors (`transforms/NAME/vectors`) from golden cases.

    python3 tests/golden/vectors.py [--check]

A golden case of one step and one application is what a module has to answer, without names: its inputs and outputs by
role. For each module a few such cases are taken, spread over their names, with every rank that a case has, and one that
is refused. The expected tensors stay what the independent reference computed. Only the standard library is used.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import re
import shutil
import struct
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests/golden/cases"
PER_MODULE = 4
MAX_BYTES = 65_536
REFUSALS = {"bad_params", "module_rejected_input", "bad_data"}

Tensors = dict[str, tuple[dict, bytes]]


def read(path: Path) -> Tensors:
    """The tensors of a safetensors file: header record and bytes."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    start = 8 + length
    return {n: (r, data[start + r["data_offsets"][0] : start + r["data_offsets"][1]]) for n, r in header.items()}


def write(path: Path, tensors: Tensors) -> None:
    """Writes a safetensors file, ascending by name."""
    header, body = {}, b""
    for name, (record, data) in sorted(tensors.items()):
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": record["dtype"], "shape": record["shape"], "data_offsets": offsets}
        body += data
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def matching(pattern: str, names: list[str]) -> list[str] | str | None:
    """The names that a pattern takes: a list where it has a list capture, else one name, or None."""
    parts = re.split(r"(\{[^}]*\})", pattern)
    regex = "".join("(.+)" if p.endswith("...}") else "([^.]+)" if p.startswith("{") else re.escape(p) for p in parts)
    found = [(m.groups(), name) for name in names if (m := re.fullmatch(regex, name))]
    if "{*" in pattern:
        return [name for _, name in sorted(found, key=lambda f: [int(g) if g.isdigit() else -1 for g in f[0]])] or None
    return found[0][1] if len(found) == 1 else None


def vectors_of(case: Path) -> tuple[str, list[tuple[str, dict, Tensors, Tensors | None]]] | None:
    """The module of a case and its vectors: name, case.json, inputs and expected tensors."""
    recipe_path, checkpoint = case / "recipe.toml", case / "checkpoint" / "model.safetensors"
    if not recipe_path.is_file() or not checkpoint.is_file() or checkpoint.stat().st_size > MAX_BYTES:
        return None
    try:
        recipe = tomllib.loads(recipe_path.read_text())
    except tomllib.TOMLDecodeError:
        return None
    plain = {"recipe", "name", "step"}
    steps = recipe.get("step", [])
    if set(recipe) - plain or len(steps) != 1 or set(steps[0]) - {"module", "inputs", "outputs", "params"}:
        return None
    step = steps[0]
    if "$" in json.dumps(step, default=lambda _: "$") or not (ROOT / "transforms" / step["module"]).is_dir():
        return None
    source = read(checkpoint)
    inputs: dict[str, str | list[str]] = {}
    for role, pattern in step["inputs"].items():
        names = matching(pattern, list(source))
        if names is None:
            if role.endswith("?"):
                continue
            return None
        inputs[role.rstrip("?")] = names
    used = {n for names in inputs.values() for n in (names if isinstance(names, list) else [names])}
    if used != set(source) or any("{" in name for name in step["outputs"].values()):
        return None
    made = []
    for row in json.loads((case / "cases.json").read_text()):
        size, rank = row.get("tp_size", 1), row.get("tp_rank", 0)
        document: dict = {"params": step.get("params", {}), "inputs": inputs, "outputs": sorted(step["outputs"])}
        if size > 1:
            document["tp"] = {"rank": rank, "size": size}
        expected = None
        if "error" in row:
            if row["error"] not in REFUSALS:
                return None
            document["error"] = {"code": row["error"]}
        else:
            tensors = read(case / row["expected"])
            expected = {role: tensors[name] for role, name in step["outputs"].items()}
        suffix = f"-{rank}-of-{size}" if size > 1 else ""
        made.append((case.name + suffix, document, source, expected))
    return step["module"], made


def spread(items: list, count: int) -> list:
    """`count` of them, from first to last."""
    if len(items) <= count:
        return items
    return [items[i * (len(items) - 1) // (count - 1)] for i in range(count)]


def make(out: Path) -> int:
    """Writes every module's vectors under `out`; how many there are."""
    by_module: dict[str, list[list]] = {}
    for case in sorted(CASES.iterdir()):
        if found := vectors_of(case):
            by_module.setdefault(found[0], []).append(found[1])
    written = 0
    for module, cases in sorted(by_module.items()):
        good = [case for case in cases if case[0][3] is not None]
        bad = [case for case in cases if case[0][3] is None]
        for case in spread(good, PER_MODULE) + bad[:1]:
            for name, document, source, expected in case:
                folder = out / module / "vectors" / name
                folder.mkdir(parents=True)
                (folder / "case.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
                write(folder / "input.safetensors", source)
                if expected is not None:
                    write(folder / "expected.safetensors", expected)
                written += 1
    return written


def same(made: Path, committed: Path) -> bool:
    """Whether two folders have the same files with the same bytes."""
    of = lambda folder: sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())  # noqa: E731
    return of(made) == of(committed) and all(filecmp.cmp(made / p, committed / p, shallow=False) for p in of(made))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare with what is committed")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        written = make(Path(scratch))
        modules = sorted(Path(scratch).iterdir())
        print(f"{written} vectors of {len(modules)} modules")
        differing = [m.name for m in modules if not same(m / "vectors", ROOT / "transforms" / m.name / "vectors")]
        if check:
            print(f"differing: {', '.join(differing) or 'none'}")
            return 1 if differing else 0
        for module in modules:
            target = ROOT / "transforms" / module.name / "vectors"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(module / "vectors", target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
