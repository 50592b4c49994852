"""Finds the first layer that disagrees with eager once optimized, each tried on the inputs it has in the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fusewright.numerics import TreeComparison, compare_trees
from fusewright.tools.bisect import Culprit, bisect
from fusewright.tools.pass_tester import capture
from fusewright.trees import cast_floats

Optimize = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Call:
    """One call of a module, its tensors copied."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class BadLayer:
    """The innermost first layer that disagrees.

    Attributes:
        name: path in the model, such as `model.layers.0.self_attn`; empty for the model itself.
        kind: class of the layer.
        comparison: its outputs and gradients against eager's.
        culprit: the pass and rewrite that made it so, or None where no pass did: then the lowering did.
    """

    name: str
    kind: str
    comparison: TreeComparison
    culprit: Culprit | None

    def __str__(self) -> str:
        where = f"{self.name or 'the model itself'} ({self.kind})"
        cause = "no pass is at fault: the lowering is" if self.culprit is None else f"first bad pass: {self.culprit}"
        return f"first layer that differs: {where}: {self.comparison.reason}; {cause}"


def first_bad_layer(model: nn.Module, call: Call, optimize: Optimize, *, training: bool) -> BadLayer | None:
    """Descend from `model` into the first child that disagrees, until no child does.

    Args:
        model: the eager model; it is not changed.
        call: arguments of one call of it.
        optimize: optimizes a module in place, without verification.
        training: compare gradients too.

    Returns:
        None where the model agrees as a whole.
    """
    comparison = _compare(model, call, optimize, training=training)
    return None if comparison.ok else _descend(model, call, optimize, training, "", comparison)


def _descend(
    module: nn.Module, call: Call, optimize: Optimize, training: bool, name: str, comparison: TreeComparison
) -> BadLayer:
    passed: set[str] = set()
    for child_name, child, child_call in _children_in_order(module, call):
        key = f"{child!r} {pytree.tree_map(_shape, (child_call.args, dict(child_call.kwargs)))}"
        if key in passed:
            continue  # a layer like one that agreed; random weights make no difference to what a compiler does
        found = _compare(child, child_call, optimize, training=training)
        if not found.ok:
            return _descend(child, child_call, optimize, training, f"{name}.{child_name}".lstrip("."), found)
        passed.add(key)
    return BadLayer(name, type(module).__name__, comparison, _culprit(module, call))


def _children_in_order(module: nn.Module, call: Call) -> Iterator[tuple[str, nn.Module, Call]]:
    """The direct children in the order in which eager calls them, with their inputs; containers are looked through."""
    seen: dict[str, Call] = {}
    own = copy.deepcopy(module)
    handles = []
    for name, child in _direct(own):

        def note(child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            seen.setdefault(name, Call(_copied(args), _copied(kwargs)))

        handles.append(child.register_forward_pre_hook(note, with_kwargs=True))
    own(*_copied(call.args), **_copied(dict(call.kwargs)))
    originals = dict(module.named_modules())
    for name, found in seen.items():
        yield name, originals[name], found


def _direct(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            yield from _direct(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _compare(module: nn.Module, call: Call, optimize: Optimize, *, training: bool) -> TreeComparison:
    expected = _observe(copy.deepcopy(module), call, training=training)
    found = _observe(optimize(copy.deepcopy(module)), call, training=training)

    def wide() -> dict[str, Any]:
        cast = Call(cast_floats(call.args, torch.float64), cast_floats(dict(call.kwargs), torch.float64))
        return _observe(copy.deepcopy(module).double(), cast, training=training)

    return compare_trees(found, expected, wide, training=training)


def _observe(module: nn.Module, call: Call, *, training: bool) -> dict[str, Any]:
    with torch.random.fork_rng(), torch.set_grad_enabled(training):
        torch.manual_seed(0)
        output = module(*_copied(call.args), **_copied(dict(call.kwargs)))
        seen: dict[str, Any] = {"output": output}
        ends = [o for o in pytree.tree_leaves(output) if isinstance(o, torch.Tensor) and o.requires_grad]
        if training and ends:
            torch.stack([end.float().square().mean() for end in ends]).sum().backward()
            seen["gradients"] = {name: p.grad for name, p in module.named_parameters()}
    return seen


def _culprit(module: nn.Module, call: Call) -> Culprit | None:
    own = copy.deepcopy(module)

    def run(*args: Any) -> Any:
        return own(*args, **dict(call.kwargs))

    taken = capture(run, call.args)
    return bisect(taken.graph, taken.inputs)


def _copied(tree: Any) -> Any:
    def one(leaf: Any) -> Any:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(one, tree)


def _shape(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
