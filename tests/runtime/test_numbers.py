"""Python numbers as arguments and attributes: a graph lowered for one value must not answer for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import fusewright
from fusewright.api import optimize_with
from fusewright.capture.variant import GraphVariant, Lowering

CHEAP = GraphVariant(lowering=Lowering.AOT_EAGER)


def optimized(model: Any, **options: Any) -> Any:
    return optimize_with(model, choose=lambda *_: CHEAP, **options)


def of_an_int(x: Tensor, n: int) -> tuple[Tensor, ...]:
    return x + float(n == 0), x + max(n, 0), x + n // 4, x + n % 4, abs(n) * x, x + min(n, 1)


def test_an_int_may_be_zero_one_or_negative_later() -> None:
    model, x = optimized(of_an_int, strict=True), torch.full((3,), 0.5)
    for n in (5, 7, 0, -3, 1, -1, 2, 100):
        assert all(map(torch.equal, model(x, n), of_an_int(x, n))), n


def of_an_offset(ids: Tensor, start: int) -> Tensor:
    return ids[:, start:].sum(1) + float(start == 0)


def test_an_offset_beside_buckets() -> None:
    model = optimized(of_an_offset, dims={"ids": {1: "tokens"}}, buckets={"tokens": [16, 64]}, strict=True)
    for start in (8, 9, 0, 1, 3):
        for tokens in (12, 20, 40):
            ids = torch.randn(2, tokens)
            torch.testing.assert_close(model(ids, start), of_an_offset(ids, start))


def test_a_float_attribute_may_change() -> None:
    model = optimized(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), strict=True)
    for momentum in (0.1, 0.2, 0.3):
        model[1].momentum = momentum
        before = model[1].running_mean.clone()
        x = torch.randn(4, 8)
        model(x)
        mean = nn.functional.linear(x, model[0].weight, model[0].bias).mean(0)
        torch.testing.assert_close(model[1].running_mean, (1 - momentum) * before + momentum * mean.detach())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")  # of torch's own derivative formulas
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("warm", [False, True])
def test_forward_mode_derivatives_run_eagerly_and_are_counted(warm: bool) -> None:
    model, x = optimized(lambda x: x.tanh() * 2), torch.randn(3)
    if warm:
        model(x)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones(3)))).tangent
    torch.testing.assert_close(tangent, 2 * (1 - x.tanh() ** 2))
    assert [f["kind"] for f in fusewright.explain(model).to_dict()["fallbacks"]] == ["forward_mode"]
