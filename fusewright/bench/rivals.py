"""The sides of a benchmark cell: eager, torch.compile and fusewright, each a subject in a process of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch._dynamo
from torch import nn

from fusewright.autotune.jobs import StepSubject, load
from fusewright.errors import unknown_name

OPTIMIZE = "fusewright.api:optimize"  # named, not imported: this comes before the public API
EXPLAIN = "fusewright.api:explain"


class RivalSubject(StepSubject):
    """One workload at one length and in one mode, run by one provider."""

    def __init__(self, source: str, length: int, training: bool, provider: str, verify: str = "first_call") -> None:
        super().__init__(source, length, training)
        if provider not in PROVIDERS:
            raise unknown_name("provider", provider, PROVIDERS)
        self.provider = provider
        self.verify = verify
        self.model = PROVIDERS[provider](self, copy.deepcopy(self.eager))

    def facts(self) -> dict[str, Any]:
        """Graphs, breaks and, for fusewright, what `explain` says."""
        counters = torch._dynamo.utils.counters
        facts: dict[str, Any] = {
            "graphs": int(counters["stats"]["unique_graphs"]),
            "breaks": int(sum(counters["graph_break"].values())),
        }
        if self.provider == "fusewright":
            told = load(EXPLAIN)(self.model).to_dict()
            facts |= {k: told[k] for k in ("rewrites", "recognised", "fallbacks", "verified", "recompiles", "seconds")}
        return facts


def _eager(subject: RivalSubject, model: nn.Module) -> nn.Module:
    return model


def _compile(subject: RivalSubject, model: nn.Module) -> nn.Module:
    model.compile()
    return model


def _fusewright(subject: RivalSubject, model: nn.Module) -> nn.Module:
    optimize = load(OPTIMIZE)
    workload = subject.workload
    name = workload.length_name
    # a length of 1 belongs to no bucket: torch specialises on it
    edges = sorted({max(length, 2) for length in workload.lengths})
    optimized: nn.Module = optimize(
        model, dims=workload.dims, buckets={name: edges} if name is not None else None, verify=subject.verify
    )
    return optimized


PROVIDERS: dict[str, Callable[[RivalSubject, nn.Module], nn.Module]] = {
    "eager": _eager,
    "compile": _compile,
    "fusewright": _fusewright,
}
