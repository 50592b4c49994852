"""ONNX Runtime and OpenVINO in the place of a forward: same results, same structure, and proof of their settings."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from fusewright.autotune.accuracy import SEEDS, check
from fusewright.autotune.trial import Provider
from fusewright.autotune.worker import Worker
from fusewright.bench import engines
from fusewright.bench.engines import ENGINES, missing
from fusewright.bench.rivals import RivalSubject

JOB = """
import torch
from torch import nn
from fusewright import Workload

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x, scale=None, twice=False, idle=None):
        y = self.norm(self.first(x)) * (1.0 if scale is None else scale)
        return {"y": y * 2 if twice else y, "rows": x.shape[0], "none": None, "parts": (y.sum(), x > 0)}

def inputs(length, seed):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(length, 6, generator=g),), {"scale": torch.rand(6, generator=g), "twice": True, "idle": None}

WORKLOADS = [Workload("net", "small", Net, inputs, (4,), {"x": {0: "rows"}}, lambda out: out["y"].sum())]
"""


@pytest.fixture
def job(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return f"{path}#net"


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> str:
    for name in engines.NEEDS[request.param][0]:
        pytest.importorskip(name)
    return str(request.param)


def test_an_engine_gives_what_the_model_gives(engine: str, job: str) -> None:
    subject = RivalSubject(job, 4, False, engine)
    with torch.no_grad():
        found = [subject.model(*subject.args, **subject.kwargs) for _ in range(2)]
        expected = subject.eager(*subject.args, **subject.kwargs)
    for one in found:
        assert one.keys() == expected.keys()
        assert (one["rows"], one["none"]) == (4, None)
        torch.testing.assert_close((one["y"], one["parts"]), (expected["y"], expected["parts"]))


def test_its_settings_are_read_back_from_it(engine: str, job: str) -> None:
    subject = RivalSubject(job, 4, False, engine)
    subject.step()
    proof = subject.facts()["proof"]
    assert proof["engine"].startswith(f"{engine} ")
    assert proof["threads"] == torch.get_num_threads()
    assert proof.get("precision", "f32") == "f32"
    assert proof.get("graph_optimization", "ORT_ENABLE_ALL") == "ORT_ENABLE_ALL"
    assert subject.costs().keys() == {"flops"}


@pytest.mark.multiprocess
def test_the_gate_passes_an_engine(engine: str, job: str) -> None:
    kwargs: dict[str, Any] = {"source": job, "length": 4, "training": False, "provider": engine}
    with Worker(Provider("fusewright.bench.rivals:RivalSubject", kwargs)) as worker:
        worker.build()
        report: Any = worker.check(SEEDS, training=False)
    assert report["ok"] is True, report


def test_the_gate_refuses_an_engine_with_other_weights(engine: str, job: str) -> None:
    subject = RivalSubject(job, 4, False, engine)
    with torch.no_grad():
        subject.model.get_parameter("first.weight").mul_(1.5)
    subject.step()  # exports the weights of now
    report = check(subject, SEEDS, training=False)
    assert not report.ok
    assert "['y']" in report.reason


def test_an_engine_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None if name == "onnxscript" else name)
    assert missing("openvino") is None
    assert missing("fusewright") is None
    told = missing("onnxruntime")
    assert told is not None
    assert "onnxscript not installed" in told
    assert "fusewright[onnx]" in told
