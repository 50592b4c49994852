"""Which nodes of a forward graph depend on the model's weights alone, and what a node writes to."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusewright.capture.graph import role_of
from fusewright.capture.values import tensor_of, value_of

# Pure functions of their operands: no random numbers, no state, no write, and the result is a tensor.
# fmt: off
_PURE = {
    "mul", "multiply", "add", "sub", "subtract", "div", "divide", "true_divide", "truediv", "neg", "rsqrt", "sqrt",
    "reciprocal", "square", "pow", "abs", "exp", "sum", "mean", "cat", "stack", "concat", "to", "float", "half",
    "bfloat16", "double", "view", "reshape", "permute", "transpose", "t", "mT", "flatten", "unflatten", "unsqueeze",
    "squeeze", "expand", "contiguous", "clone", "narrow", "getitem", "norm", "linalg_vector_norm", "_weight_norm",
    "matmul", "mm",
}
# fmt: on
_IN_PLACE_OPERATORS = frozenset(
    (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow)
    + (operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.imatmul)
    + (operator.setitem,)
)

EMITTED = "fusewright_emitted"  # in a node's meta: a pass on frozen weights made it, of operations that autocast leaves


def is_weight(node: Any) -> bool:
    """Whether `node` is a placeholder that holds a parameter or a buffer of the model; none of a tensor subclass."""
    if not isinstance(node, fx.Node) or node.op != "placeholder" or is_traceable_wrapper_subclass(value_of(node)):
        return False
    return role_of(node, value_of(node)) in ("parameter", "buffer")


def storages_of(node: fx.Node) -> set[int]:
    """Identities of the fake storages that the value of `node` lies in; views share that of their base."""
    return storages_in(value_of(node))


def storages_in(value: Any) -> set[int]:
    """Identities of the storages of all tensors in `value`, a tensor or a tree of them."""
    found: set[int] = set()
    pending = [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
    while pending:
        tensor = pending.pop()
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            pending += [getattr(tensor, name) for name in names]
        elif tensor.layout is torch.strided:
            found.add(tensor.untyped_storage()._cdata)
    return found


def written_by(node: fx.Node) -> list[fx.Node]:
    """The operands that `node` may write to. Callees that nobody here knows may write to all of them."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    target = node.target
    if node.op == "call_method":
        name = str(target)
        in_place = name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        return _first(node) if in_place else _out(node)
    if isinstance(target, torch._ops.OpOverload):
        return _written_by_schema(node, target)
    owner = str(getattr(target, "__module__", None) or "torch").split(".")[0]  # C functions name no module
    known = owner in ("torch", "_operator", "operator", "builtins", "math")
    if not known or node.op == "call_module" or isinstance(target, HigherOrderOperator):
        return list(node.all_input_nodes)
    name = str(getattr(target, "__name__", target))  # a packet of overloads has the name of its operator
    if target in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")):
        return _first(node)
    return _written_by_options(node, target) + _out(node)


def _first(node: fx.Node) -> list[fx.Node]:
    return [x for x in pytree.tree_leaves(node.args[:1]) if isinstance(x, fx.Node)]


def _out(node: fx.Node) -> list[fx.Node]:
    return [x for x in pytree.tree_leaves(node.kwargs.get("out")) if isinstance(x, fx.Node)]


def _written_by_schema(node: fx.Node, target: torch._ops.OpOverload) -> list[fx.Node]:
    found: list[fx.Node] = []
    for index, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            found += [x for x in pytree.tree_leaves(given) if isinstance(x, fx.Node)]
    return found


def _written_by_options(node: fx.Node, target: Callable[..., Any] | str) -> list[fx.Node]:
    """What `inplace=True`, running statistics and `max_norm` make a function of `torch.nn.functional` write to."""
    if not inspect.isfunction(target):
        return []
    try:
        given = inspect.signature(target).bind(*node.args, **node.kwargs).arguments
    except TypeError:
        return list(node.all_input_nodes)
    found: list[Any] = []
    if given.get("inplace", False) is not False:
        found.append(given.get("input"))
    if target is functional.batch_norm and given.get("training", False) is not False:
        found += [given.get("running_mean"), given.get("running_var")]
    if target is functional.instance_norm and given.get("use_input_stats", True) is not False:
        found += [given.get("running_mean"), given.get("running_var")]
    if target in (functional.embedding, functional.embedding_bag) and given.get("max_norm") is not None:
        found.append(given.get("weight"))
    return [x for x in found if isinstance(x, fx.Node)]


def written_storages(nodes: Iterable[fx.Node]) -> set[int]:
    """Identities of all fake storages that `nodes` may write to."""
    return {storage for node in nodes for operand in written_by(node) for storage in storages_of(operand)}


def weight_only(graph: fx.Graph) -> set[fx.Node]:
    """Weights that the graph does not write to, and all that is computed from them by pure functions alone."""
    written = written_storages(graph.nodes)
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if storages_of(node) & written:
            continue
        if is_weight(node) or (is_pure(node) and node.all_input_nodes and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def is_pure(node: fx.Node) -> bool:
    """Whether `node` is a function of its operands that gives one tensor of known sizes."""
    value = tensor_of(node)
    if node.op not in ("call_function", "call_method") or value is None or value.layout is not torch.strided:
        return False
    if any(isinstance(size, torch.SymInt) for size in value.shape) or written_by(node):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if isinstance(node.target, torch._ops.OpOverload):
        name = node.target._schema.name.split("::")[-1] if node.target.namespace == "aten" else ""
    return name in _PURE and (node.op == "call_method" or _is_torchs(node.target))


def _is_torchs(target: Any) -> bool:
    return str(getattr(target, "__module__", None) or "torch").split(".")[0] in ("torch", "_operator")


def emit(graph: fx.Graph, target: Callable[..., Any] | str, *args: Any) -> fx.Node:
    """Add a call at the graph's insertion point, with the fake value that it computes.

    Args:
        target: a function of `torch`, or the name of a method; the operands carry fake tensors of one mode.
    """
    node = graph.call_method(target, args) if isinstance(target, str) else graph.call_function(target, args)
    node.meta["example_value"] = fake_result(node)
    node.meta[EMITTED] = True
    return node


def fake_result(node: fx.Node, values: Mapping[fx.Node, Any] | None = None) -> Any:
    """What `node` computes from the fake values of its operands, or from those in `values` where it has them.

    Raises:
        RuntimeError: the operation refuses operands of such sizes or strides.
    """
    given = values or {}
    args, kwargs = pytree.tree_map_only(
        fx.Node, lambda n: given[n] if n in given else value_of(n), (node.args, node.kwargs)
    )
    mode = next(x.fake_mode for x in _fakes((args, kwargs)))
    with mode, torch.no_grad():
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target), node.target
        return node.target(*args, **kwargs)


def _fakes(tree: Any) -> Iterator[Any]:
    return (x for x in pytree.tree_leaves(tree) if isinstance(x, torch._subclasses.FakeTensor))
