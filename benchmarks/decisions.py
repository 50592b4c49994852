"""How often a measurement is wrong: identical providers called different, planted slow-downs missed.

    python -m benchmarks.decisions --kind same --count 200 --output decisions.jsonl     # A/A
    python -m benchmarks.decisions --kind 0.05 --count 50 --output decisions.jsonl      # 5 % slower
    python -m benchmarks.decisions --kind 0.03 --count 50 --output decisions.jsonl --busy

A decision is one cell measured as `fusewright bench --budget 20` does: two providers of one workload in fresh pairs of
processes that take turns. Workloads run in eager, one after the other. A slow-down is a wait at the end of each step, a
fraction of what the step takes in that process. `--busy` keeps one core busy meanwhile: then undecided is allowed, a
wrong verdict is not. Rows are appended as each decision falls, and what the output file holds is not decided again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import track

from fusewright.autotune.timing import Plan, measure_pairs
from fusewright.autotune.trial import Failure, Provider
from fusewright.bench.cells import plan_cells
from fusewright.bench.rivals import RivalSubject
from fusewright.bench.rows import append_rows, check_same_place, check_writable, provenance, read_rows
from fusewright.errors import UserInputError

SUITE = "benchmarks.workloads:COMPARABLE"
PLAN = Plan(rounds=20, pairs=3, most_pairs=4, budget_s=20.0)


class SlowedSubject(RivalSubject):
    """A provider whose steps take `slowdown` longer than they would."""

    def __init__(self, slowdown: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.wait_ns = 0.0
        if slowdown:
            for _ in range(10):
                super().step()
            self.wait_ns = slowdown * statistics.median(self._step_ns() for _ in range(30))

    def _step_ns(self) -> int:
        start = time.perf_counter_ns()
        super().step()
        return time.perf_counter_ns() - start

    def step(self) -> None:
        """One step, then the wait; busy, because a sleep is not that exact."""
        super().step()
        until = time.perf_counter_ns() + self.wait_ns
        while self.wait_ns and time.perf_counter_ns() < until:
            pass


def decide(workload: str, slowdown: float) -> dict[str, Any]:
    """One decision about a candidate that is `slowdown` slower than the baseline."""
    cell = plan_cells(SUITE, [workload], ["inference"])[0]
    kwargs = {"source": cell.source, "length": cell.length, "training": False, "provider": "eager"}
    sides = [Provider("benchmarks.decisions:SlowedSubject", kwargs | {"slowdown": s}) for s in (0.0, slowdown)]
    before = os.getloadavg()[0]
    found = measure_pairs({"candidate": sides[1]}, sides[0], PLAN)
    result = found.results["candidate"]
    row: dict[str, Any] = {"workload": workload, "load": [round(before, 2), round(os.getloadavg()[0], 2)]}
    if isinstance(result, Failure):
        return row | {"verdict": "failed", "failure": str(result)}
    row |= {"verdict": result.verdict.value, "ratio": round(result.ratio, 4), "seconds": round(found.spent_s, 1)}
    row |= {"ci_low": round(result.ci_low, 4), "ci_high": round(result.ci_high, 4)}
    return row | {"pairs": result.pairs, "rounds": result.rounds}


@contextlib.contextmanager
def one_core_busy(wanted: bool) -> Iterator[None]:
    """Keep one core busy inside the block."""
    if not wanted:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def _slowdown(kind: str) -> float:
    found = 0.0 if kind == "same" else float(kind)
    if kind != "same" and not 0 < found < 1:
        raise ValueError(kind)
    return found


def main() -> None:
    """Make the decisions that the file lacks, and count those of its kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="same", help="same, or the planted slow-down as a fraction: 0.05")
    parser.add_argument("--count", type=int, default=200, help="decisions of this kind that the file shall hold")
    parser.add_argument("--workloads", default="mlp,clip,convnext,efficientnet", help="taken in turns")
    parser.add_argument("--busy", action="store_true", help="keep one core busy meanwhile")
    parser.add_argument("-o", "--output", type=pathlib.Path, required=True)
    options = parser.parse_args()
    try:
        slowdown = _slowdown(options.kind)
    except ValueError:
        parser.error(f"--kind {options.kind}: same, or a fraction between 0 and 1 such as 0.05")
    if options.count < 1:
        parser.error("--count: at least 1")
    names = options.workloads.split(",")
    try:
        plan_cells(SUITE, names, ["inference"])
        check_writable(options.output)
        kept = read_rows(options.output)
        check_same_place(kept, options.output)
    except UserInputError as error:
        parser.error(str(error))
    done = [row for row in kept if (row["kind"], row["busy"]) == (options.kind, options.busy)]
    with one_core_busy(options.busy):
        for number in track(range(len(done), options.count), "deciding", console=Console(stderr=True)):
            row = provenance() | {"kind": options.kind, "busy": options.busy, "number": number}
            done.append(row | decide(names[number % len(names)], slowdown))
            append_rows(options.output, [done[-1]])
    counts = Counter(row["verdict"] for row in done)
    print(f"{options.kind}{' with a busy core' if options.busy else ''}: {len(done)} decisions, {dict(counts)}")


if __name__ == "__main__":
    main()
