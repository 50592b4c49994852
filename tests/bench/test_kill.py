"""`kill -9` in the middle of a run costs one cell, leaves no process behind, and `--resume` finishes the rest."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

JOB = """
import torch
from torch import nn
from fusewright import Workload

class Net(nn.Module):  # a matrix product alone: nothing to compile in C++
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return x @ self.weight

def inputs(length, seed):
    return (torch.randn(length, 8, generator=torch.Generator().manual_seed(seed)),), {}

WORKLOADS = [Workload("net", "small", Net, inputs, (4, 8, 16), {"x": {0: "rows"}}, lambda out: out.sum())]
"""


def bench(job: pathlib.Path, output: pathlib.Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fusewright", "bench", str(job), "--mode", "inference", "--providers", "eager"]
    command += ["--budget", "2", "--pairs", "3", "-o", str(output), "--resume"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def rows(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def workers(of: pathlib.Path) -> list[int]:
    """Processes that were started with the job's folder among their environment or arguments."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
        if os.fsencode(of) in text and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_killed_run_loses_one_cell_and_is_finished_by_resume(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    job, output = tmp_path / "job.py", tmp_path / "rows.jsonl"
    job.write_text(JOB)
    with bench(job, output) as first:
        end = time.monotonic() + 200
        while not rows(output):
            assert first.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < end, "no cell was finished"
            time.sleep(0.1)
        time.sleep(1)  # into the next cell
        first.send_signal(signal.SIGKILL)
    kept = rows(output)
    assert {row["cell"] for row in kept} == {"net inference rows=4"}
    end = time.monotonic() + 20
    while workers(tmp_path) and time.monotonic() < end:
        time.sleep(0.2)
    assert workers(tmp_path) == []
    with bench(job, output) as second:
        assert second.wait(timeout=300) == 0
    assert rows(output)[: len(kept)] == kept
    found = [(row["cell"], row["provider"]) for row in rows(output)]
    cells = [f"net inference rows={length}" for length in (4, 8, 16)]
    assert found == [(cell, provider) for cell in cells for provider in ("compile", "eager")]
