"""Runs a job's workloads once to explain them or to compare them with eager; behind `explain` and `check`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.text import Text
from torch import nn

from fusewright.autotune.jobs import load
from fusewright.bench.cells import SuiteCell, plan_cells
from fusewright.bench.rivals import OPTIMIZE
from fusewright.capture.record import Record
from fusewright.job_file import resolve
from fusewright.numerics import TreeComparison, compare_trees
from fusewright.report.explain import Explanation, explain_record
from fusewright.tools.layers import BadLayer, Call, first_bad_layer
from fusewright.workload import Workload, observe, observe_step

CHECKED_STEPS = 3


@dataclass(frozen=True)
class Told:
    """The explanation of one workload in one mode."""

    title: str
    explanation: Explanation

    def to_dict(self) -> dict[str, Any]:
        """The explanation with its title."""
        return {"title": self.title, **self.explanation.to_dict()}


@dataclass(frozen=True)
class Checked:
    """How one cell compares with eager; printable by rich."""

    title: str
    comparison: TreeComparison
    explanation: Explanation
    layer: BadLayer | None = None

    @property
    def ok(self) -> bool:
        """True where every leaf agrees by the accuracy rule."""
        return self.comparison.ok

    def to_dict(self) -> dict[str, Any]:
        """Verdict, reason, worst leaf and failing leaves, and what was rewritten and fell back."""
        worst = self.comparison.worst
        told = self.explanation.data
        return {
            "title": self.title,
            "ok": self.ok,
            "reason": self.comparison.reason,
            "leaves": len(self.comparison.leaves),
            "worst": None if worst is None else worst.to_dict(),
            "failing": [leaf.to_dict() for leaf in self.comparison.leaves if not leaf.ok][:5],
            "layer": None if self.layer is None else str(self.layer),
            "rewrites": told["rewrites"],
            "fallbacks": told["fallbacks"],
            "torch": torch.__version__,
        }

    def __rich__(self) -> Text:
        worst = self.comparison.worst
        detail = self.comparison.reason if not self.ok or worst is None else f"worst leaf {worst.path}: {worst.reason}"
        fallbacks = len(self.explanation.data["fallbacks"])
        tail = f"; {fallbacks} fallbacks, see `fusewright explain`" if fallbacks else ""
        mark = ("agrees", "green") if self.ok else ("DISAGREES", "bold red")
        where = ""
        if self.layer is not None:
            caught = "\n  first-call verification turned a lowering away" if self.ok else ""
            where = f"{caught}\n  {self.layer}"
        return Text.assemble(
            f"{self.title}: ", mark, f" on {len(self.comparison.leaves)} leaves; {detail}{tail}{where}"
        )


def _optimized(workload: Workload, model: nn.Module, **options: Any) -> nn.Module:
    """Optimize a copy of `model` in the buckets of its workload's lengths."""
    name = workload.length_name
    edges = sorted({max(length, 2) for length in workload.lengths})
    made: nn.Module = load(OPTIMIZE)(
        copy.deepcopy(model), dims=workload.dims, buckets=None if name is None else {name: edges}, **options
    )
    return made


def _record(model: nn.Module) -> Record:
    record = load("fusewright.api:record_of")(model)
    assert isinstance(record, Record)
    return record


def explain_job(
    job: str, only: Sequence[str], modes: Sequence[str], lengths: Sequence[int], *, strict: bool
) -> Iterator[Told]:
    """Run every workload in every mode at the given lengths (default: the smallest) and yield what happened."""
    groups: dict[tuple[str, str], list[SuiteCell]] = {}
    for cell in plan_cells(job, only, modes, lengths):
        groups.setdefault((cell.source, cell.mode), []).append(cell)
    for (source, mode), cells in groups.items():
        workload = resolve(source)
        model = _optimized(workload, workload.build(training=mode == "training"), strict=strict)
        for cell in cells if lengths else cells[:1]:
            observe(workload, model, cell.length, training=mode == "training")
        yield Told(f"{workload.name} {mode}", explain_record(_record(model)))


def check_job(job: str, only: Sequence[str], modes: Sequence[str], lengths: Sequence[int]) -> Iterator[Checked]:
    """Compare optimized against eager, and where they differ against float64, cell by cell; training takes 3 steps.

    The rule is `numerics.compare_trees`. Where the result is wrong, or verification had to turn a lowering away, the
    first layer that differs without verification is named.
    """
    for cell in plan_cells(job, only, modes, lengths):
        workload, training = resolve(cell.source), cell.mode == "training"
        eager = workload.build(training=training)
        model = _optimized(workload, eager)
        wide = copy.deepcopy(eager).double()
        run = functools.partial(observe_step, workload, length=cell.length, training=training, steps=CHECKED_STEPS)
        expected, found = run(model=eager), run(model=model)
        comparison = compare_trees(found, expected, functools.partial(run, model=wide), training=training)
        told = explain_record(_record(model))
        turned_away = any(f["kind"] == "verification" for f in told.data["fallbacks"])
        layer = _first_bad_layer(workload, eager, cell) if turned_away or not comparison.ok else None
        yield Checked(cell.name, comparison, told, layer)


def _first_bad_layer(workload: Workload, eager: nn.Module, cell: SuiteCell) -> BadLayer | None:
    args, kwargs = workload.make_inputs(cell.length)
    optimize = load(OPTIMIZE)
    training = cell.mode == "training"
    return first_bad_layer(eager, Call(args, kwargs), lambda m: optimize(m, verify="off"), training=training)
