"""Draws `fusewright tune` and `fusewright store`: progress, decisions, and the evidence behind each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fusewright.autotune.jobs import TuningJob, workload_job
from fusewright.autotune.search import BUDGETS, CellResult, Tuner, tune
from fusewright.autotune.space import variants
from fusewright.autotune.storage.store import TuningStore
from fusewright.autotune.trial import Progress as Step
from fusewright.bench.cells import plan_cells
from fusewright.capture.variant import GraphVariant
from fusewright.config import Effort, read_settings, to_enum
from fusewright.errors import UserInputError
from fusewright.job_file import resolve


def store_place(given: str) -> str:
    """The store to use: as given, else `FUSEWRIGHT_STORE`, else a file in the cache folder."""
    return given or read_settings().store_place()


def open_store(given: str) -> TuningStore:
    """Open a store to read it.

    Raises:
        UserInputError: there is none.
    """
    place = store_place(given)
    try:
        return TuningStore(place, read_only=True)
    except FileNotFoundError:
        raise UserInputError(
            f"store: {place} does not exist; `fusewright tune JOB` makes it, --store names another."
        ) from None


def run_tune(
    job: str,
    only: Sequence[str],
    modes: Sequence[str],
    lengths: Sequence[int],
    effort: str,
    store: str,
    *,
    console: Console,
    progress: Console,
) -> list[CellResult]:
    """Tune every cell of a job; decisions are in the store as soon as each is made."""
    level = to_enum(Effort, effort, "effort")
    if level not in BUDGETS:
        raise UserInputError("effort: 'none' measures nothing; use 'quick' or 'full'.")
    place = store_place(store)
    cells = plan_cells(job, only, modes, lengths)
    jobs = _jobs(cells)
    results: list[CellResult] = []
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=progress) as bar:
        task = bar.add_task("starting", total=None)

        def tell(step: Step) -> None:
            label = f"{step.stage}: {step.subject}"
            bar.update(task, description=label, total=step.budget_s or None, completed=step.spent_s)

        tuner = Tuner(TuningStore(place), variants(level), budget=BUDGETS[level], progress=tell)
        for one in jobs:
            results += tune(one, tuner)
    for result in results:
        winner = "nothing ran" if result.winner is None else result.winner.label()
        again = " (decided earlier)" if result.resumed else ""
        console.print(Text.assemble(f"{result.cell}: ", (winner, "bold"), f"{again}: {result.reason}"))
    console.print(Text(f"store: {place}"))
    return results


def _jobs(cells: Sequence[Any]) -> list[TuningJob]:
    """One job a workload, holding just the cells that were asked for."""
    jobs = []
    for source in dict.fromkeys(cell.source for cell in cells):
        wanted = {(c.mode == "training", c.length) for c in cells if c.source == source}
        modes = [m for m in ("inference", "training") if any(t == (m == "training") for t, _ in wanted)]
        whole = workload_job(source, resolve(source), modes=modes)
        kept = tuple(c for c in whole.cells if (c.training, c.provider.kwargs["length"]) in wanted)
        jobs.append(TuningJob(whole.name, kept))
    return jobs


def list_decisions(store: str, console: Console, *, as_json: bool) -> None:
    """Print every decision of a store."""
    rows = open_store(store).decisions()
    if as_json:
        console.print_json(json.dumps([dict(row) for row in rows]))
        return
    if not rows:
        console.print("no decision yet: `fusewright tune JOB` makes some")
        return
    table = Table("key", "cell", "bucket", "winner", "why", show_edge=False)
    for row in rows:
        evidence, key = json.loads(row["evidence"]), json.loads(row["key_json"])
        bucket = " ".join(f"{n}={a}..{b}" for n, a, b in key["bucket"]) or "static"
        winner = GraphVariant.from_json(row["variant"]).label()
        table.add_row(*map(escape, (row["key"][:12], evidence["cell"], bucket, winner, evidence["reason"])))
    console.print(table)


def explain_decision(store: str, key: str, console: Console, *, as_json: bool) -> None:
    """Print why the variant of `key` (or of the one key that starts so) won.

    Raises:
        UserInputError: no key, or several, start so.
    """
    opened = open_store(store)
    found = [row for row in opened.decisions() if row["key"].startswith(key)]
    if len(found) != 1:
        raise UserInputError(f"key: {len(found)} keys start with {key!r}; `fusewright store ls` lists them.")
    decision, rows = found[0], opened.why(found[0]["key"])
    if as_json:
        console.print_json(json.dumps({"decision": dict(decision), "measurements": [dict(r) for r in rows]}))
        return
    evidence = json.loads(decision["evidence"])
    console.print(Text(f"{evidence['cell']}: {evidence['reason']}"))
    table = Table("stage", "variant", "against", "ratio", "95 % interval", "pairs", "status", show_edge=False)
    for column in table.columns[:3]:
        column.overflow = "fold"
    for row in rows:
        baseline = GraphVariant.from_json(row["baseline"]).label() if row["baseline"] else "-"
        ratio = f"{row['ratio']:.3f}x" if row["ratio"] else "-"
        interval = f"{row['ci_low']:.3f} to {row['ci_high']:.3f}" if row["ci_high"] else "-"
        variant = GraphVariant.from_json(row["variant"]).label()
        cells = (row["stage"], variant, baseline, ratio, interval, str(row["pairs"] or "-"), row["status"])
        table.add_row(*map(escape, cells))
    console.print(table)
