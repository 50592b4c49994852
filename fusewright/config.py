"""Every environment variable and option of fusewright, read and checked in one place."""

from __future__ import annotations

import enum
import os
import pathlib
import tempfile
import threading
import warnings
from dataclasses import dataclass
from typing import TypeVar

from fusewright.errors import CacheFolderError, UserInputError, did_you_mean, unknown_name

VARIABLES: dict[str, str] = {
    "FUSEWRIGHT_DISABLE": "1: every optimized model runs its plain eager forward",
    "FUSEWRIGHT_CACHE_DIR": "folder of verdicts, stores and reproducers (default ~/.cache/fusewright)",
    "FUSEWRIGHT_DUMP": "folder: graph before, after and diff of every pass, and passes.jsonl",
    "FUSEWRIGHT_SKIP_PASSES": "comma-separated pass names that never run",
    "FUSEWRIGHT_STRICT": "1: as strict=True for every optimize() that does not say",
    "FUSEWRIGHT_VERIFY": "off, first_call or always, for every optimize() that does not say",
    "FUSEWRIGHT_COST": "off: rewrite also where a cost model says that it does not pay (default on)",
    "FUSEWRIGHT_STORE": "SQLite file or database URL of the tuning store (default tuning.sqlite in the cache folder)",
}

_E = TypeVar("_E", bound=enum.Enum)


class Off(threading.local):
    """`depth` is above 0 inside `fusewright.disabled()`, per thread."""

    depth = 0


OFF = Off()


class Verify(enum.Enum):
    """When a lowered graph is compared with eager."""

    OFF = "off"
    FIRST_CALL = "first_call"
    ALWAYS = "always"


class Numerics(enum.Enum):
    """How far our rewrites may move a result; ordered from strict to loose."""

    EXACT = "exact"
    REASSOCIATED = "reassociated"
    LOSSY = "lossy"

    def allows(self, other: Numerics) -> bool:
        """True where a rewrite of tier `other` may run under this setting."""
        order = list(Numerics)
        return order.index(other) <= order.index(self)


class Effort(enum.Enum):
    """How much tuning `optimize` may do by itself. Only `none` runs inside a process; the rest is `fusewright tune`."""

    NONE = "none"
    QUICK = "quick"
    FULL = "full"


def to_enum(kind: type[_E], value: object, argument: str) -> _E:
    """Turn a string into a member of `kind`, or raise `UnknownNameError` naming `argument`."""
    if isinstance(value, kind):
        return value
    for member in kind:
        if member.value == value:
            return member
    raise unknown_name(argument, str(value), [str(m.value) for m in kind])


@dataclass(frozen=True)
class Settings:
    """The environment's settings, read once per `optimize` call."""

    disabled: bool
    cache_dir: pathlib.Path
    dump_dir: pathlib.Path | None
    skip_passes: frozenset[str]
    strict: bool
    verify: Verify
    store: str | None
    cost: bool = True

    def store_place(self) -> str:
        """Path or URL of the tuning store: as set, else a file in the cache folder."""
        return self.store or str(self.cache_dir / "tuning.sqlite")


def _on(name: str) -> bool:
    value = os.environ.get(name, "") or "on"
    if value not in ("on", "off"):
        raise UserInputError(f"{name} must be on or off, not {value!r}.")
    return value == "on"


def _flag(name: str) -> bool:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise UserInputError(f"{name} must be 0 or 1, not {value!r}.")
    return value == "1"


def _warn_unknown() -> None:
    for name in sorted(os.environ):
        if name.startswith("FUSEWRIGHT_") and name not in VARIABLES:
            warnings.warn(
                f"environment variable {name} is not known to fusewright, so ignored.{did_you_mean(name, VARIABLES)}",
                stacklevel=3,
            )


def read_settings() -> Settings:
    """Read every `FUSEWRIGHT_*` variable.

    Raises:
        UserInputError: a variable holds a value it cannot have.
    """
    _warn_unknown()
    dump = os.environ.get("FUSEWRIGHT_DUMP", "")
    skip = os.environ.get("FUSEWRIGHT_SKIP_PASSES", "")
    cache = os.environ.get("FUSEWRIGHT_CACHE_DIR", "") or str(pathlib.Path.home() / ".cache" / "fusewright")
    return Settings(
        disabled=_flag("FUSEWRIGHT_DISABLE"),
        cache_dir=pathlib.Path(cache).expanduser(),
        dump_dir=pathlib.Path(dump).expanduser() if dump else None,
        skip_passes=frozenset(s.strip() for s in skip.split(",") if s.strip()),
        strict=_flag("FUSEWRIGHT_STRICT"),
        verify=to_enum(Verify, os.environ.get("FUSEWRIGHT_VERIFY", "") or "first_call", "FUSEWRIGHT_VERIFY"),
        store=os.environ.get("FUSEWRIGHT_STORE", "") or None,
        cost=_on("FUSEWRIGHT_COST"),
    )


def writable_folder(folder: pathlib.Path, variable: str) -> pathlib.Path:
    """Make `folder` and prove that a file can be written there.

    Raises:
        CacheFolderError: naming the folder, the reason and the variable that moves it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise CacheFolderError(
            f"cannot write to {folder} ({error.strerror}); set {variable} to a writable folder."
        ) from error
