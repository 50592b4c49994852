"""What is tuned: a job is a list of cells (one workload, mode and length each), and a subject that runs one of them."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from fusewright.autotune.key import KeyContext, TuningKey
from fusewright.autotune.trial import Json, Provider, Role
from fusewright.capture.shapes import ShapeBucket
from fusewright.capture.variant import GraphVariant
from fusewright.costs.op_cost import count_flops
from fusewright.costs.peak_memory import peak_mib
from fusewright.errors import UserInputError
from fusewright.job_file import resolve
from fusewright.workload import Workload, observe_step

# named, not imported: a job comes before the public API
OPTIMIZE = "fusewright.api:optimize_with"
RECORD_OF = "fusewright.api:record_of"


@dataclass(frozen=True)
class Cell:
    """One thing to decide.

    Attributes:
        name: for people, as "bert inference tokens=128".
        provider: makes the subject when `variant` (JSON text) is added to its arguments. Its `facts()` must hold
            `keys`: the tuning keys (as from `TuningKey.to_dict`) that the backend asked for.
        training: tolerances of the gate.
    """

    name: str
    provider: Provider
    training: bool

    def with_variant(self, variant: GraphVariant) -> Provider:
        """The provider that runs this cell as `variant` says."""
        return replace(self.provider, kwargs={**self.provider.kwargs, "variant": variant.to_json()})


@dataclass(frozen=True)
class TuningJob:
    """Cells that are tuned one after the other."""

    name: str
    cells: tuple[Cell, ...]


def workload_job(
    source: str, workload: Workload, *, modes: Sequence[str] = ("inference", "training"), buckets: Json = None
) -> TuningJob:
    """Every mode and length of a workload.

    Args:
        source: what workers load the workload by: "place#name" as `fusewright.job_file.source_of` makes it, or
            "module:name" of a workload or of a function without arguments that makes one.
        modes: "inference", "training"; the latter is left out where the workload does not train.
        buckets: as for `optimize`: dim name -> upper edges; by default the workload's lengths are the edges.

    Raises:
        UserInputError: an unknown mode.
    """
    if unknown := set(modes) - {"inference", "training"}:
        raise UserInputError(f"modes: {', '.join(sorted(unknown))} is unknown; use 'inference' and 'training'.")
    if buckets is None and workload.length_name is not None:
        buckets = {workload.length_name: [max(length, 2) for length in workload.lengths]}
    cells = []
    for mode in modes:
        if mode == "training" and not workload.train:
            continue
        for length in workload.lengths:
            kwargs: dict[str, Json] = {
                "source": source,
                "length": length,
                "training": mode == "training",
                "buckets": buckets,
            }
            name = f"{workload.name} {mode} {workload.length_name or 'static'}={length}"
            cells.append(Cell(name, Provider(f"{__name__}:WorkloadSubject", kwargs), mode == "training"))
    return TuningJob(workload.name, tuple(cells))


def load(source: str) -> Any:
    """The object named by "module:name", or the workload named by "job.py#name" (see `job_file`).

    Raises:
        UserInputError: there is none.
    """
    if "#" in source:
        return resolve(source)
    module, _, name = source.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserInputError(f"{source!r} names nothing that can be imported: {error}.") from error


class StepSubject:
    """One workload at one length and in one mode; lives in a worker process. A subclass makes `model` from `eager`.

    A training step is forward, loss, backward and cleared gradients: the optimizer is the same for all and left out.
    """

    model: torch.nn.Module

    def __init__(self, source: str, length: int, training: bool, device: str = "cpu") -> None:
        found = load(source)
        self.workload: Workload = found if isinstance(found, Workload) else found()
        self.length, self.training, self.device = length, training, torch.device(device)
        self.eager = self.workload.build(training=training).to(self.device)
        self.start = {name: value.clone() for name, value in self.eager.state_dict().items()}
        args, kwargs = self.workload.make_inputs(length)
        self.args: tuple[Any, ...] = self._moved(args)
        self.kwargs: dict[str, Any] = self._moved(kwargs)

    def _moved(self, inputs: Any) -> Any:
        return tree_map(lambda leaf: leaf.to(self.device) if isinstance(leaf, torch.Tensor) else leaf, inputs)

    def step(self) -> None:
        """One inference or training step."""
        if not self.training:
            with torch.no_grad():
                self.model(*self.args, **self.kwargs)
        else:
            self.workload.scalar_loss(self.model(*self.args, **self.kwargs)).backward()
            self.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def costs(self) -> dict[str, float]:
        """`peak_mb` of a step, and its `flops`: the workload's own figure, else counted while it runs in eager."""
        if self.workload.flops is not None:
            mode = "training" if self.training else "inference"
            return {"peak_mb": peak_mib(self.step, self.device), "flops": self.workload.flops(self.length, mode)}
        model, self.model = self.model, self.eager
        try:
            flops = count_flops(self.step)
        finally:
            self.model = model
        return {"peak_mb": peak_mib(self.step, self.device), "flops": flops}

    def outputs(self, seed: int, role: Role) -> dict[str, Any]:
        """Outputs, buffers, and in training loss, gradients and the parameters after one step of plain descent."""
        if role is Role.FLOAT64:
            model = copy.deepcopy(self.eager).double()
        else:
            model = self.model if role is Role.CANDIDATE else self.eager
        model.load_state_dict(self.start)
        return observe_step(self.workload, model, self.length, seed, training=self.training)


class WorkloadSubject(StepSubject):
    """A workload optimized by one variant."""

    def __init__(
        self,
        source: str,
        length: int,
        training: bool,
        variant: str,
        buckets: Mapping[str, Sequence[int]] | None = None,
        device: str = "cpu",
        optimize: str = OPTIMIZE,
    ) -> None:
        super().__init__(source, length, training, device)
        self.variant, self.is_ours = GraphVariant.from_json(variant), optimize == OPTIMIZE
        self.keys: dict[str, dict[str, Any]] = {}
        optimize_with: Callable[..., torch.nn.Module] = load(optimize)
        self.model = optimize_with(
            copy.deepcopy(self.eager), choose=self._choose, dims=self.workload.dims, buckets=buckets, verify="off"
        )

    def _choose(self, fingerprint: str, bucket: ShapeBucket, device: torch.device) -> GraphVariant:
        key = TuningKey(fingerprint, bucket, KeyContext.current(device))
        self.keys[key.digest()] = key.to_dict()
        return self.variant

    def facts(self) -> dict[str, Any]:
        """The keys that the backend asked for so far, and how often each pass has rewritten the graphs.

        Raises:
            RuntimeError: it asked for none: the model runs as it is, and a time of it would say nothing of the variant.
        """
        if not self.keys:
            raise RuntimeError(f"no graph of {self.workload.name} was captured, so no variant runs in it")
        found: dict[str, Any] = {"keys": list(self.keys.values())}
        if self.is_ours:
            found["rewrites"] = dict(load(RECORD_OF)(self.model).rewrites)
        return found
