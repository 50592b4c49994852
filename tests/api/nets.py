"""The small model of the contract tests, in a module of its own so that pickle finds its class."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 8


class Net(nn.Module):
    """Linear, BatchNorm (buffers that training changes), Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, WIDTH) -> (B, 3)."""
        y: Tensor = self.last(self.norm(self.first(x)).relu())
        return y


class Tied(nn.Module):
    """One weight used as embedding and as output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, T) int64 -> (B, T, 11)."""
        y: Tensor = self.head(self.embed(ids).tanh())
        return y


def batch(rows: int = 5, seed: int = 0) -> Tensor:
    """Rows of normal numbers, (rows, WIDTH)."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
