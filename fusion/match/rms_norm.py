"""The pass that recognises RMS normalization in its usual spellings and puts the fused operator in its place."""
# H size of the last axis

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fusewright.capture.shapes import ShapeBucket
from fusewright.config import Numerics
from fusewright.fusion.match import layout, proof, site, sizes, view, writes
from fusewright.fusion.match.site import RefusedError, Site
from fusewright.fusion.match.view import Op, normalize
from fusewright.fusion.ops import rms_norm as rms_norm_op
from fusewright.passes.base import Pass, PassContext, Stage, tensor_of


@dataclass(frozen=True)
class Norm:
    """x / sqrt(mean(x^2, -1) + eps) * weight, ending at `output`; x (..., H), weight (H,) or None."""

    x: fx.Node
    weight: fx.Node | None
    eps: float
    output: fx.Node


def is_anchor(op: Op | None) -> bool:
    """Whether `op` is where a normalization shows: the inverse root, or the whole of it."""
    if op is None:
        return False
    if op.kind in ("rsqrt", "rms_norm") or (op.kind == "pow" and op.attrs["exponent"] == -0.5):
        return True
    below = [normalize(user) for user in op.node.users]
    return op.kind == "sqrt" and any(b is not None and b.kind == "div" and b.inputs[-1] is op.node for b in below)


def recognise(op: Op) -> Norm:
    """Read the normalization around the anchor `op`.

    Raises:
        RefusedError: with the first node that differs from a normalization, and how.
    """
    if op.kind == "rms_norm":
        return _library_call(op)
    wide, eps = _mean_square(op)
    x = _narrow(wide)
    normalized = _sole_user(op.node, "the inverse root")
    product = normalize(normalized)
    wanted = "div" if op.kind == "sqrt" else "mul"
    if product is None or product.kind != wanted or len(product.inputs) != 2 or product.inplace:
        raise RefusedError(normalized, f"the inverse root goes into {view.spelling(normalized)}, not to x")
    other = product.inputs[0] if product.inputs[1] is op.node else product.inputs[1]
    if other not in (wide, x) or (wanted == "div" and product.inputs[0] is op.node):
        raise RefusedError(normalized, f"{other.name} is scaled, but the mean is taken of {wide.name}")
    output, weight = _scaled(normalized, x)
    return Norm(x, weight, eps, output)


def _library_call(op: Op) -> Norm:
    x, weight, eps = op.inputs[0], op.attrs["weight"], op.attrs["eps"]
    shape = view.shape_of(x)
    if len(op.attrs["shape"]) != 1 or len(shape) == 0:
        raise RefusedError(op.node, f"normalizes over {len(op.attrs['shape'])} axes")
    if eps is None:
        # Half precision computes in float32, and torch takes the epsilon of what it computes in.
        wide = torch.promote_types(view.dtype_of(x), torch.float32)
        eps = torch.finfo(wide).eps
    if not isinstance(eps, float | int) or (weight is not None and tensor_of(weight) is None):
        raise RefusedError(op.node, "epsilon or weight is not understood")
    return Norm(x, weight, float(eps), op.node)


def _mean_square(op: Op) -> tuple[fx.Node, float]:
    """From the inverse root up to the tensor whose mean square is taken, and epsilon."""
    added = normalize(_sole_input(op))
    if added is None or added.kind != "add" or "scalar" not in added.attrs:
        raise RefusedError(op.node, "no constant epsilon is added under the root")
    mean = normalize(_sole_input(added))
    if mean is None or mean.kind != "mean":
        raise RefusedError(added.node, "the root is not taken of a mean")
    rank = view.rank_of(mean.inputs[0])
    if rank is None or mean.attrs["dims"] != (rank - 1,) or not mean.attrs["keepdim"]:
        raise RefusedError(mean.node, f"the mean is over {mean.attrs['dims']}, not over the last axis, kept")
    square = normalize(_sole_input(mean))
    is_power = square is not None and square.kind == "pow" and square.attrs["exponent"] == 2.0
    is_product = square is not None and square.kind == "mul" and square.inputs == square.inputs[:1] * 2
    if square is None or not (is_power or is_product) or square.inplace:
        raise RefusedError(mean.node, "the mean is not taken of a square")
    return square.inputs[0], added.attrs["scalar"]


def _sole_input(op: Op) -> fx.Node:
    node = op.inputs[0]
    if len(node.users) != 1:
        raise RefusedError(node, f"{node.name} is {site.describe_users(node, op.node)}")
    return node


def _sole_user(node: fx.Node, what: str) -> fx.Node:
    if len(node.users) != 1:
        raise RefusedError(node, f"{what} is {site.describe_users(node)}")
    return next(iter(node.users))


def _narrow(wide: fx.Node) -> fx.Node:
    """The tensor that was cast up before squaring, or `wide` itself."""
    op = normalize(wide)
    if op is None or op.kind != "cast" or not view.dtype_of(op.inputs[0]).is_floating_point:
        return wide
    before, after = view.dtype_of(op.inputs[0]), view.dtype_of(wide)
    return op.inputs[0] if torch.promote_types(before, after) == after else wide


def _scaled(normalized: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Follow casts and one product with a weight (H,) as far as the result keeps x's dtype."""
    best: tuple[fx.Node, fx.Node | None] | None = None
    node, weight = normalized, None
    while True:
        if view.dtype_of(node) == view.dtype_of(x):
            best = (node, weight)
        below = normalize(next(iter(node.users))) if len(node.users) == 1 else None
        if below is None or below.inplace:
            break
        if below.kind == "mul" and len(below.inputs) == 2 and weight is None:
            other = below.inputs[0] if below.inputs[1] is node else below.inputs[1]
            if view.rank_of(other) != 1 or not sizes.same(view.shape_of(other)[0], view.shape_of(x)[-1]):
                break
            weight = other
        elif below.kind != "cast" or below.inputs[0] is not node:
            break
        node = below.node
    if best is None:
        raise RefusedError(normalized, f"the result is {view.dtype_of(node)}, x is {view.dtype_of(x)}")
    return best


def _check(norm: Norm) -> Site:
    x = tensor_of(norm.x)
    assert x is not None, norm
    if x.dtype not in rms_norm_op.DTYPES or view.dtype_of(norm.output) != x.dtype:
        raise RefusedError(norm.output, f"the result is {view.dtype_of(norm.output)}, x is {x.dtype}")
    if not isinstance(x.shape[-1], int):
        raise RefusedError(norm.output, "the size of the normalized axis is dynamic")
    if norm.weight is not None:
        weight = tensor_of(norm.weight)
        assert weight is not None, norm
        if weight.dtype != x.dtype and (weight.dtype != torch.float32 or x.dtype == torch.float64):
            raise RefusedError(norm.output, f"the weight is {weight.dtype}, x is {x.dtype}")
        if weight.dim() != 1 or not sizes.same(weight.shape[0], x.shape[-1]):
            raise RefusedError(norm.output, f"the weight has shape {tuple(weight.shape)}")
    axes = [f"a{i}" for i in range(x.dim() - 1)]
    labels: dict[fx.Node, site.Labels] = {norm.x: (*axes, "h")}
    if norm.weight is not None:
        labels[norm.weight] = ("h",)
    dims = dict(zip(axes, (2, 3, *[1] * len(axes)), strict=False)) | {"h": x.shape[-1]}
    # Small values too: only there does epsilon show. Eager's own gradient overflows on them in float16.
    magnitudes = (1.0, 0.05, 8.0) if x.dtype == torch.float16 else (1.0, 1e-3, 30.0)
    return Site(norm.output, tuple(labels), labels, dims, magnitudes=magnitudes)


def _build(norm: Norm) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    weight = None if norm.weight is None else graph.placeholder("weight")
    call = graph.call_function(torch.ops.fusewright.rms_norm.default, (x, weight, norm.eps))
    graph.output(graph.call_function(operator.getitem, (call, 0)))
    return fx.GraphModule(torch.nn.Module(), graph)


class FuseRMSNorm(Pass):
    """x * rsqrt(mean(x^2) + eps) * weight, in the spellings of the usual libraries, becomes `fusewright::rms_norm`."""

    name: ClassVar[str] = "fuse_rms_norm"
    stage: ClassVar[Stage] = Stage.FORWARD
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED

    def applies(self, bucket: ShapeBucket, device: str) -> bool:
        # On a CPU, Inductor fuses the written-out form with its neighbours; an opaque operator would be in the way.
        return device == "cuda"

    def digest_sources(self) -> Sequence[object]:
        return (layout, proof, rms_norm_op, site, sizes, view, writes)

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        rewrites = 0
        for node in list(gm.graph.nodes):
            op = normalize(node)
            if op is None or not is_anchor(op):
                continue
            try:
                norm = recognise(op)
                ctx.recognise("rms_norm")
                rewrites += self._rewrite(gm, norm, ctx)
            except RefusedError as refusal:
                ctx.declined(refusal.node, refusal.reason)
        if rewrites:
            gm.recompile()
        return rewrites

    def _rewrite(self, gm: fx.GraphModule, norm: Norm, ctx: PassContext) -> bool:
        place = _check(norm)
        writer = writes.written_between(place.nodes, place.inputs)
        if writer is not None:
            raise RefusedError(norm.output, f"{writer} writes to a tensor before the product with x")
        replacement = _build(norm)
        proof.demand(place, replacement, training=ctx.training)
        if not ctx.allow(norm.output):
            return False
        result = layout.keep_strides(site.splice(gm, place, replacement), norm.output)
        norm.output.replace_all_uses_with(result)
        site.erase(gm, place.nodes)
        return True
