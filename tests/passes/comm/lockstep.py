"""Runs one graph for several ranks in one process: a rewrite of collectives is checked without any network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map_only

from fusewright.passes.comm.collectives import ALL_GATHER, REDUCE_SCATTER, WAIT

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default


def run_lockstep(gm: fx.GraphModule, inputs: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Run `gm` on `inputs[rank]` for each rank, node by node; return `outputs[rank]`, flattened.

    A collective hands out uninitialised-looking memory (all 7.77) at its start and fills it at its wait, from what its
    input holds *then*: the worst that an asynchronous backend may do. Inputs are copied, so writes stay inside.
    """
    ranks = range(len(inputs))
    env: list[dict[fx.Node, Any]] = [{} for _ in ranks]
    rng = [torch.Generator().manual_seed(rank) for rank in ranks]
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for rank in ranks:
        assert len(placeholders) == len(inputs[rank])
        env[rank].update(zip(placeholders, (t.clone() for t in inputs[rank]), strict=True))
    for node in gm.graph.nodes:
        if node.op == "output":
            outputs = [tree_map_only(fx.Node, env[rank].__getitem__, node.args[0]) for rank in ranks]
            return [[t for t in tree_leaves(out) if isinstance(t, torch.Tensor)] for out in outputs]
        if node.op != "call_function":
            continue
        args = [tree_map_only(fx.Node, env[rank].__getitem__, node.args) for rank in ranks]
        if node.target in (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE):
            for rank in ranks:
                env[rank][node] = torch.full_like(_exchange(node, args)[rank], 7.77)
        elif node.target is WAIT:
            start = node.args[0]
            assert isinstance(start, fx.Node)
            sent = [tree_map_only(fx.Node, env[rank].__getitem__, start.args) for rank in ranks]
            for rank, filled in enumerate(_exchange(start, sent)):
                env[rank][start].copy_(filled)
                env[rank][node] = env[rank][start]
        elif node.target is torch.ops.aten.rand.default:
            for rank in ranks:
                env[rank][node] = torch.rand(args[rank][0], generator=rng[rank])
        else:
            for rank in ranks:
                env[rank][node] = node.target(*args[rank], **node.kwargs)
    raise AssertionError("no output node")


def _exchange(node: fx.Node, args: Sequence[Sequence[Any]]) -> list[torch.Tensor]:
    sent = [a[0].contiguous() for a in args]
    if node.target is ALL_GATHER:
        return [torch.cat(sent) for _ in sent]
    total = sent[0].clone()
    for other in sent[1:]:
        total += other
    return list(total.chunk(len(sent))) if node.target is REDUCE_SCATTER else [total.clone() for _ in sent]


def calls(gm: fx.GraphModule, target: object) -> int:
    """How many nodes of `gm` call `target`."""
    return sum(node.target is target for node in gm.graph.nodes)


def same_bits(a: Sequence[Sequence[torch.Tensor]], b: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether two results of `run_lockstep` agree in shape, dtype, stride and every bit."""
    flat_a, flat_b = [t for r in a for t in r], [t for r in b for t in r]
    return len(flat_a) == len(flat_b) and all(
        x.dtype == y.dtype and x.stride() == y.stride() and torch.equal(x, y)
        for x, y in zip(flat_a, flat_b, strict=True)
    )
