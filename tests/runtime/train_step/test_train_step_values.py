"""Python values that a training step reads: a change is a new graph; what cannot be watched, or is no step, says so."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.errors import CaptureError, UserInputError
from fusewright.runtime.train_step import TrainStep

SCALE = 1.0

Change = Callable[[float], None]
Case = tuple[nn.Module, Callable[[Tensor], Tensor], Change]


class Scaled(nn.Module):
    """A model whose scale lies in a list and in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.scales = [1.0]
        self.cfg = types.SimpleNamespace(scale=1.0)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.linear(x_BD) * self.scales[0] * self.cfg.scale


class Weighted(nn.Module):
    """A loss that is called, called as a method, or a module."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = {"w": 1.0}

    def forward(self, out: Tensor) -> Tensor:
        return self.weights["w"] * out.square().mean()


class Plain:
    weight = 1.0

    def __call__(self, out: Tensor) -> Tensor:
        return self.weight * out.square().mean()

    def method(self, out: Tensor) -> Tensor:
        return self(out)


def square(out: Tensor) -> Tensor:
    return out.square().mean()


def by_global(out: Tensor) -> Tensor:
    return SCALE * square(out)


def by_helper(out: Tensor) -> Tensor:
    return sum(by_global(out) for _ in range(1))  # a global of a function, read by code inside of another


def with_dict(out: Tensor, cfg: dict[str, float]) -> Tensor:
    return cfg["w"] * square(out)


def closure() -> Case:
    cfg = {"w": 1.0}
    return Scaled(), lambda out: cfg["w"] * square(out), lambda w: cfg.update(w=w)


def global_name(loss_fn: Callable[[Tensor], Tensor]) -> Case:
    return Scaled(), loss_fn, lambda w: globals().update(SCALE=w)


def attribute(method: bool) -> Case:
    loss = Plain()
    return Scaled(), loss.method if method else loss, lambda w: setattr(loss, "weight", w)


def partial() -> Case:
    cfg = {"w": 1.0}
    return Scaled(), functools.partial(with_dict, cfg=cfg), lambda w: cfg.update(w=w)


def loss_module() -> Case:
    loss = Weighted()
    return Scaled(), loss, lambda w: loss.weights.update(w=w)


def model_list() -> Case:
    model = Scaled()
    return model, square, lambda w: model.scales.__setitem__(0, w)


def model_object() -> Case:
    model = Scaled()
    return model, square, lambda w: setattr(model.cfg, "scale", w)


CASES: dict[str, Callable[[], Case]] = {
    "closure over a dict": closure,
    "global": lambda: global_name(by_global),
    "global of a function that is called": lambda: global_name(by_helper),
    "attribute of a callable": lambda: attribute(method=False),
    "attribute behind a bound method": lambda: attribute(method=True),
    "partial with a dict": partial,
    "dict of a loss module": loss_module,
    "list of the model": model_list,
    "object of the model": model_object,
}


def train(step: TrainStep, x_BD: Tensor) -> tuple[float, float]:
    """Losses of the step and of the eager loop; the learning rate is 0."""
    return step(x_BD).item(), step.loss_fn(step.model(x_BD)).item()


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_a_changed_value_is_a_new_graph(make: Callable[[], Case]) -> None:
    model, loss_fn, change = make()
    step = TrainStep(
        model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.0), lowering="eager", strict=True, verify="off"
    )
    for value in (1.0, 2.0, -0.0, 0.0, 4.0, 2.0, 1.0):
        change(value)
        mine, eager = train(step, torch.ones(4, 8))
        assert mine == pytest.approx(eager, rel=1e-6), value
    report = step.report()
    assert (len(report["graphs"]), report["compiled_calls"]) == (5, 7), "equal values share a graph"
    change(1.0)


@pytest.mark.parametrize("value", [[0.5] * 5000, [[[[[[[0.5]]]]]]]], ids=["long", "deep"])
def test_what_is_too_much_to_watch_runs_eagerly(value: Any) -> None:
    reason = "over 4000 values, or over 4 deep"

    def loss_fn(out: Tensor) -> Tensor:
        return square(out) * len(value)

    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = TrainStep(model, loss_fn, optimizer, lowering="eager", strict=False)
    for _ in range(2):
        mine, eager = train(step, torch.ones(4, 8))
        assert mine == pytest.approx(eager, rel=1e-6)
    (fallback,) = step.report()["fallbacks"]
    assert (fallback["kind"], fallback["count"]) == ("capture", 2)
    assert reason in fallback["reason"]
    with pytest.raises(CaptureError, match=reason):
        TrainStep(model, loss_fn, optimizer, lowering="eager", strict=True)(torch.ones(4, 8))


def test_an_optimized_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters())
    for part in (model[0], model):
        fusewright.optimize(part)
        with pytest.raises(UserInputError, match="pass the plain model"):
            TrainStep(model, square, optimizer)


def test_an_optimizer_that_calls_back_is_refused() -> None:
    model = nn.Linear(8, 1)
    with pytest.raises(UserInputError, match="LBFGS"):
        TrainStep(model, square, torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("strict", [True, False])
def test_a_loss_that_is_no_tensor_is_refused(strict: bool) -> None:
    model = nn.Linear(8, 1)
    loss_fn: Any = lambda out: (square(out), out)  # noqa: E731
    step = TrainStep(model, loss_fn, torch.optim.SGD(model.parameters()), lowering="eager", strict=strict)
    with pytest.raises(UserInputError, match="loss_fn must return a tensor, not tuple"):
        step(torch.ones(4, 8))
