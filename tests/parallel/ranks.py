"""Starts several gloo ranks on this machine for a test; a rank that hangs fails the test instead of stopping it."""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import multiprocessing.context
import os
import pathlib
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist


def run_ranks(worker: Callable[..., Any], world: int, folder: pathlib.Path, *, timeout_s: float = 240.0) -> list[Any]:
    """Call `worker(rank, world)` in `world` fresh processes with a default process group; return what each returned.

    `worker` is a function of an importable module; its result is pickled. The ranks meet through a file in `folder`, so
    that no port can be taken.
    """
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_main, args=(worker, rank, world, folder)) for rank in range(world)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + timeout_s
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    hanging = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in hanging:
        _end_with_stacks(ranks[rank])
    left = [path for path in sorted(folder.glob("rank*.*")) if path.suffix in (".error", ".stacks")]
    trouble = [f"{path.name}:\n{path.read_text()}" for path in left if path.stat().st_size]
    if trouble or hanging or any(process.exitcode for process in ranks):
        codes = [process.exitcode for process in ranks]
        pytest.fail(
            f"ranks still running after {timeout_s:.0f} s: {hanging}; exit codes {codes}\n" + "\n".join(trouble)
        )
    return [pickle.loads((folder / f"rank{rank}.pickle").read_bytes()) for rank in range(world)]


def _end_with_stacks(process: multiprocessing.context.SpawnProcess) -> None:
    """End a rank that hangs; where its threads stood is left in its file of stacks."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGABRT)
    process.join(10.0)
    process.kill()
    process.join()


def _main(worker: Callable[..., Any], rank: int, world: int, folder: pathlib.Path) -> None:
    torch.set_num_threads(1)
    stacks = (folder / f"rank{rank}.stacks").open("w")
    faulthandler.enable(stacks)  # writes on SIGABRT, and on a crash
    try:
        store = dist.FileStore(str(folder / "store"), world)
        limit = datetime.timedelta(seconds=120)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        result = worker(rank, world)
        (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(result))
        dist.barrier()  # nobody leaves while another still talks to it
        dist.destroy_process_group()
    except BaseException:
        (folder / f"rank{rank}.error").write_text(traceback.format_exc())
        raise
