"""The gate lets right numbers through and stops wrong ones, wherever they are."""

from __future__ import annotations

import json

import pytest

from fusewright.autotune.accuracy import NONDETERMINISTIC, SEEDS, check, failure
from fusewright.autotune.trial import FailureKind, Provider
from fusewright.autotune.worker import Built, Worker
from fusewright.workload import ADVERSARIAL_SEED
from tests.autotune.torch_providers import product


@pytest.mark.parametrize("training", [False, True])
def test_equal_numbers_pass_without_a_float64_run(training: bool) -> None:
    subject = product(training=training)
    report = check(subject, training=training)
    assert report.ok
    assert report.repeatable
    assert [seed.seed for seed in report.seeds] == list(SEEDS)
    assert subject.runs == 2 * len(SEEDS) + 2


@pytest.mark.parametrize(
    ("where", "error", "training", "path"),
    [
        ("output", 0.05, False, "['output'][0]"),
        ("nan", 0.0, False, "['output'][0]"),
        ("gradient", 0.05, True, "['gradients']['weight']"),
        ("buffer", 0.0, False, "['buffers']['count']"),
        ("missing", 0.0, False, "['buffers']['count']"),
        ("hostile", 0.05, False, "['output'][0]"),
    ],
)
def test_a_wrong_number_is_found_and_named(where: str, error: float, training: bool, path: str) -> None:
    report = check(product(error, where, training), training=training)
    assert not report.ok
    assert path in report.reason
    first = next(seed for seed in report.seeds if not seed.comparison.ok)
    assert first.seed == (ADVERSARIAL_SEED if where == "hostile" else SEEDS[0])
    json.dumps(report.to_dict(), allow_nan=False)


def test_a_model_that_does_not_repeat_itself_in_eager_is_never_scored() -> None:
    report = check(product(where="eager"), training=False)
    assert not report.ok
    assert report.reason.startswith(NONDETERMINISTIC)


def test_an_unsteady_candidate_is_told_but_passes() -> None:
    report = check(product(where="unsteady"), training=False)
    assert report.ok
    assert not report.repeatable


@pytest.mark.multiprocess
def test_the_gate_runs_in_the_worker() -> None:
    provider = Provider("tests.autotune.torch_providers:product", {"error": 0.05, "where": "output"})
    with Worker(provider) as worker:
        assert isinstance(worker.build(), Built)
        report = worker.check(SEEDS, training=False)
        assert isinstance(report, dict)
        found = failure(report)
        assert found is not None
        assert found.kind is FailureKind.INACCURATE
        assert "['output'][0]" in str(found)
        assert isinstance(worker.sample(1), float)  # a wrong answer does not cost the process
