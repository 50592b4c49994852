"""A cache folder for each test, so that no test meets another one's verdicts."""

from __future__ import annotations

import pathlib

import pytest


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Verdicts and reproducers of this test only."""
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
