"""Runs a function or script in a fresh process whose torch sees one GPU that executes nothing; returns what happened.

    result = run_in_null_gpu(my_function, steps=3)
    assert result.count("graph_launch") == 3 and not result.violations

Structure, launches, captures and allocations can be checked here; values and times cannot, and comparing them raises.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.nullgpu.build import NullGpuUnavailableError, build

REPO = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("child.py")
REFUSED_EXIT_CODE = 86
_REAL_GPU_SIGNS = ("/dev/nvidia0", "/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")
# Settings of the calling shell that would change what torch does in the child.
_NOT_INHERITED = re.compile(r"(TORCH|PYTORCH|TRITON|CUDA|NVIDIA|INDUCTOR|FUSEWRIGHT|NULLGPU|LD_)\w*")


@dataclass(frozen=True)
class Event:
    """One line of the log: `kind` and its fields, all text. README.md lists kinds and fields."""

    kind: str
    fields: dict[str, str]

    def __getitem__(self, field: str) -> str:
        return self.fields[field]

    @property
    def captured(self) -> bool:
        """Whether this work became a node of a graph instead of running."""
        return self.fields.get("capture", "0") != "0"


@dataclass(frozen=True)
class Result:
    """What a run left behind. It holds no tensors, on purpose: nothing computed on the null GPU means anything."""

    returned: Any
    """What the function returned, through JSON. For a script: its last line of output if that is JSON, else None."""
    events: tuple[Event, ...]
    stdout: str
    stderr: str

    def of(self, kind: str, **fields: str) -> list[Event]:
        """Events of one kind whose fields equal those given."""
        return [e for e in self.events if e.kind == kind and all(e.fields.get(k) == v for k, v in fields.items())]

    def count(self, kind: str, **fields: str) -> int:
        """How many events `of` finds."""
        return len(self.of(kind, **fields))

    def phase(self, label: str) -> Result:
        """The part of the log from `mark(label)` to the next mark. Raises KeyError if there is no such mark."""
        marks = [i for i, e in enumerate(self.events) if e.kind == "mark"]
        starts = [i for i in marks if self.events[i]["label"] == label]
        if not starts:
            raise KeyError(f"no mark {label!r}; marks: {[self.events[i]['label'] for i in marks]}")
        end = next((i for i in marks if i > starts[0]), len(self.events))
        return Result(self.returned, self.events[starts[0] + 1 : end], self.stdout, self.stderr)

    @cached_property
    def violations(self) -> list[str]:
        """What broke a rule of stream capture or used a dead handle, in words."""
        return [f"{e['what']} ({e['error']})" for e in self.of("violation")]

    @cached_property
    def launched(self) -> list[str]:
        """Names of the kernels that ran one by one, outside any capture, in order; replayed ones are not among them."""
        return [e["name"] for e in self.of("launch") if not e.captured]

    @cached_property
    def captured(self) -> list[str]:
        """Names of the kernels that were recorded into graphs, in order."""
        return [e["name"] for e in self.of("launch") if e.captured]

    @cached_property
    def stubs(self) -> set[str]:
        """CUDA functions that were called although they are not modelled: doubt what depends on them."""
        return {e["name"] for e in self.of("stub")}


class NullGpuRunError(Exception):
    """The child failed: it raised, crashed, or ran past its time. The message holds the end of its error output."""


def unavailable_reason() -> str | None:
    """Say why the null GPU cannot be used here, or None if it can. Builds the library if need be."""
    if sys.platform != "linux":
        return "the null GPU needs Linux"
    for sign in _REAL_GPU_SIGNS:
        if os.path.exists(sign):
            return f"this machine has a real NVIDIA GPU ({sign}); the null GPU refuses to stand in for it"
    try:
        build()
    except NullGpuUnavailableError as error:
        return str(error)
    return None


def require_null_gpu() -> None:
    """Skip the calling test, with the reason, where the null GPU cannot be used."""
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(f"null GPU: {reason}")


def run_in_null_gpu(
    target: Callable[..., Any] | Path,
    *,
    cc: int = 90,
    timeout_s: float = 240,
    env: dict[str, str] | None = None,
    **arguments: Any,
) -> Result:
    """Run `target` in a fresh process on the null GPU.

    Args:
        target: a module-level function (its file is loaded in the child by path; arguments and result pass as JSON),
            or the path of a script.
        cc: compute capability times ten: 80 (A100), 90 (H200) or 100 (B200).
        timeout_s: seconds after which the child is killed.
        env: further environment variables.
        arguments: keyword arguments of the function.

    Raises:
        NullGpuRunError: the child raised, crashed or ran past `timeout_s`.
    """
    require_null_gpu()
    if isinstance(target, Path):
        request: dict[str, Any] = {"script": str(target)}
    else:
        if "<" in target.__qualname__:
            raise ValueError(f"{target.__qualname__} must be a module-level function: the child finds it by name")
        request = {"file": inspect.getfile(target), "function": target.__qualname__, "arguments": arguments}
    scratch = Path(tempfile.mkdtemp(prefix="nullgpu-"))
    try:
        return _run(json.dumps(request), _environment(scratch, cc) | (env or {}), scratch / "events.log", timeout_s)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _environment(scratch: Path, cc: int) -> dict[str, str]:
    library = build()
    kept = {name: value for name, value in os.environ.items() if not _NOT_INHERITED.fullmatch(name)}
    return kept | {
        "LD_PRELOAD": str(library / "libcuda.so.1"),
        "LD_LIBRARY_PATH": str(library),
        "NULLGPU_CC": str(cc),
        "NULLGPU_LOG": str(scratch / "events.log"),
        "PYTHONPATH": str(REPO),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),  # a tuning result from here must never reach a real run
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "CUDA_MODULE_LOADING": "LAZY",
    }


def _run(request: str, env: dict[str, str], log: Path, timeout_s: float) -> Result:
    command = [sys.executable, str(CHILD), request]
    try:
        done = subprocess.run(
            command, env=env, cwd=log.parent, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as late:
        tail = late.stderr[-3000:].decode(errors="replace") if isinstance(late.stderr, bytes) else late.stderr
        raise NullGpuRunError(f"no end after {timeout_s} s; stderr ends:\n{tail}") from late
    if done.returncode != 0:
        what = "refused to load" if done.returncode == REFUSED_EXIT_CODE else f"exit status {done.returncode}"
        raise NullGpuRunError(f"{what}; stderr ends:\n{done.stderr[-6000:]}")
    return Result(_last_json(done.stdout), _read_log(log), done.stdout, done.stderr)


def _last_json(stdout: str) -> Any:
    lines = stdout.strip().splitlines()
    try:
        return json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        return None  # a script need not print JSON


def _read_log(path: Path) -> tuple[Event, ...]:
    events = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        kind, *fields = line.split("\t")
        events.append(Event(kind, dict(field.split("=", 1) for field in fields if "=" in field)))
    return tuple(events)
