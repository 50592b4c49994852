"""Merge linear layers that read the same input (queries, keys and values; gate and up) into one wide one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.nn import functional

from fusewright.capture.values import tensor_of, value_of
from fusewright.config import Numerics
from fusewright.passes.base import Pass, PassContext, Stage
from fusewright.passes.frozen import layers, weights
from fusewright.passes.frozen.layers import dtype_of, operand, read_layer
from fusewright.passes.frozen.weights import (
    EMITTED,
    emit,
    fake_result,
    storages_in,
    storages_of,
    weight_only,
    written_storages,
)

# Methods and functions of torch whose result does not depend on how their operand lies in memory.
# fmt: off
_BLIND_TO_STRIDES = {
    "mul", "add", "sub", "div", "truediv", "neg", "silu", "gelu", "relu", "sigmoid", "tanh", "exp", "softmax",
    "matmul", "bmm", "cat", "linear", "layer_norm", "rms_norm", "scaled_dot_product_attention", "to", "float",
    "half", "bfloat16", "pow", "mean", "sum", "rsqrt", "masked_fill", "where", "dropout",
}
# Views that say what they select in terms of axes, not of memory (as `as_strided` does).
_VIEWS = {
    "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "transpose", "swapaxes", "permute", "movedim",
    "t", "mT", "expand", "getitem", "select", "narrow", "chunk", "split", "unbind",
}
# fmt: on
_SWITCHES = frozenset((torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast))


@dataclass(frozen=True)
class _Linear:
    node: fx.Node
    weight: fx.Node
    bias: fx.Node | None

    @property
    def input(self) -> fx.Node:
        """What the layer reads now: merging the layers before it replaces that."""
        source = operand(self.node, 0, "input")
        assert isinstance(source, fx.Node), self.node
        return source

    def operands(self) -> list[fx.Node]:
        """The weight, and the bias where there is one."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def kind(self) -> tuple[Any, ...]:
        """What must be equal for two layers to be merged."""
        bias = None if self.bias is None else dtype_of(self.bias)
        return self.input, dtype_of(self.weight), dtype_of(self.node), bias


class MergeLinears(Pass):
    """Only under frozen weights and in inference: the merged weight is computed once, outside of the lowered graph.

    The results are slices of one tensor, made contiguous where something may look at how they lie in memory.
    """

    name: ClassVar[str] = "merge_linears"
    stage: ClassVar[Stage] = Stage.FORWARD
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        if not ctx.frozen_weights:
            return 0
        merged = 0
        nodes = list(gm.graph.nodes)
        position = {node: i for i, node in enumerate(nodes)}
        for group in _groups(gm.graph, ctx):
            first = group[0].node
            if ctx.training:
                ctx.declined(first, "gradients are asked for")
                continue
            between = nodes[position[first] : position[group[-1].node]]
            late = sorted(_later(group, position), key=position.__getitem__)
            if written_storages(between) & storages_of(group[0].input):
                ctx.declined(first, "the input is written to between the layers")
            elif not _SWITCHES.isdisjoint(n.target for n in between) and any(EMITTED not in n.meta for n in late):
                ctx.declined(first, "a weight is computed where autocast may differ from that of the first layer")
            elif ctx.allow(first):
                for node in late:
                    first.prepend(node)
                    position[node] = position[first]
                _merge(gm.graph, group)
                merged += 1
        if merged:
            gm.recompile()
        return merged

    def digest_sources(self) -> Sequence[object]:
        return (layers, weights)


def _groups(graph: fx.Graph, ctx: PassContext) -> list[list[_Linear]]:
    """Two or more layers each, of one input and one kind, in graph order."""
    fixed = weight_only(graph)
    by_kind: dict[tuple[Any, ...], list[_Linear]] = {}
    inputs: dict[fx.Node, int] = {}
    for node in graph.nodes:
        layer = _read(node)
        if layer is None or layer.input in fixed:
            continue
        inputs[layer.input] = inputs.get(layer.input, 0) + 1
        if layer.weight in fixed and (layer.bias is None or layer.bias in fixed):
            by_kind.setdefault(layer.kind(), []).append(layer)
    for alone in (group[0] for group in by_kind.values() if len(group) == 1 and inputs[group[0].input] > 1):
        ctx.declined(alone.node, "layers of the same input differ in dtype, in having a bias, or are no fixed weights")
    return [group for group in by_kind.values() if len(group) > 1]


def _read(node: fx.Node) -> _Linear | None:
    if node.op != "call_function" or node.target is not functional.linear:
        return None
    layer, source = read_layer(node), operand(node, 0, "input")
    if isinstance(layer, str) or tensor_of(source) is None:
        return None
    return _Linear(node, layer.weight, layer.bias)


def _later(group: Sequence[_Linear], position: Mapping[fx.Node, int]) -> set[fx.Node]:
    """What computes the layers' weights after the first layer: from weights alone, so it can move before that."""
    found: set[fx.Node] = set()
    pending = [node for layer in group for node in layer.operands()]
    while pending:
        node = pending.pop()
        if position[node] > position[group[0].node] and node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _merge(graph: fx.Graph, group: Sequence[_Linear]) -> None:
    first = group[0]
    with graph.inserting_before(first.node):
        weight = emit(graph, torch.cat, [layer.weight for layer in group])
        operands = [first.input, weight]
        if first.bias is not None:
            operands.append(emit(graph, torch.cat, [layer.bias for layer in group]))
        wide = emit(graph, functional.linear, *operands)
    start = 0
    for layer in group:
        width = int(tensor_of(layer.weight).shape[0])  # type: ignore[union-attr]
        with graph.inserting_before(layer.node):
            part = emit(graph, torch.narrow, wide, -1, start, width)
            views = _views(layer.node, part)
            if views is None or not all(map(_is_read_blindly, views)):
                part = emit(graph, "contiguous", part)
                views = _views(layer.node, part)
        assert views is not None, "a contiguous tensor has every view that a linear layer's result has"
        for node, value in views.items():
            node.meta["example_value"] = value
        layer.node.replace_all_uses_with(part)
        graph.erase_node(layer.node)
        start += width


def _views(old: fx.Node, new: fx.Node) -> dict[fx.Node, Any] | None:
    """`old` and all views of it, with the fake values that they have on top of `new`; None where one is no view there.

    Whether something is a view decides what a write changes, so a reshape must not begin to copy.
    """
    values: dict[fx.Node, Any] = {old: value_of(new)}
    pending = [old]
    while pending:
        for user in pending.pop().users:
            if not storages_of(user) & storages_of(old):
                continue
            try:
                values[user] = fake_result(user, values)
            except (RuntimeError, ValueError):  # torch's own functions raise one, its fake versions the other
                return None
            if not storages_in(values[user]) & storages_of(new):
                return None
            pending.append(user)
    return values


def _is_read_blindly(node: fx.Node) -> bool:
    """Whether nothing that reads `node` can tell how it lies in memory, writes to it, or returns it."""
    for user in node.users:
        is_view = bool(storages_of(user) & storages_of(node))
        name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
        if name not in (_VIEWS if is_view else _BLIND_TO_STRIDES):
            return False
    return True
