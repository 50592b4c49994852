"""Fold batch norm with fixed statistics into the weights of the convolution or linear layer before it."""
# C output channels; w' = w * s and b' = (b - mean) * s + beta, where s_C = gamma / sqrt(var + eps)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.nn import functional

from fusewright.capture.values import tensor_of
from fusewright.config import Numerics
from fusewright.passes.base import Pass, PassContext, Stage
from fusewright.passes.frozen import weights
from fusewright.passes.frozen.weights import emit, weight_only

_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_NORM_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
_GROUPS = 6  # position of `groups`, the same in both signatures
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Match:
    """A batch norm and the layer that it can be folded into; `axis` is that of C in the layer's weight."""

    norm: dict[str, Any]
    layer: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    axis: int


class FoldBatchNorm(Pass):
    """Only under frozen weights and in inference: the folded weights are computed once, outside of the lowered graph.

    A norm that normalizes by the batch's own statistics is left alone, and so is a layer whose output is used twice.
    """

    name: ClassVar[str] = "fold_batch_norm"
    stage: ClassVar[Stage] = Stage.FORWARD
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        norms = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is functional.batch_norm]
        if not ctx.frozen_weights or not norms:
            return 0
        fixed = weight_only(gm.graph)
        folded = 0
        for node in norms:
            found = "gradients are asked for" if ctx.training else _match(node, fixed)
            if isinstance(found, str):
                ctx.declined(node, found)
            elif ctx.allow(node):
                fixed |= _fold(gm.graph, node, found)
                folded += 1
        if folded:
            gm.recompile()
        return folded

    def digest_sources(self) -> Sequence[object]:
        return (weights,)


def _match(node: fx.Node, fixed: set[fx.Node]) -> _Match | str:
    """The layer to fold `node` into, or why there is none."""
    norm = {**_NORM_DEFAULTS, **dict(zip(_NORM, node.args, strict=False)), **node.kwargs}
    if norm["training"] is not False or norm["running_mean"] is None or norm["running_var"] is None:
        return "normalizes by the statistics of the batch"
    if not isinstance(norm["eps"], int | float):
        return "its epsilon is no number"
    layer = norm["input"]
    axis = _channel_axis(layer)
    if isinstance(axis, str):
        return axis
    if len(layer.users) != 1:
        return "the output of the layer before it is used elsewhere too"
    weight, bias = _operand(layer, 1, "weight"), _operand(layer, 2, "bias")
    operands = [weight, bias, *(norm[name] for name in ("running_mean", "running_var", "weight", "bias"))]
    if weight is None or any(x is not None and x not in fixed for x in operands):
        return "an operand is no weight of the model, or is written to"
    if tensor_of(layer).dtype != tensor_of(node).dtype:  # type: ignore[union-attr]
        return "it changes the dtype"
    return _Match(norm, layer, weight, bias, axis)


def _channel_axis(layer: Any) -> int | str:
    """Axis of the output channels in the weight of `layer`, or why a norm cannot be folded into it."""
    value = tensor_of(layer)
    if value is None or layer.op != "call_function":
        return "no convolution or linear layer stands before it"
    if layer.target in _CONVOLUTIONS:
        return "the convolution has no batch axis" if _lacks_batch(layer, value) else 0
    if layer.target in _TRANSPOSED:
        if _operand(layer, _GROUPS, "groups") not in (None, 1):
            return "a transposed convolution in groups has no axis of all output channels"
        return "the convolution has no batch axis" if _lacks_batch(layer, value) else 1
    if layer.target is functional.linear:
        return 0 if value.dim() == 2 else "the norm's channels are not the linear layer's features"
    return "no convolution or linear layer stands before it"


def _operand(layer: fx.Node, position: int, name: str) -> Any:
    """The argument of `layer` at `position` or called `name`; None where it is not given."""
    return layer.args[position] if len(layer.args) > position else layer.kwargs.get(name)


def _lacks_batch(layer: fx.Node, value: torch.Tensor) -> bool:
    """Whether the axis that a norm takes for the channels is another one."""
    weight = tensor_of(_operand(layer, 1, "weight"))
    return weight is None or value.dim() != weight.dim()


def _fold(graph: fx.Graph, node: fx.Node, found: _Match) -> set[fx.Node]:
    """Give the layer its folded weights in place of the norm; returns the nodes that compute them."""
    norm, layer, dtype = found.norm, found.layer, _dtype(found.weight)
    before = set(graph.nodes)
    with graph.inserting_before(layer):
        mean, variance, gamma, beta, weight, bias = (
            _widened(graph, x)
            for x in (norm["running_mean"], norm["running_var"], norm["weight"], norm["bias"], found.weight, found.bias)
        )
        scale = emit(graph, torch.rsqrt, emit(graph, torch.add, variance, norm["eps"]))
        if gamma is not None:
            scale = emit(graph, torch.mul, gamma, scale)
        rank = tensor_of(found.weight).dim()  # type: ignore[union-attr]
        shape = [-1 if axis == found.axis else 1 for axis in range(rank)]
        new_weight = emit(graph, torch.mul, weight, emit(graph, torch.reshape, scale, shape))
        centred = emit(graph, torch.neg, mean) if bias is None else emit(graph, torch.sub, bias, mean)
        new_bias = emit(graph, torch.mul, centred, scale)
        if beta is not None:
            new_bias = emit(graph, torch.add, new_bias, beta)
        new_weight, new_bias = _cast(graph, new_weight, dtype), _cast(graph, new_bias, dtype)
    kept = {name: value for name, value in layer.kwargs.items() if name not in ("weight", "bias")}
    given = layer.args[0] if layer.args else kept.pop("input")
    layer.args, layer.kwargs = (given, new_weight, new_bias, *layer.args[3:]), kept
    node.replace_all_uses_with(layer)
    graph.erase_node(node)
    return set(graph.nodes) - before


def _dtype(node: fx.Node) -> torch.dtype:
    value = tensor_of(node)
    assert value is not None, node
    return value.dtype


def _widened(graph: fx.Graph, node: fx.Node | None) -> fx.Node | None:
    """Half precision in float32, as batch norm itself computes; so that only the folded weight is rounded."""
    return emit(graph, "to", node, torch.float32) if node is not None and _dtype(node) in _HALF else node


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if _dtype(node) == dtype else emit(graph, "to", node, dtype)
