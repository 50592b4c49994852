"""Fake inputs of one bucket, and what a lowering made with them assumes of a call: sizes and separate memory.

The captured graph's own symbols, each with the bucket's range, live in a fresh ShapeEnv.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._C._dynamo.guards import compute_overlapping_tensors
from torch._dynamo.source import ConstantSource, LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, DimDynamic, ShapeEnv, StrictMinMaxConstraint
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges

from fusewright.capture.dynamo_compat import symbol_sources
from fusewright.capture.graph import CapturedGraph, expressions
from fusewright.capture.shapes import ShapeBucket

Where = tuple[int, int | None]  # position of an argument, and the dimension (None: the argument is the number itself)


@dataclass
class BucketInputs:
    """Fake arguments for one lowering.

    Attributes:
        mode: the fake mode that all values belong to.
        values: one a placeholder: fake tensors, symbolic ints, or plain numbers.
        where: new symbol -> where a call shows its value.
    """

    mode: FakeTensorMode
    values: list[Any]
    where: dict[sympy.Symbol, Where] = field(default_factory=dict)

    def guard(self) -> Callable[[Sequence[Any]], bool] | None:
        """A test of a call's arguments for what lowering assumed beyond the bucket's ranges, or None where nothing.

        Dynamo's own guards were made before the graph was lowered here, so what AOTAutograd or Inductor specialise on
        (a size divisible by 8, two sizes equal) is known to nobody else.
        """
        env = self.mode.shape_env
        assert env is not None, "bucket inputs always have a ShapeEnv"
        fixed = self._fixed({s for g in env.guards for s in g.expr.free_symbols})
        exprs = [e for e in (g.expr.xreplace(fixed) for g in env.guards) if e is not sympy.true]
        if not exprs:
            return None
        printer = PythonPrinter()
        used = sorted({s for e in exprs for s in e.free_symbols}, key=str)
        lets = ", ".join(f"{s}={self._getter(s)}" for s in used)
        text = " and ".join(f"({printer.doprint(e)})" for e in exprs)
        # `_let` binds each size once; both texts are made from sympy expressions, never from user input
        namespace: dict[str, Any] = {**SYMPY_INTERP, "_let": dict}
        code = f"lambda args: (lambda {', '.join(map(str, used))}: {text})(**_let({lets}))"
        check: Callable[[Sequence[Any]], bool] = eval(code, namespace)
        return check

    def _fixed(self, symbols: set[Any]) -> dict[sympy.Symbol, sympy.Integer]:
        """Values of the symbols that AOTAutograd made of plain numbers among `values`.

        A plain number stands for the one size that a bucket holds, so every call that reaches the bucket has it.
        """
        fixed = {}
        for symbol in symbols - set(self.where):
            places = [s for s in symbol_sources(self.mode.shape_env, symbol) if isinstance(s, ConstantSource)]
            assert places, f"nothing shows the value of {symbol}"
            fixed[symbol] = sympy.Integer(self.values[int(places[0].source_name.removeprefix("sym_"))])
        return fixed

    def _getter(self, symbol: sympy.Symbol) -> str:
        index, dim = self.where[symbol]
        return f"args[{index}]" if dim is None else f"args[{index}].shape[{dim}]"


def separate_memory(captured: CapturedGraph, mutated: Sequence[int] | None) -> Callable[[Sequence[Any]], bool] | None:
    """A test that no argument which the graph changes in place overlaps another one, or None where nothing is changed.

    AOTAutograd makes the changes after the graph, so a graph that reads an alias of a changed argument would see old
    values. torch.compile guards on the overlap that it saw at the first call, but not on its absence.

    Parameters can only overlap a changed argument of the user's, so they are looked at only where there is one.
    """
    if not mutated:
        return None
    users = {i for i, item in enumerate(captured.inputs) if item.role == "tensor"}
    if users.intersection(mutated):
        picked = [i for i, item in enumerate(captured.inputs) if isinstance(item.value, torch.Tensor)]
    else:
        picked = sorted(users.union(mutated))
    if len(picked) < 2 or not users:
        return None
    changed = frozenset(n for n, i in enumerate(picked) if i in mutated)
    address = torch._C._storage_address  # type: ignore[attr-defined]
    pick: Callable[[Sequence[Any]], Sequence[Any]] = operator.itemgetter(*picked)

    def separate(args: Sequence[Any]) -> bool:
        tensors = pick(args)
        addresses = list(map(address, tensors))
        return len(set(addresses)) == len(addresses) or not _overlap(tensors, addresses, changed)

    return separate


def _overlap(tensors: Sequence[torch.Tensor], addresses: Sequence[int], changed: frozenset[int]) -> bool:
    """Whether a changed tensor overlaps another one that lies in the same storage."""
    for one in {addresses[n] for n in changed}:
        group = [n for n, a in enumerate(addresses) if a == one]
        if len(group) > 1 and compute_overlapping_tensors([tensors[n] for n in group], symbolic=False):
            return True
    return False


def bucket_inputs(
    captured: CapturedGraph, args: Sequence[Any], bucket: ShapeBucket, axes: Container[sympy.Symbol] | None = None
) -> BucketInputs:
    """Make fake inputs for lowering `captured` in `bucket`.

    Every symbol of the capture becomes one new symbol, so that equal sizes stay equal and different ones stay
    different, whatever values the first call happens to have. A named symbol gets the bucket's range, or becomes a
    plain number where the range holds one size.

    Args:
        captured: the pristine graph.
        args: real arguments of the call that asks for the bucket; their sizes serve as hints.
        bucket: ranges of the named dimensions.
        axes: the symbols whose values chose the bucket (default: every named one). Another symbol of the same name is
            not known to lie in the range.
    """
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    out = BucketInputs(mode, [])
    new: dict[sympy.Symbol, sympy.Expr] = {}
    hints: dict[sympy.Symbol, int] = {}
    sizes = _symbols_of_sizes(captured)
    for number, symbol in enumerate(captured.symbols()):
        where = _locate(captured, symbol)
        assert where is not None, f"no argument shows the value of {symbol}"
        value = _read(args, where)
        ranged = symbol in captured.named and (axes is None or symbol in axes)
        limits = bucket.range_of(captured.named[symbol]) if ranged else None
        if limits is not None and limits.low == limits.high:
            new[symbol] = sympy.Integer(value)
            continue
        source = LocalSource(f"size{number}")
        constraint = None
        if limits is not None:
            constraint = StrictMinMaxConstraint(vr=ValueRanges(limits.low, limits.high), warn_only=False)
        if symbol in sizes:
            made = env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=constraint)
        else:  # a number of the user's, such as an offset: it may be 0, 1 or negative at a later call
            made = env.create_unspecified_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
        new[symbol] = made
        if isinstance(made, sympy.Symbol):
            out.where[made] = where
            hints[made] = value
    for index, (item, arg) in enumerate(zip(captured.inputs, args, strict=True)):
        out.values.append(_fake(item.value, arg, mode, new, hints, LocalSource(f"arg{index}")))
    return out


def _symbols_of_sizes(captured: CapturedGraph) -> set[sympy.Symbol]:
    """The symbols that stand in a tensor's size or stride: Dynamo's guards keep them at 2 or above."""
    tensors = (item.value for item in captured.inputs if isinstance(item.value, torch.Tensor))
    return {symbol for value in tensors for expr in expressions(value) for symbol in expr.free_symbols}


def _locate(captured: CapturedGraph, symbol: sympy.Symbol) -> Where | None:
    for index, item in enumerate(captured.inputs):
        if isinstance(item.value, torch.SymInt) and item.value.node.expr == symbol:
            return index, None
    for index, item in enumerate(captured.inputs):
        if isinstance(item.value, torch.Tensor):
            for dim, size in enumerate(item.value.shape):
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    return index, dim
    return None


def _read(args: Sequence[Any], where: Where) -> int:
    index, dim = where
    return int(args[index] if dim is None else args[index].shape[dim])


def _fake(
    old: Any,
    arg: Any,
    mode: FakeTensorMode,
    new: dict[sympy.Symbol, sympy.Expr],
    hints: dict[sympy.Symbol, int],
    source: LocalSource,
) -> Any:
    env = mode.shape_env
    assert env is not None

    def sized(size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        expr = size.node.expr.xreplace(new)
        if not expr.free_symbols:
            return int(expr)
        return env.create_symintnode(expr, hint=int(expr.xreplace(hints)), source=source)

    if not isinstance(arg, torch.Tensor):
        return sized(old)
    if not expressions(old) or is_traceable_wrapper_subclass(arg):
        return mode.from_tensor(arg, static_shapes=True, source=source)
    with mode, torch.inference_mode(mode=arg.is_inference()), torch.enable_grad():
        sizes, strides = [sized(s) for s in old.shape], [sized(s) for s in old.stride()]
        fake = torch.empty_strided(sizes, strides, dtype=arg.dtype, device=arg.device, requires_grad=arg.requires_grad)
        # an in-place operation is illegal on a leaf that needs a gradient, but legal on the activation that arg is
        return fake.clone() if arg.requires_grad and not arg.is_leaf else fake
