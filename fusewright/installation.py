"""Puts the compiled call on a module or around a function, and on every copy that deepcopy or pickle makes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.comptime import comptime
from torch.autograd import forward_ad

from fusewright import config
from fusewright.autotune.key import KeyContext
from fusewright.autotune.plan import choose_from
from fusewright.capture.frontend import CallAgainError, FrontEnd, UncapturedError, current_frame, second_try
from fusewright.capture.record import Record
from fusewright.capture.shapes import Buckets
from fusewright.config import OFF, Numerics, Verify
from fusewright.errors import FallbackError, UserInputError
from fusewright.passes.base import Pass
from fusewright.pipeline.order import ORDER
from fusewright.pipeline.pipeline import Pipeline, insert_passes
from fusewright.runtime.backend import FusewrightBackend
from fusewright.runtime.fragment import Choose, Services
from fusewright.runtime.train_step import TrainStep
from fusewright.runtime.verdicts import VerdictFolder

HANDLE = "_fusewright"  # instance attribute of an optimized module; travels with deepcopy and pickle


class _Override(threading.local):
    choose: Choose | None = None


_OVERRIDE = _Override()


@contextlib.contextmanager
def choosing(choose: Choose) -> Iterator[None]:
    """Inside the block, models that are optimized in this thread ask `choose` instead of the tuning store."""
    before, _OVERRIDE.choose = _OVERRIDE.choose, choose
    try:
        yield
    finally:
        _OVERRIDE.choose = before


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Run every optimized model eagerly inside this block, in this thread."""
    OFF.depth += 1
    try:
        yield
    finally:
        OFF.depth -= 1


@dataclass(frozen=True)
class Options:
    """Everything `optimize` was told, checked; frozen so that a copied model can be optimized the same way.

    The tuner's `choose` does not travel with pickle: a copy in another process asks its own store.
    """

    dims: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    buckets: Buckets = field(default_factory=Buckets)
    numerics: Numerics = Numerics.REASSOCIATED
    store: str | None = None
    strict: bool = False
    verify: Verify = Verify.FIRST_CALL
    frozen_weights: bool = False
    passes: tuple[Pass, ...] = ()
    before: str | None = None


@dataclass(eq=False)
class Handle:
    """What an optimized module or function carries.

    Copying or unpickling a module optimizes the copy with the same options; its record starts empty.

    Attributes:
        options: what `optimize` was told.
        owner: returns the module or function that this handle was made for, or None.
        record: what happened to it.
        choose: the tuner's choice, or None for the store's.
    """

    options: Options
    owner: Callable[[], Any] = field(repr=False)
    record: Record = field(default_factory=Record, repr=False)
    choose: Choose | None = field(default=None, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        original = self.owner()
        copied = memo.get(id(original))
        if not isinstance(copied, torch.nn.Module):  # someone copies the attributes alone: no new module to optimize
            return Handle(self.options, _nobody)
        with choosing(self.choose) if self.choose is not None else contextlib.nullcontext():
            return install(copied, self.options, config.read_settings(), like=original)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_pending, (self.options,), self.owner())

    def __setstate__(self, owner: torch.nn.Module) -> None:
        made = install(owner, self.options, config.read_settings())
        self.owner, self.record = made.owner, made.record


def _nobody() -> None:
    return None


def _pending(options: Options) -> Handle:
    return Handle(options, _nobody)


def install(
    model: torch.nn.Module, options: Options, settings: config.Settings, like: torch.nn.Module | None = None
) -> Handle:
    """Replace the call of `model`.

    Args:
        model: may be half made (deepcopy, unpickling), so only its class and dict are used.
        options: what `optimize` was told.
        settings: the environment.
        like: a finished module with the same forward.
    """
    call, record = build(model._call_impl, type(model).__name__, _signature(model, like), options, settings)
    handle = Handle(options, weakref.ref(model), record, _OVERRIDE.choose)
    model.__dict__["_compiled_call_impl"] = call
    model.__dict__[HANDLE] = handle
    return handle


def _signature(model: torch.nn.Module, like: torch.nn.Module | None) -> inspect.Signature:
    if like is not None:
        return inspect.signature(like.forward)
    if "forward" in model.__dict__:
        return inspect.signature(model.forward)
    whole = inspect.signature(type(model).forward)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


def install_function(function: Callable[..., Any], options: Options, settings: config.Settings) -> Callable[..., Any]:
    """Return a callable that runs `function` compiled."""
    name = function.__name__ if hasattr(function, "__name__") else type(function).__name__
    call, record = build(function, name, inspect.signature(function), options, settings)
    wrapped = functools.wraps(function)(call)
    vars(wrapped)[HANDLE] = Handle(options, weakref.ref(wrapped), record, _OVERRIDE.choose)
    return wrapped


def build(
    call_impl: Callable[..., Any],
    name: str,
    signature: inspect.Signature,
    options: Options,
    settings: config.Settings,
) -> tuple[Callable[..., Any], Record]:
    """Return the optimized form of `call_impl` and its record; nothing is compiled before the first call."""
    record = Record()
    services = services_of(record, options, settings)
    front = FrontEnd(FusewrightBackend(services), record, options.dims, signature, options.strict)
    compiled = front.compile(call_impl, name)
    bump, bump_disabled, off = record.calls.bump, record.disabled_calls.bump, OFF

    def inlined(_: Any) -> None:
        _count_inlined(record, name, options.strict)

    def optimized(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            comptime(inlined)  # runs once, while Dynamo traces
            return call_impl(*args, **kwargs)
        if off.depth:
            bump_disabled()
            return call_impl(*args, **kwargs)
        if forward_ad._current_level >= 0:
            return forward_mode(record, options.strict, call_impl, args, kwargs)
        bump()
        try:
            return compiled(*args, **kwargs)
        except CallAgainError:
            with second_try():
                return compiled(*args, **kwargs)
        except UncapturedError:
            with disabled():
                call_impl(*args, **kwargs)  # a model that raises shows its own exception, also under strict
            raise

    front.wrapper_code = optimized.__code__
    return optimized, record


def _count_inlined(record: Record, name: str, strict: bool) -> None:
    """Count that another compilation, not ours, traces through the model: its graph holds none of our rewrites."""
    if OFF.depth or current_frame() is not None:  # switched off, or part of another optimized model
        return
    reason = "an outer torch.compile traces through the model, so that its graph and not ours runs"
    if strict:
        raise FallbackError(f"{name}: {reason}; compile no function that calls an optimized model.")
    record.add_fallback("inlined", name, reason)


def forward_mode(
    record: Record, strict: bool, call_impl: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run eagerly inside `torch.autograd.forward_ad.dual_level`: compiled code drops tangents without a word."""
    reason = "forward-mode derivatives are asked for, which compiled graphs do not carry"
    if strict:
        raise FallbackError(f"{reason}; use fusewright.disabled() around the call, or torch.func.jvp.")
    record.add_fallback("forward_mode", "call", reason)
    return call_impl(*args, **kwargs)


def services_of(record: Record, options: Options, settings: config.Settings) -> Services:
    """What the fragments of one optimized model share."""
    order = insert_passes(ORDER, options.passes, options.before)
    return Services(
        pipeline=Pipeline(order, settings, options.numerics, options.strict, options.frozen_weights),
        record=record,
        choose=_OVERRIDE.choose or _chooser(options),
        buckets=options.buckets,
        verdicts=VerdictFolder.under(settings.cache_dir),
        verify=options.verify,
        strict=options.strict,
    )


def _chooser(options: Options) -> Choose:
    """Read winners from the tuning store; without a store every bucket gets the default variant."""
    digests = ",".join(p.digest() for p in options.passes)

    def context(device: torch.device) -> KeyContext:
        return KeyContext.current(
            device, numerics=options.numerics, frozen_weights=options.frozen_weights, user_passes=digests
        )

    plan = choose_from(options.store, context)
    plan.open()
    return plan


def record_of(model: Any) -> Record:
    """The record of an optimized module or function, or of a `TrainStep`.

    Raises:
        UserInputError: the model is not optimized.
    """
    if isinstance(model, TrainStep):
        return model.record
    handle = vars(model).get(HANDLE) if isinstance(model, torch.nn.Module) or inspect.isfunction(model) else None
    if not isinstance(handle, Handle):
        raise UserInputError("model: not optimized; call fusewright.optimize(model) first.")
    if isinstance(model, torch.nn.Module) and handle.owner() is not model:
        raise UserInputError(
            "model: a shallow copy of an optimized model is not optimized; use copy.deepcopy, or optimize the copy."
        )
    return handle.record
