"""The registry of the suite's fixed workloads: `workloads.toml` turned into `Workload` objects."""

from __future__ import annotations

import functools
import pathlib
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.models import builders
from fusewright.errors import unknown_name
from fusewright.workload import Workload

FACTS = pathlib.Path(__file__).with_name("workloads.toml")


@functools.cache
def facts() -> dict[str, dict[str, Any]]:
    """The entries of `workloads.toml` by name."""
    entries = tomllib.loads(FACTS.read_text())["workload"]
    return {entry["name"]: entry for entry in entries}


def get(name: str, *, dropout: bool = True) -> Workload:
    """The workload called `name`.

    Args:
        name: as in `workloads.toml`.
        dropout: False sets every dropout rate to 0 and changes nothing else. Eager and compiled code draw random
            numbers in different orders, so only then can their training steps be compared number by number.

    Raises:
        UnknownNameError: there is no such workload; the message names the nearest.
    """
    if name not in facts():
        raise unknown_name("workload", name, facts())
    return builders.make(facts()[name], dropout=dropout)


class _Registry(Mapping[str, Workload]):
    """Every workload by name, made when it is asked for."""

    def __init__(self, *, dropout: bool) -> None:
        self._dropout = dropout

    def __getitem__(self, name: str) -> Workload:
        if name not in facts():
            raise KeyError(name)
        return get(name, dropout=self._dropout)

    def __iter__(self) -> Iterator[str]:
        return iter(facts())

    def __len__(self) -> int:
        return len(facts())


WORKLOADS: Mapping[str, Workload] = _Registry(dropout=True)
# What `fusewright bench` runs: with dropout, a training step of compiled code could not be compared with eager's.
COMPARABLE: Mapping[str, Workload] = _Registry(dropout=False)
