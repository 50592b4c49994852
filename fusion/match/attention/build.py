"""The graph that replaces a matched attention: views to the operator's layout, its mask, the call, views back."""
# B batch, N query heads, K key/value heads, T query tokens, S key tokens, H head size

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import torch
from torch import fx

from fusewright.fusion.match.attention.masks import MaskKind
from fusewright.fusion.ops import attention as _registers_the_operator  # noqa: F401


@dataclass(frozen=True)
class Layout:
    """How a tensor gets from its base to the operator's four axes: permute, split or add the head axis, cast.

    `heads`: None (it has a head axis), 0 (one is added, of size 1), or N (the first axis, B * N, is split).
    """

    perm: tuple[int, ...]
    heads: int | None
    dtype: torch.dtype | None


@dataclass(frozen=True)
class TermPlan:
    """One mask: additive with a sign, or a boolean `fill` that keeps (`inverted`) or hides.

    `heads`: as in `Layout`; None also for a mask of less than three axes.
    """

    fill: bool
    heads: int | None
    sign: int
    inverted: bool


@dataclass(frozen=True)
class Plan:
    """All that a replacement depends on, so that equal plans give equal graphs."""

    q: Layout
    k: Layout
    v: Layout
    groups: int
    out_perm: tuple[int, ...]
    out_heads: int | None
    scale: float
    mask: MaskKind
    terms: tuple[TermPlan, ...]
    fill: float
    dtype: torch.dtype
    training: bool
    ignored: int
    extents: bool


def build(plan: Plan) -> fx.GraphModule:
    """A graph with placeholders q, k, v, the masks, and operands of the original that do not matter."""
    graph = fx.Graph()
    q_base, k_base, v_base = (graph.placeholder(name) for name in "qkv")
    masks = [graph.placeholder(f"mask{i}") for i in range(len(plan.terms))]
    for i in range(plan.ignored):
        graph.placeholder(f"ignored{i}")
    q, k, v = _laid_out(q_base, plan.q), _laid_out(k_base, plan.k), _laid_out(v_base, plan.v)
    call = torch.ops.fusewright.attention.default
    dead = mask = None
    if plan.mask is MaskKind.ADDITIVE:
        mask = _folded(plan, masks)
    elif plan.mask in (MaskKind.BOOLEAN, MaskKind.MIXED):
        kept = _kept(plan, masks)
        mask = kept if plan.mask is MaskKind.BOOLEAN else _folded(plan, masks)
        if plan.training or plan.fill != -math.inf:
            dead = _method("logical_not", _method("any", kept, -1, keepdim=True))
            if plan.fill != -math.inf:
                # Every score of a hidden row is the fill: the plain average of v, and no gradient to q and k.
                q = _method("masked_fill", q, dead, 0.0)
            if plan.mask is MaskKind.BOOLEAN:
                mask = _method("logical_or", kept, dead)
    if plan.extents and plan.mask is MaskKind.BOOLEAN:
        mask = _hiding(
            plan, _kept(plan, masks) if mask is None else mask
        )  # here layers share it; the CPU kernel would make it anew in each
    extents = graph.call_function(torch.ops.fusewright.attention_extents.default, (mask,)) if plan.extents else None
    result = graph.call_function(call, (q, k, v, mask, extents, plan.mask is MaskKind.CAUSAL, plan.scale))
    out = graph.call_function(operator.getitem, (result, 0))
    if dead is not None and plan.fill == -math.inf:
        out = _poisoned(plan, out, v, dead)
    graph.output(_taken_back(plan, out))
    return fx.GraphModule(torch.nn.Module(), graph)


def _method(name: str, node: fx.Node, *args: object, **kwargs: object) -> fx.Node:
    return node.graph.call_method(name, (node, *args), kwargs)  # type: ignore[arg-type]


def _laid_out(node: fx.Node, layout: Layout) -> fx.Node:
    if layout.perm != tuple(range(len(layout.perm))):
        node = _method("permute", node, *layout.perm)
    if layout.heads == 0:
        node = _method("unsqueeze", node, 1)
    elif layout.heads is not None:
        node = _method("unflatten", node, 0, (-1, layout.heads))
    return node if layout.dtype is None else _method("to", node, layout.dtype)


def _taken_back(plan: Plan, out: fx.Node) -> fx.Node:
    if plan.out_heads == 0:
        out = _method("squeeze", out, 1)
    elif plan.out_heads is not None:
        out = _method("flatten", out, 0, 1)
    if plan.out_perm != tuple(range(len(plan.out_perm))):
        out = _method("permute", out, *plan.out_perm)
    return out


def _four_axes(term: TermPlan, mask: fx.Node) -> fx.Node:
    """A mask for scores (G,T,S) that were given a head axis, or split into heads, is made alike."""
    if term.heads is None:
        return mask
    return _method("unsqueeze", mask, 1) if term.heads == 0 else _method("unflatten", mask, 0, (-1, term.heads))


def _kept(plan: Plan, masks: list[fx.Node]) -> fx.Node:
    """Where no fill hides a score."""
    kept: fx.Node | None = None
    for term, node in zip(plan.terms, masks, strict=True):
        if term.fill:
            mask = _four_axes(term, node)
            mask = mask if term.inverted else _method("logical_not", mask)
            kept = mask if kept is None else _method("logical_and", kept, mask)
    assert kept is not None, plan
    return kept


def _hiding(plan: Plan, kept: fx.Node) -> fx.Node:
    """The additive mask of a boolean one: 0 or -inf."""
    nothing = kept.graph.call_function(torch.zeros_like, (kept,), {"dtype": plan.dtype})
    return _method("masked_fill", nothing, _method("logical_not", kept), -math.inf)


def _folded(plan: Plan, masks: list[fx.Node]) -> fx.Node:
    """Sums and fills in their order as one additive mask; where eager overwrites the score, it absorbs it."""
    total: fx.Node | None = None
    for term, node in zip(plan.terms, masks, strict=True):
        mask = _four_axes(term, node)
        if not term.fill:
            mask = _method("neg", mask) if term.sign < 0 else mask
            total = mask if total is None else _method("add", total, mask)
            continue
        if total is None:
            total = node.graph.call_function(torch.zeros_like, (mask,), {"dtype": plan.dtype})
        total = _method("masked_fill", total, _method("logical_not", mask) if term.inverted else mask, plan.fill)
    assert total is not None, plan
    return total


def _poisoned(plan: Plan, out: fx.Node, v: fx.Node, dead: fx.Node) -> fx.Node:
    """NaN where a row had no key, as 0 / 0 gives it, with the gradient that it sends to v and to v alone."""
    graph = out.graph
    nothing = graph.call_function(torch.zeros_like, (dead,), {"dtype": plan.dtype})
    nan = _method("masked_fill", nothing, dead, math.nan)
    total = _method("sum", v, -2, keepdim=True, dtype=plan.dtype)  # autocast would widen it
    if plan.groups > 1:
        total = _method("repeat_interleave", total, plan.groups, dim=1)
    return graph.call_function(torch.where, (dead, graph.call_function(torch.mul, (nan, total)), out))
