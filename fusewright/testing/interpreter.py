"""Run an ordinary Triton kernel on CPU tensors through Triton's interpreter, with the interpreter's errors mended.

`TRITON_INTERPRET` need not be set (it turns a kernel into an object that can no longer be compiled): the same kernel
object is interpreted here and compiled ahead of time elsewhere, in one process. Works with Triton 3.6 and 3.8.

What upstream gets wrong and is mended for the duration of a launch, then undone:

- bfloat16 lives as its bits in uint16, and arithmetic, reductions, scans, dot products and most casts act on the bits;
  here they act on the float32 value, and a result is rounded to nearest even as the GPU does.
- bfloat16 constants, libdevice functions and calls into `triton.language.standard` are missing.
- bfloat16 atomics would be silently wrong; they raise `NotImplementedError`.
- a one-element tensor cannot be an index under NumPy 2.4 with Triton 3.6.
"""

from __future__ import annotations

import math
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter as upstream
from triton.runtime.jit import JITFunction

Array = np.ndarray[Any, Any]

# A launch patches Triton's modules, which belong to the process.
_LAUNCH_LOCK = threading.RLock()
_MISSING = object()


def bf16_to_f32(bits: Array) -> Array:
    """The float32 values of bfloat16 bits held in uint16."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: Array) -> Array:
    """Bfloat16 bits, in uint16, of float32 values rounded to nearest even; every NaN becomes the canonical one."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    tie_to_even = ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    rounded = ((bits + tie_to_even) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


class _Patches:
    """Attributes set for a while; `undo` puts back what was there, newest first."""

    def __init__(self) -> None:
        self._changes: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._changes.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def undo(self) -> None:
        while self._changes:
            owner, name, value = self._changes.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _is_bf16(handle: Any) -> bool:
    return isinstance(handle, upstream.TensorHandle) and handle.dtype.scalar == tl.bfloat16


def _widen(handle: Any) -> Any:
    return upstream.TensorHandle(bf16_to_f32(handle.data), tl.float32) if _is_bf16(handle) else handle


def _narrow(handle: Any) -> Any:
    """A float32 result as bfloat16; the truth values of a comparison stay as they are."""
    if handle.data.dtype == np.bool_:
        return handle
    return upstream.TensorHandle(f32_to_bf16(handle.data), tl.bfloat16)


def _mend_arithmetic(patches: _Patches) -> None:
    builder = upstream.InterpreterBuilder

    def through_float32(name: str) -> None:
        original = getattr(builder, name)

        def op(self: Any, *args: Any) -> Any:
            if any(_is_bf16(a) for a in args):
                return _narrow(original(self, *map(_widen, args)))
            return original(self, *args)

        patches.set(builder, name, op)

    for name in ("binary_op", "unary_op", "create_fma", "create_clampf", "create_erf", "create_rsqrt"):
        through_float32(name)

    original_dot = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *options: Any) -> Any:
        result = original_dot(self, _widen(a), _widen(b), _widen(acc), *options)
        return _narrow(result) if _is_bf16(acc) else result

    original_rmw = builder.create_atomic_rmw

    def create_atomic_rmw(self: Any, op: Any, ptr: Any, value: Any, *rest: Any) -> Any:
        if _is_bf16(value):
            raise NotImplementedError("bfloat16 atomics are not interpreted; accumulate in float32")
        return original_rmw(self, op, ptr, value, *rest)

    patches.set(builder, "create_dot", create_dot)
    patches.set(builder, "create_atomic_rmw", create_atomic_rmw)


def _mend_casts(patches: _Patches) -> None:
    builder = upstream.InterpreterBuilder
    original_cast, original_fp = builder.cast_impl, builder.create_fp_to_fp

    def convert(source: Any, target: Any, otherwise: Callable[[Any], Any]) -> Any:
        if isinstance(target.scalar, tl.pointer_type) or _is_bf16(source) == (target.scalar == tl.bfloat16):
            return otherwise(source)
        if _is_bf16(source):
            wide = _widen(source)
            return wide if target.scalar == tl.float32 else builder_cast(wide, target)
        return upstream.TensorHandle(f32_to_bf16(source.data.astype(np.float32)), tl.bfloat16)

    def builder_cast(source: Any, target: Any) -> Any:
        return original_cast(upstream.interpreter_builder, source, target)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        return convert(source, target, lambda s: original_cast(self, s, target))

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if rounding is not None and "RTZ" in str(rounding):  # truncation is what upstream's cast does
            return original_fp(self, source, target, rounding)
        return convert(source, target, lambda s: original_fp(self, s, target, rounding))

    def get_bf16(self: Any, value: float) -> Any:
        return upstream.TensorHandle(f32_to_bf16(np.array([value], np.float32)), tl.bfloat16)

    patches.set(builder, "cast_impl", cast_impl)
    patches.set(builder, "create_fp_to_fp", create_fp_to_fp)
    patches.set(builder, "get_bf16", get_bf16)


def _retyped(x: Any, handle: Any) -> Any:
    """The Triton tensor of x's shape that holds `handle`."""
    shape = [int(n) for n in x.shape]
    return tl.core.tensor(handle, tl.block_type(handle.dtype, shape) if shape else handle.dtype)


def _mend_reductions(patches: _Patches) -> None:
    def through_float32(owner: Any) -> None:
        original = owner.apply_impl

        def apply_impl(self: Any, inputs: Any) -> Any:
            were_bf16 = [_is_bf16(x.handle) for x in inputs]
            if not any(were_bf16):
                return original(self, inputs)
            wide = tuple(_retyped(x, _widen(x.handle)) for x in inputs)
            results = original(self, wide)
            # A reduction over (value, index) pairs returns a float32 that stands for a bfloat16, and an integer.
            narrow = [
                _retyped(x, _narrow(x.handle)) if x.dtype == tl.float32 else x
                for x in (results if isinstance(results, (list, tuple)) else (results,))
            ]
            return tuple(narrow) if isinstance(results, (list, tuple)) else narrow[0]

        patches.set(owner, "apply_impl", apply_impl)

    for owner in (upstream.ReduceOps, upstream.ScanOps):
        through_float32(owner)


_erf = np.vectorize(math.erf, otypes=[np.float32])
_LIBDEVICE: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "ceil": np.ceil,
    "copysign": np.copysign,
    "cos": np.cos,
    "div_rn": np.divide,
    "erf": _erf,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "fma": lambda a, b, c: a * b + c,
    "isinf": np.isinf,
    "isnan": np.isnan,
    "log": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "pow": np.power,
    "rint": np.rint,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
}


def _mend_libdevice(patches: _Patches) -> None:
    def emulate(name: str, function: Callable[..., Any]) -> None:
        def op(*args: Any, **kwargs: Any) -> Any:
            like = next(a for a in args if isinstance(a, tl.core.tensor))
            if _is_bf16(like.handle):
                raise NotImplementedError(f"libdevice.{name} takes float32 or float64, as on the GPU; got bfloat16")
            result = np.asarray(function(*(a.handle.data if isinstance(a, tl.core.tensor) else a for a in args)))
            if result.dtype == np.bool_:
                return _retyped(like, upstream.TensorHandle(result.astype(np.int32), tl.int32))
            return _retyped(like, upstream.TensorHandle(result.astype(like.handle.data.dtype), like.dtype))

        patches.set(libdevice, name, op)

    for name, function in _LIBDEVICE.items():
        emulate(name, function)


def _mend_index(patches: _Patches) -> None:
    original = upstream._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patches.set(upstream, "_patch_lang_tensor", patch_lang_tensor)


def _language_of_launch() -> Any:
    """A function whose globals hold both modules of the language: upstream patches those that its kernel can see."""

    def probe() -> None: ...

    return types.FunctionType(probe.__code__, {"tl": tl, "core": tl.core})


_REWRITTEN: dict[Any, Any] = {}


def _rewritten(kernel: JITFunction[Any]) -> Any:
    """The kernel's Python function as upstream's interpreter wants it, made once."""
    if kernel.fn not in _REWRITTEN:
        original = kernel.fn
        # On a copy of its globals: upstream adds its own module's names to them.
        twin = types.FunctionType(original.__code__, dict(original.__globals__), original.__name__)
        twin.__defaults__, twin.__annotations__ = original.__defaults__, dict(original.__annotations__)
        twin.__module__, twin.__qualname__ = original.__module__, original.__qualname__
        _REWRITTEN[kernel.fn] = upstream.FunctionRewriter(twin).rewrite_ast()
    return _REWRITTEN[kernel.fn]


def _apply(patches: _Patches) -> None:
    for mend in (_mend_index, _mend_arithmetic, _mend_casts, _mend_reductions, _mend_libdevice):
        mend(patches)
    patches.set(JITFunction, "__call__", lambda self, *args, **kwargs: _rewritten(self)(*args, **kwargs))


class InterpretedKernel:
    """A kernel to be launched as `interpreted(kernel)[grid](*args, **constexprs)` on CPU tensors."""

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.run(*args, grid=grid, **kwargs)

        return launch

    def run(self, *args: Any, grid: Any, **kwargs: Any) -> None:
        """Launch; options of the compiler (`num_warps`, ...) are dropped."""
        with _LAUNCH_LOCK, warnings.catch_warnings(), np.errstate(all="ignore"):
            # NumPy warns where a GPU computes inf or NaN and goes on.
            warnings.simplefilter("ignore", RuntimeWarning)
            patches = _Patches()
            _apply(patches)
            scope = upstream._patch_lang(_language_of_launch())
            try:
                upstream.GridExecutor(_rewritten(self.kernel), self.kernel.arg_names, grid)(*args, **kwargs)
            finally:
                scope.restore()
                patches.undo()


def interpreted(kernel: Any) -> InterpretedKernel:
    """The interpreted twin of a `@triton.jit` kernel.

    Raises:
        TypeError: for anything else; of an autotuned kernel pass its `.fn` with the configuration's values.
    """
    if not isinstance(kernel, JITFunction):
        raise TypeError(f"kernel must be a function made by triton.jit, got {type(kernel).__name__}")
    return InterpretedKernel(kernel)
