"""What depends on weights alone leaves the graph; what a caller could see or change, or nobody can watch, stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fusewright.capture.graph import copy_graph
from fusewright.passes.frozen.hoist import Hoisted, UnfitWeightsError, hoist, stamp
from fusewright.passes.frozen.weights import written_by
from fusewright.tools.pass_tester import Capture, capture


class Weights(nn.Module):
    """A parameter and a buffer of 4 x 4, used as `body` says."""

    def __init__(self, body: Callable[[Weights, Tensor], Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("b", torch.randn(4, 4))
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def split(body: Callable[[Any, Tensor], Any]) -> tuple[Capture, Hoisted | None]:
    with torch.no_grad():
        captured = capture(Weights(body), [torch.randn(3, 4)])
    return captured, hoist(copy_graph(captured.graph), captured.inputs)


def names(gm: fx.GraphModule) -> list[str]:
    return [n.name for n in gm.graph.nodes if n.op in ("call_function", "call_method")]


HOISTED: dict[str, tuple[Callable[[Any, Tensor], Any], list[str]]] = {
    "arithmetic": (lambda m, x: x @ (m.w * 2 + m.b), ["matmul"]),
    "a cast": (lambda m, x: functional.linear(x.double(), m.w.double()), ["double", "linear"]),
    "weight norm": (lambda m, x: x @ torch._weight_norm(m.w, m.b[:, :1], 0), ["matmul"]),
    "a part of the graph": (lambda m, x: (x @ (m.w + m.b), (m.w + m.b) * x.sum()), ["matmul", "sum_1", "mul"]),
    "a view of what is hoisted": (lambda m, x: x @ (m.w + m.b).t(), ["matmul"]),
}


@pytest.mark.parametrize("name", HOISTED)
def test_hoists(name: str) -> None:
    body, left = HOISTED[name]
    captured, hoisted = split(body)
    assert hoisted is not None
    assert names(hoisted.main) == left
    hoisted.main.graph.lint()
    with torch.no_grad():
        expected = captured.graph(*captured.inputs)
        run, _ = hoisted.bind(hoisted.main.forward, (), captured.graph, pytest.fail)
        found = run(*captured.inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


KEPT: dict[str, Callable[[Any, Tensor], Any]] = {
    "nothing to do": lambda m, x: x @ m.w,
    "a view of a weight": lambda m, x: x @ m.w.t(),
    "returned": lambda m, x: (m.w * 2, x + 1),
    "a view is returned": lambda m, x: ((m.w * 2).t(), x + 1),
    "returned and used": lambda m, x: (lambda v: (v, x @ v))(m.w * 2),
    "written to": lambda m, x: (m.w * 2).add_(1.0) @ x.t(),
    "written through a view": lambda m, x: (m.w * 2).t().add_(1.0) @ x.t(),
    "written by inplace=True": lambda m, x: functional.relu(m.w * 2, inplace=True) @ x.t(),
    "a weight that is written": lambda m, x: (m.b.add_(1.0), x @ (m.b * 2))[1],
    "a weight written through a view": lambda m, x: (m.b[0].mul_(2.0), x @ (m.b * 2))[1],
    "random": lambda m, x: x @ functional.dropout(m.w, 0.5, True),
    "made from data": lambda m, x: x @ (m.w * x.sum()),
}


@pytest.mark.parametrize("name", KEPT)
def test_leaves(name: str) -> None:
    captured, hoisted = split(KEPT[name])
    assert hoisted is None, hoisted and names(hoisted.prelude)
    assert names(captured.graph) != []


def casting(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        weight = m.w @ m.b
    result: Tensor = x.bfloat16() @ weight
    return result + (m.w * 2).sum()


def test_what_autocast_decides_inside_the_graph_stays() -> None:
    captured, hoisted = split(casting)
    assert hoisted is not None
    assert names(hoisted.prelude) == ["mul", "sum_1"]
    run, _ = hoisted.bind(hoisted.main.forward, (), captured.graph, pytest.fail)
    with torch.no_grad():
        assert torch.equal(run(*captured.inputs)[0], captured.graph(*captured.inputs)[0])


def test_a_write_to_one_weight_leaves_the_other() -> None:
    _, hoisted = split(lambda m, x: (m.b.add_(1.0), x @ (m.w * 2) + x @ (m.b * 2))[1])
    assert hoisted is not None
    assert names(hoisted.prelude) == ["mul"]
    assert len(hoisted.sources) == 1


@pytest.mark.parametrize(
    ("call", "position"),
    [
        (lambda g, a, b: g.call_method("add_", (a, b)), 0),
        (lambda g, a, b: g.call_function(torch.add, (a, b), {"out": b}), 1),
        (lambda g, a, b: g.call_function(torch.ops.aten.add_.Tensor, (a, b)), 0),
        (lambda g, a, b: g.call_function(functional.embedding, (a, b), {"max_norm": 1.0}), 1),
        (lambda g, a, b: g.call_function(functional.batch_norm, (b, a, a), {"training": True}), 0),
        (lambda g, a, b: g.call_function(functional.dropout, (a, 0.5, True, True)), 0),
    ],
)
def test_writes_are_seen(call: Callable[..., fx.Node], position: int) -> None:
    graph = fx.Graph()
    operands = (graph.placeholder("a"), graph.placeholder("b"))
    assert operands[position] in written_by(call(graph, *operands))
    assert operands[1 - position] not in written_by(call(graph, *operands))


def test_unknown_functions_may_write_to_everything() -> None:
    graph = fx.Graph()
    a = graph.placeholder("a")
    assert written_by(graph.call_function(split, (a,))) == [a]


def test_weights_that_nobody_can_watch_are_refused() -> None:
    captured, hoisted = split(lambda m, x: x @ (m.w * 2))
    assert hoisted is not None
    with torch.inference_mode():
        made = tuple(a.clone() for a in captured.inputs)
    with pytest.raises(UnfitWeightsError, match="inference mode"):
        hoisted._compute([made[i] for i in hoisted.sources])


def test_what_overflows_is_refused_and_runs_eagerly() -> None:
    captured, hoisted = split(lambda m, x: x @ (m.w * 1e30))
    assert hoisted is not None
    reasons: list[str] = []
    run, _ = hoisted.bind(hoisted.main.forward, (), lambda *args: "eager", reasons.append)
    with torch.no_grad():
        for i in hoisted.sources:
            captured.inputs[i].mul_(1e30)
        assert run(*captured.inputs) == "eager"
    assert reasons == ["folded weights are not finite in their dtype"]


def test_a_weight_that_overlaps_what_the_graph_writes_runs_eagerly() -> None:
    captured, hoisted = split(lambda m, x: (x.add_(1.0), x @ (m.w * 2))[1])
    assert hoisted is not None
    reasons: list[str] = []
    x = next(i for i, a in enumerate(captured.inputs) if not isinstance(a, nn.Parameter))
    changed = hoisted.kept.index(x)
    run, whole = hoisted.bind(hoisted.main.forward, (changed,), lambda *args: "eager", reasons.append)
    assert whole == (x,)
    args = list(captured.inputs)
    with torch.no_grad():
        assert run(*args) != "eager"
        args[x] = args[1 - x].detach()[:3]
        assert run(*args) == "eager"
    assert "shares memory" in reasons[0]


def test_a_new_storage_at_an_old_address_is_seen() -> None:
    """Two swaps between two calls may bring a pointer back; the storage's identity, held weakly, does not return."""
    _, hoisted = split(lambda m, x: x @ (m.w * 2))
    assert hoisted is not None
    weight = nn.Parameter(torch.ones(64, 64))
    state = hoisted._compute([weight])
    for _ in range(50):
        weight.data = torch.ones(1)
        weight.data = torch.zeros(64, 64)  # as a rule in the memory that the first weight had
        assert stamp([weight]) != state.stamp
        assert state.storages[0].expired()
