"""The suite's cells under pytest-benchmark, one process for all: for a look, and for its storage and plots.

    pytest benchmarks/ --workloads bert --modes inference --benchmark-autosave

Times of one process, one provider after the other, move with whatever else the machine does; what is claimed comes from
`fusewright bench`, which interleaves fresh processes.
"""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from fusewright.autotune.accuracy import SEEDS, check
from fusewright.bench.cells import SuiteCell
from fusewright.bench.rivals import RivalSubject
from fusewright.bench.rows import provenance


@pytest.mark.slow
def test_step(cell: SuiteCell, provider: str, benchmark: BenchmarkFixture) -> None:
    """One step, after it has compiled and its results have passed A1."""
    torch._dynamo.reset()
    training = cell.mode == "training"
    subject = RivalSubject(cell.source, cell.length, training, provider)
    subject.step()
    report = check(subject, SEEDS, training=training)
    assert report.ok, report.reason
    benchmark.group = cell.name
    benchmark.extra_info |= provenance() | {"provider": provider}
    benchmark(subject.step)
    assert benchmark.stats.stats.rounds >= 5
