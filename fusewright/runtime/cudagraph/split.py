"""Cuts a graph into its planned regions and runs each capturable one by CUDA graphs, the rest plainly, in order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import fx

from fusewright.passes.cudagraph_regions import Region
from fusewright.runtime.cudagraph.runner import GraphPool, RegionRunner
from fusewright.runtime.cudagraph.tensors import Value

Lower: TypeAlias = Callable[[fx.GraphModule], Callable[..., Sequence[Value]]]


@dataclass(frozen=True)
class Piece:
    """One region as a module of its own.

    Attributes:
        module: takes the values of `inputs`, returns a tuple of those of `outputs`.
        inputs: names of nodes of the whole graph that come from outside.
        outputs: names of nodes that later pieces or the graph's output use.
        dead: names of values that nothing needs once this piece has run.
        capturable: as planned.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dead: tuple[str, ...]
    capturable: bool


class RegionSequence:
    """Runs a graph region by region. `runners` holds one `RegionRunner` for each capturable region, in order.

    Args:
        gm: the graph that `regions` was planned for; flat arguments, and an output of one tuple or list.
        regions: from `plan_regions`.
        static_inputs: positions of arguments that keep their address, such as parameters.
        lower: what makes a callable of a region's module; None: the module itself.
        pool: memory to share with other runners; None: one pool for all regions of this graph.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        regions: Sequence[Region],
        *,
        static_inputs: Collection[int] = (),
        lower: Lower | None = None,
        pool: GraphPool | None = None,
    ) -> None:
        self._placeholders = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        results = _output(gm).args[0]
        assert isinstance(results, list | tuple), f"the output must be one tuple or list, not {results!r}"
        self._results = list(results)
        static = {self._placeholders[position] for position in static_inputs}
        pool = pool if pool is not None else GraphPool()
        self.runners: list[RegionRunner] = []
        self._steps: list[tuple[Callable[..., Sequence[Value]], Piece]] = []
        for piece in cut(gm, regions):
            run: Callable[..., Sequence[Value]] = piece.module if lower is None else lower(piece.module)
            if piece.capturable:
                positions = [position for position, name in enumerate(piece.inputs) if name in static]
                run = RegionRunner(run, static_inputs=positions, pool=pool)
                self.runners.append(run)
            self._steps.append((run, piece))

    def __call__(self, *args: Value) -> list[Value]:
        """Run the whole graph once on its flat arguments and return its flat outputs."""
        values = dict(zip(self._placeholders, args, strict=True))
        for run, piece in self._steps:
            outputs = run(*(values[name] for name in piece.inputs))
            values.update(zip(piece.outputs, outputs, strict=True))
            for name in piece.dead:
                del values[name]
        return [values[result.name] if isinstance(result, fx.Node) else _constant(result) for result in self._results]


def cut(gm: fx.GraphModule, regions: Sequence[Region]) -> list[Piece]:
    """Make a module of each region. Constants are copied into every piece that uses them. `gm` is left as it is."""
    by_name = {node.name: node for node in gm.graph.nodes}
    constants = {by_name[name] for region in regions for name in region.constants}
    groups = [([by_name[name] for name in region.nodes], region.capturable) for region in regions]
    returned = [node for node in _output(gm).all_input_nodes if node in constants or node.op == "get_attr"]
    if returned:  # numbers known now that the graph returns: a last piece makes them
        groups.append((returned, False))
    last_use = {arg: position for position, (nodes, _) in enumerate(groups) for arg in _outside(nodes, constants)}
    pieces = []
    for position, (nodes, capturable) in enumerate(groups):
        inside = set(nodes)
        inputs = [arg for arg in _outside(nodes, constants) if arg not in inside]
        outputs = [node for node in nodes if any(user not in inside for user in node.users)]
        kept = set(_output(gm).all_input_nodes)
        dead = [arg for arg in (*inputs, *outputs) if last_use.get(arg, position) <= position and arg not in kept]
        pieces.append(
            Piece(
                _module(gm, nodes, inputs, outputs),
                tuple(arg.name for arg in inputs),
                tuple(node.name for node in outputs),
                tuple(arg.name for arg in dict.fromkeys(dead)),
                capturable,
            )
        )
    return pieces


def _outside(nodes: Iterable[fx.Node], constants: set[fx.Node]) -> list[fx.Node]:
    """Nodes that `nodes` take values from and that no piece can make for itself, each once."""
    args = (arg for node in nodes for arg in node.all_input_nodes)
    return list(dict.fromkeys(arg for arg in args if arg not in constants and arg.op != "get_attr"))


def _module(gm: fx.GraphModule, nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:
            for arg in node.all_input_nodes:
                copy_of(arg)
            copies[node] = graph.node_copy(node, copies.__getitem__)
        return copies[node]

    for node in nodes:
        copy_of(node)
    graph.output(tuple(copies[node] for node in outputs))
    return fx.GraphModule(gm, graph)


def _constant(result: object) -> int | None:
    assert result is None or isinstance(result, int), f"the graph returns {result!r}"
    return result


def _output(gm: fx.GraphModule) -> fx.Node:
    return gm.graph.output_node()
