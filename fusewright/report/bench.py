"""Draws `fusewright bench`: progress while it runs, a table and family means at the end."""

from __future__ import annotations

import importlib.util
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fusewright.autotune.timing import Plan
from fusewright.autotune.trial import Progress as Step
from fusewright.bench.cells import BEST, CANDIDATES, Suite, SuiteCell, plan_cells, rows_of
from fusewright.bench.engines import missing
from fusewright.bench.rivals import PROVIDERS
from fusewright.bench.rows import (
    Row,
    append_rows,
    check_same_place,
    check_writable,
    machine_name,
    newest,
    read_rows,
    whole_cells,
)
from fusewright.errors import UserInputError, unknown_name

OURS = ("fusewright", "fusewright_exact")
SUITE = "benchmarks.workloads:COMPARABLE"


def run_bench(
    job: str,
    *,
    only: Sequence[str],
    modes: Sequence[str],
    lengths: Sequence[int],
    budget_s: float,
    most_pairs: int,
    output: pathlib.Path | None,
    resume: bool,
    console: Console,
    providers: Sequence[str] = CANDIDATES,
) -> list[Row]:
    """Measure the cells, append each one's rows to `output` as it finishes, and return all rows.

    Raises:
        UnknownNameError: a provider that there is not; torch.compile always runs and is not named.
        UserInputError: no job is given and the suite is not importable, or `resume` without an output file.
    """
    suite_at = importlib.util.find_spec("benchmarks")
    if not job and (suite_at is None or suite_at.origin is None):
        raise UserInputError("bench: the suite is only in a checkout; give a job file such as my_job.py.")
    if resume and output is None:
        if job or suite_at is None or suite_at.origin is None:
            raise UserInputError("--resume: needs --output, the file that holds the finished cells.")
        output = pathlib.Path(suite_at.origin).parent / "results" / machine_name() / "bench.jsonl"
        console.print(f"rows go to {output}")
    providers = _installed(providers, console)
    cells = plan_cells(job or SUITE, only, modes, lengths)
    if idle := next((mode for mode in modes if len(rows_of(providers, mode)) == 1), None):
        raise UserInputError(f"--providers: nothing would run beside torch.compile in {idle}; name another one.")
    if output is not None:
        check_writable(output)
    rows, done = _finished(output, cells, providers) if resume and output is not None else ([], set())
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f} cells"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("starting", total=len(cells))

        def tell(step: Step) -> None:
            if step.stage == "cell":
                bar.update(task, completed=step.done, description=step.subject)
            else:
                bar.update(task, description=f"{bar.tasks[0].description.split(' | ')[0]} | {step.subject}")

        plan = Plan(budget_s=budget_s, most_pairs=most_pairs)
        suite = Suite(plan, candidates=tuple(providers), progress=tell)
        try:
            for cell_rows in suite.run(cells, done):
                rows += cell_rows
                if output is not None:
                    append_rows(output, cell_rows)
        except KeyboardInterrupt:
            console.print(table(rows) if rows else "no cell was finished")
            raise
        bar.update(task, completed=len(cells))
    return rows


def _finished(output: pathlib.Path, cells: Sequence[SuiteCell], providers: Sequence[str]) -> tuple[list[Row], set[str]]:
    """The rows that the file holds of `cells`, and the cells that it holds whole."""
    found = read_rows(output)
    check_same_place(found, output)
    wanted = {cell.name: rows_of(providers, cell.mode) for cell in cells}
    done = whole_cells(found, wanted)
    return [row for row in newest(found) if row["cell"] in done and row["provider"] in wanted[row["cell"]]], done


def _installed(providers: Sequence[str], console: Console) -> list[str]:
    """Those that can run here; says of each other one what it lacks."""
    known = [name for name in (*PROVIDERS, BEST) if name != "compile"]
    for name in providers:
        if name not in known:
            raise unknown_name("provider", name, known)
    absent = {name: why for name in providers if (why := missing(name))}
    for why in absent.values():
        console.print(why)
    return [name for name in providers if name not in absent]


def table(rows: Sequence[Row]) -> Group:
    """A block a cell, narrow enough for 80 columns, then each provider's geometric mean over families."""
    parts: list[Any] = []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        drawn = Table("", "ms", "against torch.compile", "verdict", "accurate", show_edge=False, pad_edge=False)
        mine = [row for row in rows if row["cell"] == cell]
        for row in mine:
            drawn.add_row(_name(row), _ms(row), _ratio(row), row.get("verdict", ""), _accuracy(row))
        work = [_work(row) for row in mine if row["provider"] in OURS]
        parts += [Text(cell, style="bold"), drawn, Text("\n".join(f"rewritten: {text}\n" for text in work))]
    return Group(*parts, Text(summary(rows)))


def _name(row: Row) -> str:
    return f"{row['provider']} ({row['setting']})" if row.get("setting") else str(row["provider"])


def _ratio(row: Row) -> str:
    if not row.get("ratio_vs_compile"):
        return "-"
    high = row["ci_high"]
    if high is None:
        return f"({row['ratio_vs_compile']:.3f}x, under 3 pairs)"
    return f"{row['ratio_vs_compile']:.3f}x ({row['ci_low']:.3f} to {high:.3f})"


def _ms(row: Row) -> str:
    return f"{row['median_ms']:.2f}" if row.get("median_ms") is not None else row.get("failure") or "-"


def _accuracy(row: Row) -> str:
    value = row.get("accuracy")
    return {True: "yes", False: "NO", None: "failed"}[value] if not isinstance(value, str) else value


def _work(row: Row) -> str:
    rewrites = ", ".join(f"{name} {n}" for name, n in row.get("rewrites", {}).items()) or "nothing"
    verified = row.get("verified", [])
    good = sum(v["ok"] is True for v in verified)
    fallbacks = sum(f["count"] for f in row.get("fallbacks", []))
    return f"{rewrites}; {good} of {len(verified)} graphs verified" + (f"; {fallbacks} fallbacks" if fallbacks else "")


def summary(rows: Sequence[Row]) -> str:
    """Per provider, the geometric mean of its ratios against torch.compile with a 95 % interval.

    Taken over a family's cells first, then over families, and over all accurate cells with an interval: leaving out the
    undecided would leave out the close ones. The interval takes cells as independent and log-ratios as normal.
    """
    lines = []
    for provider in dict.fromkeys(row["provider"] for row in rows):
        mine = [r for r in rows if r["provider"] == provider and r.get("accuracy") in (True, "reference")]
        usable = [r for r in mine if r.get("ci_high") or r.get("setting") == "compile"]
        if not usable or provider == "compile":
            continue
        families: dict[str, list[Row]] = {}
        for row in usable:
            families.setdefault(f"{row['family']} {row['mode']}", []).append(row)
        means = {name: _mean([_log(r) for r in found]) for name, found in families.items()}
        parts = ", ".join(f"{name} {_as_ratio(mean)}" for name, mean in sorted(means.items()))
        undecided = sum(row.get("verdict") == "undecided" for row in usable)
        counts = f"{len(usable)} cells, {undecided} undecided"
        lines.append(f"{provider}: geometric mean {_as_ratio(_mean(list(means.values())))} of {counts} ({parts})")
    return "\n".join(lines) or "no cell is both accurate and measured in 3 pairs: a longer --budget lets them fit"


LogRatio = tuple[float, float]  # centre and half-width of the 95 % interval


def _log(row: Row) -> LogRatio:
    if row.get("setting") == "compile":  # the best setting is the default itself
        return 0.0, 0.0
    return math.log(row["ratio_vs_compile"]), math.log(row["ci_high"] / row["ci_low"]) / 2


def _mean(logs: Sequence[LogRatio]) -> LogRatio:
    return sum(c for c, _ in logs) / len(logs), math.hypot(*(half for _, half in logs)) / len(logs)


def _as_ratio(log: LogRatio) -> str:
    centre, half = log
    return f"{math.exp(centre):.3f}x ({math.exp(centre - half):.3f} to {math.exp(centre + half):.3f})"
