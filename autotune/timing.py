"""Times candidates against a baseline: workers take turns, every pair is of fresh processes, until it is precise.

Absolute times do not repeat from one minute to the next, and one program in two processes differs by a bias of its own;
so only ratios within a round count, and only fresh processes show how far a ratio can be trusted (PROTOCOLS T1, T3).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fusewright.autotune.stats import MIN_PAIRS, Comparison, compare, noise
from fusewright.autotune.trial import Failure, Progress, Provider, no_progress
from fusewright.autotune.worker import DEFAULT_LIMITS, Built, Limits, Worker

BASELINE = ""  # the baseline's name among the workers; a candidate's name is never empty
WARM_CALLS = 5
MIN_ROUNDS = 5
MOST_ROUNDS = 4  # times `rounds`, where a pair is noisy
SAMPLE_S = 0.003  # shortest sample; the clock and the wake-up of a worker are then below 0.1 % of it
# The idle threads of an OpenMP pool go on spinning for some milliseconds and would disturb the next worker's turn.
SETTLE_S = 0.003

Results = Mapping[str, Comparison | Failure]
Settled = Callable[[Comparison], bool]


@dataclass(frozen=True)
class Plan:
    """How much to measure.

    Attributes:
        rounds: turns of every candidate in one pair; up to four times as many where the pair is noisy.
        pairs: fresh pairs of processes at least; below 3 nothing is ever decided.
        most_pairs: fresh pairs of processes at most.
        budget_s: seconds for the whole measurement, builds included; the first pair is always finished.
        precision: half-width of a ratio's interval at which it is narrow enough.
        settled: what ends a candidate's measurement early; by default only a narrow interval does.
    """

    rounds: int = 20
    pairs: int = MIN_PAIRS
    most_pairs: int = 12
    budget_s: float = 600.0
    precision: float = 0.01
    settled: Settled | None = None

    def is_settled(self, comparison: Comparison) -> bool:
        """True where more pairs would not change what is said of a candidate."""
        if comparison.pairs < max(self.pairs, MIN_PAIRS):
            return False
        narrow = comparison.half_width() <= self.precision
        return narrow or (self.settled is not None and self.settled(comparison))


@dataclass
class _Series:
    """Seconds per call of one candidate and of the baseline in the same rounds, one inner list per pair."""

    baseline_s: list[list[float]] = field(default_factory=list)
    candidate_s: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class Measurement:
    """What was found.

    Attributes:
        results: by candidate: its comparison, or why it dropped out.
        baseline_failure: set where the baseline died; comparisons then rest on the pairs before.
        built: by candidate, and under `BASELINE`: the first build.
        spent_s: seconds, builds included.
    """

    results: Results
    baseline_failure: Failure | None
    built: Mapping[str, Built]
    spent_s: float


DEFAULT_PLAN = Plan()
NOT_MEASURED = Comparison(math.nan, 0.0, math.inf, 0, 0, compare([[1.0]], [[1.0]]).verdict)


def shuffled(names: Sequence[str], turn: int) -> list[str]:
    """An order for one round, the same each time it is asked for.

    A rotation would do for two. Of more, each would run after the same one in nearly every round, and inherit what that
    one leaves in the caches.
    """
    return random.Random(turn).sample(list(names), len(names))


def measure_pairs(
    candidates: Mapping[str, Provider],
    baseline: Provider,
    plan: Plan = DEFAULT_PLAN,
    *,
    limits: Limits = DEFAULT_LIMITS,
    threads: int | None = None,
    progress: Callable[[Progress], None] = no_progress,
    on_pair: Callable[[Results], object] = dict,
) -> Measurement:
    """Measure every candidate against the baseline in rounds, each round in an order of its own.

    A candidate that fails drops out with its record and costs the others nothing; one that is settled takes no further
    part. What neither fails nor becomes narrow within the budget is `undecided`, unless its interval proves a
    difference.
    """
    assert BASELINE not in candidates, "a candidate needs a name"
    run = _Run(candidates, baseline, plan, limits, threads, progress)
    return run.measure(on_pair)


class _Run:
    """The state of one measurement."""

    def __init__(
        self,
        candidates: Mapping[str, Provider],
        baseline: Provider,
        plan: Plan,
        limits: Limits,
        threads: int | None,
        progress: Callable[[Progress], None],
    ) -> None:
        self.providers = {BASELINE: baseline, **candidates}
        self.plan, self.limits, self.threads, self.progress = plan, limits, threads, progress
        self.series = {name: _Series() for name in candidates}
        self.failures: dict[str, Failure] = {}
        self.built: dict[str, Built] = {}
        self.started = time.monotonic()

    def measure(self, on_pair: Callable[[Results], object]) -> Measurement:
        longest_s = 0.0
        for pair in range(self.plan.most_pairs):
            live = [name for name in self.series if name not in self.failures and not self._is_settled(name)]
            if not live or BASELINE in self.failures:
                break
            # The first pairs share the budget out among themselves; a further one is begun only where it will fit.
            if pair and self._spent_s() + (longest_s if pair >= self.plan.pairs else 0.0) > self.plan.budget_s:
                break
            began = self._spent_s()
            self._measure_pair(pair, live)
            longest_s = max(longest_s, self._spent_s() - began)
            on_pair(self._results())
        return Measurement(self._results(), self.failures.get(BASELINE), self.built, self._spent_s())

    def _results(self) -> dict[str, Comparison | Failure]:
        return {name: self.failures.get(name) or self._comparison(name) for name in self.series}

    def _spent_s(self) -> float:
        return time.monotonic() - self.started

    def _comparison(self, name: str) -> Comparison:
        series = self.series[name]
        if not series.candidate_s:
            return NOT_MEASURED
        return compare(series.baseline_s, series.candidate_s, precision=self.plan.precision)

    def _is_settled(self, name: str) -> bool:
        return self.plan.is_settled(self._comparison(name))

    def _measure_pair(self, pair: int, live: Sequence[str]) -> None:
        with _workers([self.providers[n] for n in (BASELINE, *live)], self.limits, self.threads) as started:
            workers = dict(zip((BASELINE, *live), started, strict=True))
            for name, built in build_all(workers).items():
                if isinstance(built, Failure):
                    self.failures[name] = built
                else:
                    self.built.setdefault(name, built)
            calls = {name: self._warm(name, worker) for name, worker in workers.items()}
            samples: dict[str, list[float]] = {name: [] for name in workers}
            left = max(self.plan.pairs - pair, 1)
            until_s = self._spent_s() + max(self.plan.budget_s - self._spent_s(), 0.0) / left
            for turn in range(self.plan.rounds * MOST_ROUNDS):
                order = [name for name in workers if name not in self.failures]
                if BASELINE not in order or len(order) == 1:
                    return
                if turn >= MIN_ROUNDS and (self._spent_s() > until_s or self._is_quiet(order, samples, turn)):
                    break
                self._turn(shuffled(order, turn), workers, calls, samples)
                self._tell(pair, turn)
        for name in live:
            if name in self.failures or BASELINE in self.failures:
                continue  # it may have died in the last turn, and has fewer samples then
            self.series[name].baseline_s.append(samples[BASELINE])
            self.series[name].candidate_s.append(samples[name])

    def _warm(self, name: str, worker: Worker) -> int:
        """Calls per sample; 0 for a worker that failed."""
        seconds = worker.warm(WARM_CALLS)
        if isinstance(seconds, Failure):
            self.failures.setdefault(name, seconds)
            return 0
        return max(1, math.ceil(SAMPLE_S / max(seconds, 1e-9)))

    def _is_quiet(self, order: Sequence[str], samples: Mapping[str, Sequence[float]], turn: int) -> bool:
        if turn < self.plan.rounds:
            return False
        return all(noise(samples[BASELINE], samples[name]) <= self.plan.precision / 3 for name in order[1:])

    def _turn(
        self,
        order: Sequence[str],
        workers: Mapping[str, Worker],
        calls: Mapping[str, int],
        samples: Mapping[str, list[float]],
    ) -> None:
        """One round: each worker once. The samples of a failed worker are never used again, so they may be short."""
        for name in order:
            time.sleep(SETTLE_S)
            seconds = workers[name].sample(calls[name])
            if isinstance(seconds, Failure):
                self.failures[name] = seconds
                if name == BASELINE:
                    return
            else:
                samples[name].append(seconds)

    def _tell(self, pair: int, turn: int) -> None:
        per_pair = self.plan.rounds
        done = pair * per_pair + min(turn + 1, per_pair)
        total = per_pair * max(self.plan.pairs, pair + 1)
        subject = f"pair {pair + 1}, round {turn + 1}"
        self.progress(Progress("timing", subject, done, total, self._spent_s(), self.plan.budget_s))


@contextlib.contextmanager
def _workers(providers: Sequence[Provider], limits: Limits, threads: int | None) -> Iterator[list[Worker]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Worker(p, limits=limits, threads=threads)) for p in providers]


def build_all(workers: Mapping[str, Worker], at_once: int | None = None) -> dict[str, Built | Failure]:
    """Build several workers, `at_once` side by side (default: one per CPU); nothing is timed meanwhile."""
    with concurrent.futures.ThreadPoolExecutor(at_once or os.cpu_count() or 1) as pool:
        try:
            return dict(zip(workers, pool.map(Worker.build, workers.values()), strict=True))
        except BaseException:  # Ctrl-C: the pool would otherwise wait for builds that nobody wants any more
            for worker in workers.values():
                worker.kill()
            raise
