"""The pristine graph of one fragment, the roles of its inputs, and copies of it to lower."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from fusewright.capture.fingerprint import fingerprint
from fusewright.capture.shapes import UNBOUNDED, ShapeBucket


@dataclass(frozen=True)
class Input:
    """One placeholder of a captured graph.

    Attributes:
        name: the placeholder's name.
        role: parameter, buffer, tensor or size.
        value: the fake tensor or symbolic int that Dynamo traced with.
    """

    name: str
    role: str
    value: Any


@dataclass(frozen=True)
class CapturedGraph:
    """One graph that Dynamo handed to the backend, never changed after this.

    Attributes:
        gm: forward graph in torch functions; placeholders carry `example_value`.
        inputs: one entry a placeholder, in order.
        named: symbol -> name, for every dynamic dimension that the user named.
        print: structural fingerprint of the graph, the same in every process.
    """

    gm: fx.GraphModule
    inputs: tuple[Input, ...]
    named: Mapping[sympy.Symbol, str]
    print: str

    @classmethod
    def build(
        cls, gm: fx.GraphModule, example_inputs: Sequence[Any], named: Mapping[sympy.Symbol, str]
    ) -> CapturedGraph:
        """Take ownership of a graph from Dynamo.

        Args:
            gm: the graph; it is not changed.
            example_inputs: one value a placeholder, used where the placeholder carries none.
            named: symbol -> name of the user's named dimensions that occur in this graph.
        """
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        assert len(placeholders) == len(example_inputs), (len(placeholders), len(example_inputs))
        inputs = []
        for node, given in zip(placeholders, example_inputs, strict=True):
            value = node.meta["example_value"] if node.meta.get("example_value") is not None else given
            inputs.append(Input(node.name, role_of(node, value), value))
        return cls(gm, tuple(inputs), dict(named), fingerprint(gm))

    def symbols(self) -> list[sympy.Symbol]:
        """Every free symbol of the inputs, in order of first use."""
        seen: dict[sympy.Symbol, None] = {}
        for item in self.inputs:
            for expr in expressions(item.value):
                for symbol in sorted(expr.free_symbols, key=str):
                    seen.setdefault(symbol)
        return list(seen)

    def sizes(self, bucket: ShapeBucket, args: Sequence[Any]) -> dict[sympy.Symbol, int]:
        """What each symbol counts as where something is priced: its upper edge in `bucket`, else its size in `args`."""
        found: dict[sympy.Symbol, int] = {}
        for item, value in zip(self.inputs, args, strict=True):
            if isinstance(item.value, torch.SymInt) and isinstance(item.value.node.expr, sympy.Symbol):
                symbol = item.value.node.expr
                within = bucket.range_of(self.named.get(symbol, ""))
                found[symbol] = int(value) if within is None or within.high == UNBOUNDED else within.high
        return found

    def copy(self) -> fx.GraphModule:
        """A copy to rewrite and lower; sub-graphs of higher-order operators are copied too, parameters are shared."""
        return copy_graph(self.gm)


def role_of(node: fx.Node, value: Any) -> str:
    """What the placeholder `node` holds: "parameter", "buffer", "tensor" (an argument) or "size"."""
    if not isinstance(value, torch.Tensor):
        return "size"
    if isinstance(value, torch.nn.Parameter) or node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type"):
        return "parameter" if isinstance(value, torch.nn.Parameter) else "buffer"
    return "tensor"


def expressions(value: Any) -> list[sympy.Expr]:
    """The symbolic sizes and strides in `value`, or nothing where all are numbers."""
    if isinstance(value, torch.SymInt):
        return [value.node.expr]
    if isinstance(value, torch.Tensor):
        return [s.node.expr for s in (*value.shape, *value.stride()) if isinstance(s, torch.SymInt)]
    return []


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy nodes and metadata of `gm`; attributes are shared except nested graphs, which passes may rewrite.

    `GraphModule.__deepcopy__` would copy parameters and drop what AOTAutograd reads to tell static inputs apart
    (`_dynamo_source` on placeholders, `_param_name_to_source` on the module).
    """
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(gm.graph, mapping)
    graph.output(result).meta = copy.copy(gm.graph.output_node().meta)
    holder = torch.nn.Module()
    for name, child in gm.named_children():
        holder.add_module(name, copy_graph(child) if isinstance(child, fx.GraphModule) else child)
    for name, parameter in gm.named_parameters(recurse=False):
        holder.register_parameter(name, parameter)
    for name, buffer in gm.named_buffers(recurse=False):
        holder.register_buffer(name, buffer)
    for node in gm.graph.nodes:
        if node.op == "get_attr" and "." not in node.target and not hasattr(holder, node.target):
            setattr(holder, node.target, getattr(gm, node.target))
    new = fx.GraphModule(holder, graph, class_name=type(gm).__name__)
    new.meta = dict(gm.meta)
    for old, node in mapping.items():
        if hasattr(old, "_dynamo_source"):
            node._dynamo_source = old._dynamo_source
    if hasattr(gm, "_param_name_to_source"):
        new._param_name_to_source = gm._param_name_to_source
    return new
