"""Minifying keeps the failure and little else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fusewright.errors import UserInputError
from fusewright.passes.cleanup.canonicalize import Canonicalize
from fusewright.tools.minify import fails_by_passes, minify
from fusewright.tools.oracle import mismatch
from fusewright.tools.pass_tester import Capture, capture
from tests.tools.planted import Retarget, chain, wrong_sigmoid


@pytest.fixture(scope="module")
def taken() -> Capture:
    return capture(chain, (torch.randn(3, 5, requires_grad=True), torch.randn(3, 5)))


def targets(gm: fx.GraphModule) -> list[Any]:
    return [n.target for n in gm.graph.nodes if n.op not in ("placeholder", "output")]


def test_one_planted_operator_in_sixty_nodes(taken: Capture) -> None:
    before = str(taken.graph.graph)
    assert len(taken.graph.graph.nodes) >= 60
    fails = fails_by_passes([Canonicalize(), Retarget(torch.sigmoid, wrong_sigmoid)])
    small = minify(taken.graph, taken.inputs, fails)
    assert small.nodes < 6
    assert targets(small.graph) == [torch.sigmoid]
    assert fails(small.graph, small.args)
    assert small.runs < 60
    assert str(taken.graph.graph) == before
    (x,) = small.args
    assert x.shape == (3, 5)
    assert x.requires_grad
    placeholder = next(iter(small.graph.graph.nodes))
    assert placeholder.meta["example_value"].shape == (3, 5), "passes can read the new input"
    torch.testing.assert_close(small.graph(x)[0], torch.sigmoid(x))


def test_a_failure_of_two_operators_keeps_both(taken: Capture) -> None:
    def fails(gm: fx.GraphModule, args: Sequence[Any]) -> bool:
        gm(*args)
        return {torch.sigmoid, torch.tanh} <= set(targets(gm))

    small = minify(taken.graph, taken.inputs, fails)
    assert {torch.sigmoid, torch.tanh} <= set(targets(small.graph))
    assert small.nodes <= 12, "both, and the path that joins them"


def test_what_is_written_in_place_keeps_the_value_it_had() -> None:
    def writes(x: Tensor) -> Tensor:
        y = x * 2
        z = torch.sigmoid(y)
        y.add_(1000.0)
        return z + y

    taken = capture(writes, (torch.ones(3),))

    def fails(gm: fx.GraphModule, args: Sequence[Any]) -> bool:
        gm(*args)
        return torch.sigmoid in targets(gm)

    small = minify(taken.graph, taken.inputs, fails)
    assert targets(small.graph) == [torch.sigmoid]
    torch.testing.assert_close(small.args[0], torch.full((3,), 2.0))


def test_an_error_is_another_failure(taken: Capture) -> None:
    def fails(gm: fx.GraphModule, args: Sequence[Any]) -> bool:
        if len(gm.graph.nodes) < len(taken.graph.graph.nodes):
            raise RuntimeError("another failure")
        return True

    assert minify(taken.graph, taken.inputs, fails).nodes == len(taken.graph.graph.nodes)


def test_a_graph_that_does_not_fail(taken: Capture) -> None:
    with pytest.raises(UserInputError, match="does not fail with these arguments"):
        minify(taken.graph, taken.inputs)


def test_the_default_judge_is_that_of_bisection(taken: Capture) -> None:
    small = minify(taken.graph, taken.inputs, fails_by_passes([Retarget(torch.sigmoid, wrong_sigmoid)]))
    rewritten = minify(taken.graph, taken.inputs, lambda gm, args: torch.sigmoid in targets(gm)).graph
    for node in rewritten.graph.nodes:
        node.target = wrong_sigmoid if node.target is torch.sigmoid else node.target
    rewritten.recompile()
    assert mismatch(small.graph, rewritten, small.args) is not None
