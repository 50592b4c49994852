"""A program starts whatever state its store is in, and says where each variant comes from."""

from __future__ import annotations

import dataclasses
import pathlib
import sqlite3
import warnings

import pytest
import torch

from fusewright.autotune.key import KeyContext, TuningKey
from fusewright.autotune.plan import choose_from
from fusewright.autotune.storage.store import TuningStore
from fusewright.capture.shapes import DimRange, ShapeBucket
from fusewright.capture.variant import DEFAULT_VARIANT, GraphVariant, Lowering
from fusewright.errors import StoreVersionError

BUCKET = ShapeBucket((DimRange("tokens", 2, 64),))
EAGER = GraphVariant(lowering=Lowering.EAGER)
CPU = torch.device("cpu")


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    """A store that holds one decision: eager for inference."""
    store = TuningStore(tmp_path / "s.db")
    with torch.no_grad():
        store.decide(TuningKey("f", BUCKET, KeyContext.current()), EAGER, {})
    store.close()
    return tmp_path / "s.db"


def test_a_decision_is_used_in_the_mode_it_was_made_for(path: pathlib.Path) -> None:
    plan = choose_from(path)
    with torch.no_grad():
        assert plan("f", BUCKET, CPU) == EAGER
        assert plan("other", BUCKET, CPU) == DEFAULT_VARIANT
        assert plan("f", ShapeBucket(), CPU) == DEFAULT_VARIANT
    assert plan("f", BUCKET, CPU) == DEFAULT_VARIANT
    reasons = [lookup.reason.split(":")[0] for lookup in plan.lookups]
    assert reasons == ["tuned", "not tuned", "not tuned", "not tuned"]
    assert [lookup.key.context.mode for lookup in plan.lookups] == ["inference"] * 3 + ["training"]


def test_a_decision_holds_for_the_device_that_the_graph_runs_on(path: pathlib.Path) -> None:
    asked: list[torch.device] = []

    def context(device: torch.device) -> KeyContext:
        asked.append(device)
        return dataclasses.replace(KeyContext.current(), device=str(device))

    plan = choose_from(path, context)
    with torch.no_grad():
        assert plan("f", BUCKET, torch.device("meta")) == DEFAULT_VARIANT
    assert asked == [torch.device("meta")]
    assert plan.lookups[0].key.context.device == "meta"


def test_a_fixed_context_is_used_as_it_is(path: pathlib.Path) -> None:
    with torch.no_grad():
        context = KeyContext.current()
    assert choose_from(path, context)("f", BUCKET, CPU) == EAGER
    assert choose_from(path, dataclasses.replace(context, threads=99))("f", BUCKET, CPU) == DEFAULT_VARIANT


def test_no_store_and_a_missing_file_mean_the_default_without_a_word(tmp_path: pathlib.Path) -> None:
    for source, reason in ((None, "no tuning store is set"), (tmp_path / "none.db", "no tuning store at")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plan = choose_from(source)
            assert plan("f", BUCKET, CPU) == DEFAULT_VARIANT
        assert plan.lookups[0].reason.startswith(reason)
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_cannot_be_read_warns_once_and_does_not_stop_the_program(path: pathlib.Path) -> None:
    path.write_bytes(b"this is no database, whatever its name says" * 100)
    plan = choose_from(path)
    with pytest.warns(UserWarning, match="is not used"):
        assert plan("f", BUCKET, CPU) == DEFAULT_VARIANT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan("f", BUCKET, CPU) == DEFAULT_VARIANT


def test_an_unknown_variant_warns_and_a_newer_store_is_refused(path: pathlib.Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE decisions SET variant = replace(variant, 'eager', 'from_the_future')")
    connection.close()
    with torch.no_grad(), pytest.warns(UserWarning, match="from_the_future"):
        assert choose_from(path)("f", BUCKET, CPU) == DEFAULT_VARIANT
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = '99'")
    connection.close()
    with pytest.raises(StoreVersionError, match="schema 99"):
        choose_from(path).open()
