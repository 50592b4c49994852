"""Nothing runs eagerly in silence: every fallback is counted with place and reason, and is an error under strict."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import convert_frame

import fusewright
from fusewright.capture import frontend
from fusewright.errors import FallbackError, PassFailedError, RecompileLimitError
from tests.api.nets import WIDTH, Net, batch
from tests.runtime.dispatch_models import Broken, cheap


def fallbacks(model: Any, kind: str) -> list[dict[str, Any]]:
    return [f for f in fusewright.explain(model).to_dict()["fallbacks"] if f["kind"] == kind]


def test_a_graph_break_is_counted_with_place_and_reason() -> None:
    model = Broken()
    reference = copy.deepcopy(model)
    cheap(model)
    x = torch.randn(3, 4, WIDTH)
    torch.testing.assert_close(model(x), reference(x))
    found = fallbacks(model, "graph_break")
    assert any("dispatch_models.py" in f["where"] and "(forward)" in f["where"] for f in found)
    assert all("graph_break()" in f["reason"] for f in found)
    assert fusewright.explain(model).to_dict()["breaks"]


def test_a_graph_break_is_an_error_under_strict_and_the_model_still_runs_eagerly() -> None:
    model = cheap(Broken(), strict=True)
    with pytest.raises(FallbackError, match=r"optimized_Broken.*would run eagerly"):
        model(torch.randn(3, 4, WIDTH))
    with fusewright.disabled():
        assert model(torch.randn(3, 4, WIDTH)).shape == (3, WIDTH)


class Picky(nn.Module):
    """Recompiles for every value of `scale`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = "0"

    def forward(self, x: Tensor) -> Tensor:
        return x * float(self.scale)


def test_the_recompile_limit_is_counted_and_the_results_stay_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend, "RECOMPILE_LIMIT", 2)
    model = cheap(Picky())
    for number in range(5):
        model.scale = str(number)
        torch.testing.assert_close(model(torch.ones(3)), torch.full((3,), float(number)))
    (found,) = fallbacks(model, "recompile_limit")
    assert "optimized_Picky" in found["where"]
    assert fusewright.explain(model).to_dict()["recompiles"] == 1


def test_the_recompile_limit_is_an_error_under_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend, "RECOMPILE_LIMIT", 2)
    model = cheap(Picky(), strict=True)
    for number in range(2):
        model.scale = str(number)
        model(torch.ones(3))
    model.scale = "2"
    with pytest.raises(RecompileLimitError, match="recompile limit"):
        model(torch.ones(3))


class Harmful(fusewright.Pass):
    """Doubles every ReLU, then fails, so that only a rollback gives the right result."""

    name = "harmful"

    def run(self, gm: fx.GraphModule, ctx: fusewright.PassContext) -> int:
        for node in list(gm.graph.nodes):
            if node.op == "call_method" and node.target == "relu":
                with gm.graph.inserting_after(node):
                    double = gm.graph.call_function(torch.add, (node, node))
                node.replace_all_uses_with(double, delete_user_cb=lambda user, new=double: user is not new)
        raise ValueError("half done")


def test_a_failing_pass_is_rolled_back_and_counted() -> None:
    model = Net().eval()
    reference = copy.deepcopy(model)
    cheap(model, passes=[Harmful()])
    torch.testing.assert_close(model(batch()), reference(batch()))
    (found,) = fallbacks(model, "pass")
    assert "harmful" in found["reason"]
    assert "half done" in found["reason"]
    assert fusewright.explain(model).to_dict()["buckets"][0]["variant"] == "aot_eager"


def test_a_failing_pass_is_an_error_under_strict() -> None:
    model = cheap(Net().eval(), passes=[Harmful()], strict=True)
    with pytest.raises(PassFailedError, match=r"'harmful' failed.*half done"):
        model(batch())


class Item(nn.Module):
    """Reads a number out of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


class Branch(nn.Module):
    """Takes one of two ways by what the tensor holds."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1


class Double(torch.autograd.Function):
    """Forward doubles; the backward is deliberately not its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 7


class Custom(nn.Module):
    """Uses a custom autograd function."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Double.apply(x)
        return result


class Effects(nn.Module):
    """Appends to a list and sets attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.calls = 0
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.shape[0])
        self.calls += 1
        self.last = x * 3
        return x * 2


def test_item_keeps_working() -> None:
    model = cheap(Item())
    for seed in range(3):
        torch.testing.assert_close(model(batch(seed=seed)), Item()(batch(seed=seed)))


def test_a_branch_on_data_keeps_working() -> None:
    model = cheap(Branch())
    for sign in (1, -1, 1, -1):
        torch.testing.assert_close(model(torch.full((3,), float(sign))), torch.full((3,), 2.0 * sign))
    assert fallbacks(model, "graph_break")


def test_a_custom_autograd_function_keeps_its_backward() -> None:
    model, x = cheap(Custom()), batch().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.unique().tolist() == [7.0]


def test_side_effects_happen_once_a_call() -> None:
    model = cheap(Effects())
    for number in range(1, 7):
        x = batch(5 if number < 4 else 6)
        torch.testing.assert_close(model(x), x * 2)
        assert model.calls == number
        torch.testing.assert_close(model.last, x * 3)
    assert model.seen == [5, 5, 5, 6, 6, 6]


def test_a_transform_around_the_model_runs_eagerly_and_costs_no_later_call() -> None:
    model = Net().eval()
    reference = copy.deepcopy(model)
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(weights: dict[str, Tensor], net: nn.Module) -> Tensor:
        return torch.func.functional_call(net, weights, (batch(),)).square().sum()

    cheap(model)
    found, expected = (torch.func.grad(loss)(parameters, net) for net in (model, reference))
    torch.testing.assert_close(found, expected)
    assert fallbacks(model, "skipped_frame")[0]["reason"].startswith("called inside a torch.func transform")
    torch.testing.assert_close(model(batch()), reference(batch()))
    data = fusewright.explain(model).to_dict()
    assert (data["calls"], data["dispatched"]) == (2, 1)
    strict = cheap(Net().eval(), strict=True)
    with pytest.raises(FallbackError, match=r"torch\.func transform.*disabled"):
        torch.func.grad(loss)(parameters, strict)


def fail_inside_dynamo(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make Dynamo fail on every graph of `model`; returns what it tried."""
    tried: list[int] = []

    def broken(*args: Any, **kwargs: Any) -> Any:
        tried.append(1)
        raise AssertionError("a fault of Dynamo's")

    monkeypatch.setattr(convert_frame.ConvertFrameAssert, "__call__", broken)
    return tried


def test_a_fault_inside_dynamo_is_counted_and_tried_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cheap(Effects())
    tried = fail_inside_dynamo(model, monkeypatch)
    for _ in range(6):
        torch.testing.assert_close(model(batch()), batch() * 2)
    assert model.calls == 6
    assert len(tried) == 2 * frontend.CHANCES  # the call itself, and the forward below it
    reasons = {f["reason"]: f["count"] for f in fallbacks(model, "skipped_frame") if "optimized_Effects" in f["where"]}
    assert sorted(reasons.values()) == [1, frontend.CHANCES - 1]
    assert all("a fault of Dynamo's" in reason for reason in reasons)


def test_a_fault_inside_dynamo_is_an_error_under_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cheap(Effects(), strict=True)
    fail_inside_dynamo(model, monkeypatch)
    with pytest.raises(FallbackError, match="a fault of Dynamo's"):
        model(batch())


def test_an_outer_compile_that_traces_through_the_model_is_counted() -> None:
    model = Net().eval()
    reference = copy.deepcopy(model)
    cheap(model)
    outer = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(outer(batch()), reference(batch()))
    (found,) = fallbacks(model, "inlined")
    assert (found["where"], found["count"]) == ("Net", 1)
    assert fusewright.explain(model).to_dict()["dispatched"] == 0
    torch.testing.assert_close(model(batch()), reference(batch()))
    assert fusewright.explain(model).to_dict()["dispatched"] == 1


def test_an_outer_compile_is_an_error_under_strict() -> None:
    def wave(x: Tensor) -> Tensor:
        return x.sin()

    function = cheap(wave, strict=True)
    outer = torch.compile(lambda x: function(x) * 2, backend="eager")
    with pytest.raises(Exception, match=r"wave: an outer torch\.compile traces through the model"):
        outer(batch())


def test_a_disabled_model_may_be_compiled_by_others() -> None:
    model = cheap(Net().eval(), strict=True)
    with fusewright.disabled():
        outer = torch.compile(model, backend="eager")(batch())
        torch.testing.assert_close(outer, model(batch()))
    assert fallbacks(model, "inlined") == []
    assert "not called yet" not in str(fusewright.explain(model))


def test_explain_says_that_a_model_was_called_by_no_one_but_an_outer_compile() -> None:
    model = cheap(Net().eval())
    torch.compile(lambda x: model(x) * 2, backend="eager")(batch())  # Dynamo goes straight to `forward`
    assert "by way of an outer torch.compile" in str(fusewright.explain(model))
    model(batch())
    assert "an outer torch.compile" not in str(fusewright.explain(model))


def test_an_optimized_model_inside_another_is_part_of_its_graph() -> None:
    inner = cheap(Net().eval(), strict=True)
    outer = cheap(nn.Sequential(inner, nn.ReLU()).eval())
    torch.testing.assert_close(outer(batch()), inner(batch()).relu())
    assert fallbacks(outer, "inlined") == fallbacks(inner, "inlined") == []
    assert fusewright.explain(outer).to_dict()["dispatched"] == 1
