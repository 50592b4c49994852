"""A structural hash of a graph: equal in every process, different after any change that could change its code.

What goes in: operators by qualified name, edges, constants, dtypes, shapes with symbols renamed by order of first use,
strides, storage offsets, devices, gradient flags, which inputs share storage, and the ranges of the symbols. What stays
out: names of nodes and attributes, source lines, object ids, values of parameters and other tensors.
"""

from __future__ import annotations

import hashlib
import re
import types
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusewright.capture.values import value_of

VERSION = "2"  # bump when the text below changes meaning, so that no stored record is taken for a new graph

_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor, torch.nn.Buffer)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _Symbols:
    """Names of symbols by order of first use, and their ranges; shared with nested graphs."""

    def __init__(self) -> None:
        self.names: dict[sympy.Symbol, sympy.Symbol] = {}
        self.ranges: dict[str, str] = {}

    def text(self, value: Any) -> str:
        """A size, stride or other number, symbolic or not."""
        if not isinstance(value, _SYMBOLIC):
            return str(value)
        expr, env = value.node.expr, value.node.shape_env
        assert env is not None, f"{value} belongs to no ShapeEnv"
        for symbol in sorted(expr.free_symbols, key=str):
            if symbol not in self.names:
                name = f"d{len(self.names)}"
                self.names[symbol] = sympy.Symbol(name, integer=symbol.is_integer, positive=symbol.is_positive)
                self.ranges[name] = str(env.var_to_range[symbol]) if symbol in env.var_to_range else "?"
        return str(expr.xreplace(self.names))


class _Writer:
    def __init__(self, symbols: _Symbols) -> None:
        self.symbols = symbols
        self.nodes: dict[fx.Node, int] = {}
        self.storages: dict[int, int] = {}
        self.attributes: dict[int, int] = {}
        self.lines: list[str] = []

    def tensor(self, value: torch.Tensor, *, alias: bool) -> str:
        kind = "Tensor" if isinstance(value, _PLAIN) else type(value).__qualname__
        parts = ["Parameter" if isinstance(value, torch.nn.Parameter) else kind, str(value.dtype)]
        parts.append(",".join(map(self.symbols.text, value.shape)))
        if value.layout is torch.strided:
            parts.append(",".join(map(self.symbols.text, value.stride())))
        else:
            parts.append(str(value.layout))
        parts += [str(value.device), f"grad={value.requires_grad}"]
        if is_traceable_wrapper_subclass(value):
            names, context = value.__tensor_flatten__()
            inner = ",".join(f"{name}={self.tensor(getattr(value, name), alias=alias)}" for name in names)
            return "|".join([*parts, _ADDRESS.sub("", repr(context)), f"<{inner}>"])
        if alias and value.layout is torch.strided:
            storage = value.untyped_storage()._cdata
            number = self.storages.setdefault(storage, len(self.storages))
            parts.append(f"storage={number}+{self.symbols.text(value.storage_offset())}")
        return "|".join(parts)

    def value(self, value: Any, *, alias: bool = False) -> str:
        if isinstance(value, torch.Tensor):
            return self.tensor(value, alias=alias)
        if isinstance(value, (tuple, list)):
            return "[" + ";".join(self.value(v) for v in value) + "]"
        if value is None or isinstance(value, (bool, int, float, *_SYMBOLIC)):
            return self.argument(value)
        return type(value).__name__

    def argument(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return f"%{self.nodes[arg]}"
        if isinstance(arg, (tuple, list)):
            return "[" + ",".join(map(self.argument, arg)) + "]"
        if isinstance(arg, dict):
            pairs = sorted((f"{self.argument(k)}:{self.argument(v)}") for k, v in arg.items())
            return "{" + ",".join(pairs) + "}"
        if isinstance(arg, slice):
            return f"slice({self.argument(arg.start)},{self.argument(arg.stop)},{self.argument(arg.step)})"
        if isinstance(arg, _SYMBOLIC):
            return f"sym({self.symbols.text(arg)})"
        if isinstance(arg, (types.FunctionType, types.BuiltinFunctionType, type)):
            return f"callable:{target_name(arg)}"
        # repr tells 1 from True from 1.0, and -0.0 from 0.0; what has no repr of its own must not bring its address
        return f"{type(arg).__name__}:{_ADDRESS.sub('', repr(arg))}"

    def graph(self, gm: fx.GraphModule) -> None:
        for number, node in enumerate(gm.graph.nodes):
            self.nodes[node] = number
            args = "" if node.op == "placeholder" else self.argument(node.args) + self.argument(node.kwargs)
            target = target_name(node.target) if node.op in ("call_function", "call_method") else ""
            value = self.value(value_of(node), alias=node.op == "placeholder")
            self.lines.append(f"{number} {node.op} {target} {args} -> {value}")
            if node.op in ("get_attr", "call_module"):
                self.attribute(gm, node.target)

    def attribute(self, gm: fx.GraphModule, target: str) -> None:
        value: Any = gm
        for part in target.split("."):
            value = getattr(value, part)
        seen = id(value) in self.attributes
        number = self.attributes.setdefault(id(value), len(self.attributes))
        if seen:
            self.lines.append(f"  attribute {number}")
        elif isinstance(value, fx.GraphModule):
            inner = _Writer(self.symbols)
            inner.graph(value)
            self.lines += [f"  attribute {number}", *(f"  | {line}" for line in inner.lines)]
        elif isinstance(value, torch.nn.Module):
            self.lines.append(f"  attribute {number} {target_name(type(value))} {value!r}")
        else:
            self.lines.append(f"  attribute {number} {self.value(value)}")


def target_name(target: Callable[..., Any] | str) -> str:
    """A name of an operator, function or method that is the same in every process."""
    if isinstance(target, str):
        return target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"hop.{target.name()}"
    if not isinstance(target, (types.FunctionType, types.BuiltinFunctionType, type)):
        return f"{type(target).__module__}.{type(target).__qualname__}:{_ADDRESS.sub('', repr(target))}"
    return f"{target.__module__}.{target.__qualname__}"


def fingerprint_text(gm: fx.GraphModule) -> str:
    """The text that is hashed, a line a node; `store why` diffs two of them."""
    writer = _Writer(_Symbols())
    writer.graph(gm)
    ranges = [f"range {name} {bounds}" for name, bounds in writer.symbols.ranges.items()]
    return "\n".join([f"fusewright-fingerprint-{VERSION}", *writer.lines, *ranges])


def fingerprint(gm: fx.GraphModule) -> str:
    """Hex digest (32 characters) of the graph's structure."""
    return hashlib.sha256(fingerprint_text(gm).encode()).hexdigest()[:32]
