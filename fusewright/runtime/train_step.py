"""`TrainStep`: a whole training step as one compiled call, with the results of the eager loop."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fusewright.capture.optimizer_update import decline_reason
from fusewright.capture.step_state import Call, Inputs, LiveStep
from fusewright.capture.variant import GraphVariant, Lowering
from fusewright.capture.whole_step import Slot, WholeStep, autocast_off, capture
from fusewright.config import Verify, to_enum
from fusewright.errors import CaptureError, FallbackError, FusewrightError, UserInputError, VerificationError
from fusewright.runtime.fakes import BucketInputs
from fusewright.runtime.lower import lower
from fusewright.runtime.step_verify import StepVerifier, label

MAX_SIGNATURES = 64
"""Steps compiled per `TrainStep`; a further signature runs eagerly and is counted, so that memory stays bounded."""


class Fallback(NamedTuple):
    """Why something ran eagerly."""

    kind: str
    where: str
    reason: str


class LossModule(nn.Module):
    """`loss_fn(model(*args, **kwargs), *loss_args)` as one module, so that a loss with parameters is trained too."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], loss_args: tuple[Any, ...]) -> Tensor:
        """The loss of one batch."""
        return self.loss_fn(self.model(*args, **kwargs), *loss_args)


@dataclass
class CompiledStep:
    """A verified step for one signature."""

    step: WholeStep
    run: Callable[..., Sequence[Tensor]]
    verified: str


class TrainStep:
    """A callable that trains `model` for one batch, equal to this eager loop but compiled as one graph:

        loss = loss_fn(model(*args, **kwargs), *loss_args) / accumulate
        loss.backward()                                  # scaler.scale(loss).backward() with a scaler
        every `accumulate`-th call:                      # on the gradients of the optimizer's parameters
            clip_grad_norm_(parameters, clip)
            optimizer.step(); optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    Model, optimizer and their state stay the same objects, updated in place. A new signature (shapes, dtypes, modes,
    module settings, ...) compiles a new graph. What cannot be one graph runs as the eager loop and is counted in
    `report()`; with `strict` it is an error.

    Args:
        model: the module to train.
        loss_fn: takes the model's output (and `loss_args` of the call) and returns a loss of one element.
        optimizer: SGD, Adam and AdamW of torch.optim become part of the graph; others run eagerly after it.
        accumulate: calls per optimizer step; the loss is divided by it.
        clip: largest 2-norm of the gradients of all of the optimizer's parameters together.
        scaler: unscaling, clipping and the optimizer run outside of the graph, so that infinities skip it.
        lowering: "inductor", "aot_eager" or "eager" (the captured graph as it is).
        strict: raise instead of falling back to the eager loop.
        verify: "first_call" compares the first call of every signature with the eager loop; "off" does not.

    Raises:
        UserInputError: an argument is wrong.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        optimizer: Optimizer,
        *,
        accumulate: int = 1,
        clip: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        lowering: str = "inductor",
        strict: bool = False,
        verify: str = "first_call",
    ) -> None:
        _check_arguments(model, loss_fn, optimizer, accumulate, clip)
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self._accumulate = accumulate
        self._clip = clip
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._lowering = to_enum(Lowering, lowering, "lowering")
        self._strict = strict
        self._verify = to_enum(Verify, verify, "verify")
        if self._verify is Verify.ALWAYS:
            raise UserInputError("verify='always' is not offered by TrainStep; use 'first_call' or 'off'.")
        self._module = LossModule(model, loss_fn)
        self._live = LiveStep(
            self._module,
            loss_fn,
            optimizer,
            accumulate=accumulate,
            clip=clip,
            scale=None if self._scaler is None else self._scale,
        )
        self._steps: dict[Hashable, CompiledStep | Fallback] = {}
        self._fallbacks: collections.Counter[Fallback] = collections.Counter()
        self._micro_step = 0
        self._calls = 0
        self._compiled_calls = 0

    def __call__(self, *args: Any, loss_args: tuple[Any, ...] = (), **kwargs: Any) -> Tensor:
        """Train on one batch; return the detached loss, divided by `accumulate`.

        Args:
            args: positional arguments of the model.
            loss_args: further positional arguments of `loss_fn`, such as targets.
            kwargs: keyword arguments of the model.

        Raises:
            CaptureError, FallbackError: only with `strict`; nothing has been updated.
            VerificationError: only with `strict`; the eager loop's step has been applied.
        """
        inputs: Inputs = (args, kwargs, loss_args)
        last = self._micro_step + 1 == self._accumulate
        loss = self._dispatch(inputs, last) if torch.is_grad_enabled() else self._eager(inputs, last)
        self._micro_step = 0 if last else self._micro_step + 1
        self._calls += 1
        return loss

    def report(self) -> dict[str, Any]:
        """What happened so far: calls, graphs (one per signature), their nodes, lowerings and fallbacks with counts."""
        compiled = [step for step in self._steps.values() if isinstance(step, CompiledStep)]
        graphs = [
            {
                "nodes": step.step.nodes,
                "inputs": len(step.step.slots),
                "updated": len(step.step.updated),
                "random": step.step.random,
                "verified": step.verified,
            }
            for step in compiled
        ]
        return {
            "calls": self._calls,
            "compiled_calls": self._compiled_calls,
            "graphs": graphs,
            "nodes": sum(step.step.nodes for step in compiled),
            "lowering": self._lowering.value,
            "lowerings": len(compiled),
            "fallbacks": [
                {"kind": kind, "where": where, "reason": reason, "count": count}
                for (kind, where, reason), count in self._fallbacks.items()
            ],
        }

    def _dispatch(self, inputs: Inputs, last: bool) -> Tensor:
        updates = last and self._scaler is None and self._optimizer_fits()
        call = self._live.describe(inputs, updates=updates)
        key = (last, updates, self._live.key(call))
        found = self._steps.get(key)
        if found is None:
            return self._first_call(key, call, inputs, last, updates)
        if isinstance(found, Fallback):
            self._fallbacks[found] += 1
            return self._eager(inputs, last)
        return self._run(found, call, last, updates)

    def _optimizer_fits(self) -> bool:
        """Whether the update can be part of the graph; counted where it cannot."""
        reason = decline_reason(self.optimizer)
        if reason is not None:
            self._fall_back(Fallback("optimizer", type(self.optimizer).__name__, reason), FallbackError)
        return reason is None

    def _first_call(self, key: Hashable, call: Call, inputs: Inputs, last: bool, updates: bool) -> Tensor:
        """Capture, lower and verify for a new signature; the result is the eager loop's, which the check needs."""
        where = type(self.model).__name__
        if len(self._steps) >= MAX_SIGNATURES:
            reason = f"more than {MAX_SIGNATURES} signatures"
            self._fall_back(Fallback("signature_limit", where, reason), FallbackError)
            return self._eager(inputs, last)
        stage: str = "capture"
        try:
            function, flat = self._live.function(call)
            step = capture(function, flat)
            _check_memory(step, dict(zip(function.slots, flat, strict=True)))
            stage = "lowering"
            run = _lower(step, self._lowering)
            verifier = None if self._verify is Verify.OFF else StepVerifier(function, flat, step, run)
        except Exception as error:  # noqa: BLE001  the user's code or a compiler may raise anything; it is counted
            fallback = Fallback(stage, where, f"{type(error).__name__}: {_first_line(error)}")
            self._fall_back(fallback, CaptureError if stage == "capture" else FallbackError, error)
            self._steps[key] = fallback
            return self._eager(inputs, last)
        if verifier is None:
            self._steps[key] = compiled = CompiledStep(step, run, "off")
            return self._run(compiled, call, last, updates)
        loss = self._backward(inputs)
        if updates:
            self._update()
        before = dict(zip(function.slots, verifier.before, strict=True))
        verdict = verifier.compare(
            loss, self._live.results(step), lambda: self._float64(step, before, call, inputs, updates)
        )
        if last and not updates:
            self._update()
        if verdict.ok:
            self._steps[key] = CompiledStep(step, run, verdict.reason)
        else:
            self._steps[key] = fallback = Fallback("verification", where, verdict.reason)
            self._fall_back(fallback, VerificationError)
        return loss

    def _run(self, compiled: CompiledStep, call: Call, last: bool, updates: bool) -> Tensor:
        step = compiled.step
        tensors = self._live.gather(step.slots, call)
        with torch.no_grad(), autocast_off(step.device_types):
            loss, *grads = compiled.run(*tensors)
        for i, grad in zip(step.grad_outputs, grads, strict=True):
            call.layout.parameters[i].grad = grad
        if updates:
            self._live.finish(step, call)
        elif last:
            self._update()
        self._compiled_calls += 1
        return loss

    def _scale(self, device: torch.device) -> Tensor:
        assert self._scaler is not None, "a scale without a scaler"
        return self._scaler.scale(torch.ones((), device=device))

    def _float64(
        self, step: WholeStep, before: Mapping[Slot, Tensor], call: Call, inputs: Inputs, updates: bool
    ) -> dict[str, Tensor]:
        """Results of the eager loop in float64 on copies, from the state `before`; shares no code with the graph.

        Raises:
            RuntimeError: model and optimizer cannot be copied, or do not run in float64.
        """
        try:
            module, optimizer = copy.deepcopy((self._module, self.optimizer))
            twin = TrainStep(
                module.model,
                module.loss_fn,
                optimizer,
                accumulate=self._accumulate,
                clip=self._clip,
                scaler=self._scaler,
            )
            twin._live.restore({slot: _wide(tensor) for slot, tensor in before.items()}, call, updated=step.updated)
            with torch.random.fork_rng(range(torch.cuda.device_count())), autocast_off(step.device_types):
                loss = twin._backward(pytree.tree_map_only(Tensor, _wide, inputs))
                if updates:
                    twin._update()
            return {"loss": loss} | {label(slot): tensor for slot, tensor in twin._live.results(step).items()}
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise RuntimeError(f"{type(error).__name__}: {_first_line(error)}") from error

    def _eager(self, inputs: Inputs, last: bool) -> Tensor:
        loss = self._backward(inputs)
        if last:
            self._update()
        return loss

    def _backward(self, inputs: Inputs) -> Tensor:
        loss: Tensor = self._module(*inputs)
        if self._accumulate > 1:
            loss = loss / self._accumulate
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        return loss.detach()

    def _update(self) -> None:
        """Clip, step and zero the gradients, as the eager loop does on every `accumulate`-th call."""
        if self._clip is not None:
            if self._scaler is not None:
                self._scaler.unscale_(self.optimizer)
            every = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_([parameter for parameter in every if parameter.grad is not None], self._clip)
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _fall_back(self, fallback: Fallback, kind: type[FusewrightError], cause: BaseException | None = None) -> None:
        """Count a fallback, or raise it under `strict`."""
        if self._strict:
            raise kind(f"{fallback.kind} of {fallback.where}: {fallback.reason}") from cause
        self._fallbacks[fallback] += 1


def _check_arguments(model: object, loss_fn: object, optimizer: object, accumulate: object, clip: object) -> None:
    if not isinstance(model, nn.Module):
        raise UserInputError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if not callable(loss_fn):
        raise UserInputError(f"loss_fn must be callable, not {type(loss_fn).__name__}.")
    if not isinstance(optimizer, Optimizer):
        raise UserInputError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}.")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise UserInputError(f"accumulate must be a whole number of at least 1, not {accumulate!r}.")
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise UserInputError(f"clip must be a number above 0 or None, not {clip!r}.")


def _check_memory(step: WholeStep, tensors: dict[Slot, Tensor]) -> None:
    """Refuse what a functional graph would get wrong: two inputs in the same memory, one of them written.

    Raises:
        CaptureError: naming the input.
    """
    for slot in step.written:
        if slot.role == "argument":
            raise CaptureError("forward changes one of its arguments in place")
    shared = overlapping(tensors, step.written)
    if shared is not None:
        raise CaptureError(f"{shared.role} {shared.number} shares memory with another input of the step and is changed")


def overlapping(tensors: Mapping[Slot, Tensor], written: Iterable[Slot]) -> Slot | None:
    """A written slot whose memory another slot shares, or None. Meant for one check per graph: it sorts all tensors."""
    changed = set(written)
    spans = sorted(
        (
            (t.untyped_storage().data_ptr(), int(t.storage_offset()) * t.itemsize, _end(t), slot)
            for slot, t in tensors.items()
        ),
        key=lambda span: span[:3],
    )
    reach: dict[int, tuple[int, Slot]] = {}
    for storage, start, end, slot in spans:
        last = reach.get(storage)
        if last is not None and start < last[0] and (slot in changed or last[1] in changed):
            return slot if slot in changed else last[1]
        if last is None or end > last[0]:
            reach[storage] = (end, slot)
    return None


def _end(tensor: Tensor) -> int:
    """First byte after the tensor in its storage; its start where it is empty."""
    start = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return start * tensor.itemsize
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (start + extent + 1) * tensor.itemsize


def _lower(step: WholeStep, lowering: Lowering) -> Callable[..., Sequence[Tensor]]:
    """Compile the graph of `step`, which stays as it is.

    Random ops stay torch's own under Inductor, so that the step draws the same numbers as the eager loop.
    """
    options = (("fallback_random", True),) if step.random and lowering is Lowering.INDUCTOR else ()
    variant = GraphVariant(lowering=lowering, options=options)
    inputs = BucketInputs(step.mode, list(step.fakes))
    with torch.no_grad(), autocast_off(step.device_types):
        compiled, _ = lower(copy.deepcopy(step.graph_module), inputs, variant, {})
    return compiled


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
