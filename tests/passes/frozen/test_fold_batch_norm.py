"""Batch norm with fixed statistics folds into the layer before it, and only there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fusewright.passes.base import PassContext
from fusewright.passes.frozen.fold_batch_norm import FoldBatchNorm
from fusewright.tools.pass_tester import capture
from tests.passes.frozen.frozen_pass import declines, randomized, rewrite

PASS = FoldBatchNorm()
Case = tuple[nn.Module, nn.Module, tuple[int, ...]]

FOLDED: dict[str, Callable[[], Case]] = {
    "conv1d": lambda: (nn.Conv1d(3, 5, 3, bias=False), nn.BatchNorm1d(5), (2, 3, 9)),
    "conv2d": lambda: (nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), (2, 3, 9, 7)),
    "conv3d": lambda: (nn.Conv3d(2, 3, 2, stride=2), nn.BatchNorm3d(3), (1, 2, 5, 4, 6)),
    "padding same": lambda: (nn.Conv1d(3, 5, 3, padding="same", dilation=2), nn.BatchNorm1d(5), (2, 3, 9)),
    "two groups": lambda: (nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), (2, 4, 6, 5)),
    "depthwise": lambda: (nn.Conv2d(4, 8, 3, groups=4, bias=False), nn.BatchNorm2d(8), (2, 4, 6, 5)),
    "transposed 1d": lambda: (nn.ConvTranspose1d(3, 5, 3), nn.BatchNorm1d(5), (2, 3, 7)),
    "transposed 2d": lambda: (nn.ConvTranspose2d(4, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4), (2, 4, 5, 3)),
    "transposed 3d": lambda: (nn.ConvTranspose3d(2, 3, 2), nn.BatchNorm3d(3), (1, 2, 3, 4, 3)),
    "linear": lambda: (nn.Linear(6, 5), nn.BatchNorm1d(5), (7, 6)),
    "linear without bias": lambda: (nn.Linear(5, 5, bias=False), nn.BatchNorm1d(5), (3, 5)),
    "no affine": lambda: (nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5, affine=False), (2, 3, 4, 4)),
    "large eps": lambda: (nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5, eps=0.5), (2, 3, 4, 4)),
    "no batch": lambda: (nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5), (0, 3, 4, 4)),
}


@pytest.mark.parametrize("name", FOLDED)
def test_folds(name: str) -> None:
    layer, norm, shape = FOLDED[name]()
    report = rewrite(PASS, randomized(nn.Sequential(layer, norm)), [torch.randn(shape)])
    assert report.rewrites == 1, report.declines
    assert "batch_norm" not in report.after.code


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_folds_in_other_dtypes(dtype: torch.dtype) -> None:
    model = randomized(nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16))).to(dtype)
    report = rewrite(PASS, model, [torch.randn(2, 8, 9, 9, dtype=dtype)])
    assert report.rewrites == 1
    results = [n for n in report.after.graph.nodes if n.target is torch.conv2d]
    assert [n.meta["example_value"].dtype for n in results] == [dtype]


def test_folds_under_autocast() -> None:
    model = randomized(nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)))
    with torch.autocast("cpu", torch.bfloat16):
        assert rewrite(PASS, model, [torch.randn(2, 8, 9, 9)]).rewrites == 1


class Sharing(nn.Module):
    """Two norms after two uses of one convolution, with factors that a careless fold would mix up."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.norms[0](self.conv(x)) * 2 - self.norms[1](self.conv(y)) * 3 + self.conv(x + y)
        return result


def test_layers_that_share_a_weight_get_one_each() -> None:
    report = rewrite(PASS, randomized(Sharing()), [torch.randn(2, 3, 5, 5), torch.randn(2, 3, 5, 5)])
    assert report.rewrites == 2


class Between(nn.Module):
    """A convolution and a norm with something of the test's in between."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.norm, self.between = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), between

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.between(self.conv(x)))
        return result


class UsedTwice(Between):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        result: Tensor = self.norm(y) + y
        return result


class WritesStatistics(Between):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.conv(x))
        self.norm.running_mean.add_(1.0)  # type: ignore[union-attr, operator]
        return result


class GivenWeights(Between):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(functional.conv2d(x, x[:, :, :3, :3].mean(0, keepdim=True).expand(4, 3, 3, 3)))
        return result


class Rows(nn.Module):
    """A linear layer over three axes: the norm's channels are the rows, not the features."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.linear(x))
        return result


IMAGE = (2, 3, 6, 6)
DECLINED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "batch statistics": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).train()), IMAGE, "of the batch"),
    "no statistics": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)).eval(),
        IMAGE,
        "of the batch",
    ),
    "used twice": (lambda: randomized(UsedTwice(lambda x: x)), IMAGE, "used elsewhere"),
    "relu between": (lambda: randomized(Between(functional.relu)), IMAGE, "no convolution"),
    "written statistics": (lambda: randomized(WritesStatistics(lambda x: x)), IMAGE, "is written to"),
    "weights from data": (lambda: randomized(GivenWeights(lambda x: x)), IMAGE, "no weight of the model"),
    "transposed in groups": (
        lambda: randomized(nn.Sequential(nn.ConvTranspose2d(4, 4, 3, groups=2), nn.BatchNorm2d(4))),
        (2, 4, 5, 5),
        "in groups",
    ),
    "linear over rows": (lambda: randomized(Rows()), (2, 5, 5), "not the linear layer's features"),
    "norm first": (lambda: randomized(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3))), IMAGE, "no convolution"),
}


@pytest.mark.parametrize("name", DECLINED)
def test_declines(name: str) -> None:
    make, shape, reason = DECLINED[name]
    assert reason in declines(PASS, make(), [torch.randn(shape)])


def test_declines_where_gradients_are_asked_for() -> None:
    model = randomized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    assert "gradients are asked for" in declines(PASS, model, [torch.randn(IMAGE)], training=True)


def test_does_nothing_unless_the_weights_are_frozen() -> None:
    model = randomized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    with torch.no_grad():
        graph = capture(model, [torch.randn(IMAGE)]).graph
    ctx = PassContext(pass_name=PASS.name)
    assert PASS.run(graph, ctx) == 0
    assert ctx.declines == []


def test_stops_at_the_limit() -> None:
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))]
    with torch.no_grad():
        graph = capture(randomized(nn.Sequential(*layers)), [torch.randn(IMAGE)]).graph
    ctx = PassContext(frozen_weights=True, limits={PASS.name: 2})
    ctx.begin(PASS.name)
    assert PASS.run(graph, ctx) == 2
    assert ["limited to 2" in d.reason for d in ctx.declines] == [True]
