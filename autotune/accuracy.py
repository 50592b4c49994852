"""The gate before the clock: a candidate's numbers against eager's on several inputs, run inside the worker process."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fusewright.autotune.trial import Failure, FailureKind, Role, Subject
from fusewright.numerics import Comparison, TreeComparison, compare_trees
from fusewright.trees import Container, bitwise_difference, walk
from fusewright.workload import ADVERSARIAL_SEED

SEEDS = (0, 1, ADVERSARIAL_SEED)
NONDETERMINISTIC = "eager_nondeterministic"
KEPT_LEAVES = 5  # failing leaves of a seed that a record keeps


@dataclass(frozen=True)
class SeedReport:
    """The comparison on the inputs of one seed."""

    seed: int
    comparison: TreeComparison

    def to_dict(self) -> dict[str, Any]:
        """The verdict, the worst leaf and the first few failing ones; numbers that are not finite as text."""
        failing = [leaf for leaf in self.comparison.leaves if not leaf.ok][:KEPT_LEAVES]
        worst = self.comparison.worst
        return {
            "seed": self.seed,
            "ok": self.comparison.ok,
            "reason": self.comparison.reason,
            "leaves": len(self.comparison.leaves),
            "worst": None if worst is None else _plain(worst),
            "failing": [_plain(leaf) for leaf in failing],
        }


@dataclass(frozen=True)
class AccuracyReport:
    """What the gate found.

    Attributes:
        ok: every leaf of every seed passes, and eager repeats itself.
        reason: one line for people.
        repeatable: two runs of the candidate agree in every bit; not a condition, because not every kernel promises it.
        seeds: one report for each seed.
    """

    ok: bool
    reason: str
    repeatable: bool
    seeds: tuple[SeedReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        fields = {"ok": self.ok, "reason": self.reason, "repeatable": self.repeatable}
        return fields | {"seeds": [seed.to_dict() for seed in self.seeds]}


def check(subject: Subject, seeds: Sequence[int] = SEEDS, *, training: bool) -> AccuracyReport:
    """Compare the candidate with eager, and where they differ with eager in float64.

    Args:
        subject: must start every role from the same state, so that a step does not see what an earlier one left.
        seeds: at least 3, one of them hostile (`ADVERSARIAL_SEED`).
        training: tolerances of a training step.
    """
    assert len(seeds) >= 3, seeds
    reports: list[SeedReport] = []
    repeatable = True
    for number, seed in enumerate(seeds):
        reference = snapshot(subject.outputs(seed, Role.EAGER))
        result = snapshot(subject.outputs(seed, Role.CANDIDATE))
        if number == 0:
            difference = bitwise_difference(reference, snapshot(subject.outputs(seed, Role.EAGER)))
            if difference is not None:
                return AccuracyReport(False, f"{NONDETERMINISTIC}: {difference}", False, ())
            repeatable = bitwise_difference(result, snapshot(subject.outputs(seed, Role.CANDIDATE))) is None
        reports.append(SeedReport(seed, _compare(subject, seed, result, reference, training)))
    assert any(report.comparison.leaves for report in reports), "the subject has no outputs to compare"
    bad = next((r for r in reports if not r.comparison.ok), None)
    reason = "accurate" if bad is None else f"seed {bad.seed}: {bad.comparison.reason}"
    return AccuracyReport(bad is None, reason, repeatable, tuple(reports))


def failure(report: dict[str, Any]) -> Failure | None:
    """The record of a report that does not pass; None where it passes."""
    return None if report["ok"] else Failure(FailureKind.INACCURATE, report["reason"])


def snapshot(tree: Any) -> dict[str, Any]:
    """Copies of all leaves by path, so that the next run can overwrite its buffers."""
    return {path: _copy(leaf) for path, leaf in walk(tree)}


def _compare(
    subject: Subject, seed: int, result: dict[str, Any], reference: dict[str, Any], training: bool
) -> TreeComparison:
    """The float64 run is made only where a leaf needs it."""
    return compare_trees(result, reference, lambda: snapshot(subject.outputs(seed, Role.FLOAT64)), training=training)


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf.kind.__qualname__ if isinstance(leaf, Container) else leaf


def _plain(leaf: Comparison) -> dict[str, Any]:
    fields = dataclasses.asdict(leaf)
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
