"""The most memory that a step holds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch


def peak_mib(step: Callable[[], object], device: torch.device) -> float:
    """Most that torch's allocator hands out at once during `step()`, MiB above what lives before it.

    Resident memory would say nothing on CPU: malloc keeps what an earlier step freed.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    assert found.profiler is not None, "the profiler has stopped"
    assert found.profiler.kineto_results is not None, "the profiler has stopped"
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events), default=0) / 2**20
