"""Compares two result files of `fusewright bench`: what became faster, slower or wrong from one to the other."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fusewright.bench.rows import COMPARABLE_BY, Row, newest, read_rows
from fusewright.errors import UserInputError

WRONG, FAILS = "WRONG NOW", "FAILS NOW"


@dataclass(frozen=True)
class Change:
    """One provider in one cell, before and after.

    Attributes:
        cell: as in the rows.
        provider: as in the rows.
        ratio: how many times as fast, against torch.compile in the same run, B is as A; NaN where a file has no ratio.
        ci_low: lower end of the 95 % interval of `ratio`.
        ci_high: upper end; NaN where a file has none, as with fewer than three pairs of processes.
        accuracy: of A and of B, as in the rows.
    """

    cell: str
    provider: str
    ratio: float
    ci_low: float
    ci_high: float
    accuracy: tuple[Any, Any]

    @property
    def verdict(self) -> str:
        """What may be said: an interval that holds 1 shows no difference, which is not the same as being equal."""
        if self.accuracy[0] is True and self.accuracy[1] is False:
            return WRONG
        if self.accuracy[0] in (True, "reference") and self.accuracy[1] is None:
            return FAILS
        if math.isnan(self.ci_high):
            return "undecided"
        if self.ci_low > 1:
            return "faster"
        return "slower" if self.ci_high < 1 else "no difference shown"

    def to_dict(self) -> dict[str, Any]:
        """The fields and the verdict, for JSON: null stands for NaN."""
        fields = {name: None if value != value else value for name, value in asdict(self).items()}
        return fields | {"verdict": self.verdict}


def changes(before: Sequence[Row], after: Sequence[Row]) -> list[Change]:
    """Each provider and cell that both have, in the order of `after`; torch.compile only where it is worse than slow.

    Times of two runs are never held against each other (PROTOCOLS T1): each run's ratio to its own torch.compile is.
    The interval treats the two runs as independent and the log-ratios as normal.
    """
    old = {(row["cell"], row["provider"]): row for row in newest(before)}
    pairs = [(old[key], row) for row in newest(after) if (key := (row["cell"], row["provider"])) in old]
    found = [_change(a, b) for a, b in pairs]
    return [change for change in found if change.provider != "compile" or change.verdict in (WRONG, FAILS)]


def _change(a: Row, b: Row) -> Change:
    ratio = ci_low = ci_high = math.nan
    if a.get("ratio_vs_compile") and b.get("ratio_vs_compile"):
        log = math.log(b["ratio_vs_compile"] / a["ratio_vs_compile"])
        half = math.hypot(_half_width(a), _half_width(b))
        ratio, ci_low, ci_high = (math.exp(x) for x in (log, log - half, log + half))
    return Change(b["cell"], b["provider"], ratio, ci_low, ci_high, (a.get("accuracy"), b.get("accuracy")))


def _half_width(row: Row) -> float:
    if not row.get("ci_low") or not row.get("ci_high"):
        return math.nan
    return math.log(row["ci_high"] / row["ci_low"]) / 2


def compare_files(before: pathlib.Path, after: pathlib.Path) -> tuple[list[Change], list[str], Group]:
    """The changes between two files, what differs beside the code, and how to show both.

    Raises:
        UserInputError: a file without rows, or two files without a common cell.
    """
    sides = [newest(_rows(path)) for path in (before, after)]
    found = changes(*sides)
    if not found:
        raise UserInputError(f"--compare: {before} and {after} have no cell and provider in common.")
    drawn = Table("cell", "provider", "B against A", "verdict", show_edge=False, pad_edge=False)
    for change in found:
        interval = "" if math.isnan(change.ci_high) else f" ({change.ci_low:.3f} to {change.ci_high:.3f})"
        ratio = "-" if math.isnan(change.ratio) else f"{change.ratio:.3f}x{interval}"
        drawn.add_row(change.cell, change.provider, ratio, change.verdict)
    counts = {name: sum(c.verdict == name for c in found) for name in dict.fromkeys(c.verdict for c in found)}
    cautions = _differences(*sides)
    told = [f"A: {before}", f"B: {after}", "B against A: of each run's ratio to its own torch.compile", *cautions]
    alone = [{row["cell"] for row in side} for side in sides]
    told += [
        f"only in {name}: {', '.join(sorted(mine - other))}"
        for name, mine, other in zip("AB", alone, alone[::-1], strict=True)
        if mine - other
    ]
    total = ", ".join(f"{count} {name}" for name, count in counts.items())
    return found, cautions, Group(Text("\n".join(told)), drawn, Text(total))


def _rows(path: pathlib.Path) -> list[Row]:
    rows = [row for row in read_rows(path) if {"cell", "provider"} <= row.keys()]
    if not rows:
        raise UserInputError(
            f"--compare: {path} {'holds no rows of a benchmark' if path.exists() else 'is not there'}."
        )
    return rows


def _differences(before: Sequence[Row], after: Sequence[Row]) -> list[str]:
    """A line for each thing beside the code in which the runs differ."""
    lines = []
    for name in COMPARABLE_BY:
        a, b = ({str(row.get(name)) for row in side} for side in (before, after))
        if a != b:
            lines.append(f"CAUTION: {name} differs: {', '.join(sorted(a))} in A, {', '.join(sorted(b))} in B")
    return lines
