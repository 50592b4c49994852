"""The constraints on frozen-weight passes that fusewright/pipeline/order.py states are real."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusewright.capture.graph import copy_graph
from fusewright.passes.base import Pass, PassContext
from fusewright.passes.cleanup.canonicalize import Canonicalize
from fusewright.passes.frozen.fold_batch_norm import FoldBatchNorm
from fusewright.passes.frozen.fold_scale import FoldScale
from fusewright.passes.frozen.merge_linears import MergeLinears
from fusewright.pipeline.order import ORDER
from fusewright.tools.pass_tester import capture
from tests.passes.frozen.frozen_pass import randomized


def rewrites(model: nn.Module, x: Tensor, passes: Sequence[Pass]) -> dict[str, int]:
    """Rewrites of each pass when they run in this order."""
    with torch.no_grad():
        gm = copy_graph(capture(model, [x]).graph)
    return {p.name: p.run(gm, PassContext(frozen_weights=True, pass_name=p.name)) for p in passes}


def check(model: nn.Module, x: Tensor, first: Pass, second: Pass) -> None:
    """Assert that `second` finds something after `first`, nothing before it, and that the order says so."""
    assert rewrites(model, x, [first, second]) == {first.name: 1, second.name: 1}
    assert rewrites(model, x, [second, first])[second.name] == 0
    names = [p.name for p in ORDER]
    assert names.index(first.name) < names.index(second.name)


class Idle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5, False)


class Halves(nn.Module):
    """Two layers of one input, with idle dropout before the second or a scale after it."""

    def __init__(self, *, dropout: bool) -> None:
        super().__init__()
        self.one, self.two, self.dropout = nn.Linear(4, 4), nn.Linear(4, 4), dropout

    def forward(self, x: Tensor) -> Tensor:
        if self.dropout:
            result: Tensor = self.one(x) + self.two(functional.dropout(x, 0.5, False))
            return result
        scaled: Tensor = self.one(x) + self.two(x) * 0.5
        return scaled


class LayerScale(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


IMAGE = torch.randn(2, 3, 5, 5)


def test_canonicalize_before_batch_norm() -> None:
    check(
        randomized(nn.Sequential(nn.Conv2d(3, 4, 3), Idle(), nn.BatchNorm2d(4))), IMAGE, Canonicalize(), FoldBatchNorm()
    )


def test_canonicalize_before_merging() -> None:
    check(Halves(dropout=True).eval(), torch.randn(2, 4), Canonicalize(), MergeLinears())


def test_batch_norm_before_scale() -> None:
    model = randomized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), LayerScale(4)))
    check(model, IMAGE, FoldBatchNorm(), FoldScale())


def test_scale_before_merging() -> None:
    model, x = Halves(dropout=False).eval(), torch.randn(2, 4)
    assert rewrites(model, x, [FoldScale(), MergeLinears()]) == {"fold_scale": 1, "merge_linears": 1}
    assert rewrites(model, x, [MergeLinears(), FoldScale()]) == {"merge_linears": 1, "fold_scale": 0}
    names = [p.name for p in ORDER]
    assert names.index("fold_scale") < names.index("merge_linears")
