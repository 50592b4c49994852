"""Takes what depends on weights alone out of a lowered graph: it runs once, and again when a weight has changed."""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from fusewright.capture.step.optimizer_update import OptimizerSteps
from fusewright.passes.frozen.statistics import Contents
from fusewright.passes.frozen.weights import EMITTED, is_weight, storages_of, weight_only, written_by

Callee = Callable[..., Any]
Pick = Callable[[Sequence[Any]], tuple[Any, ...]]

_version = operator.attrgetter("_version")
# Of the storage object: unique while something refers to it, if only weakly.
_address = torch._C._storage_address  # type: ignore[attr-defined]
_pointer = torch.Tensor.data_ptr


@dataclass(frozen=True)
class _State:
    """What the cached values were computed from.

    Attributes:
        stamp: optimizer steps, then versions, storages and addresses of the sources.
        contents: what small buffers held, whose versions tell too little.
        values: the results of the prelude.
        storages: weak references, so that no later storage gets the address of one in `stamp`.
    """

    stamp: tuple[Any, ...]
    contents: Contents
    values: tuple[torch.Tensor, ...]
    storages: tuple[StorageWeakRef, ...]

    def is_of(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether the values are those of the sources `given`."""
        return stamp(given) == self.stamp and self.contents.unchanged(given)


class UnfitWeightsError(Exception):
    """The cached values must not be used for the weights of this call; the message says why."""


@dataclass
class Hoisted:
    """A graph in two parts.

    `main` computes what the graph did from the arguments at `kept` and the results of `prelude`, which is computed
    from the weights at `sources`.

    What is seen as a change of a weight: writes through autograd's version counter (`load_state_dict`, `no_grad`
    updates, `torch.optim`), steps of optimizers that write past it, another storage or another place in it (`.to`,
    `.data = ...`, `load_state_dict(assign=True)`), and other contents of small buffers (running statistics in
    training). Writes past the version counter by anyone else (`p.data.mul_()`, NumPy, raw pointers) cannot be seen;
    `verify="always"` finds them.
    """

    prelude: fx.GraphModule
    main: fx.GraphModule
    sources: tuple[int, ...]
    kept: tuple[int, ...]
    state: _State | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def lowered_values(self, mode: FakeTensorMode, values: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Fake values of the placeholders of `main`, given those of the whole graph; runs the prelude once.

        Raises:
            UnfitWeightsError: nothing should be hoisted for these weights.
        """
        state = self._compute(_picker(self.sources)(args))
        extra = [mode.from_tensor(value, static_shapes=True) for value in state.values]
        self.state = state
        return [*_picker(self.kept)(values), *extra]

    def bind(
        self, call: Callee, mutated: Sequence[int] | None, eager: Callee, report: Callable[[str], None]
    ) -> tuple[Callee, tuple[int, ...] | None]:
        """Give a lowered `main` the signature of the whole graph.

        Args:
            call: takes the placeholders of `main` one by one.
            mutated: the positions that it changes in place, None where that is not known.
            eager: the whole graph, for calls whose weights the cached values must not be used for.
            report: told why, before each such call.

        Returns:
            The callable, and `mutated` as positions of the whole graph.
        """
        whole = None if mutated is None else tuple(self.kept[i] for i in mutated)
        weights, rest, changed = _picker(self.sources), _picker(self.kept), _picker(whole or ())

        def frozen(*args: Any) -> Any:
            given = weights(args)
            try:
                state = self.state
                if state is None or not state.is_of(given):
                    state = self._refreshed(given)
                if whole and not set(map(_address, changed(args))).isdisjoint(map(_address, given)):
                    raise UnfitWeightsError("a weight shares memory with a tensor that the graph changes in place")
            except UnfitWeightsError as error:
                report(str(error))
                return eager(*args)
            return call(*rest(args), *state.values)

        return frozen, whole

    def _refreshed(self, given: Sequence[torch.Tensor]) -> _State:
        with self.lock:
            if self.state is None or not self.state.is_of(given):
                self.state = None  # the old values make room for the new ones
                self.state = self._compute(given)
            return self.state

    def _compute(self, given: Sequence[torch.Tensor]) -> _State:
        """Run the prelude.

        Raises:
            UnfitWeightsError: no change of these weights would be seen, or a result is not finite.
        """
        if any(tensor.is_inference() for tensor in given):
            raise UnfitWeightsError("a weight was made in inference mode: changes to it cannot be seen")
        on_gpu = any(tensor.is_cuda for tensor in given)
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise UnfitWeightsError("a weight changed before a CUDA graph was captured; call the model once before")
        OptimizerSteps.watch()
        before = stamp(given)
        with torch.inference_mode(False), torch.no_grad():
            contents = Contents.of(given)
            values = tuple(self.prelude(*given))
            finite = all(bool(value.isfinite().all()) for value in values if value.is_floating_point())
        if not finite:
            raise UnfitWeightsError("folded weights are not finite in their dtype")
        if on_gpu:
            torch.cuda.synchronize()  # another stream may use the values next
        return _State(before, contents, values, tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in given))


def stamp(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What tells one state of `tensors` from another, without a look at what they hold."""
    return (
        OptimizerSteps.taken,
        list(map(_version, tensors)),
        list(map(_address, tensors)),
        list(map(_pointer, tensors)),
    )


def _picker(positions: Sequence[int]) -> Pick:
    """A function that takes the elements at `positions` out of a sequence, as a tuple."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    if positions:
        only = positions[0]
        return lambda sequence: (sequence[only],)
    return lambda sequence: ()


def hoist(gm: fx.GraphModule, args: Sequence[Any]) -> Hoisted | None:
    """Split `gm`, which this takes over and turns into the main part, or return None where nothing is worth it.

    Args:
        gm: a forward graph whose placeholders say what is a weight; see `weights.is_weight`.
        args: the real arguments; only plain tensors are sources.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    position = {node: i for i, node in enumerate(placeholders)}
    plain = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    odd = {n for n, i in position.items() if is_weight(n) and type(args[i]) not in plain}
    frontier, inner = _cut(gm.graph, odd)
    if not frontier:
        return None
    sources = [n for n in placeholders if any(user in inner for user in n.users)]
    prelude = _prelude(gm, sources, inner, frontier)
    _replace(gm.graph, frontier, placeholders)
    for node in reversed(list(gm.graph.nodes)):
        if node in inner and not node.users:
            gm.graph.erase_node(node)
    unused = {n for n in sources if not n.users}
    for node in unused:
        gm.graph.erase_node(node)
    gm.recompile()
    kept = tuple(position[n] for n in placeholders if n not in unused)
    return Hoisted(prelude, gm, tuple(position[n] for n in sources), kept)


def _cut(graph: fx.Graph, odd: set[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]]:
    """(values to hand over, all nodes that compute them), in graph order.

    A value that could leave the graph, or be written to, stays in it: the caller would change our cached tensor.
    A view of a weight stays too: it costs nothing.
    """
    weights = {storage for n in graph.nodes if is_weight(n) for storage in storages_of(n)}
    able = _without(weight_only(graph), odd | _under_autocast(graph))
    while True:
        frontier = [
            n for n in graph.nodes if n in able and n.op != "placeholder" and any(user not in able for user in n.users)
        ]
        leaving = {n for n in frontier if _escapes(n, able)}
        if not leaving:
            break
        able = _without(able, leaving)
    frontier = [n for n in frontier if not storages_of(n) & weights]
    inner: set[fx.Node] = set()
    pending = list(frontier)
    while pending:
        node = pending.pop()
        if node.op != "placeholder" and node not in inner:
            inner.add(node)
            pending += node.all_input_nodes
    return frontier, inner


def _under_autocast(graph: fx.Graph) -> set[fx.Node]:
    """What the graph computes after switching autocast on or off: outside of the graph its dtype may be another."""
    depth, found = 0, set()
    for node in graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            depth += 1
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            depth -= 1
        elif depth and node.op != "placeholder" and EMITTED not in node.meta:
            found.add(node)
    return found


def _without(nodes: set[fx.Node], gone: set[fx.Node]) -> set[fx.Node]:
    """`nodes` but those in `gone` and what is computed from them."""
    dropped, pending = set(gone), list(gone)
    while pending:
        for user in pending.pop().users:
            if user in nodes and user not in dropped:
                dropped.add(user)
                pending.append(user)
    return nodes - dropped


def _escapes(node: fx.Node, able: set[fx.Node]) -> bool:
    """Whether the memory of `node` may be returned, written to, or handed to something unknown."""
    for user in node.users:
        if user.op == "output" or node in written_by(user):
            return True
        shared = storages_of(user)
        if not shared and user not in able:
            return True
        if shared & storages_of(node) and _escapes(user, able):
            return True
    return False


def _prelude(
    gm: fx.GraphModule, sources: Sequence[fx.Node], inner: set[fx.Node], frontier: Sequence[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    mapping = {node: graph.placeholder(node.name) for node in sources}
    for node in gm.graph.nodes:
        if node in inner:
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
    graph.output(tuple(mapping[node] for node in frontier))
    return fx.GraphModule(torch.nn.Module(), graph, class_name="Prelude")


def _replace(graph: fx.Graph, frontier: Sequence[fx.Node], placeholders: Sequence[fx.Node]) -> None:
    """Let new placeholders stand for the values of `frontier`, marked as static like any weight."""
    last = placeholders[-1]
    for number, node in enumerate(frontier):
        with graph.inserting_after(last):
            last = graph.placeholder(f"frozen_{number}")
        last.meta = {**copy.copy(node.meta), "tensor_dict": {"_dynamo_static_input_type": "unguarded"}}
        last._dynamo_source = LocalSource(f"frozen_{number}")
        node.replace_all_uses_with(last)
