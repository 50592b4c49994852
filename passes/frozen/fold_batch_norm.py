"""Fold batch norm with fixed statistics into the weights of the convolution or linear layer before it."""
# C output channels; w' = w * s and b' = (b - mean) * s + beta, where s_C = gamma / sqrt(var + eps)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.nn import functional

from fusewright.config import Numerics
from fusewright.passes.base import Pass, PassContext, Stage
from fusewright.passes.frozen import layers, weights
from fusewright.passes.frozen.layers import Layer, along, dtype_of, read_layer, widened
from fusewright.passes.frozen.weights import emit, weight_only

_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_NORM_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}


@dataclass(frozen=True)
class _Match:
    """The arguments of a batch norm, by name, and the layer that it can be folded into."""

    norm: dict[str, Any]
    layer: Layer


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
                _fold(gm.graph, node, found)
                folded += 1
        if folded:
            gm.recompile()
        return folded

    def digest_sources(self) -> Sequence[object]:
        return (layers, weights)


def _match(node: fx.Node, fixed: set[fx.Node]) -> _Match | str:
    """The layer to fold `node` into, or why there is none."""
    norm: dict[str, Any] = {**_NORM_DEFAULTS, **dict(zip(_NORM, node.args, strict=False)), **node.kwargs}
    if norm["training"] is not False or norm["running_mean"] is None or norm["running_var"] is None:
        return "normalizes by the statistics of the batch"
    if not isinstance(norm["eps"], int | float):
        return "its epsilon is no number"
    layer = read_layer(norm["input"])
    if isinstance(layer, str):
        return layer
    if layer.output_axis != 1:
        return "the norm's channels are not the linear layer's features"
    if len(layer.node.users) != 1:
        return "the output of the layer before it is used elsewhere too"
    operands = [layer.weight, layer.bias, *(norm[name] for name in ("running_mean", "running_var", "weight", "bias"))]
    if any(x is not None and x not in fixed for x in operands):
        return "an operand is no weight of the model, or is written to"
    if dtype_of(layer.node) != dtype_of(node):
        return "it changes the dtype"
    return _Match(norm, layer)


def _fold(graph: fx.Graph, node: fx.Node, found: _Match) -> None:
    """Give the layer its folded weights in place of the norm."""
    norm, layer = found.norm, found.layer
    with graph.inserting_before(layer.node):
        mean, variance = widened(graph, norm["running_mean"]), widened(graph, norm["running_var"])
        scale_C = emit(graph, torch.rsqrt, emit(graph, torch.add, variance, norm["eps"]))
        if norm["weight"] is not None:
            scale_C = emit(graph, torch.mul, widened(graph, norm["weight"]), scale_C)
        weight = emit(graph, torch.mul, widened(graph, layer.weight), along(graph, scale_C, layer))
        if layer.bias is None:
            centred_C = emit(graph, torch.neg, mean)
        else:
            centred_C = emit(graph, torch.sub, widened(graph, layer.bias), mean)
        bias_C = emit(graph, torch.mul, centred_C, scale_C)
        if norm["bias"] is not None:
            bias_C = emit(graph, torch.add, bias_C, widened(graph, norm["bias"]))
    layer.set_weights(weight, bias_C)
    node.replace_all_uses_with(layer.node)
    graph.erase_node(node)
