"""A whole training step, optimizer included: `TrainStep` against a loop around `torch.compile(model)`.

    python -m benchmarks.train_step --only llama_eager --output benchmarks/results/MACHINE/train_step.jsonl

The loop is `compiled(model)`, `loss.backward()`, `AdamW(fused=True).step()`, `zero_grad()`. `train_step` is the same
model, loss and optimizer in `fusewright.TrainStep`; `without_forward` is that with the forward passes left out. All run
in one process on equal copies, in turns and in random order; ratios are medians of loop / other, above 1 where the
other is faster, between the 20th and 80th percentile of the rounds. `loss_difference` is the largest relative
difference of the losses after all rounds to that of the loop.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import fusewright
from benchmarks.workloads import COMPARABLE
from fusewright.autotune.timing import shuffled
from fusewright.bench.rows import append_rows, provenance
from fusewright.capture.record import Record
from fusewright.costs.peak_memory import peak_mib
from fusewright.passes.base import Stage
from fusewright.pipeline.order import ORDER
from fusewright.workload import Workload

LEARNING_RATE = 1e-4
WARM_UP = 2
FORWARD_PASSES = ",".join(one.name for one in ORDER if one.stage is Stage.FORWARD)

Step = Callable[[], torch.Tensor]


def loop(workload: Workload, model: torch.nn.Module, batch: tuple[Any, Any]) -> Step:
    """One step of the loop that users write around torch.compile."""
    args, kwargs = batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    compiled = torch.compile(model)

    def step() -> torch.Tensor:
        loss = workload.scalar_loss(compiled(*args, **kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def whole(workload: Workload, model: torch.nn.Module, batch: tuple[Any, Any]) -> tuple[Step, Record]:
    """The same as one graph, and what happened to it."""
    args, kwargs = batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    step = fusewright.TrainStep(model, workload.scalar_loss, optimizer)
    return lambda: step(*args, **kwargs), step.record


def measure(workload: Workload, length: int, rounds: int) -> dict[str, Any]:
    """One row."""
    model, batch = workload.build().train(), workload.inputs(length, 0)
    steps, records = {"loop": loop(workload, copy.deepcopy(model), batch)}, {}
    steps["train_step"], records["train_step"] = whole(workload, copy.deepcopy(model), batch)
    with mock.patch.dict(os.environ, FUSEWRIGHT_SKIP_PASSES=FORWARD_PASSES):
        steps["without_forward"], records["without_forward"] = whole(workload, copy.deepcopy(model), batch)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    for turn in range(WARM_UP + rounds):
        for name in shuffled(list(steps), turn):
            start = time.perf_counter()
            losses[name] = float(steps[name]())
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    row: dict[str, Any] = {"workload": workload.name, "length": length, "mode": "training step with AdamW"}
    row |= {f"{name}_ms": round(statistics.median(values) * 1e3, 3) for name, values in seconds.items()}
    row |= {f"{name}_peak_mib": round(peak_mib(step, torch.device("cpu")), 1) for name, step in steps.items()}
    for name, record in records.items():
        ratios = sorted(a / b for a, b in zip(seconds["loop"], seconds[name], strict=True))
        spread = (ratios[rounds // 5], statistics.median(ratios), ratios[-1 - rounds // 5])
        row[f"loop_over_{name}"] = [round(ratio, 3) for ratio in spread]
        row[f"{name}_rewrites"] = dict(record.rewrites)
        row[f"{name}_fallbacks"] = len(record.fallbacks)
    row["loss_difference"] = max(abs(loss / losses["loop"] - 1.0) for loss in losses.values())
    return row | {"rounds": rounds}


def main() -> None:
    """Measure every workload and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="llama_eager", help="comma-separated workloads (default: %(default)s)")
    parser.add_argument("--length", type=int, help="default: the middle length of each workload")
    parser.add_argument("--rounds", type=int, default=15, help="at least 5 (default: %(default)s)")
    parser.add_argument("--output", type=pathlib.Path, help="JSON lines to append to")
    options = parser.parse_args()
    if options.rounds < 5:
        parser.error("--rounds must be at least 5")
    for name in options.only.split(","):
        if name not in COMPARABLE:
            parser.error(f"--only: unknown workload {name!r}; known are {', '.join(COMPARABLE)}")
        workload = COMPARABLE[name]
        length = options.length or workload.lengths[len(workload.lengths) // 2]
        row = measure(workload, length, options.rounds)
        print(json.dumps(row), flush=True)
        if options.output is not None:
            append_rows(options.output, [row | provenance(torch.get_num_threads())])


if __name__ == "__main__":
    main()
