"""The one place that knows how Dynamo differs between torch versions and which of its private names we rely on."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo as dynamo
import torch.fx.experimental._config as fx_config
from torch._dynamo.types import ConvertFrameReturn

_TORCH_ROOT = os.path.dirname(torch.__file__) + os.sep
_OPTIMIZE = inspect.signature(dynamo.eval_frame._optimize).parameters
HAS_ISOLATED_REGIONS = "isolate_recompiles" in _OPTIMIZE
# Faults of Dynamo itself; those of our backend arrive as BackendCompilerFailed.
INTERNAL_ERRORS: tuple[type[Exception], ...] = (dynamo.exc.InternalTorchDynamoError, AssertionError)
# What torch hides from users, but not from a program that makes warnings errors.
_OWN_WARNINGS = (
    "The .grad attribute of a Tensor that is not a leaf",
    "<class 'torch.autograd.function.Function'> should not be instantiated",
)
RECOMPILE_LIMIT_ERRORS: tuple[type[BaseException], ...] = (dynamo.exc.FailOnRecompileLimitHit,)


def optimize_context(backend: Callable[..., Any], *, fullgraph: bool) -> Any:
    """Dynamo's context for `backend`; its `callback` may be wrapped before it decorates a function."""
    options: dict[str, Any] = {"backend": backend, "nopython": fullgraph}
    if HAS_ISOLATED_REGIONS:
        options["isolate_recompiles"] = True
    return dynamo.optimize(**options)


@contextlib.contextmanager
def compile_options(recompile_limit: int, *, duck_shape: bool) -> Iterator[None]:
    """Dynamo options for one compilation, restored after it.

    - recompile limit: see `frontend.RECOMPILE_LIMIT`.
    - hook guards: torch leaves them out, so a forward hook added later to a submodule would silently not run.
    - warnings: see _OWN_WARNINGS.
    - float specialisation: below Dynamo, a float would reach AOTAutograd as a tensor's unknown item, which no graph
      that branches on it survives; a new value is a new capture instead, counted as a recompile.
    - duck shaping: torch gives two sizes that are equal today one symbol; wrong for two names that differ tomorrow.
    """
    with (
        warnings.catch_warnings(),
        dynamo.config.patch(
            recompile_limit=recompile_limit,
            accumulated_recompile_limit=1024,
            skip_nnmodule_hook_guards=False,
            specialize_float=True,
        ),
        fx_config.patch(use_duck_shape=duck_shape and fx_config.use_duck_shape),  # type: ignore[attr-defined]
    ):
        for text in _OWN_WARNINGS:
            warnings.filterwarnings("ignore", text)
        yield


@contextlib.contextmanager
def one_static_graph() -> Iterator[None]:
    """Inside the block, sizes that Dynamo meets are numbers, no wrapper splits a graph, and errors are not hidden."""
    with dynamo.config.patch(
        assume_static_by_default=True, automatic_dynamic_shapes=False, optimize_ddp=False, suppress_errors=False
    ):
        yield


def is_users_code(code: types.CodeType) -> bool:
    """False for torch's own frames, which Dynamo skips as a matter of course."""
    return not code.co_filename.startswith(_TORCH_ROOT)


def mode_key(frame: Any) -> tuple[Any, ...]:
    """What may differ between two entries of one code object without being a recompilation in the user's eyes."""
    owner = next((v for v in frame.f_locals.values() if isinstance(v, torch.nn.Module)), None)
    call = frame.f_locals["call"] if owner is None and "call" in frame.f_locals else None
    if isinstance(call, types.MethodType) and isinstance(call.__self__, torch.nn.Module):
        owner = call.__self__
    training = tuple(m.training for m in owner.modules()) if owner is not None else ()
    return (
        id(owner),
        hash(training),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.cuda.is_available() and torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
    )


def runs_only_cached(result: Any) -> bool:
    """True where Dynamo hit its limit: the frame runs cached code only, and eagerly where none matches."""
    action = result.frame_exec_strategy.cur_action
    return bool(action == torch._C._dynamo.eval_frame._FrameAction.RUN_ONLY)


def skip_reason(result: Any) -> str | None:
    """Why Dynamo skipped a frame; older versions do not say."""
    return result.skip_reason if hasattr(result, "skip_reason") else None


class _Watched:
    """Stands in front of the part of Dynamo whose errors it suppresses, and shows them to `see` on their way."""

    def __init__(self, inner: Callable[..., Any], see: Callable[[Exception], None]) -> None:
        self._inner = inner
        self._see = see

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._inner(*args, **kwargs)
        except Exception as error:
            self._see(error)
            raise


def watch_suppressed(callback: Any, see: Callable[[Exception], None]) -> None:
    """Call `see` with every error that ends a compilation under `callback`, also with those that Dynamo hides."""
    converter = callback._torchdynamo_orig_backend
    if hasattr(converter, "_inner_convert"):  # under fullgraph nothing is hidden, and there is no such layer
        converter._inner_convert = _Watched(converter._inner_convert, see)


def run_eagerly(*, for_good: bool = False) -> Any:
    """Dynamo's answer "run this frame as it is": this call only, or all calls of its code from now on."""
    answer = ConvertFrameReturn()
    answer.apply_to_code = for_good
    return answer


def model_raised(error: Exception) -> bool:
    """True where a compilation ended because the user's own code raises for these inputs."""
    seen = isinstance(error.__cause__, dynamo.exc.ObservedException)
    return seen or isinstance(error, (dynamo.exc.TorchRuntimeError, dynamo.exc.ObservedException))


def inside_transform() -> bool:
    """True inside a transform of `torch.func` (grad, vmap), around which Dynamo cannot start a graph."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def fully_shard_is_used() -> bool:
    """True where the process holds a module that `fully_shard` was applied to.

    It gathers weights into parameters of their own before each forward and leaves no sign that they have changed; from
    a graph it cannot be seen which module they belong to.
    """
    fsdp, states = (sys.modules.get(f"torch.distributed.{name}") for name in ("fsdp", "_composable_state"))
    if fsdp is None or states is None:
        return False
    return any(isinstance(module, fsdp.FSDPModule) for module in list(states._module_state_mapping))


# What mark_dynamic and maybe_mark_dynamic leave on a tensor.
_MARKS = (
    "_dynamo_dynamic_indices",
    "_dynamo_dynamic_range",
    "_dynamo_hint_overrides",
    "_dynamo_weak_dynamic_indices",
    "_has_dynamo_dim_marking",
    "_specialize_on",
)


def marks_of(tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Remember the marks on `tensors`; the returned function puts them back as they are now.

    A mark that stays would make a graph dynamic that someone else compiles for the same tensor, and costs a set
    operation in the guards of each call.
    """
    before = [(tensor, {n: copy.copy(vars(tensor)[n]) for n in _MARKS if n in vars(tensor)}) for tensor in tensors]

    def put_back() -> None:
        for tensor, marks in before:
            for name in _MARKS:
                vars(tensor).pop(name, None)
            vars(tensor).update(marks)

    return put_back


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """Inside the block, the garbage collector looks only at what was made in it.

    A compilation makes so many objects that full collections run, and each walks the whole program: one took 0.2 of the
    1.3 s of a small model's warm start (2 cores, torch 2.14). Does nothing where the program has frozen objects itself,
    which this would unfreeze.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def capture_lock() -> Any:
    """Dynamo's own lock.

    Held around options that are set for one compilation, which are process-wide, and around lowering: tracing in one
    thread meets the patches that AOTAutograd puts on `nn.Module` in another, and takes the model for faulty.
    """
    return dynamo.convert_frame.compile_lock


def has_matching_entry(frame: Any) -> bool:
    """True where the cache holds code for this frame by now: another thread compiled it while this one waited."""
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(frame.f_code)
    return any(entry.guard_manager.check(frame.f_locals) for entry in entries)


def symbol_sources(shape_env: Any, symbol: Any) -> list[Any]:
    """The sources that `symbol` was made from."""
    return list(shape_env.var_to_sources.get(symbol, ()))


class SizeFixedError(Exception):
    """Code that must not fix a dynamic size asked a question that only a fixed size answers."""


@contextlib.contextmanager
def sizes_stay_dynamic(shape_env: Any) -> Iterator[None]:
    """Raise `SizeFixedError` where `shape_env` would add a guard.

    After capture, Dynamo has built its guards: one added later would be checked by nobody, and a graph lowered for one
    size would serve all. torch has this context itself from 2.14 on.
    """

    def refuse(expr: Any, value: Any) -> None:
        raise SizeFixedError(f"it asks whether {expr}, which would fix a dynamic size")

    before = shape_env.frozen
    shape_env.frozen = True
    shape_env._check_frozen = refuse
    try:
        yield
    finally:
        shape_env.frozen = before
        del shape_env._check_frozen
