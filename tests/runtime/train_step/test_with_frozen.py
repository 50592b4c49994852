"""A whole step trains the weights that a frozen model serves."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import fusewright
from fusewright.api import optimize_with
from fusewright.capture.variant import GraphVariant, Lowering


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def test_what_a_whole_step_trains_is_served() -> None:
    trained = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    x = torch.randn(2, 3, 7, 7)
    variant = GraphVariant(lowering=Lowering.AOT_EAGER)
    served = optimize_with(copy.deepcopy(trained), choose=lambda *_: variant, frozen_weights=True)
    for mine, theirs in zip(served.parameters(), trained.parameters(), strict=True):
        mine.data = theirs.data
    with torch.no_grad():
        before = served(x)
    step = fusewright.TrainStep(trained, square, torch.optim.SGD(trained.parameters(), lr=0.5), lowering="eager")
    step(x)
    assert step.report()["fallbacks"] == [], "our own hook on optimizers must not look foreign"
    with torch.no_grad():
        torch.testing.assert_close(served(x), trained(x))
        assert not torch.equal(served(x), before)
