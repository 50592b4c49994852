"""What this machine can do at most, measured in the same run as the cells that are held against it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

SIZES = {"square": (1024, 1024, 1024), "few_rows": (128, 4096, 1024), "many_rows": (4096, 512, 512)}  # M, N, K
COPIED = 2**26  # float32 elements, far beyond any cache
LEAST_S = 0.2  # of timing for each figure


def measure_limits(threads: int | None = None) -> dict[str, float]:
    """Best rates on the CPU, in float32.

    Returns:
        `matmul_gflops` of the best shape and `matmul_<shape>_gflops` of each, `copy_gb_per_s` (read and write),
        `call_us` of an operator on one element.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        return _measured()
    finally:
        torch.set_num_threads(before)


def _measured() -> dict[str, float]:
    with torch.no_grad():
        rates = {}
        for shape, (m, n, k) in SIZES.items():
            a, b, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
            seconds = _fastest(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))  # type: ignore[misc]
            rates[f"matmul_{shape}_gflops"] = round(2e-9 * m * n * k / seconds, 1)
        source = torch.ones(COPIED)
        target = torch.empty_like(source)
        copied = 8e-9 * COPIED / _fastest(lambda: target.copy_(source))
        one = torch.ones(1)
        call = _fastest(lambda: one.add_(1), calls=1000)
    return {
        "matmul_gflops": max(rates.values()),
        **rates,
        "copy_gb_per_s": round(copied, 2),
        "call_us": round(call * 1e6, 3),
    }


def _fastest(step: Callable[[], object], calls: int = 1) -> float:
    """Seconds of the fastest of many runs of `step`."""
    step()
    best, end = float("inf"), time.perf_counter() + LEAST_S
    while time.perf_counter() < end:
        started = time.perf_counter()
        for _ in range(calls):
            step()
        best = min(best, (time.perf_counter() - started) / calls)
    return best
