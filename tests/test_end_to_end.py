"""The walk through every stage: capture, rewrite, verify, tune in own processes, store, use in a new process."""

from __future__ import annotations

import copy
import json
import pathlib
import subprocess
import sys

import pytest
import torch

import fusewright
from fusewright.api import optimize_with
from fusewright.autotune.search import Budget, Tuner, tune
from fusewright.autotune.storage.store import TuningStore
from fusewright.bench.cells import plan_cells
from fusewright.capture.variant import GraphVariant, Lowering
from fusewright.report.tuning import _jobs
from tests.models.mini import MINI_LLAMA

JOB = pathlib.Path(__file__).parent / "data" / "mini_job.py"
AOT_EAGER = GraphVariant(lowering=Lowering.AOT_EAGER)

USE = """
import json, sys, torch, fusewright
from fusewright.job_file import resolve
workload = resolve(sys.argv[1] + "#mini")
model = fusewright.optimize(workload.build(training=False), dims=workload.dims, buckets={"tokens": [16, 64]})
with torch.no_grad():
    for length in workload.lengths:
        args, kwargs = workload.make_inputs(length)
        model(*args, **kwargs)
print(json.dumps(fusewright.explain(model).to_dict()["buckets"]))
"""


def test_a_training_graph_is_rewritten_and_verified() -> None:
    model = MINI_LLAMA.build(training=True)
    reference = copy.deepcopy(model)
    optimize_with(model, choose=lambda *_: AOT_EAGER, dims=MINI_LLAMA.dims, buckets={"tokens": [64]})
    args, kwargs = MINI_LLAMA.make_inputs(MINI_LLAMA.lengths[0])
    MINI_LLAMA.scalar_loss(model(*args, **kwargs)).backward()
    MINI_LLAMA.scalar_loss(reference(*args, **kwargs)).backward()
    told = fusewright.explain(model).to_dict()
    assert told["rewrites"]["fuse_attention"] == told["recognised"]["attention"] == 2, told["declines"]
    assert [v["ok"] for v in told["verified"]] == [True]
    assert "gradients" in told["verified"][0]["what"]
    assert not told["fallbacks"]
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_tuned_winner_is_used_by_a_new_process(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "tuning.sqlite"
    monkeypatch.setenv("FUSEWRIGHT_STORE", str(place))
    cells = plan_cells(str(JOB), [], ["inference"])
    tuner = Tuner(
        TuningStore(place),
        variants=(AOT_EAGER,),
        baselines=(GraphVariant(lowering=Lowering.EAGER),),
        budget=Budget(timing_s=300.0, screening_s=5.0, most_pairs=3),
    )
    results = [result for job in _jobs(cells) for result in tune(job, tuner)]
    assert all(r.winner is not None for r in results), [r.reason for r in results]
    decided = {}
    for row in tuner.store.decisions():
        name, low, high = json.loads(row["key_json"])["bucket"][0]
        decided[f"{name}={low}..{high}"] = GraphVariant.from_json(row["variant"]).label()
        assert tuner.store.why(row["key"]), "a decision stands on stored measurements"
    assert set(decided) == {"tokens=2..16", "tokens=17..64"}
    done = subprocess.run(
        [sys.executable, "-c", USE, str(JOB)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    used = {row["range"]: row["variant"] for row in json.loads(done.stdout.splitlines()[-1])}
    assert used == decided
    assert "inductor" not in used.values(), "neither of the two variants is the default"
