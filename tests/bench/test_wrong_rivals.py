"""What the benchmark does not score: a rival that is wrong, and a model that disagrees with itself."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from fusewright.autotune.accuracy import SEEDS
from fusewright.autotune.trial import Provider
from fusewright.autotune.worker import Worker
from fusewright.bench.cells import Suite, plan_cells
from fusewright.report.bench import summary

JOB = '''
import os

import torch
from torch import nn
from fusewright import Workload

class OverQueries(nn.Module):
    """Attention whose softmax runs over the queries; Inductor takes it for the usual one."""

    def forward(self, q, k, v):
        return ((q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5).softmax(-2) @ v

class TwoFactors(nn.Module):
    """Two convolutions with a factor each, both written as floats; Inductor folds the first one into both weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.first(x) * 2.0 - self.second(x) * 3.0

class Moody(nn.Module):
    def forward(self, x):
        return x + int.from_bytes(os.urandom(2), "big")

class Broken(nn.Module):
    def forward(self, x):
        raise ValueError("my own bug")

def heads(length, seed):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 4, length, 16, generator=g) for _ in range(3)), {}

def images(length, seed):
    return (torch.randn(length, 3, 8, 8, generator=torch.Generator().manual_seed(seed)),), {}

WORKLOADS = [
    Workload("over_queries", "small", OverQueries, heads, (32,), {"q": {2: "tokens"}}, lambda out: out.sum()),
    Workload("two_factors", "small", TwoFactors, images, (2,), {"x": {0: "batch"}}, lambda out: out.sum()),
    Workload("broken", "small", Broken, images, (2,), {"x": {0: "batch"}}, lambda out: out.sum()),
    Workload("moody", "small", Moody, images, (2,), {"x": {0: "batch"}}, lambda out: out.sum()),
]
'''


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "length", "provider", "accurate"),
    [
        ("over_queries", 32, "compile", False),
        ("over_queries", 32, "fusewright", True),
        ("two_factors", 2, "compile", True),
        ("two_factors", 2, "compile_freezing", False),
        ("two_factors", 2, "fusewright", True),
    ],
)
def test_what_is_wrong_is_reported_as_wrong(
    tmp_path: pathlib.Path, name: str, length: int, provider: str, accurate: bool
) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    kwargs: dict[str, Any] = {"source": f"{job}#{name}", "length": length, "training": False, "provider": provider}
    with Worker(Provider("fusewright.bench.rivals:RivalSubject", kwargs)) as worker:
        worker.build()
        report: Any = worker.check(SEEDS, training=False)
    assert report["ok"] is accurate, report


@pytest.mark.multiprocess
def test_a_model_that_disagrees_with_itself_is_marked_and_not_timed(tmp_path: pathlib.Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    (rows,) = Suite(candidates=("eager",)).run(plan_cells(str(job), ["moody"], ["inference"]))
    assert [(row["provider"], row["accuracy"]) for row in rows] == [
        ("compile", "eager_nondeterministic"),
        ("eager", "eager_nondeterministic"),
    ]
    assert all(row.get("median_ms") is None and "disagrees with itself" in row["failure"] for row in rows)
    assert "no cell" in summary(rows)


@pytest.mark.multiprocess
def test_a_model_that_raises_has_no_accuracy_on_any_side(tmp_path: pathlib.Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    (rows,) = Suite(candidates=("eager", "fusewright")).run(plan_cells(str(job), ["broken"], ["inference"]))
    assert [row["accuracy"] for row in rows] == [None, None, None]
    assert all("my own bug" in row["failure"] for row in rows)
