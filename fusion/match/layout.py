"""Keep the strides that the rest of the graph was traced for, and only where something can see them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fusewright.fusion.match.site import call, fake_key, set_fake_value
from fusewright.fusion.match.sizes import all_same
from fusewright.fusion.match.view import normalize, spelling
from fusewright.passes.base import tensor_of, value_of

# Their results have the same strides whatever those of their operands are.
_INDIFFERENT = ("linear", "matmul", "bmm", "einsum", "__matmul__")


def keep_strides(result: fx.Node, old: fx.Node) -> fx.Node:
    """Return `result`, or a copy of it with the strides of `old`, whose users it takes over.

    Eager returned a tensor of `old`'s strides: a `view` below, or the caller, may depend on them. A transpose that is
    made contiguous at once does not, and there the copy would cost what the operator saved.
    """
    new_value, old_value = tensor_of(result), tensor_of(old)
    assert new_value is not None, result
    assert old_value is not None, old
    if all_same(new_value.stride(), old_value.stride()):
        return result
    changed: dict[fx.Node, Any] = {old: new_value}
    if all(_is_indifferent(user, changed) for user in old.users):
        del changed[old]
        for node, value in changed.items():
            node.meta[fake_key(node)] = value
        return result
    return _restrided(result, old_value)


def _is_indifferent(node: fx.Node, changed: dict[fx.Node, Any]) -> bool:
    """Whether nothing beyond `node` can see other strides of its operands; notes new fake values in `changed`."""
    if spelling(node) in _INDIFFERENT:
        return True
    op = normalize(node)
    if op is None or op.inplace or spelling(node) not in ("contiguous", "reshape", "flatten", *_PERMUTES):
        return False
    value = tensor_of(node)
    assert value is not None, node
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: changed[n] if n in changed else value_of(n))
    with value.fake_mode, torch.enable_grad():  # type: ignore[attr-defined]
        moved = call(node, args, kwargs)
    if all_same(moved.stride(), value.stride()):
        return True
    changed[node] = moved
    return op.kind == "permute" and all(_is_indifferent(user, changed) for user in node.users)


_PERMUTES = ("transpose", "permute", "swapaxes", "swapdims", "movedim", "mT")


def _restrided(node: fx.Node, like: torch.Tensor) -> fx.Node:
    """A copy of `node` whose axes lie in memory in the order of `like`'s, without gaps."""
    strides = [s if isinstance(s, int) else s.node.hint for s in like.stride()]
    order = sorted(range(like.dim()), key=lambda axis: -(strides[axis] or 0))
    back = sorted(range(like.dim()), key=order.__getitem__)
    steps: list[tuple[str, tuple[int, ...]]] = [("permute", tuple(order)), ("contiguous", ()), ("permute", tuple(back))]
    if order == sorted(order):
        steps = [("contiguous", ())]
    for name, args in steps:
        before = node
        with node.graph.inserting_after(before):
            node = node.graph.call_method(name, (before, *args))
        set_fake_value(node, before)
    return node
