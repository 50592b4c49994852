"""What `TrainStep` cannot do as one graph: counted and right, an error under `strict`; and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from fusewright.capture.step import function
from fusewright.capture.step.function import Slot
from fusewright.capture.step.optimizer_update import UpdateRule, updated
from fusewright.errors import CaptureError, FallbackError, UnknownNameError, UserInputError, VerificationError
from fusewright.runtime.step_verify import StepBuilder, StepVerifier, label, overlapping
from fusewright.runtime.train_step import TrainStep
from tests.runtime.train_step.step_pair import Make, Mlp, Pair, adam, sgd, square


def test_checkpointed_dropout_runs_eagerly_and_right() -> None:
    class Checkpointed(Mlp):
        def forward(self, x_BD: Tensor) -> Tensor:
            return checkpoint(super().forward, x_BD, use_reentrant=False)

    report = Pair(Checkpointed(dropout=0.5), sgd(), strict=False).train(3)
    assert [(f["kind"], f["count"]) for f in report["fallbacks"]] == [("capture", 3)]
    assert "random number generator" in report["fallbacks"][0]["reason"]


def test_other_optimizers_run_eagerly_and_are_counted() -> None:
    def rmsprop(parameters: Any) -> Optimizer:
        return torch.optim.RMSprop(parameters, lr=0.01)

    report = Pair(Mlp(), rmsprop, strict=False).train(3)
    assert report["compiled_calls"] == 2
    assert [(f["kind"], f["where"], f["count"]) for f in report["fallbacks"]] == [("optimizer", "RMSprop", 3)]
    model = Mlp()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FallbackError, match="RMSprop is not one of"):
        TrainStep(model, square, rmsprop(model.parameters()), strict=True)(torch.ones(5, 4))
    torch.testing.assert_close(dict(model.state_dict()), dict(before), atol=0, rtol=0)


class Branch(Mlp):
    def forward(self, x_BD: Tensor) -> Tensor:
        out = super().forward(x_BD)
        return out * 2 if out.sum() > 0 else out


class Counting(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x_BD: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x_BD) * self.calls


OUTSIDE = torch.tensor(3.0)


class Outside(Mlp):
    def forward(self, x_BD: Tensor) -> Tensor:
        return super().forward(x_BD) * OUTSIDE


@pytest.mark.parametrize(
    ("kind", "reason"), [(Branch, "DataDependent"), (Counting, "sets attribute 'calls'"), (Outside, "FakeTensor")]
)
def test_what_no_graph_can_hold_runs_eagerly(kind: type[Mlp], reason: str) -> None:
    pair = Pair(kind(), sgd(), strict=False)
    report = pair.train(4)
    assert report["compiled_calls"] == 0
    assert {f["kind"] for f in report["fallbacks"]} == {"capture"}
    assert sum(f["count"] for f in report["fallbacks"]) == 4
    assert reason in report["fallbacks"][0]["reason"]
    model = kind()
    with pytest.raises(CaptureError, match=reason):
        TrainStep(model, square, sgd()(model.parameters()), strict=True)(torch.ones(5, 4))


def test_a_wrong_lowering_is_caught_and_the_eager_result_used(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = StepBuilder.lower

    def broken(*args: Any) -> Callable[..., Any]:
        run = lower(*args)

        def wrong(*tensors: Tensor) -> Any:
            results = run(*tensors)
            tensors[0].add_(0.1)
            return results

        return wrong

    monkeypatch.setattr(StepBuilder, "lower", broken)
    report = Pair(Mlp(), sgd(), strict=False).train(3)
    assert [(f["kind"], f["count"]) for f in report["fallbacks"]] == [("verification", 3)]
    with pytest.raises(VerificationError, match="param 0"):
        Pair(Mlp(), sgd()).train(1)
    unchecked = Pair(Mlp(), sgd(), verify="off")
    with pytest.raises(AssertionError):
        unchecked.train(2)


def test_errors_of_the_model_come_through() -> None:
    model = Mlp()
    step = TrainStep(model, square, sgd()(model.parameters()), lowering="eager")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step(torch.ones(5, 3))
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        step(torch.ones(5, 4))


def test_bad_arguments_are_named() -> None:
    model = Mlp()
    optimizer = sgd()(model.parameters())
    for bad, name in (
        ((square, square, optimizer, {}), "model"),
        ((model, None, optimizer, {}), "loss_fn"),
        ((model, square, model, {}), "optimizer"),
        ((model, square, optimizer, {"accumulate": 0}), "accumulate"),
        ((model, square, optimizer, {"clip": -1.0}), "clip"),
        ((model, square, optimizer, {"verify": "always"}), "verify"),
    ):
        *arguments, options = bad
        with pytest.raises(UserInputError, match=name):
            TrainStep(*arguments, **options)
    with pytest.raises(UnknownNameError, match="Did you mean 'inductor'"):
        TrainStep(model, square, optimizer, lowering="inducter")


def test_signatures_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusewright.runtime.train_step.MAX_SIGNATURES", 2)
    pair = Pair(Mlp(), sgd(), strict=False)
    for size in (2, 3, 4, 5):
        pair.train(1, size, 4)
    assert [(f["kind"], f["count"]) for f in pair.step.report()["fallbacks"]] == [("signature_limit", 2)]


def test_overlap_is_found_only_where_it_is_written() -> None:
    base = torch.zeros(10)
    a, b, c = Slot("param", 0), Slot("buffer", 0), Slot("argument", 0)
    tensors = {a: base[:5], b: base[5:], c: base[4:6]}
    assert overlapping({a: base[:5], b: base[5:]}, [a, b]) is None
    assert overlapping(tensors, []) is None
    assert overlapping(tensors, [a]) == a
    assert overlapping(tensors, [b]) == b
    whole = {a: base[0:10], b: base[1:2], c: base[3:4]}
    assert overlapping(whole, [c]) == c


def test_arguments_that_cannot_be_hashed_are_part_of_the_signature() -> None:
    class Configured(Mlp):
        def forward(self, x_BD: Tensor, options: set[str]) -> Tensor:
            return super().forward(x_BD) * len(options)

    pair = Pair(Configured(), sgd())
    for options in ({"a"}, {"a", "b"}, {"b", "a"}):
        pair.both(torch.ones(5, 4), options=options)
    pair.check()
    assert len(pair.step.report()["graphs"]) == 2


@pytest.mark.parametrize("make", [adam(), sgd(momentum=0.9, dampening=0.5)])
def test_a_wrong_formula_is_caught(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(rule: UpdateRule, parameter: Tensor, *rest: Any) -> Any:
        new, state = updated(rule, parameter, *rest)
        return new + 0.01, state

    monkeypatch.setattr(function, "updated", wrong)
    report = Pair(Mlp(), make, strict=False).train(2)
    assert [(f["kind"], f["count"]) for f in report["fallbacks"]] == [("verification", 2)]


@pytest.mark.parametrize("make", [adam(), sgd(momentum=0.9, dampening=0.5)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_float64_reference_is_the_eager_step(make: Make, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    def record(self: StepVerifier, loss: Tensor, live: Any, float64: Callable[[], Any]) -> Any:
        mine = {"loss": loss} | {label(slot): tensor.clone() for slot, tensor in live.items()}
        compared.append((mine, float64()))
        return compare(self, loss, live, float64)

    compare = StepVerifier.compare
    monkeypatch.setattr(StepVerifier, "compare", record)
    pair = Pair(Mlp(), make, accumulate=accumulate, clip=0.1)
    for size in (3, 4, 5, 6):  # a new signature each time, so each call is compared
        pair.train(1, size, 4)
    assert len(compared) == 4
    for mine, wide in compared:
        assert mine.keys() == wide.keys()
        for name, tensor in mine.items():
            assert wide[name].dtype is torch.float64, name
            torch.testing.assert_close(tensor.double(), wide[name], atol=1e-4, rtol=1e-3)


def test_modules_swapped_for_others_are_noticed() -> None:
    pair = Pair(Mlp(), sgd())
    pair.train(2)
    for model in (pair.model, pair.twin):
        model.dropout = torch.nn.Tanh()
    assert len(pair.train(2)["graphs"]) == 2
