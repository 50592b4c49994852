"""Random graphs around attention: right ones in many spellings, and ones that only look like it.

All axes have one size, so that a wrong permutation, axis or mask shape still runs, and only its numbers tell. A recipe
is drawn from a seed and is the same in every process.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

SIZE = 4
SHAPE = (SIZE,) * 4
FILLS = (float("-inf"), torch.finfo(torch.float32).min, -1e9, -1e4, -1.0, 0.0)
MASK_SHAPES = ((SIZE, SIZE), (1, 1, SIZE, SIZE), (SIZE, 1, 1, SIZE), (SIZE, 1, SIZE, 1), SHAPE, (SIZE,))
USUAL = ((0, 1, 2, 3), (0, 2, 1, 3))


@dataclass(frozen=True)
class Mask:
    """One mask: how it is spelled, the value that it fills in, its shape, and whether True hides or keeps."""

    spelling: str
    fill: float
    shape: tuple[int, ...]
    inverted: bool


@dataclass(frozen=True)
class Recipe:
    """One graph; call it with q, k, v and a bias of `SHAPE` and flags of `SHAPE` (bool)."""

    perms: tuple[tuple[int, ...], ...]
    product: str
    scale: tuple[str, float]
    masks: tuple[Mask, ...]
    axis: int
    softmax: str
    dropped: bool
    after: float
    output: str
    shared: bool
    dtype: torch.dtype

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, flags: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (x.permute(perm) for x, perm in zip((q, k, v), self.perms, strict=True))
        if self.product == "bmm":
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        where, factor = self.scale
        q = q * factor if where in ("q", "both") else q
        k = k * factor if where in ("k", "both") else k
        scores = self._product(q, k)
        scores = scores * factor if where == "mul" else scores / factor if where == "div" else scores
        if self.product == "bmm":
            scores = scores.view(SHAPE)
        for mask in self.masks:
            scores = _masked(scores, mask, bias, flags)
        weights = self._softmax(scores).to(v.dtype)
        if self.dropped:
            weights = torch.nn.functional.dropout(weights, 0.0, True)
        if self.after != 1.0:
            weights = weights * self.after
        if self.product == "bmm":
            weights = weights.flatten(0, 1)
        out = self._output(weights @ v)
        return (out, scores) if self.shared else (out,)

    def _product(self, q: Tensor, k: Tensor) -> Tensor:
        if self.product == "einsum":
            return torch.einsum("bntd,bnsd->bnts", q, k)
        if self.product == "untransposed":
            return q @ k
        if self.product == "bmm":
            return torch.bmm(q, k.transpose(1, 2))
        return torch.matmul(q, k.transpose(-1, -2)) if self.product == "matmul" else q @ k.mT

    def _softmax(self, scores: Tensor) -> Tensor:
        if self.softmax == "float":
            return scores.softmax(self.axis, dtype=torch.float32)
        if self.softmax == "written":
            e = (scores - scores.amax(self.axis, keepdim=True)).exp()
            return e / e.sum(self.axis, keepdim=True)
        if self.softmax == "twice":
            return scores.softmax(self.axis).softmax(self.axis)
        return torch.softmax(scores, dim=self.axis)

    def _output(self, out: Tensor) -> Tensor:
        if self.product == "bmm":
            out = out.view(SHAPE)
        if self.output == "merged":
            return out.transpose(1, 2).reshape(SIZE, SIZE, SIZE * SIZE)
        return out.transpose(1, 2).contiguous() if self.output == "transposed" else out


def _masked(scores: Tensor, mask: Mask, bias: Tensor, flags: Tensor) -> Tensor:
    at = tuple(slice(0, size) for size in mask.shape)
    chosen = flags[(0,) * (4 - len(mask.shape))][at]
    chosen = ~chosen if mask.inverted else chosen
    if mask.spelling == "add":
        return scores + bias[(0,) * (4 - len(mask.shape))][at]
    fill = mask.fill if math.isinf(mask.fill) else max(mask.fill, torch.finfo(scores.dtype).min)
    if mask.spelling == "fill":
        return scores.masked_fill(chosen, fill)
    if mask.spelling == "where":
        return torch.where(chosen, scores, fill)
    future = torch.ones(SIZE, SIZE, dtype=torch.bool).triu(0 if mask.inverted else 1)
    if mask.spelling == "causal":
        return scores.masked_fill(future, fill)
    return scores + torch.zeros(SIZE, SIZE, dtype=scores.dtype).masked_fill(future, max(mask.fill, -1e4))


def draw(seed: int) -> Recipe:
    """The recipe of a seed: each choice is usual more often than not, so that about half the graphs are attention."""
    rng = random.Random(seed)

    def often(usual: object, odd: object, chance: float = 0.12) -> object:
        return odd if rng.random() < chance else usual

    layout = rng.choice(USUAL)
    perms = tuple(often(layout, tuple(rng.sample(range(4), 4)), 0.06) for _ in range(3))
    masks = tuple(
        Mask(
            rng.choice(("add", "fill", "where", "causal", "causal added")),
            rng.choice(FILLS[:3]) if rng.random() < 0.7 else rng.choice(FILLS),
            rng.choice(MASK_SHAPES),
            rng.random() < 0.3,
        )
        for _ in range(rng.choice((0, 1, 1, 1, 2)))
    )
    return Recipe(
        perms=perms,  # type: ignore[arg-type]
        product=str(often(rng.choice(("matmul", "mT", "einsum", "bmm")), "untransposed", 0.06)),
        scale=(rng.choice(("none", "mul", "div", "q", "k", "both")), rng.choice((0.5, 2.0, 0.25, 1.0, -1.0))),
        masks=masks,
        axis=int(often(-1, rng.choice((-2, 0, 1, 3)))),  # type: ignore[call-overload]
        softmax=rng.choice(("plain", "plain", "float", "written", "written", "twice"))
        if rng.random() < 0.5
        else "plain",
        dropped=rng.random() < 0.1,
        after=float(often(1.0, 0.5, 0.08)),  # type: ignore[arg-type]
        output=rng.choice(("plain", "merged", "transposed")),
        shared=rng.random() < 0.08,
        dtype=torch.bfloat16 if rng.random() < 0.1 else torch.float32,
    )


def inputs(recipe: Recipe, seed: int) -> tuple[Tensor, ...]:
    """q, k, v that require gradients, a bias and flags, drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, bias = (torch.randn(SHAPE, generator=generator).to(recipe.dtype) for _ in range(4))
    return (*(x.requires_grad_() for x in (q, k, v)), bias, torch.rand(SHAPE, generator=generator) < 0.4)
