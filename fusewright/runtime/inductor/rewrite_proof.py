"""A part of a graph as a computation of its own: run on random inputs, compared with what replaces it, put back."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from fusewright.fusion.match.proof import widened
from fusewright.fusion.match.site import call
from fusewright.numerics import compare_trees
from fusewright.trees import bitwise_equal

_DRAWS = 3
_LARGEST = 1 << 26  # elements of all results in a region: about 1 GiB in float64
_FARTHEST = 64  # nodes that a rewrite may add before it is left to other checks

Values = dict[fx.Node, Any]


class Region:
    """Nodes that are about to be replaced, as they are now: later changes of the graph do not show here.

    Attributes:
        inputs: what the nodes read from outside, and `read`, each once.
        outputs: those of the nodes that are read outside.
        masks: inputs that are additive or boolean masks; they are drawn with hidden rows.
    """

    def __init__(
        self, nodes: Collection[fx.Node], outputs: Sequence[fx.Node], read: Sequence[fx.Node], masks: set[fx.Node]
    ) -> None:
        self.nodes = sorted(nodes)
        self.outputs, self.masks = list(outputs), masks
        inside = set(nodes)
        outside = [parent for node in self.nodes for parent in node.all_input_nodes if parent not in inside]
        self.inputs = list(dict.fromkeys([*read, *outside]))
        self._steps = [(node, node.args, node.kwargs) for node in self.nodes]
        self._names = {node: f"%{i}" for i, node in enumerate((*self.inputs, *self.nodes))}

    def name(self, node: fx.Node) -> str:
        """A name that is the same in an equal region."""
        return self._names.get(node, "?")

    def on_cpu(self) -> bool:
        """Whether there are tensors, and all whose device is known are on the CPU."""
        values = [_value(node) for node in (*self.inputs, *self.nodes)]
        tensors = [leaf for value in values for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        return bool(tensors) and all(tensor.device.type == "cpu" for tensor in tensors)

    def is_aten(self) -> bool:
        """Whether every node is an ATen overload, whose tags tell whether it is random."""
        return all(isinstance(node.target, OpOverload) for node in self.nodes)

    def text(self) -> str:
        """What a verdict holds for: nodes with constants and edges, and sizes, strides and dtypes of the inputs."""
        lines = [f"{_describe(_value(node))} {node in self.masks}" for node in self.inputs]
        for node, args, kwargs in self._steps:
            lines.append(f"{node.op} {node.target} {fx.map_arg((args, kwargs), self.name)}")
        return "\n".join([*lines, str([self.name(node) for node in self.outputs])])

    def run(self, inputs: Values, *, wide: bool) -> list[Tensor]:
        """The outputs; `wide`: every floating tensor and dtype on the way is float64."""
        env = _fresh(inputs)
        if wide:
            env |= {n: x.double() for n, x in env.items() if isinstance(x, Tensor) and x.is_floating_point()}
        for node, old_args, old_kwargs in self._steps:
            args, kwargs = fx.map_arg((old_args, old_kwargs), env.__getitem__)
            env[node] = widened(node, args, kwargs) if wide else call(node, args, kwargs)
        return [env[node] for node in self.outputs]

    def graph_module(self) -> fx.GraphModule:
        """The region as a function of its inputs, in their order."""
        graph, values = _with_inputs(self)
        for node, old_args, old_kwargs in self._steps:
            args, kwargs = fx.map_arg((old_args, old_kwargs), values.__getitem__)
            values[node] = graph.create_node(node.op, node.target, args, kwargs)
        graph.output([values[node] for node in self.outputs])
        return fx.GraphModule(torch.nn.Module(), graph)

    def copy_into(self, graph: fx.Graph) -> Values:
        """Compute the region anew at the graph's insertion point; the copies by their originals."""
        copies: Values = {}
        for node, old_args, old_kwargs in self._steps:
            args, kwargs = fx.map_arg((old_args, old_kwargs), lambda n: copies.get(n, n))
            copies[node] = graph.create_node(node.op, node.target, args, kwargs)
            copies[node].meta = dict(node.meta)
        return copies


@dataclass(frozen=True)
class Made:
    """What a rewrite left behind: the new nodes, in order, and those that stand for the outputs (inputs may, too)."""

    nodes: list[fx.Node]
    results: list[fx.Node]

    def text(self, region: Region) -> str:
        """Its nodes with constants and edges, in the names of `region`."""
        names = {node: f"+{i}" for i, node in enumerate(self.nodes)}

        def name(node: fx.Node) -> str:
            return names.get(node) or region.name(node)

        lines = [f"{n.op} {n.target} {fx.map_arg((n.args, n.kwargs), name)}" for n in self.nodes]
        return "\n".join([*lines, str([name(node) for node in self.results])])

    def graph_module(self, region: Region) -> fx.GraphModule:
        """What the rewrite left behind as a function of the region's inputs."""
        graph, values = _with_inputs(region)
        for node in self.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = graph.create_node(node.op, node.target, args, kwargs)
        graph.output([values[node] for node in self.results])
        return fx.GraphModule(torch.nn.Module(), graph)

    def run(self, values: Values) -> list[Tensor]:
        """Compute the results."""
        env = _fresh(values)
        for node in self.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = call(node, args, kwargs)
        return [env[node] for node in self.results]


class Uses:
    """Who reads the outputs of a region, so that it can be told afterwards what they read instead."""

    def __init__(self, outputs: Sequence[fx.Node], inside: Collection[fx.Node]) -> None:
        self._places: list[tuple[fx.Node, int, fx.Node]] = []  # reader, place among its flat arguments, output
        self._counts: dict[fx.Node, int] = {}
        for output in outputs:
            for user in output.users:
                if user not in inside:
                    flat = pytree.tree_leaves((user.args, user.kwargs))
                    self._counts[user] = len(flat)
                    self._places += [(user, i, output) for i, leaf in enumerate(flat) if leaf is output]
        self._outputs = list(outputs)

    def now(self, inputs: Sequence[fx.Node]) -> Made | None:
        """What the readers read now; None where that is unchanged, or cannot be told from `inputs` alone."""
        if not all(isinstance(_value(output), Tensor) for output in self._outputs):
            return None
        found: dict[fx.Node, fx.Node] = {}
        for user, place, output in self._places:
            flat = pytree.tree_leaves((user.args, user.kwargs))
            if user._erased or len(flat) != self._counts[user] or not isinstance(flat[place], fx.Node):
                return None
            if found.setdefault(output, flat[place]) is not flat[place]:
                return None
        if len(found) != len(self._outputs) or all(new is old for old, new in found.items()):
            return None
        results = [found[output] for output in self._outputs]
        nodes: set[fx.Node] = set()
        stack = [node for node in results if node not in inputs]
        while stack:
            node = stack.pop()
            if node in nodes:
                continue
            if node.op not in ("call_function", "call_method") or len(nodes) > _FARTHEST:
                return None
            nodes.add(node)
            stack += [parent for parent in node.all_input_nodes if parent not in inputs]
        return Made(sorted(nodes), results)

    def restore(self, region: Region, made: Made, graph: fx.Graph) -> None:
        """Let the readers read what they did: the region is computed anew in front of the first of them."""
        assert not any(node._erased for node in region.inputs), "the rewrite removed what the region reads"
        first = min(user for user, _, _ in self._places)
        with graph.inserting_before(first):
            copies = region.copy_into(graph)
        for user in self._counts:
            flat, spec = pytree.tree_flatten((user.args, user.kwargs))
            for reader, place, output in self._places:
                if reader is user:
                    flat[place] = copies[output]
            user.args, user.kwargs = pytree.tree_unflatten(flat, spec)
        for node in reversed(made.nodes):
            if not node.users and not node.is_impure():
                graph.erase_node(node)


def _with_inputs(region: Region) -> tuple[fx.Graph, Values]:
    """An empty graph with a placeholder for each input of `region`, and the placeholders by input."""
    graph = fx.Graph()
    return graph, {node: graph.placeholder(f"x{i}") for i, node in enumerate(region.inputs)}


def applied(region: Region, args: Any, replacement: fx.GraphModule, kept: Sequence[int]) -> fx.GraphModule:
    """`replacement(*args)`, where args are of `region`'s inputs, as a function of those; results `kept` by place."""
    graph, values = _with_inputs(region)
    given = fx.map_arg(tuple(args), values.__getitem__)
    results = graph.graph_copy(
        replacement.graph, dict(zip(replacement.graph.find_nodes(op="placeholder"), given, strict=True))
    )
    flat = list(results) if isinstance(results, list | tuple) else [results]
    graph.output([flat[i] for i in kept] if len(flat) > len(kept) else flat)
    return fx.GraphModule(replacement, graph)


class Refusal(NamedTuple):
    """Why a rewrite may not stand, and the number of the draw that shows it; None where it cannot be compared."""

    reason: str
    draw: int | None = None


class NotComparableError(Exception):
    """A rewrite that cannot be judged by running it; says why."""


def difference(region: Region, made: Sequence[fx.Node], replaced: Callable[[Values], list[Tensor]]) -> Refusal | None:
    """How `replaced` differs from the region on random inputs; None where they agree.

    made: the nodes that `replaced` runs.

    Raises:
        NotComparableError: random numbers, too much memory, or inputs that the region itself cannot take.
    """
    if any(_is_random(node) for node in (*region.nodes, *made)):
        raise NotComparableError("it draws random numbers, and cannot be compared")
    if sum(_elements(_value(node)) for node in region.nodes) > _LARGEST:
        raise NotComparableError("it is too large to be compared")
    training = any("tangents" in str(node.target) for node in made)
    with _disable_current_modes(), torch.no_grad():
        for draw in range(_DRAWS if _has_extremes(region) else 1):
            reason = _compare(region, replaced, draw, training)
            if reason is not None:
                return Refusal(f"draw {draw}: {reason}", draw)
    return None


def drawn_inputs(region: Region, draw: int) -> Values:
    """Random values for the inputs of `region`, equal for equal draws."""
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(draw)  # of the CPU alone: the others are not put back
        return {node: _drawn(_value(node), draw, node in region.masks) for node in region.inputs}


def _has_extremes(region: Region) -> bool:
    """Whether later draws are unlike the first: masks with hidden rows, integers that overflow."""
    values = [_value(node) for node in region.inputs]
    return bool(region.masks) or any(isinstance(x, Tensor) and not x.is_floating_point() for x in values)


def _compare(region: Region, replaced: Callable[[Values], list[Tensor]], draw: int, training: bool) -> str | None:
    inputs = drawn_inputs(region, draw)
    try:
        ref = region.run(inputs, wide=False)
        again = ref if region.is_aten() else region.run(inputs, wide=False)
    except Exception as error:  # an operator may raise anything
        if draw:  # integers of any size are no indices, for one
            return None
        raise NotComparableError(f"it cannot be run: {type(error).__name__}: {str(error)[:200]}") from error
    if not bitwise_equal(ref, again):
        raise NotComparableError("it draws random numbers, and cannot be compared")
    try:
        res = replaced(inputs)
    except Exception as error:  # noqa: BLE001
        return f"it fails: {type(error).__name__}: {str(error)[:200]}"
    if [(x.dtype, x.shape) for x in ref] != [(x.dtype, x.shape) for x in res]:
        return f"{_kinds(ref)} becomes {_kinds(res)}"
    result = compare_trees(_named(res), _named(ref), lambda: _named(region.run(inputs, wide=True)), training=training)
    return None if result.ok else result.reason


def _kinds(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in tensors)


def _named(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(i): tensor for i, tensor in enumerate(tensors)}


def _fresh(values: Values) -> Values:
    """The same values in memory of their own: a region may write to what it reads, if it is not expanded."""
    return {node: x.clone() if isinstance(x, Tensor) and all(x.stride()) else x for node, x in values.items()}


def _value(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {_sizes(value.shape)} {_sizes(value.stride())}"
    return str(value)


def _size(size: Any) -> int:
    """A concrete size; of a symbolic one, what it was when the graph was captured, or 3 where that is not known."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 3 if hint is None else int(hint)


def _sizes(sizes: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(_size, sizes))


def _elements(value: Any) -> int:
    return math.prod(_sizes(value.shape)) if isinstance(value, Tensor) else 0


def _is_random(node: fx.Node) -> bool:
    """Whether the node draws, or drops: torch's fused attention takes the probability as an argument."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    for place, argument in enumerate(arguments):
        if argument.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            return bool(given != 0.0)
    return True


def _drawn(value: Any, draw: int, is_mask: bool) -> Any:
    """A random stand-in for a value of the graph, strides included; after the first draw masks hide whole rows."""
    if not isinstance(value, Tensor):
        return _size(value) if isinstance(value, torch.SymInt) else value
    shape, stride = _sizes(value.shape), _sizes(value.stride())
    reach = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if math.prod(shape) else 0
    if value.dtype == torch.bool:
        memory = torch.rand(reach) < (0.5, 0.9, 0.1)[draw]
    elif value.is_floating_point() or value.is_complex():
        memory = torch.randn(reach, dtype=torch.complex64 if value.is_complex() else torch.float32).to(value.dtype)
    else:
        memory = torch.randint(0, torch.iinfo(value.dtype).max if draw else 4, (reach,), dtype=value.dtype)
    drawn = memory.as_strided(shape, stride)
    if draw and shape and (value.dtype == torch.bool or is_mask):
        written = drawn  # each place in memory once: an expanded mask hides a row for all
        for axis, step in enumerate(stride):
            written = written if step else written.narrow(axis, 0, min(1, shape[axis]))
        _hide_rows(written, draw)
    return drawn


def _hide_rows(mask: Tensor, draw: int) -> None:
    """One row of all True and one of all False; an additive mask hides one by its least number, or by -inf."""
    rows = mask if mask.dim() > 1 else mask.unsqueeze(0)
    if not mask.is_floating_point():
        rows[..., :1, :].fill_(1)
        rows[..., -1:, :].fill_(0)
    else:
        rows[..., -1:, :].fill_(torch.finfo(mask.dtype).min if draw == 1 else -math.inf)
