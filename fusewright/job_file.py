"""Finds workloads by text, so that a worker process can be told what to load: `examples/jobs/bert.py#bert`."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from fusewright.errors import UserInputError, unknown_name
from fusewright.workload import Workload


def load_workloads(place: str) -> dict[str, Workload]:
    """The workloads of a job file or module, by name, in the order they are written.

    Args:
        place: a path ending in .py, or a module name; `module:NAME` takes another collection than `WORKLOADS`.

    Raises:
        UserInputError: there is no such file or module, or it holds no workloads.
    """
    module_name, _, attribute = place.partition(":")
    module = _load_file(module_name) if module_name.endswith(".py") else _load_module(module_name)
    attribute = attribute or "WORKLOADS"
    if not hasattr(module, attribute):
        raise UserInputError(f"{place}: defines no {attribute}; write `{attribute} = [fusewright.Workload(...)]`.")
    found: Any = getattr(module, attribute)
    if isinstance(found, Mapping):
        return dict(found)
    if not isinstance(found, Sequence) or not all(isinstance(item, Workload) for item in found):
        raise UserInputError(f"{place}: {attribute} must be a list of fusewright.Workload.")
    return {item.name: item for item in found}


def source_of(place: str, name: str) -> str:
    """The text that `resolve` understands in any process, whatever its working folder."""
    if place.partition(":")[0].endswith(".py"):
        place = str(pathlib.Path(place).resolve())
    return f"{place}#{name}"


def resolve(source: str) -> Workload:
    """The workload that `source_of` named.

    Raises:
        UserInputError: there is no such place.
        UnknownNameError: the place has no such workload.
    """
    place, _, name = source.partition("#")
    workloads = load_workloads(place)
    if name not in workloads:
        raise unknown_name(f"workload in {place}", name, workloads)
    return workloads[name]


def _load_file(path: str) -> ModuleType:
    file = pathlib.Path(path)
    if not file.is_file():
        raise UserInputError(f"job file {path} does not exist.")
    spec = importlib.util.spec_from_file_location(f"fusewright_job_{file.stem}", file)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look the module up by name
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserInputError(f"{name!r} is neither a .py file nor a module that can be imported: {error}.") from error
