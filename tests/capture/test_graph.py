"""A captured graph knows its inputs' roles, and its copies share weights but no node."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from fusewright.capture.graph import CapturedGraph, copy_graph
from fusewright.tools.pass_tester import Capture, capture


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        body = torch.utils.checkpoint.checkpoint(lambda y: y.sin(), x, use_reentrant=False)
        result: Tensor = self.norm(self.linear(body))
        return result


@pytest.fixture(scope="module")
def taken() -> Capture:
    x = torch.randn(3, 4, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    return capture(Model(), (x,))


def test_roles_and_symbols(taken: Capture) -> None:
    captured = CapturedGraph.build(taken.graph, taken.inputs, {})
    roles = [item.role for item in captured.inputs]
    assert sorted(roles) == sorted(["size", "tensor", *["parameter"] * 4, *["buffer"] * 3])
    assert [item.name for item in captured.inputs] == [n.name for n in taken.graph.graph.nodes if n.op == "placeholder"]
    (symbol,) = captured.symbols()
    (x,) = (item.value for item in captured.inputs if item.role == "tensor")
    assert x.shape[0].node.expr == symbol


def test_inputs_must_match_the_placeholders(taken: Capture) -> None:
    with pytest.raises(AssertionError):
        CapturedGraph.build(taken.graph, taken.inputs[:-1], {})


def test_a_copy_runs_alike_and_is_independent(taken: Capture) -> None:
    gm = taken.graph
    before, body = str(gm.graph), next(c for c in gm.children() if isinstance(c, fx.GraphModule))
    body_before = str(body.graph)
    copied = CapturedGraph.build(gm, taken.inputs, {}).copy()
    assert str(copied.graph) == before
    assert not set(copied.graph.nodes) & set(gm.graph.nodes)
    torch.testing.assert_close(copied(*taken.inputs), gm(*taken.inputs))
    for graph in (copied, next(c for c in copied.children() if isinstance(c, fx.GraphModule))):
        node = next(n for n in graph.graph.nodes if n.op in ("call_method", "call_function"))
        node.meta["new"] = node.name = "changed"
    assert str(gm.graph) == before
    assert str(body.graph) == body_before
    assert not any("new" in n.meta for n in (*gm.graph.nodes, *body.graph.nodes))


def test_a_copy_keeps_what_aot_autograd_reads(taken: Capture) -> None:
    copied = copy_graph(taken.graph)
    sources = [getattr(n, "_dynamo_source", None) for n in taken.graph.graph.nodes if n.op == "placeholder"]
    assert any(source is not None for source in sources)
    assert [getattr(n, "_dynamo_source", None) for n in copied.graph.nodes if n.op == "placeholder"] == sources
    assert copied.meta == taken.graph.meta
    for old, new in zip(taken.graph.graph.nodes, copied.graph.nodes, strict=True):
        assert new.meta.keys() == old.meta.keys()
        assert new.meta.get("example_value") is old.meta.get("example_value")


def test_a_copy_shares_tensors_of_attributes() -> None:
    graph = fx.Graph()
    names = ("parameter", "buffer", "plain", "inner.weight")
    graph.output(tuple(graph.get_attr(name) for name in names))
    holder = nn.Module()
    holder.parameter = nn.Parameter(torch.ones(1))
    holder.register_buffer("buffer", torch.ones(2))
    holder.plain = torch.ones(3)
    holder.inner = nn.Linear(1, 1)
    gm = fx.GraphModule(holder, graph)
    copied = copy_graph(gm)
    for ours, theirs in zip(copied(), gm(), strict=True):
        assert ours is theirs
