"""Captures the forward and loss of a training step through Dynamo, so that passes can rewrite them before autograd.

`trace` follows the user's Python below autograd, where an attention is already split into forward and backward.
The graph here stands one level higher, as for `optimize`; `trace` then follows it in the place of the user's Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator

from fusewright.capture import dynamo_compat as compat
from fusewright.capture.step.function import Slot
from fusewright.errors import CaptureError


@dataclass(frozen=True)
class StepForward:
    """Forward and loss in one graph.

    Attributes:
        gm: torch functions; placeholders carry `example_value`; returns one tensor, the loss, in a tuple.
        slots: which of the step's inputs each placeholder wants.
    """

    gm: fx.GraphModule
    slots: tuple[Slot, ...]

    def loss(self, tensors: Mapping[Slot, Tensor]) -> Tensor:
        """Run the graph."""
        (loss,) = self.gm(*(tensors[slot] for slot in self.slots))
        assert isinstance(loss, Tensor), "the graph's only output is checked to be a tensor"
        return loss


class _Captured(Exception):
    """Ends a compilation once its graph is known."""


class _NotTraced(Exception):
    """Dynamo left the frame alone; nothing of the model has run."""


def capture_forward(
    module: nn.Module, inputs: Sequence[Any], slots: Sequence[Slot], tensors: Sequence[Tensor]
) -> StepForward:
    """The graph of `module(*inputs)`, which is not run.

    Args:
        slots: the step's inputs.
        tensors: the live tensor of each; the graph may read no other.

    Raises:
        CaptureError: forward and loss are no single graph of these inputs, or hold what only Python tells.
    """
    found: list[tuple[fx.GraphModule, Sequence[Any]]] = []

    def keep(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        found.append((gm, examples))
        raise _Captured

    def entry(*args: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise _NotTraced
        return module(*args)

    entry.__code__ = entry.__code__.replace(co_name=f"step_of_{type(module).__name__}")  # a cache of its own
    with compat.capture_lock(), compat.short_collections(), compat.compile_options(1, duck_shape=True):
        try:
            with compat.one_static_graph():
                compat.optimize_context(keep, fullgraph=True)(entry)(*inputs)
        except Exception as error:
            if not found:
                first = next(iter(str(error).splitlines()), "")
                raise CaptureError(f"Dynamo made no single graph of it: {type(error).__name__}: {first}") from error
    if not found:
        raise CaptureError("Dynamo found no tensor operation in it")
    gm, examples = found[0]
    _check(gm)
    known: dict[int, Slot] = {}
    for slot, tensor in zip(slots, tensors, strict=True):
        known.setdefault(id(tensor), slot)
    wanted: list[Slot] = []
    for node, example in zip(gm.graph.find_nodes(op="placeholder"), examples, strict=True):
        if id(example) not in known:
            raise CaptureError(f"it reads {node.name!r}, which belongs to neither model, loss nor arguments")
        wanted.append(known[id(example)])
    return StepForward(gm, tuple(wanted))


def _check(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            raise CaptureError(f"it holds {node.target.name()}, whose inside only the user's Python tells")
    (results,) = gm.graph.output_node().args
    if not isinstance(results, tuple | list) or len(results) != 1:
        raise CaptureError("it leaves more behind than the loss")
    value = results[0].meta.get("example_value") if isinstance(results[0], fx.Node) else None
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise CaptureError("its result is no tensor of one element")
