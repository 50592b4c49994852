"""The line a provider at the end of a run: geometric means over families, and intervals that hold the cells' noise."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fusewright.report.bench import summary


def row(ratio: float, family: str = "language", half: float = 0.02, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"provider": "fusewright", "family": family, "mode": "inference", "accuracy": True}
    made |= {"ratio_vs_compile": ratio, "ci_low": ratio / (1 + half), "ci_high": ratio * (1 + half), "verdict": "same"}
    return made | more


def numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"(\d\.\d{3})x? ?", text)]


def test_a_family_counts_once_however_many_cells_it_has() -> None:
    line = summary([row(2.0), row(2.0), row(2.0), row(0.5, "small")])
    mean, low, high = numbers(line)[:3]
    assert mean == pytest.approx(1.0, abs=1e-3)
    # half-widths: 0.02 / sqrt(3) of three cells, 0.02 of one; over two families half of their hypotenuse
    assert high - 1 == pytest.approx((0.02**2 / 3 + 0.02**2) ** 0.5 / 2, abs=1.5e-3)
    assert 1 - low == pytest.approx(high - 1, abs=1.5e-3)
    assert "language inference 2.000x" in line


def test_undecided_cells_count_and_are_counted_and_wrong_ones_do_not() -> None:
    rows = [row(1.0), row(1.2, half=0.3, verdict="undecided"), row(9.0, accuracy=False), row(9.0, accuracy=None)]
    line = summary(rows)
    assert "2 cells, 1 undecided" in line
    assert numbers(line)[0] == pytest.approx(1.2**0.5, abs=1e-3)


def test_torch_compile_at_its_best_is_at_least_its_default() -> None:
    best = {"provider": "compile_best", "setting": "compile", "family": "small", "mode": "inference", "accuracy": True}
    line = summary([best, row(1.21, "small", provider="compile_best", setting="compile_freezing")])
    assert line.startswith("compile_best: geometric mean 1.100x")


def test_nothing_measured_says_so() -> None:
    assert "no cell" in summary([row(1.0, ci_high=None), {"provider": "compile", "accuracy": True}])
