"""The store of tuning results: every measurement, losers and failures too, and one decision per key.

An SQLite file by default, any database by URL. All columns are text and numbers; nothing read from a store is ever run.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import pathlib
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.pool import NullPool

from fusewright.autotune.key import TuningKey
from fusewright.autotune.stats import Comparison
from fusewright.autotune.storage.salvage import move_aside, readable_copy, readable_rows
from fusewright.autotune.trial import Failure
from fusewright.capture.variant import GraphVariant
from fusewright.errors import CacheFolderError, StoreVersionError, UserInputError

SCHEMA_VERSION = 1
BUSY_S = 60.0  # how long a writer waits for the others
Row = dict[str, Any]
_T = TypeVar("_T")

_TABLES = sa.MetaData()
_META = sa.Table(
    "meta", _TABLES, sa.Column("name", sa.Text, primary_key=True), sa.Column("value", sa.Text, nullable=False)
)
_MEASUREMENTS = sa.Table(
    "measurements",
    _TABLES,
    sa.Column("id", sa.Text, primary_key=True),  # made by the writer: a repeated insert is no second row
    sa.Column("at", sa.Text, nullable=False),  # UTC, ISO 8601
    sa.Column("key", sa.Text, nullable=False, index=True),
    sa.Column("key_json", sa.Text, nullable=False),
    sa.Column("variant", sa.Text, nullable=False),
    sa.Column("stage", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),  # a verdict, a kind of failure, or "accurate"
    sa.Column("failure", sa.Text),
    sa.Column("baseline", sa.Text),
    sa.Column("ratio", sa.Float),
    sa.Column("ci_low", sa.Float),
    sa.Column("ci_high", sa.Float),
    sa.Column("rounds", sa.Integer),
    sa.Column("pairs", sa.Integer),
    sa.Column("accuracy", sa.Text),
    sa.Column("provenance", sa.Text, nullable=False),
    sa.Column("checksum", sa.Text, nullable=False),
)
_DECISIONS = sa.Table(
    "decisions",
    _TABLES,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("key_json", sa.Text, nullable=False),
    sa.Column("variant", sa.Text, nullable=False),
    sa.Column("space", sa.Text, nullable=False),  # digest of the variants that were tried
    sa.Column("evidence", sa.Text, nullable=False),
    sa.Column("at", sa.Text, nullable=False),
    sa.Column("checksum", sa.Text, nullable=False),
)


@dataclass(frozen=True)
class Trial:
    """One thing that was tried with one variant, and what came of it.

    Attributes:
        stage: "accuracy", "screening", "timing" or "confirmation".
        result: a comparison with `baseline`, a failure, or None where the gate let the variant pass.
        accuracy: the gate's report.
        provenance: versions, machine kind, load, settings of the run.
    """

    key: TuningKey
    variant: GraphVariant
    stage: str
    result: Comparison | Failure | None = None
    baseline: GraphVariant | None = None
    accuracy: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def to_row(self) -> Row:
        """The row of the table `measurements`."""
        row: Row = dict.fromkeys(column.name for column in _MEASUREMENTS.columns)
        row |= {
            "id": self.id,
            "at": _now(),
            "key": self.key.digest(),
            "key_json": self.key.to_json(),
            "variant": self.variant.to_json(),
            "stage": self.stage,
            "baseline": None if self.baseline is None else self.baseline.to_json(),
            "accuracy": None if self.accuracy is None else _json(self.accuracy),
            "provenance": _json(self.provenance),
            "status": "accurate",
        }
        if isinstance(self.result, Failure):
            row |= {"status": self.result.kind.value, "failure": self.result.detail}
        elif self.result is not None:
            found = {name: getattr(self.result, name) for name in ("ratio", "ci_low", "ci_high", "rounds", "pairs")}
            # Infinite and undefined ends are what was not measured: NULL, which every database has.
            row |= {n: v if abs(v) < float("inf") else None for n, v in found.items()}
            row["status"] = self.result.verdict.value
        return row | {"checksum": checksum(row)}


class TuningStore:
    """Results by key. Safe for many processes at once; each method is one transaction.

    Args:
        path_or_url: path of an SQLite file, made where it is missing, or a database URL.
        read_only: never writes, and refuses a file that is missing.

    Raises:
        StoreVersionError: the store was written by a newer fusewright.
        CacheFolderError: it cannot be written.
        FileNotFoundError: `read_only` and there is no such file.

    A damaged SQLite file is moved aside and its readable rows are taken over; `recovered` then says so.
    """

    def __init__(self, path_or_url: str | os.PathLike[str], *, read_only: bool = False) -> None:
        text = os.fspath(path_or_url)
        self.path = None if "://" in text else pathlib.Path(text)
        self.read_only = read_only
        self.recovered: str | None = None
        self._inode = 0
        self._engine = _file_engine(self.path, read_only) if self.path else sa.create_engine(text, poolclass=NullPool)
        if read_only:
            with self._reading() as connection:
                self._check_version(connection)
        elif self.path is None:
            self._prepare()
        else:
            self._open_file(self.path)

    def add_measurement(self, trial: Trial) -> None:
        """Store one trial; the same trial stored again changes nothing."""
        row = trial.to_row()
        self._write(lambda c: self._insert_new(c, _MEASUREMENTS, row, row["id"]))

    def decide(self, key: TuningKey, variant: GraphVariant, evidence: Mapping[str, Any], space: str = "") -> None:
        """Make `variant` the choice for `key`, out of the variants of `space`; an earlier decision is replaced."""
        row = {"key": key.digest(), "key_json": key.to_json(), "variant": variant.to_json()}
        row |= {"evidence": _json(evidence), "space": space, "at": _now()}
        self._write(lambda c: self._replace_decision(c, row | {"checksum": checksum(row)}))

    def best(self, key: TuningKey) -> GraphVariant | None:
        """The choice for `key`, or None where nothing was decided.

        Raises:
            UserInputError: the record names a variant that this fusewright does not know.
        """
        row = self.decision(key)
        return None if row is None else GraphVariant.from_json(row["variant"])

    def decision(self, key: TuningKey | str) -> Row | None:
        """The row of the decision for a key or its digest: variant, evidence and time."""
        digest = key if isinstance(key, str) else key.digest()
        rows = self._read(sa.select(_DECISIONS).where(_DECISIONS.c.key == digest))
        return rows[0] if rows else None

    def why(self, key: TuningKey | str) -> list[Row]:
        """All measurements for a key or its digest, oldest first."""
        digest = key if isinstance(key, str) else key.digest()
        return self._read(sa.select(_MEASUREMENTS).where(_MEASUREMENTS.c.key == digest).order_by(_MEASUREMENTS.c.at))

    def rows(self) -> list[Row]:
        """All measurements, oldest first."""
        return self._read(sa.select(_MEASUREMENTS).order_by(_MEASUREMENTS.c.at, _MEASUREMENTS.c.id))

    def decisions(self) -> list[Row]:
        """All decisions, by key."""
        return self._read(sa.select(_DECISIONS).order_by(_DECISIONS.c.key))

    def verify(self) -> list[Row]:
        """Rows whose checksum does not fit: a bit was flipped inside a value, which the file format cannot see."""
        return [row for row in [*self.rows(), *self.decisions()] if row["checksum"] != checksum(row)]

    def export_jsonl(self, path: str | os.PathLike[str]) -> int:
        """Write every row as one JSON line; the file appears whole or not at all. Returns the number of rows."""
        lines = [{"table": "measurements"} | row for row in self.rows()]
        lines += [{"table": "decisions"} | row for row in self.decisions()]
        target = pathlib.Path(path)
        with tempfile.NamedTemporaryFile("w", dir=target.absolute().parent, delete=False) as file:
            file.writelines(_json({"schema": SCHEMA_VERSION} | line) + "\n" for line in lines)
        os.replace(file.name, target)
        return len(lines)

    def merge_jsonl(self, path: str | os.PathLike[str]) -> int:
        """Take over the rows of an export that are not here yet, and decisions that are newer. Returns how many.

        Raises:
            UserInputError: a line is damaged; nothing of the file is then taken.
            StoreVersionError: it was exported by a newer fusewright.
        """
        lines = [_checked_line(text, n) for n, text in enumerate(pathlib.Path(path).read_text().splitlines(), 1)]
        return self._write(lambda c: sum(self._take(c, table, row) for table, row in lines))

    def close(self) -> None:
        """Release the engine."""
        self._engine.dispose()

    def _open_file(self, path: pathlib.Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._prepare()
            self._check_pages()
        except sa.exc.DatabaseError as error:
            if not _is_damage(error):
                raise
            self._recover(path)
        except OSError as error:
            raise CacheFolderError(f"cannot make the tuning store {path} ({error.strerror}).") from error

    def _prepare(self) -> None:
        def prepare(connection: sa.Connection) -> None:
            if sa.inspect(connection).get_table_names():
                self._check_version(connection)
            _TABLES.create_all(connection)
            self._insert_new(connection, _META, {"name": "schema", "value": str(SCHEMA_VERSION)}, "schema")

        self._write(prepare)

    def _check_version(self, connection: sa.Connection) -> None:
        name = self.path or self._engine.url
        if not sa.inspect(connection).has_table("meta"):
            raise UserInputError(f"{name} is no tuning store: it has no table 'meta'.")
        version = connection.execute(sa.select(_META.c.value).where(_META.c.name == "schema")).scalar()
        if version is not None and int(version) > SCHEMA_VERSION:
            raise StoreVersionError(
                f"the tuning store {name} has schema {version}, this fusewright reads {SCHEMA_VERSION}: "
                "update fusewright, or set FUSEWRIGHT_STORE to another file."
            )

    def _check_pages(self) -> None:
        with self._engine.connect() as connection:
            found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
        if found != "ok":
            raise sa.exc.DatabaseError("PRAGMA quick_check", None, sqlite3.DatabaseError(f"malformed: {found}"))

    def _recover(self, path: pathlib.Path) -> None:
        """Move the damaged file aside and take over its readable rows; one process does it, the others wait."""
        with move_aside(path, is_sound=lambda: _is_sound(path)) as damaged:
            self._engine.dispose()  # its connection still holds the file that was moved
            if damaged is None:  # another process has repaired it meanwhile
                self._prepare()
                return
            self._prepare()
            with readable_copy(damaged) as old:
                found = [(t, row) for t in (_MEASUREMENTS, _DECISIONS) for row in readable_rows(old, t.name)]
            sound = [(table, row) for table, row in found if _is_whole(table, row)]
            taken = self._write(lambda c: sum(self._take(c, table, row) for table, row in sound))
        self.recovered = (
            f"the tuning store {path} was damaged; it now lies at {damaged}, and {taken} rows were taken over"
        )

    def _insert_new(self, connection: sa.Connection, table: sa.Table, row: Row, identity: str) -> bool:
        column = next(iter(table.primary_key.columns))
        if connection.execute(sa.select(column).where(column == identity)).first() is not None:
            return False
        connection.execute(table.insert().values(**row))
        return True

    def _replace_decision(self, connection: sa.Connection, row: Row) -> None:
        connection.execute(_DECISIONS.delete().where(_DECISIONS.c.key == row["key"]))
        connection.execute(_DECISIONS.insert().values(**row))

    def _take(self, connection: sa.Connection, table: sa.Table, row: Row) -> bool:
        if table is _MEASUREMENTS:
            return self._insert_new(connection, table, row, row["id"])
        here = connection.execute(sa.select(_DECISIONS.c.at).where(_DECISIONS.c.key == row["key"])).scalar()
        if here is not None and here >= row["at"]:
            return False
        self._replace_decision(connection, row)
        return True

    def _write(self, action: Callable[[sa.Connection], _T]) -> _T:
        assert not self.read_only, "a read-only store is never written"
        self._follow_file()
        try:
            with self._engine.begin() as connection:
                return action(connection)
        except sa.exc.OperationalError as error:
            text = str(error.orig)
            if any(word in text for word in ("readonly", "disk is full", "unable to open", "disk I/O error")):
                raise CacheFolderError(
                    f"cannot write the tuning store {self.path} ({text}); set FUSEWRIGHT_STORE to a writable file."
                ) from error
            raise

    def _follow_file(self) -> None:
        """Let go of a file that another process has moved aside; a connection that stays open would write into it."""
        if self.path is None:
            return
        inode = self.path.stat().st_ino if self.path.exists() else 0
        if inode != self._inode:
            self._engine.dispose()
            self._inode = inode

    def _reading(self) -> sa.Connection:
        return self._engine.connect().execution_options(reading=True)

    def _read(self, query: sa.Select[Any]) -> list[Row]:
        with self._reading() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]


def checksum(row: Mapping[str, Any]) -> str:
    """Hash of all other columns, so that a flipped bit inside a value is seen."""
    return hashlib.sha256(_json({k: v for k, v in row.items() if k != "checksum"}).encode()).hexdigest()[:16]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")


def _is_damage(error: sa.exc.DatabaseError) -> bool:
    return any(word in str(error.orig) for word in ("malformed", "not a database", "no such column", "corrupt"))


def _is_sound(path: pathlib.Path) -> bool:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        try:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
        except sqlite3.DatabaseError:
            return False


def _is_whole(table: sa.Table, row: Row) -> bool:
    return set(row) == {column.name for column in table.columns} and row["checksum"] == checksum(row)


def _checked_line(text: str, number: int) -> tuple[sa.Table, Row]:
    row = json.loads(text)
    if row.pop("schema") > SCHEMA_VERSION:
        raise StoreVersionError(f"line {number}: exported by a newer fusewright; update fusewright to merge it.")
    table = _TABLES.tables[row.pop("table")]
    if not _is_whole(table, row):
        raise UserInputError(f"line {number}: the checksum does not fit the row; the file is damaged.")
    return table, row


def _use_wal(connection: sqlite3.Connection) -> None:
    """Readers and a writer then never wait for each other. SQLite does not wait for others in this switch, so we do."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _file_engine(path: pathlib.Path, read_only: bool) -> sa.Engine:
    """An engine for an SQLite file whose transactions take the write lock at once, so that none fails half-way."""
    if read_only and not path.is_file():
        raise FileNotFoundError(f"no tuning store at {path}")
    mode = "ro" if read_only else "rwc"
    engine = sa.create_engine(
        sa.URL.create("sqlite", database=f"file:{path.absolute()}", query={"mode": mode, "uri": "true"}),
        # One connection stays open: when the last one closes, SQLite writes its log back, which takes 30 ms and more.
        pool_size=1,
        connect_args={"timeout": BUSY_S},
    )

    @sa.event.listens_for(engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver would begin transactions by its own rules
        if not read_only:
            _use_wal(connection)
            connection.execute("PRAGMA synchronous=NORMAL")

    @sa.event.listens_for(engine, "begin")
    def begun(connection: sa.Connection) -> None:
        reading = read_only or connection.get_execution_options().get("reading", False)
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")

    return engine
