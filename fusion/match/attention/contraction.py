"""Products of two tensors with named axes, and the views, scales and repetitions behind their operands."""
# B batch, N query heads, K key/value heads, S key tokens, H head size

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fusewright.fusion.match.site import Labels
from fusewright.fusion.match.sizes import all_same, same
from fusewright.fusion.match.view import Op, dtype_of, normalize, rank_of, shape_of


@dataclass(frozen=True)
class Operand:
    """One factor of a contraction: canonical axis i is axis `perm[i]` of `base`."""

    base: fx.Node
    perm: tuple[int, ...]


def labels_of(op: Op) -> tuple[str, str, str] | None:
    """Axis letters of both operands and the result of a product; None where batch axes would be broadcast."""
    if op.kind == "einsum":
        labels: tuple[str, str, str] = op.attrs["labels"]
        return labels
    left, right = op.inputs[-2:]
    rank = rank_of(left)
    if rank != rank_of(right) or rank not in (3, 4):
        return None
    batch = "xy"[: rank - 2]
    return f"{batch}ih", f"{batch}hj", f"{batch}ij"


def peel(operand: Operand, *, scale: bool) -> tuple[Operand, float]:
    """Look through transposes (and, if `scale`, products with constants) to the tensor that they are made from."""
    node, perm, factor = operand.base, operand.perm, 1.0
    while (op := normalize(node)) is not None and not op.inplace:
        if op.kind == "permute":
            perm = tuple(op.attrs["perm"][axis] for axis in perm)
        elif scale and op.kind in ("mul", "div") and op.attrs.get("scalar") and not op.attrs["reversed"]:
            if dtype_of(op.inputs[0]) != dtype_of(node):
                break
            factor *= op.attrs["scalar"] if op.kind == "mul" else 1.0 / op.attrs["scalar"]
        else:
            break
        node = op.inputs[0]
    return Operand(node, perm), factor


def ungroup(operand: Operand) -> tuple[Operand, dict[fx.Node, Labels], int]:
    """Undo a repetition of key or value heads: (B,K,S,H) repeated to (B,N,S,H), query head n reading head n // (N/K).

    Returns the operand before the repetition, the labels of the nodes that spell out shapes, and N / K (1: none found).
    """
    node, axis = operand.base, operand.perm[1]
    op = normalize(node)
    names = placed(operand.perm, ("b", "n", "s", "h"))
    if op is None or op.inplace:
        return operand, {}, 1
    if op.kind == "repeat_interleave" and op.attrs["dim"] == axis:
        return peel(Operand(op.inputs[0], operand.perm), scale=False)[0], {}, op.attrs["repeats"]
    expanded = normalize(op.inputs[0]) if op.kind == "view" else None
    unsqueezed = normalize(expanded.inputs[0]) if expanded is not None and expanded.kind == "expand" else None
    if expanded is None or unsqueezed is None or unsqueezed.kind != "view":
        return operand, {}, 1
    base = unsqueezed.inputs[0]
    whole, five, one, before = (shape_of(x) for x in (node, expanded.node, unsqueezed.node, base))
    if len(five) != 5 or len(one) != 5 or len(before) != 4 or len({dtype_of(x) for x in (node, base)}) != 1:
        return operand, {}, 1
    groups = five[axis + 1]
    rest = (*range(axis), *range(axis + 1, 4))
    repeats = (
        isinstance(groups, int)
        and all_same([before[a] for a in rest], [whole[a] for a in rest])
        and same(before[axis] * groups, whole[axis])
        and all_same((*before[: axis + 1], groups, *before[axis + 1 :]), five)
        and all_same((*before[: axis + 1], 1, *before[axis + 1 :]), one)
    )
    if not repeats:
        return operand, {}, 1
    shaped: dict[fx.Node, Labels] = {
        node: names,
        expanded.node: (*names[:axis], "k", "r", *names[axis + 1 :]),
        unsqueezed.node: (*names[:axis], "k", 1, *names[axis + 1 :]),
    }
    return peel(Operand(base, operand.perm), scale=False)[0], shaped, groups


def placed(perm: tuple[int, ...], canonical: Labels) -> Labels:
    """Labels of the axes of a base whose axis perm[i] is canonical axis i."""
    out: list[str | int] = [""] * len(perm)
    for name, axis in zip(canonical, perm, strict=True):
        out[axis] = name
    return tuple(out)
