"""The form of a golden case, and the writer that every generator uses.

A case is a folder::

    checkpoint/      one `.safetensors` file, or several with or without an index; config.json if the recipe reads it
    recipe.toml      unless a row names another file
    expected.T.t.safetensors    the tensors that rank t of T must get
    cases.json       a list of rows

A row of cases.json has `tp_size` and `tp_rank` (1 and 0 if absent) and either `expected`, a file, or `error`, a stable
error code. Further keys: `recipe`, the recipe's path from the case's folder (default "recipe.toml"); `blocks`, the block
of each shard in stream order.

Every case draws its random numbers from its own generator, seeded with the set's seed and the case's name, so that a new
case changes no other one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import TensorSpec, serialize_file

F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)
F8 = np.dtype(ml_dtypes.float8_e4m3fn)
F8_FNUZ = np.dtype(ml_dtypes.float8_e4m3fnuz)

Tensors = Mapping[str, np.ndarray]

_NAMES = {
    F16: "float16",
    F32: "float32",
    BF16: "bfloat16",
    F8: "float8_e4m3fn",
    F8_FNUZ: "float8_e4m3fnuz",
    np.dtype(np.uint8): "uint8",
    np.dtype(np.int8): "int8",
    np.dtype(np.int32): "int32",
    np.dtype(np.int64): "int64",
    np.dtype(np.bool_): "bool",
}


def save(path: Path, tensors: Tensors) -> None:
    """Writes a safetensors file; views and transposes are made dense first."""
    dense = {name: np.array(value, order="C", copy=True) for name, value in tensors.items()}
    specs = {
        name: TensorSpec(dtype=_NAMES[a.dtype], shape=list(a.shape), data_ptr=a.ctypes.data, data_len=a.nbytes)
        for name, a in dense.items()
    }
    serialize_file(specs, str(path))


def toml(value: Any) -> str:
    """A TOML value on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(toml, value)) + "]"
    return repr(value)


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else json.dumps(key)


class Case:
    """One case in the making."""

    def __init__(self, name: str, seed: int, scale: int) -> None:
        self.name = name
        self.scale = scale
        self.rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        self.inputs: dict[str, np.ndarray] = {}
        self.config: dict[str, Any] | None = None
        self.files = 1
        self.index = True
        self.extra_files: dict[str, bytes] = {}
        self.recipe_path: str | None = None
        self._recipe = ""
        self._rows: list[dict[str, Any]] = []
        self._expected: list[Tensors | None] = []

    # ── what goes in ──

    def floats(self, *shape: int, dtype: np.dtype = BF16) -> np.ndarray:
        """Random finite values."""
        return (self.rng.standard_normal(shape) * 3).astype(F32).astype(dtype)

    def tensor(self, name: str, *shape: int, dtype: np.dtype = BF16) -> np.ndarray:
        """Adds a random tensor to the checkpoint."""
        return self.put(name, self.floats(*shape, dtype=dtype))

    def put(self, name: str, value: np.ndarray) -> np.ndarray:
        """Adds a tensor to the checkpoint."""
        self.inputs[name] = value
        return value

    def step(
        self, module: str, inputs: Mapping[str, str], outputs: Mapping[str, str], /, *, extra: Any = "", **params: Any
    ) -> None:
        """Adds a step; `extra` is TOML text for its other fields."""
        lines = [f'[[step]]\nmodule = "{module}"', f"inputs = {toml(inputs)}", f"outputs = {toml(outputs)}"]
        if params:
            lines.append(f"params = {toml(params)}")
        self.text("\n".join(lines) + "\n" + extra)

    def same(self, module: str, role: str, pattern: str, /, *, extra: Any = "", **params: Any) -> None:
        """Adds a step that replaces the tensors it takes."""
        self.step(module, {role: pattern}, {role: pattern}, extra=extra, **params)

    def text(self, text: str) -> None:
        """Adds TOML text to the recipe."""
        self._recipe += "\n" + text.strip("\n") + "\n"

    # ── what must come out ──

    def expect(self, tensors: Tensors, size: int = 1, rank: int = 0, blocks: Sequence[str] | None = None) -> None:
        """Rank `rank` of `size` gets `tensors`; its shards hold `blocks`."""
        row: dict[str, Any] = {"tp_size": size, "tp_rank": rank, "expected": f"expected.{size}.{rank}.safetensors"}
        if blocks is not None:
            row["blocks"] = list(blocks)
        self._rows.append(row)
        self._expected.append(dict(tensors))

    def refuse(self, code: str, size: int = 1, rank: int = 0) -> None:
        """Rank `rank` of `size` is refused with `code`."""
        self._rows.append({"tp_size": size, "tp_rank": rank, "error": code})
        self._expected.append(None)

    # ── on disk ──

    def write(self, folder: Path) -> None:
        """Writes the case into `folder`."""
        assert self._rows, f"case {self.name} expects nothing"
        (folder / "checkpoint").mkdir(parents=True)
        self._write_checkpoint(folder / "checkpoint")
        if self.recipe_path is None:
            (folder / "recipe.toml").write_text(f"recipe = 1\nname = {json.dumps(self.name)}\n{self._recipe}")
        for row, tensors in zip(self._rows, self._expected, strict=True):
            if self.recipe_path is not None:
                row["recipe"] = self.recipe_path
            if tensors is not None:
                save(folder / row["expected"], tensors)
        (folder / "cases.json").write_text(json.dumps(self._rows, indent=1) + "\n")

    def _write_checkpoint(self, folder: Path) -> None:
        if self.config is not None:
            (folder / "config.json").write_text(json.dumps(self.config, indent=1) + "\n")
        if self.files == 1 and self.inputs:
            save(folder / "model.safetensors", self.inputs)
        elif self.inputs:
            self._write_files(folder)
        for name, data in self.extra_files.items():
            (folder / name).write_bytes(data)

    def _write_files(self, folder: Path) -> None:
        names, weight_map = list(self.inputs), {}
        for i in range(self.files):
            file = f"model-{i + 1:05}-of-{self.files:05}.safetensors"
            part = {name: self.inputs[name] for name in names[i :: self.files]}
            save(folder / file, part)
            weight_map.update(dict.fromkeys(part, file))
        if self.index:
            total = sum(value.nbytes for value in self.inputs.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


class CaseSet:
    """A folder of cases, with the seed and scale they are made with."""

    def __init__(self, out: Path, seed: int, scale: int, keep_existing: bool = False) -> None:
        self.out, self.seed, self.scale, self.keep_existing = out, seed, scale, keep_existing
        self.written = 0
        self._names: set[str] = set()

    @contextmanager
    def case(self, name: str) -> Iterator[Case]:
        """A case that is written at the end of the `with` block."""
        assert name not in self._names, f"two cases are named {name}"
        self._names.add(name)
        case = Case(name, self.seed, self.scale)
        yield case
        folder = self.out / name
        if self.keep_existing and folder.exists():
            return
        case.write(folder)
        self.written += 1
