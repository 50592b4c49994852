"""The machine's limits are rates of real work: no step of the same kind beats them by much."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from fusewright.bench.limits import measure_limits


def fastest(step: Callable[[], object]) -> float:
    taken = []
    for _ in range(30):
        started = time.perf_counter()
        step()
        taken.append(time.perf_counter() - started)
    return min(taken)


def test_the_limits_are_rates_that_a_product_and_a_copy_come_near() -> None:
    limits = measure_limits(threads=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a, source, target = torch.randn(1024, 1024), torch.ones(2**24), torch.empty(2**24)
        product = 2e-9 * 1024**3 / fastest(lambda: a @ a)
        copied = 8e-9 * 2**24 / fastest(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(threads)
    assert 0.3 < product / limits["matmul_gflops"] < 2
    assert 0.2 < copied / limits["copy_gb_per_s"] < 4
    assert 0 < limits["call_us"] < 1000
