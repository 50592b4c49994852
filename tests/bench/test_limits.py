"""The machine's limits are rates of real work: no step of the same kind beats them by much."""

from __future__ import annotations

import time

import torch

from fusewright.bench.limits import measure_limits


def test_a_product_and_a_copy_stay_below_the_limits() -> None:
    limits = measure_limits()
    a = torch.randn(768, 768)
    source, target = torch.ones(2**24), torch.empty(2**24)
    started = time.perf_counter()
    for _ in range(5):
        a @ a
    product_s = (time.perf_counter() - started) / 5
    started = time.perf_counter()
    target.copy_(source)
    copy_s = time.perf_counter() - started
    assert 2e-9 * 768**3 / product_s < 1.5 * limits["matmul_gflops"]
    assert 8e-9 * 2**24 / copy_s < 3 * limits["copy_gb_per_s"]
    assert 0 < limits["call_us"] < 1000
