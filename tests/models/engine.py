"""What a serving engine computes from built tensors, rank by rank: attention and MLPs over one sequence of TOKENS tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

TOKENS = 7

Weights = dict[str, Tensor]
Rotation = Callable[[Tensor], Tensor]


def angles(rotary: int, theta: float = 10_000.0) -> Tensor:
    """[tokens, rotary / 2]"""
    frequencies = theta ** (-torch.arange(0, rotary, 2).float() / rotary)
    return torch.arange(TOKENS).float()[:, None] * frequencies


def rotate_halves(rotary: int) -> Rotation:
    """Rotary embedding of [tokens, heads, d] where number j is paired with number j + rotary / 2."""

    def rotate(x: Tensor) -> Tensor:
        cos, sin = angles(rotary).cos()[:, None], angles(rotary).sin()[:, None]
        a, b, rest = x[..., : rotary // 2], x[..., rotary // 2 : rotary], x[..., rotary:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    return rotate


def rotate_pairs(rotary: int) -> Rotation:
    """Rotary embedding where number 2j is paired with number 2j + 1."""

    def rotate(x: Tensor) -> Tensor:
        cos, sin = angles(rotary).cos()[:, None], angles(rotary).sin()[:, None]
        a, b, rest = x[..., 0:rotary:2], x[..., 1:rotary:2], x[..., rotary:]
        pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        return torch.cat([pairs, rest], -1)

    return rotate


def unrotated(x: Tensor) -> Tensor:
    """No rotary embedding."""
    return x


@dataclass(frozen=True)
class Attention:
    """One attention module: what its tensors are called after the build, and how heads are arranged."""

    qkv: str
    out: str
    heads: int
    kv_heads: int
    width: int
    rotate: Rotation = unrotated
    causal: bool = True

    def __call__(self, x: Tensor, ranks: list[Weights]) -> Tensor:
        """The sum of all ranks' partial outputs."""
        total = sum(self._rank(x, weights, len(ranks)) for weights in ranks)
        bias = ranks[0].get(f"{self.out}.bias")
        return total if bias is None else total + bias

    def _rank(self, x: Tensor, weights: Weights, size: int) -> Tensor:
        heads, kv_heads, d = self.heads // size, max(1, self.kv_heads // size), self.width
        fused = functional.linear(x, weights[f"{self.qkv}.weight"], weights.get(f"{self.qkv}.bias"))
        q, k, v = fused.split([heads * d, kv_heads * d, kv_heads * d], -1)
        q, k, v = q.view(TOKENS, heads, d), k.view(TOKENS, kv_heads, d), v.view(TOKENS, kv_heads, d)
        q, k = self.rotate(q), self.rotate(k)
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
        if self.causal:
            scores = scores.masked_fill(~torch.ones(TOKENS, TOKENS).tril().bool(), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(TOKENS, -1)
        return functional.linear(mixed, weights[f"{self.out}.weight"])


@dataclass(frozen=True)
class GatedMlp:
    """[gate; up], silu(gate) · up, down."""

    gate_up: str
    down: str

    def __call__(self, x: Tensor, ranks: list[Weights]) -> Tensor:
        """The sum of all ranks' partial outputs."""
        total = torch.zeros_like(x)
        for weights in ranks:
            gate, up = functional.linear(x, weights[f"{self.gate_up}.weight"]).chunk(2, -1)
            total = total + functional.linear(functional.silu(gate) * up, weights[f"{self.down}.weight"])
        return total


@dataclass(frozen=True)
class Mlp:
    """Two linear layers, the first by rows and the second by columns."""

    up: str
    down: str
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, ranks: list[Weights]) -> Tensor:
        """The sum of all ranks' partial outputs, and the second bias once."""
        total = ranks[0][f"{self.down}.bias"].expand_as(x)
        for weights in ranks:
            inner = self.activation(functional.linear(x, weights[f"{self.up}.weight"], weights[f"{self.up}.bias"]))
            total = total + functional.linear(inner, weights[f"{self.down}.weight"])
        return total


@dataclass(frozen=True)
class Experts:
    """Stacked experts w13[E, 2I, D], w2[E, D, I], the best `top` of them by the router."""

    router: str
    experts: str
    top: int

    def __call__(self, x: Tensor, ranks: list[Weights]) -> Tensor:
        """The sum of all ranks' partial outputs."""
        chances = functional.linear(x, ranks[0][f"{self.router}.weight"]).softmax(-1)
        best, which = chances.topk(self.top, -1)
        best = best / best.sum(-1, keepdim=True)
        total = torch.zeros_like(x)
        for weights in ranks:
            w13, w2 = weights[f"{self.experts}.w13_weight"], weights[f"{self.experts}.w2_weight"]
            for token in range(len(x)):
                for share, expert in zip(best[token], which[token], strict=True):
                    gate, up = functional.linear(x[token], w13[expert]).chunk(2, -1)
                    total[token] += share * functional.linear(functional.silu(gate) * up, w2[expert])
        return total


@dataclass(frozen=True)
class ClampedExperts:
    """gpt-oss: stacked experts with biases, [gate; up] clamped, the softmax over the best `top` only."""

    router: str
    experts: str
    top: int
    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, x: Tensor, ranks: list[Weights]) -> Tensor:
        """The sum of all ranks' partial outputs, and the second biases once."""
        best, which = functional.linear(x, ranks[0][f"{self.router}.weight"], ranks[0][f"{self.router}.bias"]).topk(
            self.top, -1
        )
        shares = best.softmax(-1)
        total = torch.einsum("tk,tkd->td", shares, ranks[0][f"{self.experts}.down_proj_bias"][which])
        for weights in ranks:
            names = ("gate_up_proj", "gate_up_proj_bias", "down_proj")
            w13, b13, w2 = (weights[f"{self.experts}.{name}"][which] for name in names)
            gate, up = (torch.einsum("tkid,td->tki", w13, x) + b13).chunk(2, -1)
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            inner = (up + 1) * gate * torch.sigmoid(self.alpha * gate)
            total = total + torch.einsum("tkdi,tki,tk->td", w2, inner, shares)
        return total


@dataclass(frozen=True)
class SelfOnly:
    """BERT's attention up to, and without, the output projection: every rank's heads, side by side."""

    qkv: str
    heads: int
    width: int

    def __call__(self, x: Tensor, ranks: list[Weights]) -> Tensor:
        """All ranks' heads."""
        heads = self.heads // len(ranks)
        identity = torch.eye(heads * self.width)
        attention = Attention(self.qkv, "out", heads, heads, self.width, causal=False)
        return torch.cat([attention(x, [weights | {"out.weight": identity}]) for weights in ranks], -1)
