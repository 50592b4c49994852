"""The rules of a legal graph hold for nested graphs too, and a snapshot sees every change but metadata."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from fusewright.capture.graph import copy_graph
from fusewright.capture.spec import IllegalGraph, Snapshot, check_graph
from fusewright.tools.pass_tester import capture


def checkpointed(x: Tensor) -> Tensor:
    result: Tensor = torch.utils.checkpoint.checkpoint(lambda y: y.sin().cos(), x, use_reentrant=False)
    return result + 1


@pytest.fixture(scope="module")
def pristine() -> fx.GraphModule:
    return capture(checkpointed, (torch.randn(3, requires_grad=True),)).graph


@pytest.fixture
def gm(pristine: fx.GraphModule) -> fx.GraphModule:
    return copy_graph(pristine)


def body_of(gm: fx.GraphModule) -> fx.GraphModule:
    (body,) = (child for child in gm.children() if isinstance(child, fx.GraphModule))
    return body


def first_call(gm: fx.GraphModule) -> fx.Node:
    return next(n for n in gm.graph.nodes if n.op in ("call_method", "call_function"))


def test_an_untouched_graph_is_legal_and_unchanged(gm: fx.GraphModule) -> None:
    before = Snapshot.of(gm)
    check_graph(gm, before)
    for node in gm.graph.nodes:
        node.meta["remark"] = 1
        node.args = tuple(node.args)
    assert before.changed(gm) is None


def _retarget(body: fx.GraphModule) -> None:
    first_call(body).target = "tan"


def _rename(body: fx.GraphModule) -> None:
    first_call(body).name = "other"


def _add(body: fx.GraphModule) -> None:
    with body.graph.inserting_before(body.graph.output_node()):
        body.graph.call_function(torch.ones, (2,))


def _keyword(body: fx.GraphModule) -> None:
    first_call(body).kwargs = {"out": None}


def _result(body: fx.GraphModule) -> None:
    output = body.graph.output_node()
    output.args = ((next(iter(body.graph.nodes)),),)


@pytest.mark.parametrize("change", [_retarget, _rename, _add, _keyword, _result])
@pytest.mark.parametrize("nested", [False, True])
def test_a_change_is_seen(gm: fx.GraphModule, change: Callable[[fx.GraphModule], None], nested: bool) -> None:
    before = Snapshot.of(gm)
    change(body_of(gm) if nested else gm)
    assert before.changed(gm) is not None


def test_a_body_that_is_removed_is_seen(gm: fx.GraphModule) -> None:
    before = Snapshot.of(gm)
    name = next(name for name, child in gm.named_children() if isinstance(child, fx.GraphModule))
    delattr(gm, name)
    assert before.changed(gm) == name


def _rename_input(body: fx.GraphModule) -> None:
    next(iter(body.graph.nodes)).name = "renamed"


def _drop_results(body: fx.GraphModule) -> None:
    body.graph.output_node().args = ((),)


def _no_value(body: fx.GraphModule) -> None:
    node = first_call(body)
    with body.graph.inserting_after(node):
        new = body.graph.call_function(torch.neg, (node,))
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def _dtype(body: fx.GraphModule) -> None:
    for node in body.graph.output_node().all_input_nodes:
        node.meta["example_value"] = node.meta["example_value"].double()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_rename_input, "interface in wrap_body_0: placeholders"),
        (_drop_results, "results in wrap_body_0: 0 instead of 1"),
        (_no_value, "values in wrap_body_0: new node neg"),
        (_dtype, "results in wrap_body_0: number 0 is a torch.float64 tensor"),
    ],
)
def test_rules_hold_inside(gm: fx.GraphModule, change: Callable[[fx.GraphModule], None], said: str) -> None:
    before = Snapshot.of(gm)
    change(body_of(gm))
    with pytest.raises(IllegalGraph, match=said):
        check_graph(gm, before)


def test_a_new_node_that_nobody_uses_needs_no_value(gm: fx.GraphModule) -> None:
    before = Snapshot.of(gm)
    _add(gm)
    check_graph(gm, before)
    assert before.changed(gm) is not None
