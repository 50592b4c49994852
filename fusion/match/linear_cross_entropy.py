"""The pass that recognises cross entropy of a linear layer's outputs and keeps the logits out of memory."""
# V classes, D size of a row

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fusewright.capture.shapes import ShapeBucket
from fusewright.config import Numerics
from fusewright.fusion.match import proof, site, sizes, view, writes
from fusewright.fusion.match.site import RefusedError, Site
from fusewright.fusion.match.view import normalize, spelling
from fusewright.fusion.ops import linear_cross_entropy as op
from fusewright.passes.base import Pass, PassContext, Stage, tensor_of

_PARAMETERS = {
    "cross_entropy": (
        *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
        "label_smoothing",
    ),
    "nll_loss": ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
    "log_softmax": ("input", "dim", "_stacklevel", "dtype"),
    "linear": ("input", "weight", "bias"),
}
_ROW_SIZES = (2, 3, 5)  # of the axes of rows in a proof


@dataclass(frozen=True)
class Loss:
    """cross_entropy(linear(x, weight, bias), target); x (..., D), weight (V, D), bias (V,).

    Attributes:
        output: the node of the loss.
        product: the node of the logits as the layer returns them.
        between: from there to the loss, first to last: views, casts, copies and slices that leave the classes alone.
    """

    output: fx.Node
    product: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    target: fx.Node
    between: tuple[fx.Node, ...]
    ignore_index: int
    mean: bool
    label_smoothing: float

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The tensors that are read, in the order of the replacement's placeholders."""
        return tuple(node for node in (self.x, self.weight, self.bias, self.target) if node is not None)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of `node` by name; empty for anything but the functions of `_PARAMETERS`."""
    names = _PARAMETERS.get(spelling(node), ())
    is_function = node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload)
    if not names or not is_function or not view.is_module_known(node) or len(node.args) > len(names):
        return {}
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def recognise(node: fx.Node) -> Loss | None:
    """Read the loss that `node` computes, or None where it is no cross entropy.

    Raises:
        RefusedError: with the first node that differs from cross entropy of a linear layer, and how.
    """
    given = _arguments(node)
    if spelling(node) not in ("cross_entropy", "nll_loss") or not given:
        return None
    logits, target = given["input"], given["target"]
    if spelling(node) == "nll_loss":
        logits = _before_log_softmax(logits)
    for name in ("weight", "size_average", "reduce"):
        if given.get(name) is not None:
            raise RefusedError(node, f"the loss is given {name!r}")
    reduction, smoothing = given.get("reduction", "mean"), given.get("label_smoothing", 0.0)
    ignored = given.get("ignore_index", -100)
    if reduction not in ("mean", "sum") or not isinstance(ignored, int) or not isinstance(smoothing, float | int):
        raise RefusedError(node, f"reduction {reduction!r}, ignored class {ignored!r}, smoothing {smoothing!r}")
    if tensor_of(logits) is None or tensor_of(target) is None:
        raise RefusedError(node, "logits or target are no tensors")
    if view.dtype_of(target) != torch.int64:
        raise RefusedError(node, f"the target is {view.dtype_of(target)}, not a class number")
    logits, between = _with_classes_last(node, logits)
    if not sizes.all_same(view.shape_of(logits)[:-1], view.shape_of(target)):
        raise RefusedError(node, f"{view.rank_of(target)} axes of targets for {view.rank_of(logits)} of logits")
    product, steps = _up_to_the_layer(logits)
    x, weight, bias = _layer(product)
    return Loss(node, product, x, weight, bias, target, (*steps, *between), ignored, reduction == "mean", smoothing)


def _before_log_softmax(node: Any) -> Any:
    given = _arguments(node) if isinstance(node, fx.Node) else {}
    if spelling(node) != "log_softmax" or given.get("dtype") is not None or tensor_of(given.get("input")) is None:
        raise RefusedError(node, f"the loss is taken of {spelling(node) or node}, not of log_softmax")
    rank = view.rank_of(given["input"])
    if rank != 2 or given.get("dim") not in (1, -1) or len(node.users) != 1:
        raise RefusedError(node, f"log_softmax over axis {given.get('dim')} of {rank}")
    return given["input"]


def _with_classes_last(loss: fx.Node, logits: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """Logits (..., V): torch wants the classes on axis 1, so that more than two axes come transposed."""
    rank = view.rank_of(logits)
    if rank == 2:
        return logits, ()
    swap = normalize(logits)
    if rank != 3 or swap is None or swap.kind != "permute" or swap.attrs["perm"] != (0, 2, 1):
        raise RefusedError(loss, f"the logits have {rank} axes and are not transposed from (..., V)")
    _sole_user(swap.node, loss)
    return swap.inputs[0], (swap.node,)


def _sole_user(node: fx.Node, user: fx.Node) -> None:
    if set(node.users) != {user}:
        raise RefusedError(node, f"the logits are {site.describe_users(node, user)}")


def _up_to_the_layer(logits: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """From the logits up to the node of the product, through what leaves the classes on the last axis."""
    steps: list[fx.Node] = []
    node = logits
    while True:
        if len(node.users) != 1:
            raise RefusedError(node, f"the logits are {site.describe_users(node, min(node.users))}")
        if spelling(node) == "linear" or _is_product(node):
            return node, tuple(reversed(steps))
        source = _source(node)
        if source is None:
            raise RefusedError(node, f"{view.spelling(node) or node.op} lies between the layer and the loss")
        steps.append(node)
        node = source


def _is_product(node: fx.Node) -> bool:
    product = normalize(node)
    return product is not None and product.kind == "matmul"


def _source(node: fx.Node) -> fx.Node | None:
    """What `node` takes rows from, if it leaves classes and numbers as they are: view, copy, slice of rows, cast up."""
    if _is_slice_of_rows(node):
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    read = normalize(node)
    if read is None or read.inplace:
        return None
    source = read.inputs[0]
    before, after = view.dtype_of(source), view.dtype_of(node)
    if read.kind == "cast" and before.is_floating_point and torch.promote_types(before, after) == after:
        return source
    classes_stay = sizes.same(view.shape_of(source)[-1], view.shape_of(node)[-1])
    merges = view.rank_of(node) == 2 or sizes.all_same(view.shape_of(source), view.shape_of(node))
    return source if read.kind == "copy" or (read.kind == "view" and classes_stay and merges) else None


def _is_slice_of_rows(node: fx.Node) -> bool:
    """`logits[..., :-1, :]`: slices with constant ends, the last axis whole."""
    if node.target is not operator.getitem or tensor_of(node) is None or tensor_of(node.args[0]) is None:
        return False
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    known = all(i is Ellipsis or (isinstance(i, slice) and _is_constant(i)) for i in index)
    if not known or sum(i is Ellipsis for i in index) > 1:
        return False
    reaches_classes = Ellipsis in index or len(index) == view.rank_of(node)
    return not reaches_classes or index[-1] in (Ellipsis, slice(None))


def _is_constant(index: slice) -> bool:
    return index.step in (None, 1) and all(end is None or isinstance(end, int) for end in (index.start, index.stop))


def _layer(product: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """x (..., D), weight (V, D), bias (V,) or None of `linear(x, weight, bias)` or `x @ weight.T`."""
    given = _arguments(product)
    if given:
        x, weight, bias = given["input"], given["weight"], given.get("bias")
    else:
        read = normalize(product)
        if read is None or read.kind != "matmul":
            raise RefusedError(product, f"{spelling(product)} is not called as torch.nn.functional is")
        x, turned, bias = read.inputs[0], normalize(read.inputs[1]), None
        if turned is None or turned.kind != "permute" or turned.attrs["perm"] != (1, 0):
            raise RefusedError(product, f"the product is not with a transposed weight but with {read.inputs[1].name}")
        weight = turned.inputs[0]
    if view.rank_of(x) is None or view.rank_of(weight) != 2 or (bias is not None and view.rank_of(bias) != 1):
        raise RefusedError(product, "weight or bias of the layer have another number of axes")
    return x, weight, bias


def _check(loss: Loss) -> Site:
    """The site; axes of rows have the sizes of `_ROW_SIZES` in a proof, and what slices and views leave of them."""
    x, product = tensor_of(loss.x), tensor_of(loss.product)
    assert x is not None, loss
    assert product is not None, loss
    if product.dtype not in op.DTYPES:
        raise RefusedError(loss.product, f"the logits are {product.dtype}")
    if not all(isinstance(size, int) for size in view.shape_of(loss.weight)):
        raise RefusedError(loss.product, "the number of classes or the size of the layer is dynamic")
    if not 2 <= x.dim() <= 1 + len(_ROW_SIZES):
        raise RefusedError(loss.product, f"the layer's input has {x.dim()} axes")
    rows: tuple[int, ...] = _ROW_SIZES[: x.dim() - 1]
    labels: dict[fx.Node, site.Labels] = {loss.x: (*rows, "d"), loss.weight: ("v", "d")}
    if loss.bias is not None:
        labels[loss.bias] = ("v",)
    for node in loss.between:
        read = normalize(node)
        if _is_slice_of_rows(node):
            index: Any = node.args[1]
            rows = tuple(torch.empty((*rows, 1), device="meta")[index].shape[:-1])
        elif read is not None and read.kind == "view":
            rows = rows if view.rank_of(node) == len(rows) + 1 else (math.prod(rows),)
            labels[node] = (*rows, "v")
    labels[loss.target] = rows
    if any(size == 0 for size in rows):
        raise RefusedError(loss.output, "a slice leaves too few rows for a proof")
    autocast = product.dtype if x.dtype != product.dtype else None
    classes = {loss.target: (7, loss.ignore_index)}
    dims = {"v": 7, "d": 4}
    return Site(loss.output, loss.inputs, labels, dims, autocast, classes=classes, magnitudes=(1.0, 0.1, 10.0))


def _build(loss: Loss, wanted: Sequence[bool]) -> fx.GraphModule:
    """`wanted`: whether the gradients of x, weight and bias are."""
    graph = fx.Graph()
    names = [name for name in ("x", "weight", "bias", "target") if name != "bias" or loss.bias is not None]
    values = {name: graph.placeholder(name) for name in names}
    dtype = view.dtype_of(loss.product)
    for name, node in zip(names[:-1], loss.inputs, strict=False):
        if view.dtype_of(node) != dtype:
            values[name] = graph.call_method("to", (values[name], dtype))
    x = values["x"]
    for node in loss.between:
        if _is_slice_of_rows(node):
            x = graph.call_function(operator.getitem, (x, node.args[1]))
    call = graph.call_function(
        torch.ops.fusewright.linear_cross_entropy.default,
        (x, values["weight"], values.get("bias"), values["target"])
        + (loss.ignore_index, loss.mean, float(loss.label_smoothing), list(wanted)),
    )
    result = graph.call_function(operator.getitem, (call, 0))
    if view.dtype_of(loss.output) != op.accumulator(dtype):
        result = graph.call_method("to", (result, view.dtype_of(loss.output)))
    graph.output(result)
    return fx.GraphModule(torch.nn.Module(), graph)


class FuseLinearCrossEntropy(Pass):
    """cross_entropy(linear(x, weight, bias), target) becomes `fusewright::linear_cross_entropy`.

    Only where nothing else reads the logits: a model that returns them beside the loss keeps them.
    """

    name: ClassVar[str] = "fuse_linear_cross_entropy"
    stage: ClassVar[Stage] = Stage.FORWARD
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED

    def applies(self, bucket: ShapeBucket, device: str) -> bool:
        return device == "cpu"  # nothing is measured elsewhere

    def digest_sources(self) -> Sequence[object]:
        return (op, proof, site, sizes, view, writes)

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        rewrites = 0
        for node in list(gm.graph.nodes):
            try:
                loss = recognise(node)
                if loss is not None:
                    ctx.recognise("linear_cross_entropy")
                    rewrites += self._rewrite(gm, loss, ctx)
            except RefusedError as refusal:
                ctx.declined(refusal.node, refusal.reason)
        if rewrites:
            gm.recompile()
        return rewrites

    def _rewrite(self, gm: fx.GraphModule, loss: Loss, ctx: PassContext) -> bool:
        place = _check(loss)
        writer = writes.written_between(place.nodes, place.inputs)
        if writer is not None:
            raise RefusedError(loss.output, f"{writer} writes to a tensor before the loss")
        unpaid = _unpaid(loss, ctx) if ctx.priced else None
        if unpaid is not None:
            raise RefusedError(loss.output, unpaid)
        proof.demand(place, _build(loss, [ctx.training] * 3), training=ctx.training)
        if not ctx.allow(loss.output):
            return False
        wanted = [ctx.training and _requires_grad(node) for node in (loss.x, loss.weight, loss.bias)]
        result = site.splice(gm, place, _build(loss, wanted))
        loss.output.replace_all_uses_with(result)
        site.erase(gm, place.nodes)
        return True


def _requires_grad(node: fx.Node | None) -> bool:
    value: Tensor | None = tensor_of(node)
    return value is not None and value.requires_grad


def _unpaid(loss: Loss, ctx: PassContext) -> str | None:
    """Why the rewrite would not pay at the sizes of this bucket; None also where a size is not known."""
    shape = [ctx.size(size) for size in view.shape_of(loss.product)]
    if None in shape:
        return None
    logits = math.prod(size for size in shape if size is not None) * view.dtype_of(loss.product).itemsize
    return op.why_not(logits)
