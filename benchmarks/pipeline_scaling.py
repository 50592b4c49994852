"""Times the pipeline on graphs of growing size: chains of transformer-like blocks, spec checks on, nothing dumped.

    python -m benchmarks.pipeline_scaling --nodes 1000,3000,10000,30000 --rounds 3

Each JSON line is the median of the rounds, with the seconds of every pass and the CPU time per n log n relative to the
first graph: 1 means that time grows as n log n does. Graphs are built, not traced: one block is traced with fake
values, and copies of it are strung together.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fusewright.capture.graph import copy_graph
from fusewright.capture.variant import DEFAULT_VARIANT
from fusewright.config import Settings, Verify
from fusewright.passes.base import PassContext, Stage
from fusewright.pipeline.order import ORDER
from fusewright.pipeline.pipeline import Pipeline

HEADS, HEAD_SIZE = 2, 8
WIDTH = HEADS * HEAD_SIZE


@dataclass(frozen=True)
class Row:
    """One graph size. `seconds` is the pipeline's whole run, copying the graph included; growth is that of CPU time."""

    kind: str
    nodes: int
    blocks: int
    seconds: float
    slowest_seconds: float
    cpu_seconds: float
    relative_to_n_log_n: float
    pass_seconds: dict[str, float]  # of the last round
    rewrites: dict[str, int]
    rounds: int
    machine: str
    torch: str


def block(x: Tensor, mask: Tensor, norm: Tensor, wide: Tensor, narrow: Tensor) -> Tensor:
    """x (B, T, W), mask (T, T) -> (B, T, W): norm, written-out attention with idle nodes, norm, gated MLP."""
    batch, tokens, _ = x.shape

    def normed(y: Tensor) -> Tensor:
        y = y.to(torch.float32)
        return norm * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))

    def heads(y: Tensor) -> Tensor:
        return y.view(batch, tokens, HEADS, HEAD_SIZE).transpose(1, 2)

    h = normed(x)
    q, k, v = (heads(functional.linear(h, narrow)) for _ in range(3))
    scores = q @ k.transpose(2, 3) / math.sqrt(HEAD_SIZE) + mask
    p = functional.dropout(functional.softmax(scores, dim=-1), 0.1, False)
    x = x + functional.linear((p @ v).transpose(1, 2).reshape(batch, tokens, WIDTH), narrow)
    h = normed(x)
    gate, up = functional.linear(h, wide).chunk(2, -1)
    return x + functional.linear(functional.silu(gate) * up, narrow)


def masked_block(x: Tensor, mask: Tensor, norm: Tensor, wide: Tensor, narrow: Tensor) -> Tensor:
    """As `block`, with a causal mask that the graph makes itself, and a write in place in every block."""
    tokens = x.shape[1]
    future = torch.ones(tokens, tokens, dtype=torch.bool).tril().logical_not()
    hidden = torch.zeros(tokens, tokens).masked_fill(future, -math.inf)
    return block(x, hidden, norm, wide, narrow).add_(mask.sum())


BLOCKS = {"plain": block, "masked": masked_block}


def captured_block(kind: str = "plain") -> fx.GraphModule:
    """One block as Dynamo hands it over."""
    args = (
        torch.randn(2, 5, WIDTH), torch.zeros(5, 5), torch.ones(WIDTH), torch.randn(2 * WIDTH, WIDTH),
        torch.randn(WIDTH, WIDTH),
    )  # fmt: skip
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    torch.compile(BLOCKS[kind], backend=backend, fullgraph=True)(*args)
    (gm,) = graphs
    return gm


def chain(one: fx.GraphModule, nodes: int) -> tuple[fx.GraphModule, int]:
    """Copies of a captured block, each reading the result of the one before, until there are about `nodes` nodes."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    inner = [n for n in one.graph.nodes if n.op not in ("placeholder", "output")]
    inputs = [n for n in one.graph.nodes if n.op == "placeholder"]
    (result,) = one.graph.output_node().all_input_nodes
    mapping |= {n: graph.node_copy(n) for n in inputs}
    (carried,) = (n for n in inputs if n.meta["example_value"].dim() == 3)
    blocks = max(1, round((nodes - len(inputs) - 1) / len(inner)))
    for _ in range(blocks):
        for node in inner:
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
        mapping[carried] = mapping[result]
    graph.output((mapping[result],))
    return fx.GraphModule(nn.Module(), graph), blocks


def measure(sizes: Sequence[int], rounds: int, kind: str = "plain") -> list[Row]:
    """Time the default forward passes on a chain of each size."""
    one = captured_block(kind)
    settings = Settings(False, pathlib.Path(), None, frozenset(), False, Verify.OFF, None)
    line = Pipeline(ORDER, settings)
    ctx = PassContext(device="cuda", training=True)  # every pass applies there; the fake values stay on the CPU
    passes = line.select(DEFAULT_VARIANT, Stage.FORWARD, ctx)
    line.rewrite(lambda: copy_graph(chain(one, 100)[0]), passes, ctx, "warm-up: the proofs of one block")
    rows: list[Row] = []
    for size in sizes:
        gm, blocks = chain(one, size)
        times, cpu = [], []
        for _ in range(rounds):
            start, start_cpu = time.perf_counter(), time.process_time()
            _, result = line.rewrite(lambda gm=gm: copy_graph(gm), passes, ctx, "scaling")  # type: ignore[misc]
            times.append(time.perf_counter() - start)
            cpu.append(time.process_time() - start_cpu)
        assert not result.failures, result.failures
        count, seconds = len(gm.graph.nodes), statistics.median(times)
        unit = statistics.median(cpu) / (count * math.log(count))
        first = rows[0].cpu_seconds / (rows[0].nodes * math.log(rows[0].nodes)) if rows else unit
        machine = f"{platform.machine()}, {os.cpu_count()} CPUs"
        told = (dict(result.seconds), dict(result.rewrites), rounds, machine, torch.__version__)
        rows.append(Row(kind, count, blocks, seconds, max(times), statistics.median(cpu), unit / first, *told))
    return rows


def main() -> int:
    """Print a JSON line per size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", default="1000,3000,10000,30000", help="comma-separated graph sizes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kind", choices=list(BLOCKS), default="plain", help="what the blocks are")
    options = parser.parse_args()
    for row in measure([int(n) for n in options.nodes.split(",")], options.rounds, options.kind):
        print(json.dumps(asdict(row)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
