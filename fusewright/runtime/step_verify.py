"""Compares a compiled training step with the eager loop on the first call of its signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fusewright.capture.whole_step import Slot, StepFunction, WholeStep, autocast_off
from fusewright.numerics import TreeComparison, compare_trees


def label(slot: Slot) -> str:
    """A name for a slot in records, such as `state 3 exp_avg`."""
    return f"{slot.role} {slot.number} {slot.name}".strip()


class StepVerifier:
    """Runs the compiled step on copies, before the eager loop runs on the live objects, and compares afterwards.

    So the live objects only ever see the eager loop here, and no model needs to be copied as an object. Random numbers
    are drawn twice from the same state.
    """

    def __init__(
        self, function: StepFunction, flat: Sequence[Tensor], step: WholeStep, compiled: Callable[..., Sequence[Tensor]]
    ) -> None:
        self._function = function
        self._step = step
        self.before = [tensor.detach().clone() for tensor in flat]
        self._devices = sorted({t.device.index for t in flat if t.device.type == "cuda"})
        self._results = self._run(compiled)

    def _run(self, compiled: Callable[..., Sequence[Tensor]]) -> dict[str, Tensor]:
        """What `compiled` returns and writes, on copies."""
        copies = {slot: tensor.clone() for slot, tensor in zip(self._function.slots, self.before, strict=True)}
        with torch.random.fork_rng(self._devices), torch.no_grad(), autocast_off(self._step.device_types):
            loss, *grads = compiled(*(copies[slot] for slot in self._step.slots))
        handed_out = {Slot("grad", i): grad for i, grad in zip(self._step.grad_outputs, grads, strict=True)}
        every = copies | handed_out
        return {"loss": loss} | {label(slot): every[slot] for slot in self._step.results}

    def compare(
        self, loss: Tensor, live: Mapping[Slot, Tensor], float64: Callable[[], dict[str, Tensor]]
    ) -> TreeComparison:
        """Judge the compiled step by the eager loop's `loss` and by what it left in the `live` objects.

        `float64` runs the eager loop in float64; called only where the results are not close as they are.
        """
        expected = {"loss": loss} | {label(slot): tensor for slot, tensor in live.items()}

        # in float64 the same generator draws other numbers, so a random step has no float64 reference
        return compare_trees(self._results, expected, None if self._step.random else float64, training=True)
