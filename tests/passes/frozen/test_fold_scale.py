"""A factor of each output channel folds into the layer before it, and only that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusewright.passes.frozen.fold_scale import FoldScale
from tests.passes.frozen.frozen_pass import declines, rewrite

PASS = FoldScale()
Body = Callable[[Any, Tensor], Any]


class Scaled(nn.Module):
    """A layer and a factor of the given shape, used as `body` says."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], body: Body = lambda m, x: m.layer(x) * m.s) -> None:
        super().__init__()
        self.layer, self.s, self.body = layer, nn.Parameter(torch.randn(shape)), body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


ROWS, IMAGE = (2, 5, 6), (2, 4, 5, 5)
FOLDED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: Scaled(nn.Linear(6, 3), (3,)), ROWS),
    "linear without bias": (lambda: Scaled(nn.Linear(6, 3, bias=False), (1, 3)), ROWS),
    "factor first": (lambda: Scaled(nn.Linear(6, 3), (3,), lambda m, x: m.s * m.layer(x)), ROWS),
    "method": (lambda: Scaled(nn.Linear(6, 3), (3,), lambda m, x: m.layer(x).mul(m.s)), ROWS),
    "number": (lambda: Scaled(nn.Linear(6, 3), (), lambda m, x: m.layer(x) * 0.125), ROWS),
    "negative integer": (lambda: Scaled(nn.Linear(6, 3), (), lambda m, x: -2 * m.layer(x)), ROWS),
    "one learned number": (lambda: Scaled(nn.Linear(6, 3), ()), ROWS),
    "convolution": (lambda: Scaled(nn.Conv2d(4, 6, 3), (6, 1, 1)), IMAGE),
    "convolution with batch axis": (lambda: Scaled(nn.Conv2d(4, 6, 3, groups=2), (1, 6, 1, 1)), IMAGE),
    "transposed": (lambda: Scaled(nn.ConvTranspose2d(4, 6, 3), (6, 1, 1)), IMAGE),
    "square, so that axes can be mixed up": (lambda: Scaled(nn.ConvTranspose2d(4, 4, 3), (4, 1, 1)), IMAGE),
}


@pytest.mark.parametrize("name", FOLDED)
def test_folds(name: str) -> None:
    make, shape = FOLDED[name]
    report = rewrite(PASS, make().eval(), [torch.randn(shape)])
    assert report.rewrites == 1, report.declines
    assert len(report.after.code.split("linear(")) + len(report.after.code.split(".conv")) == 3


def test_folds_one_after_the_other() -> None:
    model = Scaled(nn.Linear(6, 3), (3,), lambda m, x: m.layer(x) * m.s * 0.5)
    assert rewrite(PASS, model.eval(), [torch.randn(ROWS)]).rewrites == 2


def test_half_precision() -> None:
    model = Scaled(nn.Linear(64, 48), (48,)).eval().bfloat16()
    assert rewrite(PASS, model, [torch.randn(9, 64, dtype=torch.bfloat16)]).rewrites == 1


def test_two_factors_of_one_layer() -> None:
    model = Scaled(nn.Linear(6, 3), (3,), lambda m, x: m.layer(x) * 2 - m.layer(x + 1) * 3 + m.layer(x - 1))
    assert rewrite(PASS, model.eval(), [torch.randn(ROWS)]).rewrites == 2


DECLINED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "along the rows": (lambda: Scaled(nn.Linear(6, 5), (5, 1)), ROWS, "not one for each output channel"),
    "along the width": (lambda: Scaled(nn.Conv2d(4, 3, 3), (3,)), IMAGE, "not one for each output channel"),
    "of every element": (lambda: Scaled(nn.Linear(6, 3), (5, 3)), ROWS, "not one for each output channel"),
    "one more axis": (lambda: Scaled(nn.Linear(6, 3), (1, 1, 1, 3)), ROWS, "not one for each output channel"),
    "channels made from one": (lambda: Scaled(nn.Linear(6, 1), (3,)), ROWS, "not one for each output channel"),
    "used twice": (
        lambda: Scaled(nn.Linear(6, 3), (3,), lambda m, x: (lambda y: y * m.s + y)(m.layer(x))),
        ROWS,
        "used elsewhere",
    ),
    "wider": (
        lambda: Scaled(nn.Linear(6, 3), (3,), lambda m, x: m.layer(x) * m.s.double()),
        ROWS,
        "changes the dtype",
    ),
    "a factor that is written": (
        lambda: Scaled(nn.Linear(6, 3), (3,), lambda m, x: (m.layer.bias.add_(1.0), m.layer(x) * m.s)[1]),
        ROWS,
        "is written to",
    ),
}


@pytest.mark.parametrize("name", DECLINED)
def test_declines(name: str) -> None:
    make, shape, reason = DECLINED[name]
    assert reason in declines(PASS, make().eval(), [torch.randn(shape)])


def test_leaves_products_with_data() -> None:
    model = Scaled(nn.Linear(6, 6), (6,), lambda m, x: m.layer(x) * x + x * m.s)
    report = rewrite(PASS, model.eval(), [torch.randn(ROWS)])
    assert (report.rewrites, report.declines) == (0, [])


def test_declines_where_gradients_are_asked_for() -> None:
    model = Scaled(nn.Linear(6, 3), (3,)).eval()
    assert "gradients are asked for" in declines(PASS, model, [torch.randn(ROWS)], training=True)
