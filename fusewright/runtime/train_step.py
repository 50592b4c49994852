"""`TrainStep`: a whole training step as one compiled call, with the results of the eager loop."""

from __future__ import annotations

import contextlib
import copy
import inspect
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fusewright import config
from fusewright.capture.record import Fallback, Record
from fusewright.capture.step.function import Slot, StepFunction, autocast_off
from fusewright.capture.step.optimizer_update import decline_reason
from fusewright.capture.step.state import Call, Inputs, LiveStep
from fusewright.capture.step.trace import WholeStep
from fusewright.capture.variant import Lowering
from fusewright.config import OFF, Numerics, Verify, to_enum
from fusewright.errors import CaptureError, FallbackError, FusewrightError, UserInputError, VerificationError
from fusewright.numerics import TreeComparison
from fusewright.passes.base import Pass
from fusewright.pipeline.order import ORDER
from fusewright.pipeline.pipeline import Pipeline, insert_passes
from fusewright.runtime.step_verify import (
    NOT_VERIFIED,
    CompiledStep,
    KnownToDisagreeError,
    LoweringPlan,
    StepBuilder,
    StepVerifier,
    check_memory,
    eager_side,
    label,
)
from fusewright.runtime.verdicts import VerdictFolder
from fusewright.runtime.verify import Comparison

MAX_SIGNATURES = 64
"""Steps compiled per `TrainStep`; a further signature runs eagerly and is counted, so that memory stays bounded."""


class LossModule(nn.Module):
    """`loss_fn(model(*args, **kwargs), *loss_args)` as one module, so that a loss with parameters is trained too."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], loss_args: tuple[Any, ...]) -> Tensor:
        """The loss of one batch."""
        loss = self.loss_fn(self.model(*args, **kwargs), *loss_args)
        if not isinstance(loss, Tensor):
            raise UserInputError(f"loss_fn must return a tensor, not {type(loss).__name__}.")
        return loss


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
    `report()`; with `strict` it is an error. Passes of all stages run; those of the forward need forward and loss to be
    one graph of Dynamo, and are declined with the reason where they are not.

    Args:
        model: the module to train.
        loss_fn: takes the model's output (and `loss_args` of the call) and returns a loss of one element.
        optimizer: SGD, Adam and AdamW of torch.optim become part of the graph; others run eagerly after it.
        accumulate: calls per optimizer step; the loss is divided by it.
        clip: largest 2-norm of the gradients of all of the optimizer's parameters together.
        scaler: unscaling, clipping and the optimizer run outside of the graph, so that infinities skip it.
        lowering: "inductor", "aot_eager" or "eager" (the captured graph as it is).
        strict: raise instead of falling back to the eager loop (default `FUSEWRIGHT_STRICT`).
        verify: "first_call" compares the first call of every signature with the eager loop, unless an earlier process
            did; "off" does not (default `FUSEWRIGHT_VERIFY`, whose "always" means the first call here).
        numerics: loosest tier of the passes' rewrites, as for `optimize`.
        passes: more passes, put before the pass named `before`, or last.

    Raises:
        UserInputError: an argument is wrong; CacheFolderError: the cache folder cannot be written.
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
        strict: bool | None = None,
        verify: str | Verify | None = None,
        numerics: str | Numerics = Numerics.REASSOCIATED,
        passes: Sequence[Pass] = (),
        before: str | None = None,
    ) -> None:
        _check_arguments(model, loss_fn, optimizer, accumulate, clip)
        settings = config.read_settings()
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self._accumulate = accumulate
        self._clip = clip
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._strict = settings.strict if strict is None else strict
        self._verify = settings.verify if verify is None else to_enum(Verify, verify, "verify")
        if self._verify is Verify.ALWAYS and verify is not None:
            raise UserInputError("verify='always' is not offered by TrainStep; use 'first_call' or 'off'.")
        order = insert_passes(ORDER, passes, before)
        pipeline = Pipeline(order, settings, to_enum(Numerics, numerics, "numerics"), self._strict)
        self._disabled = settings.disabled
        self.record = Record()
        verdicts = VerdictFolder.under(settings.cache_dir)
        self._builder = StepBuilder(pipeline, self.record, verdicts, to_enum(Lowering, lowering, "lowering"))
        self._module = LossModule(model, loss_fn)
        self._live = LiveStep(self._module, optimizer, accumulate, clip, None if self._scaler is None else self._scale)
        self._steps: dict[Hashable, CompiledStep | Fallback] = {}
        self._micro_step = 0

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
        off = self._disabled or OFF.depth > 0
        loss = self._eager(inputs, last) if off or not torch.is_grad_enabled() else self._dispatch(inputs, last)
        self._micro_step = (self._micro_step + 1) % self._accumulate
        (self.record.disabled_calls if off else self.record.calls).bump()
        return loss

    def report(self) -> dict[str, Any]:
        """What happened so far: calls, graphs (one per signature), their nodes, lowerings, rewrites of passes, and
        with counts what was declined or fell back."""
        record = self.record
        compiled = [step for step in self._steps.values() if isinstance(step, CompiledStep)]
        return {
            "calls": record.calls.value,
            "disabled_calls": record.disabled_calls.value,
            "compiled_calls": sum(step.dispatched for step in compiled),
            "graphs": [step.summary() for step in compiled],
            "nodes": sum(step.step.nodes for step in compiled),
            "lowering": self._builder.lowering.value,
            "lowerings": len(compiled),
            "rewrites": dict(record.rewrites),
            "declines": [
                {"pass": name, "node": node, "reason": reason, "count": count}
                for (name, node, reason), count in record.declines.items()
            ],
            "fallbacks": [vars(fallback) | {"count": count} for fallback, count in record.fallbacks.items()],
        }

    def _dispatch(self, inputs: Inputs, last: bool) -> Tensor:
        updates = last and self._scaler is None and self._optimizer_fits()
        call = self._live.describe(inputs, updates=updates)
        try:
            key = (last, updates, self._live.key(call))
        except CaptureError as error:
            self._fall_back(Fallback("capture", type(self.model).__name__, str(error)), CaptureError, error)
            return self._eager(inputs, last)
        found = self._steps.get(key)
        if found is None:
            return self._first_call(key, call, last)
        if isinstance(found, Fallback):
            self.record.add_fallback(found.kind, found.where, found.reason)
            return self._eager(inputs, last)
        return self._run(found, call, last)

    def _optimizer_fits(self) -> bool:
        """Whether the update can be part of the graph; counted where it cannot."""
        reason = decline_reason(self.optimizer)
        if reason is not None:
            self._fall_back(Fallback("optimizer", type(self.optimizer).__name__, reason), FallbackError)
        return reason is None

    def _first_call(self, key: Hashable, call: Call, last: bool) -> Tensor:
        """Capture, lower and verify for a new signature; the result is the eager loop's where a comparison needs it."""
        where = type(self.model).__name__
        if len(self._steps) >= MAX_SIGNATURES:
            reason = f"more than {MAX_SIGNATURES} signatures"
            self._fall_back(Fallback("signature_limit", where, reason), FallbackError)
            return self._eager(call.inputs, last)
        stage: str = "capture"
        try:
            name = f"step{len(self._steps)}"
            function, flat, step = self._capture(call, name)
            stage = "lowering"
            assumed = (call.updates, tuple(call.view.rules), *eager_side(self._module, self.optimizer))
            plan = self._builder.plan(step, name, assumed)
            known = NOT_VERIFIED if self._verify is Verify.OFF else self._builder.known(step, plan)
            with self._timed("lower"):
                run = self._builder.lower(step, plan)
            with self._timed("verify"):
                verifier = StepVerifier(function, flat, step, run) if known is None else None
        except UserInputError:
            raise
        except KnownToDisagreeError as error:
            return self._reject(key, error.verdict, self._eager(call.inputs, last))
        except Exception as error:  # noqa: BLE001  the user's code or a compiler may raise anything; it is counted
            fallback = Fallback(stage, where, f"{type(error).__name__}: {_first_line(error)}")
            self._fall_back(fallback, CaptureError if stage == "capture" else FallbackError, error)
            self._steps[key] = fallback
            return self._eager(call.inputs, last)
        if verifier is None:
            assert known is not None, "neither compared nor known"
            return self._run(self._add(key, step, plan, run, known), call, last)
        with self._timed("verify"):
            before = dict(zip(function.slots, verifier.before, strict=True))
            loss, compared = self._compare(verifier, before, step, call, last)
            verdict = self._builder.keep(plan, compared)
        if not verdict.ok:
            return self._reject(key, verdict, loss)
        self._add(key, step, plan, run, verdict)
        return loss

    def _capture(self, call: Call, name: str) -> tuple[StepFunction, list[Tensor], WholeStep]:
        """The step as a function, its inputs now, and its graph."""
        with self._timed("capture"):
            function, flat, step = self._builder.capture(self._module, call, self._live, name)
            check_memory(step, dict(zip(function.slots, flat, strict=True)))
        return function, flat, step

    def _compare(
        self, verifier: StepVerifier, before: Mapping[Slot, Tensor], step: WholeStep, call: Call, last: bool
    ) -> tuple[Tensor, TreeComparison]:
        """Run the eager loop on the live objects and compare it with what `verifier` saw; return the loss too."""
        loss = self._backward(call.inputs)
        if call.updates:
            self._update()
        compared = verifier.compare(loss, self._live.results(step), lambda: self._float64(step, before, call))
        if last and not call.updates:
            self._update()
        return loss, compared

    def _add(
        self, key: Hashable, step: WholeStep, plan: LoweringPlan, run: Callable[..., Any], verdict: Comparison
    ) -> CompiledStep:
        self._steps[key] = compiled = CompiledStep(step, plan, run, verdict)
        self.record.add_fragment(compiled)
        return compiled

    def _reject(self, key: Hashable, verdict: Comparison, loss: Tensor) -> Tensor:
        """Leave a signature to the eager loop, whose `loss` this returns: the compiled step disagrees with it."""
        reason = f"{verdict.what}: {verdict.detail}"
        self._steps[key] = fallback = Fallback("verification", type(self.model).__name__, reason)
        self._fall_back(fallback, VerificationError)
        return loss

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.record.add_seconds(what, time.perf_counter() - start)

    def _run(self, compiled: CompiledStep, call: Call, last: bool) -> Tensor:
        step = compiled.step
        tensors = self._live.gather(step.slots, call)
        with torch.no_grad(), autocast_off(step.device_types):
            loss, *grads = compiled.run(*tensors)
        for i, grad in zip(step.grad_outputs, grads, strict=True):
            call.layout.parameters[i].grad = grad
        if call.updates:
            self._live.finish(step, call)
        elif last:
            self._update()
        compiled.slots[0].hits.bump()
        return loss

    def _scale(self, device: torch.device) -> Tensor:
        assert self._scaler is not None, "a scale without a scaler"
        return self._scaler.scale(torch.ones((), device=device))

    def _float64(self, step: WholeStep, before: Mapping[Slot, Tensor], call: Call) -> dict[str, Tensor]:
        """Results of the eager loop in float64 on copies, from the state `before`; shares no code with the graph.

        Raises:
            RuntimeError: model and optimizer cannot be copied, or do not run in float64.
        """
        try:
            module, optimizer = copy.deepcopy((self._module, self.optimizer))
            options: dict[str, Any] = {"accumulate": self._accumulate, "clip": self._clip, "scaler": self._scaler}
            twin = TrainStep(module.model, module.loss_fn, optimizer, **options)
            _restore(twin._live, {slot: _wide(tensor) for slot, tensor in before.items()}, call, step.updated)
            with torch.random.fork_rng(range(torch.cuda.device_count())), autocast_off(step.device_types):
                loss = twin._backward(pytree.tree_map_only(Tensor, _wide, call.inputs))
                if call.updates:
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
            if kind is VerificationError:  # the only one raised after the eager loop's step
                self._micro_step = (self._micro_step + 1) % self._accumulate
            raise kind(f"{fallback.kind} of {fallback.where}: {fallback.reason}") from cause
        self.record.add_fallback(fallback.kind, fallback.where, fallback.reason)


def _check_arguments(model: object, loss_fn: object, optimizer: object, accumulate: object, clip: object) -> None:
    if not isinstance(model, nn.Module):
        raise UserInputError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if not callable(loss_fn):
        raise UserInputError(f"loss_fn must be callable, not {type(loss_fn).__name__}.")
    if not isinstance(optimizer, Optimizer):
        raise UserInputError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}.")
    for name, part in model.named_modules():
        if "_fusewright" in vars(part):  # installation.HANDLE, which is imported after this stage
            raise UserInputError(f"model {name} is optimized already; pass the plain model: TrainStep optimizes it.")
    closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserInputError(f"{type(optimizer).__name__}.step needs a closure, which TrainStep does not give it.")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise UserInputError(f"accumulate must be a whole number of at least 1, not {accumulate!r}.")
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise UserInputError(f"clip must be a number above 0 or None, not {clip!r}.")


def _restore(live: LiveStep, before: Mapping[Slot, Tensor], call: Call, updated: Sequence[int]) -> None:
    """Put the tensors of `before` into the objects of `live`: copies of those that `call` described, one step later."""
    layout, state = live.module_state.layout(), live.optimizer.state
    for parameter, original in zip(layout.parameters, call.layout.parameters, strict=True):
        parameter.grad = None
        if original in call.fresh:
            state.pop(parameter, None)
    for i in updated:
        counter = state.get(layout.parameters[i], {}).get("step")
        if isinstance(counter, Tensor) and Slot("state", i, "step") not in before:
            counter.sub_(1)
    for (role, i, name), tensor in before.items():  # parameters come first: their gradients need their dtype
        if role in ("param", "buffer"):
            (layout.parameters if role == "param" else layout.buffers)[i].data = tensor
        elif role == "attribute":
            owner, attribute = layout.attributes[i]
            vars(owner)[attribute] = tensor
        elif role == "grad":
            layout.parameters[i].grad = tensor
        elif role == "state" and layout.parameters[i] in state:
            state[layout.parameters[i]][name] = tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
