"""From a softmax back to the product of queries and keys: scale, masks and shapes on the way."""
# B batch, N query heads, K key/value heads, T query tokens, S key tokens, H head size, G = B * N

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import fx

from fusewright.fusion.match.attention.contraction import Operand, labels_of
from fusewright.fusion.match.site import Labels, RefusedError, describe_users
from fusewright.fusion.match.sizes import all_same
from fusewright.fusion.match.view import Op, dtype_of, normalize, shape_of, spelling


@dataclass(frozen=True)
class Term:
    """One mask, in the order in which they meet the scores.

    kind "add": `sign * mask` is added. kind "fill": scores become `value` where `mask` is True (False if `inverted`).
    """

    kind: str
    mask: fx.Node
    rank: int
    value: float = 0.0
    inverted: bool = False
    sign: int = 1


@dataclass(frozen=True)
class Scores:
    """What reaches the softmax: terms(scale * q @ k^T).

    q (B,N,T,H), k (B,N,S,H), or (G,T,H), (G,S,H); `heads` is N where a view between 3 and 4 axes tells it.
    `ignored` are operands that do not matter (beta = 0).
    """

    q: Operand
    k: Operand
    product: fx.Node
    scale: float = 1.0
    terms: tuple[Term, ...] = ()
    heads: int | None = None
    ignored: tuple[fx.Node, ...] = ()
    shaped: tuple[tuple[fx.Node, Labels], ...] = ()


LABELS_4: Labels = ("b", "n", "t", "s")
LABELS_3: Labels = ("g", "t", "s")


_FEW = -1e9
"""A fill at or below this hides a score for good, except in float16, which does not reach it."""


def written_softmax(node: fx.Node) -> tuple[Op, tuple[fx.Node, ...]] | None:
    """Read e / e.sum(-1), e = exp(x - x.amax(-1)), as softmax(x, -1), and who reads x in it; None for anything else."""
    op = normalize(node)
    if op is None or op.kind != "div" or len(op.inputs) != 2 or op.inplace:
        return None
    exponential, total = op.inputs
    shifted = normalize(exponential)
    if shifted is None or spelling(exponential) != "exp" or not _reduces(total, "sum", exponential):
        return None
    difference = normalize(shifted.inputs[0])
    if difference is None or difference.kind != "sub" or len(difference.inputs) != 2 or difference.attrs:
        return None
    if shifted.inplace or difference.inplace:
        return None
    x, largest = difference.inputs
    alone = {exponential: {total, node}, total: {node}, difference.node: {exponential}, largest: {difference.node}}
    if not _reduces(largest, "amax", x) or any(set(n.users) != users for n, users in alone.items()):
        return None
    return Op("softmax", node, (x,), {"dim": len(shape_of(x)) - 1}), (difference.node, largest)


def _reduces(node: fx.Node, name: str, source: fx.Node) -> bool:
    """Whether `node` is `name(source, -1, keepdim=True)`."""
    given = {**dict(zip(("input", "dim", "keepdim"), node.args, strict=False)), **node.kwargs}
    axes = given.get("dim", given.get("axis"))
    axes = tuple(axes) if isinstance(axes, list | tuple) else (axes,)
    last = (-1, len(shape_of(source)) - 1)
    known = set(given) <= {"input", "dim", "axis", "keepdim"}
    return bool(
        known and spelling(node) == name and given["input"] is source and given.get("keepdim")
        and len(axes) == 1 and axes[0] in last
    )  # fmt: skip


def scores_of(node: fx.Node, user: fx.Node, also: tuple[fx.Node, ...] = ()) -> Scores:
    """Walk up from `node`, which only `user` and `also` may read, to the product of queries and keys."""
    if any(n is not user and n not in also and not _reads_shape_alone(n, node) for n in node.users):
        raise RefusedError(node, f"the scores are {describe_users(node, user)}")
    op = normalize(node)
    if op is None:
        raise RefusedError(node, f"no product of queries and keys: {node.name} is not understood")
    if op.kind in ("matmul", "einsum", "baddbmm"):
        return _product(op)
    step = _STEPS.get(op.kind)
    if step is None:
        raise RefusedError(node, f"{op.kind} stands between the score product and the softmax")
    return step(op)


def _reads_shape_alone(user: fx.Node, node: fx.Node) -> bool:
    return spelling(user) == "expand_as" and len(user.args) == 2 and user.args[0] is not node


def _unexpanded(mask: fx.Node, like: fx.Node) -> tuple[fx.Node, tuple[tuple[fx.Node, Labels], ...]]:
    """The mask before it was expanded to the scores `like`, and the labels of nodes that spell their shape out."""
    shaped: tuple[tuple[fx.Node, Labels], ...] = ()
    while spelling(mask) in ("expand", "expand_as") and all_same(shape_of(mask), shape_of(like)):
        if spelling(mask) == "expand":
            shaped += ((mask, LABELS_4 if len(shape_of(mask)) == 4 else LABELS_3),)
        source = mask.args[0]
        assert isinstance(source, fx.Node), mask
        mask = source
    return mask, shaped


def _product(op: Op) -> Scores:
    labels = labels_of(op)
    if labels is None:
        raise RefusedError(op.node, "the score product broadcasts its batch axes, or has other than 3 or 4 axes")
    left, right, out = labels
    if len(out) not in (3, 4):
        raise RefusedError(op.node, f"the scores have {len(out)} axes; 3 or 4 are understood")
    summed = [letter for letter in left if letter in right and letter not in out]
    if op.inplace:
        raise RefusedError(op.node, "the score product is written over an operand")
    if len(summed) != 1 or len(left) != len(out) or len(right) != len(out):
        raise RefusedError(op.node, f"the score product {left},{right}->{out} does not sum over one shared axis")
    keys, queries = (right, left) if out[-1] in right else (left, right)
    q_node, k_node = op.inputs[-2:] if keys is right else op.inputs[-2:][::-1]
    if out[-2] not in queries or out[-2] in keys or out[-1] in queries:
        raise RefusedError(op.node, f"the last two axes of the scores {left},{right}->{out} are not (query, key)")
    if any(letter not in queries or letter not in keys for letter in out[:-2]):
        raise RefusedError(op.node, f"a batch axis of the scores {left},{right}->{out} is missing from q or k")
    q_perm = tuple(queries.index(letter) for letter in out[:-1] + summed[0])
    k_perm = tuple(keys.index(letter) for letter in out[:-2] + out[-1] + summed[0])
    return _with_bias(op, Scores(Operand(q_node, q_perm), Operand(k_node, k_perm), op.node))


def _with_bias(op: Op, scores: Scores) -> Scores:
    if op.kind != "baddbmm":
        return scores
    scores = replace(scores, scale=op.attrs["alpha"])
    if op.attrs["beta"] == 0:
        return replace(scores, ignored=(op.inputs[0],))
    if op.attrs["beta"] != 1:
        raise RefusedError(op.node, f"baddbmm scales its bias by {op.attrs['beta']}")
    return replace(scores, terms=(Term("add", op.inputs[0], 3),))


def _scaled(op: Op) -> Scores:
    scalar = op.attrs.get("scalar")
    if scalar is None:
        raise RefusedError(op.node, "the scores are scaled by a tensor, not by a constant")
    inner = scores_of(op.inputs[0], op.node)
    if inner.terms:
        raise RefusedError(op.node, "the scale is applied after the mask")
    if op.kind == "div" and (op.attrs["reversed"] or scalar == 0):
        raise RefusedError(op.node, "the scores divide a constant, or are divided by 0")
    return replace(inner, scale=inner.scale * (scalar if op.kind == "mul" else 1.0 / scalar))


def _added(op: Op) -> Scores:
    if "scalar" in op.attrs:
        raise RefusedError(op.node, f"the constant {op.attrs['scalar']} is added to the scores")
    left, right = op.inputs
    refusal: RefusedError | None = None
    for scores_node, mask in ((left, right), (right, left))[: 1 if op.kind == "sub" or op.inplace else 2]:
        if scores_node is mask or not all_same(shape_of(scores_node), shape_of(op.node)):
            continue
        try:
            inner = scores_of(scores_node, op.node)
        except RefusedError as error:
            refusal = refusal or error
            continue
        mask, shaped = _unexpanded(mask, op.node)
        term = Term("add", mask, len(shape_of(op.node)), sign=-1 if op.kind == "sub" else 1)
        return replace(inner, terms=(*inner.terms, term), shaped=(*inner.shaped, *shaped))
    raise refusal or RefusedError(op.node, "no operand of the sum has the shape of the scores")


def _filled(op: Op) -> Scores:
    scores_node, mask = op.inputs
    if op.attrs["value"] is None:
        raise RefusedError(op.node, "the fill value is not a constant")
    if not all_same(shape_of(scores_node), shape_of(op.node)):
        raise RefusedError(op.node, "the boolean mask is larger than the scores")
    inner = scores_of(scores_node, op.node)
    value, dtype = float(op.attrs["value"]), dtype_of(scores_node)
    lowest = torch.finfo(dtype).min if dtype.is_floating_point else -math.inf
    if value > max(lowest, _FEW) or math.isnan(value):
        raise RefusedError(op.node, f"the fill value {value:g} does not hide a score of {dtype} for good")
    if dtype_of(mask) != torch.bool:
        raise RefusedError(op.node, f"the mask of the fill has dtype {dtype_of(mask)}, not bool")
    mask, shaped = _unexpanded(mask, op.node)
    term = Term("fill", mask, len(shape_of(op.node)), value, bool(op.attrs.get("inverted", False)))
    return replace(inner, terms=(*inner.terms, term), shaped=(*inner.shaped, *shaped))


def _cast(op: Op) -> Scores:
    before, after = dtype_of(op.inputs[0]), op.attrs["dtype"]
    if not after.is_floating_point or torch.promote_types(before, after) != after:
        raise RefusedError(op.node, f"the scores are cast from {before} to {after}")
    return scores_of(op.inputs[0], op.node)


def _copied(op: Op) -> Scores:
    return scores_of(op.inputs[0], op.node)


def _viewed(op: Op) -> Scores:
    """A view that only splits or merges batch and heads: (G,T,S) to (B,N,T,S) or back."""
    before, after = shape_of(op.inputs[0]), shape_of(op.node)
    if dtype_of(op.inputs[0]) != dtype_of(op.node):
        raise RefusedError(op.node, "the scores are reinterpreted as another dtype")
    inner = scores_of(op.inputs[0], op.node)
    if all_same(before, after):
        return inner
    if {len(before), len(after)} != {3, 4} or not all_same(before[-2:], after[-2:]):
        raise RefusedError(op.node, f"a view regroups the scores: {tuple(before)} to {tuple(after)}")
    four = after if len(after) == 4 else before
    heads = four[1]
    if not isinstance(heads, int) or (inner.heads is not None and inner.heads != heads):
        raise RefusedError(op.node, f"a view splits the scores into {heads} heads")
    labels = LABELS_4 if len(after) == 4 else LABELS_3
    return replace(inner, heads=heads, shaped=(*inner.shaped, (op.node, labels)))


_STEPS = {
    "mul": _scaled,
    "div": _scaled,
    "add": _added,
    "sub": _added,
    "masked_fill": _filled,
    "cast": _cast,
    "copy": _copied,
    "view": _viewed,
}
