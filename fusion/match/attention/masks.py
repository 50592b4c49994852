"""What the masks of one attention amount to: none, causal, one boolean or one additive mask."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fusewright.fusion.match.attention.scores import Term
from fusewright.fusion.match.site import RefusedError, call, on_cpu
from fusewright.fusion.match.sizes import same
from fusewright.fusion.match.view import dtype_of, shape_of, spelling
from fusewright.fusion.match.writes import is_written
from fusewright.passes.base import tensor_of, value_of


class MaskKind(enum.Enum):
    """How the operator gets its mask."""

    NONE = "none"
    CAUSAL = "causal"
    BOOLEAN = "boolean"
    ADDITIVE = "additive"
    MIXED = "mixed"


@dataclass(frozen=True)
class MaskPlan:
    """The masks of one site.

    BOOLEAN: `terms` are fills of one `value`; a key is hidden where any of them says so. ADDITIVE: they are summed.
    MIXED: some are fills of one `value`, some are added, in this order.
    """

    kind: MaskKind
    terms: tuple[Term, ...] = ()
    value: float = 0.0


# What a mask may be computed with so that its values are known while compiling: no data, no chance.
_CONSTANT_OPS = frozenset(
    (*("arange", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"),
     *("tensor", "scalar_tensor", "tril", "triu", "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "invert"),
     *("__and__", "__or__", "__invert__", "logical_and", "logical_or", "logical_not", "add", "sub", "mul", "neg"),
     *("where", "masked_fill", "to", "type", "type_as", "float", "bool", "long", "int", "cumsum", "diff", "getitem"),
     *("view", "reshape", "expand", "squeeze", "unsqueeze", "transpose", "permute", "contiguous", "clone"))
)  # fmt: skip
_LARGEST_CONSTANT = 1 << 24  # elements; a boolean mask of 4096 x 4096 tokens, about 30 ms to make


def plan_masks(
    terms: tuple[Term, ...], query: fx.Node, known: dict[Term, bool], *, square: bool, training: bool
) -> MaskPlan:
    """Sum up `terms`.

    Args:
        query: a node of the dtype and device that attention is computed in.
        known: which masks were found to be causal or not; layers share theirs, and to look costs T x T elements.
        square: whether the numbers of queries and keys are equal.
        training: whether gradients are asked for.
    """
    if not terms:
        return MaskPlan(MaskKind.NONE)
    if len(terms) == 1 and terms[0] not in known:
        known[terms[0]] = is_causal(terms[0])
    if len(terms) == 1 and square and known[terms[0]]:
        return MaskPlan(MaskKind.CAUSAL, terms)
    for term in terms:
        if term.kind == "add":
            _check_additive(term, query, training)
    fills = [term for term in terms if term.kind == "fill"]
    if not fills:
        return MaskPlan(MaskKind.ADDITIVE, terms)
    if len({term.value for term in fills}) > 1:
        raise RefusedError(terms[-1].mask, "boolean masks fill with different values")
    if len(fills) < len(terms):
        if fills[0].value > torch.finfo(dtype_of(query)).min:
            raise RefusedError(terms[-1].mask, f"some masks are added, some fill with {fills[0].value:g}")
        if training:  # of a row that the masks hide only together, the gradient stops at the filled scores alone
            raise RefusedError(terms[-1].mask, "some masks are added, some fill, in training")
        return MaskPlan(MaskKind.MIXED, terms, fills[0].value)
    return MaskPlan(MaskKind.BOOLEAN, terms, fills[0].value)


def _check_additive(term: Term, query: fx.Node, training: bool) -> None:
    mask = tensor_of(term.mask)
    assert mask is not None, term
    if mask.dtype not in (dtype_of(query), torch.float32):
        raise RefusedError(term.mask, f"a mask of dtype {mask.dtype} is added to scores of {dtype_of(query)}")
    if training and mask.requires_grad:
        raise RefusedError(term.mask, "the mask requires a gradient")


def is_causal(term: Term) -> bool:
    """Whether `term` hides exactly the keys after each query, whatever the input; False where that is not known."""
    shape = shape_of(term.mask)
    if len(shape) < 2 or not same(shape[-1], shape[-2]):
        return False
    known = constant_value(term.mask)
    if known is None:
        return term.kind == "fill" and not is_written(_ancestors(term.mask)) and _hides_future(term.mask, term.inverted)
    future = torch.ones(known.shape[-2:], dtype=torch.bool).triu_(1)
    if term.kind == "fill":
        return bool((known == (future != term.inverted)).all())
    if term.sign != 1 or not known.is_floating_point():
        return False
    hidden = (known == -math.inf) | (known == torch.finfo(known.dtype).min)
    return bool(((known == 0) == ~future).all() and (hidden == future).all())


def _hides_future(node: fx.Node, inverted: bool) -> bool:
    """The dynamic spellings: a comparison of `tril(ones(T, T))` or `triu(ones(T, T), 1)`, or one of them as bool."""
    while spelling(node) in ("view", "reshape", "unsqueeze", "to", "bool", "getitem", "expand") and node.args:
        if not _keeps_order(node):
            return False
        assert isinstance(node.args[0], fx.Node), node
        node = node.args[0]
    name = spelling(node)
    if name in ("logical_not", "invert", "__invert__") and isinstance(node.args[0], fx.Node):
        return _hides_future(node.args[0], not inverted)
    if name in ("eq", "ne") and len(node.args) == 2 and node.args[1] in (0, 1) and isinstance(node.args[0], fx.Node):
        flips = (name == "eq") == (node.args[1] == 0)
        return _hides_future(node.args[0], inverted != flips)
    if name not in ("tril", "triu") or not isinstance(node.args[0], fx.Node) or spelling(node.args[0]) != "ones":
        return False
    diagonal = node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0)
    shape = shape_of(node)
    if len(shape) != 2 or not same(shape[0], shape[1]):
        return False
    return (name, diagonal, inverted) in (("triu", 1, False), ("tril", 0, True))


def _keeps_order(node: fx.Node) -> bool:
    """Whether a view only adds axes in front: the last two sizes stay, and every other is 1."""
    source = node.args[0]
    if tensor_of(source) is None or tensor_of(node) is None or not isinstance(source, fx.Node):
        return False
    if spelling(node) == "getitem" and not _takes_leading_part(node.args[1]):
        return False
    before, after = shape_of(source), shape_of(node)
    sizes_stay = len(before) >= 2 and len(after) >= 2 and all(map(same, before[-2:], after[-2:]))
    return sizes_stay and all(same(size, 1) for size in before[:-2])


def _takes_leading_part(index: Any) -> bool:
    """Whether indexing drops axes of size 1, adds some, and cuts the rest at the end only."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        p is None or p is Ellipsis or p == 0 or (isinstance(p, slice) and not p.start and not p.step) for p in parts
    )


def constant_value(node: fx.Node) -> torch.Tensor | None:
    """The value of a node that depends on no input, computed on the CPU; None where it does, or is too large."""
    order = _constant_ancestors(node)
    if order is None:
        return None
    with _disable_current_modes(), torch.no_grad(), torch.device("cpu"):
        values: dict[fx.Node, Any] = {}
        for step in order:
            args, kwargs = fx.map_arg((step.args, step.kwargs), values.__getitem__)
            values[step] = call(step, *on_cpu(args, kwargs))
    result = values[node]
    assert isinstance(result, torch.Tensor), node
    return result


def _constant_ancestors(node: fx.Node) -> list[fx.Node] | None:
    """`node` and all that it is made from, in graph order; None where something is no constant."""
    found = _ancestors(node)
    for step in found:
        value = value_of(step)
        if spelling(step) not in _CONSTANT_OPS or not isinstance(value, torch.Tensor):
            return None
        if not all(isinstance(size, int) for size in value.shape) or value.numel() > _LARGEST_CONSTANT:
            return None
    return None if is_written(found) else sorted(found)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        step = stack.pop()
        if step not in found:
            found.add(step)
            stack += step.all_input_nodes
    return found
