"""Captures forward, loss, backward and optimizer update of a training step as one functional ATen graph.

Dynamo breaks a graph at `backward()`, so `make_fx` runs the step's function on fake tensors. What the step changes in
place is written back by `copy_` nodes at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusewright.capture.step.function import Slot, StepFunction, autocast_off
from fusewright.errors import CaptureError


@dataclass
class WholeStep:
    """A captured step: `graph_module` takes the tensors of `slots` and returns the loss and gradients.

    Attributes:
        graph_module: functional ATen, then one `copy_` per slot that the step changes, then the output.
        slots: which tensor each placeholder wants; slots that the graph does not read are left out.
        fakes: a fake tensor per slot, to lower the graph with.
        grad_outputs: parameters whose new gradients follow the loss in the output.
        updated: parameters that the graph updates.
        written: slots that the graph changes in place.
        random: whether the graph draws random numbers.
        mode: the fake mode of `fakes`.
    """

    graph_module: fx.GraphModule
    slots: tuple[Slot, ...]
    fakes: tuple[Tensor, ...]
    grad_outputs: tuple[int, ...]
    updated: tuple[int, ...]
    written: frozenset[Slot]
    random: bool
    mode: FakeTensorMode

    def __post_init__(self) -> None:
        self.nodes = sum(node.op == "call_function" for node in self.graph_module.graph.nodes)
        self.device_types = frozenset(fake.device.type for fake in self.fakes)

    @property
    def results(self) -> tuple[Slot, ...]:
        """What the step leaves behind: the slots it changes, then a "grad" slot per gradient that it hands out."""
        return (*(slot for slot in self.slots if slot in self.written), *(Slot("grad", i) for i in self.grad_outputs))


def capture(step: StepFunction, inputs: Sequence[Tensor]) -> WholeStep:
    """Trace `step` on fakes of `inputs` (by `step.slots`). Nothing is computed and no live object changes.

    Raises:
        CaptureError: the step holds something that one graph cannot; any other error of the user's code comes through.
    """
    # Inductor's caches ask for a ShapeEnv; this one has no symbols, and data-dependent results are errors as without it
    env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    mode = FakeTensorMode(shape_env=env, static_shapes=True)
    fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in inputs]
    devices = {fake.device.type for fake in fakes}
    torch.clear_autocast_cache()  # fakes must not meet casts of real weights there, nor leave their own
    try:
        with mode, enable_python_dispatcher(), _rng_rewinds() as rewinds:
            if step.forward is not None:
                step.check_forward(*fakes)
            graph_module = make_fx(step)(*fakes)
            if any(is_mutation(node) for node in graph_module.graph.nodes):
                with torch.no_grad(), autocast_off(devices):
                    graph_module = make_fx(torch.func.functionalize(graph_module, remove="mutations"))(*fakes)
    finally:
        torch.clear_autocast_cache()
    random = any(is_random(node) for node in graph_module.graph.nodes)
    if random and rewinds:
        raise CaptureError("the step resets the random number generator (checkpointed region with dropout?)")
    _write_back(graph_module.graph, len(step.writes), [step.slots.index(slot) for slot in step.writes])
    graph_module.graph.eliminate_dead_code(is_impure_node=lambda node: is_mutation(node) or node.op != "call_function")
    kept = _prune_placeholders(graph_module.graph)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    graph_module.graph.lint()
    graph_module.recompile()
    slots = tuple(step.slots[i] for i in kept)
    return WholeStep(
        graph_module,
        slots,
        tuple(fakes[i] for i in kept),
        step.grad_outputs,
        tuple(slot.number for slot in step.writes if slot.role == "param"),
        frozenset(slot for slot, node in zip(slots, placeholders, strict=True) if any(map(is_mutation, node.users))),
        random,
        mode,
    )


def ambient_key(device_types: Iterable[str]) -> tuple[Hashable, ...]:
    """Process-wide settings that a trace bakes in."""
    autocast = [(t, torch.get_autocast_dtype(t)) for t in device_types if torch.is_autocast_enabled(t)]
    return (
        tuple(autocast),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_inference_mode_enabled(),
    )


def is_mutation(node: fx.Node) -> bool:
    """Whether the node changes one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def is_random(node: fx.Node) -> bool:
    """Whether the node draws from a random number generator; attention without dropout is tagged so, and does not."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    given = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    defaults = {a.name: a.default_value for a in node.target._schema.arguments if a.name == "dropout_p"}
    return (defaults | given).get("dropout_p") != 0.0


@contextlib.contextmanager
def _rng_rewinds() -> Iterator[list[str]]:
    """List every reset of a random number generator inside: in a graph, later draws would not repeat earlier ones."""
    found: list[str] = []

    def refuse(*_: Any, **__: Any) -> None:
        found.append("set_rng_state")

    patches = [mock.patch.object(owner, "set_rng_state", refuse) for owner in (torch, torch.random, torch.cuda)]
    with patches[0], patches[1], patches[2]:
        yield found


def _write_back(graph: fx.Graph, count: int, targets: Sequence[int]) -> None:
    """Turn the last `count` outputs into `copy_` nodes to the placeholders at `targets`."""
    placeholders, output = graph.find_nodes(op="placeholder"), graph.output_node()
    (results,) = output.args
    assert isinstance(results, tuple | list), f"a step returns a tuple, not {results!r}"
    split = len(results) - count
    with graph.inserting_before(output):
        for target, value in zip(targets, results[split:], strict=True):
            copy = graph.call_function(torch.ops.aten.copy_.default, (placeholders[target], value))
            copy.meta["val"] = placeholders[target].meta.get("val")
    output.args = (tuple(results[:split]),)


def _prune_placeholders(graph: fx.Graph) -> list[int]:
    """Erase placeholders without a use; return the positions of those that stay."""
    placeholders = graph.find_nodes(op="placeholder")
    kept = [position for position, node in enumerate(placeholders) if node.users]
    for node in [node for node in placeholders if not node.users]:
        graph.erase_node(node)
    return kept
