"""Prove a replacement on the nodes that it replaces: random inputs, small sizes, float64 as the judge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from fusewright.fusion.match.site import RefusedError, Site, call, on_cpu
from fusewright.fusion.match.view import normalize, spelling
from fusewright.numerics import compare_trees
from fusewright.passes.base import tensor_of, value_of

_VERDICTS: dict[str, str | None] = {}
"""Reason of failure (None: proven) per structural key; a repeated layer is proven once in a process."""

_WIDENING = {"float": "double", "half": "double", "bfloat16": "double"}
_DRAWS = 3  # plain; a hidden row of huge finite values; a hidden row of -inf


def demand(site: Site, replacement: fx.GraphModule, *, training: bool) -> None:
    """Prove that `replacement` computes what the site does.

    Raises:
        RefusedError: it does not, or one of the two cannot run on these inputs.
    """
    key = structural_key(site, replacement, training)
    if key not in _VERDICTS:
        _VERDICTS[key] = prove(site, replacement, training=training)
    reason = _VERDICTS[key]
    if reason is not None:
        raise RefusedError(site.output, f"proof failed: {reason}")


def prove(site: Site, replacement: fx.GraphModule, *, training: bool) -> str | None:
    """Run both on random inputs on the CPU and compare by the accuracy rule; None if they agree, else the difference.

    In training the gradients of every floating input are compared too. The kernels of other devices are not what is
    proven here: the rewriting is.
    """
    with _disable_current_modes(), torch.enable_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        for draw in range(_DRAWS):
            torch.default_generator.manual_seed(draw)  # of the CPU alone: the others are not put back
            inputs = _draw_inputs(site, draw)
            grads = [training and x.is_floating_point() and n not in site.masks for n, x in inputs.items()]
            cotangent: list[Tensor] = []
            original = _Runner(site, inputs, grads, cotangent)
            ref = original.run(wide=False)
            try:
                res = original.run(wide=False, replacement=replacement)
            except (RuntimeError, ValueError) as error:  # shapes or dtypes that the operator does not take
                return f"the replacement does not run: {error}"
            result = compare_trees(res, ref, lambda run=original: run.run(wide=True), training=training)  # type: ignore[misc]
            if not result.ok:
                return f"draw {draw}: {result.reason}"
            if not set(site.masks) - set(site.causal) and len(set(site.magnitudes)) == 1:
                return None  # all draws are alike
    return None


def structural_key(site: Site, replacement: fx.GraphModule, training: bool) -> str:
    """What a verdict holds for: nodes with constants and edges, axis names, small sizes, dtypes, replacement."""
    index = {node: f"%{i}" for i, node in enumerate((*site.inputs, *site.nodes))}

    def name(node: fx.Node) -> str:
        return index.get(node, "#")  # sizes: only in nodes whose shape is labelled

    lines = [f"{training} {site.autocast} {sorted(site.sizes.items())} {[index[i] for i in site.inputs]}"]
    for node in site.inputs:
        value = tensor_of(node)
        assert value is not None, node
        mask = (site.masks.get(node), site.causal.get(node))
        lines.append(f"{site.labels[node]} {value.dtype} {mask} {site.classes.get(node)} {site.magnitudes}")
    for node in site.nodes:
        shape = site.labels.get(node, "")
        args = () if node in site.labels else (fx.map_arg(node.args, name), fx.map_arg(node.kwargs, name))
        edges = [name(parent) for parent in node.all_input_nodes]
        value = tensor_of(node)
        dtype = None if value is None else value.dtype
        lines.append(f"{node.op} {node.target} {spelling(node)} {edges} {args} {shape} {dtype}")
    return "\n".join([*lines, replacement.code])


def _draw_inputs(site: Site, draw: int) -> dict[fx.Node, Tensor]:
    inputs: dict[fx.Node, Tensor] = {}
    for node in site.inputs:
        fake = tensor_of(node)
        assert fake is not None, node
        shape = site.shape(node)
        if node in site.causal:
            inputs[node] = _causal(node, site, shape, fake.dtype)
        elif node in site.classes:
            inputs[node] = _classes(shape, *site.classes[node], draw)
        elif fake.dtype == torch.bool:
            inputs[node] = _boolean(shape, draw)
        elif node in site.masks:
            inputs[node] = site.masks[node] * _additive(shape, fake.dtype, draw)
        elif node not in inputs:
            inputs[node] = (torch.randn(shape) * site.magnitudes[draw]).to(fake.dtype)
    return inputs


def _boolean(shape: tuple[int, ...], draw: int) -> Tensor:
    """About half True; after the first draw one row all True and one all False, so that both senses hide a row."""
    mask = torch.rand(shape) < 0.5
    rows = mask.view(-1, shape[-1]) if shape else mask.view(1, 1)
    rows[:, 0], rows[:, -1] = True, False
    if draw:
        rows[0], rows[-1] = True, draw == 1
    return mask


def _classes(shape: tuple[int, ...], number: int, ignored: int, draw: int) -> Tensor:
    """Any class, with some ignored; in the last draw all of them."""
    classes = torch.randint(number, shape)
    return classes.masked_fill_(torch.rand(shape) < (0.2, 0.5, 1.0)[draw], ignored)


def _additive(shape: tuple[int, ...], dtype: torch.dtype, draw: int) -> Tensor:
    """Small biases with some keys hidden; after the first draw a row that is hidden whole."""
    hidden = (torch.finfo(dtype).min, torch.finfo(dtype).min, -math.inf)[draw]
    mask = torch.randn(shape).to(dtype)
    rows = mask.view(-1, shape[-1]) if shape else mask.view(1, 1)
    rows[:, 1:].masked_fill_(torch.rand(rows[:, 1:].shape) < 0.4, -math.inf if draw == 0 else hidden)
    if draw:
        rows[0] = hidden
    return mask


def _causal(node: fx.Node, site: Site, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    future = torch.ones(shape, dtype=torch.bool).triu(1)
    if dtype != torch.bool:
        return torch.zeros(shape, dtype=dtype).masked_fill(future, torch.finfo(dtype).min)
    return ~future if site.causal[node] else future


class _Runner:
    """Runs the site or its replacement on one draw of inputs and returns output and gradients by name."""

    def __init__(
        self, site: Site, inputs: Mapping[fx.Node, Tensor], grads: list[bool], cotangent: list[Tensor]
    ) -> None:
        self.site, self.inputs, self.grads, self.cotangent = site, inputs, grads, cotangent

    def run(self, *, wide: bool, replacement: fx.GraphModule | None = None) -> dict[str, Tensor]:
        values = {}
        for (node, x), wants in zip(self.inputs.items(), self.grads, strict=True):
            x = x.double() if wide and x.is_floating_point() else x.clone()
            values[node] = x.requires_grad_(wants)
        leaves = [x for x in values.values() if x.requires_grad]
        with torch.autocast("cpu", self.site.autocast) if self.site.autocast and not wide else nullcontext():
            if replacement is None:
                out = _replay(self.site, values, wide)
            else:
                out = replacement(*(values[node] for node in self.site.inputs))
        results = {"output": out.detach()}
        if leaves:
            if not self.cotangent:
                self.cotangent.append(torch.randn(out.shape))
            gradients = torch.autograd.grad(out, leaves, self.cotangent[0].to(out.dtype), allow_unused=True)
            results |= {f"gradient {i}": g for i, g in enumerate(gradients) if g is not None}
        return results


def _replay(site: Site, values: Mapping[fx.Node, Tensor], wide: bool) -> Tensor:
    """Run the original nodes with the shapes of the proof; `wide`: every float dtype on the way is float64."""
    env: dict[fx.Node, Any] = dict(values)
    for node in site.nodes:
        if node in site.labels and node not in site.inputs:
            op = normalize(node)
            assert op is not None, node
            shape = site.shape(node)
            env[node] = env[op.inputs[0]].expand(shape) if op.kind == "expand" else env[op.inputs[0]].reshape(shape)
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n] if n in env else value_of(n))
        env[node] = widened(node, args, kwargs) if wide else call(node, *on_cpu(args, kwargs))
    out = env[site.output]
    assert isinstance(out, Tensor), site
    return out


def widened(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Do what `node` does, on the CPU and with float64 wherever it names a floating dtype."""

    def widen(x: Any) -> Any:
        return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x

    args, kwargs = pytree.tree_map(widen, on_cpu(args, kwargs))
    if node.op == "call_method" and node.target in _WIDENING:
        return args[0].double()
    return call(node, args, kwargs)
