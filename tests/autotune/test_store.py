"""Nothing that was measured is lost: many writers, kills, damaged files, other versions."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sqlite3
import subprocess
import sys

import pytest
import sqlalchemy

from fusewright.autotune.key import KeyContext, TuningKey
from fusewright.autotune.stats import Comparison, Verdict
from fusewright.autotune.storage.store import SCHEMA_VERSION, Trial, TuningStore
from fusewright.autotune.trial import Failure, FailureKind
from fusewright.capture.shapes import DimRange, ShapeBucket
from fusewright.capture.variant import GraphVariant, Lowering
from fusewright.errors import CacheFolderError, StoreVersionError, UserInputError

CONTEXT = KeyContext(
    "inference", "cpu x", "off", 2, "AVX2", "highest", False, "2.14", "3.8", "reassociated", False, "", "s" * 32
)
EAGER = GraphVariant(lowering=Lowering.EAGER)
FAST = Comparison(1.1, 1.05, 1.15, 60, 3, Verdict.FASTER)
WRITERS = pathlib.Path(__file__).with_name("store_writers.py")


def key(number: int = 0) -> TuningKey:
    return TuningKey(f"{number:032d}", ShapeBucket((DimRange("tokens", 2, 128),)), CONTEXT)


def trial(number: int = 0, **fields: object) -> Trial:
    made = Trial(key(number), GraphVariant(), "timing", FAST, EAGER, {"ok": True}, {"threads": 2})
    return dataclasses.replace(made, **fields)  # type: ignore[arg-type]


def test_what_is_stored_is_read_in_another_session(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "deep" / "store.db"
    store = TuningStore(path)
    assert store.best(key()) is None
    store.add_measurement(trial())
    store.add_measurement(trial(result=Failure(FailureKind.SIGNAL, "SIGSEGV"), variant=EAGER))
    store.add_measurement(trial(1))
    store.decide(key(), EAGER, {"ratio": 1.0})
    store.decide(key(), GraphVariant(), {"ratio": 1.1})
    store.close()

    again = TuningStore(path, read_only=True)
    assert again.best(key()) == GraphVariant()
    assert again.best(key(1)) is None
    first, second = again.why(key())
    assert {f.name: first[f.name] for f in dataclasses.fields(FAST) if f.name in first} == {
        "ratio": 1.1,
        "ci_low": 1.05,
        "ci_high": 1.15,
        "rounds": 60,
        "pairs": 3,
    }
    assert (first["status"], second["status"], second["failure"]) == ("faster", "signal", "SIGSEGV")
    assert TuningKey.from_json(first["key_json"]) == key()
    assert GraphVariant.from_json(first["baseline"]) == EAGER
    assert json.loads(first["provenance"]) == {"threads": 2}
    assert len(again.rows()) == 3
    assert again.why(key().digest()) == [first, second]
    decision = again.decision(key())
    assert decision is not None
    assert json.loads(decision["evidence"]) == {"ratio": 1.1}


def test_a_comparison_that_was_cut_short_is_stored_without_numbers(tmp_path: pathlib.Path) -> None:
    store = TuningStore(tmp_path / "s.db")
    nothing = Comparison(float("nan"), 0.0, float("inf"), 0, 0, Verdict.UNDECIDED)
    store.add_measurement(trial(result=nothing))
    (row,) = store.rows()
    assert (row["ratio"], row["ci_high"], row["status"]) == (None, None, "undecided")


def test_a_trial_stored_twice_is_one_row(tmp_path: pathlib.Path) -> None:
    store = TuningStore(tmp_path / "s.db")
    once = trial()
    store.add_measurement(once)
    store.add_measurement(once)
    assert len(store.rows()) == 1


def test_an_export_goes_into_another_store_once(tmp_path: pathlib.Path) -> None:
    one, two = TuningStore(tmp_path / "1.db"), TuningStore(tmp_path / "2.db")
    one.add_measurement(trial())
    one.decide(key(), EAGER, {})
    two.decide(key(), GraphVariant(), {})  # later than the one of the first store
    assert one.export_jsonl(tmp_path / "out.jsonl") == 2
    assert two.merge_jsonl(tmp_path / "out.jsonl") == 1
    assert two.merge_jsonl(tmp_path / "out.jsonl") == 0
    assert two.rows() == one.rows()
    assert two.best(key()) == GraphVariant()
    third = TuningStore(tmp_path / "3.db")
    assert third.merge_jsonl(tmp_path / "out.jsonl") == 2
    assert third.best(key()) == EAGER


def test_a_damaged_or_newer_export_is_refused_whole(tmp_path: pathlib.Path) -> None:
    store = TuningStore(tmp_path / "1.db")
    store.add_measurement(trial(0))
    store.add_measurement(trial(1))
    path = tmp_path / "out.jsonl"
    store.export_jsonl(path)
    good = path.read_text()
    other = TuningStore(tmp_path / "2.db")
    path.write_text(good.replace('"rounds":60', '"rounds":61'))
    with pytest.raises(UserInputError, match="line 1"):
        other.merge_jsonl(path)
    path.write_text(good.replace('"schema":1', '"schema":99'))
    with pytest.raises(StoreVersionError, match="newer"):
        other.merge_jsonl(path)
    assert other.rows() == []


def test_a_newer_store_is_refused_and_left_alone(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s.db"
    TuningStore(path).add_measurement(trial())
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = ?", (str(SCHEMA_VERSION + 1),))
        connection.execute("DROP TABLE decisions")
    connection.close()
    for read_only in (True, False):
        with pytest.raises(StoreVersionError, match="update fusewright"):
            TuningStore(path, read_only=read_only)
    with sqlite3.connect(path) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    connection.close()
    assert tables == {"meta", "measurements"}


def test_a_file_of_another_program_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE notes (text)")
    connection.close()
    with pytest.raises(UserInputError, match="no tuning store"):
        TuningStore(path)


def test_a_missing_file_is_not_made_by_reading(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        TuningStore(tmp_path / "s.db", read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheFolderError, match="make the tuning store"):
        TuningStore(tmp_path / "file" / "s.db")


def test_a_full_disk_is_told_clearly(tmp_path: pathlib.Path) -> None:
    store = TuningStore(tmp_path / "s.db")
    big = trial(provenance={"text": "x" * 100_000})
    store.add_measurement(trial())
    store.close()

    def limited(connection: sqlite3.Connection, _record: object) -> None:
        connection.execute("PRAGMA max_page_count = 1")  # SQLite's own way to run out of space

    sqlalchemy.event.listen(store._engine, "connect", limited)
    with pytest.raises(CacheFolderError, match="full"):
        store.add_measurement(big)
    assert len(TuningStore(tmp_path / "s.db").rows()) == 1


@pytest.mark.parametrize("damage", ["garbage", "truncated", "page"])
def test_a_damaged_file_is_moved_aside_and_its_readable_rows_are_kept(tmp_path: pathlib.Path, damage: str) -> None:
    path = tmp_path / "s.db"
    store = TuningStore(path)
    for number in range(200):
        store.add_measurement(trial(number))
    store.decide(key(3), EAGER, {})
    store.close()
    raw = bytearray(path.read_bytes())
    if damage == "garbage":
        raw[:100] = b"?" * 100
    elif damage == "truncated":
        del raw[len(raw) // 2 // 4096 * 4096 :]
    else:
        raw[40 * 4096 : 41 * 4096] = b"\xff" * 4096
    path.write_bytes(raw)

    repaired = TuningStore(path)
    assert repaired.recovered is not None
    assert str(path) in repaired.recovered
    aside = [p for p in tmp_path.iterdir() if ".damaged-" in p.name and not p.name.endswith(("-wal", "-shm"))]
    assert [p.read_bytes() for p in aside] == [bytes(raw)]
    rows = repaired.rows()
    assert len(rows) >= {"garbage": 0, "truncated": 20, "page": 150}[damage]
    assert len({row["id"] for row in rows}) == len(rows) < 200
    repaired.add_measurement(trial(1000))
    assert TuningStore(path).recovered is None


def test_a_flipped_bit_inside_a_value_is_found(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s.db"
    store = TuningStore(path)
    store.add_measurement(trial(0, provenance={"note": "AAAA"}))
    store.add_measurement(trial(1, provenance={"note": "BBBB"}))
    store.close()
    path.write_bytes(path.read_bytes().replace(b"AAAA", b"AABA"))
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA quick_check").fetchone() == ("ok",)  # SQLite itself does not see it
    connection.close()
    assert [row["key"] for row in TuningStore(path).verify()] == [key(0).digest()]


def test_a_store_that_is_open_follows_a_file_that_was_moved_aside(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s.db"
    store = TuningStore(path)
    store.add_measurement(trial(0))
    path.rename(tmp_path / "aside.db")
    TuningStore(path).add_measurement(trial(1))
    store.add_measurement(trial(2))
    assert {row["key"] for row in TuningStore(path, read_only=True).rows()} == {key(1).digest(), key(2).digest()}


@pytest.mark.multiprocess
def test_eight_writers_with_kills_lose_and_double_nothing(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s.db"
    root = pathlib.Path(__file__).resolve().parents[2]
    env = os.environ | {"PYTHONPATH": str(root)}
    subprocess.run([sys.executable, str(WRITERS), str(path), "25"], env=env, check=True, timeout=120)
    store = TuningStore(path)
    assert store.recovered is None
    assert sorted(row["id"] for row in store.rows()) == sorted(f"{w}-{n}" for w in range(8) for n in range(25))
    assert store.verify() == []
