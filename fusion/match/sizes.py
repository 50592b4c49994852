"""Comparisons of sizes that never add a guard to the symbolic shapes they look at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true


def same(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """True where the two sizes are equal for every shape that the graph admits."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(statically_known_true(a == b))


def all_same(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """True where two shapes have one rank and equal sizes for every shape that the graph admits."""
    left, right = tuple(a), tuple(b)
    return len(left) == len(right) and all(same(x, y) for x, y in zip(left, right, strict=True))
