"""A whole tuning run over real processes: gate, times, confirmation, decision, interruption and resumption."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
import torch

from fusewright.autotune import space
from fusewright.autotune.jobs import Cell, TuningJob
from fusewright.autotune.key import KeyContext, TuningKey
from fusewright.autotune.plan import choose_from
from fusewright.autotune.search import BASELINES, Budget, Tuner, _CellRun, _Undecided, tune
from fusewright.autotune.stats import Comparison
from fusewright.autotune.storage.store import TuningStore
from fusewright.autotune.trial import Failure, FailureKind, Progress, Provider
from fusewright.capture.shapes import ShapeBucket
from fusewright.capture.variant import DEFAULT_VARIANT, GraphVariant, Lowering, Scalar
from fusewright.config import Effort
from fusewright.errors import UserInputError
from fusewright.pipeline.order import ORDER

CONTEXT = KeyContext("inference", "cpu", "off", 2, "AVX2", "highest", False, "2", "3", "exact", False, "", "s")
KEYS = [TuningKey(fingerprint, ShapeBucket(), CONTEXT) for fingerprint in ("one", "two")]
BUDGET = Budget(timing_s=20.0, screening_s=5.0, most_pairs=4)
EAGER, COMPILED = BASELINES


def variant(**options: Scalar) -> GraphVariant:
    return GraphVariant(options=tuple(options.items()))


FAST, SIMPLE = variant(seconds=0.0005, more=1), variant(seconds=0.0005)
SLOW, WRONG, DEAD = variant(seconds=0.002), variant(seconds=0.0001, error=True), variant(die=True)


def job() -> TuningJob:
    provider = Provider("tests.autotune.providers:variable", {"keys": [key.to_dict() for key in KEYS]})
    return TuningJob("job", (Cell("cell", provider, training=False),))


class Interrupter:
    """Presses Ctrl-C where a stage comes to `subject`."""

    def __init__(self, stage: str, subject: str) -> None:
        self.stage, self.subject = stage, subject
        self.stages: set[str] = set()

    def __call__(self, progress: Progress) -> None:
        self.stages.add(progress.stage)
        if progress.stage == self.stage and progress.subject.startswith(self.subject):
            raise KeyboardInterrupt


@pytest.mark.multiprocess
def test_the_fastest_accurate_variant_wins_and_an_interrupted_run_goes_on(tmp_path: pathlib.Path) -> None:
    store = TuningStore(tmp_path / "s.db")
    variants = (FAST, SIMPLE, WRONG, DEAD)
    with pytest.raises(KeyboardInterrupt):
        tune(job(), Tuner(store, variants, (EAGER,), BUDGET, progress=Interrupter("timing", "pair 2")))
    gated = [row for row in store.why(KEYS[0]) if row["stage"] == "accuracy"]
    assert {GraphVariant.from_json(row["variant"]): row["status"] for row in gated} == {
        EAGER: "accurate",
        FAST: "accurate",
        SIMPLE: "accurate",
        WRONG: "inaccurate",
        DEAD: "signal",
    }
    assert all(json.loads(row["provenance"])["job"] == "job" for row in gated)
    assert [row["stage"] for row in store.why(KEYS[0])].count("timing") == 2  # the pairs that were finished
    assert store.best(KEYS[0]) is None

    (result,) = tune(job(), Tuner(store, variants, (EAGER,), BUDGET))
    assert result.adopted
    assert result.winner == SIMPLE  # as fast as FAST, and simpler
    assert "beats eager" in result.reason
    fast = result.comparisons[FAST]
    assert isinstance(fast, Comparison)
    assert fast.ci_low > 1.02
    assert {v: r.kind for v, r in result.comparisons.items() if isinstance(r, Failure)} == {
        WRONG: FailureKind.INACCURATE,
        DEAD: FailureKind.SIGNAL,
    }
    again = [row for row in store.why(KEYS[0]) if row["stage"] == "accuracy" and row["status"] == "accurate"]
    assert len(again) == 3  # what had passed the gate was not asked twice
    assert [row["stage"] for row in store.why(KEYS[1])].count("confirmation") == 1
    decision = store.decision(KEYS[1])
    assert decision is not None
    assert json.loads(decision["evidence"])["baseline"] == EAGER.to_json()

    watch = Interrupter("", "")
    (resumed,) = tune(job(), Tuner(store, variants, (EAGER,), BUDGET, progress=watch))
    assert resumed.resumed
    assert resumed.winner == SIMPLE
    assert watch.stages == {"cell", "accuracy"}

    plan = choose_from(store, CONTEXT)
    assert plan("two", ShapeBucket(), torch.device("cpu")) == SIMPLE
    assert plan.lookups[0].reason.startswith("tuned")


@pytest.mark.multiprocess
def test_without_proof_the_best_baseline_stays(tmp_path: pathlib.Path) -> None:
    store = TuningStore(tmp_path / "s.db")
    same = variant(seconds=0.001)
    budget = Budget(timing_s=30.0, screening_s=5.0, most_pairs=3)
    (result,) = tune(job(), Tuner(store, (same,), (EAGER,), budget))
    assert not result.adopted
    assert result.winner == EAGER
    assert "no proof" in result.reason
    assert store.best(KEYS[0]) == result.winner


@pytest.mark.multiprocess
def test_the_baseline_to_beat_is_the_faster_one(tmp_path: pathlib.Path) -> None:
    run = _CellRun(job(), job().cells[0], Tuner(TuningStore(tmp_path / "s.db"), (), (SLOW, SIMPLE), BUDGET))
    assert run._best_baseline([SLOW, SIMPLE]) == SIMPLE
    assert run._best_baseline([SIMPLE, SLOW]) == SIMPLE


@pytest.mark.multiprocess
def test_a_cell_whose_baselines_all_fail_decides_nothing(tmp_path: pathlib.Path) -> None:
    store = TuningStore(tmp_path / "s.db")
    (result,) = tune(job(), Tuner(store, (), (DEAD,), BUDGET))
    assert result.winner is None
    assert "SIGSEGV" in result.reason
    assert store.decisions() == []


@pytest.mark.multiprocess
def test_a_budget_that_is_too_short_decides_nothing(tmp_path: pathlib.Path) -> None:
    short = dataclasses.replace(BUDGET, timing_s=0.0)
    run = _CellRun(job(), job().cells[0], Tuner(TuningStore(tmp_path / "s.db"), (FAST,), (EAGER,), short))
    with pytest.raises(_Undecided, match="1 pairs"):
        run._measure([EAGER, FAST], EAGER)


@pytest.mark.multiprocess
def test_what_rewrites_the_same_is_not_timed_twice(tmp_path: pathlib.Path) -> None:
    """Named passes and the default ones differ where a price rule leaves some place alone, and only there."""
    priced = GraphVariant(options=(("rewrites", 1),))
    everywhere, elsewhere = (
        GraphVariant(passes=("some_pass",), options=(("rewrites", made), ("seconds", 0.0005))) for made in (1, 2)
    )
    run = _CellRun(job(), job().cells[0], Tuner(TuningStore(tmp_path / "s.db")))
    timed = [v for v in (EAGER, priced, dataclasses.replace(everywhere, options=priced.options)) if run._passes_gate(v)]
    assert timed == [EAGER, priced]
    (found,) = run.outcome.values()
    assert isinstance(found, Failure)
    assert found.kind is FailureKind.DUPLICATE
    assert "rewrites as inductor(rewrites=1) does" in str(found)
    assert run._passes_gate(everywhere)  # its options differ
    assert run._passes_gate(elsewhere)


def test_the_space_of_a_run_grows_with_the_effort() -> None:
    quick, full = space.variants(Effort.QUICK), space.variants(Effort.FULL)
    assert quick[0] == DEFAULT_VARIANT
    assert space.EVERYWHERE in quick
    assert set(quick) < set(full)
    assert len(set(full)) == len(full)
    known = {one.name for one in ORDER}
    assert all(set(v.passes or ()) <= known for v in full)


def test_no_baseline_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserInputError, match="baselines"):
        Tuner(TuningStore(tmp_path / "s.db"), baselines=())


def test_the_space_names_each_variant_once_and_its_digest_changes_with_any(tmp_path: pathlib.Path) -> None:
    store = TuningStore(tmp_path / "s.db")
    tuner = Tuner(store, (FAST, EAGER, FAST))
    assert tuner.space() == [EAGER, COMPILED, FAST]
    assert tuner.space_digest() == Tuner(store, (FAST,)).space_digest()
    assert tuner.space_digest() != Tuner(store, (SLOW,)).space_digest()
    assert GraphVariant(lowering=Lowering.EAGER) in tuner.baselines
