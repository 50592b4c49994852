"""Nested results as flat, named leaves: walk them, cast them, compare them bit by bit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Tree: TypeAlias = Any
"""Nested dicts, lists, tuples, dataclasses, model outputs and registered pytree nodes; tensors, scalars as leaves."""


@dataclass(frozen=True)
class Container:
    """Stands in a walk for a container, so that a list is not taken for a tuple."""

    kind: type


_ATOMS = (Tensor, str, bytes, bool, int, float, complex, type(None), type, torch.dtype, torch.device, torch.Size)


def walk(node: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) and (path, Container) depth first.

    Not `tree_flatten_with_path`: that raises for a node registered without key paths, as those of diffusers are.
    """
    if isinstance(node, _ATOMS):
        yield path, node
        return
    children = _children(node)
    if children is None:
        yield path, node
        return
    yield path, Container(type(node))
    for key, child in children:
        yield from walk(child, path + key)


def _children(node: Tree) -> list[tuple[str, Any]] | None:
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", value) for key, value in node.items()]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return [(f".{name}", value) for name, value in zip(node._fields, node, strict=True)]
    if isinstance(node, (list, tuple)):
        return [(f"[{index}]", value) for index, value in enumerate(node)]
    if dataclasses.is_dataclass(node):
        return [(f".{field.name}", getattr(node, field.name)) for field in dataclasses.fields(node)]
    leaves, _ = pytree.tree_flatten(node, is_leaf=lambda inner: inner is not node)
    if len(leaves) == 1 and leaves[0] is node:
        return None
    return [(f"<{index}>", value) for index, value in enumerate(leaves)]


def bitwise_difference(a: Tree, b: Tree) -> str | None:
    """Path and kind of the first difference in structure, shape, dtype or bits between two trees; None without one.

    Bits, not values: -0.0 differs from 0.0, and a NaN equals a NaN of the same bits. Strides and devices do not count.
    """
    left, right = dict(walk(a)), dict(walk(b))
    for path in [*left, *(p for p in right if p not in left)]:
        if path not in left or path not in right:
            return f"{path or '.'}: only in one of the two"
        x, y = left[path], right[path]
        if type(x) is not type(y) and not (isinstance(x, Tensor) and isinstance(y, Tensor)):
            return f"{path or '.'}: {kind_name(x)} and {kind_name(y)}"
        if isinstance(x, Tensor):
            problem = shape_problem(x, y) or ("" if torch.equal(_bits(x), _bits(y).to(x.device)) else "bits differ")
            if problem:
                return f"{path or '.'}: {problem}"
        elif not same_value(x, y):
            return f"{path or '.'}: {x!r} and {y!r}"
    return None


def bitwise_equal(a: Tree, b: Tree) -> bool:
    """True where two tensors, or two trees of tensors, agree in structure, shape, dtype and every bit."""
    return bitwise_difference(a, b) is None


def cast_floats(tree: Tree, dtype: torch.dtype) -> Tree:
    """`tree` with its real floating tensors cast to `dtype`; `requires_grad` is kept, other leaves stay as they are."""

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dtype == dtype:
            return leaf
        return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)

    return pytree.tree_map(cast, tree)


def kind_name(node: Any) -> str:
    """Name of the type of a leaf or of the container that `node` stands for."""
    return node.kind.__name__ if isinstance(node, Container) else type(node).__name__


def same_value(a: Any, b: Any) -> bool:
    """Equality of two leaves that are no tensors; a NaN equals a NaN."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def shape_problem(res: Tensor, ref: Tensor) -> str:
    """Why two tensors cannot be compared element by element, or an empty string."""
    if res.shape != ref.shape:
        return f"shape {tuple(res.shape)} instead of {tuple(ref.shape)}"
    if res.dtype != ref.dtype:
        return f"dtype {res.dtype} instead of {ref.dtype}"
    if res.layout != ref.layout:
        return f"layout {res.layout} instead of {ref.layout}"
    return ""


def plain(tensor: Tensor) -> Tensor:
    """Detached, strided, without lazy conjugation or negation."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg()


def _bits(tensor: Tensor) -> Tensor:
    return plain(tensor).reshape(-1).contiguous().view(torch.uint8)
