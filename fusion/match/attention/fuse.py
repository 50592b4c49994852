"""The pass that recognises written-out attention by data flow and puts the fused operator in its place."""
# B batch, N query heads, K key/value heads, T query tokens, S key tokens, H head size, G = B * N

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fusewright.config import Numerics
from fusewright.fusion.match import layout, proof, site, sizes, view, writes
from fusewright.fusion.match.attention import build, contraction, masks, scores
from fusewright.fusion.match.attention.contraction import Operand
from fusewright.fusion.match.attention.masks import MaskKind, MaskPlan
from fusewright.fusion.match.attention.scores import Scores, Term
from fusewright.fusion.match.site import Labels, RefusedError, Site
from fusewright.fusion.ops import attention as attention_op
from fusewright.fusion.ops import attention_cost, attention_exact, attention_extents
from fusewright.passes.base import Pass, PassContext, Stage, tensor_of

_FEW_KEYS = 128  # below, leaving out hidden keys saves less than finding them costs


@dataclass(frozen=True)
class Core:
    """A recognised softmax(terms(scale * q @ k^T)) @ v.

    Attributes:
        scores: how the softmax's input is made.
        v: the values; canonical order (B,N,S,H) or (G,S,H).
        out_perm: axis i of the output is axis `out_perm[i]` of the canonical (B,N,T,H) or (G,T,H).
        output: the node of the last product.
        heads: N where a view somewhere between the products splits G, else None.
        shaped: nodes that spell out a shape, with the labels of their axes.
    """

    scores: Scores
    v: Operand
    out_perm: tuple[int, ...]
    output: fx.Node
    heads: int | None
    shaped: dict[fx.Node, Labels]


def recognise(softmax: view.Op, readers: tuple[fx.Node, ...] = ()) -> Core:
    """Read the attention around `softmax`, of which `readers` are the nodes beside `softmax.node` that read its input.

    Raises:
        RefusedError: with the first node that differs from attention, and how.
    """
    node, rank = softmax.node, view.rank_of(softmax.node)
    if rank not in (3, 4):
        raise RefusedError(node, f"the softmax has {rank} axes; 3 or 4 are understood")
    if softmax.attrs["dim"] != rank - 1:
        raise RefusedError(node, f"the softmax is over axis {softmax.attrs['dim']}, not over the last, {rank - 1}")
    found = scores.scores_of(softmax.inputs[0], node, readers)
    shaped = dict(found.shaped)
    heads, probabilities, product = _to_values(node, found.heads, shaped)
    return _with_values(found, product, probabilities, heads, shaped)


def _to_values(node: fx.Node, heads: int | None, shaped: dict[fx.Node, Labels]) -> tuple[int | None, fx.Node, view.Op]:
    """Walk from the softmax down to the product with v, through what does not change the probabilities."""
    while True:
        if len(node.users) != 1:
            raise RefusedError(node, f"the probabilities are {site.describe_users(node)}")
        below = next(iter(node.users))
        op = view.normalize(below)
        if op is None:
            reason = "returned by the model" if below.op == "output" else f"used by {below.name}, not multiplied by v"
            raise RefusedError(below, f"the probabilities are {reason}")
        if op.kind in ("matmul", "einsum"):
            return heads, node, op
        if op.kind == "dropout":
            if op.attrs["training"] is not False and op.attrs["p"] != 0:
                raise RefusedError(below, f"dropout with p={op.attrs['p']} acts on the probabilities")
        elif op.kind == "cast":
            if not op.attrs["dtype"].is_floating_point:
                raise RefusedError(below, f"the probabilities are cast to {op.attrs['dtype']}")
        elif op.kind == "view":
            heads = _split(node, below, heads, shaped)
        elif op.kind != "copy":
            raise RefusedError(below, f"{op.kind} stands between the softmax and the product with v")
        node = below


def _split(node: fx.Node, below: fx.Node, heads: int | None, shaped: dict[fx.Node, Labels]) -> int | None:
    """A view of the probabilities: only batch and heads may be split or merged."""
    before, after = view.shape_of(node), view.shape_of(below)
    if view.dtype_of(node) != view.dtype_of(below):
        raise RefusedError(below, "the probabilities are reinterpreted as another dtype")
    if sizes.all_same(before, after):
        shaped[below] = scores.LABELS_4 if len(after) == 4 else scores.LABELS_3
        return heads
    if {len(before), len(after)} != {3, 4} or not sizes.all_same(before[-2:], after[-2:]):
        raise RefusedError(below, f"a view regroups the probabilities: {tuple(before)} to {tuple(after)}")
    split = (after if len(after) == 4 else before)[1]
    if not isinstance(split, int) or heads not in (None, split):
        raise RefusedError(below, f"a view splits the probabilities into {split} heads")
    shaped[below] = scores.LABELS_4 if len(after) == 4 else scores.LABELS_3
    return split


def _with_values(
    found: Scores, product: view.Op, probabilities: fx.Node, heads: int | None, shaped: dict[fx.Node, Labels]
) -> Core:
    labels = contraction.labels_of(product)
    if labels is None:
        raise RefusedError(product.node, "the product with v broadcasts its batch axes, or has other than 3 or 4 axes")
    left, right, out = labels
    if product.inputs[0] is product.inputs[1]:
        raise RefusedError(product.node, "the probabilities are multiplied by themselves")
    rows, values = (left, right) if product.inputs[0] is probabilities else (right, left)
    v_node = product.inputs[1] if product.inputs[0] is probabilities else product.inputs[0]
    summed = [letter for letter in rows if letter in values and letter not in out]
    own = [letter for letter in values if letter not in rows]
    if summed != [rows[-1]] or len(own) != 1 or len(values) != len(rows):
        raise RefusedError(product.node, f"the product {left},{right}->{out} does not sum the probabilities over keys")
    if rows[-2] in values or sorted(out) != sorted(rows[:-1] + own[0]):
        raise RefusedError(product.node, f"the product {left},{right}->{out} mixes query and key axes of v")
    v_perm = tuple(values.index(letter) for letter in rows[:-2] + rows[-1] + own[0])
    canonical = rows[:-1] + own[0]
    out_perm = tuple(canonical.index(letter) for letter in out)
    return Core(found, Operand(v_node, v_perm), out_perm, product.node, heads, shaped)


@dataclass(frozen=True)
class _Operands:
    """The three operands looked through: scale of q and k taken out, repeated heads undone."""

    q: Operand
    k: Operand
    v: Operand
    scale: float
    groups: int
    shaped: dict[fx.Node, Labels]


def _look_through(core: Core) -> _Operands:
    q, q_scale = contraction.peel(core.scores.q, scale=True)
    k, k_scale = contraction.peel(core.scores.k, scale=True)
    v, _ = contraction.peel(core.v, scale=False)
    if k.base is q.base and k.perm != q.perm:
        k, k_scale = core.scores.k, 1.0
    if v.base in (q.base, k.base) and v.perm != (q if v.base is q.base else k).perm:
        v = core.v
    shaped, groups = dict(core.shaped), 1
    if len(k.perm) == 4 and len(v.perm) == 4:
        (few_k, shaped_k, repeats_k), (few_v, shaped_v, repeats_v) = contraction.ungroup(k), contraction.ungroup(v)
        if repeats_k == repeats_v > 1:
            k, v, groups = few_k, few_v, repeats_k
            shaped |= shaped_k | shaped_v
        elif _heads(k) == _heads(v) == 1 and isinstance(_heads(q), int):  # one for all, by broadcasting
            groups = _heads(q)  # type: ignore[assignment]
    return _Operands(q, k, v, core.scores.scale * q_scale * k_scale, groups, shaped)


def _heads(operand: Operand) -> int | torch.SymInt:
    return view.shape_of(operand.base)[operand.perm[1]]


def _canonical(operand: Operand) -> tuple[int | torch.SymInt, ...]:
    shape = view.shape_of(operand.base)
    return tuple(shape[axis] for axis in operand.perm)


def _names(operand: Operand, head: str, tokens: str) -> Labels:
    front: Labels = ("b", head) if len(operand.perm) == 4 else ("g",)
    return contraction.placed(operand.perm, (*front, tokens, "h"))


def _check(core: Core, parts: _Operands) -> torch.dtype:
    """Dtypes, devices and sizes that the operator needs; returns the dtype that attention runs in."""
    bases = [parts.q.base, parts.k.base, parts.v.base]
    dtype = view.dtype_of(core.scores.product)
    if dtype not in attention_op.DTYPES or view.dtype_of(core.output) != dtype:
        raise RefusedError(core.output, f"the product is {view.dtype_of(core.output)}, the scores {dtype}")
    devices = {tensor_of(b).device for b in bases}  # type: ignore[union-attr]
    if len(devices) > 1:
        raise RefusedError(core.output, f"q, k and v are on several devices: {devices}")
    if not (math.isfinite(parts.scale) and parts.scale > 0):
        raise RefusedError(core.scores.product, f"the scale {parts.scale} is not a positive number")
    q, k, v = _canonical(parts.q), _canonical(parts.k), _canonical(parts.v)
    if not sizes.same(q[-1], v[-1]):
        raise RefusedError(core.output, f"v has head size {v[-1]}, q has {q[-1]}")
    if not sizes.same(k[-2], v[-2]):
        raise RefusedError(core.output, f"k has {k[-2]} tokens, v has {v[-2]}")
    if len(q) == 4 and not (isinstance(q[1], int) and isinstance(k[1], int)):
        raise RefusedError(core.output, "the number of heads is dynamic")
    for name, x in (("k", k), ("v", v)):
        heads = [q[0]] if len(q) == 3 else [q[0], q[1] // parts.groups]
        if len(x) == len(q) and not sizes.all_same(x[:-2], heads):
            raise RefusedError(core.output, f"{name} broadcasts its batch or head axes to those of q")
    return dtype


def _head_axis(operand: Operand, heads: int | None) -> int | None:
    return None if len(operand.perm) == 4 else (heads or 0)


def _plan(core: Core, causal: dict[Term, bool], training: bool) -> tuple[Site, build.Plan]:
    parts = _look_through(core)
    dtype = _check(core, parts)
    tokens, keys = _canonical(parts.q)[-2], _canonical(parts.k)[-2]
    square = sizes.same(tokens, keys)
    plan = masks.plan_masks(core.scores.terms, core.scores.product, causal, square=square, training=training)
    cast = {x.base: None if view.dtype_of(x.base) == dtype else dtype for x in (parts.q, parts.k, parts.v)}
    q, k, v = (build.Layout(x.perm, _head_axis(x, core.heads), cast[x.base]) for x in (parts.q, parts.k, parts.v))
    terms, labels = _mask_terms(core, plan)
    out_rank = len(core.out_perm)
    replacement = build.Plan(
        q, k, v, parts.groups, core.out_perm,
        None if out_rank == 4 else (core.heads or 0), parts.scale, plan.kind, terms, plan.value, dtype, training,
        len(core.scores.ignored), _pays_extents(core, plan, labels),
    )  # fmt: skip
    labels |= parts.shaped
    few = "k" if parts.groups > 1 else "n"
    named = _operand_labels(parts, few, core.output)
    return _site(core, parts, plan, {**labels, **named}, square, any(cast.values())), replacement


def _pays_extents(core: Core, plan: MaskPlan, labels: dict[fx.Node, Labels]) -> bool:
    """Whether the kernel is told which keys the mask hides: on the CPU, where it names keys, and there are many."""
    if plan.kind in (MaskKind.NONE, MaskKind.CAUSAL):
        return False
    output, keys = tensor_of(core.output), view.shape_of(core.scores.product)[-1]
    assert output is not None, core
    names_keys = any(labels[term.mask][-1:] == ("s",) for term in plan.terms)
    return output.device.type == "cpu" and names_keys and not (isinstance(keys, int) and keys < _FEW_KEYS)


def _operand_labels(parts: _Operands, few: str, output: fx.Node) -> dict[fx.Node, Labels]:
    named: dict[fx.Node, Labels] = {}
    perms: dict[fx.Node, tuple[int, ...]] = {}
    for operand, head, tokens in ((parts.q, "n", "t"), (parts.k, few, "s"), (parts.v, few, "s")):
        if perms.setdefault(operand.base, operand.perm) != operand.perm:
            raise RefusedError(output, f"{operand.base.name} is used as two operands in two layouts")
        named[operand.base] = _names(operand, head, tokens)
    return named


def _mask_terms(core: Core, plan: MaskPlan) -> tuple[tuple[build.TermPlan, ...], dict[fx.Node, Labels]]:
    labels: dict[fx.Node, Labels] = {}
    terms = []
    for term in plan.terms:
        full = _scores_shape(core, term.rank)
        names = scores.LABELS_4 if term.rank == 4 else scores.LABELS_3
        found = site.broadcast_labels(term.mask, full, names)
        if found is None:
            raise RefusedError(term.mask, f"a mask of shape {tuple(view.shape_of(term.mask))} for scores {tuple(full)}")
        labels[term.mask] = found
        heads = None if term.rank == 4 or len(found) < 3 else core.heads if found[0] == "g" and core.heads else 0
        terms.append(build.TermPlan(term.kind == "fill", heads, term.sign, term.inverted))
    for node in core.scores.ignored:
        labels[node] = _ignored_labels(node, core)
    return tuple(terms), labels


def _ignored_labels(node: fx.Node, core: Core) -> Labels:
    """Labels of an operand that is multiplied by 0; in eager its gradient is 0, in the replacement there is none."""
    found = site.broadcast_labels(node, _scores_shape(core, 3), scores.LABELS_3)
    value = tensor_of(node)
    if found is None or value is None or value.requires_grad:
        raise RefusedError(node, "the operand that baddbmm multiplies by 0 needs a gradient, or its shape is unusual")
    return found


def _scores_shape(core: Core, rank: int) -> tuple[int | torch.SymInt, ...]:
    shape = tuple(view.shape_of(core.scores.product))
    if len(shape) == rank:
        return shape
    assert core.heads is not None, core
    return (shape[0] // core.heads, core.heads, *shape[1:]) if rank == 4 else (shape[0] * shape[1], *shape[2:])


def _site(
    core: Core, parts: _Operands, plan: MaskPlan, labels: dict[fx.Node, Labels], square: bool, autocast: bool
) -> Site:
    """The nodes and the small sizes of the proof: heads as they are, everything else as small as it can be."""
    heads = core.heads or (_canonical(parts.q)[1] if len(parts.q.perm) == 4 else 1)
    assert isinstance(heads, int), heads
    tokens = 6
    dims = {"b": 2, "n": heads, "k": heads // parts.groups, "r": parts.groups, "t": tokens, "h": 8, "g": 2 * heads}
    dims["s"] = tokens if square else 7
    dtype = view.dtype_of(core.scores.product)
    causal = {t.mask: t.inverted for t in plan.terms} if plan.kind is MaskKind.CAUSAL else {}
    return Site(
        output=core.output,
        inputs=(parts.q.base, parts.k.base, parts.v.base, *(t.mask for t in plan.terms), *core.scores.ignored),
        labels=labels,
        sizes=dims,
        autocast=dtype if autocast else None,
        masks={t.mask: t.sign for t in plan.terms} | dict.fromkeys(core.scores.ignored, 1),
        causal=causal,
    )


def _unpaid(core: Core, plan: build.Plan, ctx: PassContext) -> str | None:
    """Why the rewrite would not pay at the sizes of this bucket; None also where a size is not known."""
    product = core.scores.product
    shape = [ctx.size(size) for size in view.shape_of(product)]
    value = tensor_of(product)
    if value is None or None in shape:
        return None
    return attention_cost.why_not(
        value.device.type,
        scores=math.prod(size for size in shape if size is not None),
        keys=shape[-1] or 0,
        itemsize=plan.dtype.itemsize,
        masked=plan.mask not in (MaskKind.NONE, MaskKind.CAUSAL),
        training=ctx.training,
    )


@dataclass(frozen=True)
class _Known:
    """What one run found out about masks, which layers share: those that are causal; nodes made of masks alone."""

    causal: dict[Term, bool]
    of_masks: dict[str, fx.Node]


class FuseAttention(Pass):
    """softmax(scale * q @ k^T + mask) @ v, however it is spelled, becomes `fusewright::attention`.

    Every axis, permutation and constant is checked, and each distinct place is proven on random inputs before the
    graph is touched. `torch.nn.functional.scaled_dot_product_attention` is counted and left alone.
    """

    name: ClassVar[str] = "fuse_attention"
    stage: ClassVar[Stage] = Stage.FORWARD
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    requires: ClassVar[tuple[str, ...]] = ()

    def digest_sources(self) -> Sequence[object]:
        return (
            attention_cost,
            attention_exact,
            attention_extents,
            attention_op,
            build,
            contraction,
            layout,
            masks,
            proof,
            scores,
            site,
            sizes,
            view,
            writes,
        )

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        rewrites, known = 0, _Known({}, {})
        for node in list(gm.graph.nodes):
            op = view.normalize(node)
            if op is not None and op.kind == "sdpa":
                ctx.recognise("sdpa")
            written = (op, ()) if op is not None and op.kind == "softmax" else scores.written_softmax(node)
            if written is None:
                continue
            try:
                core = recognise(*written)
                ctx.recognise("attention")
                rewrites += self._rewrite(gm, core, known, ctx)
            except RefusedError as refusal:
                ctx.declined(refusal.node, refusal.reason)
        if rewrites:
            gm.recompile()
        return rewrites

    def _rewrite(self, gm: fx.GraphModule, core: Core, known: _Known, ctx: PassContext) -> bool:
        place, plan = _plan(core, known.causal, ctx.training)
        writer = writes.written_between(place.nodes, place.inputs)
        if writer is not None:
            raise RefusedError(core.output, f"{writer} writes to a tensor before the product with v")
        unpaid = _unpaid(core, plan, ctx) if ctx.priced else None
        if unpaid is not None:
            raise RefusedError(core.output, unpaid)
        replacement = build.build(plan)
        proof.demand(place, replacement, training=ctx.training)
        if not ctx.allow(core.output):
            return False
        result = layout.keep_strides(site.splice(gm, place, replacement, known.of_masks), core.output)
        core.output.replace_all_uses_with(result)
        site.erase(gm, place.nodes)
        return True
