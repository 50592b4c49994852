"""What a legal graph is; the pipeline checks it after every pass that rewrote something."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fusewright.capture.values import tensor_of, value_of

Result = tuple[torch.dtype, torch.device, int]


class IllegalGraph(Exception):
    """A graph breaks a rule; the message names the rule and the node. The pipeline turns it into a rollback."""


@dataclass(frozen=True)
class _Node:
    """A node as it was; `args` and `kwargs` are immutable in fx, so holding them is enough."""

    node: fx.Node
    name: str
    target: object
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def is_same(self, node: fx.Node) -> bool:
        """Whether `node` is this one, unchanged; text decides only where the arguments were set anew."""
        if node is not self.node or node.name != self.name or node.target is not self.target:
            return False
        if node.args is self.args and node.kwargs is self.kwargs:
            return True
        return repr((node.args, node.kwargs)) == repr((self.args, self.kwargs))


@dataclass(frozen=True)
class Snapshot:
    """A graph module as it was before a pass, nested graphs included: path -> nodes, path -> facts about results."""

    nodes: dict[str, list[_Node]]
    results: dict[str, list[Result | None]]

    @classmethod
    def of(cls, gm: fx.GraphModule) -> Snapshot:
        """Note what `gm` is now; nothing is copied."""
        graphs = dict(_graphs(gm))
        return cls(
            {path: [_Node(n, n.name, n.target, n.args, n.kwargs) for n in g.nodes] for path, g in graphs.items()},
            {path: _results(graph) for path, graph in graphs.items()},
        )

    def changed(self, gm: fx.GraphModule) -> str | None:
        """Name of the first node that is not what it was, or None where all are; metadata does not count."""
        graphs = dict(_graphs(gm))
        if graphs.keys() != self.nodes.keys():
            return min(graphs.keys() ^ self.nodes.keys())
        for path, graph in graphs.items():
            now = list(graph.nodes)
            for before, node in zip(self.nodes[path], now, strict=False):
                if not before.is_same(node):
                    return str(node.name)
            if len(now) != len(self.nodes[path]):
                return path or "output"
        return None


def check_graph(gm: fx.GraphModule, before: Snapshot) -> None:
    """Check the rules that a graph, and every graph nested in it, must keep from before a pass to after it.

    1. Structure: `Graph.lint` (defined before use, unique names, targets exist), and the output comes last.
    2. Interface: placeholders keep their number, order and names.
    3. Results: as many as before, each of the same dtype, device and rank, where these are known.
    4. Values: a node that a pass made and others use carries a fake value, so that later passes can reason about it.

    Raises:
        IllegalGraph: naming the rule and the node.
    """
    for path, graph in _graphs(gm):
        where = f" in {path}" if path else ""
        try:
            graph.lint()
        except (RuntimeError, ValueError) as error:
            raise IllegalGraph(f"structure{where}: {error}") from error
        last = next(iter(reversed(graph.nodes)), None)
        if last is None or last.op != "output":
            raise IllegalGraph(f"structure{where}: the graph ends with {last}, not with its output")
        if path in before.nodes:
            _check_interface(graph, before.nodes[path], where)
            _check_results(graph, before.results[path], where)
            _check_values(graph, before.nodes[path], where)


def _check_interface(graph: fx.Graph, before: list[_Node], where: str) -> None:
    ours = [n.name for n in graph.nodes if n.op == "placeholder"]
    theirs = [n.name for n in before if n.node.op == "placeholder"]
    if ours != theirs:
        first = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(map(len, (ours, theirs)))
        )
        raise IllegalGraph(
            f"interface{where}: placeholders {ours[first : first + 4]} stand where {theirs[first : first + 4]} stood"
        )


def _check_results(graph: fx.Graph, before: list[Result | None], where: str) -> None:
    now = _results(graph)
    if len(now) != len(before):
        raise IllegalGraph(f"results{where}: {len(now)} instead of {len(before)}")
    for index, (old, new) in enumerate(zip(before, now, strict=True)):
        if old is not None and new is not None and old != new:
            raise IllegalGraph(f"results{where}: number {index} is {_told(new)} instead of {_told(old)}")


def _check_values(graph: fx.Graph, before: list[_Node], where: str) -> None:
    known = {n.node for n in before}
    for node in graph.nodes:
        made = node not in known and node.op in ("call_function", "call_method") and node.users
        if made and value_of(node) is None:
            raise IllegalGraph(f"values{where}: new node {node.name} ({node.target}) carries no fake value")


def _graphs(gm: fx.GraphModule) -> Iterator[tuple[str, fx.Graph]]:
    """(path, graph) of `gm` and of the bodies of higher-order operators in it."""
    yield "", gm.graph
    for path, module in gm.named_modules():
        if module is not gm and isinstance(module, fx.GraphModule):
            yield path, module.graph


def _results(graph: fx.Graph) -> list[Result | None]:
    """Dtype, device and rank of each result that is a node; None where unknown or no tensor."""
    found: list[Result | None] = []

    def note(node: fx.Node) -> fx.Node:
        value = tensor_of(node)
        found.append(None if value is None else (value.dtype, value.device, value.dim()))
        return node

    for node in reversed(graph.nodes):
        if node.op == "output":
            fx.map_arg(node.args, note)
            break
    return found


def _told(result: Result) -> str:
    return f"a {result[0]} tensor of rank {result[2]} on {result[1]}"
