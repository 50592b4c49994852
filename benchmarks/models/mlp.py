"""A three-layer perceptron: so small that call overhead, not arithmetic, decides its time."""

from __future__ import annotations

from torch import Tensor, nn


class Mlp(nn.Module):
    """Linear, GELU, Linear, GELU, Linear: (batch, 256) -> (batch, 64), 148 thousand parameters."""

    def __init__(self, width: int = 256, classes: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map x (batch, width) to logits (batch, classes)."""
        logits: Tensor = self.layers(x)
        return logits
