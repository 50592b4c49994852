"""docs/passes.md has one row a pass, in the order they run, and says of each what the code says."""

from __future__ import annotations

import pathlib
import re

import pytest

from fusewright.capture.shapes import ShapeBucket
from fusewright.passes.base import Pass
from fusewright.pipeline.order import ORDER

ROOT = pathlib.Path(__file__).resolve().parents[2]
COLUMNS = ["pass", "what it rewrites", "stage", "tier", "shapes and devices", "default", "gain"]


def rows() -> list[dict[str, str]]:
    lines = [line for line in (ROOT / "docs" / "passes.md").read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert cells[0] == COLUMNS
    return [dict(zip(COLUMNS, row, strict=True)) for row in cells[2:]]


def test_a_row_per_pass_in_their_order() -> None:
    assert [row["pass"] for row in rows()] == [f"`{p.name}`" for p in ORDER]


@pytest.mark.parametrize("one", ORDER, ids=lambda p: p.name)
def test_a_row_says_what_the_code_says(one: Pass) -> None:
    (row,) = (row for row in rows() if row["pass"] == f"`{one.name}`")
    assert row["stage"] == one.stage.value
    assert row["tier"] == one.numerics.value
    assert row["default"] == ("on" if one.default else "off")
    on_cpu, on_cuda = (one.applies(ShapeBucket(), device) for device in ("cpu", "cuda"))
    assert re.split(r"[;,]", row["shapes and devices"])[0] == {
        (True, True): "all", (False, True): "CUDA", (True, False): "CPU",
    }[on_cpu, on_cuda]  # fmt: skip
    assert len(row["what it rewrites"]) > 20


def test_a_gain_has_a_measurement() -> None:
    measured = "".join(path.read_text() for path in (ROOT / "benchmarks" / "results").rglob("*.jsonl"))
    for row in rows():
        assert row["gain"] == "not measured yet" or row["pass"].strip("`") in measured, row
