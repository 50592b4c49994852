"""Shrinks a captured graph to a few nodes that still fail: cuts off the end, then lifts nodes into inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fusewright.capture.graph import copy_graph
from fusewright.errors import UserInputError
from fusewright.fusion.match.view import writes_in_place
from fusewright.passes.base import Pass
from fusewright.tools.oracle import Rewriter, context_of, forward_passes, mismatch

Fails = Callable[[fx.GraphModule, Sequence[Any]], bool]


@dataclass(frozen=True)
class Minified:
    """A graph that still fails, its arguments, and how often the predicate was asked."""

    graph: fx.GraphModule
    args: tuple[Any, ...]
    runs: int

    @property
    def nodes(self) -> int:
        """Number of nodes, inputs and output included."""
        return len(self.graph.graph.nodes)


def minify(captured: fx.GraphModule, args: Sequence[Any], fails: Fails | None = None) -> Minified:
    """Shrink `captured` by delta debugging, as long as `fails(graph, args)` stays true.

    Two moves, each tried in halving steps: an earlier node becomes the only result; a run of nodes is taken out, and
    what others need of them becomes an input with the value that it had. Nodes that nobody uses go, unless they write.

    Args:
        captured: a captured graph; it is not changed.
        args: real arguments, one a placeholder.
        fails: true where a graph shows the failure; what raises does not. Default: the forward passes of
            `pipeline.order` change what the graph computes beyond rule A1.

    Raises:
        UserInputError: `captured` itself does not fail.
    """
    search = _Search(fails or fails_by_passes())
    state = _State(copy_graph(captured), tuple(args))
    if not search.accepts(state):
        raise UserInputError(
            "fails: the captured graph does not fail with these arguments; there is nothing to shrink."
        )
    size = len(state.gm.graph.nodes) + 1
    while len(state.gm.graph.nodes) < size:
        size = len(state.gm.graph.nodes)
        state = search.lifted(search.cut(state))
    state.gm.recompile()
    return Minified(state.gm, state.args, search.runs)


def fails_by_passes(passes: Sequence[Pass] | None = None) -> Fails:
    """A predicate: running `passes` (default: those of `pipeline.order` that apply) changes what a graph computes."""

    def fails(gm: fx.GraphModule, args: Sequence[Any]) -> bool:
        ctx = context_of(args)
        rewriter = Rewriter(forward_passes(ctx) if passes is None else tuple(passes), ctx)
        rewritten, _, _ = rewriter.rewrite(gm, len(rewriter.passes), {})
        return mismatch(gm, rewritten, args) is not None

    return fails


@dataclass(frozen=True)
class _State:
    gm: fx.GraphModule
    args: tuple[Any, ...]

    def calls(self) -> list[str]:
        """Names of the nodes that compute something; copies of a graph keep them."""
        return [n.name for n in self.gm.graph.nodes if n.op not in ("placeholder", "output")]


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps each value as it was when it was made, before anything wrote to it."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[n.name] = _kept(value)
        return value


def _kept(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


class _Search:
    """Makes smaller states and keeps those that still fail."""

    def __init__(self, fails: Fails) -> None:
        self.fails = fails
        self.runs = 0

    def accepts(self, state: _State) -> bool:
        self.runs += 1
        state.gm.recompile()
        try:
            return self.fails(copy_graph(state.gm), tuple(map(_kept, state.args)))
        except Exception:  # noqa: BLE001  a graph cut at random may raise anything, which is another failure than ours
            return False

    def cut(self, state: _State) -> _State:
        """Make the earliest node that shows the failure the only result."""
        names, last = state.calls(), len(state.calls()) - 1
        best, step = state, len(names) // 2
        results = [n.name for n in state.gm.graph.output_node().all_input_nodes]
        for name in results if len(results) > 1 else ():
            found = _with_result(state, name)
            if self.accepts(found):
                best, last = found, names.index(name) if name in names else last
                break
        while step:
            at = last - step
            earlier = _with_result(state, names[at]) if at >= 0 else None
            if earlier is not None and self.accepts(earlier):
                best, last = earlier, at
            else:
                step //= 2
        return best

    def lifted(self, state: _State) -> _State:
        """Take runs of nodes out, long runs first, as long as the failure stays."""
        size = max(1, len(state.calls()) // 2)
        while True:
            names = state.calls()
            for start in range(0, len(names), size):
                present = set(state.calls())
                smaller = _without(state, [n for n in names[start : start + size] if n in present])
                if smaller is not None and self.accepts(smaller):
                    state = smaller
            if size == 1:
                return state
            size //= 2


def _pruned(gm: fx.GraphModule, args: Sequence[Any]) -> _State:
    """Drop from `gm`, in place, the nodes and inputs that nobody uses."""
    kept = []
    for node in list(reversed(gm.graph.nodes)):
        dead = not node.users and node.op != "output" and not writes_in_place(node)
        if node.op == "placeholder":
            kept.append(not dead)
        if dead:
            gm.graph.erase_node(node)
    return _State(gm, tuple(a for a, keep in zip(args, reversed(kept), strict=True) if keep))


def _with_result(state: _State, name: str) -> _State:
    gm = copy_graph(state.gm)
    output = gm.graph.output_node()
    output.args = ((next(n for n in gm.graph.nodes if n.name == name),),)
    return _pruned(gm, state.args)


def _without(state: _State, names: Sequence[str]) -> _State | None:
    """`state` without these nodes; None where one hands others something that can be no input."""
    gm = copy_graph(state.gm)
    gone = [n for n in gm.graph.nodes if n.name in set(names)]
    needed = [n for n in gone if any(user not in gone for user in n.users)]
    recorder = _Recorder(state.gm)
    with torch.enable_grad():
        recorder.run(*map(_kept, state.args))
    values = [recorder.values[n.name] for n in needed]
    if not gone or not all(isinstance(v, (torch.Tensor, int, float)) for v in values):
        return None
    first = next(n for n in gm.graph.nodes if n.op != "placeholder")
    with gm.graph.inserting_before(first):
        for node in needed:
            made = gm.graph.placeholder(f"{node.name}_input")
            made.meta = copy.copy(node.meta)
            node.replace_all_uses_with(made)
    for node in reversed(gone):
        gm.graph.erase_node(node)
    return _pruned(gm, (*state.args, *values))
