"""A small checkpoint of a model family in the making, and what every rank must get of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from attention import fuse_rank, fused, ungroup
from casefile import BF16, Case
from numeric import convert

VOCABULARY, VOCABULARY_PADDING = 50, 64
SIZES = (1, 2, 4)

Piece = Callable[[int, int], np.ndarray]


class Model:
    """A checkpoint in the making: each method adds source tensors, and says what every rank gets for them."""

    def __init__(self, case: Case, recipe: str, config: dict[str, Any], dtype: np.dtype = BF16) -> None:
        self.case, self.dtype = case, dtype
        self.sizes: tuple[int, ...] = SIZES
        case.recipe_path = f"../../../../recipes/{recipe}.toml"
        case.config = config
        self.out: dict[str, Piece] = {}
        self.renamed: Callable[[str], str] = lambda name: name

    # ── sources ──

    def source(self, name: str, *shape: int, dtype: np.dtype | None = None) -> np.ndarray:
        """A source tensor of which nothing is said yet."""
        return self.case.tensor(name, *shape, dtype=self.dtype if dtype is None else dtype)

    def give(self, name: str, piece: Piece) -> None:
        """What rank t of T gets under `name`."""
        assert name not in self.out, name
        self.out[name] = piece

    # ── what becomes of an array ──

    def give_whole(self, name: str, x: np.ndarray) -> None:
        """The same on every rank."""
        self.give(name, lambda size, rank: x)

    def give_part(self, name: str, x: np.ndarray, axis: int = 0) -> None:
        """An equal part of an axis for each rank."""
        self.give(name, lambda size, rank: np.split(x, size, axis)[rank])

    def give_both(self, name: str, gate: np.ndarray, up: np.ndarray, axis: int = 0) -> None:
        """Each rank's part of gate, then its part of up."""
        parts = lambda size, rank: [np.split(x, size, axis)[rank] for x in (gate, up)]  # noqa: E731
        self.give(name, lambda size, rank: np.concatenate(parts(size, rank), axis))

    def give_heads(self, name: str, qkv: Sequence[np.ndarray], heads: tuple[int, int, int]) -> None:
        """Each rank's heads of q, of k and of v; with more ranks than KV heads, ranks share."""
        q, k, v = qkv
        self.give(name, lambda size, rank: fuse_rank(q, k, v, heads, size, rank))

    # ── what becomes of a source ──

    def whole(self, name: str, *shape: int, dtype: np.dtype | None = None) -> None:
        """The same on every rank."""
        self.give_whole(name, self.source(name, *shape, dtype=dtype))

    def affine(self, name: str, width: int) -> None:
        """A norm with a bias."""
        self.whole(f"{name}.weight", width)
        self.whole(f"{name}.bias", width)

    def parted(self, name: str, *shape: int, axis: int = 0) -> None:
        """An equal part of an axis for each rank."""
        self.give_part(name, self.source(name, *shape), axis)

    def vocabulary(self, name: str, *tail: int) -> np.ndarray:
        """Rows of the vocabulary, padded with zeros, an equal part for each rank."""
        x = self.source(name, VOCABULARY, *tail)
        padded = np.pad(x, [(0, VOCABULARY_PADDING - VOCABULARY)] + [(0, 0)] * len(tail))
        self.give_part(name, padded)
        return x

    def alias(self, name: str, of: str) -> None:
        """A tie."""
        self.give(name, self.out[of])

    def grouped(self, name: str, groups: int, m: int, d: int, *tail: int, order: str = "qkv") -> None:
        """A grouped QKV that becomes [Q; K; V]; ranks share a group where there are more ranks than groups."""
        parts = ungroup(self.source(name, groups * (m + 2) * d, *tail), groups, m, d, order)

        def piece(size: int, rank: int) -> np.ndarray:
            if size <= groups:
                return fused(parts, rank, size)
            q, k, v = (p.reshape(-1, *tail) for p in (parts["q"], parts["k"], parts["v"]))
            return fuse_rank(q, k, v, (groups * m, groups, d), size, rank)

        self.give(name, piece)

    def fuse(
        self, sources: Sequence[str], name: str, heads: tuple[int, int, int], *tail: int, cast: np.dtype | None = None
    ) -> None:
        """q, k, v that become [Q; K; V]; with more ranks than KV heads, ranks share."""
        num_heads, num_kv_heads, d = heads
        counts = (num_heads, num_kv_heads, num_kv_heads)
        qkv = [self.source(s, n * d, *tail) for s, n in zip(sources, counts, strict=True)]
        self.give_heads(name, qkv if cast is None else [convert(x, cast) for x in qkv], heads)

    def gate_up(self, sources: Sequence[str], name: str, inner: int, model: int) -> None:
        """gate and up that become [gate; up]."""
        gate, up = (self.source(s, inner, model) for s in sources)
        self.give_both(name, gate, up)

    def experts(self, pattern: str, parts: Sequence[str], names: Sequence[str], count: int, inner: int, model: int) -> None:
        """Experts that become w13[E, 2I, D] and w2[E, D, I]."""
        shapes = ((inner, model), (inner, model), (model, inner))
        stacks = [
            np.stack([self.source(pattern.format(e=e, part=part), *shape) for e in range(count)])
            for part, shape in zip(parts, shapes, strict=True)
        ]
        self.stacked(stacks, names)

    def stacked(self, stacks: Sequence[np.ndarray], names: Sequence[str]) -> None:
        """Stacked w1, w3, w2 as w13 and w2, each rank with its part of the inner dimension."""
        w1, w3, w2 = stacks
        self.give_both(names[0], w1, w3, 1)
        self.give_part(names[1], w2, 2)

    # ── the case ──

    def finish(self, blocks: Iterable[str]) -> None:
        """Adds a row for every rank of every size."""
        for size in self.sizes:
            for rank in range(size):
                tensors = {self.renamed(name): piece(size, rank) for name, piece in self.out.items()}
                self.case.expect(tensors, size, rank, blocks=["rest", *blocks])


def numbered(prefix: str, count: int) -> list[str]:
    """The blocks of layers 0, 1, …"""
    return [f"{prefix}{i}." for i in range(count)]
