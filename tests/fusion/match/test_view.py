"""One meaning is read from every spelling of it, and unknown nodes are not guessed."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from fusewright.fusion.match.view import Op, normalize, number, writes_in_place

aten = torch.ops.aten
MODE = FakeTensorMode()


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with MODE:
        return torch.empty(shape, dtype=dtype)


def read(target: Any, *args: Any, **kwargs: Any) -> Op | None:
    """Normalize a call of `target` (a method, if a string) whose tensor arguments become placeholders."""
    graph = fx.Graph()

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["example_value"] = value
        return node

    placed = [place(a) for a in args]
    create = graph.call_method if isinstance(target, str) else graph.call_function
    node = create(target, tuple(placed), kwargs)
    with MODE:
        node.meta["example_value"] = (
            getattr(args[0], target)(*args[1:], **kwargs) if isinstance(target, str) else target(*args, **kwargs)
        )
    return normalize(node)


X, Y = tensor(2, 3, 4, 5), tensor(2, 3, 5, 4)
SPELLINGS: list[tuple[str, dict[str, Any], list[tuple[Any, ...]]]] = [
    ("matmul", {}, [(torch.matmul, X, Y), (operator.matmul, X, Y), ("matmul", X, Y), (aten.matmul.default, X, Y)]),
    ("softmax", {"dim": 3, "dtype": None}, [
        (torch.softmax, X, -1), (functional.softmax, X, 3), ("softmax", X, -1), (aten.softmax.int, X, -1),
        (torch.special.softmax, X, -1)]),
    ("permute", {"perm": (0, 1, 3, 2)}, [
        ("transpose", X, -1, -2), (torch.transpose, X, 2, 3), ("permute", X, 0, 1, 3, 2), ("permute", X, (0, 1, -1, 2)),
        (aten.transpose.int, X, -1, -2), (aten.permute.default, X, [0, 1, 3, 2]), ("swapaxes", X, 3, 2),
        (torch.movedim, X, 3, 2), (aten.mT, X), ("adjoint", X)]),
    ("mul", {"scalar": 2.0, "reversed": False}, [
        (torch.mul, X, 2), (operator.mul, X, 2.0), ("mul", X, 2), (aten.mul.Tensor, X, 2)]),
    ("mul", {"scalar": 2.0, "reversed": True}, [(operator.mul, 2, X)]),
    ("div", {"scalar": 2.0, "reversed": False}, [(torch.div, X, 2), (operator.truediv, X, 2), ("true_divide", X, 2)]),
    ("cast", {"dtype": torch.float16}, [
        ("to", X, torch.float16), ("half", X), ("type", X, torch.float16), ("type_as", X, tensor(1, dtype=torch.half)),
        ("to", X, tensor(1, dtype=torch.half))]),
    ("pow", {"exponent": 2.0}, [
        ("pow", X, 2), (torch.square, X), (operator.pow, X, 2), (aten.pow.Tensor_Scalar, X, 2)]),
    ("mean", {"dims": (3,), "keepdim": True, "dtype": None}, [
        (torch.mean, X, -1, True), ("mean", X, 3), ("mean", X, (-1,))]),
]  # fmt: skip
FLAT = [(kind, attrs, call) for kind, attrs, calls in SPELLINGS for call in calls]


@pytest.mark.parametrize(("kind", "attrs", "call"), FLAT)
def test_spelling(kind: str, attrs: dict[str, Any], call: tuple[Any, ...]) -> None:
    kwargs = {"keepdim": True} if kind == "mean" and len(call) == 3 else {}
    op = read(*call, **kwargs)
    assert op is not None
    assert (op.kind, op.attrs, op.inplace) == (kind, attrs, False)


def test_where_is_a_fill() -> None:
    keep = tensor(4, 5, dtype=torch.bool)
    op, inverse = read(torch.where, keep, X, -1.0), read(torch.where, keep, -1.0, X)
    assert op is not None
    assert inverse is not None
    assert (op.kind, op.attrs) == ("masked_fill", {"value": -1.0, "inverted": True})
    assert (inverse.kind, inverse.attrs) == ("masked_fill", {"value": -1.0, "inverted": False})


@pytest.mark.parametrize(
    "call",
    [
        (torch.div, X, 2, {"rounding_mode": "floor"}),
        (torch.add, X, X, {"alpha": 2}),
        (torch.einsum, "...ij,...jk->...ik", X, Y, {}),
        (torch.einsum, "abij,abjk", X, Y, {}),
        (torch.cumsum, X, -1, {}),
        (operator.getitem, X, (slice(0, 1), None), {}),
        (lambda x: x, X, {}),
    ],
    ids=["floor", "alpha", "ellipsis", "implicit", "unknown", "slice", "user's function"],
)
def test_other_meanings_are_not_read(call: tuple[Any, ...]) -> None:
    assert read(*call[:-1], **call[-1]) is None


def test_numbers() -> None:
    graph = fx.Graph()
    small = graph.call_function(torch.full, ([], -1.5))
    large = graph.call_function(torch.full, ([2], -1.5))
    assert [number(x) for x in (2, 2.5, True, None, small, large)] == [2.0, 2.5, None, None, -1.5, None]


def test_writes() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    writing = [
        graph.call_method("add_", (x, 1)), graph.call_function(operator.iadd, (x, 1)),
        graph.call_function(aten.add_.Tensor, (x, 1)), graph.call_function(torch.add, (x, 1), {"out": x}),
        graph.call_function(operator.setitem, (x, 0, 1)),
    ]  # fmt: skip
    reading = [
        graph.call_function(operator.or_, (x, x)), graph.call_method("__and__", (x, x)),
        graph.call_method("add", (x, x)), graph.call_function(aten.add.Tensor, (x, x)),
    ]  # fmt: skip
    assert [writes_in_place(node) for node in (*writing, *reading)] == [True] * 5 + [False] * 4
