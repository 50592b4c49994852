"""The captured graph of a training step: its form, its inputs, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from fusewright.capture.step.function import ParameterPlan, Slot, StepFunction, StepPlan
from fusewright.capture.step.optimizer_update import (
    Family,
    UpdateRule,
    clip_coefficient,
    decline_reason,
    scalars,
    updated,
)
from fusewright.capture.step.state import ModuleState
from fusewright.capture.step.trace import WholeStep, capture, is_mutation
from fusewright.errors import CaptureError

SGD = UpdateRule(Family.SGD, maximize=False, weight_decay=False)


class Call(nn.Module):
    """What `StepFunction` calls: a module that takes all arguments as two trees and returns the loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return self.net(*args, **kwargs)


def step_of(net: nn.Module, *args: Tensor, rule: UpdateRule | None = SGD) -> WholeStep:
    """Capture one SGD step (or only gradients, with `rule=None`) of a module that returns its loss."""
    module = Call(net)
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    leaves, spec = pytree.tree_flatten((args, {}))
    bucket = None if rule is None else 0
    plan = StepPlan(
        tuple(ParameterPlan(name, p.requires_grad, False, bucket) for name, p in parameters.items()),
        tuple(buffers),
        (),
        () if rule is None else (rule,),
        spec,
        (None,) * len(leaves),
    )
    function = StepFunction(module, plan, {})
    scalar = [torch.zeros((), dtype=torch.float64) for slot in function.slots if slot.role == "scalar"]
    return capture(function, [*parameters.values(), *buffers.values(), *scalar, *leaves])


class Net(nn.Module):
    def __init__(self, forward: Callable[[Net, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True))
        self._forward = forward

    def forward(self, x_BD: Tensor) -> Tensor:
        out = self.body(x_BD)
        return (out if self._forward is None else self._forward(self, out)).square().mean()


def test_graph_is_functional_with_copies_at_its_end() -> None:
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    step = step_of(net, torch.randn(5, 4))
    nodes = list(step.graph_module.graph.nodes)
    changing = [i for i, node in enumerate(nodes) if is_mutation(node)]
    assert changing == list(range(len(nodes) - 1 - len(changing), len(nodes) - 1))
    assert all(nodes[i].target is torch.ops.aten.copy_.default for i in changing)
    assert {slot.role for slot in step.written} == {"param", "buffer"}
    assert len(step.written) == len(changing) == 4 + 3
    assert step.updated == (0, 1, 2, 3)
    assert not step.random
    torch.testing.assert_close(dict(net.state_dict()), before, atol=0, rtol=0)


def test_placeholders_are_the_slots_that_the_graph_reads() -> None:
    step = step_of(Net(), torch.randn(5, 4))
    placeholders = step.graph_module.graph.find_nodes(op="placeholder")
    assert len(placeholders) == len(step.slots) == len(step.fakes)
    assert all(node.users for node in placeholders)
    assert Slot("scalar", 0, "neg_lr") in step.slots
    assert Slot("scalar", 0, "weight_decay") not in step.slots


def test_gradients_follow_the_loss_without_an_update() -> None:
    net = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    x_BD = torch.randn(1, 4)
    step = step_of(net, x_BD, rule=None)
    assert (step.grad_outputs, step.updated, step.written) == ((0, 1), (), frozenset())
    loss, weight, bias = step.graph_module(*(t for _, t in net.named_parameters()), x_BD)
    net(x_BD).backward()
    assert torch.equal(loss, net(x_BD)[0].reshape(loss.shape))
    assert torch.equal(weight, net[0].weight.grad)
    assert torch.equal(bias, net[0].bias.grad)


def test_random_ops_are_seen() -> None:
    assert step_of(Net(lambda net, out: functional.dropout(out, 0.5)), torch.randn(5, 4)).random


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda net, out: setattr(net.body[0], "last", 1) or out, "sets attribute 'last' of net.body.0"),
        (lambda net, out: setattr(net.body[0], "weight", nn.Parameter(out)) or out, "replaces 'net.body.0.weight'"),
        (lambda net, out: out if out.sum().item() > 0 else -out, "local_scalar_dense"),
    ],
)
def test_what_a_graph_would_lose_is_refused(forward: Callable[[Net, Tensor], Tensor], message: str) -> None:
    net = Net(forward)
    weight, attributes = net.body[0].weight, set(vars(net.body[0]))
    with pytest.raises(Exception, match=message):
        step_of(net, torch.randn(5, 4))
    assert net.body[0].weight is weight
    assert set(vars(net.body[0])) == attributes


def test_a_loss_of_several_elements_is_refused() -> None:
    with pytest.raises(CaptureError, match="one element"):
        step_of(nn.Linear(4, 3), torch.randn(5, 4))


def test_clipping_is_torchs() -> None:
    for max_norm in (0.1, 100.0):
        parameters = [nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5))]
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        grads = [parameter.grad.clone() for parameter in parameters]
        nn.utils.clip_grad_norm_(parameters, max_norm)
        coefficient = clip_coefficient(grads, max_norm)
        for parameter, grad in zip(parameters, grads, strict=True):
            torch.testing.assert_close(grad * coefficient, parameter.grad)


@pytest.mark.parametrize("step", [1, 7])
def test_counters_on_a_device_give_what_counters_on_the_host_give(step: int) -> None:
    group = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
    parameter, grad, mean, square = torch.randn(4, 3, 5).abs().unbind()
    results = []
    for on_device in (False, True):
        rule = UpdateRule(Family.ADAM, False, True, decoupled=True, device_steps=on_device)
        values = [torch.tensor(value, dtype=torch.float64) for value in scalars(rule, group, step)]
        state = {"exp_avg": mean, "exp_avg_sq": square}
        counter = torch.tensor(step - 1.0) if on_device else None
        results.append(updated(rule, parameter, grad, state, values, counter))
    assert results[1][1].pop("step") == step
    torch.testing.assert_close(results[0], results[1])


def test_half_precision_is_rounded_once() -> None:
    parameter, grad = torch.randn(2, 64).bfloat16().unbind()
    values = [torch.tensor(v, dtype=torch.float64) for v in (-0.1, 0.0, 0.0, 1.0)]
    new, _ = updated(SGD, parameter, grad, {}, values)
    assert torch.equal(new, (parameter.float() - 0.1 * grad.float()).bfloat16())


def test_optimizers_are_declined_with_a_reason() -> None:
    parameter = nn.Parameter(torch.zeros(2))

    class Mine(torch.optim.SGD):
        pass

    hooked = torch.optim.SGD([parameter])
    hooked.register_step_post_hook(lambda *_: None)
    for optimizer, reason in (
        (torch.optim.Adagrad([parameter]), "Adagrad is not one of"),
        (Mine([parameter]), "Mine is not one of"),
        (hooked, "step hooks"),
        (torch.optim.Adam([parameter], differentiable=True), "differentiable"),
        (torch.optim.Adam([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]), "complex"),
    ):
        assert reason in str(decline_reason(optimizer))
    for accepted in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        assert decline_reason(accepted([parameter])) is None


def test_a_scan_happens_only_after_an_assignment() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters())
    state = ModuleState(net, optimizer)
    first = state.layout()
    optimizer.param_groups[0]["lr"] = 0.5
    assert state.layout() is first
    net.body[1].momentum = 0.3
    second = state.layout()
    assert second.structure != first.structure
    net.body[1].momentum = 0.1
    assert state.layout().structure == first.structure
    net.eval()
    assert state.layout().structure not in (first.structure, second.structure)
    net.body[0].weight = nn.Parameter(torch.zeros(3, 4))
    assert state.layout().parameters[0] is net.body[0].weight
