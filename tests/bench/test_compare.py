"""Two result files: what may be said of the change from one to the other."""

from __future__ import annotations

import io
import json
import pathlib
from typing import Any

import pytest
from rich.console import Console

from fusewright.bench.rows import append_rows
from fusewright.errors import UserInputError
from fusewright.report.compare import changes, compare_files


def row(ratio: float | None, width: float = 0.01, cell: str = "mlp", **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"cell": cell, "provider": "fusewright", "ratio_vs_compile": ratio, "accuracy": True}
    made |= {"machine": "m", "torch": "2.14.1", "cpu": "AVX512", "threads": 2}
    if ratio is not None:
        made |= {"ci_low": ratio * (1 - width), "ci_high": ratio * (1 + width)}
    return made | more


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (row(1.0), row(1.1), "faster"),
        (row(1.0), row(0.9), "slower"),
        (row(1.0), row(1.01), "no difference shown"),
        (row(1.0, 0.2), row(1.1), "no difference shown"),
        (row(1.0), row(1.1, ci_high=None), "undecided"),
        (row(1.0), row(None), "undecided"),
        (row(1.0), row(1.5, accuracy=False), "WRONG NOW"),
        (row(1.0, accuracy=False), row(1.5, accuracy=False), "faster"),
        (row(1.0), row(None, accuracy=None), "FAILS NOW"),
        (row(1.0, accuracy="reference"), row(None, accuracy=None), "FAILS NOW"),
        (row(1.0, accuracy=None), row(None, accuracy=None), "undecided"),
    ],
)
def test_verdicts(before: dict[str, Any], after: dict[str, Any], verdict: str) -> None:
    (change,) = changes([before], [after])
    assert change.verdict == verdict


def test_the_interval_of_a_change_holds_the_noise_of_both_runs() -> None:
    (narrow,) = changes([row(1.0, 0.01)], [row(1.0, 0.01)])
    (wide,) = changes([row(1.0, 0.03)], [row(1.0, 0.04)])
    assert narrow.ci_high == pytest.approx(1 + 0.01 * 2**0.5, rel=1e-3)
    assert wide.ci_high == pytest.approx(1.05, rel=3e-3)


def test_torch_compile_is_named_only_where_it_became_wrong_or_fails() -> None:
    good, wrong = ([row(None, provider="compile", accuracy=accuracy)] for accuracy in (True, False))
    assert changes(good, good) == []
    assert [change.verdict for change in changes(good, wrong)] == ["WRONG NOW"]


def show(before: pathlib.Path, after: pathlib.Path) -> str:
    text = io.StringIO()
    Console(file=text, width=200).print(compare_files(before, after)[2])
    return text.getvalue()


def test_what_differs_beside_the_code_and_what_is_in_one_file_only_is_said(tmp_path: pathlib.Path) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    append_rows(a, [row(1.2), row(1.0, cell="bert")])
    append_rows(b, [row(1.0), row(1.0, cell="bert", provider="compile"), row(1.0, cell="vit", torch="2.15.0")])
    text = show(a, b)
    assert "torch differs: 2.14.1 in A, 2.14.1, 2.15.0 in B" in text
    assert "only in B: vit" in text
    assert "1 slower" in text
    assert "threads" not in text


def test_files_that_cannot_be_compared(tmp_path: pathlib.Path) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    append_rows(a, [row(1.0)])
    with pytest.raises(UserInputError, match=r"b\.jsonl is not there"):
        compare_files(a, b)
    b.write_text(json.dumps({"nodes": 10}))
    with pytest.raises(UserInputError, match="holds no rows of a benchmark"):
        compare_files(a, b)
    b.write_text(json.dumps(row(1.0, cell="vit")))
    with pytest.raises(UserInputError, match="no cell and provider in common"):
        compare_files(a, b)
