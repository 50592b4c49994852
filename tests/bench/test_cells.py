"""Which providers run in a cell, and which row stands for the best setting of torch.compile."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from fusewright.bench.cells import SuiteCell, best_of, candidates_of

TRIED = {"compile": 1.0, "compile_freezing": 1.3, "compile_max_autotune": 0.9, "compile_cpp_wrapper": 1.1}


def rows(**accuracy: bool | None) -> list[dict[str, Any]]:
    made = []
    for name, ratio in TRIED.items():
        row: dict[str, Any] = {"provider": name, "accuracy": accuracy.get(name, True), "median_ms": 1 / ratio}
        verdict = "faster" if ratio > 1.05 else "undecided"
        made.append(row if name == "compile" else row | {"ratio_vs_compile": ratio, "verdict": verdict})
    return [*made, {"provider": "eager", "accuracy": "reference", "median_ms": 0.1, "ratio_vs_compile": 10.0}]


def test_the_best_setting_is_the_fastest_accurate_one() -> None:
    assert best_of(rows())["setting"] == "compile_freezing"
    assert best_of(rows(compile_freezing=False))["setting"] == "compile_cpp_wrapper"
    assert best_of(rows(compile_freezing=None, compile_cpp_wrapper=False))["setting"] == "compile"
    nothing = best_of(rows(**dict.fromkeys(TRIED, False)))
    assert "no setting" in nothing["failure"]
    assert nothing.get("median_ms") is None
    assert {row["provider"] for row in map(best_of, [rows()])} == {"compile_best"}


@pytest.mark.parametrize(("mode", "freezes"), [("inference", True), ("training", False)])
def test_what_only_infers_is_left_out_in_training(mode: str, freezes: bool) -> None:
    names = candidates_of(("eager", "compile_best", "compile_cpp_wrapper", "fusewright"), mode)
    assert ("compile_freezing" in names) == freezes
    assert len(names) == len(set(names)) == 4 + freezes


def test_a_setting_that_is_not_proven_faster_is_not_the_best() -> None:
    close = rows()
    for row in close:
        row["verdict"] = "undecided"
    assert best_of(close)["setting"] == "compile"


def test_each_provider_has_caches_of_its_own(tmp_path: pathlib.Path) -> None:
    cell = SuiteCell("job.py#w", "w", "small", "inference", 4, "rows")
    one, other = (cell.provider(name, tmp_path).env for name in ("compile", "fusewright"))
    assert set(one) == set(other) == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FUSEWRIGHT_CACHE_DIR"}
    assert not set(one.values()) & set(other.values())
