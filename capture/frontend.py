"""Capture through Dynamo: one private code object a model, and a hook around every frame that Dynamo compiles.

The hook runs only when Dynamo's cache misses, so it may be slow. It marks the user's named dimensions on the tensors of
the frame before Dynamo looks at them, sets the few Dynamo options that our promises need for just that compilation, and
counts frames, graph breaks and frames that were given up. A steady call pays for none of it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo as dynamo
from torch.utils import _pytree as pytree

from fusewright.capture import dynamo_compat as compat
from fusewright.capture.record import Record
from fusewright.errors import DimsError, FallbackError, RecompileLimitError

Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]

# A frame is compiled once per mode (train, eval, no_grad, inference_mode, autocast) and once per static size of 0 or 1.
# Dynamo's default of 8 is reached by 12 models of one class that share the code object of a broken `forward`.
RECOMPILE_LIMIT = 64
CHANCES = 3  # compilations of a frame that may fail inside Dynamo before the frame is given up


@dataclass
class FrameInfo:
    """What is known about the frame under compilation; the backend reads it to name symbols.

    Attributes:
        sizes: current size of each named dimension of the call in progress.
        sources: (argument source, dimension) -> name, exact for the root frame only.
        where: file:line of the frame.
        error: what ended the compilation, also where Dynamo hides it.
        unmark: takes our marks off the tensors of the frame again.
    """

    sizes: Mapping[str, int]
    sources: Mapping[tuple[str, int], str]
    where: str
    error: Exception | None = None
    unmark: Callable[[], None] = lambda: None


class UncapturedError(FallbackError):
    """Under strict: a graph could not be captured, perhaps because the model itself raises; running it will tell."""


class CallAgainError(Exception):
    """Another thread compiled the frame while this one waited; nothing of the call has run yet."""


class _Active(threading.local):
    def __init__(self) -> None:
        self.stack: list[FrameInfo] = []
        self.insists = False


_ACTIVE = _Active()


@contextlib.contextmanager
def second_try() -> Iterator[None]:
    """Inside the block, a frame of this thread that Dynamo's cache misses is compiled and not called again."""
    _ACTIVE.insists = True
    try:
        yield
    finally:
        _ACTIVE.insists = False


def current_frame() -> FrameInfo | None:
    """The frame that Dynamo compiles in this thread, or None outside of our hook (a bare `torch.compile`)."""
    return _ACTIVE.stack[-1] if _ACTIVE.stack else None


@dataclass
class FrontEnd:
    """Compiles callables with Dynamo for one optimized model.

    Attributes:
        backend: receives each captured graph.
        record: where frames, breaks and fallbacks are counted.
        dims: argument name -> dimension -> name, checked by `shapes.check_dims`.
        signature: of the callable, to find arguments by name.
        strict: raise where a frame would run eagerly.
    """

    backend: Backend
    record: Record
    dims: Mapping[str, Mapping[int, str]]
    signature: inspect.Signature
    strict: bool = False
    root_code: types.CodeType | None = None
    wrapper_code: types.CodeType | None = None
    compiled_modes: Counter[tuple[types.CodeType, tuple[Any, ...]]] = field(default_factory=Counter)
    internal_errors: Counter[types.CodeType] = field(default_factory=Counter)

    def compile(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return `call` compiled by Dynamo, with a cache of its own.

        Dynamo keys its cache by code object, and every module shares that of `Module._call_impl`; a copy of the code
        gives each model its own entries. Where torch offers isolated regions, frames after a graph break get them too.
        """

        def entry(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        entry.__code__ = entry.__code__.replace(co_name=f"optimized_{name}")
        self.root_code = entry.__code__
        context = compat.optimize_context(self.backend, fullgraph=self.strict)
        compat.watch_suppressed(context.callback, _note_error)
        context.callback = _Hook(self, context.callback)
        compiled: Callable[..., Any] = context(entry)
        return compiled

    def named_sizes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, int]:
        """Size of each named dimension in this call.

        Raises:
            DimsError: an argument has too few dimensions, or one name has two sizes.
        """
        sizes: dict[str, int] = {}
        origin: dict[str, str] = {}
        for label, _, tensor, named in self._named_tensors(args, kwargs):
            for dim, name in named.items():
                if dim >= tensor.dim():
                    raise DimsError(
                        f"dims[{label!r}]: dimension {dim} is named, but the tensor has shape {tuple(tensor.shape)}."
                    )
                size = int(tensor.shape[dim])
                if sizes.setdefault(name, size) != size:
                    raise DimsError(
                        f"dims: {name!r} is {sizes[name]} in {origin[name]} but {size} in {label}[{dim}]; "
                        "give differently sized dimensions different names."
                    )
                origin.setdefault(name, f"{label}[{dim}]")
        return sizes

    def _named_tensors(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[str, str, torch.Tensor, Mapping[int, str]]]:
        """Yield (argument name, Dynamo source, tensor, named dimensions) for every named argument that was given.

        Raises:
            DimsError: a named argument is something else than a tensor or None.
        """
        positions = _positional_names(self.signature)
        given = [
            (label, f"L['args'][{i}]", value) for i, (label, value) in enumerate(zip(positions, args, strict=False))
        ]
        given += [(label, f"L['kwargs']['{label}']", value) for label, value in kwargs.items()]
        for label, source, value in given:
            if label not in self.dims or value is None:
                continue
            if not isinstance(value, torch.Tensor):
                raise DimsError(
                    f"dims[{label!r}]: the argument is a {type(value).__name__}; only tensors have dimensions."
                )
            yield label, source, value, self.dims[label]


def _positional_names(signature: inspect.Signature) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature.parameters.values() if p.kind in kinds]


class _Hook:
    """Stands where Dynamo's own callback stood; C code follows `_torchdynamo_orig_backend` to find the backend."""

    def __init__(self, front: FrontEnd, inner: Callable[..., Any]) -> None:
        self.front = front
        self.inner = inner
        self._torchdynamo_orig_backend = inner

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        code = frame.f_code
        if not compat.is_users_code(code) and code is not self.front.root_code:
            return self.inner(frame, cache_entry, frame_state)
        where = f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})"
        if compat.inside_transform():
            return self._inside_transform(where)
        with compat.capture_lock():
            if code is self.front.root_code and not _ACTIVE.insists and compat.has_matching_entry(frame):
                raise CallAgainError
            info = self._mark(frame, where)
            try:
                return self._compile(frame, cache_entry, frame_state, info)
            finally:
                info.unmark()

    def _compile(self, frame: Any, cache_entry: Any, frame_state: Any, info: FrameInfo) -> Any:
        code, where = frame.f_code, info.where
        duck_shape = len(set(info.sizes.values())) == len(info.sizes)
        breaks_before = Counter(dynamo.utils.counters["graph_break"])
        _ACTIVE.stack.append(info)
        try:
            with compat.short_collections(), compat.compile_options(RECOMPILE_LIMIT, duck_shape=duck_shape):
                result = self.inner(frame, cache_entry, frame_state)
        except Exception as error:
            if not self.front.strict and compat.model_raised(error):
                return self._runs_this_once(error, where)
            if not self.front.strict and isinstance(error, compat.INTERNAL_ERRORS):
                return self._dynamo_failed(error, code, where)
            explained = self._explained(error, where)
            if explained is error:
                raise
            raise explained from error
        finally:
            _ACTIVE.stack.pop()
        if result.guarded_code is None and info.error is not None:
            if compat.model_raised(info.error):
                return self._runs_this_once(info.error, where)
            if isinstance(self._explained(info.error, where), DimsError):
                raise self._explained(info.error, where) from info.error
        self._count(frame, result, info, Counter(dynamo.utils.counters["graph_break"]) - breaks_before)
        return result

    def _inside_transform(self, where: str) -> Any:
        """Left to itself, Dynamo would give the frame up for good, also for calls outside of the transform."""
        reason = "called inside a torch.func transform; this call ran eagerly"
        if self.front.strict:
            raise FallbackError(
                f"{where}: {reason}. Apply the transform inside the model, or use fusewright.disabled()."
            )
        self.front.record.add_fallback("skipped_frame", where, reason)
        return compat.run_eagerly()

    def _dynamo_failed(self, error: Exception, code: types.CodeType, where: str) -> Any:
        """A fault of Dynamo's own costs the frame its graph, not the caller its result.

        Some come from one call's inputs, so the frame gets a few chances before it is given up.
        """
        front = self.front
        front.internal_errors[code] += 1
        for_good = front.internal_errors[code] >= CHANCES
        how = "runs eagerly from now on" if for_good else "this call ran eagerly"
        reason = f"Dynamo failed, {how}: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
        front.record.add_fallback("skipped_frame", where, reason)
        return compat.run_eagerly(for_good=for_good)

    def _runs_this_once(self, error: Exception, where: str) -> Any:
        """Dynamo says that the user's code raises here: let it, so that the caller sees its own exception.

        Dynamo would never look at the frame again, and one bad input would make all later calls run eagerly.
        """
        cause = error.__cause__ or error
        reason = f"the model raised while it was captured ({type(cause).__name__}); this call ran eagerly"
        self.front.record.add_fallback("skipped_frame", where, reason)
        return compat.run_eagerly()

    def _mark(self, frame: Any, where: str) -> FrameInfo:
        front = self.front
        if not front.dims:
            return FrameInfo({}, {}, where)
        args, kwargs = _call_in_progress(front)
        sizes = front.named_sizes(args, kwargs)
        sources: dict[tuple[str, int], str] = {}
        named = list(front._named_tensors(args, kwargs))
        root = frame.f_code is front.root_code
        tensors = [tensor for _, _, tensor, _ in named] if root else _tensors(frame)
        unmark = compat.marks_of(tensors)
        present = {id(tensor) for tensor in tensors}
        for _, source, tensor, names in named:
            for dim, name in names.items():
                if root:
                    sources[source, dim] = name
                # torch specialises on 0 and 1: such a call gets a static frame
                if id(tensor) in present and tensor.shape[dim] > 1:
                    dynamo.mark_dynamic(tensor, dim)
        if not root:
            _mark_by_size(tensors, {size for size in sizes.values() if size > 1})
        return FrameInfo(sizes, sources, where, unmark=unmark)

    def _explained(self, error: Exception, where: str) -> Exception:
        text = str(error)
        if isinstance(error, dynamo.exc.UserError) or "ConstraintViolation" in type(error).__name__:
            return DimsError(
                f"dims: a named dimension cannot stay dynamic in {where}: {text.splitlines()[0]} "
                "Remove its name from dims, or keep the model from fixing the size (int(), .item(), a branch on it)."
            )
        if self.front.strict and isinstance(error, compat.RECOMPILE_LIMIT_ERRORS):
            return RecompileLimitError(
                f"{where}: Dynamo's recompile limit was reached; the frame would run eagerly. {text}"
            )
        if self.front.strict and (compat.model_raised(error) or isinstance(error, compat.INTERNAL_ERRORS)):
            return UncapturedError(f"{where}: the model cannot be captured for these inputs. {text}")
        if self.front.strict and isinstance(error, dynamo.exc.Unsupported):
            return FallbackError(f"{where}: part of the model cannot be captured and would run eagerly. {text}")
        return error

    def _count(self, frame: Any, result: Any, info: FrameInfo, breaks: Counter[str]) -> None:
        record, where = self.front.record, info.where
        for reason in breaks:
            record.add_break(where, " ".join(str(reason).split())[:400])
        if result.guarded_code is not None:
            key = (frame.f_code, compat.mode_key(frame))
            self.front.compiled_modes[key] += 1
            record.add_frame(where, recompile=self.front.compiled_modes[key] > 1)
        elif compat.runs_only_cached(result):
            record.add_fallback(
                "recompile_limit", where, "Dynamo gave the frame up; calls that match no entry run eagerly"
            )
        elif _holds_tensor(frame):
            hidden = " ".join(str(info.error).split())[:400] if info.error is not None else None
            reason = hidden or compat.skip_reason(result) or "Dynamo skipped the frame"
            record.add_fallback("skipped_frame", where, f"runs eagerly from now on: {reason}")


def _note_error(error: Exception) -> None:
    if _ACTIVE.stack:
        _ACTIVE.stack[-1].error = error


def _call_in_progress(front: FrontEnd) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Arguments of the optimized call below which Dynamo compiles, read from our wrapper's frame on the stack."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is front.wrapper_code:
            return frame.f_locals["args"], frame.f_locals["kwargs"]
        frame = frame.f_back
    return (), {}


def _mark_by_size(tensors: Sequence[torch.Tensor], sizes: set[int]) -> None:
    """Mark dimensions after a graph break: there, tensors have no argument names, so the sizes of the call decide.

    The mark is weak: a dimension that only happens to have that size may still be specialised without an error.
    """
    for tensor in tensors:
        for dim, size in enumerate(tensor.shape):
            if size in sizes:
                dynamo.maybe_mark_dynamic(tensor, dim)


def _tensors(frame: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves([v for v in frame.f_locals.values() if not isinstance(v, torch.nn.Module)])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter)]


def _holds_tensor(frame: Any) -> bool:
    return bool(_tensors(frame))


@contextlib.contextmanager
def frame_scope(info: FrameInfo) -> Iterator[None]:
    """Make `info` the current frame, for tests and for backends called without the hook."""
    _ACTIVE.stack.append(info)
    try:
        yield
    finally:
        _ACTIVE.stack.pop()
