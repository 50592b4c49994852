"""What a program that was tuned earlier runs with: looks decisions up for the backend, and never stops it."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fusewright.autotune.key import KeyContext, TuningKey
from fusewright.capture.shapes import ShapeBucket
from fusewright.capture.variant import DEFAULT_VARIANT, GraphVariant
from fusewright.errors import FusewrightError, StoreVersionError

if TYPE_CHECKING:
    from fusewright.autotune.storage.store import TuningStore

Choose = Callable[[str, ShapeBucket, torch.device], GraphVariant]
Context = Callable[[torch.device], KeyContext]


@dataclass(frozen=True)
class Lookup:
    """One question of the backend and its answer; `reason` says where the answer comes from."""

    key: TuningKey
    variant: GraphVariant
    reason: str


class StoredPlan:
    """Calls as `choose(fingerprint, bucket, device) -> GraphVariant`; `lookups` keeps what was asked."""

    def __init__(self, store: str | os.PathLike[str] | TuningStore | None, context: Context) -> None:
        self.lookups: list[Lookup] = []
        self._source = store
        self._context = context
        self._store: TuningStore | None = None
        self._reason = ""  # why there is no store to ask
        self._lock = threading.Lock()

    def __call__(self, fingerprint: str, bucket: ShapeBucket, device: torch.device) -> GraphVariant:
        key = TuningKey(fingerprint, bucket, self._context(device))
        with self._lock:  # lowering may run in several threads
            variant, reason = self._find(key)
            self.lookups.append(Lookup(key, variant, reason))
        return variant

    def open(self) -> None:
        """Open the store now, where there is one, so that a store that cannot be used is said at once.

        Raises:
            StoreVersionError: it was written by a newer fusewright.
        """
        with self._lock:
            if self._store is None and not self._reason:
                self._open()

    def _find(self, key: TuningKey) -> tuple[GraphVariant, str]:
        if self._store is None and not self._reason:
            self._open()
        if self._store is None:
            return DEFAULT_VARIANT, self._reason
        from sqlalchemy.exc import SQLAlchemyError

        try:
            found = self._store.best(key)
        except (FusewrightError, SQLAlchemyError, OSError) as error:
            return DEFAULT_VARIANT, self._warn(f"the tuning store could not be read: {_first_line(error)}")
        if found is None:
            return DEFAULT_VARIANT, f"not tuned: no decision for key {key.digest()}"
        return found, f"tuned: key {key.digest()}"

    def _open(self) -> None:
        if self._source is None:
            self._reason = "no tuning store is set"
            return
        if isinstance(self._source, (str, os.PathLike)) and not _may_exist(self._source):
            self._reason = f"no tuning store at {self._source}"
            return
        # Loaded only where there is a store: the database library takes 0.3 s.
        from sqlalchemy.exc import SQLAlchemyError

        from fusewright.autotune.storage.store import TuningStore

        if isinstance(self._source, TuningStore):
            self._store = self._source
            return
        try:
            self._store = TuningStore(self._source, read_only=True)
        except FileNotFoundError as error:
            self._reason = str(error)
        except StoreVersionError:
            raise
        except (FusewrightError, SQLAlchemyError, OSError) as error:
            self._reason = self._warn(f"the tuning store {self._source} is not used: {_first_line(error)}")

    def _warn(self, reason: str) -> str:
        warnings.warn(f"{reason}; the default variant runs instead.", stacklevel=2)
        return reason


def choose_from(
    store: str | os.PathLike[str] | TuningStore | None,
    context: KeyContext | Context = KeyContext.current,
) -> StoredPlan:
    """A `choose` for the backend that reads decisions from a store.

    Args:
        store: path, URL or open store; None, or a file that is missing, means the default variant everywhere.
        context: the key's context, or a function of the graph's device that is asked at every look-up: the mode
            (training or inference) and autocast are those of the moment in which a graph is lowered.

    A store that cannot be read warns once and is then as good as missing. Only one of a newer version raises.
    """
    if isinstance(context, KeyContext):
        return StoredPlan(store, lambda device: context)
    return StoredPlan(store, context)


def _may_exist(place: str | os.PathLike[str]) -> bool:
    """False for a file that is missing; a URL is asked only when it is opened."""
    return "://" in os.fspath(place) or os.path.exists(place)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
