"""Remove what computes nothing, bit for bit, so that later passes see one spelling less."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import fx

from fusewright.config import Numerics
from fusewright.passes.base import Pass, PassContext, Stage, tensor_of

_DROPOUT = torch.nn.functional.dropout
_CASTS = ("to", "type", "type_as", "float", "half", "bfloat16", "double")


class Canonicalize(Pass):
    """Removes dropout that drops nothing, casts to what a tensor is, a copy of a copy, and two equal transposes.

    Each of them returns its own operand (the transposes: a view of it with the same strides), so outputs, gradients
    and aliases stay what they were. Adding 0 stays: it turns -0.0 into 0.0.
    """

    name: ClassVar[str] = "canonicalize"
    stage: ClassVar[Stage] = Stage.FORWARD
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        removed = 0
        for node in list(gm.graph.nodes):
            source = _idle_dropout(node) or _idle_cast(node) or _second_copy(node) or _second_transpose(node)
            if source is None or not ctx.allow(node):
                continue
            node.replace_all_uses_with(source)
            between = _node(node.args[0])
            gm.graph.erase_node(node)
            if between is not None and between is not source and not between.users:
                gm.graph.erase_node(between)  # a dead first transpose would count as a user and hide an attention
            removed += 1
        if removed:
            gm.recompile()
        return removed


def _idle_dropout(node: fx.Node) -> fx.Node | None:
    """`F.dropout` in evaluation, or with p = 0: it returns its operand and draws no random number."""
    if node.op != "call_function" or node.target is not _DROPOUT:
        return None
    bound = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | node.kwargs
    p, training = bound.get("p", 0.5), bound.get("training", True)
    idle = training is False or (isinstance(p, int | float) and p == 0)
    return _node(bound.get("input")) if idle else None


def _idle_cast(node: fx.Node) -> fx.Node | None:
    """A cast whose operand already has the dtype and device: `Tensor.to` and its kin then return the operand."""
    if node.op != "call_method" or node.target not in _CASTS:
        return None
    before, after = tensor_of(node.args[0]), tensor_of(node)
    if before is None or after is None or before.dtype != after.dtype or before.device != after.device:
        return None
    if "copy" in node.kwargs or "memory_format" in node.kwargs or any(isinstance(a, bool) for a in node.args[1:]):
        return None
    if any(isinstance(a, torch.memory_format) for a in node.args[1:]):
        return None
    return _node(node.args[0])


def _second_copy(node: fx.Node) -> fx.Node | None:
    """`x.contiguous().contiguous()`: the second returns the first."""
    return _node(node.args[0]) if _is_contiguous(node) and _is_contiguous(node.args[0]) else None


def _is_contiguous(node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.op != "call_method" or node.target != "contiguous":
        return False
    return len(node.args) == 1 and not node.kwargs


def _second_transpose(node: fx.Node) -> fx.Node | None:
    """Two transposes of the same two axes. The result is a new view in eager, so it must not leave the graph."""
    axes = _transposed(node)
    if axes is None or axes != _transposed(node.args[0]):
        return None
    if any(user.op == "output" or _writes(user) for user in node.users):
        return None
    inner = _node(node.args[0])
    return None if inner is None else _node(inner.args[0])


def _transposed(node: Any) -> frozenset[int] | None:
    if not isinstance(node, fx.Node) or node.op != "call_method" or node.target != "transpose" or node.kwargs:
        return None
    value = tensor_of(node)
    axes = [axis for axis in node.args[1:] if isinstance(axis, int)]
    if value is None or len(node.args) != 3 or len(axes) != 2:
        return None
    return frozenset(axis % value.dim() for axis in axes)


def _writes(node: fx.Node) -> bool:
    """Whether `node` may write to its operand: all that is called like an in-place method or operator counts."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.endswith("_") or name.startswith("i") or name == "setitem" or "out" in node.kwargs


def _node(value: Any) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None
