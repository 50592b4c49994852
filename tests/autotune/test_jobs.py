"""A workload becomes cells, and a cell's subject runs every role from one and the same state."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fusewright.autotune.accuracy import check, snapshot
from fusewright.autotune.jobs import WorkloadSubject, load, workload_job
from fusewright.autotune.key import TuningKey
from fusewright.autotune.trial import Role
from fusewright.capture.variant import DEFAULT_VARIANT, GraphVariant
from fusewright.errors import UserInputError
from fusewright.trees import bitwise_equal
from tests.autotune.torch_providers import TOY

HERE = "tests.autotune.torch_providers"


def subject(training: bool, variant: GraphVariant = DEFAULT_VARIANT, **changes: Any) -> WorkloadSubject:
    (first, *_) = workload_job(f"{HERE}:TOY", TOY, modes=["training" if training else "inference"]).cells
    arguments = dict(first.with_variant(variant).kwargs) | {"optimize": f"{HERE}:optimize_eagerly"}
    return WorkloadSubject(**(arguments | changes))


def test_a_job_has_a_cell_for_every_mode_and_length() -> None:
    job = workload_job(f"{HERE}:TOY", TOY)
    assert [cell.name for cell in job.cells] == [
        "toy inference rows=4",
        "toy inference rows=8",
        "toy training rows=4",
        "toy training rows=8",
    ]
    assert [cell.training for cell in job.cells] == [False, False, True, True]
    assert job.cells[0].provider.kwargs["buckets"] == {"rows": [4, 8]}
    with pytest.raises(UserInputError, match="speed"):
        workload_job(f"{HERE}:TOY", TOY, modes=["speed"])


@pytest.mark.parametrize("training", [False, True])
def test_a_right_variant_passes_the_gate_and_a_wrong_one_does_not(training: bool) -> None:
    assert check(subject(training), training=training).ok
    wrong = subject(training, GraphVariant(options=(("scale", 1.05),)))
    assert not check(wrong, training=training).ok
    nearly = subject(training, GraphVariant(options=(("scale", 1.0 + 1e-6),)))
    assert check(nearly, training=training).ok


def test_a_training_step_is_seen_whole_and_leaves_no_trace() -> None:
    one = subject(training=True)
    one.step()
    before = snapshot(one.outputs(0, Role.CANDIDATE))
    one.outputs(1, Role.CANDIDATE)
    one.step()
    assert bitwise_equal(before, snapshot(one.outputs(0, Role.CANDIDATE)))
    assert bitwise_equal(before, snapshot(one.outputs(0, Role.EAGER)))
    for path in (
        "['output']",
        "['loss']",
        "['gradients']['0.weight']",
        "['gradients']['input:0']",
        "['buffers']['1.running_mean']",
        "['parameters']['3.bias']",
    ):
        assert isinstance(before[path], torch.Tensor), path
    assert not torch.equal(before["['parameters']['0.weight']"], one.start["0.weight"])
    exact = snapshot(one.outputs(0, Role.FLOAT64))
    assert exact["['output']"].dtype is torch.float64
    assert torch.allclose(exact["['output']"].float(), before["['output']"], atol=1e-4)


@pytest.mark.parametrize("training", [False, True])
def test_the_keys_are_those_that_the_backend_asked_for(training: bool) -> None:
    one = subject(training)
    one.step()
    (record,) = one.facts()["keys"]
    found = TuningKey.from_dict(record)
    assert found.context.mode == ("training" if training else "inference")
    assert str(found.bucket) == "rows=2..4"


def test_a_model_in_which_nothing_was_captured_is_no_candidate() -> None:
    one = subject(False, optimize=f"{HERE}:optimize_nothing")
    one.step()
    with pytest.raises(RuntimeError, match="no graph of toy was captured"):
        one.facts()


def test_sources_are_loaded_by_name() -> None:
    assert load(f"{HERE}:TOY") is TOY
    assert subject(False, source=f"{HERE}:make_toy").workload is TOY
    for wrong in ("no.such.module:x", f"{HERE}:no_such_name", "nonsense"):
        with pytest.raises(UserInputError, match="names nothing"):
            load(wrong)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_flops_are_those_of_the_eager_step() -> None:
    made = subject(training=True)
    assert made.costs()["flops"] == 3 * 2 * 4 * (8 * 16 + 16 * 4)
    assert made.model is not made.eager


def test_flops_that_the_workload_names_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    own = dataclasses.replace(TOY, flops=lambda length, mode: length * {"inference": 10.0, "training": 30.0}[mode])
    monkeypatch.setattr("tests.autotune.torch_providers.OWN", own, raising=False)
    assert subject(training=False, source=f"{HERE}:OWN").costs()["flops"] == 40
    assert subject(training=True, source=f"{HERE}:OWN").costs()["flops"] == 120


def test_peak_memory_counts_tensors_that_live_at_once() -> None:
    made = subject(training=False, source=f"{HERE}:WIDE", optimize=f"{HERE}:optimize_nothing")
    made.step()  # what an earlier step left in malloc's hands does not count
    assert made.costs()["peak_mb"] == pytest.approx(8.0, abs=0.01)  # the linear layer's output and ReLU's, 4 MiB each
