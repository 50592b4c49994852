"""Rows survive a kill in the middle of a write, and are never mixed with those of another machine or version."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from fusewright.bench.rows import (
    append_rows,
    check_same_place,
    check_writable,
    newest,
    provenance,
    read_rows,
    whole_cells,
    with_rates,
)
from fusewright.errors import UserInputError


def row(cell: str, provider: str, **more: Any) -> dict[str, Any]:
    return {"cell": cell, "provider": provider, **provenance(), **more}


def test_a_line_that_a_kill_cut_short_costs_its_own_row_only(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    first, second = row("a", "compile"), row("a", "eager")
    append_rows(path, [first, second])
    whole = path.read_bytes()
    for length in range(len(json.dumps(first)) + 2, len(whole)):
        path.write_bytes(whole[:length])
        append_rows(path, [row("b", "compile")])
        found = [(r["cell"], r["provider"]) for r in read_rows(path)]
        assert found[0] == ("a", "compile")
        assert found[-1] == ("b", "compile")
    assert read_rows(tmp_path / "none.jsonl") == []


def test_a_cell_is_done_when_every_provider_has_a_row() -> None:
    rows = [row("a", "compile"), row("a", "fusewright"), row("b", "compile")]
    assert whole_cells(rows, dict.fromkeys("abc", ("compile", "fusewright"))) == {"a"}
    assert whole_cells(rows, {"a": ("compile", "fusewright"), "b": ("compile",)}) == {"a", "b"}


def test_a_cell_that_was_measured_again_counts_once() -> None:
    rows = [row("a", "compile", n=1), row("b", "compile", n=2), row("a", "compile", n=3)]
    assert [(r["cell"], r["n"]) for r in newest(rows)] == [("a", 3), ("b", 2)]


@pytest.mark.parametrize("name", ["machine", "torch", "cpu", "threads"])
def test_another_machine_or_version_is_refused(name: str, tmp_path: pathlib.Path) -> None:
    check_same_place([row("a", "compile")], tmp_path)
    with pytest.raises(UserInputError, match=f"--resume: .* holds rows with {name} other"):
        check_same_place([row("a", "compile"), row("b", "compile") | {name: "other"}], tmp_path)


def test_rates_come_from_model_flops_and_the_clock() -> None:
    rows = [row("a", "compile", median_ms=2.0, flops=4_000_000_000), row("a", "eager", median_ms=None)]
    timed, failed = with_rates(rows, {"matmul_gflops": 4000.0})
    assert (timed["gflops_per_s"], timed["roofline_fraction"]) == (2000.0, 0.5)
    assert failed["flops"] == 4_000_000_000
    assert "gflops_per_s" not in failed


def test_a_place_that_takes_no_rows_is_refused_before_anything_is_measured(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    append_rows(path, [row("a", "compile")])
    check_writable(path)
    assert len(read_rows(path)) == 1
    check_writable(tmp_path / "other" / "rows.jsonl")
    for bad in (tmp_path, path / "rows.jsonl"):
        with pytest.raises(UserInputError, match="cannot be written"):
            check_writable(bad)
