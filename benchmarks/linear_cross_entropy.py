"""Where a fused loss pays: `cross_entropy(linear(x, weight), target)` written out against the fused operator.

    python -m benchmarks.linear_cross_entropy --rounds 7 --output benchmarks/results/MACHINE/fusion.jsonl
    python -m benchmarks.linear_cross_entropy --sizes 4096x131072x512 --rounds 3

All run in one process, in turns and in random order: written out and fused, each compiled by Inductor, and torch's own
`linear_cross_entropy` in chunks where torch has it, in eager. A ratio is the median of their time over fused, above 1
where fused is faster, between the 20th and 80th percentile of the rounds. `peak_mib` is what torch's allocator held at
most during a step above what lived before; `matmul_gflops` what the three products (one in inference) reach in the
fused step as a whole, and `limit_gflops` the best product of `measure_limits` in the same run.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fusewright.autotune.timing import shuffled
from fusewright.bench.limits import measure_limits
from fusewright.bench.rows import append_rows, provenance
from fusewright.costs.peak_memory import peak_mib
from fusewright.fusion.ops.linear_cross_entropy import linear_cross_entropy, why_not

# rows, classes, size of a row: heads of small language models, up to a Llama 3 vocabulary
SIZES = (
    *((256, 8192, 256), (1024, 8192, 256), (512, 32000, 256), (1024, 32000, 512), (4096, 32000, 512)),
    *((1024, 131072, 512), (4096, 131072, 256), (4096, 131072, 512)),
)
WARM_UP = 1
CHUNK = 512  # rows, of torch's own; about the fastest of 128 to 1024 on the sizes above


def written(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """x (M, D), weight (V, D), target (M,); the formula as modelling code spells it."""
    return functional.cross_entropy(functional.linear(x, weight), target)


def fused(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """What the pass puts in its place."""
    return linear_cross_entropy(x, weight, target)


def sides() -> dict[str, Callable[..., Tensor]]:
    """What is measured, by name."""
    found: dict[str, Callable[..., Tensor]] = {
        function.__name__: torch.compile(function, dynamic=False) for function in (written, fused)
    }
    if hasattr(functional, "linear_cross_entropy"):  # from torch 2.13 or 2.14 on
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK)
        found["torch_chunked"] = lambda x, w, t: functional.linear_cross_entropy(x, w, t, options=options)
    return found


def measure(size: tuple[int, int, int], training: bool, rounds: int) -> dict[str, Any]:
    """One row: `size` is rows, classes and the size of a row."""
    rows, classes, width = size
    x = torch.randn(rows, width).requires_grad_(training)
    weight = (torch.randn(classes, width) * width**-0.5).requires_grad_(training)
    target = torch.randint(classes, (rows,))

    def step(function: Callable[..., Tensor]) -> None:
        with torch.set_grad_enabled(training):
            loss = function(x, weight, target)
            if training:
                torch.autograd.grad(loss, (x, weight))

    candidates = sides()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(WARM_UP + rounds):
        for name in shuffled(list(candidates), turn):
            start = time.perf_counter()
            step(candidates[name])
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    row: dict[str, Any] = {"op": "linear_cross_entropy", "rows": rows, "classes": classes, "width": width}
    row |= {"mode": "training" if training else "inference", "logits_mib": round(rows * classes * 4 / 2**20, 1)}
    for name, function in candidates.items():
        peak = peak_mib(lambda function=function: step(function), x.device)  # type: ignore[misc]
        row |= {f"{name}_ms": round(statistics.median(seconds[name]) * 1e3, 3), f"{name}_peak_mib": round(peak, 1)}
        if name != "fused":
            ratios = sorted(a / b for a, b in zip(seconds[name], seconds["fused"], strict=True))
            spread = (ratios[rounds // 5], statistics.median(ratios), ratios[-1 - rounds // 5])
            row |= {f"{name}_over_fused": [round(ratio, 3) for ratio in spread]}
    flops = (6 if training else 2) * rows * classes * width
    row["matmul_gflops"] = round(flops / statistics.median(seconds["fused"]) / 1e9, 1)
    return row | {"rounds": rounds, "rule": "fuse" if why_not(rows * classes * 4) is None else "leave"}


def main() -> None:
    """Measure every size and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", help="comma-separated ROWSxCLASSESxWIDTH; default: all of the suite")
    parser.add_argument("--mode", default="inference,training", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="at least 3 (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=pathlib.Path, help="JSON lines to append to")
    options = parser.parse_args()
    if options.rounds < 3:
        parser.error("--rounds must be at least 3")
    sizes = [tuple(map(int, size.split("x"))) for size in options.sizes.split(",")] if options.sizes else SIZES
    torch.set_num_threads(options.threads)
    torch._dynamo.config.recompile_limit = 64  # every size has a graph of its own
    limit = {"limit_gflops": measure_limits(options.threads)["matmul_gflops"]}
    cases = [(size, mode == "training") for mode in options.mode.split(",") for size in sizes]
    for number, (size, training) in enumerate(cases, 1):
        row = measure(size, training, options.rounds) | limit
        print(f"[{number}/{len(cases)}] {json.dumps(row)}", flush=True)
        if options.output is not None:
            append_rows(options.output, [row | provenance(options.threads)])


if __name__ == "__main__":
    main()
