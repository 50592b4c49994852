"""Real worker processes that take turns: what is faster is found, and what dies costs nobody else."""

from __future__ import annotations

import itertools
import math
import os
import pathlib
import threading
import time
from collections import Counter

import pytest

from fusewright.autotune.stats import Comparison, Verdict
from fusewright.autotune.timing import BASELINE, Plan, build_all, measure_pairs, shuffled
from fusewright.autotune.trial import Failure, FailureKind, Progress, Provider
from fusewright.autotune.worker import Limits, Worker

pytestmark = pytest.mark.multiprocess


def spin(seconds: float) -> Provider:
    return Provider("tests.autotune.providers:spin", {"seconds": seconds})


def dying(action: str, at: int) -> Provider:
    return Provider("tests.autotune.providers:dying", {"action": action, "at": at})


def test_faster_and_slower_and_same_are_told_apart() -> None:
    plan = Plan(rounds=10, most_pairs=5, budget_s=10.0)
    told: list[Progress] = []
    found = measure_pairs(
        {"fast": spin(0.0005), "slow": spin(0.002), "same": spin(0.001)}, spin(0.001), plan, progress=told.append
    )
    results = {name: r for name, r in found.results.items() if isinstance(r, Comparison)}
    assert results["fast"].verdict is Verdict.FASTER
    assert results["slow"].verdict is Verdict.SLOWER
    assert results["same"].verdict in (Verdict.SAME, Verdict.UNDECIDED)  # a machine that is busy decides nothing
    assert 1.5 < results["fast"].ratio < 4.0  # 2 on a quiet machine; one that is busy stretches the longer spin more
    assert results["fast"].ci_low < results["fast"].ratio < results["fast"].ci_high
    assert 0.0005 <= results["fast"].candidate_s < 0.001
    assert results["same"].pairs >= 3
    assert {p.stage for p in told} == {"timing"}
    assert all(p.done <= p.total for p in told)


def test_every_pair_is_of_fresh_processes(tmp_path: pathlib.Path) -> None:
    provider = Provider("tests.autotune.providers:logged", {"folder": str(tmp_path)})
    measure_pairs({"other": provider}, provider, Plan(rounds=5, pairs=3, most_pairs=3))
    assert len(list(tmp_path.iterdir())) == 6


def test_a_candidate_that_dies_costs_only_itself() -> None:
    candidates = {
        "segv in the first step": dying("segv", 0),
        "exit while warming": dying("exit", 3),
        "hang while sampling": dying("hang", 20),
        "fast": spin(0.0005),
    }
    plan = Plan(rounds=8, most_pairs=3, budget_s=10.0)
    found = measure_pairs(candidates, spin(0.001), plan, limits=Limits(build_s=30.0, run_s=0.7))
    kinds = {name: r.kind for name, r in found.results.items() if isinstance(r, Failure)}
    assert kinds == {
        "segv in the first step": FailureKind.SIGNAL,
        "exit while warming": FailureKind.EXIT,
        "hang while sampling": FailureKind.RUN_TIMEOUT,
    }
    fast = found.results["fast"]
    assert isinstance(fast, Comparison)
    assert fast.verdict is Verdict.FASTER
    assert set(found.built) == {BASELINE, "exit while warming", "hang while sampling", "fast"}


def test_a_baseline_that_dies_leaves_everything_undecided() -> None:
    found = measure_pairs({"a": spin(0.001)}, dying("kill", 15), Plan(rounds=8))
    assert found.baseline_failure is not None
    assert found.baseline_failure.kind is FailureKind.SIGNAL
    result = found.results["a"]
    assert isinstance(result, Comparison)
    assert result.verdict is Verdict.UNDECIDED
    assert math.isnan(result.ratio)


def test_a_spent_budget_leaves_undecided_and_never_same() -> None:
    started = time.monotonic()
    found = measure_pairs({"a": spin(0.001)}, spin(0.001), Plan(rounds=1000, budget_s=0.1))
    assert time.monotonic() - started < 3.0
    result = found.results["a"]
    assert isinstance(result, Comparison)
    assert result.verdict is Verdict.UNDECIDED


def test_what_is_settled_takes_no_further_pairs() -> None:
    plan = Plan(rounds=5, precision=1e-9, most_pairs=5, settled=lambda c: c.ci_low > 1.1)
    found = measure_pairs({"fast": spin(0.0005), "same": spin(0.001)}, spin(0.001), plan)
    pairs = {name: r.pairs for name, r in found.results.items() if isinstance(r, Comparison)}
    assert pairs == {"fast": 3, "same": 5}


def test_an_interrupt_during_a_build_leaves_no_process_behind() -> None:
    workers = {str(i): Worker(dying("hang", 0)) for i in range(3)}
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), 2))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        build_all(workers, at_once=3)
    assert time.monotonic() - started < 5.0
    for worker in workers.values():
        assert not pathlib.Path(f"/proc/{worker.pid}").exists()
        worker.close()
    timer.join()


@pytest.mark.parametrize("count", [2, 3, 6])
def test_each_runs_first_and_after_each_other_one_about_equally_often(count: int) -> None:
    names = [str(number) for number in range(count)]
    orders = [shuffled(names, turn) for turn in range(60)]
    assert all(sorted(order) == names for order in orders)
    assert orders == [shuffled(names, turn) for turn in range(60)]
    first = Counter(order[0] for order in orders)
    after = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert min(first.values()) > 0.4 * 60 / count
    assert len(after) == count * (count - 1)
    assert min(after.values()) > 0.4 * 60 / count
