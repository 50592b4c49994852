"""The fingerprint is the same for the same graph anywhere, and another after any single change that matters."""

from __future__ import annotations

import ast
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fusewright.capture.fingerprint import fingerprint, fingerprint_text
from fusewright.tools.pass_tester import capture

ROOT = pathlib.Path(__file__).resolve().parents[2]


def capture_block(*, dynamic: bool = False) -> fx.GraphModule:
    """A small graph with a parameter, constants of several kinds, a view, and a nested graph body."""
    torch.manual_seed(0)
    linear = nn.Linear(4, 4)

    def body(x: Tensor) -> Tensor:
        return torch.relu(x) * 2.0

    def block(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        h = linear(x).transpose(0, 1).contiguous().clamp(min=0.5)
        h = torch.nn.functional.dropout(h, 0.25, False)
        h = torch.utils.checkpoint.checkpoint(body, h, use_reentrant=False)
        return h.softmax(-1), (y + 1).to(torch.float64)

    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(y, 0)
    return capture(block, (x, y)).graph


PROGRAM = """
import sys, pathlib, importlib.util
spec = importlib.util.spec_from_file_location("told", sys.argv[1])
told = importlib.util.module_from_spec(spec); spec.loader.exec_module(told)
print(told.fingerprint(told.capture_block()), told.fingerprint(told.capture_block(dynamic=True)))
"""


@pytest.mark.multiprocess
def test_another_process_has_the_same_fingerprint() -> None:
    mine = [fingerprint(capture_block()), fingerprint(capture_block(dynamic=True))]
    asked = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, __file__],
        cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": "77"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert asked.stdout.split() == mine
    assert mine[0] != mine[1]


def test_names_and_captures_do_not_matter() -> None:
    gm = capture_block()
    before = fingerprint(gm)
    assert fingerprint(capture_block()) == before
    for number, node in enumerate(gm.graph.nodes):
        node.name = f"renamed_{number}"
        if node.op == "placeholder":
            node.target = node.name
        node.meta["stack_trace"] = f"line {number}"
    assert fingerprint(gm) == before


def test_the_name_of_an_attribute_does_not_matter() -> None:
    def with_attribute(name: str) -> fx.GraphModule:
        graph = fx.Graph()
        graph.output((graph.get_attr(name),))
        holder = nn.Module()
        holder.register_buffer(name, torch.ones(2))
        return fx.GraphModule(holder, graph)

    assert fingerprint(with_attribute("one")) == fingerprint(with_attribute("other"))


MODE = FakeTensorMode()


def graph_of(argument: Any = 1, *, function: Callable[..., Any] = torch.add, **changes: Any) -> fx.GraphModule:
    """`function(x, argument)` and x - y as two outputs; keyword arguments replace single facts about it."""
    make: Callable[[], tuple[Tensor, Tensor]] = changes.get("inputs", lambda: (torch.empty(2, 3), torch.empty(2, 3)))
    graph = fx.Graph()
    with MODE:
        values = make()
    nodes = [graph.placeholder(name) for name in "xy"]
    for node, value in zip(nodes, values, strict=True):
        node.meta["example_value"] = value
    swapped = nodes[::-1] if changes.get("swap") else nodes
    first = graph.call_function(function, (nodes[0], argument), changes.get("kwargs", {}))
    second = graph.call_function(torch.sub, tuple(swapped))
    graph.output((second, first) if changes.get("swap_outputs") else (first, second))
    return fx.GraphModule(nn.Module(), graph)


def empty(*, dtype: torch.dtype = torch.float32, device: str = "cpu", grad: bool = False) -> Callable[[], Any]:
    return lambda: (torch.empty(2, 3, dtype=dtype, device=device, requires_grad=grad), torch.empty(2, 3))


def strided() -> tuple[Tensor, Tensor]:
    return torch.empty_strided((2, 3), (1, 2)), torch.empty(2, 3)


def aliased(*, offset: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.empty(3, 3)
    return x[:2], x[offset : offset + 2]


PLAIN = graph_of()
MUTATIONS: dict[str, Callable[[], fx.GraphModule]] = {
    "edge": lambda: graph_of(swap=True),
    "int": lambda: graph_of(2),
    "int as float": lambda: graph_of(1.0),
    "int as bool": lambda: graph_of(True),
    "none": lambda: graph_of(None),
    "string": lambda: graph_of("1"),
    "dtype argument": lambda: graph_of(torch.float64),
    "list for int": lambda: graph_of([1]),
    "kwarg": lambda: graph_of(kwargs={"alpha": 2}),
    "other kwarg": lambda: graph_of(kwargs={"beta": 2}),
    "target": lambda: graph_of(function=torch.mul),
    "overload": lambda: graph_of(function=torch.ops.aten.add.Tensor),
    "other overload": lambda: graph_of(function=torch.ops.aten.add.Scalar),
    "output order": lambda: graph_of(swap_outputs=True),
    "dtype": lambda: graph_of(inputs=empty(dtype=torch.bfloat16)),
    "device": lambda: graph_of(inputs=empty(device="meta")),
    "requires_grad": lambda: graph_of(inputs=empty(grad=True)),
    "stride": lambda: graph_of(inputs=strided),
    "alias": lambda: graph_of(inputs=aliased),
    "alias at an offset": lambda: graph_of(inputs=lambda: aliased(offset=1)),
}


def test_the_plain_graph_is_stable() -> None:
    assert fingerprint(graph_of()) == fingerprint(PLAIN)
    assert fingerprint(graph_of(inputs=aliased)) == fingerprint(graph_of(inputs=aliased))


@pytest.mark.parametrize("name", MUTATIONS)
def test_one_mutation(name: str) -> None:
    mutated = fingerprint(MUTATIONS[name]())
    assert mutated != fingerprint(PLAIN)
    others = [fingerprint(make()) for other, make in MUTATIONS.items() if other != name]
    assert mutated not in others, "two mutations must not look alike either"


def test_constants_are_told_apart() -> None:
    values = [0, 1, False, True, 0.0, -0.0, 1.0, math.nan, math.inf, -math.inf, None, 1j, "0", 2**63, 1e-300, slice(1)]
    prints = [fingerprint(graph_of(value)) for value in values]
    assert len(set(prints)) == len(values)
    assert fingerprint(graph_of(float("nan"))) == fingerprint(graph_of(-math.nan)), "a NaN is a NaN"


def test_a_nested_body_counts() -> None:
    gm = capture_block()
    before = fingerprint(gm)
    (body,) = (child for child in gm.children() if isinstance(child, fx.GraphModule))
    node = next(n for n in body.graph.nodes if 2.0 in n.args)
    node.args = tuple(3.0 if a == 2.0 else a for a in node.args)
    assert fingerprint(gm) != before


def symbolic(
    sizes: tuple[int, int], *, equal: bool = False, bound: int | None = None, doubled: bool = False
) -> fx.GraphModule:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK if equal else DimDynamic.DYNAMIC])
    x, y = (mode.from_tensor(torch.empty(size), symbolic_context=context) for size in sizes)
    if bound is not None:
        assert x.shape[0] <= bound  # a guard, which narrows the symbol's range
    if doubled:
        with mode:
            y = torch.empty(2 * x.shape[0])
    return graph_of(inputs=lambda: (x, y))


def test_symbols_count_by_structure() -> None:
    plain = symbolic((5, 7))
    assert fingerprint(plain) == fingerprint(symbolic((9, 11))), "the sizes of the first call do not matter"
    mutated = {
        "equal": symbolic((5, 5), equal=True),
        "range": symbolic((5, 7), bound=512),
        "other range": symbolic((5, 7), bound=1024),
        "expression": symbolic((5, 7), doubled=True),
        "static": graph_of(inputs=lambda: (torch.empty(5), torch.empty(7))),
    }
    prints = {name: fingerprint(gm) for name, gm in mutated.items()}
    assert len({fingerprint(plain), *prints.values()}) == len(prints) + 1, prints
    assert "range d0 VR[" in fingerprint_text(plain)


def test_the_text_is_free_of_addresses() -> None:
    class Odd:
        pass

    gm = graph_of()
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    node.args = (node.args[0], ast.Constant, torch.sin)
    node.kwargs = {"hook": Odd}
    assert " at 0x" not in fingerprint_text(gm)
    assert "ast.Constant" in fingerprint_text(gm)
