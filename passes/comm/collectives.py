"""Recognises functional collectives in an ATen graph and says which may be merged with which."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch
from torch import fx

# Importing this registers the `_c10d_functional` operators' fake implementations.
from torch.distributed import _functional_collectives as _registers_fakes  # noqa: F401

from fusewright.passes.base import tensor_of

ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
WAIT = torch.ops._c10d_functional.wait_tensor.default

MEMBERS = "bucket_members"  # key in the `meta` of a merged collective: names of what it replaces

# These start an exchange and touch nothing but their fresh result. Whatever else lives in these namespaces (send and
# receive, in-place and `_out` variants) may pair up with an operator of another rank, or write while others read.
_FUNCTIONAL = frozenset(
    {
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all_single",
        "broadcast",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
    }
)


class Kind(enum.Enum):
    """The collectives whose merging keeps every element's value and order of summation per element."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"


_KINDS: dict[object, Kind] = {ALL_GATHER: Kind.ALL_GATHER, REDUCE_SCATTER: Kind.REDUCE_SCATTER}


@dataclass(frozen=True)
class MergeKey:
    """Two collectives may share one call only where all of this is equal."""

    kind: Kind
    group: object = field(hash=False)  # name, or a ProcessGroup, or the node holding one; compared by equality
    group_size: int
    dtype: torch.dtype
    device: torch.device
    reduce_op: str | None

    @property
    def order_free(self) -> bool:
        """Whether no order of combining the ranks' numbers can change a bit of the result."""
        gathers = self.kind is Kind.ALL_GATHER
        rounds = self.dtype.is_floating_point or self.dtype.is_complex
        return gathers or self.group_size <= 2 or not rounds or self.reduce_op in ("max", "min")


@dataclass(frozen=True, eq=False)
class Collective:
    """One mergeable collective with its waits.

    Attributes:
        node: the call that starts it.
        waits: every user of `node`, each a `wait_tensor`.
        whole_bytes: size of the larger side: the gathered output or the unreduced input.
    """

    node: fx.Node
    waits: tuple[fx.Node, ...]
    key: MergeKey
    whole_bytes: int

    @property
    def merged(self) -> bool:
        """Whether it is a bucket already."""
        return MEMBERS in self.node.meta

    @property
    def source(self) -> fx.Node:
        """Its input now: merging another bucket may have replaced it since this one was found."""
        source = self.node.args[0]
        assert isinstance(source, fx.Node), source
        return source


def namespace_and_name(target: object) -> tuple[str, str]:
    """Split an operator's schema name, `("aten", "view")`; two empty strings for anything but an `OpOverload`."""
    if not isinstance(target, torch._ops.OpOverload):
        return "", ""
    namespace, _, name = target._schema.name.partition("::")
    return namespace, name


def is_wait(node: fx.Node) -> bool:
    """Whether `node` is a `wait_tensor`, whose result is its input's storage."""
    return node.op == "call_function" and node.target is WAIT


def is_collective(node: fx.Node) -> bool:
    """Whether `node` talks to other ranks in any way; waits do not."""
    return node.op == "call_function" and "c10d" in namespace_and_name(node.target)[0] and not is_wait(node)


def is_functional_collective(node: fx.Node) -> bool:
    """Whether `node` is a collective that reads its input, fills a fresh result and pairs with its own kind only."""
    return is_collective(node) and namespace_and_name(node.target)[1] in _FUNCTIONAL


def kind_of(node: fx.Node) -> Kind | None:
    """The mergeable kind of `node`, if it is of one."""
    return _KINDS.get(node.target) if node.op == "call_function" else None


def mergeable(node: fx.Node) -> Collective | str:
    """Describe `node`, whose `kind_of` is not None, as a candidate for merging; or say why it is none."""
    kind = kind_of(node)
    assert kind is not None, node
    gathers = kind is Kind.ALL_GATHER
    if node.kwargs or len(node.args) != (3 if gathers else 4):
        return "its arguments are not positional"
    source, whole = node.args[0], tensor_of(node)
    small = tensor_of(source)
    if not isinstance(source, fx.Node) or small is None or whole is None:
        return "its input or result has no recorded tensor"
    group_size, group = node.args[-2:]
    if not all(isinstance(n, int) for n in (group_size, *small.shape, *whole.shape)):
        return "a size is symbolic"
    if not node.users:
        return "nobody waits for it"
    stray = next((user for user in node.users if not is_wait(user)), None)
    if stray is not None:
        return f"{stray.name} uses it before a wait"
    if isinstance(group, fx.Node) and group.op not in ("placeholder", "get_attr"):
        return "its group is computed in the graph"
    reduce_op = None if gathers else node.args[1]
    if not isinstance(reduce_op, str | None):
        return "its reduce operation is not a name"
    assert isinstance(group_size, int), group_size
    key = MergeKey(kind, group, group_size, small.dtype, small.device, reduce_op)
    return Collective(node, tuple(node.users), key, max(t.numel() * t.element_size() for t in (small, whole)))
