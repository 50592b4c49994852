"""Frozen weights through `optimize`: right after every way to change a weight, computed once where none changed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.api import explain, optimize_with
from fusewright.capture.variant import GraphVariant, Lowering
from fusewright.passes.frozen.hoist import Hoisted
from tests.passes.frozen.frozen_pass import randomized


class Net(nn.Module):
    """A convolution with batch norm, then two layers of one input: something for every pass on frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.gate, self.up = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.relu(self.norm(self.conv(x)), inplace=True).mean((2, 3))
        return nn.functional.silu(self.gate(y)) * self.up(y)


def frozen(model: nn.Module, **options: Any) -> Any:
    """`model`, optimized in place with frozen weights and a lowering that takes no seconds to compile."""
    variant = GraphVariant(None, Lowering.AOT_EAGER)
    return optimize_with(model, choose=lambda *_: variant, frozen_weights=True, **options)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 7, 7)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry a computation of hoisted values."""
    runs: list[int] = []
    original = Hoisted._compute

    def counted(self: Hoisted, given: Any) -> Any:
        runs.append(len(given))
        return original(self, given)

    monkeypatch.setattr(Hoisted, "_compute", counted)
    return runs


def eager(model: nn.Module, x: Tensor) -> Tensor:
    """What the class computes from the model's present weights, compiled code left out."""
    result: Tensor = model._call_impl(x)
    return result


def check(model: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(model(x), eager(model, x), rtol=1e-4, atol=1e-5)


def other_state(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(7)
    return {k: torch.rand_like(v) + 0.5 if v.is_floating_point() else v for k, v in model.state_dict().items()}


def step_with(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        optimizer = make(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    return change


class OldStyle(torch.optim.Optimizer):
    """Writes through `.data`, as optimizers did before there was `no_grad`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.5)


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.gate.weight.mul_(3.0)


def in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        model.conv.weight.mul_(3.0)


def running_statistics(model: Any) -> None:
    model.norm.running_var.mul_(4.0)


def data_swap(model: Any) -> None:
    model.up.weight.data = torch.randn_like(model.up.weight)


def another_place(model: Any) -> None:
    """Same storage, same version, another offset."""
    model.up.weight.data = model.rows[6:]


def new_parameter(model: Any) -> None:
    model.conv.weight = nn.Parameter(torch.randn_like(model.conv.weight))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "load_state_dict": lambda m: m.load_state_dict(other_state(m)),
    "load_state_dict assign": lambda m: m.load_state_dict(other_state(m), assign=True),
    "to float64 and back": lambda m: m.double().float(),
    "SGD": step_with(lambda p: torch.optim.SGD(p, 0.1)),
    "Adam foreach": step_with(lambda p: torch.optim.Adam(p, 0.1, foreach=True)),
    "Adam fused": step_with(lambda p: torch.optim.Adam(p, 0.1, fused=True)),
    "old style": step_with(OldStyle),
    "in place": in_place,
    "in inference mode": in_inference_mode,
    "running statistics": running_statistics,
    "data swap": data_swap,
    "another place in a storage": another_place,
    "new parameter": new_parameter,
    "a loss of frozen gradients": lambda m: m.requires_grad_(False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_refreshes_after(name: str, x: Tensor, computed: list[int]) -> None:
    net = Net()
    net.rows = torch.randn(12, 8)  # type: ignore[assignment]
    net.up.weight.data = net.rows[:6]
    model = frozen(randomized(net), strict=True)
    with torch.no_grad():
        check(model, x)
    before = eager(model, x)
    CHANGES[name](model)
    unchanged = name in ("to float64 and back", "a loss of frozen gradients")
    assert torch.allclose(before, eager(model, x)) == unchanged, "the change must show, or the test shows nothing"
    with torch.no_grad():
        check(model, x)
        count = len(computed)
        check(model, x)
        check(model, x + 1)
    assert len(computed) == count, "computed again although nothing changed"
    assert explain(model).to_dict()["fallbacks"] == []


def test_computes_once_and_says_what_it_did(x: Tensor, computed: list[int]) -> None:
    model = frozen(randomized(Net()), strict=True)
    with torch.no_grad():
        for _ in range(4):
            check(model, x)
    assert computed == [6 + 4]  # the convolution's and the norm's; two layers' weights and biases
    assert explain(model).to_dict()["rewrites"] == {"fold_batch_norm": 1, "merge_linears": 1}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_to_another_dtype(mode: Callable[[], Any], x: Tensor) -> None:
    model = frozen(randomized(Net()), strict=True)
    with mode():
        check(model, x)
    model.to(torch.float64)
    with mode():
        check(model, x.double())
        assert model(x.double()).dtype == torch.float64
    model.to(torch.float32)
    in_place(model)
    with mode():
        check(model, x)


def test_training_and_back(x: Tensor, computed: list[int]) -> None:
    model = frozen(randomized(Net()), strict=True)
    with torch.no_grad():
        check(model, x)
    model.train()
    twin = copy.deepcopy(model)
    loss = model(x).square().sum()
    loss.backward()
    expected = twin._call_impl(x).square().sum()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    assert len(computed) == 1
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.eval()
    with torch.no_grad():
        check(model, x)
    reasons = {d["reason"] for d in explain(model).to_dict()["declines"]}
    assert {"normalizes by the statistics of the batch", "gradients are asked for"} & reasons


def train_by_forward(parent: nn.Module, x: Tensor) -> None:
    """As code does that calls `forward`, which is never compiled."""
    parent[0].forward(x)


def train_disabled(parent: nn.Module, x: Tensor) -> None:
    with fusewright.disabled():
        parent[0](x)


def train_by_parent(parent: nn.Module, x: Tensor) -> None:
    parent(x)


def train_children(parent: nn.Module, x: Tensor) -> None:
    net: Any = parent[0]
    net.norm(net.conv(x))


@pytest.mark.parametrize("train", [train_by_forward, train_disabled, train_by_parent, train_children])
@pytest.mark.parametrize("grad", [False, True])
def test_statistics_that_training_moved(
    train: Callable[[nn.Module, Tensor], None], grad: bool, x: Tensor, computed: list[int]
) -> None:
    """Eager batch norm writes to its statistics without raising their versions."""
    model = frozen(randomized(Net()), strict=True)
    parent = nn.Sequential(model)
    with torch.no_grad():
        check(model, x)
        before = eager(model, x)
    parent.train()
    with torch.set_grad_enabled(grad):
        train(parent, x * 3 + 1)
    parent.eval()
    with torch.no_grad():
        assert not torch.allclose(before, eager(model, x)), "the change must show, or the test shows nothing"
        check(model, x)
        check(model, x + 1)
    assert computed.count(6 + 4) == 2  # training without gradients has layers of its own to merge
    assert explain(model).to_dict()["fallbacks"] == []


class Scaled(nn.Module):
    """Two layers of one input; the weights of the second are scaled by what comes after it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.gain = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.two(x) * self.gain


def test_a_scaled_layer_merges_with_one_before_it() -> None:
    model, x = frozen(Scaled().eval(), strict=True), torch.randn(3, 8)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(x), model._call_impl(x), rtol=1e-4, atol=1e-5)
            model.gain.mul_(2.0)
    assert explain(model).to_dict()["rewrites"] == {"fold_scale": 1, "merge_linears": 1}


def test_gradients_in_evaluation_are_of_the_weights_themselves(x: Tensor, computed: list[int]) -> None:
    model = frozen(randomized(Net()), strict=True)
    model(x).sum().backward()
    found = model.conv.weight.grad.clone()
    model.zero_grad()
    eager(model, x).sum().backward()
    torch.testing.assert_close(found, model.conv.weight.grad, rtol=1e-4, atol=1e-5)
    assert computed == []
    assert "gradients are asked for" in {d["reason"] for d in explain(model).to_dict()["declines"]}


class Parametrized(nn.Module):
    """Computes its weight from two parameters on every call."""

    def __init__(self) -> None:
        super().__init__()
        self.direction, self.length = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.length * self.direction / self.direction.pow(2).sum(1, keepdim=True).sqrt()
        return nn.functional.linear(x, weight)


def test_a_computed_weight_is_hoisted_in_inference_and_trains(computed: list[int]) -> None:
    model, x = frozen(Parametrized(), strict=True), torch.randn(5, 3)
    with torch.no_grad():
        check(model, x)
        check(model, x)
    assert computed == [2]
    model(x).square().sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    eager(model, x).square().sum().backward()
    for one, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-5)
    assert computed == [2]


def test_threads_see_each_change(x: Tensor) -> None:
    model = frozen(randomized(Net()), strict=True)
    with torch.no_grad():
        check(model, x)
    for _ in range(5):
        in_place(model)
        expected = eager(model, x).detach()
        start = threading.Barrier(4)

        def call() -> Tensor:
            start.wait()  # noqa: B023  the threads end before the next round
            with torch.no_grad():
                result: Tensor = model(x)
            return result

        with ThreadPoolExecutor(4) as pool:
            results = [f.result() for f in [pool.submit(call) for _ in range(4)]]
        for result in results:
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_a_copy_has_weights_of_its_own(x: Tensor) -> None:
    model = frozen(randomized(Net()), strict=True)
    with torch.no_grad():
        check(model, x)
        other = copy.deepcopy(model)
        in_place(other)
        check(other, x)
        check(model, x)
        assert not torch.allclose(model(x), other(x))
    assert explain(other).to_dict()["rewrites"] == explain(model).to_dict()["rewrites"]


class CastingInside(Net):
    """Switches autocast on by itself, as many models do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def test_autocast_inside_the_model(x: Tensor, computed: list[int]) -> None:
    model = frozen(randomized(CastingInside()), strict=True)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(x), eager(model, x), rtol=3e-2, atol=3e-2)
            in_place(model)
    assert computed == [6 + 4] * 2


class Pair(nn.Module):
    """Two uses of one convolution with factors of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.norm(self.conv(x)) * 2 - self.other(self.conv(y)) * 3
        return result


def test_two_uses_of_one_weight(x: Tensor) -> None:
    model, y = frozen(randomized(Pair()), strict=True), torch.randn_like(x)
    with torch.no_grad():
        torch.testing.assert_close(model(x, y), model._call_impl(x, y), rtol=1e-4, atol=1e-5)
        model.conv.weight.add_(1.0)
        torch.testing.assert_close(model(x, y), model._call_impl(x, y), rtol=1e-4, atol=1e-5)
    assert explain(model).to_dict()["rewrites"] == {"fold_batch_norm": 2, "fold_scale": 2}


def test_a_write_past_the_version_counter_is_found_by_verifying_always(x: Tensor) -> None:
    """Nothing tells that `.data` was written to in place: only comparing does."""
    model = frozen(randomized(Net()), verify="always")
    with torch.no_grad():
        check(model, x)
        model.conv.weight.data.mul_(3.0)
        check(model, x)
    assert [f["kind"] for f in explain(model).to_dict()["fallbacks"]] == ["verification"]


def test_weights_made_in_inference_mode_are_counted_and_right(x: Tensor) -> None:
    with torch.inference_mode():
        model = frozen(randomized(Net()))
        check(model, x)
        model.conv.weight.mul_(3.0)
        check(model, x)
    assert {f["kind"] for f in explain(model).to_dict()["fallbacks"]} == {"frozen_weights"}
