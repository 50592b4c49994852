"""The public entry points: `optimize` a model in place, ask it to `explain` itself, switch it off."""

from __future__ import annotations

import contextlib
import functools
import inspect
import pathlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from fusewright import config
from fusewright.autotune.key import KeyContext
from fusewright.autotune.plan import choose_from
from fusewright.capture.frontend import FrontEnd
from fusewright.capture.record import Record
from fusewright.capture.shapes import Buckets, check_buckets, check_dims
from fusewright.config import Effort, Numerics, Verify, to_enum
from fusewright.errors import UnsupportedTorchError, UserInputError
from fusewright.passes.base import Pass
from fusewright.pipeline.order import ORDER
from fusewright.pipeline.pipeline import Pipeline, insert_passes
from fusewright.report.explain import Explanation, explain_record
from fusewright.runtime.backend import FusewrightBackend
from fusewright.runtime.fragment import Choose, Services
from fusewright.runtime.verdicts import VerdictFolder

OLDEST_TORCH = (2, 11)
_T = TypeVar("_T", bound=Callable[..., Any])
_HANDLE = "_fusewright"  # instance attribute of an optimized module; travels with deepcopy and pickle


class _Off(threading.local):
    depth = 0


_OFF = _Off()


class _Override(threading.local):
    choose: Choose | None = None


_OVERRIDE = _Override()


@contextlib.contextmanager
def _choosing(choose: Choose) -> Iterator[None]:
    _OVERRIDE.choose = choose
    try:
        yield
    finally:
        _OVERRIDE.choose = None


@dataclass(frozen=True)
class Options:
    """Everything `optimize` was told, checked; frozen so that a copied model can be optimized the same way."""

    dims: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    buckets: Buckets = field(default_factory=Buckets)
    numerics: Numerics = Numerics.REASSOCIATED
    store: str | None = None
    strict: bool = False
    verify: Verify = Verify.FIRST_CALL
    frozen_weights: bool = False
    passes: tuple[Pass, ...] = ()
    before: str | None = None


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Run every optimized model eagerly inside this block, in this thread."""
    _OFF.depth += 1
    try:
        yield
    finally:
        _OFF.depth -= 1


def optimize(
    model: _T,
    *,
    dims: Mapping[str, Mapping[int, str]] | None = None,
    buckets: Mapping[str, Sequence[int | Sequence[int]]] | None = None,
    numerics: str | Numerics = Numerics.REASSOCIATED,
    effort: str | Effort = Effort.NONE,
    store: str | pathlib.Path | None = None,
    strict: bool | None = None,
    verify: str | Verify | None = None,
    frozen_weights: bool = False,
    passes: Sequence[Pass] = (),
    before: str | None = None,
) -> _T:
    """Optimize a module in place, or return an optimized version of a function.

    A module keeps its identity: same object, class, parameters and `state_dict` keys; only its call is replaced.
    Nothing is compiled before the first call.

    Args:
        model: an `nn.Module` or a function of tensors.
        dims: names of dynamic dimensions, `{"input_ids": {1: "tokens"}}`: argument -> dimension -> name.
        buckets: for a named dimension, ascending upper edges `{"tokens": [128, 512]}` or joined ranges; each bucket is
            lowered on its first call. Without edges a named dimension is one open bucket.
        numerics: "exact", "reassociated" (default) or "lossy": the loosest tier of *our* rewrites; Inductor itself is
            not bitwise equal to eager under any setting.
        effort: "none"; tuning inside the process is not offered, use `fusewright tune`.
        store: tuning store (path or URL) whose winners are used; default `FUSEWRIGHT_STORE`, else the defaults.
        strict: raise where anything would fall back (default `FUSEWRIGHT_STRICT`).
        verify: "first_call" (default), "always" or "off": when a lowered graph is compared with eager.
        frozen_weights: promise that parameters do not change while this model infers.
        passes: more passes of your own, put before the pass named `before`.

    Returns:
        `model` itself for a module, a new callable for a function.

    Raises:
        UserInputError: an argument is wrong; the model is left as it was.
        UnsupportedTorchError: torch is too old.
        CacheFolderError: the cache folder cannot be written.
    """
    _check_torch()
    settings = config.read_settings()
    if not isinstance(model, torch.nn.Module) and not callable(model):
        raise UserInputError(f"model: expected an nn.Module or a function, got {type(model).__name__}.")
    if isinstance(model, type):
        raise UserInputError(f"model: {model.__name__} is a class; pass an instance of it.")
    signature = inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)
    checked = check_dims(dims, _argument_names(signature))
    if to_enum(Effort, effort, "effort") is not Effort.NONE:
        raise UserInputError("effort: only 'none' runs inside a process; tune offline with `fusewright tune`.")
    options = replace(
        _default_options(),
        dims=checked,
        buckets=check_buckets(buckets, checked),
        numerics=to_enum(Numerics, numerics, "numerics"),
        store=str(store) if store is not None else settings.store,
        strict=settings.strict if strict is None else strict,
        verify=settings.verify if verify is None else to_enum(Verify, verify, "verify"),
        frozen_weights=frozen_weights,
        passes=tuple(passes),
        before=before,
    )
    if settings.disabled:
        return model
    if isinstance(model, torch.nn.Module):
        _install(model, options, settings)
        return model
    name = model.__name__ if hasattr(model, "__name__") else type(model).__name__
    call, record = _build(model, name, signature, options, settings)
    wrapped = functools.wraps(model)(call)
    vars(wrapped)[_HANDLE] = Handle(options, lambda: None, record)
    return wrapped  # type: ignore[return-value]


def _default_options() -> Options:
    settings = config.read_settings()
    return Options(store=settings.store, strict=settings.strict, verify=settings.verify)


def _check_torch() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise UnsupportedTorchError(f"torch {torch.__version__} is not supported; install torch >= {oldest}.")


def _argument_names(signature: inspect.Signature) -> list[str] | None:
    kinds = [p.kind for p in signature.parameters.values()]
    return None if inspect.Parameter.VAR_KEYWORD in kinds else list(signature.parameters)


@dataclass(eq=False)
class Handle:
    """What an optimized module carries; copying or unpickling the module optimizes the copy with the same options."""

    options: Options
    owner: Any = field(repr=False)  # weakref to the module
    record: Record = field(default_factory=Record, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        original = self.owner()
        copied = memo.get(id(original))
        if copied is None:  # someone copies the module's __dict__ by hand; there is no new module to optimize
            return Handle(self.options, self.owner)
        return _install(copied, self.options, config.read_settings(), like=original)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_pending, (self.options,), self.owner())

    def __setstate__(self, owner: torch.nn.Module) -> None:
        made = _install(owner, self.options, config.read_settings())
        self.owner, self.record = made.owner, made.record


def _pending(options: Options) -> Handle:
    return Handle(options, lambda: None)


def _install(
    model: torch.nn.Module, options: Options, settings: config.Settings, like: torch.nn.Module | None = None
) -> Handle:
    """Replace the call of `model`. It may be half made (deepcopy, unpickling), so only its class and dict are used."""
    signature = inspect.signature((like if like is not None else type(model)).forward)
    if like is None:
        parameters = list(signature.parameters.values())[1:] if "forward" not in model.__dict__ else None
        signature = (
            signature.replace(parameters=parameters) if parameters is not None else inspect.signature(model.forward)
        )
    reference = weakref.ref(model)
    call, record = _build(model._call_impl, type(model).__name__, signature, options, settings)
    handle = Handle(options, reference, record)
    model.__dict__["_compiled_call_impl"] = call
    model.__dict__[_HANDLE] = handle
    return handle


def _build(
    call_impl: Callable[..., Any], name: str, signature: inspect.Signature, options: Options, settings: config.Settings
) -> tuple[Callable[..., Any], Record]:
    record = Record()
    services = _services(record, options, settings)
    front = FrontEnd(FusewrightBackend(services), record, options.dims, signature, options.strict)
    compiled = front.compile(call_impl, name)
    bump, bump_disabled, off = record.calls.bump, record.disabled_calls.bump, _OFF

    def optimized(*args: Any, **kwargs: Any) -> Any:
        if off.depth:
            bump_disabled()
            return call_impl(*args, **kwargs)
        bump()
        return compiled(*args, **kwargs)

    front.wrapper_code = optimized.__code__
    return optimized, record


def _services(record: Record, options: Options, settings: config.Settings) -> Services:
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

    def context() -> KeyContext:
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        return KeyContext.current(
            device, numerics=options.numerics, frozen_weights=options.frozen_weights, user_passes=digests
        )

    return choose_from(options.store, context)


def optimize_with(model: _T, *, choose: Choose, **options: Any) -> _T:
    """`optimize`, with `choose(fingerprint, bucket) -> GraphVariant` in place of the tuning store; the tuner's door."""
    with _choosing(choose):
        return optimize(model, **options)


@dataclass(frozen=True)
class Optimizer:
    """Reusable settings for `optimize`, for users who add passes of their own.

    Example: `Optimizer(passes=[MyPass()], before="fuse_attention").optimize(model)`.
    """

    passes: Sequence[Pass] = ()
    before: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def optimize(self, model: _T, **options: Any) -> _T:
        """`optimize(model)` with these passes and options; keywords given here win."""
        return optimize(model, **{**self.options, "passes": self.passes, "before": self.before, **options})


def explain(model: Any) -> Explanation:
    """Snapshot of what happened to an optimized module or function so far.

    Raises:
        UserInputError: the model is not optimized.
    """
    return explain_record(record_of(model))


@functools.cache
def _default_services() -> Services:
    return _services(Record(), _default_options(), config.read_settings())


def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Entry point behind `torch.compile(model, backend="fusewright")`: default options, no named dimensions."""
    _check_torch()
    return FusewrightBackend(_default_services())(gm, example_inputs)


def record_of(model: Any) -> Record:
    """The record of an optimized module.

    Raises:
        UserInputError: the model is not optimized.
    """
    handle = vars(model).get(_HANDLE) if isinstance(model, torch.nn.Module) or inspect.isfunction(model) else None
    if not isinstance(handle, Handle):
        raise UserInputError("model: not optimized; call fusewright.optimize(model) first.")
    return handle.record
