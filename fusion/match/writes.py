"""Who writes to which memory in a graph: what may be read later, or twice, instead of where it stands."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx
from torch._ops import OpOverload

from fusewright.fusion.match.view import is_module_known, writes_in_place
from fusewright.passes.base import tensor_of


def written_between(nodes: Collection[fx.Node], inputs: Collection[fx.Node]) -> str | None:
    """Name of a node that writes, or may, to one of `inputs` between the first and the last of `nodes`; None without.

    A replacement reads its inputs where the output stood; the original read some of them earlier.
    """
    mine, node, output = set(nodes), min(nodes), max(nodes)
    while node is not output:
        if node not in mine and _may_write(node, inputs):
            return node.name
        node = node.next
    return None


def _may_write(node: fx.Node, inputs: Collection[fx.Node]) -> bool:
    if node.op == "call_module" or not is_module_known(node):
        return True
    return writes_in_place(node) and any(_may_alias(target, read) for target in _targets(node) for read in inputs)


def _targets(node: fx.Node) -> list[fx.Node]:
    """What an in-place node changes: its first argument; where a schema or `out` says which, any argument counts."""
    if isinstance(node.target, OpOverload) or "out" in node.kwargs or not node.args:
        return node.all_input_nodes
    found: list[fx.Node] = []
    fx.map_arg(node.args[0], found.append)
    return found


def _changes(node: fx.Node, read: fx.Node) -> bool:
    """Whether `node`, which reads `read`, writes to it or may."""
    unknown = node.op == "call_module" or (node.op == "call_function" and not is_module_known(node))
    return unknown or (writes_in_place(node) and read in _targets(node))


def _may_alias(target: fx.Node, read: fx.Node) -> bool:
    """Whether the two may share memory: by their fake storages, and any two that come from outside the graph."""
    return _shares_memory(target, read) or (_is_from_outside(target) and _is_from_outside(read))


def _is_from_outside(node: fx.Node) -> bool:
    while node.op not in ("placeholder", "get_attr"):
        source = next((parent for parent in node.all_input_nodes if _shares_memory(parent, node)), None)
        if source is None:
            return False
        node = source
    return True


def written_since(node: fx.Node, since: fx.Node) -> bool:
    """Whether anything after `since` writes to the memory of `node`."""
    known, stack = {node}, [node]
    while stack:
        step = stack.pop()
        for parent in step.all_input_nodes:
            if parent not in known and _shares_memory(parent, step):
                known.add(parent)
                stack.append(parent)
    return is_written(known, since)


def is_written(nodes: set[fx.Node], since: fx.Node | None = None) -> bool:
    """Whether anything in the graph writes to the memory of one of `nodes`, directly or through a view of it.

    since: only what comes later counts.
    Walks forward only, through users that share memory with what they are made from, so that the cost is that of the
    mask's own surroundings and not of the whole graph.
    """
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        step = stack.pop()
        for user in step.users:
            if _changes(user, step) and (since is None or user > since):
                return True
            if user not in seen and user not in nodes and _shares_memory(step, user):
                seen.add(user)
                stack.append(user)
    return False


def _shares_memory(node: fx.Node, user: fx.Node) -> bool:
    """Whether `user` may be a view of `node`; where a fake value is missing or is no tensor, it may."""
    before, after = tensor_of(node), tensor_of(user)
    if before is None or after is None:
        return True
    return bool(before.untyped_storage()._cdata == after.untyped_storage()._cdata)
