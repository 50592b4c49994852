"""Compares a lowered graph with the pristine graph run eagerly, on copies, without leaving a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fusewright.capture.graph import copy_graph
from fusewright.numerics import TreeComparison, compare_trees

Callee = Callable[..., Any]
Tree = dict[str, Any]

_TO_DOUBLE = {torch.float32, torch.float16, torch.bfloat16}
_CAST_METHODS = {"float", "half", "bfloat16"}


@dataclass(frozen=True)
class Comparison:
    """Outcome of one verification.

    Attributes:
        ok: True, False, or None where nothing could be compared.
        what: what was compared, or why nothing was.
        detail: the rule's own words: first and worst difference.
    """

    ok: bool | None
    what: str
    detail: str


class EagerRaisedError(Exception):
    """The pristine graph raised on copies of the arguments: the model's own exception, not a disagreement."""


def why_not_comparable(gm: fx.GraphModule) -> str | None:
    """A reason not to run the graph twice, or None.

    Collectives must not run on one rank only because its verdict cache was cold.
    """
    for node in gm.graph.nodes:
        if node.op == "call_function" and "c10d" in str(node.target):
            return "not compared: the graph holds collectives, which every rank would have to repeat"
    return None


def verify(
    pristine: fx.GraphModule, lowered: Callee, args: Sequence[Any], mutated: Sequence[int] | None, *, training: bool
) -> Comparison:
    """Run both on copies of `args` and compare outputs, mutated inputs and, in training, gradients by PROTOCOLS A1.

    Nothing is left behind: random state is restored, and inputs that either run may change are copied.

    Args:
        pristine: the captured graph; run eagerly, it defines what is right.
        lowered: the callable to judge.
        args: real arguments of the first call.
        mutated: positions that the graph changes in place, None where that is not known.
        training: compare gradients too.

    Raises:
        EagerRaisedError: the pristine graph raises for these arguments.
    """
    reason = why_not_comparable(pristine)
    if reason is not None:
        return Comparison(None, reason, "")
    with _unseen_by_saved_tensor_hooks(), _random_state_restored(args) as rewind:
        before = rewind()
        try:
            expected = observe(pristine, args, mutated, training=training)
        except Exception as error:
            raise EagerRaisedError(str(error)) from error
        draws = not _same_state(before, _state(args))
        rewind()
        if draws:
            return Comparison(None, "not compared: the graph draws random numbers, and torch.compile draws others", "")
        found = observe(lowered, args, mutated, training=training)
        comparison = compare_trees(
            found, expected, lambda: _observe64(pristine, args, mutated, training=training), training=training
        )
    parts = [name for name in ("outputs", "gradients", "mutated") if expected[name]]
    return Comparison(comparison.ok, ", ".join(parts), _detail(comparison))


def _detail(comparison: TreeComparison) -> str:
    worst = comparison.worst
    return comparison.reason if not comparison.ok or worst is None else f"worst {worst.path}: {worst.reason}"


def observe(call: Callee, args: Sequence[Any], mutated: Sequence[int] | None, *, training: bool) -> Tree:
    """Outputs, changed inputs and gradients of one call on copies of `args`.

    Returns:
        {"outputs": list, "mutated": {position: tensor}, "gradients": {position: tensor or None}}; the gradients are
        those of a fixed random weighting of the outputs.
    """
    own, copied = _copies(args, mutated)
    result = call(*own)
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    changed = {str(i): own[i].detach() for i in copied}
    gradients = _gradients(outputs, own) if training else {}
    detached = [o.detach() if isinstance(o, torch.Tensor) else o for o in outputs]
    return {"outputs": detached, "mutated": changed, "gradients": gradients}


def _copies(args: Sequence[Any], mutated: Sequence[int] | None) -> tuple[list[Any], list[int]]:
    """Arguments to run with, and the positions of those with memory of their own: all that may change."""
    out: list[Any] = []
    copied: list[int] = []
    for index, arg in enumerate(args):
        if not isinstance(arg, torch.Tensor):
            out.append(arg)
            continue
        changes = index in mutated if mutated is not None else not isinstance(arg, torch.nn.Parameter)
        own = arg.detach()
        if arg.requires_grad:
            own.requires_grad_(True)
        if changes:
            own = own.clone()  # a clone of a leaf is no leaf, so that it may be changed in place
            copied.append(index)
        out.append(own)
    return out, copied


def _gradients(outputs: Sequence[Any], own: Sequence[Any]) -> dict[str, torch.Tensor | None]:
    wanted = [(str(i), a) for i, a in enumerate(own) if isinstance(a, torch.Tensor) and a.requires_grad]
    ends = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if not wanted or not ends:
        return {}
    weights = [_weight(end, number) for number, end in enumerate(ends)]
    found = torch.autograd.grad(ends, [a for _, a in wanted], weights, allow_unused=True)
    return {name: grad for (name, _), grad in zip(wanted, found, strict=True)}


def _weight(end: torch.Tensor, seed: int) -> torch.Tensor:
    """Random weights of the size of a mean's, so that sums over many elements stay near 1."""
    if end.numel() == 1:
        return torch.ones_like(end)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    drawn = torch.randn(end.shape, generator=generator, dtype=torch.float32)
    scaled: torch.Tensor = drawn / max(1, end.numel()) ** 0.5
    return scaled.to(end)


def _observe64(gm: fx.GraphModule, args: Sequence[Any], mutated: Sequence[int] | None, *, training: bool) -> Tree:
    def wide(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in _TO_DOUBLE:
            return value.detach().double().requires_grad_(value.requires_grad)
        return value

    return observe(to_float64(gm), [wide(a) for a in args], mutated, training=training)


def to_float64(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of `gm` whose explicit casts to narrower floats are casts to float64."""
    new = copy_graph(gm)
    for node in new.graph.nodes:
        wide = lambda a: torch.float64 if isinstance(a, torch.dtype) and a in _TO_DOUBLE else a  # noqa: E731
        node.args = torch.utils._pytree.tree_map(wide, node.args)
        node.kwargs = torch.utils._pytree.tree_map(wide, node.kwargs)
        if node.op == "call_method" and node.target in _CAST_METHODS:
            node.target = "double"
    for name, child in list(new.named_children()):
        if isinstance(child, fx.GraphModule):
            setattr(new, name, to_float64(child))
    new.recompile()
    return new


@contextlib.contextmanager
def _unseen_by_saved_tensor_hooks() -> Iterator[None]:
    """Keep what verification saves for its backward from the hooks of the caller.

    `torch.utils.checkpoint` counts the tensors that a block saves and expects as many when it runs the block again,
    and then nothing is verified. Only the innermost pair of hooks is called.
    """
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


def _state(args: Sequence[Any]) -> list[torch.Tensor]:
    devices = sorted({a.device.index for a in args if isinstance(a, torch.Tensor) and a.device.type == "cuda"})
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def _same_state(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@contextlib.contextmanager
def _random_state_restored(args: Sequence[Any]) -> Iterator[Callable[[], list[torch.Tensor]]]:
    """Yield a function that rewinds the random state to that at entry; it is rewound at exit too."""
    states = _state(args)
    devices = sorted({a.device.index for a in args if isinstance(a, torch.Tensor) and a.device.type == "cuda"})

    def rewind() -> list[torch.Tensor]:
        torch.set_rng_state(states[0])
        for index, state in zip(devices, states[1:], strict=True):
            torch.cuda.set_rng_state(state, index)
        return states

    try:
        yield rewind
    finally:
        rewind()
