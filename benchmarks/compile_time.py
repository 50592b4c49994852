"""Cold and warm start of fusewright against torch.compile: first step in a new process, with an empty and a full cache.

    python -m benchmarks.compile_time --only mlp,bert --repeats 3 --output benchmarks/results/MACHINE/compile_time.jsonl

Each repeat gets a cache folder of its own for each side; the sides take turns, and the ratio is taken inside a repeat.
fusewright compiles for a range of sizes, as `torch.compile(dynamic=True)` does, while torch.compile's default compiles
for the one size that it has seen; so there is a ratio against each. First-call verification is part of the cold first
step and is printed apart, as `verify_s`. `--ours fusewright_exact` compiles for exact sizes instead of ranges.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import tempfile
from typing import Any

import torch

from benchmarks.workloads import COMPARABLE
from fusewright.autotune.trial import Failure
from fusewright.autotune.worker import Worker
from fusewright.bench.cells import SuiteCell, plan_cells
from fusewright.bench.rows import append_rows

RIVALS = ("compile", "compile_dynamic")


def start(cell: SuiteCell, side: str, folder: pathlib.Path) -> dict[str, Any]:
    """First step of `side` in a new process whose caches lie in `folder`; seconds, and what of it was verification."""
    with Worker(cell.provider(side, folder)) as worker:
        built = worker.build()
    if isinstance(built, Failure):
        raise SystemExit(f"{cell.name} {side}: {built}")
    seconds = dict(built.facts).get("seconds", {})
    return {"first_step_s": built.first_step_s, "verify_s": seconds.get("verify", 0.0)}


def measure(cell: SuiteCell, repeats: int, ours: str) -> dict[str, Any]:
    """Median ratios of `ours` over `repeats` against each rival, cold and warm, with verification left out."""
    sides = (*RIVALS, ours)
    ratios: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory() as root:
            order = sides[repeat % len(sides) :] + sides[: repeat % len(sides)]
            for phase in ("cold", "warm"):
                found = {side: start(cell, side, pathlib.Path(root)) for side in order}
                net = {side: s["first_step_s"] - s["verify_s"] for side, s in found.items()}
                for rival in RIVALS:
                    ratios.setdefault(f"{phase}_vs_{rival}", []).append(net[ours] / net[rival])
                for side in sides:
                    seconds.setdefault(f"{side}_{phase}_s", []).append(net[side])
                seconds.setdefault(f"verify_{phase}_s", []).append(found[ours]["verify_s"])
    row: dict[str, Any] = {"cell": cell.name, "ours": ours, "repeats": repeats, "torch": torch.__version__}
    row |= {"load": round(os.getloadavg()[0], 2)}
    row |= {name: round(statistics.median(values), 3) for name, values in ratios.items()}
    row |= {f"{name}_each": [round(v, 3) for v in values] for name, values in ratios.items()}
    return row | {name: round(statistics.median(values), 2) for name, values in seconds.items()}


def main() -> None:
    """Measure the cells and print one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(COMPARABLE), help="comma-separated workloads")
    parser.add_argument("--mode", default="inference,training")
    parser.add_argument("--length", type=int, help="default: the smallest of each workload")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--ours", choices=("fusewright", "fusewright_exact"), default="fusewright", help="ranges or exact sizes"
    )
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    lengths = [options.length] if options.length else []
    cells = plan_cells("benchmarks.workloads:COMPARABLE", options.only.split(","), options.mode.split(","), lengths)
    seen: set[tuple[str, str]] = set()
    for cell in cells:
        if (cell.workload, cell.mode) in seen:
            continue
        seen.add((cell.workload, cell.mode))
        row = measure(cell, options.repeats, options.ours)
        print(json.dumps(row), flush=True)
        if options.output is not None:
            append_rows(options.output, [row])


if __name__ == "__main__":
    main()
