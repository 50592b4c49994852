"""A job of one small model with two shape buckets, for tests that tune in processes of their own."""

import torch
from torch import nn

from fusewright import Workload


class Mini(nn.Module):
    """Two linear layers and a norm over (batch, tokens, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 64)
        self.outer = nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual block."""
        return self.norm(x + self.outer(self.inner(x).relu()))


def inputs(tokens: int, seed: int) -> tuple[tuple, dict]:
    """One batch of two sequences."""
    return (torch.randn(2, tokens, 32, generator=torch.Generator().manual_seed(seed)),), {}


WORKLOADS = [
    Workload(
        name="mini",
        family="small",
        model=Mini,
        inputs=inputs,
        lengths=(16, 64),
        dims={"x": {1: "tokens"}},
        loss=lambda output: output.square().mean(),
    )
]
