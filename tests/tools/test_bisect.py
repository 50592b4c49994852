"""Bisection finds the pass and the rewrite that were planted, and nothing where all is right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from fusewright.errors import UserInputError
from fusewright.passes.base import PassContext
from fusewright.passes.cleanup.canonicalize import Canonicalize
from fusewright.tools.bisect import Culprit, bisect
from fusewright.tools.oracle import mismatch
from fusewright.tools.pass_tester import Capture, capture
from tests.tools.planted import Later, Retarget, Unasking, chain, raising, tanh_by_parts, wrong_sigmoid, wrong_tanh


@pytest.fixture(scope="module")
def taken() -> Capture:
    return capture(chain, (torch.randn(3, 5, requires_grad=True), torch.randn(3, 5)))


def test_nothing_is_wrong(taken: Capture) -> None:
    assert bisect(taken.graph, taken.inputs, passes=[Canonicalize(), Retarget(torch.tanh, tanh_by_parts)]) is None
    assert bisect(taken.graph, taken.inputs) is None, "the real passes"


@pytest.mark.parametrize("wrong_from", [1, 2, 6, 10])
def test_the_planted_rewrite_is_found(taken: Capture, wrong_from: int) -> None:
    before = str(taken.graph.graph)
    bad = Retarget(torch.tanh, tanh_by_parts, wrong_tanh, wrong_from)
    later = Later(torch.sigmoid, torch.sigmoid)
    found = bisect(taken.graph, taken.inputs, passes=[Canonicalize(), bad, later])
    assert found is not None
    nodes = [n.name for n in taken.graph.graph.nodes if n.target is torch.tanh]
    assert (found.pass_name, found.rewrite, found.node) == ("retarget", wrong_from, nodes[wrong_from - 1])
    assert "RMSE" in found.reason or "differ" in found.reason or found.reason
    assert found.runs <= 12, "halving, not trying each"
    assert str(taken.graph.graph) == before
    assert str(found).startswith(f"pass retarget, rewrite {wrong_from} at {found.node}: ")


def test_the_first_of_two_bad_passes_is_named(taken: Capture) -> None:
    passes = [Retarget(torch.tanh, wrong_tanh), Later(torch.sigmoid, wrong_sigmoid)]
    found = bisect(taken.graph, taken.inputs, passes=passes)
    assert found is not None
    assert (found.pass_name, found.rewrite) == ("retarget", 1)
    found = bisect(taken.graph, taken.inputs, passes=passes[1:])
    assert found is not None
    assert (found.pass_name, found.rewrite, found.node) == ("later", 1, "sigmoid")


def test_a_pass_that_does_not_ask_is_named_alone(taken: Capture) -> None:
    found = bisect(taken.graph, taken.inputs, passes=[Canonicalize(), Unasking(torch.tanh, wrong_tanh)])
    assert found is not None
    assert (found.pass_name, found.rewrite, found.node) == ("unasking", None, "")


def test_a_rewrite_that_raises_is_a_finding(taken: Capture) -> None:
    found = bisect(taken.graph, taken.inputs, passes=[Retarget(torch.sigmoid, raising)])
    assert found is not None
    assert found.rewrite == 1
    assert found.reason == "ZeroDivisionError: planted"


def test_a_wrong_gradient_alone_is_found(taken: Capture) -> None:
    def detached(x: Tensor) -> Tensor:
        return torch.sigmoid(x.detach()) + (x - x)

    found = bisect(taken.graph, taken.inputs, passes=[Retarget(torch.sigmoid, detached)])
    assert found is not None
    assert "gradients" in found.reason
    assert bisect(taken.graph, [a.detach() for a in taken.inputs], passes=[Retarget(torch.sigmoid, detached)]) is None


def test_a_failing_pass_takes_no_part(taken: Capture) -> None:
    class Raises(Retarget):
        name = "raises"

        def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
            raise KeyError("no")

    found = bisect(taken.graph, taken.inputs, passes=[Raises(None, None), Retarget(torch.sigmoid, wrong_sigmoid)])
    assert found is not None
    assert found.pass_name == "retarget"
    assert found.failures == (("raises", "KeyError: 'no'"),)


def test_a_bad_graph_is_not_blamed_on_a_pass(taken: Capture) -> None:
    found = bisect(taken.graph, taken.inputs, passes=[Canonicalize()], verdict=lambda *_: "always bad")
    assert found == Culprit("", None, "", "always bad", (), 2)


def test_arguments_that_do_not_fit(taken: Capture) -> None:
    with pytest.raises(UserInputError, match="the graph takes 2 arguments, got 1"):
        bisect(taken.graph, taken.inputs[:1])


def test_mismatch_judges_by_the_accuracy_rule(taken: Capture) -> None:
    assert mismatch(taken.graph, taken.graph, taken.inputs) is None
