"""The sides of a benchmark cell: eager, torch.compile, engines and fusewright, each a subject in its own process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch._dynamo
from torch import nn
from torch._inductor import config as inductor_config

from fusewright.autotune.jobs import StepSubject, load
from fusewright.bench.engines import ENGINES
from fusewright.errors import unknown_name

OPTIMIZE = "fusewright.api:optimize"  # named, not imported: this comes before the public API
EXPLAIN = "fusewright.api:explain"

# The settings of torch.compile that its documentation recommends; what stands under `compile_best` is the fastest.
BEST_OF = ("compile_freezing", "compile_max_autotune", "compile_cpp_wrapper")
INFERENCE_ONLY = ("compile_freezing", *ENGINES)


class RivalSubject(StepSubject):
    """One workload at one length and in one mode, run by one provider."""

    def __init__(self, source: str, length: int, training: bool, provider: str, verify: str = "first_call") -> None:
        super().__init__(source, length, training)
        if provider not in PROVIDERS:
            raise unknown_name("provider", provider, PROVIDERS)
        self.provider = provider
        self.verify = verify
        self.proof: dict[str, Any] | None = None
        self.model = PROVIDERS[provider](self, copy.deepcopy(self.eager))

    def facts(self) -> dict[str, Any]:
        """Graphs, breaks, proof that settings took and, for fusewright, what `explain` says."""
        if self.proof is not None:
            return {"proof": self.proof}
        counters = torch._dynamo.utils.counters
        facts: dict[str, Any] = {
            "graphs": int(counters["stats"]["unique_graphs"]),
            "breaks": int(sum(counters["graph_break"].values())),
        }
        if self.provider in BEST_OF:
            facts["proof"] = _proof(counters["inductor"])
        if self.provider in ("fusewright", "fusewright_exact"):
            told = load(EXPLAIN)(self.model).to_dict()
            facts |= {k: told[k] for k in ("rewrites", "recognised", "fallbacks", "verified", "recompiles", "seconds")}
        return facts

    def costs(self) -> dict[str, float]:
        """As for every subject, but no peak of an engine, which allocates memory that torch does not see."""
        costs = super().costs()
        return {"flops": costs["flops"]} if self.provider in ENGINES else costs


def _proof(counters: Mapping[str, int]) -> dict[str, int | bool]:
    """What shows that a setting took; a warm cache hides the counts of what it holds."""
    return {
        "packed_weights": sum(n for name, n in counters.items() if name.endswith("weight_pack_matcher_count")),
        "tuned_products": int(counters["select_algorithm_autotune"]),
        "cpp_templates": int(counters["cpp_templated_kernel_counter"]),
        "fx_cache_hits": int(counters["fxgraph_cache_hit"]),
    }


def _eager(subject: RivalSubject, model: nn.Module) -> nn.Module:
    return model


def _compile(subject: RivalSubject, model: nn.Module) -> nn.Module:
    model.compile()
    return model


def _compile_dynamic(subject: RivalSubject, model: nn.Module) -> nn.Module:
    model.compile(dynamic=True)
    return model


def _compile_freezing(subject: RivalSubject, model: nn.Module) -> nn.Module:
    """Weights as constants; only the global switch works, Dynamo reads it while it traces."""
    inductor_config.freezing = True
    return _compile(subject, model)


def _compile_max_autotune(subject: RivalSubject, model: nn.Module) -> nn.Module:
    model.compile(mode="max-autotune-no-cudagraphs")
    return model


def _compile_cpp_wrapper(subject: RivalSubject, model: nn.Module) -> nn.Module:
    model.compile(options={"cpp_wrapper": True})
    return model


def _engine(subject: RivalSubject, model: nn.Module) -> nn.Module:
    """Exports at the first call, so that a cold start counts it, as torch.compile's does."""

    def first(*args: Any, **kwargs: Any) -> Any:
        del model.__dict__["forward"]
        made = ENGINES[subject.provider](model, args, kwargs)
        subject.proof = made.proof
        model.__dict__["forward"] = made.forward
        return made.forward(*args, **kwargs)

    model.__dict__["forward"] = first
    return model


def _fusewright(subject: RivalSubject, model: nn.Module) -> nn.Module:
    """The workload's lengths as upper edges: a bucket serves every length up to its edge."""
    return _optimized(subject, model, sorted)


def _fusewright_exact(subject: RivalSubject, model: nn.Module) -> nn.Module:
    """The workload's lengths as exact sizes, as torch.compile's default compiles for the one that it sees."""
    return _optimized(subject, model, set)


def _optimized(subject: RivalSubject, model: nn.Module, buckets: Callable[[set[int]], Collection[int]]) -> nn.Module:
    name, workload = subject.workload.length_name, subject.workload
    sizes = {max(length, 2) for length in workload.lengths}  # 1 belongs to no bucket: torch specialises on it
    optimized: nn.Module = load(OPTIMIZE)(
        model,
        dims=workload.dims,
        buckets={name: buckets(sizes)} if name is not None else None,
        verify=subject.verify,
    )
    return optimized


PROVIDERS: dict[str, Callable[[RivalSubject, nn.Module], nn.Module]] = {
    "eager": _eager,
    "compile": _compile,
    "compile_dynamic": _compile_dynamic,
    "compile_freezing": _compile_freezing,
    "compile_max_autotune": _compile_max_autotune,
    "compile_cpp_wrapper": _compile_cpp_wrapper,
    **dict.fromkeys(ENGINES, _engine),
    "fusewright": _fusewright,
    "fusewright_exact": _fusewright_exact,
}
