#!/usr/bin/env python3
"""Runs golden cases through the command line: `check.py WEIGHTMILL CASES [NAME…]`. Standard library only.

For each row of each case (the format is described in casefile.py) it runs `build`, then `digest --entry`, and compares
every tensor's dtype, shape and digest, the content digest and, where the row gives them, the shards' blocks. A row with an
error must exit with status 1 and that code. It prints every difference, then 'N passed, N failed'; the exit status is 0 if
all passed. Names choose cases; a name that ends in `*` chooses by prefix.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEAF_BYTES = 16_384
TIMEOUT_S = 120

Facts = tuple[str, list[int], str]


def tensor_digest(data: bytes) -> str:
    """The two-level digest: SHA-256 over the length and the leaves' hashes."""
    whole = hashlib.sha256(b"weightmill tensor v1\n%d\n" % len(data))
    for at in range(0, len(data), LEAF_BYTES):
        whole.update(hashlib.sha256(data[at : at + LEAF_BYTES]).digest())
    return whole.hexdigest()


def read_table(path: Path) -> dict[str, Facts]:
    """Dtype, shape and digest of every tensor of a safetensors file."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    table = {}
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        table[name] = (tensor["dtype"], tensor["shape"], tensor_digest(raw[start + begin : start + end]))
    return table


def content_digest(table: dict[str, Facts]) -> str:
    """SHA-256 over a line for every tensor, in ascending byte order of the names."""
    whole = hashlib.sha256()
    for name, (dtype, shape, digest) in sorted(table.items(), key=lambda item: item[0].encode()):
        dims = json.dumps(shape, separators=(",", ":"))
        whole.update(f"{name}\0{dtype}\0{dims}\0{digest}\n".encode())
    return whole.hexdigest()


@dataclass
class Answer:
    """What one command said."""

    status: int
    document: dict[str, Any]
    text: str

    def tail(self) -> str:
        """The end of what it printed for people."""
        return self.text.strip()[-300:]


class Weightmill:
    """The program under test, with a store of its own."""

    def __init__(self, program: Path, store: Path) -> None:
        self.program, self.store = program, store

    def call(self, *args: str) -> Answer:
        """Runs one command with `--json`."""
        command = [str(self.program), *args, "--store", str(self.store), "--json"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return Answer(124, {}, f"no answer in {TIMEOUT_S} s")
        try:
            return Answer(done.returncode, json.loads(done.stdout), done.stderr)
        except ValueError:
            return Answer(done.returncode, {}, done.stderr + done.stdout)

    def build(self, folder: Path, row: dict[str, Any]) -> Answer:
        """Builds what a row describes."""
        return self.call(
            "build",
            "--recipe", str(folder / row.get("recipe", "recipe.toml")),
            "--checkpoint", str(folder / "checkpoint"),
            "--tp-size", str(row.get("tp_size", 1)),
            "--tp-rank", str(row.get("tp_rank", 0)),
        )  # fmt: skip


def check_refusal(answer: Answer, code: str) -> str | None:
    """Why an answer is not the refusal that was wanted, if it is not."""
    got = answer.document.get("error", {}).get("code")
    if answer.status == 1 and got == code:
        return None
    return f"exit {answer.status}, code {got}; wanted exit 1, code {code}: {answer.document} {answer.tail()}"


def check_entry(mill: Weightmill, built: Answer, want: dict[str, Facts], blocks: list[str] | None) -> str | None:
    """What is wrong with the entry that was built, if anything."""
    if built.status != 0:
        return f"build exited {built.status}: {built.document} {built.tail()}"
    listed = mill.call("digest", "--entry", built.document.get("key", ""))
    if listed.status != 0:
        return f"digest exited {listed.status}: {listed.document} {listed.tail()}"
    have = {
        name: (tensor["dtype"], tensor["shape"], tensor["digest"])
        for name, tensor in listed.document.get("tensors", {}).items()
    }
    wrong = [name for name in sorted(have.keys() | want.keys()) if have.get(name) != want.get(name)]
    if wrong:
        shown = "; ".join(f"{name}: {have.get(name)} wanted {want.get(name)}" for name in wrong[:3])
        return f"{len(wrong)} tensors differ: {shown}"
    digests = (built.document.get("content_digest"), listed.document.get("content_digest"))
    if digests != (content_digest(want),) * 2:
        return f"content digests {digests}, wanted {content_digest(want)}"
    shards = [shard.get("block") for shard in built.document.get("shards", [])]
    if blocks is not None and shards != blocks:
        return f"shards of blocks {shards}, wanted {blocks}"
    return None


def check_row(mill: Weightmill, folder: Path, row: dict[str, Any]) -> str | None:
    """Why a row fails, if it does."""
    built = mill.build(folder, row)
    if "error" in row:
        return check_refusal(built, row["error"])
    return check_entry(mill, built, read_table(folder / row["expected"]), row.get("blocks"))


def chosen(name: str, wanted: list[str]) -> bool:
    """Whether a case is one of those asked for."""
    return not wanted or any(name == w or w.endswith("*") and name.startswith(w[:-1]) for w in wanted)


def main() -> int:
    """Checks the cases that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("cases", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    passed = failed = 0
    with tempfile.TemporaryDirectory() as store:
        mill = Weightmill(options.program.resolve(), Path(store))
        for rows in sorted(options.cases.glob("*/cases.json")):
            if not chosen(rows.parent.name, options.names):
                continue
            for row in json.loads(rows.read_text()):
                why = check_row(mill, rows.parent, row)
                passed += why is None
                failed += why is not None
                if why is not None:
                    rank = f"{row.get('tp_rank', 0)}/{row.get('tp_size', 1)}"
                    print(f"{rows.parent.name} (rank {rank}): {why}")
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0 or passed == 0)


if __name__ == "__main__":
    sys.exit(main())
