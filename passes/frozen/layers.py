"""Convolutions and linear layers as one thing: an input, a weight, a bias, and an axis of output channels in each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from fusewright.capture.values import tensor_of
from fusewright.passes.frozen.weights import emit

_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
_GROUPS = 6  # position of `groups`, the same in both signatures
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Layer:
    """A node that computes `weight` times its input, plus `bias`.

    Attributes:
        weight_axis: axis of the output channels in the weight.
        output_axis: axis of the output channels in the result, >= 0.
        rank: number of axes of the result.
    """

    node: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    weight_axis: int
    output_axis: int
    rank: int

    def set_weights(self, weight: fx.Node, bias: fx.Node | None) -> None:
        """Let the layer compute with other weights, cast to the dtype of its own; they must stand before it."""
        graph, dtype = self.node.graph, dtype_of(self.weight)
        with graph.inserting_before(self.node):
            weight = _cast(graph, weight, dtype)
            bias = None if bias is None else _cast(graph, bias, dtype)
        rest = {k: v for k, v in self.node.kwargs.items() if k not in ("input", "weight", "bias")}
        self.node.args = (operand(self.node, 0, "input"), weight, bias, *self.node.args[3:])
        self.node.kwargs = rest


def read_layer(node: Any) -> Layer | str:
    """The layer that `node` is, or why it is none whose output channels can be scaled."""
    value = tensor_of(node)
    if value is None or node.op != "call_function":
        return "no convolution or linear layer stands before it"
    linear = node.target is functional.linear
    if not linear and node.target not in _CONVOLUTIONS + _TRANSPOSED:
        return "no convolution or linear layer stands before it"
    weight, bias = operand(node, 1, "weight"), operand(node, 2, "bias")
    kernel = tensor_of(weight)
    if kernel is None or kernel.dim() < 2 or (bias is not None and tensor_of(bias) is None):
        return "the layer's weight is no matrix"
    if linear:
        return Layer(node, weight, bias, 0, value.dim() - 1, value.dim())
    if value.dim() != kernel.dim():
        return "the convolution has no batch axis"
    if node.target in _TRANSPOSED and operand(node, _GROUPS, "groups") not in (None, 1):
        return "a transposed convolution in groups has no axis of all output channels"
    return Layer(node, weight, bias, 1 if node.target in _TRANSPOSED else 0, 1, value.dim())


def operand(node: fx.Node, position: int, name: str) -> Any:
    """The argument of `node` at `position` or called `name`; None where it is not given."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def along(graph: fx.Graph, scale_C: fx.Node, layer: Layer) -> fx.Node:
    """`scale_C` (C,) in the shape that scales the output channels of the layer's weight."""
    kernel = tensor_of(layer.weight)
    assert kernel is not None, layer
    return emit(graph, torch.reshape, scale_C, [-1 if a == layer.weight_axis else 1 for a in range(kernel.dim())])


def dtype_of(node: fx.Node) -> torch.dtype:
    """Dtype of a node that holds a tensor."""
    value = tensor_of(node)
    assert value is not None, node
    return value.dtype


def widened(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Half precision in float32, so that only the final weight is rounded; anything else as it is."""
    return emit(graph, "to", node, torch.float32) if dtype_of(node) in _HALF else node


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if dtype_of(node) == dtype else emit(graph, "to", node, dtype)
