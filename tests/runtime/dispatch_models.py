"""Small models for the dispatch and API tests, the five modes of the contract, and the cheap lowering."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fusewright.api import optimize_with
from fusewright.capture.shapes import ShapeBucket
from fusewright.capture.variant import GraphVariant, Lowering

WIDTH = 8


def aot_eager(fingerprint: str, bucket: ShapeBucket, device: torch.device) -> GraphVariant:
    """Choose a lowering without a C++ compiler, for tests in which the lowering does not matter."""
    return GraphVariant(lowering=Lowering.AOT_EAGER)


def cheap(model: Any, **options: Any) -> Any:
    """`optimize` with the cheap lowering."""
    return optimize_with(model, choose=aot_eager, **options)


class One(nn.Module):
    """One dynamic length, a norm whose buffers change in training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, WIDTH) -> (B * T, WIDTH)."""
        y: Tensor = self.norm(self.inner(x).flatten(0, 1)).relu()
        return y


class Broken(nn.Module):
    """A graph break between two halves, and a size that crosses it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, WIDTH) -> (B, WIDTH)."""
        y = self.first(x).relu()
        torch._dynamo.graph_break()
        z: Tensor = self.second(y.view(-1, y.shape[1], WIDTH)).sum(1)
        return z


class Two(nn.Module):
    """Two dynamic lengths that are sometimes equal."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x (B, Q, WIDTH), y (B, K, WIDTH) -> (B, Q, WIDTH)."""
        scores = self.query(x) @ self.key(y).mT
        return scores.softmax(-1) @ y


Mode = tuple[bool, Callable[[], contextlib.AbstractContextManager[Any]]]  # training?, context of the call
MODES: dict[str, Mode] = {
    "train": (True, torch.enable_grad),
    "eval": (False, torch.enable_grad),
    "no_grad": (False, torch.no_grad),
    "inference_mode": (False, torch.inference_mode),
    "autocast": (False, lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
}
