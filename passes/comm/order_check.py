"""Compares the sequence of collectives between ranks: two ranks that disagree corrupt data or hang without an error."""

from __future__ import annotations

import hashlib

import torch.distributed as dist
from torch import fx
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves

from fusewright.errors import FusewrightError
from fusewright.passes.base import tensor_of
from fusewright.passes.comm.collectives import is_collective, namespace_and_name


def collective_digest(gm: fx.GraphModule) -> str:
    """Return a hash line, then a line per collective: operator, plain arguments, group, dtype and numel of each tensor.

    A group is written as its size and its ranks counted from the lowest, because names differ between ranks, and so do
    the members of one mesh dimension. Equal digests mean that every rank of the mesh issues the same sequence.

    Raises:
        FusewrightError: a group's name is not registered in this process.
    """
    lines = [_describe(node) for node in gm.graph.nodes if is_collective(node)]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return "\n".join([digest, *lines])


def check_ranks_agree(digest: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank unless all ranks of `group` pass the same digest. Every rank of `group` must call it.

    One gather of short strings. It ends on all ranks alike: each sees every digest, and the group's own time-out ends
    the wait for a rank that never comes. May be called inside a compiler, where fake tensors and the Python dispatcher
    are on. Both are off for the gather: the dispatcher would enter gloo with the interpreter's lock held and wait there
    for the queue's lock, while gloo's thread, which holds that one, frees a finished gather's tensors and waits for the
    interpreter's. Seen with torch 2.11 and 2.14.

    Raises:
        FusewrightError: two ranks differ; the message shows the first difference from both sides.
    """
    with unset_fake_temporarily(), no_python_dispatcher():
        digests: list[str] = [""] * dist.get_world_size(group)
        dist.all_gather_object(digests, digest, group=group)
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise FusewrightError(_difference(digests[0], other, rank))


def _describe(node: fx.Node) -> str:
    namespace, name = namespace_and_name(node.target)
    tensors = [t for t in map(tensor_of, node.all_input_nodes) if t is not None]
    payload = ", ".join(f"{str(t.dtype).removeprefix('torch.')}[{t.numel()}]" for t in tensors)
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    named = {a.name: value for a, value in zip(schema, node.args, strict=False)} | dict(node.kwargs)
    plain = [
        f"{key}={_group(value) if key in ('group_name', 'tag') else value}"
        for key, value in named.items()
        if not any(isinstance(leaf, fx.Node) for leaf in tree_leaves(value))
    ]
    return f"{namespace}::{name} {' '.join(plain)} {payload}".rstrip()


def _group(group: object) -> str:
    if isinstance(group, str):
        try:
            group = distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
        except (RuntimeError, ValueError) as error:
            raise FusewrightError(
                f"the graph names process group {group!r}, which does not exist here: {error}"
            ) from error
    if not isinstance(group, dist.ProcessGroup):
        return str(group)
    ranks = sorted(dist.get_process_group_ranks(group))
    return f"{len(ranks)} ranks {[rank - ranks[0] for rank in ranks]}"


def _difference(first: str, other: str, rank: int) -> str:
    a, b = first.split("\n")[1:], other.split("\n")[1:]
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    side_a, side_b = (lines[at] if at < len(lines) else "(no more collectives)" for lines in (a, b))
    return (
        f"ranks would issue different collectives, {len(a)} on rank 0 and {len(b)} on rank {rank} of the group; "
        f"the first difference is number {at}:\n  rank 0: {side_a}\n  rank {rank}: {side_b}\n"
        "Compile the same code with the same sizes on every rank."
    )
