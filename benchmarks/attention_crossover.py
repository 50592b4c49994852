"""Where fused attention pays: written-out attention under Inductor against `fusewright::attention`, size by size.

    python -m benchmarks.attention_crossover --rounds 15 --output benchmarks/results/MACHINE/attention_crossover.jsonl

Both run in one process, in turns and in random order, each compiled by Inductor for dynamic sizes with its own pattern
rewrites off, so that written-out stays written-out. `ratio` is the median of written / fused, above 1 where fusing
pays, with the 20th and 80th percentile of the rounds; `rule` is what `fusion/ops/attention_cost.py` says of that size.
A causal mask is a mask tensor here, as transformers makes it; finding out which keys it hides is charged to each call.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusewright.autotune.timing import shuffled
from fusewright.bench.rows import append_rows, provenance
from fusewright.fusion.ops import attention as _registers_the_operators  # noqa: F401
from fusewright.fusion.ops.attention_cost import why_not

# batch, heads, tokens: language models, then batches of short sequences and windows
SHAPES = (
    *((1, 8, 64), (1, 8, 128), (1, 8, 256), (1, 8, 512), (1, 8, 768), (1, 8, 1024), (1, 8, 2048)),
    *((2, 8, 256), (2, 8, 512), (4, 8, 512), (32, 12, 128), (16, 12, 197), (128, 6, 64), (512, 3, 49)),
)
WARM_UP = 3


def written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q, k, v (B, N, T, H); the formula as modelling code spells it."""
    scores = (q @ k.transpose(-2, -1)) * scale
    return (scores if mask is None else scores + mask).softmax(-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """What the pass puts in its place."""
    operators = torch.ops.fusewright
    extents = operators.attention_extents(mask) if mask is not None and k.shape[2] >= 128 else None
    out: Tensor = operators.attention(q, k, v, mask, extents, False, scale)[0]
    return out


def measure(shape: tuple[int, int, int], size: int, masked: bool, training: bool, rounds: int) -> dict[str, Any]:
    """One row: `size` is the head size H."""
    batch, heads, tokens = shape
    q, k, v = (torch.randn(batch, tokens, heads, size).transpose(1, 2).requires_grad_(training) for _ in range(3))
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    mask = torch.zeros(1, 1, tokens, tokens).masked_fill(future, torch.finfo(torch.float32).min) if masked else None
    dout = torch.randn(batch, heads, tokens, size)

    def step(function: Callable[..., Tensor]) -> float:
        start = time.perf_counter()
        with torch.set_grad_enabled(training):
            out = function(q, k, v, mask, size**-0.5)
            if training:
                torch.autograd.grad(out, (q, k, v), dout)
        return time.perf_counter() - start

    sides = {
        function.__name__: torch.compile(function, dynamic=True, options={"pattern_matcher": False})
        for function in (written, fused)
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(WARM_UP + rounds):
        for name in shuffled(list(sides), turn):
            elapsed = step(sides[name])
            if turn >= WARM_UP:
                seconds[name].append(elapsed)
    ratios = sorted(a / b for a, b in zip(seconds["written"], seconds["fused"], strict=True))
    scores = batch * heads * tokens * tokens
    reason = why_not("cpu", scores=scores, keys=tokens, itemsize=4, masked=masked, training=training)
    return {
        "batch": batch, "heads": heads, "tokens": tokens, "head_size": size, "masked": masked,
        "mode": "training" if training else "inference", "score_mib": round(scores * 4 / 2**20, 2),
        **{f"{name}_ms": round(statistics.median(values) * 1e3, 3) for name, values in seconds.items()},
        "ratio": round(statistics.median(ratios), 3), "p20": round(ratios[rounds // 5], 3),
        "p80": round(ratios[-1 - rounds // 5], 3), "rounds": rounds, "rule": "fuse" if reason is None else "leave",
    }  # fmt: skip


def main() -> None:
    """Measure every size and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-sizes", default="32,64", help="comma-separated (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="at least 5 (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=pathlib.Path, help="JSON lines to append to")
    options = parser.parse_args()
    if options.rounds < 5:
        parser.error("--rounds must be at least 5")
    torch.set_num_threads(options.threads)
    torch._dynamo.config.recompile_limit = 64  # modes, masks and sizes of 1 each have a graph of their own
    sizes = [int(size) for size in options.head_sizes.split(",")]
    cases = list(itertools.product((True, False), sizes, SHAPES, (False, True)))
    for number, (masked, size, shape, training) in enumerate(cases, 1):
        row = measure(shape, size, masked, training, options.rounds)
        print(f"[{number}/{len(cases)}] {json.dumps(row)}", flush=True)
        if options.output is not None:
            append_rows(options.output, [row | provenance(options.threads)])


if __name__ == "__main__":
    main()
