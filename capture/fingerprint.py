"""A structural hash of a graph: equal in every process, different after any change that could change its code.

What goes in: operators by qualified name, edges, constants, dtypes, shapes with symbols renamed by order of first use,
strides, devices, gradient flags, which inputs share storage, and the ranges of the symbols. What stays out: node names,
source lines, object ids, parameter values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

VERSION = "1"  # bump when the text below changes meaning, so that no stored record is taken for a new graph


class _Writer:
    def __init__(self) -> None:
        self.numbers: dict[fx.Node, int] = {}
        self.symbols: dict[sympy.Symbol, str] = {}
        self.ranges: dict[str, str] = {}
        self.storages: dict[int, int] = {}
        self.lines: list[str] = [f"fusewright-fingerprint-{VERSION}"]

    def expr(self, value: Any) -> str:
        if isinstance(value, int):
            return str(value)
        expr = value.node.expr
        for symbol in sorted(expr.free_symbols, key=str):
            if symbol not in self.symbols:
                name = f"d{len(self.symbols)}"
                self.symbols[symbol] = name
                bounds = (
                    value.node.shape_env.var_to_range[symbol] if symbol in value.node.shape_env.var_to_range else "?"
                )
                self.ranges[name] = str(bounds)
        return str(expr.xreplace({s: sympy.Symbol(n) for s, n in self.symbols.items()}))

    def tensor(self, value: torch.Tensor, *, alias: bool) -> str:
        sizes = ",".join(self.expr(s) for s in value.shape)
        parts = [type(value).__name__ if isinstance(value, torch.nn.Parameter) else "Tensor", str(value.dtype), sizes]
        if value.layout is torch.strided:
            parts.append(",".join(self.expr(s) for s in value.stride()))
        parts += [str(value.device), f"grad={value.requires_grad}"]
        if alias and value.layout is torch.strided:
            storage = value.untyped_storage()._cdata
            parts.append(f"storage={self.storages.setdefault(storage, len(self.storages))}")
        return "|".join(parts)

    def value(self, value: Any, *, alias: bool = False) -> str:
        if isinstance(value, torch.Tensor):
            return self.tensor(value, alias=alias)
        if isinstance(value, torch.SymInt):
            return f"sym({self.expr(value)})"
        if isinstance(value, (tuple, list)):
            return "[" + ";".join(self.value(v) for v in value) + "]"
        return type(value).__name__

    def argument(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return f"%{self.numbers[arg]}"
        if isinstance(arg, (tuple, list)):
            return "[" + ",".join(self.argument(a) for a in arg) + "]"
        if isinstance(arg, dict):
            return (
                "{"
                + ",".join(f"{k}:{self.argument(v)}" for k, v in sorted(arg.items(), key=lambda kv: str(kv[0])))
                + "}"
            )
        if isinstance(arg, slice):
            return f"slice({self.argument(arg.start)},{self.argument(arg.stop)},{self.argument(arg.step)})"
        if isinstance(arg, (int, float, bool, str, complex)) or arg is None:
            return f"{type(arg).__name__}:{arg!r}"
        if isinstance(arg, torch.SymInt):
            return f"sym({self.expr(arg)})"
        return f"{type(arg).__name__}:{arg}"

    def graph(self, gm: fx.GraphModule) -> None:
        for number, node in enumerate(gm.graph.nodes):
            self.numbers[node] = number
            value = node.meta.get("val", node.meta.get("example_value"))
            args = "" if node.op == "placeholder" else self.argument(list(node.args)) + self.argument(dict(node.kwargs))
            target = "" if node.op in ("placeholder", "output") else target_name(node.target)
            self.lines.append(
                f"{number} {node.op} {target} {args} -> {self.value(value, alias=node.op == 'placeholder')}"
            )
            if node.op == "get_attr":
                self.attribute(gm, node.target)

    def attribute(self, gm: fx.GraphModule, target: str) -> None:
        value: Any = gm
        for part in target.split("."):
            value = getattr(value, part)
        if isinstance(value, fx.GraphModule):
            inner = _Writer()
            inner.symbols, inner.ranges = self.symbols, self.ranges
            inner.graph(value)
            self.lines += [f"  sub {line}" for line in inner.lines]
        else:
            self.lines.append(f"  attr {self.value(value)}")


def target_name(target: Callable[..., Any] | str) -> str:
    """A name of an operator, function or method that is the same in every process."""
    if isinstance(target, str):
        return target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"hop.{target.name()}"
    name = getattr(target, "__qualname__", "") or target.__name__
    return f"{target.__module__}.{name}"


def fingerprint_text(gm: fx.GraphModule) -> str:
    """The text that is hashed, a line a node; `store why` diffs two of them."""
    writer = _Writer()
    writer.graph(gm)
    ranges = [f"range {name} {bounds}" for name, bounds in writer.ranges.items()]
    return "\n".join([*writer.lines, *ranges])


def fingerprint(gm: fx.GraphModule) -> str:
    """Hex digest (32 characters) of the graph's structure."""
    return hashlib.sha256(fingerprint_text(gm).encode()).hexdigest()[:32]
