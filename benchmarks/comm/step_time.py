"""Times a sharded training step on loopback gloo, without bucketing and at several cap sizes, and compares gradients.

    python -m benchmarks.comm --ranks 2 --rounds 15

Loopback has neither the latency nor the bandwidth of a real network: the figures show the cost of a collective call on
this machine and nothing about a cluster. The forward and backward graphs run with ATen kernels.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import pathlib
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fusewright.parallel import shard
from fusewright.passes.base import PassContext
from fusewright.passes.comm.bucket_collectives import BucketCollectivesAnyOrder
from fusewright.passes.comm.collectives import kind_of
from fusewright.passes.comm.order_check import check_ranks_agree, collective_digest

WARMUP_STEPS = 5


@dataclass(frozen=True)
class Row:
    """One candidate. Times are over rounds, each the slowest rank's step; `cap_bytes` 0: without bucketing."""

    workload: str
    ranks: int
    cap_bytes: int
    collectives: int
    buckets: int
    median_ms: float
    p20_ms: float
    p80_ms: float
    speedup: float  # median over rounds of (time without bucketing / time of this candidate)
    gradients: str  # "bitwise" or the largest absolute difference
    machine: str
    torch: str


class Mlp(nn.Module):
    """`layers` blocks of norm, two linears and a residual; width not divisible by the ranks."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.ups = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x_BD = x_BD + down(nn.functional.gelu(up(norm(x_BD))))
        return x_BD


class Candidate:
    """The model compiled with one cap, in this rank."""

    def __init__(self, options: argparse.Namespace, cap_bytes: int) -> None:
        self.graphs = self.collectives = self.buckets = 0
        self._cap_bytes = cap_bytes
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (options.ranks,))
        self.model = shard(Mlp(options.layers, options.width), mesh)
        backend = aot_autograd(
            fw_compiler=self._compile, bw_compiler=self._compile, partition_fn=min_cut_rematerialization_partition
        )
        self._call = torch.compile(self.model, backend=backend, fullgraph=True)

    def _compile(self, gm: fx.GraphModule, _: object) -> Callable[..., Any]:
        if self._cap_bytes:
            self.buckets += BucketCollectivesAnyOrder(self._cap_bytes).run(gm, PassContext())
        check_ranks_agree(collective_digest(gm))
        self.graphs += 1
        self.collectives += sum(kind_of(node) is not None for node in gm.graph.nodes)
        boxed: Callable[..., Any] = make_boxed_func(gm.forward)
        return boxed

    def step(self, x_BD: torch.Tensor) -> float:
        """Forward and backward; return the seconds of the slowest rank."""
        self.model.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        self._call(x_BD).square().mean().backward()
        seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)

    def gradients(self) -> list[torch.Tensor]:
        grads = [p.grad for p in self.model.parameters()]
        return [g.to_local().clone() for g in grads if isinstance(g, DTensor)]


def measure(options: argparse.Namespace) -> list[Row]:
    """Run every candidate once a round, the first one rotating; the same list on every rank."""
    caps = [0, *options.caps]
    candidates = [Candidate(options, cap) for cap in caps]
    x_BD = torch.randn(options.batch, options.width, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(WARMUP_STEPS):
        for candidate in candidates:
            candidate.step(x_BD)
    seconds: list[list[float]] = [[] for _ in caps]
    for i in range(options.rounds):
        for j in range(len(caps)):
            k = (i + j) % len(caps)
            seconds[k].append(candidates[k].step(x_BD))
    assert all(candidate.graphs == 2 for candidate in candidates), "compiled again while the clock ran"
    expected = candidates[0].gradients()
    return [
        _row(options, cap, candidate, times, seconds[0], expected)
        for cap, candidate, times in zip(caps, candidates, seconds, strict=True)
    ]


def _row(
    options: argparse.Namespace,
    cap_bytes: int,
    candidate: Candidate,
    seconds: list[float],
    plain: list[float],
    expected: list[torch.Tensor],
) -> Row:
    pairs = list(zip(expected, candidate.gradients(), strict=True))
    worst = torch.tensor([max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)])
    equal = torch.tensor([int(all(torch.equal(a, b) for a, b in pairs))])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)
    fifths = statistics.quantiles([1e3 * s for s in seconds], n=5)
    return Row(
        workload=f"mlp {options.layers} x {options.width}, batch {options.batch}",
        ranks=options.ranks,
        cap_bytes=cap_bytes,
        collectives=candidate.collectives,
        buckets=candidate.buckets,
        median_ms=1e3 * statistics.median(seconds),
        p20_ms=fifths[0],
        p80_ms=fifths[-1],
        speedup=statistics.median(a / b for a, b in zip(plain, seconds, strict=True)),
        gradients="bitwise" if bool(equal) else f"differ by {float(worst):.1e}",
        machine=f"{platform.machine()}, {torch.get_num_threads()} thread a rank, loopback gloo",
        torch=str(torch.__version__),
    )


def _rank_main(rank: int, options: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, options.ranks), rank=rank, world_size=options.ranks, timeout=limit
    )
    rows = measure(options)
    if rank == 0:
        report(rows, options.json)
    dist.barrier()
    dist.destroy_process_group()


def report(rows: list[Row], path: pathlib.Path | None) -> None:
    """Print a table, then a JSON line a row; append the lines to `path` where given."""
    print(f"{rows[0].workload}, {rows[0].ranks} ranks, torch {rows[0].torch}, {rows[0].machine}")
    names = ("cap", "collectives", "buckets", "median ms", "p20", "p80", "speed-up")
    widths = (10, 12, 8, 10, 8, 8, 9)
    print(*(f"{name:>{width}}" for name, width in zip(names, widths, strict=True)), " gradients")
    for row in rows:
        cap = f"{row.cap_bytes >> 10} KiB" if row.cap_bytes else "none"
        print(
            f"{cap:>10} {row.collectives:>12} {row.buckets:>8} {row.median_ms:>10.2f} {row.p20_ms:>8.2f} "
            f"{row.p80_ms:>8.2f} {row.speedup:>9.2f}  {row.gradients}"
        )
    lines = [json.dumps(asdict(row)) for row in rows]
    print("\n".join(lines))
    if path is not None:
        with path.open("a") as file:
            file.writelines(line + "\n" for line in lines)


def main() -> int:
    """Parse arguments, start the ranks, wait; non-zero where a rank failed or hung."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.comm", description=__doc__.split("\n")[0] if __doc__ else ""
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=129)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--caps", type=int, nargs="+", default=[256 << 10, 1 << 20, 32 << 20], help="bytes")
    parser.add_argument("--json", type=pathlib.Path, default=None, help="file that the JSON lines are appended to")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which hanging ranks are ended")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = str(pathlib.Path(folder) / "store")
        ranks = [context.Process(target=_rank_main, args=(r, options, store)) for r in range(options.ranks)]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + options.timeout
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
    return max(abs(process.exitcode or 0) for process in ranks)
