"""The sides of a benchmark cell: eager, torch.compile and fusewright, each a subject in a process of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import nn

from fusewright.autotune.jobs import LEARNING_RATE, load
from fusewright.autotune.trial import Role
from fusewright.errors import unknown_name
from fusewright.job_file import resolve
from fusewright.workload import observe

OPTIMIZE = "fusewright.api:optimize"  # named, not imported: this comes before the public API
EXPLAIN = "fusewright.api:explain"


class RivalSubject:
    """One workload at one length and in one mode, run by one provider; lives in a worker process.

    A training step is forward, loss, backward and cleared gradients: the optimizer is the same for all and left out.
    """

    def __init__(self, source: str, length: int, training: bool, provider: str, verify: str = "first_call") -> None:
        self.workload = resolve(source)
        self.length, self.training = length, training
        self.eager = self.workload.build(training=training)
        self.start = {name: value.clone() for name, value in self.eager.state_dict().items()}
        if provider not in PROVIDERS:
            raise unknown_name("provider", provider, PROVIDERS)
        self.provider = provider
        self.verify = verify
        self.model = PROVIDERS[provider](self, copy.deepcopy(self.eager))
        self.args, self.kwargs = self.workload.make_inputs(length)

    def step(self) -> None:
        """One inference or training step."""
        if not self.training:
            with torch.no_grad():
                self.model(*self.args, **self.kwargs)
            return
        self.workload.scalar_loss(self.model(*self.args, **self.kwargs)).backward()
        self.model.zero_grad(set_to_none=True)

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

    def outputs(self, seed: int, role: Role) -> dict[str, Any]:
        """Outputs, buffers, and in training loss, gradients and the parameters after one step of plain descent."""
        if role is Role.FLOAT64:
            model = copy.deepcopy(self.eager).double()
        else:
            model = self.model if role is Role.CANDIDATE else self.eager
        model.load_state_dict(self.start)
        seen = observe(self.workload, model, self.length, seed, training=self.training)
        if self.training:
            torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
            seen["parameters"] = {name: p.detach().clone() for name, p in model.named_parameters()}
            model.zero_grad(set_to_none=True)
        return seen


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
