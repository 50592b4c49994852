"""The overhead benchmark times what it says: every call dispatched, one lowering a bucket, noise shown beside it."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks.overhead import measure


def test_a_cell_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path))
    row = measure(parameters=5, buckets=8, rounds=5)  # asserts its own counts of calls and lowerings
    assert row.bare_us > 1
    assert row.p20_us <= row.overhead_us <= row.p80_us
    assert row.ok == (row.overhead_us <= 5)
