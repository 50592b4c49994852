"""Layers share what is made of their masks alone; the kernel is told which keys a mask hides where that can pay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from fusewright.fusion.match.attention.fuse import FuseAttention
from fusewright.tools.pass_tester import PassTester

LAYERS, T = 3, 160
Mask = Callable[[Tensor], Tensor]
EXTENTS = torch.ops.fusewright.attention_extents.default


def nodes(gm: fx.GraphModule, target: object) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target is target]


def layers(scores: Callable[[Tensor, Tensor], Tensor], between: Callable[[Tensor], None] = lambda mask: None) -> object:
    """Attention over attention over attention, with one mask; `between` is done to it after each layer."""

    def run(x: Tensor, mask: Tensor) -> Tensor:
        mask = mask.clone()
        for _ in range(LAYERS):
            x = scores(x @ x.mT * 0.2, mask).softmax(-1) @ x
            between(mask)
        return x

    return run


def inputs(mask: Tensor, tokens: int = T) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 2, tokens, 8, requires_grad=True), mask


def additive(tokens: int = T) -> Tensor:
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return torch.zeros(1, 1, tokens, tokens).masked_fill(future, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("kind", ["added", "subtracted", "filled", "filled with finfo.min"])
def test_one_mask_is_read_once(kind: str, training: bool) -> None:
    scores = {
        "added": lambda s, m: s + m,
        "subtracted": lambda s, m: s - m,
        "filled": lambda s, m: s.masked_fill(m, float("-inf")),
        "filled with finfo.min": lambda s, m: s.masked_fill(m, torch.finfo(torch.float32).min),
    }[kind]
    mask = additive() if "added" in kind else -additive() if kind == "subtracted" else additive() < 0
    function = layers(scores)
    report = PassTester(FuseAttention()).check(function, inputs(mask), expect_rewrites=LAYERS, training=training)
    (made,) = nodes(report.after, EXTENTS)
    calls = nodes(report.after, torch.ops.fusewright.attention.default)
    assert [call.args[4] for call in calls] == [made] * LAYERS
    assert len({call.args[3] for call in calls}) == 1, "the mask itself is made once"


@pytest.mark.parametrize(
    "write",
    [
        lambda mask: mask[:, :, :, 0].fill_(-torch.inf),
        lambda mask: mask.mul_(2),
        lambda mask: torch.add(torch.ones_like(mask), 1, out=mask),
        lambda mask: torch._foreach_mul_([torch.ones(3), mask], 2.0),
    ],
    ids=["view", "whole", "out", "second of a list"],
)
def test_a_mask_that_is_written_to_is_read_again(write: Callable[[Tensor], None]) -> None:
    mask = torch.randn(1, 1, T, T)
    function = layers(lambda s, m: s - m, write)
    report = PassTester(FuseAttention()).check(function, inputs(mask), expect_rewrites=LAYERS, training=True)
    calls = nodes(report.after, torch.ops.fusewright.attention.default)
    assert len({call.args[4] for call in calls}) == LAYERS


def test_other_masks_are_read_apart() -> None:
    def run(x: Tensor, mask: Tensor, other: Tensor) -> Tensor:
        for each in (mask, other, mask):
            x = (x @ x.mT * 0.2 + each).softmax(-1) @ x
        return x

    args = (*inputs(additive()), torch.randn(T, T))
    report = PassTester(FuseAttention()).check(run, args, expect_rewrites=3, training=True)
    first, second, third = (call.args[4] for call in nodes(report.after, torch.ops.fusewright.attention.default))
    assert first is third
    assert first is not second


@pytest.mark.parametrize("kind", ["few keys", "rows only"])
def test_nothing_to_leave_out(kind: str) -> None:
    tokens = 60 if kind == "few keys" else T
    mask = additive(tokens) if kind == "few keys" else torch.randn(1, 1, tokens, 1)
    report = PassTester(FuseAttention()).check(
        layers(lambda s, m: s + m), inputs(mask, tokens), expect_rewrites=LAYERS, training=True
    )
    assert not nodes(report.after, EXTENTS)
    assert all(call.args[4] is None for call in nodes(report.after, torch.ops.fusewright.attention.default))
