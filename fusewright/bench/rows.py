"""The rows of a benchmark: what each holds beside the times, and how a file of them is read, checked and added to."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import platform
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from fusewright.errors import UserInputError

Row = dict[str, Any]


def provenance(threads: int | None = None) -> Row:
    """On what a row was measured, and when."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": machine_name(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_flags": _cpu_flags(),
        "clock": _clock(),
        "cores": os.cpu_count(),
        "threads": threads or torch.get_num_threads(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


COMPARABLE_BY = ("machine", "torch", "cpu", "threads")


def check_same_place(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Refuse to go on with a file of another machine or version.

    Raises:
        UserInputError: naming what differs.
    """
    here = provenance()
    for row in rows:
        for name in COMPARABLE_BY:
            if row.get(name) != here[name]:
                raise UserInputError(
                    f"--resume: {path} holds rows with {name} {row.get(name)}, and here it is {here[name]}; "
                    "write to another file, or run where it was begun."
                )


def newest(rows: Sequence[Row]) -> list[Row]:
    """The last row of each cell and provider: a cell that a kill cut short was measured again."""
    return list({(row["cell"], row["provider"]): row for row in rows}.values())


def whole_cells(rows: Sequence[Row], wanted: Mapping[str, Collection[str]]) -> set[str]:
    """The cells of `wanted` that have a row for each of their providers."""
    seen: dict[str, set[str]] = {}
    for row in rows:
        seen.setdefault(row["cell"], set()).add(row["provider"])
    return {cell for cell, providers in wanted.items() if seen.get(cell, set()) >= set(providers)}


def with_rates(rows: list[Row], limits: Mapping[str, float]) -> list[Row]:
    """Add to each row the rate of its model FLOPs, and what that is of the best rate of a matrix product here."""
    flops = next((row["flops"] for row in rows if row.get("flops")), None)
    for row in rows:
        row |= {"flops": flops, "limits": dict(limits)}
        if flops and row.get("median_ms"):
            row["gflops_per_s"] = round(flops / row["median_ms"] / 1e6, 2)
            row["roofline_fraction"] = round(row["gflops_per_s"] / limits["matmul_gflops"], 4)
    return rows


def read_rows(path: pathlib.Path) -> list[Row]:
    """The whole rows of a JSON-lines file; a line that a kill cut short is left out."""
    rows: list[Row] = []
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def append_rows(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Append the rows of one cell in a single write; where a kill cut the last line short, on a new line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else "\n" + text
        file.write(text.encode())


def check_writable(path: pathlib.Path) -> None:
    """Make the file and its folder where they are missing, before anything is measured.

    Raises:
        UserInputError: no row could be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise UserInputError(f"--output: {path} cannot be written: {error.strerror}; give another file.") from error


def machine_name() -> str:
    """Kind of processor and count, as a folder name; no host name."""
    model = _cpuinfo("model name") or "cpu"
    slug = "-".join("".join(c if c.isalnum() else " " for c in model.lower()).split())
    return f"{slug}-{os.cpu_count()}cores"


FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "sve")


def _cpu_flags() -> str:
    """Those of the processor's extensions that decide which kernels run."""
    has = (_cpuinfo("flags") or _cpuinfo("Features") or "").split()
    return " ".join(flag for flag in FLAGS if flag in has)


def _cpuinfo(field: str) -> str | None:
    with open("/proc/cpuinfo") as file:
        return next((line.split(":", 1)[1].strip() for line in file if line.startswith(field)), None)


def _clock() -> str:
    """Python's clock, and the kernel's source behind it where that can be read."""
    source = pathlib.Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    kernel = source.read_text().strip() if source.is_file() else "unknown"
    return f"{time.get_clock_info('perf_counter').implementation} on {kernel}"
