"""Test one pass on one function: it rewrites what it should, once, legally, within the numerics of its tier."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fusewright.config import Numerics
from fusewright.errors import UserInputError
from fusewright.fusion.match.proof import widened
from fusewright.numerics import compare_trees
from fusewright.passes.base import Decline, Pass, PassContext
from fusewright.trees import bitwise_difference


@dataclass(frozen=True)
class Capture:
    """One captured forward graph and the arguments that it was called with, parameters included."""

    graph: fx.GraphModule
    inputs: tuple[Any, ...]


@dataclass(frozen=True)
class Report:
    """What a pass did to a captured graph."""

    rewrites: int
    before: fx.GraphModule
    after: fx.GraphModule
    recognised: dict[str, int] = field(default_factory=dict)
    declines: list[Decline] = field(default_factory=list)


def capture(function: Callable[..., Any], args: Sequence[Any], *, dynamic: bool | None = None) -> Capture:
    """Capture `function(*args)` as the forward graph a backend is handed.

    Raises:
        UserInputError: the function makes no graph, or several.
    """
    graphs: list[fx.GraphModule] = []
    inputs: list[tuple[Any, ...]] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(gm)

        def call(*real: Any) -> Any:
            inputs.append(real)
            return gm(*real)

        return call

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    if len(graphs) != 1 or len(inputs) != 1:
        raise UserInputError(
            f"function: one graph, called once, is needed; captured {len(graphs)}, called {len(inputs)}."
        )
    return Capture(graphs[0], inputs[0])


class PassTester:
    """Runs a pass by itself, in eager, and asserts its contract."""

    def __init__(self, pass_: Pass) -> None:
        self.pass_ = pass_

    def check(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        *,
        expect_rewrites: int | None,
        training: bool = True,
        dynamic: bool | None = None,
    ) -> Report:
        """Assert the number of rewrites (None: any), no more in a second run, a legal graph, and the numbers.

        `exact` passes are compared bitwise, others by the accuracy rule against float64; in training the gradients of
        every input that requires one are compared too.

        Raises:
            AssertionError: saying which of these does not hold.
        """
        captured = capture(function, args, dynamic=dynamic)
        report = self.run(captured, training=training)
        assert expect_rewrites in (None, report.rewrites), (
            f"{report.rewrites} rewrites instead of {expect_rewrites}; declines: "
            f"{[(d.node, d.reason) for d in report.declines]}\n{captured.graph.code}"
        )
        self._check_numbers(captured, report.after, training)
        return report

    def check_declines(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        *,
        reason: str,
        training: bool = True,
        dynamic: bool | None = None,
    ) -> Report:
        """Assert that nothing is rewritten, that a decline says `reason`, and that the graph runs as before.

        Raises:
            AssertionError: saying which of these does not hold.
        """
        captured = capture(function, args, dynamic=dynamic)
        report = self.run(captured, training=training)
        assert report.rewrites == 0, f"{report.rewrites} rewrites instead of a decline\n{report.after.code}"
        reasons = [d.reason for d in report.declines]
        assert any(reason in found for found in reasons), f"no reason contains {reason!r}: {reasons}"
        results = [run(gm, captured.inputs, training) for gm in (captured.graph, report.after)]
        difference = bitwise_difference(*results)
        assert difference is None, f"a declined graph computes something else: {difference}"
        return report

    def run(self, captured: Capture, *, training: bool) -> Report:
        """Run the pass twice on a copy of the graph and assert that it counts right and leaves a legal graph."""
        ctx = PassContext(training=training, pass_name=self.pass_.name)
        after = copy.deepcopy(captured.graph)
        rewrites = self.pass_.run(after, ctx)
        after.graph.lint()
        check_fake_values(captured.graph, after)
        assert rewrites or after.code == captured.graph.code, f"0 rewrites, but the graph changed:\n{after.code}"
        text = after.code
        again = self.pass_.run(after, PassContext(training=training, pass_name=self.pass_.name))
        assert again == 0, f"a second run makes {again} more rewrites:\n{after.code}"
        assert after.code == text, f"a second run reports 0 rewrites but changes the graph:\n{after.code}"
        return Report(rewrites, captured.graph, after, ctx.recognised, ctx.declines)

    def _check_numbers(self, captured: Capture, after: fx.GraphModule, training: bool) -> None:
        ref, res = (run(gm, captured.inputs, training) for gm in (captured.graph, after))
        if self.pass_.numerics is Numerics.EXACT:
            difference = bitwise_difference(res, ref)
            assert difference is None, f"not bitwise equal: {difference}\n{after.code}"
            return
        wide = lambda: run(captured.graph, captured.inputs, training, wide=True)  # noqa: E731 - evaluated if needed
        result = compare_trees(res, ref, wide, training=training)
        assert result.ok, f"{result.reason}\n{after.code}"


def check_fake_values(before: fx.GraphModule, after: fx.GraphModule) -> None:
    """Assert that every node that a pass added says what it computes; passes that follow rely on it.

    Raises:
        AssertionError: naming the first node without a fake value.
    """
    old = {node.name for node in before.graph.nodes if "example_value" not in node.meta and "val" not in node.meta}
    for node in after.graph.nodes:
        known = "example_value" in node.meta or "val" in node.meta or node.op in ("output", "get_attr")
        assert known or node.name in old, f"{node.name} ({node.target}) has no fake value"


class _Wide(fx.Interpreter):
    """Runs a graph with every floating dtype that it names replaced by float64."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_method"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return widened(n, args, kwargs)


def run(gm: fx.GraphModule, inputs: Sequence[Any], training: bool, *, wide: bool = False) -> dict[str, Any]:
    """Outputs of `gm` on clones of `inputs`, and the gradients of those that require one, with seed 0."""
    clones = [_clone(x, wide) for x in inputs]
    torch.manual_seed(0)
    with torch.enable_grad() if training else torch.no_grad():
        outputs = _Wide(gm).run(*clones) if wide else gm(*clones)
    results: dict[str, Any] = {"outputs": [x.detach() if isinstance(x, Tensor) else x for x in outputs]}
    leaves = {i: x for i, x in enumerate(clones) if isinstance(x, Tensor) and x.requires_grad}
    differentiable = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
    if training and leaves and differentiable:
        generator = torch.Generator().manual_seed(1)
        cotangents = [torch.randn(x.shape, generator=generator).to(x) for x in differentiable]
        gradients = torch.autograd.grad(differentiable, list(leaves.values()), cotangents, allow_unused=True)
        results["gradients"] = dict(zip(map(str, leaves), gradients, strict=True))
    return results


def _clone(x: Any, wide: bool) -> Any:
    if not isinstance(x, Tensor):
        return x
    copied = x.detach().clone()
    return (copied.double() if wide and x.is_floating_point() else copied).requires_grad_(x.requires_grad)
