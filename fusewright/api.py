"""The public entry points: `optimize` a model in place, ask it to `explain` itself, switch it off."""

from __future__ import annotations

import functools
import inspect
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from fusewright import config
from fusewright.capture.record import Record
from fusewright.capture.shapes import Cuts, check_buckets, check_dims
from fusewright.config import Effort, Numerics, Verify, to_enum
from fusewright.errors import UnsupportedTorchError, UserInputError
from fusewright.installation import (
    Options,
    choosing,
    disabled,
    install,
    install_function,
    record_of,
    services_of,
)
from fusewright.passes.base import Pass
from fusewright.report.explain import Explanation, explain_record
from fusewright.runtime.backend import FusewrightBackend
from fusewright.runtime.fragment import Choose, Services
from fusewright.runtime.train_step import TrainStep

__all__ = ["Optimizer", "TrainStep", "backend", "disabled", "explain", "optimize", "optimize_with", "record_of"]

OLDEST_TORCH = (2, 11)
_T = TypeVar("_T", bound=Callable[..., Any])


def optimize(
    model: _T,
    *,
    dims: Mapping[str, Mapping[int, str]] | None = None,
    buckets: Mapping[str, Cuts] | None = None,
    numerics: str | Numerics = Numerics.REASSOCIATED,
    effort: str | Effort = Effort.NONE,
    store: str | pathlib.Path | None = None,
    strict: bool | None = None,
    verify: str | Verify | None = None,
    frozen_weights: bool = False,
    passes: Sequence[Pass] = (),
    before: str | None = None,
) -> _T:
    """Optimize a module in place, or return an optimized version of a function; the first call compiles.

    A module stays the same object with the same class, parameters and `state_dict` keys; only its call is replaced.

    Args:
        model: an `nn.Module` or a function of tensors.
        dims: names of dynamic dimensions: argument -> dimension -> name, `{"input_ids": {1: "tokens"}}`.
        buckets: for a named dimension, ascending upper edges `{"tokens": [128, 512]}`, joined ranges, or a set of exact
            sizes, each lowered for itself; each bucket is lowered on its first call. Default: one open bucket.
        numerics: "exact", "reassociated" (default) or "lossy": loosest tier of our rewrites, not of Inductor's own.
        effort: "none"; tuning inside the process is not offered, use `fusewright tune`.
        store: tuning store (path or URL) whose winners are used; default: where `fusewright tune` writes.
        strict: raise where anything would fall back (default `FUSEWRIGHT_STRICT`).
        verify: "first_call" (default), "always" or "off": when a lowered graph is compared with eager.
        frozen_weights: fold and merge weights for inference; docs/index.md says which later changes are noticed.
        passes: more passes of your own, put before the pass named `before`.

    Returns:
        `model` itself for a module, a new callable for a function.

    Raises:
        UserInputError: an argument is wrong; UnsupportedTorchError: torch is too old; CacheFolderError: the cache
            folder cannot be written. The model is then left as it was.
    """
    _check_torch()
    settings = config.read_settings()
    checked = check_dims(dims, _argument_names(_signature(model)))
    if to_enum(Effort, effort, "effort") is not Effort.NONE:
        raise UserInputError("effort: only 'none' runs inside a process; tune offline with `fusewright tune`.")
    options = Options(
        dims=checked,
        buckets=check_buckets(buckets, checked),
        numerics=to_enum(Numerics, numerics, "numerics"),
        store=str(store) if store is not None else settings.store_place(),
        strict=settings.strict if strict is None else strict,
        verify=settings.verify if verify is None else to_enum(Verify, verify, "verify"),
        frozen_weights=frozen_weights,
        passes=tuple(passes),
        before=before,
    )
    if settings.disabled:
        return model
    if not isinstance(model, torch.nn.Module):
        return install_function(model, options, settings)  # type: ignore[return-value]
    install(model, options, settings)
    return model


def _signature(model: Any) -> inspect.Signature:
    if isinstance(model, type):
        raise UserInputError(f"model: {model.__name__} is a class; pass an instance of it.")
    if not callable(model):
        raise UserInputError(f"model: expected an nn.Module or a function, got {type(model).__name__}.")
    try:
        return inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)
    except ValueError:
        raise UserInputError(
            "model: a built-in function has no signature; wrap it in a function of your own."
        ) from None


def _check_torch() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise UnsupportedTorchError(f"torch {torch.__version__} is not supported; install torch >= {oldest}.")


def _argument_names(signature: inspect.Signature) -> list[str] | None:
    """Arguments that `dims` may name: not `*args`, whose elements have no names; None where there is `**kwargs`."""
    kinds = [p.kind for p in signature.parameters.values()]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return None
    return [name for name, p in signature.parameters.items() if p.kind is not inspect.Parameter.VAR_POSITIONAL]


def optimize_with(model: _T, *, choose: Choose, **options: Any) -> _T:
    """`optimize`, with `choose(fingerprint, bucket, device) -> GraphVariant` instead of a store; the tuner's door."""
    with choosing(choose):
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
    """Snapshot of what happened to an optimized module or function, or a `TrainStep`, so far.

    Raises:
        UserInputError: the model is not optimized.
    """
    return explain_record(record_of(model))


@functools.cache
def _default_services() -> Services:
    settings = config.read_settings()
    options = Options(store=settings.store_place(), strict=settings.strict, verify=settings.verify)
    return services_of(Record(), options, settings)


def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Entry point behind `torch.compile(model, backend="fusewright")`: default options, no named dimensions."""
    _check_torch()
    return FusewrightBackend(_default_services())(gm, example_inputs)
