"""One reading of a node, however it was spelled: torch function, tensor method, Python operator or ATen overload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from fusewright.fusion.match.sizes import same
from fusewright.passes.base import tensor_of


@dataclass(frozen=True)
class Op:
    """What a node computes.

    Attributes:
        kind: the name of the operation, one per meaning: "matmul", "mul", "softmax", "permute", "cast", ...
        node: the node that was read.
        inputs: its tensor operands in the order of the kind.
        attrs: its constants. Axes are >= 0, "perm" is complete, scalars are Python numbers.
        inplace: whether it overwrites its first operand.
    """

    kind: str
    node: fx.Node
    inputs: tuple[fx.Node, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    inplace: bool = False


Args = dict[str, Any]
Reader = Callable[[fx.Node, Args], Op | None]

# name -> (kind, names of the positional parameters). The first parameter of a method is the tensor itself.
_SPELLINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("matmul", "bmm", "__matmul__"), ("matmul", ("input", "other"))),
    "baddbmm": ("baddbmm", ("input", "batch1", "batch2")),
    **dict.fromkeys(("mul", "multiply", "imul", "__mul__", "__rmul__"), ("mul", ("input", "other"))),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv", "itruediv"), ("div", ("input", "other"))),
    **dict.fromkeys(("add", "iadd", "__add__", "__radd__"), ("add", ("input", "other"))),
    **dict.fromkeys(("sub", "subtract", "isub"), ("sub", ("input", "other"))),
    **dict.fromkeys(("softmax", "special_softmax", "_softmax"), ("softmax", ("input", "dim", "dtype"))),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), ("transpose", ("input", "dim0", "dim1"))),
    **dict.fromkeys(("mT", "t", "adjoint"), ("swap_last", ("input",))),
    "permute": ("permute", ("input", "dims")),
    "movedim": ("movedim", ("input", "source", "destination")),
    **dict.fromkeys(("view", "reshape", "_unsafe_view"), ("view", ("input", "shape"))),
    **dict.fromkeys(("flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "reshape_as"), ("view", ("input",))),
    "expand": ("expand", ("input", "size")),
    "getitem": ("getitem", ("input", "index")),
    "repeat_interleave": ("repeat_interleave", ("input", "repeats", "dim")),
    **dict.fromkeys(("contiguous", "clone"), ("copy", ("input",))),
    **dict.fromkeys(("float", "half", "bfloat16", "double"), ("cast", ("input",))),
    **dict.fromkeys(("to", "type", "type_as", "_to_copy"), ("cast", ("input", "target", "second"))),
    "masked_fill": ("masked_fill", ("input", "mask", "value")),
    "where": ("where", ("condition", "input", "other")),
    "dropout": ("dropout", ("input", "p", "training")),
    "pow": ("pow", ("input", "exponent")),
    **dict.fromkeys(("rsqrt", "sqrt", "tanh", "exp", "neg", "square"), ("unary", ("input",))),
    "mean": ("mean", ("input", "dim", "keepdim")),
    "rms_norm": ("rms_norm", ("input", "normalized_shape", "weight", "eps")),
    "scaled_dot_product_attention": ("sdpa", ("query", "key", "value")),
}
# The same name with other parameters in torch.nn.functional.
_FUNCTIONAL: dict[Any, tuple[str, tuple[str, ...]]] = {
    functional.softmax: ("softmax", ("input", "dim", "_stacklevel", "dtype")),
    functional.dropout: ("dropout", ("input", "p", "training", "inplace")),
}
_RENAMED = {"self": "input", "mat2": "other", "implicit": "unused", "size": "size"}


def spelling(node: fx.Node) -> str:
    """The bare name of what `node` calls: "softmax" for `F.softmax`, `Tensor.softmax` and `aten.softmax.int`."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(node.target).split(".")[1] if "." in str(node.target) else str(node.target)
    return str(getattr(node.target, "__name__", ""))  # partials and other callables have none


def is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def writes_in_place(node: fx.Node) -> bool:
    """Whether `node` changes one of its operands; anything unknown that is named like it counts."""
    name = spelling(node)
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    if name in ("and_", "or_", "not_", "is_"):  # Python's operators, named so because the words are reserved
        return False
    in_place_operator = name in ("iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior", "ixor", "setitem")
    return in_place_operator or "out" in node.kwargs or (name.endswith("_") and not is_dunder(name))


def is_module_known(node: fx.Node) -> bool:
    """Whether the callee is torch's or Python's own, so that its name means what it says."""
    if node.op == "call_method" or isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return True
    owner = str(getattr(node.target, "__module__", "") or "torch")  # C functions of torch name no module
    return owner.split(".")[0] in ("torch", "_operator", "operator", "builtins")


def normalize(node: Any) -> Op | None:
    """Read `node`; None where it is no node, no tensor operation, or none that the matchers know."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method") or not is_module_known(node):
        return None
    name = spelling(node)
    inplace = writes_in_place(node)
    if name.endswith("_") and not is_dunder(name):
        name = name[:-1]
    if name == "einsum":
        return _einsum(node)
    kind, params = _FUNCTIONAL.get(node.target, (None, ())) if node.op == "call_function" else (None, ())
    if kind is None:
        if name not in _SPELLINGS:
            return None
        kind, params = _SPELLINGS[name]
    if isinstance(node.target, torch._ops.OpOverload):
        params = tuple(_RENAMED.get(a.name, a.name) for a in node.target._schema.arguments)
    if kind == "where" and node.op == "call_method":
        params = ("input", "condition", "other")
    bound = _bind(node, params)
    reader = _READERS.get(kind, _plain)
    op = reader(node, bound) if bound is not None else None
    if op is None:
        return None
    return Op(op.kind or kind, node, op.inputs, op.attrs, inplace)


def _bind(node: fx.Node, params: tuple[str, ...]) -> Args | None:
    """Arguments by name; what exceeds `params` is kept under "*" (shapes and axes may be given one by one)."""
    bound: Args = dict(zip(params, node.args, strict=False))
    if len(node.args) > len(params):
        bound["*"] = node.args[len(params) - 1 :]
    for key, value in node.kwargs.items():
        bound[_RENAMED.get(key, key)] = value
    if "out" in bound:
        return None
    return bound


def rank_of(node: Any) -> int | None:
    """Number of axes of a node's fake tensor, or None."""
    value = tensor_of(node)
    return None if value is None else value.dim()


def shape_of(node: fx.Node) -> torch.Size:
    """Shape of a node that is known to hold a tensor."""
    value = tensor_of(node)
    assert value is not None, node
    return value.shape


def dtype_of(node: fx.Node) -> torch.dtype:
    """Dtype of a node that is known to hold a tensor."""
    value = tensor_of(node)
    assert value is not None, node
    return value.dtype


def number(value: Any) -> float | None:
    """A Python number, or one that the graph makes into a tensor of one element; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if not isinstance(value, fx.Node) or value.op not in ("call_function", "call_method"):
        return None
    if any(writes_in_place(user) for user in value.users):
        return None
    name = spelling(value)
    if name in ("tensor", "scalar_tensor") and value.args:
        return number(value.args[0])
    if name == "full" and len(value.args) > 1 and all(size == 1 for size in _as_sequence(value.args[0])):
        return number(value.args[1])
    if name == "to" and tensor_of(value) is not None and all(same(size, 1) for size in shape_of(value)):
        return number(value.args[0])
    return None


def _as_sequence(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _axis(value: Any, rank: int) -> int | None:
    return value % rank if isinstance(value, int) and -rank <= value < rank else None


def _tensors(bound: Args, *names: str) -> tuple[fx.Node, ...] | None:
    found = tuple(bound.get(name) for name in names)
    return found if all(tensor_of(x) is not None for x in found) else None  # type: ignore[return-value]


def _op(inputs: tuple[fx.Node, ...] | None, kind: str = "", **attrs: Any) -> Op | None:
    return None if inputs is None else Op(kind, inputs[0], inputs, attrs)


def _plain(node: fx.Node, bound: Args) -> Op | None:
    return _op(_tensors(bound, "input"))


def _matmul(node: fx.Node, bound: Args) -> Op | None:
    return _op(_tensors(bound, "input", "other"))


def _baddbmm(node: fx.Node, bound: Args) -> Op | None:
    beta, alpha = number(bound.get("beta", 1)), number(bound.get("alpha", 1))
    if beta is None or alpha is None:
        return None
    return _op(_tensors(bound, "input", "batch1", "batch2"), beta=beta, alpha=alpha)


def _binary(node: fx.Node, bound: Args) -> Op | None:
    """Two tensors, or a tensor and "scalar"; `2 / x` has "reversed" set."""
    if bound.get("rounding_mode") is not None or bound.get("alpha", 1) != 1:
        return None
    left, right = bound.get("input"), bound.get("other")
    for tensor, other, is_reversed in ((left, right, False), (right, left, True)):
        scalar = number(other)
        if scalar is not None and tensor_of(tensor) is not None:
            return _op((tensor,), scalar=scalar, reversed=is_reversed)  # type: ignore[arg-type]
    return _op(_tensors(bound, "input", "other"))


def _softmax(node: fx.Node, bound: Args) -> Op | None:
    inputs = _tensors(bound, "input")
    if inputs is None:
        return None
    return _op(inputs, dim=_axis(bound.get("dim"), len(shape_of(inputs[0]))), dtype=bound.get("dtype"))


def _permuted(bound: Args, make: Callable[[int], tuple[int, ...] | None]) -> Op | None:
    inputs = _tensors(bound, "input")
    rank = rank_of(bound.get("input"))
    perm = make(rank) if rank is not None else None
    return _op(inputs, "permute", perm=perm) if perm is not None else None


def _transpose(node: fx.Node, bound: Args) -> Op | None:
    def swap(rank: int) -> tuple[int, ...] | None:
        first = _axis(bound.get("dim0", bound.get("axis0")), rank)
        second = _axis(bound.get("dim1", bound.get("axis1")), rank)
        if first is None or second is None:
            return None
        perm = list(range(rank))
        perm[first], perm[second] = second, first
        return tuple(perm)

    return _permuted(bound, swap)


def _swap_last(node: fx.Node, bound: Args) -> Op | None:
    value = tensor_of(bound.get("input"))
    if value is None or value.dim() < 2 or value.is_complex():
        return None
    return _permuted(bound, lambda rank: (*range(rank - 2), rank - 1, rank - 2))


def _permute(node: fx.Node, bound: Args) -> Op | None:
    def given(rank: int) -> tuple[int, ...] | None:
        axes = [_axis(a, rank) for a in _as_sequence(bound["*"] if "*" in bound else bound.get("dims"))]
        perm = tuple(a for a in axes if a is not None)
        return perm if sorted(perm) == list(range(rank)) and len(perm) == len(axes) else None

    return _permuted(bound, given)


def _movedim(node: fx.Node, bound: Args) -> Op | None:
    def moved(rank: int) -> tuple[int, ...] | None:
        source, target = _axis(bound.get("source"), rank), _axis(bound.get("destination"), rank)
        if source is None or target is None:
            return None
        rest = [a for a in range(rank) if a != source]
        rest.insert(target, source)
        return tuple(rest)

    return _permuted(bound, moved)


def _getitem(node: fx.Node, bound: Args) -> Op | None:
    """Only the spelling of unsqueeze: full slices and one None; any other indexing is unknown."""
    inputs, rank = _tensors(bound, "input"), rank_of(bound.get("input"))
    if inputs is None or rank is None:
        return None
    index = list(_as_sequence(bound.get("index")))
    if index.count(Ellipsis) > 1:
        return None
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index[at : at + 1] = [slice(None)] * (rank - sum(i is not None for i in index) + 1)
    full = [i for i in index if i is not None]
    if index.count(None) != 1 or len(full) > rank or any(i != slice(None) for i in full):
        return None
    return _op(inputs, "view")


def _repeat_interleave(node: fx.Node, bound: Args) -> Op | None:
    inputs, rank = _tensors(bound, "input"), rank_of(bound.get("input"))
    if inputs is None or rank is None or not isinstance(bound.get("repeats"), int):
        return None
    dim = _axis(bound.get("dim"), rank)
    return None if dim is None else _op(inputs, repeats=bound["repeats"], dim=dim)


def _cast(node: fx.Node, bound: Args) -> Op | None:
    """`dtype` is what the fake result has: a cast is known by its effect, however the target was given."""
    inputs, value = _tensors(bound, "input"), tensor_of(node)
    return None if inputs is None or value is None else _op(inputs, dtype=value.dtype)


def _fill(node: fx.Node, bound: Args) -> Op | None:
    return _op(_tensors(bound, "input", "mask"), value=number(bound.get("value")))


def _where(node: fx.Node, bound: Args) -> Op | None:
    """`where(c, x, number)` is a masked_fill where c is False; `where(c, number, x)` one where c is True."""
    for kept, filled, inverted in (("input", "other", True), ("other", "input", False)):
        value = number(bound.get(filled))
        if value is not None:
            return _op(_tensors(bound, kept, "condition"), "masked_fill", value=value, inverted=inverted)
    return _op(_tensors(bound, "condition", "input", "other"))


def _dropout(node: fx.Node, bound: Args) -> Op | None:
    training = bound.get("training", bound.get("train", True))
    return _op(_tensors(bound, "input"), p=bound.get("p", 0.5), training=training)


def _pow(node: fx.Node, bound: Args) -> Op | None:
    exponent = number(bound.get("exponent"))
    return None if exponent is None else _op(_tensors(bound, "input"), exponent=exponent)


def _unary(node: fx.Node, bound: Args) -> Op | None:
    name = spelling(node).rstrip("_")
    if name == "square":
        return _op(_tensors(bound, "input"), "pow", exponent=2.0)
    return _op(_tensors(bound, "input"), name)


def _mean(node: fx.Node, bound: Args) -> Op | None:
    inputs, rank = _tensors(bound, "input"), rank_of(bound.get("input"))
    if inputs is None or rank is None:
        return None
    axes = tuple(_axis(a, rank) for a in _as_sequence(bound.get("dim")))
    return _op(inputs, dims=axes, keepdim=bool(bound.get("keepdim", False)), dtype=bound.get("dtype"))


def _rms_norm(node: fx.Node, bound: Args) -> Op | None:
    shape = _as_sequence(bound.get("normalized_shape"))
    return _op(_tensors(bound, "input"), shape=shape, weight=bound.get("weight"), eps=bound.get("eps"))


def _sdpa(node: fx.Node, bound: Args) -> Op | None:
    return _op(_tensors(bound, "query", "key", "value"))


def _einsum(node: fx.Node) -> Op | None:
    """Two operands, every letter spelled out, none twice in an operand, the output given."""
    if not node.args or not isinstance(node.args[0], str):
        return None
    rest = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], list | tuple) else node.args[1:]
    terms = node.args[0].replace(" ", "").replace("->", ",").split(",")
    if "->" not in node.args[0] or "." in node.args[0] or len(terms) != 3 or len(rest) != 2:
        return None
    if any(len(set(term)) != len(term) for term in terms) or any(tensor_of(x) is None for x in rest):
        return None
    return Op("einsum", node, tuple(rest), {"labels": tuple(terms)})  # type: ignore[arg-type]


_READERS: dict[str, Reader] = {
    "matmul": _matmul,
    "baddbmm": _baddbmm,
    **dict.fromkeys(("mul", "div", "add", "sub"), _binary),
    "softmax": _softmax,
    "transpose": _transpose,
    "swap_last": _swap_last,
    "permute": _permute,
    "movedim": _movedim,
    "getitem": _getitem,
    "repeat_interleave": _repeat_interleave,
    "cast": _cast,
    "masked_fill": _fill,
    "where": _where,
    "dropout": _dropout,
    "pow": _pow,
    "unary": _unary,
    "mean": _mean,
    "rms_norm": _rms_norm,
    "sdpa": _sdpa,
}
