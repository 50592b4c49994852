"""One captured graph and its table of shape buckets, each filled on the first call that lands in it."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch

from fusewright.capture.dynamo_compat import capture_lock, fully_shard_is_used, short_collections
from fusewright.capture.graph import CapturedGraph
from fusewright.capture.record import Record, Verdict
from fusewright.capture.shapes import Axis, Buckets, ShapeBucket
from fusewright.capture.values import device_of
from fusewright.capture.variant import GraphVariant, Launch
from fusewright.config import Verify
from fusewright.errors import DimsError, FallbackError, UserInputError, VerificationError
from fusewright.passes.base import Pass, PassContext, Stage
from fusewright.pipeline.pipeline import Pipeline, PipelineResult
from fusewright.runtime.cudagraph.launch import captured_regions, why_not_captured
from fusewright.runtime.cudagraph.runner import GraphPool, RegionRunner
from fusewright.runtime.fakes import bucket_inputs, separate_memory
from fusewright.runtime.lower import GraphHook, lower, lower_frozen
from fusewright.runtime.reproducer import REPRODUCERS, write_reproducer
from fusewright.runtime.slot import EAGER, BucketSlot, Lowered, Test, both, ladder
from fusewright.runtime.verdicts import VerdictFolder, verdict_key
from fusewright.runtime.verify import Comparison, EagerRaisedError, verify

Callee = Callable[..., Any]
REPLAYED = 3  # calls that warm a CUDA graph up, capture it, and replay it
Choose = Callable[[str, ShapeBucket, torch.device], GraphVariant]


@dataclass(frozen=True)
class Services:
    """What a fragment needs from the optimized model it belongs to."""

    pipeline: Pipeline
    record: Record
    choose: Choose
    buckets: Buckets
    verdicts: VerdictFolder
    verify: Verify = Verify.FIRST_CALL
    strict: bool = False
    graph_pools: dict[torch.device, GraphPool] = field(default_factory=lambda: defaultdict(GraphPool))


class Fragment:
    """Dispatches calls of one captured graph to the lowering of their bucket."""

    def __init__(self, captured: CapturedGraph, services: Services, where: str, *, exact: bool = True) -> None:
        """`exact`: the names of the symbols are known, not guessed from sizes, so that equal names mean equal sizes."""
        self.captured = captured
        self.services = services
        self.where = where
        self.number = services.record.add_fragment(self)
        self.axes: list[tuple[Axis, int]] = []  # each with the position of the argument that holds its size
        self.axis_symbols: set[sympy.Symbol] = set()
        self.ties: list[tuple[str, int, int]] = []  # positions of two sizes of one name
        self._find_axes(exact)
        cells = itertools.product(*(range(len(a.edges)) for a, _ in self.axes))
        self.slots = [
            BucketSlot(ShapeBucket(tuple(a.range(i) for (a, _), i in zip(self.axes, c, strict=True)))) for c in cells
        ]
        self.table: list[Callee] = [self._filler(i) for i in range(len(self.slots))]

    @property
    def label(self) -> str:
        """Short name for tables and dumps."""
        return f"graph{self.number}"

    @property
    def dispatched(self) -> int:
        """How many calls came through the table."""
        return sum(slot.hits.value for slot in self.slots)

    def _find_axes(self, exact: bool) -> None:
        positions = {
            item.value.node.expr: i
            for i, item in enumerate(self.captured.inputs)
            if isinstance(item.value, torch.SymInt)
        }
        first: dict[str, int] = {}
        for symbol, name in sorted(self.captured.named.items(), key=lambda item: (item[1], str(item[0]))):
            if symbol not in positions:
                continue
            if name in first:
                if exact:
                    self.ties.append((name, first[name], positions[symbol]))
                continue
            first[name] = positions[symbol]
            self.axes.append((self.services.buckets.axis(name), positions[symbol]))
            self.axis_symbols.add(symbol)

    def dispatcher(self) -> Callee:
        """The function that Dynamo's compiled code calls; the only code of ours on a steady call."""
        plain, ties = self._plain_dispatcher(), self.ties
        if not ties:
            return plain

        def tied(*args: Any) -> Any:
            for name, one, other in ties:
                if args[one] != args[other]:
                    raise DimsError(
                        f"dims: {name!r} is {args[one]} in one argument but {args[other]} in another; "
                        "give differently sized dimensions different names."
                    )
            return plain(*args)

        return tied

    def _plain_dispatcher(self) -> Callee:
        bumps = [slot.hits.bump for slot in self.slots]
        table = self.table
        if not self.axes:
            bump = bumps[0]

            def static(*args: Any) -> Any:
                bump()
                return table[0](*args)

            return static
        if len(self.axes) == 1:
            axis, position = self.axes[0]
            edges, find = axis.edges, bisect.bisect_left
            outside = self._outside

            def one_axis(*args: Any) -> Any:
                index = find(edges, args[position])
                if index == len(edges):
                    outside(args)
                bumps[index]()
                return table[index](*args)

            return one_axis

        def several(*args: Any) -> Any:
            index = self._index(args)
            bumps[index]()
            return table[index](*args)

        return several

    def _index(self, args: Sequence[Any]) -> int:
        index = 0
        for axis, position in self.axes:
            cell = axis.index(args[position])
            if cell == len(axis.edges):
                self._outside(args)
            index = index * len(axis.edges) + cell
        return index

    def _outside(self, args: Sequence[Any]) -> None:
        for axis, position in self.axes:
            if args[position] > axis.edges[-1]:
                raise DimsError(
                    f"buckets[{axis.name!r}]: size {args[position]} is above the last edge {axis.edges[-1]}; "
                    "add a larger edge, or leave buckets out for an open range."
                )
        raise AssertionError("called for sizes inside the table")

    def _filler(self, index: int) -> Callee:
        def fill(*args: Any) -> Any:
            return self._call_slot(index, args)

        return fill

    def _call_slot(self, index: int, args: Sequence[Any]) -> Any:
        slot = self.slots[index]
        entry = slot.find(args)
        if entry is None:
            with capture_lock(), short_collections():
                try:
                    entry = slot.find(args) or self._fill(slot, args)
                except EagerRaisedError as error:
                    return self._raise_as_eager(error, args)
                if entry not in slot.entries:
                    slot.entries.append(entry)
                if len(slot.entries) == 1:
                    self.table[index] = entry.call if entry.guard is None else self._guarded(index, entry)
        return entry.call(*args)

    def _guarded(self, index: int, entry: Lowered) -> Callee:
        """The first entry of a slot, tried without a search."""
        call, guard = entry.call, entry.guard
        assert guard is not None, "an entry without a guard stands in the table itself"

        def guarded(*args: Any) -> Any:
            return call(*args) if guard(args) else self._call_slot(index, args)

        return guarded

    def _raise_as_eager(self, error: EagerRaisedError, args: Sequence[Any]) -> Any:
        """Let the model raise its own exception on its own arguments, and leave the slot for a call that works."""
        result = self.captured.gm(*args)
        self.services.record.add_fallback("verification", self.label, f"eager raised on copies only: {error}")
        return result

    def _fill(self, slot: BucketSlot, args: Sequence[Any]) -> Lowered:
        """Lower the graph for `slot`, going down the ladder until a lowering works and agrees with eager."""
        asked = self.services.choose(self.captured.print, slot.bucket, device_of(args))
        label = f"{self.label}.{slot.bucket}"
        for variant in ladder(asked):
            try:
                entry = self._lower(variant, slot.bucket, args, label)
            except (UserInputError, FallbackError, EagerRaisedError):
                raise
            except Exception as error:
                reason = f"{variant.label()}: {type(error).__name__}: {str(error)[:400]}"
                if self.services.strict:
                    raise FallbackError(f"{label}: lowering failed: {reason}") from error
                self.services.record.add_fallback("lowering", label, reason)
                continue
            if entry.verdict.ok is not False:
                return entry
            self._disagrees(entry, args, label)
        return Lowered(self.captured.gm.forward, EAGER, None, Comparison(True, "is eager", ""))

    def _lower(self, variant: GraphVariant, bucket: ShapeBucket, args: Sequence[Any], label: str) -> Lowered:
        services = self.services
        training = torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        device = device_of(args)
        ctx = PassContext(bucket, device.type, training, self._may_freeze(label, training))
        if services.pipeline.settings.cost and variant.passes is None:
            ctx.priced, ctx.sizes = True, self.captured.sizes(bucket, args)
        refusal = why_not_captured(variant, device.type, training, services.verify)
        if refusal is not None:
            self._fall_back("launch", label, refusal)
            variant = replace(variant, launch=Launch.PLAIN)
        passes = {stage: services.pipeline.select(variant, stage, ctx) for stage in Stage}
        digests = [p.digest() for chosen in passes.values() for p in chosen]
        key = verdict_key(
            [
                self.captured.print,
                str(bucket),
                variant.to_json(),
                f"{training} {ctx.frozen_weights} {ctx.prices()}",
                *digests,
            ]
        )
        known = services.verdicts.read(key) if services.verify is Verify.FIRST_CALL else None
        if known is not None and not known["ok"]:
            return Lowered(
                _never, variant, None, Comparison(False, known["what"], f"{known['detail']} (found earlier)")
            )
        with self._timed("passes"):
            gm, result = services.pipeline.rewrite(self.captured.copy, passes[Stage.FORWARD], ctx, label)
            self._report(result, label)
        hooks = self._hooks(passes, ctx, label)
        with self._timed("lower"), self._regions(variant, device, label) as regions:
            inputs = bucket_inputs(self.captured, args, bucket, self.axis_symbols)
            if ctx.frozen_weights and not training:
                report = functools.partial(self._fall_back, "frozen_weights", label)
                call, mutated = lower_frozen(
                    gm, inputs, variant, hooks, services.record.add_refusal, args, eager=self.captured.gm, report=report
                )
            else:
                call, mutated = lower(gm, inputs, variant, hooks, services.record.add_refusal)
            guard, separate = inputs.guard(), separate_memory(self.captured, mutated)
        if separate is not None and not separate(args):
            return self._overlapping(separate, label)
        with self._timed("verify"):
            runs = REPLAYED if regions else 1
            verdict = self._judge(call, args, mutated, training, key, known, label, runs)
        checked = self._checked(call, mutated, training, label)
        return Lowered(checked, variant, both(separate, guard), verdict, regions)

    def _hooks(self, passes: Mapping[Stage, Sequence[Pass]], ctx: PassContext, label: str) -> dict[Stage, GraphHook]:
        pipeline = self.services.pipeline

        def hook(stage: Stage) -> GraphHook:
            name = f"{label}.{stage.value}"
            return GraphHook(pipeline, passes[stage], ctx, name, lambda result: self._report(result, name))

        return {stage: hook(stage) for stage in (Stage.JOINT, Stage.POST_GRAD) if passes[stage]}

    def _may_freeze(self, label: str, training: bool) -> bool:
        """Whether weights count as frozen: promised by the user, and in inference nothing speaks against it.

        In training the passes themselves decline, each with its reason.
        """
        if not self.services.pipeline.frozen_weights or training:
            return self.services.pipeline.frozen_weights
        sharded = fully_shard_is_used()
        if sharded:
            reason = "fully_shard gathers weights anew at each call, so that nothing computed from them can be kept"
            self._fall_back("frozen_weights", label, reason)
        return not sharded

    def _fall_back(self, kind: str, label: str, reason: str) -> None:
        """Count a fallback, or raise it under strict."""
        if self.services.strict:
            raise FallbackError(f"{label}: {kind}: {reason}.")
        self.services.record.add_fallback(kind, label, reason)

    @contextlib.contextmanager
    def _regions(self, variant: GraphVariant, device: torch.device, label: str) -> Iterator[Sequence[RegionRunner]]:
        """The regions of what is lowered inside the block, where `variant` asks for CUDA graphs."""
        if variant.launch is Launch.PLAIN:
            yield ()
            return
        # a call that runs plainly is counted also under strict: it is found out in the middle of the call
        count = functools.partial(self.services.record.add_fallback, "launch", label)
        with captured_regions(self.services.graph_pools[device], count) as regions:
            yield regions
        if not regions:
            self._fall_back(
                "launch", label, "Inductor gave no part of it to CUDA graphs (TORCH_LOGS=perf_hints says why)"
            )

    def _overlapping(self, separate: Test, label: str) -> Lowered:
        """The entry for calls whose arguments overlap and are changed: eager, the only order of reads that is right."""
        self._fall_back(
            "aliasing", label, "an argument that is changed in place overlaps another one; clone one of them"
        )
        return Lowered(
            self.captured.gm.forward, EAGER, lambda args: not separate(args), Comparison(True, "is eager", "")
        )

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.services.record.add_seconds(what, time.perf_counter() - start)

    def _judge(
        self,
        call: Callee,
        args: Sequence[Any],
        mutated: Sequence[int] | None,
        training: bool,
        key: str,
        known: dict[str, Any] | None,
        label: str,
        runs: int,
    ) -> Comparison:
        """Compare `runs` calls with eager, unless an earlier process did; a verdict is kept for the next."""
        if self.services.verify is Verify.OFF:
            return Comparison(None, "verify is off", "")
        if known is not None:
            verdict = Comparison(True, f"{known['what']} (verified earlier)", known["detail"])
        else:
            for _ in range(runs):
                verdict = verify(self.captured.gm, call, args, mutated, training=training)
                if verdict.ok is not True:
                    break
            if verdict.ok is not None:
                record = {"ok": verdict.ok, "what": verdict.what, "detail": verdict.detail, "graph": label}
                self.services.verdicts.write(key, record)
        self.services.record.add_verdict(Verdict(label, verdict.what, verdict.ok, verdict.detail))
        return verdict

    def _checked(self, call: Callee, mutated: Sequence[int] | None, training: bool, label: str) -> Callee:
        """Under verify="always", a callable that compares before every call; else `call` itself."""
        if self.services.verify is not Verify.ALWAYS:
            return call

        def compared(*args: Any) -> Any:
            try:
                verdict = verify(self.captured.gm, call, args, mutated, training=training)
            except EagerRaisedError as error:
                return self._raise_as_eager(error, args)
            if verdict.ok is False:
                reason = f"{label}: disagrees with eager on this call: {verdict.detail}"
                if self.services.strict:
                    raise VerificationError(reason)
                self.services.record.add_fallback("verification", label, reason)
                return self.captured.gm(*args)
            return call(*args)

        return compared

    def _disagrees(self, entry: Lowered, args: Sequence[Any], label: str) -> None:
        folder = self.services.verdicts.folder.parent / REPRODUCERS
        path = write_reproducer(folder, self.captured, args, entry.variant)
        reason = f"{entry.variant.label()} disagrees with eager: {entry.verdict.detail} (reproducer: {path})"
        if self.services.strict:
            raise VerificationError(f"{label}: {reason}")
        self.services.record.add_fallback("verification", label, reason)

    def _report(self, result: PipelineResult, label: str) -> None:
        record = self.services.record
        record.add_passes(Counter(result.rewrites), Counter(result.recognised), Counter(result.declines))
        for name, reason in result.failures:
            record.add_fallback("pass", label, f"{name}: {reason}")


def _never(*args: Any) -> Any:
    raise AssertionError("a lowering that is known to disagree with eager must not be called")
