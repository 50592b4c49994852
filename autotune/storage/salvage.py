"""What is done with a damaged store file: it is moved aside, and what can still be read is read."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import pathlib
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE = 20_000  # row numbers in a row that cannot be read before the rest is given up; about 0.2 s


@contextlib.contextmanager
def move_aside(path: pathlib.Path, is_sound: Callable[[], bool]) -> Iterator[pathlib.Path | None]:
    """Rename a damaged SQLite file with its log, and hold the repair lock while the caller makes a new one.

    Yields:
        Where the damaged file now lies; None where it was sound by the time the lock was ours.
    """
    with open(f"{path}.repair-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_sound():
            yield None
            return
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%f")
        aside = path.with_name(f"{path.name}.damaged-{stamp}")
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{path}{suffix}", f"{aside}{suffix}")
        yield aside


@contextlib.contextmanager
def readable_copy(path: pathlib.Path) -> Iterator[sqlite3.Connection]:
    """A copy of a damaged file to read from, so that the original stays as it was found."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        copy = pathlib.Path(folder) / "copy.db"
        shutil.copyfile(path, copy)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(f"{path}-wal", f"{copy}-wal")
        _fit_header(copy)
        with contextlib.closing(sqlite3.connect(copy)) as connection:
            connection.row_factory = sqlite3.Row
            connection.text_factory = lambda raw: raw.decode(errors="replace")
            yield connection


def _fit_header(path: pathlib.Path) -> None:
    """Let the header of a file that was cut short name the pages that are left; SQLite reads nothing of it otherwise.

    Fields as in https://www.sqlite.org/fileformat.html, big-endian: page size at 16 (1 stands for 65536), pages at 28.
    """
    with path.open("r+b") as file:
        header = file.read(100)
        if len(header) < 100:
            return
        page_size = int.from_bytes(header[16:18], "big")
        page_size = 65536 if page_size == 1 else max(page_size, 512)
        pages = path.stat().st_size // page_size
        if pages < int.from_bytes(header[28:32], "big"):
            file.seek(28)
            file.write(pages.to_bytes(4, "big"))


def readable_rows(connection: sqlite3.Connection, table: str) -> Iterator[dict[str, Any]]:
    """Rows of a damaged file one by one, stepping over those that cannot be read.

    `table` is one of our own names, never a user's text.
    """
    query = f"SELECT rowid AS number, * FROM {table} WHERE rowid > ? ORDER BY rowid LIMIT 1"
    number = missed = 0
    while missed < PATIENCE:
        try:
            row = connection.execute(query, (number,)).fetchone()
        except sqlite3.DatabaseError:
            number, missed = number + 1, missed + 1  # the next row's page is damaged; a later one may be sound
            continue
        if row is None:
            return
        found = dict(row)
        number, missed = found.pop("number"), 0
        yield found
