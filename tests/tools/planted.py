"""Passes with a planted fault, and a graph long enough to look for it in."""

from __future__ import annotations

import contextlib
from typing import ClassVar

import pytest
import torch
from torch import Tensor, fx

from fusewright.config import Numerics
from fusewright.passes.base import Pass, PassContext
from fusewright.runtime.inductor.pattern_proofs import PatternProofs


def chain(x: Tensor, y: Tensor) -> Tensor:
    """More than 60 nodes: blocks of a few elementwise operations that keep a fault visible, a sigmoid in the sixth."""
    for index in range(10):
        x = x + torch.tanh(x * 0.3 + y).cos()
        if index == 5:
            x = x - torch.sigmoid(y)
        y = (y - x * 0.1).sin()
    return x + y


class Retarget(Pass):
    """Replaces torch functions by others that need not be equal; `wrong_from` limits the fault to later rewrites."""

    name: ClassVar[str] = "retarget"
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED

    def __init__(self, old: object, right: object, wrong: object = None, wrong_from: int = 10**9) -> None:
        self.old, self.right, self.wrong, self.wrong_from = old, right, wrong, wrong_from

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        count = 0
        for node in gm.graph.nodes:
            if node.target is self.old and self.asks(ctx, node):
                count += 1
                node.target = self.wrong if count >= self.wrong_from else self.right
        return count

    def asks(self, ctx: PassContext, node: fx.Node) -> bool:
        return ctx.allow(node)


class Unasking(Retarget):
    """The same from a user who does not ask."""

    name: ClassVar[str] = "unasking"

    def asks(self, ctx: PassContext, node: fx.Node) -> bool:
        return True


class Later(Retarget):
    """A pass of another name."""

    name: ClassVar[str] = "later"


def tanh_by_parts(x: Tensor) -> Tensor:
    return 1 - 2 / (torch.exp(2 * x) + 1)


def wrong_tanh(x: Tensor) -> Tensor:
    return x / (1 + x.abs())


def wrong_sigmoid(x: Tensor) -> Tensor:
    return torch.tanh(x)


def raising(x: Tensor) -> Tensor:
    raise ZeroDivisionError("planted")


def without_pattern_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Inductor's pattern rewrites stand unproven, as torch.compile does, under a cache key of their own."""
    monkeypatch.setattr(PatternProofs, "watching", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(PatternProofs, "uuid", lambda self: b"unproven")
