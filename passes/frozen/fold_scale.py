"""Fold a factor of each output channel, or one number, into the weights of the layer before it (layer scale)."""
# C output channels; w' = w * s and b' = b * s

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fusewright.capture.values import tensor_of
from fusewright.config import Numerics
from fusewright.passes.base import Pass, PassContext, Stage
from fusewright.passes.frozen import layers, weights
from fusewright.passes.frozen.layers import Layer, along, dtype_of, read_layer, widened
from fusewright.passes.frozen.weights import emit, weight_only

_PRODUCTS = (torch.mul, torch.multiply, operator.mul)


@dataclass(frozen=True)
class _Match:
    layer: Layer
    scale: fx.Node | float


class FoldScale(Pass):
    """Only under frozen weights and in inference, for a layer whose output is used by the product alone.

    Products of a layer with data are no business of this pass: it declines only where a weight or a number scales.
    """

    name: ClassVar[str] = "fold_scale"
    stage: ClassVar[Stage] = Stage.FORWARD
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        if not ctx.frozen_weights:
            return 0
        fixed = weight_only(gm.graph)
        folded = 0
        for node in list(gm.graph.nodes):
            found = _match(node, fixed)
            if isinstance(found, _Match) and ctx.training:
                found = "gradients are asked for"
            if isinstance(found, str):
                ctx.declined(node, found)
            elif found is not None and ctx.allow(node):
                fixed |= _fold(gm.graph, node, found)
                folded += 1
        if folded:
            gm.recompile()
        return folded

    def digest_sources(self) -> Sequence[object]:
        return (layers, weights)


def _match(node: fx.Node, fixed: set[fx.Node]) -> _Match | str | None:
    """What to fold, why not, or None where `node` is no product of a layer with a weight or a number."""
    pair = _factors(node)
    if pair is None:
        return None
    for output, scale in (pair, pair[::-1]):
        layer = read_layer(output)
        if isinstance(layer, str) or not (isinstance(scale, int | float) or scale in fixed):
            continue
        if isinstance(scale, bool):
            return "a boolean is no factor"
        if len(layer.node.users) != 1:
            return "the output of the layer before it is used elsewhere too"
        if layer.weight not in fixed or (layer.bias is not None and layer.bias not in fixed):
            return "an operand is no weight of the model, or is written to"
        if dtype_of(layer.node) != dtype_of(node):
            return "it changes the dtype"
        if isinstance(scale, fx.Node) and not _is_of_channels(scale, layer):
            return "the factor is not one for each output channel"
        return _Match(layer, scale)
    return None


def _factors(node: fx.Node) -> tuple[Any, Any] | None:
    is_function = node.op == "call_function" and node.target in _PRODUCTS
    is_method = node.op == "call_method" and node.target in ("mul", "multiply")
    if not (is_function or is_method) or len(node.args) != 2 or node.kwargs or tensor_of(node) is None:
        return None
    return node.args[0], node.args[1]


def _is_of_channels(scale: fx.Node, layer: Layer) -> bool:
    """Whether `scale` is one number, or one for each output channel along the axis of these; and adds no axis."""
    value, result = tensor_of(scale), tensor_of(layer.node)
    assert value is not None, scale
    assert result is not None, layer
    axis = layer.output_axis - (layer.rank - value.dim())
    if value.dim() > layer.rank or not value.is_floating_point():
        return False
    channels = result.shape[layer.output_axis]
    return value.numel() == 1 or all(n == (channels if a == axis else 1) for a, n in enumerate(value.shape))


def _fold(graph: fx.Graph, node: fx.Node, found: _Match) -> set[fx.Node]:
    """Give the layer its scaled weights in place of the product; returns the nodes that compute them."""
    layer, before = found.layer, set(graph.nodes)
    with graph.inserting_before(layer.node):
        weight, bias = widened(graph, layer.weight), layer.bias
        scale: Any = found.scale
        if isinstance(scale, fx.Node):
            scale = emit(graph, torch.reshape, widened(graph, scale), [-1])
            weight = emit(graph, torch.mul, weight, along(graph, scale, layer))
        else:
            weight = emit(graph, torch.mul, weight, scale)
        if bias is not None:
            bias = emit(graph, torch.mul, widened(graph, bias), scale)
    layer.set_weights(weight, bias)
    node.replace_all_uses_with(layer.node)
    graph.erase_node(node)
    return set(graph.nodes) - before
