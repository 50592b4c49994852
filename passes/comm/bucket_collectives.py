"""Merges independent all-gathers, and independent reduce-scatters, into one collective per bucket."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from fusewright.config import Numerics
from fusewright.errors import UserInputError
from fusewright.passes.base import Pass, PassContext, Stage, tensor_of
from fusewright.passes.comm import collectives, dependencies
from fusewright.passes.comm import plan as planning
from fusewright.passes.comm.collectives import ALL_GATHER, MEMBERS, REDUCE_SCATTER, WAIT, Kind
from fusewright.passes.comm.dependencies import Effect, SortKey, effect_of, reorder
from fusewright.passes.comm.plan import Bucket, plan

aten = torch.ops.aten
_KEPT_META = ("stack_trace", "nn_module_stack", "seq_nr", "partitioner_tag")


class BucketCollectives(Pass):
    """One large message instead of many small ones: fewer launches and latencies for the same bytes.

    R ranks, n_i elements that a rank contributes to member i. All-gather: the inputs are laid end to end, gathered as
    [R, n_1 + n_2 + ...], and cut into columns. Reduce-scatter: each input is seen as [R, n_i], the columns are laid
    side by side, scattered by rows, and the row that arrives is cut. Each result is copied out, so that it has the
    strides, alignment and ownership of the result it replaces.

    Numerics: an all-gather moves bits. A reduce-scatter adds, for each element, one number per rank, in an order that
    may depend on where the element lies in the message: three gloo ranks give other last bits for the merged message.
    So this pass merges reductions only where no order matters (two ranks, integers, max and min) and declines the
    rest, which `BucketCollectivesAnyOrder` takes. all_reduce is not touched.

    Args:
        cap_bytes: largest sum, over a bucket, of gathered outputs or unreduced inputs. A larger member stays alone.

    Raises:
        UserInputError: `cap_bytes` is not positive.
    """

    name: ClassVar[str] = "bucket_collectives"
    stage: ClassVar[Stage] = Stage.POST_GRAD
    numerics: ClassVar[Numerics] = Numerics.EXACT
    any_order: ClassVar[bool] = False

    def __init__(self, cap_bytes: int = 32 << 20) -> None:
        if cap_bytes <= 0:
            raise UserInputError(f"BucketCollectives(cap_bytes={cap_bytes}): needs a positive number of bytes.")
        self.cap_bytes = cap_bytes

    def digest_sources(self) -> Sequence[object]:
        return (collectives, dependencies, planning)

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        """Merge what may be merged; return the number of buckets made."""
        made, before = 0, -1
        earlier = list(ctx.declines)
        while made > before:  # a result that now stands earlier can free another collective; declines count in the end
            before, ctx.declines[:] = made, earlier
            for kind in Kind:  # one after the other: see `plan`
                buckets = plan(gm.graph, kind, self.cap_bytes, self.any_order, ctx)
                if buckets:
                    _apply(gm.graph, buckets)
                made += len(buckets)
        if made:
            gm.graph.lint()
            gm.recompile()
        return made


class BucketCollectivesAnyOrder(BucketCollectives):
    """`BucketCollectives` that merges every reduce-scatter, at the price of another order of summation over ranks."""

    name: ClassVar[str] = "bucket_collectives_any_order"
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    conflicts: ClassVar[tuple[str, ...]] = ("bucket_collectives",)
    default: ClassVar[bool] = False
    any_order: ClassVar[bool] = True


def _apply(graph: fx.Graph, buckets: list[Bucket]) -> None:
    keys: dict[fx.Node, SortKey] = {node: (i, 1, 0) for i, node in enumerate(graph.nodes)}
    for bucket in buckets:
        for node in bucket.lifted:
            keys[node] = min(keys[node], (bucket.start, -1, keys[node][0]))
    fixed = {node for node in graph.nodes if effect_of(node) is not Effect.LIGHT}
    serial = 0
    output = graph.output_node()
    for bucket in buckets:
        with graph.inserting_before(output):
            started, finished, results = _merge(graph, bucket)
        for place, nodes in ((bucket.start, started), (bucket.finish, finished)):
            for node in nodes:
                keys[node] = (place, 0, serial)
                serial += 1
        for member, result in zip(bucket.members, results, strict=True):
            for wait in member.waits:
                wait.replace_all_uses_with(result)
                graph.erase_node(wait)
            graph.erase_node(member.node)
    stayed = [node for node in graph.nodes if node in fixed]
    reorder(graph, keys)
    assert stayed == [node for node in graph.nodes if node in fixed], "a node that is not light has moved"


def _merge(graph: fx.Graph, bucket: Bucket) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """Emit the merged collective; return its nodes up to the start, those from the wait on, each member's result."""
    emit = _Emitter(graph, bucket)
    key = bucket.members[0].key
    ranks = key.group_size
    shapes = [list(_tensor(member.node).shape) for member in bucket.members]
    if key.kind is Kind.ALL_GATHER:
        counts = [_tensor(member.source).numel() for member in bucket.members]
        flat = [emit.reshape(member.source, [n]) for member, n in zip(bucket.members, counts, strict=True)]
        start = emit(ALL_GATHER, emit(aten.cat.default, flat), ranks, key.group)
    else:
        counts = [_tensor(member.node).numel() for member in bucket.members]
        rows = [emit.reshape(m.source, [ranks, n]) for m, n in zip(bucket.members, counts, strict=True)]
        sent = emit.reshape(emit(aten.cat.default, rows, 1), [ranks * sum(counts)])
        start = emit(REDUCE_SCATTER, sent, key.reduce_op, ranks, key.group)
    start.meta[MEMBERS] = tuple(member.node.name for member in bucket.members)
    started, emit.nodes = emit.nodes, []
    arrived = emit(WAIT, start)
    if key.kind is Kind.ALL_GATHER:
        arrived = emit(aten.view.default, arrived, [ranks, sum(counts)])
    pieces = emit(aten.split_with_sizes.default, arrived, counts, 1 if key.kind is Kind.ALL_GATHER else 0)
    results = []
    for i, shape in enumerate(shapes):
        piece = emit(operator.getitem, pieces, i)
        own = emit(aten.clone.default, piece, memory_format=torch.contiguous_format)
        results.append(emit.reshape(own, shape))
    return started, emit.nodes, results


class _Emitter:
    """Appends calls to a graph with their fake values and the provenance of the bucket's first member."""

    def __init__(self, graph: fx.Graph, bucket: Bucket) -> None:
        self.graph = graph
        self.nodes: list[fx.Node] = []
        first = bucket.members[0].node
        self._meta = {key: first.meta[key] for key in _KEPT_META if key in first.meta}
        fake = _tensor(first)
        self._mode = fake.fake_mode if isinstance(fake, FakeTensor) else contextlib.nullcontext()

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self._meta)
        with self._mode:
            node.meta["val"] = target(*tree_map_only(fx.Node, lambda n: n.meta["val"], args), **kwargs)
        self.nodes.append(node)
        return node

    def reshape(self, node: fx.Node, shape: list[int]) -> fx.Node:
        """`node` in `shape`; `node` itself where it has that shape already."""
        return node if list(_tensor(node).shape) == shape else self(aten.reshape.default, node, shape)


def _tensor(node: fx.Node) -> torch.Tensor:
    tensor = tensor_of(node)
    assert tensor is not None, node
    return tensor
