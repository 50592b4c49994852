"""A bucket of one size is lowered for that size: nothing symbolic is left, and other sizes still run."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn

import fusewright
from fusewright.api import optimize_with
from fusewright.capture.variant import GraphVariant, Lowering
from fusewright.config import Numerics
from fusewright.passes.base import Pass, PassContext, Stage

DIMS = {"x": {0: "batch"}}


class Expanding(nn.Module):
    """Asks about its batch size, so that what is lowered for it has to answer."""

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, 3), t (1,) -> (B, 3) and (B,)."""
        return x * t.expand(x.shape[0]).unsqueeze(-1), torch.arange(x.shape[0], dtype=x.dtype).cumsum(0)


class Counting(nn.Module):
    """Makes a tensor of its batch size that nothing compares with the batch."""

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, 3), t (1,) -> (B, 3) and (B,)."""
        return x * t, torch.arange(x.shape[0], dtype=x.dtype).cumsum(0)


class Sizes(Pass):
    """Notes every size in the graph that Inductor generates code for; rewrites nothing."""

    name: ClassVar[str] = "sizes"
    stage: ClassVar[Stage] = Stage.POST_GRAD
    numerics: ClassVar[Numerics] = Numerics.EXACT
    seen: ClassVar[list[Any]] = []

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        values = [node.meta.get("val") for node in gm.graph.nodes if node.users]
        self.seen += [value for value in values if isinstance(value, torch.SymInt)]
        self.seen += [size for value in values if isinstance(value, Tensor) for size in value.shape]
        return 0


def expected(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    return x * t, torch.arange(len(x), dtype=x.dtype).cumsum(0)


def sizes_lowered(batch: int) -> set[type]:
    Sizes.seen.clear()
    model = fusewright.optimize(Counting(), dims=DIMS, buckets={"batch": {4, 8}}, passes=[Sizes()], strict=True)
    x, t = torch.randn(batch, 3), torch.randn(1)
    torch.testing.assert_close(model(x, t), expected(x, t))
    return set(map(type, Sizes.seen))


def test_an_exact_size_leaves_nothing_symbolic() -> None:
    assert sizes_lowered(4) == {int}
    assert sizes_lowered(6) == {int, torch.SymInt}


def test_sizes_between_share_a_bucket() -> None:
    cheap = GraphVariant(lowering=Lowering.AOT_EAGER)
    model = optimize_with(Expanding(), choose=lambda *_: cheap, dims=DIMS, buckets={"batch": {4, 8}}, strict=True)
    for batch in (4, 5, 8, 7, 4, 3, 8, 4):
        x, t = torch.randn(batch, 3), torch.randn(1)
        torch.testing.assert_close(model(x, t), expected(x, t))
    told = fusewright.explain(model).to_dict()
    assert [(b["range"], b["hits"]) for b in told["buckets"]] == [
        ("batch=2..3", 1),
        ("batch=4", 3),
        ("batch=5..7", 2),
        ("batch=8", 2),
    ]
    assert (told["fallbacks"], told["dynamo_frames"]) == ([], 1)


class Normed(nn.Module):
    """What frozen weights fold, a size beside it, and where `breaks`, the size on the other side of a graph break."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.breaks = nn.Linear(3, 3), nn.BatchNorm1d(3), breaks

    def forward(self, x: Tensor) -> Tensor:
        """x (B, 3) -> (B, 3)."""
        batch = x.shape[0]
        y = self.norm(self.linear(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return y * batch + torch.arange(batch, dtype=x.dtype).view(-1, 1)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_exact_sizes_in_every_kind_of_graph(training: bool, breaks: bool, frozen: bool) -> None:
    cheap = GraphVariant(lowering=Lowering.AOT_EAGER)
    eager = Normed(breaks).train(training)
    model = optimize_with(
        copy.deepcopy(eager), choose=lambda *_: cheap, dims=DIMS, buckets={"batch": {4, 8}}, frozen_weights=frozen
    )
    for batch in (4, 8, 6, 4):
        x = torch.randn(batch, 3)
        with torch.set_grad_enabled(training):
            found, right = model(x), eager(x)
        torch.testing.assert_close(found, right)
        if training:
            for result in (found, right):
                result.square().sum().backward()
            torch.testing.assert_close(model.linear.weight.grad, eager.linear.weight.grad)
    kinds = {fallback["kind"] for fallback in fusewright.explain(model).to_dict()["fallbacks"]}
    assert kinds == ({"graph_break"} if breaks else set())
