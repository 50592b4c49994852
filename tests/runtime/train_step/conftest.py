"""Keeps the verdicts of one test from another."""

from __future__ import annotations

import pathlib

import pytest


@pytest.fixture(autouse=True)
def own_verdicts(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test's verdict would stand in for the comparison that most tests count."""
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "fusewright"))
