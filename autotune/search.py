"""Tunes a job: accuracy gate, timing against the best baseline, confirmation, decision; each step is stored at once."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusewright.autotune.accuracy import SEEDS, failure
from fusewright.autotune.jobs import Cell, TuningJob
from fusewright.autotune.key import TuningKey
from fusewright.autotune.space import Rewritten
from fusewright.autotune.stats import MIN_PAIRS, Comparison, Verdict
from fusewright.autotune.storage.store import Trial, TuningStore
from fusewright.autotune.timing import Measurement, Plan, Results, measure_pairs
from fusewright.autotune.trial import Failure, FailureKind, Progress, no_progress
from fusewright.autotune.worker import DEFAULT_LIMITS, Built, Limits, Worker
from fusewright.capture.variant import DEFAULT_VARIANT, GraphVariant, Lowering
from fusewright.config import Effort
from fusewright.errors import UserInputError

# The best of these two is what a variant has to beat.
BASELINES = (GraphVariant(lowering=Lowering.EAGER), GraphVariant(passes=()))
MIN_GAIN = 0.02  # lower end of a gain's interval that a variant must prove, twice
RETIME_WITHIN = 1.5  # whatever screening finds within this factor of the best is timed properly
SCREEN_ABOVE = 4  # fewer variants than this are timed properly at once
CONFIRMATIONS = 2  # finalists that may try their confirmation run


@dataclass(frozen=True)
class Budget:
    """Seconds and pairs for one cell; `narrow` is finer than a report needs, because a 3 % gain must clear 2 %."""

    timing_s: float
    screening_s: float
    most_pairs: int
    narrow: float = 0.006

    def screening(self) -> Plan:
        """One pair, to see what is far off."""
        return Plan(rounds=10, pairs=1, most_pairs=1, budget_s=self.screening_s)

    def timing(self, min_gain: float) -> Plan:
        """Until a gain of `min_gain` is proven or excluded."""
        return Plan(
            most_pairs=self.most_pairs,
            budget_s=self.timing_s,
            precision=self.narrow,
            settled=lambda comparison: comparison.settles(min_gain),
        )


BUDGETS: Mapping[Effort, Budget] = {
    Effort.QUICK: Budget(timing_s=60.0, screening_s=30.0, most_pairs=8),
    Effort.FULL: Budget(timing_s=600.0, screening_s=120.0, most_pairs=20),
}


@dataclass(frozen=True)
class CellResult:
    """What was decided for one cell, and why.

    Attributes:
        winner: None where nothing was decided: no baseline ran, or the budget was too short. Nothing is stored then.
        adopted: True where the winner is a variant that beat the best baseline twice.
        reason: one line for people.
        comparisons: by variant: against the baseline, or why it dropped out.
        resumed: True where an earlier run had decided it.
    """

    cell: str
    winner: GraphVariant | None
    adopted: bool
    reason: str
    comparisons: Mapping[GraphVariant, Comparison | Failure] = field(default_factory=dict)
    resumed: bool = False


@dataclass(frozen=True)
class Tuner:
    """The settings of a run."""

    store: TuningStore
    variants: tuple[GraphVariant, ...] = (DEFAULT_VARIANT,)
    baselines: tuple[GraphVariant, ...] = BASELINES
    budget: Budget = BUDGETS[Effort.QUICK]
    min_gain: float = MIN_GAIN
    limits: Limits = DEFAULT_LIMITS
    threads: int | None = None
    seeds: tuple[int, ...] = SEEDS
    progress: Callable[[Progress], None] = no_progress

    def __post_init__(self) -> None:
        if not self.baselines:
            raise UserInputError("baselines: at least one variant must serve as the baseline.")

    def space(self) -> list[GraphVariant]:
        """Baselines first, then the other variants, each once."""
        return list(dict.fromkeys((*self.baselines, *self.variants)))

    def space_digest(self) -> str:
        """Changes with any variant, so that a larger space is tuned anew."""
        return hashlib.sha256("\n".join(sorted(v.to_json() for v in self.space())).encode()).hexdigest()[:16]


def tune(job: TuningJob, tuner: Tuner) -> list[CellResult]:
    """Decide every cell of a job.

    A cell that the store holds a decision for, over the same variants, is skipped. Interrupting loses no finished
    measurement: they are in the store, and the next run goes on from there.
    """
    results = []
    for number, cell in enumerate(job.cells):
        tuner.progress(Progress("cell", cell.name, number, len(job.cells)))
        results.append(_CellRun(job, cell, tuner).decide())
    return results


class _Undecided(Exception):
    """Nothing can be said of this cell: its baseline died under the clock, or the budget was too short."""


class _CellRun:
    """The state of one cell while it is decided."""

    def __init__(self, job: TuningJob, cell: Cell, tuner: Tuner) -> None:
        self.job, self.cell, self.tuner = job, cell, tuner
        self.keys: list[TuningKey] = []
        self.outcome: dict[GraphVariant, Comparison | Failure] = {}
        self.unstored: list[dict[str, Any]] = []  # trials from before the keys were known
        self.rewritten = Rewritten()

    def decide(self) -> CellResult:
        space = self.tuner.space()
        accurate: list[GraphVariant] = []
        for number, variant in enumerate(space):
            self.tuner.progress(Progress("accuracy", f"{self.cell.name}: {variant.label()}", number, len(space)))
            if self._passes_gate(variant):
                accurate.append(variant)
            if (earlier := self._earlier_decision()) is not None:
                return earlier
        baselines = [v for v in accurate if v in self.tuner.baselines]
        if not baselines:
            why = "; ".join(f"{v.label()}: {r}" for v, r in self.outcome.items() if v in self.tuner.baselines)
            return CellResult(self.cell.name, None, False, f"no baseline passed the gate ({why})", self.outcome)
        try:
            return self._measure(accurate, self._best_baseline(baselines))
        except _Undecided as error:
            return CellResult(self.cell.name, None, False, str(error), self.outcome)

    def _measure(self, accurate: Sequence[GraphVariant], baseline: GraphVariant) -> CellResult:
        candidates = self._screen([v for v in accurate if v not in self.tuner.baselines], baseline)
        if candidates:
            self._refuse_short(self._time("timing", candidates, baseline))
        for finalist in self._finalists(candidates)[:CONFIRMATIONS]:
            found = self._time("confirmation", [finalist], baseline, keep=False)[finalist]
            if isinstance(found, Comparison) and found.proves_gain(self.tuner.min_gain):
                return self._conclude(finalist, baseline, True, _gain_text("beats", finalist, baseline, found))
        return self._conclude(baseline, baseline, False, self._why_stay(baseline))

    def _passes_gate(self, variant: GraphVariant) -> bool:
        """Build and check one variant in its own process, unless an interrupted run has seen it pass."""
        if self._passed_before(variant):
            return True
        limits, threads = self.tuner.limits, self.tuner.threads
        with Worker(self.cell.with_variant(variant), limits=limits, threads=threads) as worker:
            built = worker.build()
            if isinstance(built, Built) and not self.keys:
                self.keys = [TuningKey.from_dict(record) for record in built.facts["keys"]]
                if self._earlier_decision() is not None or self._passed_before(variant):
                    return True
            report = worker.check(self.tuner.seeds, training=self.cell.training)
        result = report if isinstance(report, Failure) else failure(report)
        if result is None and isinstance(built, Built):
            same = self.rewritten.same_as(variant, built.facts)
            result = None if same is None else Failure(FailureKind.DUPLICATE, f"rewrites as {same.label()} does")
        if result is not None:
            self.outcome[variant] = result
        self._store(variant, "accuracy", result, accuracy=None if isinstance(report, Failure) else report)
        return result is None

    def _passed_before(self, variant: GraphVariant) -> bool:
        """A failure is tried again: it may have been the machine's."""
        rows = [row for key in self.keys[:1] for row in self.tuner.store.why(key)]
        done = [r["status"] for r in rows if r["stage"] == "accuracy" and r["variant"] == variant.to_json()]
        return bool(done) and done[-1] == "accurate"

    def _earlier_decision(self) -> CellResult | None:
        rows = [self.tuner.store.decision(key) for key in self.keys]
        found = [row for row in rows if row is not None and row["space"] == self.tuner.space_digest()]
        if not self.keys or len(found) < len(self.keys):
            return None
        winner = GraphVariant.from_json(found[0]["variant"])
        adopted = winner not in self.tuner.baselines
        return CellResult(self.cell.name, winner, adopted, "decided by an earlier run", resumed=True)

    def _best_baseline(self, baselines: Sequence[GraphVariant]) -> GraphVariant:
        """The fastest baseline; a tie goes to the simpler one. No proof is asked for, all of them are safe."""
        simplest, *others = sorted(baselines, key=GraphVariant.complexity)
        if not others:
            return simplest
        found = self._time("baselines", others, simplest, keep=False)
        self._refuse_short(found)
        faster = {v: r.ratio for v, r in found.items() if isinstance(r, Comparison) and r.verdict is not Verdict.SAME}
        best = max(faster, key=faster.__getitem__, default=simplest)
        return best if faster.get(best, 0.0) > 1.0 else simplest

    def _refuse_short(self, found: Mapping[GraphVariant, Comparison | Failure]) -> None:
        """A decision after too few pairs would be kept as if it were proven."""
        pairs = min((r.pairs for r in found.values() if isinstance(r, Comparison)), default=MIN_PAIRS)
        if pairs < MIN_PAIRS:
            budget_s = self.tuner.budget.timing_s
            raise _Undecided(
                f"undecided: {budget_s:g} s were enough for {pairs} pairs of processes, {MIN_PAIRS} are needed"
            )

    def _screen(self, candidates: Sequence[GraphVariant], baseline: GraphVariant) -> list[GraphVariant]:
        """Drop what one pair of processes shows to be far from the best."""
        if len(candidates) < SCREEN_ABOVE:
            return list(candidates)
        found = self._time("screening", candidates, baseline, plan=self.tuner.budget.screening())
        ratios = {v: r.ratio for v, r in found.items() if isinstance(r, Comparison)}
        best = max([1.0, *ratios.values()])
        return [v for v, ratio in ratios.items() if ratio * RETIME_WITHIN >= best]

    def _time(
        self,
        stage: str,
        candidates: Sequence[GraphVariant],
        baseline: GraphVariant,
        *,
        plan: Plan | None = None,
        keep: bool = True,
    ) -> dict[GraphVariant, Comparison | Failure]:
        """Measure and store; an interrupt stores what the finished pairs have shown."""
        by_label = {v.to_json(): v for v in candidates}
        latest: dict[str, Comparison | Failure] = {}
        with self._stored_at_the_end(stage, by_label, baseline, latest):
            found: Measurement = measure_pairs(
                {label: self.cell.with_variant(v) for label, v in by_label.items()},
                self.cell.with_variant(baseline),
                plan or self.tuner.budget.timing(self.tuner.min_gain),
                limits=self.tuner.limits,
                threads=self.tuner.threads,
                progress=lambda p: self.tuner.progress(dataclasses.replace(p, stage=stage)),
                on_pair=latest.update,
            )
            latest.update(found.results)
        if found.baseline_failure is not None:
            raise _Undecided(f"the baseline {baseline.label()} died under the clock: {found.baseline_failure}")
        results = {v: latest[label] for label, v in by_label.items()}
        if keep:
            self.outcome.update(results)
        return results

    @contextlib.contextmanager
    def _stored_at_the_end(
        self, stage: str, by_label: Mapping[str, GraphVariant], baseline: GraphVariant, latest: Results
    ) -> Iterator[None]:
        load = os.getloadavg()
        try:
            yield
        finally:
            for label, result in latest.items():
                self._store(by_label[label], stage, result, baseline=baseline, load_before=load)

    def _finalists(self, candidates: Sequence[GraphVariant]) -> list[GraphVariant]:
        """Those that prove the gain, best first; what cannot be told from the best is ordered by simplicity."""
        proven = {v: r for v in candidates if isinstance(r := self.outcome[v], Comparison)}
        proven = {v: r for v, r in proven.items() if r.proves_gain(self.tuner.min_gain)}
        if not proven:
            return []
        best = max(proven.values(), key=lambda r: r.ratio)
        tied = sorted((v for v, r in proven.items() if r.ci_high >= best.ci_low), key=GraphVariant.complexity)
        rest = sorted((v for v in proven if v not in tied), key=lambda v: -proven[v].ratio)
        return [*tied, *rest]

    def _why_stay(self, baseline: GraphVariant) -> str:
        others = {v: r for v, r in self.outcome.items() if v not in self.tuner.baselines}
        best = max((r for r in others.values() if isinstance(r, Comparison)), key=lambda r: r.ratio, default=None)
        failed = sum(isinstance(r, Failure) and r.kind is not FailureKind.DUPLICATE for r in others.values())
        tail = f"; {failed} dropped out" if failed else ""
        if best is None:
            return f"stays with {baseline.label()}: nothing else could be timed{tail}"
        variant = next(v for v, r in others.items() if r is best)
        return _gain_text("no proof that it beats", variant, baseline, best) + tail

    def _conclude(self, winner: GraphVariant, baseline: GraphVariant, adopted: bool, reason: str) -> CellResult:
        evidence = {
            "adopted": adopted,
            "baseline": baseline.to_json(),
            "reason": reason,
            "min_gain": self.tuner.min_gain,
            "cell": self.cell.name,
            "undecided": [
                v.to_json()
                for v, r in self.outcome.items()
                if isinstance(r, Comparison) and not r.settles(self.tuner.min_gain)
            ],
        }
        for key in self.keys:
            self.tuner.store.decide(key, winner, evidence, space=self.tuner.space_digest())
        return CellResult(self.cell.name, winner, adopted, reason, self.outcome)

    def _store(
        self,
        variant: GraphVariant,
        stage: str,
        result: Comparison | Failure | None,
        *,
        baseline: GraphVariant | None = None,
        accuracy: Mapping[str, Any] | None = None,
        load_before: tuple[float, float, float] | None = None,
    ) -> None:
        provenance = {
            "job": self.job.name,
            "cell": self.cell.name,
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "load_before": load_before,
            "load_after": os.getloadavg(),
            "limits": dataclasses.asdict(self.tuner.limits),
        }
        self.unstored.append(
            {
                "variant": variant,
                "stage": stage,
                "result": result,
                "baseline": baseline,
                "accuracy": accuracy,
                "provenance": provenance,
            }
        )
        if self.keys:
            for key, fields in itertools.product(self.keys, self.unstored):
                self.tuner.store.add_measurement(Trial(key, **fields))
            self.unstored.clear()


def _gain_text(verb: str, variant: GraphVariant, baseline: GraphVariant, found: Comparison) -> str:
    return (
        f"{variant.label()} {verb} {baseline.label()}: "
        f"{found.ratio:.3f}x [{found.ci_low:.3f}, {found.ci_high:.3f}], {found.pairs} pairs"
    )
