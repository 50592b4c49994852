"""What may be moved past what in an ATen graph: effects, aliases, and an order that respects them."""

from __future__ import annotations

import enum
import heapq
import operator
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fusewright.passes.base import value_of
from fusewright.passes.comm.collectives import is_collective, is_functional_collective, is_wait, namespace_and_name


class Effect(enum.Enum):
    """What keeps a node where it is."""

    LIGHT = "light"  # pure and cheap (views, casts, pads, pointwise): may move as far as its inputs and readers allow
    PURE = "pure"  # pure, but matmul-like, random, a collective or not ours to judge: stays where it is
    WRITES = "writes"  # writes into arguments that its schema names
    BARRIER = "barrier"  # may do anything: nothing is merged across it


# Higher-order operators that return fresh tensors and change nothing. Any other is a barrier.
_PURE_HIGHER_ORDER = frozenset(
    {
        "auto_functionalized",
        "auto_functionalized_v2",
        "flex_attention",
        "flex_attention_backward",
        "graphsafe_run_with_rng_state",
        "run_and_save_rng_state",
        "run_with_rng_state",
        "triton_kernel_wrapper_functional",
    }
)
_PURE_MODULES = frozenset({"_operator", "math"})  # arithmetic on sizes, and getitem


def effect_of(node: fx.Node) -> Effect:
    """Classify `node`; what is not known to be harmless is a barrier."""
    if node.op in ("placeholder", "get_attr"):
        return Effect.LIGHT
    if node.op != "call_function":
        return Effect.PURE if node.op == "output" else Effect.BARRIER
    if is_wait(node) or is_functional_collective(node):
        return Effect.PURE
    target = node.target
    if is_collective(node):
        return Effect.BARRIER
    if isinstance(target, torch._ops.HigherOrderOperator):
        return Effect.PURE if target.__name__ in _PURE_HIGHER_ORDER else Effect.BARRIER
    if isinstance(target, torch._ops.OpOverload):
        return _effect_of_operator(node, target)
    assert callable(target), target
    module, name = target.__module__, target.__name__
    sizes_only = module in _PURE_MODULES or (module == "torch" and name.startswith("sym_"))
    return Effect.LIGHT if sizes_only and target is not operator.setitem else Effect.BARRIER


def _effect_of_operator(node: fx.Node, target: torch._ops.OpOverload) -> Effect:
    if target._schema.is_mutable:
        return Effect.WRITES
    if node.is_impure(impure_random=False):
        return Effect.BARRIER
    namespace, name = namespace_and_name(target)
    heavy = (
        target.overloadpacket in flop_registry
        or torch.Tag.nondeterministic_seeded in target.tags
        or name.startswith("inductor_")  # prims that draw seeds
        or name == "_local_scalar_dense"  # waits for the device
    )
    return Effect.LIGHT if namespace in ("aten", "prims") and not heavy else Effect.PURE


def written_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes whose storage `node`, of effect WRITES, writes."""
    assert isinstance(node.target, torch._ops.OpOverload), node
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, fx.Node))


class StorageClasses(Mapping[fx.Node, object]):
    """Groups nodes that may share memory: by recorded storage, by the schema's aliases, and `wait_tensor` by nature.

    A wait returns the very storage that the collective fills, though its schema and its fake value deny it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._nodes: list[fx.Node] = list(graph.nodes)
        self._parent: dict[object, object] = {}
        for node in self._nodes:
            if node.op == "get_attr":
                self._join(node, ("get_attr", node.target))
            for leaf in tree_leaves(value_of(node)):
                if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                    self._join(node, ("storage", leaf.untyped_storage()._cdata))
            for source in _aliased_arguments(node):
                self._join(node, source)

    def __getitem__(self, node: fx.Node) -> object:
        """A representative: equal for two nodes that may share memory."""
        return self._root(node)

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def _root(self, x: object) -> object:
        parent = self._parent
        while (up := parent.setdefault(x, x)) is not x:
            parent[x] = parent.setdefault(up, up)
            x = up
        return x

    def _join(self, a: object, b: object) -> None:
        self._parent[self._root(a)] = self._root(b)


def _aliased_arguments(node: fx.Node) -> Iterable[fx.Node]:
    if node.op != "call_function":
        return ()
    if node.target is operator.getitem or is_wait(node):
        return node.all_input_nodes[:1]
    if not isinstance(node.target, torch._ops.OpOverload):
        return ()
    schema = node.target._schema
    if all(returned.alias_info is None for returned in schema.returns):
        return ()
    given = (node.args[i] if i < len(node.args) else node.kwargs.get(a.name) for i, a in enumerate(schema.arguments))
    pairs = zip(schema.arguments, given, strict=True)
    return [leaf for a, value in pairs if a.alias_info for leaf in tree_leaves(value) if isinstance(leaf, fx.Node)]


SortKey = tuple[int, int, int]


def reorder(graph: fx.Graph, keys: dict[fx.Node, SortKey]) -> None:
    """Order `graph` topologically, always taking the ready node with the smallest key; n log n.

    The result is a function of graph and keys alone, so ranks with equal graphs get equal orders.
    """
    nodes = list(graph.nodes)
    missing = {node: len(node.all_input_nodes) for node in nodes}
    ready = [(keys[node], i) for i, node in enumerate(nodes) if not missing[node]]
    index = {node: i for i, node in enumerate(nodes)}
    heapq.heapify(ready)
    done = 0
    last = graph.output_node()
    while ready:
        node = nodes[heapq.heappop(ready)[1]]
        done += 1
        if node is not last:
            last.prepend(node)
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (keys[user], index[user]))
    assert done == len(nodes), f"cycle: {[n.name for n in nodes if missing[n]][:10]}"
