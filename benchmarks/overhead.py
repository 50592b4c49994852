"""Measures what a call of an optimized model costs above a bare `torch.compile`. Run: python -m benchmarks.overhead."""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fusewright
from fusewright.api import optimize_with
from fusewright.capture.shapes import ShapeBucket
from fusewright.capture.variant import GraphVariant, Lowering

ROUNDS, CALLS = 60, 100
TARGET_US = 5.0
EDGES = (4, 8, 12, 16, 20, 24, 28, 32)
CELLS = tuple(itertools.product((5, 400), (1, 8)))  # parameters, buckets


class Tiny(nn.Module):
    """Adds the sum of its parameters to its input: next to no arithmetic, as many graph inputs as parameters."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((1,), 0.5)) for _ in range(parameters))

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T) -> (B, T)."""
        return x + torch.cat(list(self.weights)).sum()


@dataclass(frozen=True)
class Row:
    """One cell. Times are microseconds a call; a difference is the median over rounds of paired differences.

    Attributes:
        bare_us: median of a bare torch.compile.
        overhead_us: optimized minus bare.
        p20_us: 20th percentile of that difference.
        p80_us: 80th percentile of it.
        same_us: a second bare torch.compile minus the first: the noise of the method.
        ok: overhead_us <= 5.
    """

    parameters: int
    buckets: int
    bare_us: float
    overhead_us: float
    p20_us: float
    p80_us: float
    same_us: float
    ok: bool


def _aot_eager(fingerprint: str, bucket: ShapeBucket, device: torch.device) -> GraphVariant:
    return GraphVariant(lowering=Lowering.AOT_EAGER)


def _contestants(parameters: int, buckets: int) -> tuple[list[Callable[[Tensor], Any]], list[Tensor], nn.Module]:
    model = Tiny(parameters).eval()
    inputs = [torch.randn(2, edge) for edge in EDGES[:buckets]]
    named: dict[str, Any] = {}
    if buckets > 1:
        named = {"dims": {"x": {1: "tokens"}}, "buckets": {"tokens": list(EDGES)}}
    optimized = optimize_with(copy.deepcopy(model), choose=_aot_eager, **named)
    dynamic = buckets > 1
    bare = [torch.compile(copy.deepcopy(model), backend="aot_eager", dynamic=dynamic) for _ in range(2)]
    contestants: list[Callable[[Tensor], Any]] = [bare[0], bare[1], optimized]
    for contestant in contestants:
        for x in inputs * 5:
            contestant(x)
    return contestants, inputs, optimized


def _round(contestant: Callable[[Tensor], Any], inputs: Sequence[Tensor]) -> float:
    """Seconds of CALLS calls, the inputs round robin."""
    cycle = list(itertools.islice(itertools.cycle(inputs), CALLS))
    start = time.perf_counter()
    for x in cycle:
        contestant(x)
    return time.perf_counter() - start


def measure(parameters: int, buckets: int, rounds: int = ROUNDS) -> Row:
    """Time bare, bare again and optimized in turns, the order rotated from round to round."""
    with torch.no_grad():
        contestants, inputs, optimized = _contestants(parameters, buckets)
        times: list[list[float]] = [[] for _ in contestants]
        gc.collect()
        gc.disable()
        try:
            for number in range(rounds):
                for turn in range(len(contestants)):
                    which = (number + turn) % len(contestants)
                    times[which].append(_round(contestants[which], inputs) / CALLS * 1e6)
        finally:
            gc.enable()
    data = fusewright.explain(optimized).to_dict()
    assert data["calls"] == data["dispatched"] == buckets * 5 + rounds * CALLS, data
    assert data["lowerings"] == buckets, data["buckets"]
    extra = sorted(ours - bare for bare, _, ours in zip(*times, strict=True))
    same = statistics.median(other - bare for bare, other, _ in zip(*times, strict=True))
    middle = statistics.median(extra)
    return Row(
        parameters=parameters,
        buckets=buckets,
        bare_us=round(statistics.median(times[0]), 2),
        overhead_us=round(middle, 2),
        p20_us=round(extra[len(extra) // 5], 2),
        p80_us=round(extra[-len(extra) // 5], 2),
        same_us=round(same, 2),
        ok=middle <= TARGET_US,
    )


def main() -> None:
    """Measure every cell and print a table, or JSON lines with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON line per cell instead of a table")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of {CALLS} calls each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.json:
        print("parameters  buckets  bare us  overhead us  (p20 .. p80)  bare again us")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FUSEWRIGHT_CACHE_DIR"] = cache
        for parameters, buckets in CELLS:
            row = measure(parameters, buckets, options.rounds)
            if options.json:
                machine = {
                    "torch": torch.__version__,
                    "cpus": os.cpu_count(),
                    "load": round(os.getloadavg()[0], 1),
                    "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                }
                print(json.dumps({**asdict(row), **machine}), flush=True)
            else:
                print(
                    f"{row.parameters:10d}  {row.buckets:7d}  {row.bare_us:7.1f}  {row.overhead_us:11.2f}  "
                    f"({row.p20_us:.2f} .. {row.p80_us:.2f})  {row.same_us:13.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
