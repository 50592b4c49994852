"""Runs a benchmark: every cell (workload, mode, length) against torch.compile, one row a provider as it finishes."""

from __future__ import annotations

import math
import os
import pathlib
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusewright.autotune.accuracy import NONDETERMINISTIC, SEEDS
from fusewright.autotune.stats import Comparison, Verdict
from fusewright.autotune.timing import BASELINE, Plan, measure_pairs
from fusewright.autotune.trial import Failure, Json, Progress, Provider, no_progress
from fusewright.autotune.worker import DEFAULT_LIMITS, Limits, Worker
from fusewright.bench.limits import measure_limits
from fusewright.bench.rivals import BEST_OF, INFERENCE_ONLY
from fusewright.bench.rows import Row, provenance, with_rates
from fusewright.errors import UserInputError, unknown_name
from fusewright.job_file import load_workloads, source_of

SUBJECT = "fusewright.bench.rivals:RivalSubject"
MODES = ("inference", "training")
CANDIDATES = ("eager", "compile_best", "onnxruntime", "openvino", "fusewright")
BEST = "compile_best"
IDENTITY = ("workload", "family", "mode", "bucket", "cell")
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FUSEWRIGHT_CACHE_DIR")

SUITE_PLAN = Plan(budget_s=120.0, most_pairs=4)


@dataclass(frozen=True)
class SuiteCell:
    """One line of the suite's plan."""

    source: str
    workload: str
    family: str
    mode: str
    length: int
    length_name: str

    @property
    def name(self) -> str:
        """For people and for `--resume`."""
        return f"{self.workload} {self.mode} {self.length_name}={self.length}"

    def identity(self) -> Row:
        """What names the cell in a row."""
        bucket = f"{self.length_name}={self.length}"
        return dict(zip(IDENTITY, (self.workload, self.family, self.mode, bucket, self.name), strict=True))

    def provider(self, name: str, folder: pathlib.Path) -> Provider:
        """How a worker gets this cell run by provider `name`, with all its caches below `folder`.

        Caches that two providers shared would make the cold start of the second one look short.
        """
        training = self.mode == "training"
        kwargs: dict[str, Json] = {"source": self.source, "length": self.length, "training": training, "provider": name}
        return Provider(SUBJECT, kwargs, {variable: str(folder / name / variable) for variable in CACHES})


def plan_cells(place: str, only: Sequence[str], modes: Sequence[str], lengths: Sequence[int] = ()) -> list[SuiteCell]:
    """The cells of the workloads in `place`.

    Raises:
        UnknownNameError: `only` or `modes` names something that is not there.
        UserInputError: a length that a workload does not have.
    """
    workloads = load_workloads(place)
    for name in only:
        if name not in workloads:
            raise unknown_name("workload", name, workloads)
    for mode in modes:
        if mode not in MODES:
            raise unknown_name("mode", mode, MODES)
    cells = []
    for name in only or workloads:
        workload = workloads[name]
        if strange := set(lengths) - set(workload.lengths):
            known = ", ".join(map(str, workload.lengths))
            raise UserInputError(f"--length: {name} has no length {', '.join(map(str, strange))}; it has {known}.")
        for mode in modes:
            if mode == "training" and not workload.train:
                continue
            for length in workload.lengths:
                if not lengths or length in lengths:
                    axis = workload.length_name or "static"
                    cells.append(SuiteCell(source_of(place, name), name, workload.family, mode, length, axis))
    return cells


@dataclass(frozen=True)
class Suite:
    """The settings of a run.

    Attributes:
        plan: how long a cell is measured.
        limits: what a worker may use.
        threads: of every process alike; None leaves torch's default.
        candidates: the providers that run beside torch.compile.
        progress: told what is going on.
    """

    plan: Plan = SUITE_PLAN
    limits: Limits = DEFAULT_LIMITS
    threads: int | None = None
    candidates: tuple[str, ...] = CANDIDATES
    progress: Callable[[Progress], None] = no_progress

    def run(self, cells: Sequence[SuiteCell], done: Collection[str] = ()) -> Iterator[list[Row]]:
        """Measure each cell that is not in `done`, and yield its rows as soon as it is finished."""
        limits: dict[str, float] = {}
        for number, cell in enumerate(cells):
            self.progress(Progress("cell", cell.name, number, len(cells)))
            if cell.name not in done:
                with tempfile.TemporaryDirectory() as folder:
                    names = ("compile", *candidates_of(self.candidates, cell.mode))
                    providers = {name: cell.provider(name, pathlib.Path(folder)) for name in names}
                    limits = limits or measure_limits(self.threads)
                    yield with_rates(self._measure(cell, providers), limits)

    def _measure(self, cell: SuiteCell, providers: Mapping[str, Provider]) -> list[Row]:
        load_before = os.getloadavg()[0]
        training = cell.mode == "training"
        checks = {name: self._check(one, training) for name, one in providers.items() if name != "eager"}
        if any(check["accuracy"] == NONDETERMINISTIC for check in checks.values()):
            return _not_scored(cell.identity() | provenance(self.threads), providers, checks)
        measured = measure_pairs(
            {name: one for name, one in providers.items() if name != "compile"},
            providers["compile"],
            self.plan,
            limits=self.limits,
            threads=self.threads,
            progress=self.progress,
        )
        load = [round(load_before, 2), round(os.getloadavg()[0], 2)]
        shared = cell.identity() | provenance(self.threads) | {"load": load}
        rows = []
        # of fusewright's comparison where there is one: its pairs are those that the ratio beside it comes from
        order = sorted(measured.results.items(), key=lambda item: item[0] != "fusewright")
        finished = [r for _, r in order if isinstance(r, Comparison) and r.rounds]
        for name in providers:
            row: Row = dict(shared) | {
                "provider": name,
                "plan": "default",
                **checks.get(name, {"accuracy": "reference"}),
            }
            built = measured.built.get(BASELINE if name == "compile" else name)
            row["warm_s"] = None if built is None else round(built.first_step_s, 3)
            row |= {k: v for k, v in built.facts.items() if k != "proof"} if built is not None else {}
            if name == "compile":
                row["median_ms"] = round(finished[0].baseline_s * 1e3, 4) if finished else None
                row["failure"] = None if measured.baseline_failure is None else str(measured.baseline_failure)
            else:
                found = measured.results[name]
                row |= _timing(found, measured.baseline_failure)
                if name == "eager" and isinstance(found, Failure):
                    row["accuracy"] = None
            rows.append(row)
        return rows + ([best_of(rows)] if BEST in self.candidates else [])

    def _check(self, provider: Provider, training: bool) -> Row:
        """Accuracy, cold start and peak memory of one provider, in one process that is not timed against others."""
        with Worker(provider, limits=self.limits, threads=self.threads) as worker:
            built = worker.build()
            if isinstance(built, Failure):
                return {"accuracy": None, "accuracy_detail": str(built)}
            report = worker.check(SEEDS, training=training)
            costs = worker.costs()
        row: Row = {"cold_s": round(built.first_step_s, 3)}
        if "proof" in built.facts:  # of the cold start: a warm one counts nothing
            row["proof"] = built.facts["proof"]
        if isinstance(built.facts.get("seconds"), dict):
            row["verify_s"] = round(built.facts["seconds"].get("verify", 0.0), 3)
        if isinstance(costs, Failure):
            row["costs_failure"] = str(costs)
        else:
            row |= {"peak_mb": round(costs["peak_mb"], 2) if "peak_mb" in costs else None, "flops": costs["flops"]}
        if isinstance(report, Failure):
            return row | {"accuracy": None, "accuracy_detail": str(report)}
        nondeterministic = report["reason"].startswith(NONDETERMINISTIC)
        accuracy = NONDETERMINISTIC if nondeterministic else report["ok"]
        return row | {"accuracy": accuracy, "accuracy_detail": report["reason"]}


def _not_scored(shared: Row, providers: Collection[str], checks: Mapping[str, Row]) -> list[Row]:
    """The rows of a cell whose eager model gives other results each time: nothing can be held against it."""
    why = {"accuracy": NONDETERMINISTIC, "failure": "not timed: eager disagrees with itself"}
    return [shared | {"provider": name, "plan": "default"} | checks.get(name, {}) | why for name in providers]


def candidates_of(names: Sequence[str], mode: str) -> list[str]:
    """The providers behind `names`, once each; those that only infer are left out in training."""
    every = [one for name in names for one in (BEST_OF if name == BEST else (name,))]
    return [name for name in dict.fromkeys(every) if mode == "inference" or name not in INFERENCE_ONLY]


def rows_of(names: Sequence[str], mode: str) -> set[str]:
    """The providers that a finished cell has rows of."""
    return {"compile", *candidates_of(names, mode), *(name for name in names if name == BEST)}


def best_of(rows: Sequence[Row]) -> Row:
    """A row `compile_best`: that of the fastest accurate setting of torch.compile, which `setting` names.

    It is the default unless a setting is proven faster. With several tried, the best looks a little too good.
    """
    tried = [r for r in rows if r["provider"] in ("compile", *BEST_OF) and r["accuracy"] is True and r.get("median_ms")]
    if not tried:
        kept = {k: v for k, v in rows[0].items() if k in (*IDENTITY, *provenance(), "plan", "load")}
        return kept | {"provider": BEST, "accuracy": None, "failure": "no setting ran and was accurate"}
    faster = [row for row in tried if row.get("verdict") == Verdict.FASTER.value]
    default = next((row for row in tried if row["provider"] == "compile"), None)
    best = default if default is not None and not faster else max(faster or tried, key=_ratio_or_one)
    return dict(best) | {"provider": BEST, "setting": best["provider"]}


def _ratio_or_one(row: Row) -> float:
    return float(row.get("ratio_vs_compile") or 1.0)


def _timing(found: Comparison | Failure, baseline_failure: Failure | None) -> Row:
    if isinstance(found, Failure):
        return {"verdict": "undecided", "failure": str(found)}
    if baseline_failure is not None and not found.rounds:
        return {"verdict": "undecided", "failure": f"torch.compile, the baseline, failed: {baseline_failure}"}
    if not found.rounds or math.isnan(found.ratio):
        return {"verdict": "undecided", "failure": "not measured within the budget"}
    return {
        "median_ms": round(found.candidate_s * 1e3, 4),
        "ratio_vs_compile": round(found.ratio, 4),
        "ci_low": round(found.ci_low, 4) if math.isfinite(found.ci_high) else None,
        "ci_high": round(found.ci_high, 4) if math.isfinite(found.ci_high) else None,
        "rounds": found.rounds,
        "pairs": found.pairs,
        "verdict": found.verdict.value,
    }
