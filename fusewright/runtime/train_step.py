"""`TrainStep`: a whole training step as one compiled call, with the results of the eager loop."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fusewright.capture.optimizer_update import decline_reason
from fusewright.capture.step_state import (
    Layout,
    ModuleState,
    OptimizerState,
    OptimizerView,
    ambient_key,
    gradient_hooks,
    overlapping,
    parameter_key,
    state_key,
    tensor_key,
)
from fusewright.capture.variant import GraphVariant, Lowering
from fusewright.capture.whole_step import (
    Constant,
    ParameterPlan,
    Slot,
    StepFunction,
    StepPlan,
    WholeStep,
    autocast_off,
    capture,
)
from fusewright.config import Verify, to_enum
from fusewright.errors import CaptureError, FallbackError, FusewrightError, UserInputError, VerificationError
from fusewright.runtime.fakes import BucketInputs
from fusewright.runtime.lower import lower
from fusewright.runtime.step_verify import StepVerifier, label

Inputs = tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]

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
class Call:
    """One call as the graph sees it: the live objects, flattened arguments and what the optimizer would do."""

    layout: Layout
    view: OptimizerView
    tensors: list[Tensor]
    constants: tuple[Constant | None, ...]
    spec: pytree.TreeSpec
    in_graph_update: bool


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
        scaler: unscaling, clipping and the optimizer run outside of the graph, so that a step with infinities is skipped.
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
        self._module_state = ModuleState(self._module, optimizer)
        self._optimizer_state = OptimizerState(optimizer)
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
            CaptureError, VerificationError, FallbackError: only with `strict`; nothing has been updated then.
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
        call = self._describe(inputs, last)
        key = self._key(call, last)
        found = self._steps.get(key)
        if found is None:
            return self._first_call(key, call, inputs, last)
        if isinstance(found, Fallback):
            self._fallbacks[found] += 1
            return self._eager(inputs, last)
        return self._run(found, call, last)

    def _describe(self, inputs: Inputs, last: bool) -> Call:
        layout = self._module_state.layout()
        in_graph_update = last and self._scaler is None
        if in_graph_update:
            reason = decline_reason(self.optimizer)
            if reason is not None:
                in_graph_update = False
                self._fall_back(Fallback("optimizer", type(self.optimizer).__name__, reason), FallbackError)
        view = (
            self._optimizer_state.view(layout.parameters)
            if in_graph_update
            else OptimizerView([None] * len(layout.parameters), [], [])
        )
        leaves, spec = pytree.tree_flatten(inputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        constants = tuple(None if isinstance(leaf, Tensor) else Constant(leaf) for leaf in leaves)
        return Call(layout, view, tensors, constants, spec, in_graph_update)

    def _key(self, call: Call, last: bool) -> Hashable:
        """Everything that the graph of `call` assumes."""
        parameters = call.layout.parameters
        devices = sorted({parameter.device.type for parameter in parameters} | {t.device.type for t in call.tensors})
        return (
            call.layout.structure,
            last,
            tuple(call.view.rules),
            parameter_key(parameters, call.view.bucket),
            state_key(self.optimizer.state, parameters) if call.in_graph_update else (),
            tuple(map(tensor_key, call.layout.buffers)),
            tuple(tensor_key(vars(owner)[name]) for owner, name in call.layout.attributes),
            tuple(map(tensor_key, call.tensors)),
            tuple(None if c is None else _constant_key(c.value) for c in call.constants),
            call.spec,
            ambient_key(devices),
        )

    def _first_call(self, key: Hashable, call: Call, inputs: Inputs, last: bool) -> Tensor:
        """Capture, lower and verify for a new signature; the result is the eager loop's, which the check runs anyway."""
        where = type(self.model).__name__
        if len(self._steps) >= MAX_SIGNATURES:
            reason = f"more than {MAX_SIGNATURES} signatures"
            self._fall_back(Fallback("signature_limit", where, reason), FallbackError)
            return self._eager(inputs, last)
        stage, kind = "capture", CaptureError
        try:
            function, flat = self._function(call)
            step = capture(function, flat)
            _check_memory(step, dict(zip(function.slots, flat, strict=True)))
            stage, kind = "lowering", FallbackError
            run = _lower(step, self._lowering)
            if self._verify is Verify.OFF:
                self._steps[key] = compiled = CompiledStep(step, run, "off")
                return self._run(compiled, call, last)
            verifier = StepVerifier(function, flat, step)
            verifier.run(run)
        except Exception as error:  # noqa: BLE001  the user's code or a compiler may raise anything; it is counted
            fallback = Fallback(stage, where, f"{type(error).__name__}: {_first_line(error)}")
            self._fall_back(fallback, kind, error)
            self._steps[key] = fallback
            return self._eager(inputs, last)
        loss = self._backward(inputs)
        if call.in_graph_update:
            self._update()
        verdict = verifier.compare(loss, self._live_results(step))
        if last and not call.in_graph_update:
            self._update()
        if verdict.ok:
            self._steps[key] = CompiledStep(step, run, verdict.reason)
        else:
            self._steps[key] = fallback = Fallback("verification", where, verdict.reason)
            self._fall_back(fallback, VerificationError)
        return loss

    def _function(self, call: Call) -> tuple[StepFunction, list[Tensor]]:
        """The step as a function and its inputs now."""
        layout = call.layout
        for name, parameter in zip(layout.names, layout.parameters, strict=True):
            if parameter._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
                raise CaptureError(f"parameter {name!r} has a hook that runs after its gradient is accumulated")
        if any(tensor.requires_grad for tensor in call.tensors):
            raise CaptureError("an argument requires a gradient")
        plan = StepPlan(
            tuple(
                ParameterPlan(name, parameter.requires_grad, parameter.grad is not None, bucket)
                for name, parameter, bucket in zip(layout.names, layout.parameters, call.view.bucket, strict=True)
            ),
            tuple(layout.buffer_names),
            tuple(layout.attributes),
            tuple(call.view.rules),
            call.spec,
            call.constants,
            self._accumulate,
            self._clip,
            self._scaler is not None,
        )
        function = StepFunction(self._module, plan, gradient_hooks(layout.parameters))
        return function, self._gather(function.slots, call, {})

    def _gather(self, slots: Sequence[Slot], call: Call, fresh: dict[Tensor, dict[str, Tensor]]) -> list[Tensor]:
        """The live tensor of each slot. State that torch has not made yet goes to `fresh`, not to the optimizer."""
        layout = call.layout
        values = [torch.tensor(v, dtype=torch.float64).unbind() for v in call.view.values]
        names = [rule.scalar_names for rule in call.view.rules]
        found: list[Tensor] = []
        for role, i, name in slots:
            if role == "param":
                found.append(layout.parameters[i])
            elif role == "state":
                found.append(self._optimizer_state.tensor(layout.parameters[i], name, fresh))
            elif role == "grad":
                grad = layout.parameters[i].grad
                assert grad is not None, f"{layout.names[i]} has no gradient, and the signature says that it has"
                found.append(grad)
            elif role == "buffer":
                found.append(layout.buffers[i])
            elif role == "attribute":
                owner, attribute = layout.attributes[i]
                found.append(vars(owner)[attribute])
            elif role == "scalar":
                found.append(values[i][names[i].index(name)])
            elif role == "scale":
                assert self._scaler is not None, "a scale without a scaler"
                found.append(self._scaler.scale(torch.ones((), device=layout.parameters[0].device)))
            else:
                found.append(call.tensors[i])
        return found

    def _run(self, compiled: CompiledStep, call: Call, last: bool) -> Tensor:
        step, parameters = compiled.step, call.layout.parameters
        fresh: dict[Tensor, dict[str, Tensor]] = {}
        tensors = self._gather(step.slots, call, fresh)
        with torch.no_grad(), autocast_off(step.device_types):
            loss, *grads = compiled.run(*tensors)
        for i, grad in zip(step.grad_outputs, grads, strict=True):
            parameters[i].grad = grad
        if call.in_graph_update:
            rules = [call.view.rule(i) for i in step.updated]
            self._optimizer_state.commit([parameters[i] for i in step.updated], rules, fresh)
            for i, bucket in enumerate(call.view.bucket):
                if bucket is not None:
                    parameters[i].grad = None
        elif last:
            self._update()
        self._compiled_calls += 1
        return loss

    def _live_results(self, step: WholeStep) -> dict[str, Tensor]:
        """What the eager loop left in the slots that `step` writes, and the gradients that it hands out."""
        layout = self._module_state.layout()
        results: dict[str, Tensor] = {}
        for slot in step.results:
            role, i, name = slot
            value: Tensor | None
            if role == "param":
                value = layout.parameters[i]
            elif role == "grad":
                value = layout.parameters[i].grad
            elif role == "state":
                value = self.optimizer.state[layout.parameters[i]][name]
            elif role == "buffer":
                value = layout.buffers[i]
            else:
                owner, attribute = layout.attributes[i]
                value = vars(owner)[attribute]
            if value is not None:
                results[label(slot)] = value.detach()
        return results

    def _eager(self, inputs: Inputs, last: bool) -> Tensor:
        loss = self._backward(inputs)
        if last:
            self._update()
        return loss

    def _backward(self, inputs: Inputs) -> Tensor:
        loss = self._module(*inputs)
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
        raise CaptureError(f"{shared.role} {shared.index} shares memory with another input of the step and is changed")


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


def _constant_key(value: object) -> Hashable:
    """A constant argument by type and value.

    Raises:
        UserInputError: it cannot be hashed, so that a change could not be seen.
    """
    try:
        hash(value)
    except TypeError as error:
        raise UserInputError(f"an argument of type {type(value).__name__} is neither tensor nor hashable.") from error
    return (type(value), value)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
