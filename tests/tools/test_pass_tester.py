"""The tester fails every pass that breaks its contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from fusewright.config import Numerics
from fusewright.errors import UserInputError
from fusewright.passes.base import Pass, PassContext
from fusewright.tools.pass_tester import PassTester, capture


def swap_call(gm: fx.GraphModule, old: str, new: str) -> int:
    found = [node for node in gm.graph.nodes if node.target == old]
    for node in found:
        node.target = new
    gm.recompile()
    return len(found)


class Swap(Pass):
    """Replaces one method by another, as its test says."""

    name = "swap"
    numerics = Numerics.EXACT

    def __init__(self, rewrite: Callable[[fx.GraphModule, PassContext], int], numerics: Numerics) -> None:
        self.rewrite = rewrite
        self.numerics = numerics  # type: ignore[misc]

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        return self.rewrite(gm, ctx)


def swapping(rewrite: Callable[[fx.GraphModule, PassContext], int], numerics: Numerics = Numerics.EXACT) -> PassTester:
    return PassTester(Swap(rewrite, numerics))


def function(x: Tensor) -> Tensor:
    return x.sin().square()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, requires_grad=True)


def unchanged(gm: fx.GraphModule, ctx: PassContext) -> int:
    return 0


def test_a_right_pass_passes(x: Tensor) -> None:
    report = swapping(lambda gm, ctx: swap_call(gm, "absolute", "abs")).check(
        lambda x: x.absolute(), (x,), expect_rewrites=1
    )
    assert (report.rewrites, report.before.code == report.after.code) == (1, False)


WRONG: dict[str, tuple[Callable[[fx.GraphModule, PassContext], int], int, str]] = {
    "count": (unchanged, 1, "0 rewrites instead of 1"),
    "numbers": (lambda gm, ctx: swap_call(gm, "sin", "cos"), 1, "not bitwise equal"),
    "silent": (lambda gm, ctx: swap_call(gm, "sin", "cos") * 0, 0, "the graph changed"),
    "never done": (lambda gm, ctx: 1, 1, "a second run makes 1 more"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pass_fails(name: str, x: Tensor) -> None:
    rewrite, count, message = WRONG[name]
    with pytest.raises(AssertionError, match=message):
        swapping(rewrite).check(function, (x,), expect_rewrites=count)


def test_reassociated_passes_are_judged_by_float64(x: Tensor) -> None:
    for numerics in (Numerics.REASSOCIATED, Numerics.LOSSY):
        with pytest.raises(AssertionError, match="leaves differ"):
            swapping(lambda gm, ctx: swap_call(gm, "sin", "cos"), numerics).check(function, (x,), expect_rewrites=1)


def test_wrong_gradients_are_seen(x: Tensor) -> None:
    def detach(gm: fx.GraphModule, ctx: PassContext) -> int:
        return swap_call(gm, "clone", "detach")

    with pytest.raises(AssertionError, match="gradients"):
        swapping(detach).check(lambda x: x.exp().clone() + x, (x,), expect_rewrites=1)


def test_a_node_without_fake_value_is_seen(x: Tensor) -> None:
    def add_node(gm: fx.GraphModule, ctx: PassContext) -> int:
        node = next(node for node in gm.graph.nodes if node.target == "sin")
        if any(user.target == "contiguous" for user in node.users):
            return 0
        with gm.graph.inserting_after(node):
            copy = gm.graph.call_method("contiguous", (node,))
        node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
        gm.recompile()
        return 1

    with pytest.raises(AssertionError, match="has no fake value"):
        swapping(add_node).check(function, (x,), expect_rewrites=1)


def test_declines_need_their_reason(x: Tensor) -> None:
    def declining(gm: fx.GraphModule, ctx: PassContext) -> int:
        ctx.declined(next(iter(gm.graph.nodes)), "too small to matter")
        return 0

    report = swapping(declining).check_declines(function, (x,), reason="too small")
    assert [d.pass_name for d in report.declines] == ["swap"]
    with pytest.raises(AssertionError, match="no reason contains"):
        swapping(declining).check_declines(function, (x,), reason="too large")
    with pytest.raises(AssertionError, match="instead of a decline"):
        swapping(lambda gm, ctx: swap_call(gm, "sin", "cos")).check_declines(function, (x,), reason="")


def test_capture_wants_one_graph(x: Tensor) -> None:
    captured = capture(function, (x,))
    assert captured.inputs[0] is x
    with pytest.raises(UserInputError, match="one graph"):
        capture(lambda x: 3, (x,))
