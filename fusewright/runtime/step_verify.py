"""Makes a step one that can be trusted: captured, rewritten, lowered, its memory checked, compared with eager."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fusewright.capture.fingerprint import fingerprint
from fusewright.capture.graph import copy_graph
from fusewright.capture.record import Record, Verdict
from fusewright.capture.shapes import ShapeBucket
from fusewright.capture.step.forward import StepForward, capture_forward
from fusewright.capture.step.function import Slot, StepFunction, autocast_off
from fusewright.capture.step.state import Call, LiveStep
from fusewright.capture.step.trace import WholeStep, ambient_key, capture
from fusewright.capture.variant import GraphVariant, Lowering
from fusewright.errors import CaptureError
from fusewright.numerics import TreeComparison, compare_trees
from fusewright.passes.base import Pass, PassContext, Stage
from fusewright.pipeline.pipeline import Pipeline, PipelineResult
from fusewright.runtime.fakes import BucketInputs
from fusewright.runtime.lower import GraphHook, lower
from fusewright.runtime.slot import BucketSlot, Lowered
from fusewright.runtime.verdicts import VerdictFolder, verdict_key
from fusewright.runtime.verify import Comparison, why_not_comparable


def label(slot: Slot) -> str:
    """A name for a slot in records, such as `state 3 exp_avg`."""
    return f"{slot.role} {slot.number} {slot.name}".strip()


def eager_side(module: nn.Module, optimizer: Optimizer) -> tuple[Hashable, ...]:
    """What of the eager loop a graph does not tell; a verdict on an equal graph must not cover another loop.

    A wrapper such as DistributedDataParallel works in hooks below Python that no trace sees: only the comparison finds
    out, so it must not be skipped because the wrapped module alone was found right.
    """
    kinds = tuple(f"{type(part).__module__}.{type(part).__qualname__}" for part in module.modules())
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    devices = sorted({tensor.device.type for tensor in (*module.parameters(), *module.buffers())})
    return (kinds, type(optimizer).__qualname__, world, ambient_key(devices))


@dataclass(frozen=True)
class LoweringPlan:
    """How one captured step is lowered.

    Attributes:
        name: the step in records and dumps, such as "step0".
        passes: the passes that run, by stage.
        key: names the verdict on this lowering in every process.
    """

    name: str
    variant: GraphVariant
    ctx: PassContext
    passes: Mapping[Stage, Sequence[Pass]]
    key: str


class CompiledStep:
    """A lowered step of one signature; to `explain`, a fragment with one bucket.

    Attributes:
        label: the step in records.
        slots: its only bucket, which counts the calls that ran compiled.
    """

    def __init__(
        self, step: WholeStep, plan: LoweringPlan, run: Callable[..., Sequence[Tensor]], verdict: Comparison
    ) -> None:
        self.step, self.run, self.label, self._verdict = step, run, plan.name, verdict
        self.slots = (BucketSlot(plan.ctx.bucket),)
        self.slots[0].entries.append(Lowered(run, plan.variant, None, verdict))

    @property
    def dispatched(self) -> int:
        """How many calls ran compiled."""
        return self.slots[0].hits.value

    def summary(self) -> dict[str, int | bool | str]:
        """The graph's size and what it was compared with."""
        return {
            "nodes": self.step.nodes,
            "inputs": len(self.step.slots),
            "updated": len(self.step.updated),
            "random": self.step.random,
            "verified": ": ".join(filter(None, (self._verdict.what, self._verdict.detail))),
        }


NOT_VERIFIED = Comparison(None, "off", "")


class KnownToDisagreeError(Exception):
    """It was found earlier that a lowering disagrees with the eager loop."""

    def __init__(self, verdict: Comparison) -> None:
        super().__init__(verdict.detail)
        self.verdict = verdict


class StepBuilder:
    """Captures, plans and lowers steps, and keeps the verdicts on them for later processes."""

    def __init__(self, pipeline: Pipeline, record: Record, verdicts: VerdictFolder, lowering: Lowering) -> None:
        self.lowering = lowering
        self._pipeline, self._record, self._verdicts = pipeline, record, verdicts
        self._forwards: dict[Hashable, tuple[StepForward, PipelineResult]] = {}

    def capture(
        self, module: nn.Module, call: Call, live: LiveStep, name: str
    ) -> tuple[StepFunction, list[Tensor], WholeStep]:
        """The step as a function, its inputs now, and its graph, in which forward and loss are as passes leave them.

        Where those are no graph of their own, each pass is declined with the reason, and the user's Python is traced.

        Raises:
            CaptureError: the step holds something that one graph cannot; errors of the user's code come through.
        """
        function, flat = live.function(call)
        passes, ctx = self._forward_passes(flat)
        if not passes:
            return function, flat, capture(function, flat)
        try:
            key = live.forward_key(call)
            if key not in self._forwards:  # signatures that differ in gradients or optimizer share it
                captured = capture_forward(module, call.inputs, function.slots, flat)
                gm, result = self._pipeline.rewrite(lambda: copy_graph(captured.gm), passes, ctx, f"{name}.forward")
                self._forwards[key] = replace(captured, gm=gm), result
        except CaptureError as error:
            self._decline(passes, name, str(error))
            return function, flat, capture(function, flat)
        forward, result = self._forwards[key]
        function.forward = forward.loss if result.rewrites else None
        try:
            step = capture(function, flat)
        except Exception as error:
            if function.forward is None:
                raise
            function.forward = None
            self._decline(passes, name, f"{type(error).__name__}: {error}")
            return function, flat, capture(function, flat)
        self._report(result, f"{name}.forward")
        return function, flat, step

    def _decline(self, passes: Iterable[Pass], name: str, reason: str) -> None:
        text = f"forward and loss are no graph of their own: {reason}"
        self._record.add_passes(Counter(), Counter(), Counter({(one.name, name, text): 1 for one in passes}))

    def _forward_passes(self, tensors: Iterable[Tensor]) -> tuple[list[Pass], PassContext]:
        device = "cuda" if any(tensor.device.type == "cuda" for tensor in tensors) else "cpu"
        ctx = PassContext(ShapeBucket(), device, training=True, priced=self._pipeline.settings.cost)
        return self._pipeline.select(GraphVariant(lowering=self.lowering), Stage.FORWARD, ctx), ctx

    def plan(self, step: WholeStep, name: str, assumed: Hashable) -> LoweringPlan:
        """Choose variant and passes. `assumed`: what the step stands for beside its graph; its repr enters the key.

        Random ops stay torch's own under Inductor, so that the step draws the same numbers as the eager loop.
        """
        inductor = self.lowering is Lowering.INDUCTOR
        variant = GraphVariant(
            lowering=self.lowering, options=(("fallback_random", True),) if step.random and inductor else ()
        )
        ctx = PassContext(ShapeBucket(), "cuda" if "cuda" in step.device_types else "cpu", training=True)
        stages = (Stage.JOINT, Stage.POST_GRAD) if inductor else ()  # no other lowering has a place for them
        passes = {stage: self._pipeline.select(variant, stage, ctx) for stage in stages}
        # the graph does not tell which live tensor each input is, and a swap of two of them must not pass unseen
        roles = (step.slots, step.grad_outputs, step.updated, sorted(step.written), assumed)
        forward, _ = self._forward_passes(step.fakes)
        digests = [one.digest() for each in (forward, *passes.values()) for one in each]
        key = verdict_key(["step", fingerprint(step.graph_module), repr(roles), variant.to_json(), *digests])
        return LoweringPlan(name, variant, ctx, passes, key)

    def lower(self, step: WholeStep, plan: LoweringPlan) -> Callable[..., Sequence[Tensor]]:
        """Compile the graph of `step`, which stays as it is."""
        hooks = {stage: self._hook(stage, passes, plan) for stage, passes in plan.passes.items() if passes}
        inputs = BucketInputs(step.mode, list(step.fakes))
        with torch.no_grad(), autocast_off(step.device_types):
            graph = copy.deepcopy(step.graph_module)
            compiled, _ = lower(graph, inputs, plan.variant, hooks, self._record.add_refusal)
        return compiled

    def _hook(self, stage: Stage, passes: Sequence[Pass], plan: LoweringPlan) -> GraphHook:
        name = f"{plan.name}.{stage.value}"

        return GraphHook(self._pipeline, passes, plan.ctx, name, lambda result: self._report(result, name))

    def _report(self, result: PipelineResult, name: str) -> None:
        self._record.add_passes(result.rewrites, result.recognised, result.declines)
        for failed, reason in result.failures:
            self._record.add_fallback("pass", name, f"{failed}: {reason}")

    def known(self, step: WholeStep, plan: LoweringPlan) -> Comparison | None:
        """The verdict of an earlier process (or of an earlier `TrainStep`) on the same lowering, or None.

        Raises:
            KnownToDisagreeError: the verdict is bad.
        """
        # every rank has to repeat a step with collectives, so that none may skip the comparison that another one makes
        alone = why_not_comparable(step.graph_module) is None
        found = self._verdicts.read(plan.key) if alone else None
        if found is None:
            return None
        verdict = Comparison(found["ok"], f"{found['what']} (verified earlier)", found["detail"])
        self._record.add_verdict(Verdict(plan.name, verdict.what, verdict.ok, verdict.detail))
        if not verdict.ok:
            raise KnownToDisagreeError(verdict)
        return verdict

    def keep(self, plan: LoweringPlan, compared: TreeComparison) -> Comparison:
        """Record a verdict, passed or failed, for this process and later ones."""
        verdict = Comparison(compared.ok, "loss, gradients and all that the step writes", compared.reason)
        record = {"ok": verdict.ok, "what": verdict.what, "detail": verdict.detail, "graph": plan.name}
        self._verdicts.write(plan.key, record)
        self._record.add_verdict(Verdict(plan.name, verdict.what, verdict.ok, verdict.detail))
        return verdict


def check_memory(step: WholeStep, tensors: dict[Slot, Tensor]) -> None:
    """Refuse what a functional graph would get wrong: two inputs in the same memory, one of them written.

    Raises:
        CaptureError: naming the input.
    """
    for slot in step.written:
        if slot.role == "argument":
            raise CaptureError("forward changes one of its arguments in place")
    shared = overlapping(tensors, step.written)
    if shared is not None:
        raise CaptureError(f"{shared.role} {shared.number} shares memory with another input of the step and is changed")


def overlapping(tensors: Mapping[Slot, Tensor], written: Iterable[Slot]) -> Slot | None:
    """A written slot whose memory another slot shares, or None. Meant for one check per graph: it sorts all tensors."""
    changed = set(written)
    spans = sorted(
        (
            (t.untyped_storage().data_ptr(), int(t.storage_offset()) * t.itemsize, _end(t), slot)
            for slot, t in tensors.items()
        ),
        key=lambda span: span[:3],
    )
    reach: dict[int, tuple[int, Slot]] = {}
    for storage, start, end, slot in spans:
        last = reach.get(storage)
        if last is not None and start < last[0] and (slot in changed or last[1] in changed):
            return slot if slot in changed else last[1]
        if last is None or end > last[0]:
            reach[storage] = (end, slot)
    return None


def _end(tensor: Tensor) -> int:
    """First byte after the tensor in its storage; its start where it is empty."""
    start = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return start * tensor.itemsize
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (start + extent + 1) * tensor.itemsize


class StepVerifier:
    """Runs the compiled step on copies, before the eager loop runs on the live objects, and compares afterwards.

    So the live objects only ever see the eager loop here, and no model needs to be copied as an object. Random numbers
    are drawn twice from the same state.
    """

    def __init__(
        self, function: StepFunction, flat: Sequence[Tensor], step: WholeStep, compiled: Callable[..., Sequence[Tensor]]
    ) -> None:
        self._function = function
        self._step = step
        self.before = [tensor.detach().clone() for tensor in flat]
        self._devices = sorted({t.device.index for t in flat if t.device.type == "cuda"})
        self._results = self._run(compiled)

    def _run(self, compiled: Callable[..., Sequence[Tensor]]) -> dict[str, Tensor]:
        """What `compiled` returns and writes, on copies."""
        copies = {slot: tensor.clone() for slot, tensor in zip(self._function.slots, self.before, strict=True)}
        with torch.random.fork_rng(self._devices), torch.no_grad(), autocast_off(self._step.device_types):
            loss, *grads = compiled(*(copies[slot] for slot in self._step.slots))
        handed_out = {Slot("grad", i): grad for i, grad in zip(self._step.grad_outputs, grads, strict=True)}
        every = copies | handed_out
        return {"loss": loss} | {label(slot): every[slot] for slot in self._step.results}

    def compare(
        self, loss: Tensor, live: Mapping[Slot, Tensor], float64: Callable[[], dict[str, Tensor]]
    ) -> TreeComparison:
        """Judge the compiled step by the eager loop's `loss` and by what it left in the `live` objects.

        `float64` runs the eager loop in float64; called only where the results are not close as they are.
        """
        expected = {"loss": loss} | {label(slot): tensor for slot, tensor in live.items()}

        # in float64 the same generator draws other numbers, so a random step has no float64 reference
        return compare_trees(self._results, expected, None if self._step.random else float64, training=True)
