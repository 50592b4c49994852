"""Runs passes in order: selects, times, checks, dumps, counts, and leaves out a pass that fails."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import fx

from fusewright.capture.dynamo_compat import sizes_stay_dynamic
from fusewright.capture.graph import copy_graph
from fusewright.capture.spec import IllegalGraph, Snapshot, check_graph
from fusewright.capture.values import shape_env_of
from fusewright.capture.variant import GraphVariant
from fusewright.config import Numerics, Settings
from fusewright.errors import PassFailedError, UserInputError, unknown_name
from fusewright.passes.base import Pass, PassContext, Stage
from fusewright.pipeline.dump import Dump


@dataclass
class PipelineResult:
    """What one run of the pipeline did.

    Attributes:
        rewrites: pass name -> rewrites made.
        recognised: kind of region -> how many were seen.
        declines: (pass, node, reason) -> count.
        failures: (pass, reason) of every pass that was left out because it failed.
        seconds: pass name -> time spent, in seconds.
    """

    rewrites: Counter[str] = field(default_factory=Counter)
    recognised: Counter[str] = field(default_factory=Counter)
    declines: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


class BrokenContract(Exception):
    """What a pass returned is no count, or not what it did."""


@dataclass(frozen=True)
class Pipeline:
    """The passes of one optimized model and the rules they run under.

    Attributes:
        order: every pass that may run, in order.
        settings: skip list and dump folder.
        numerics: the loosest tier of rewrite allowed.
        strict: a failing pass is an error instead of a counted rollback.
        frozen_weights: passed on to the passes.
    """

    order: tuple[Pass, ...]
    settings: Settings
    numerics: Numerics = Numerics.REASSOCIATED
    strict: bool = False
    frozen_weights: bool = False

    def __post_init__(self) -> None:
        names = [p.name for p in self.order]
        for name in names:
            if names.count(name) > 1:
                raise UserInputError(f"passes: two passes are named {name!r}.")
        for name in self.settings.skip_passes:
            if name not in names:
                raise unknown_name("pass in FUSEWRIGHT_SKIP_PASSES", name, names)
        provided: set[str] = set()
        for one in self.order:
            missing = set(one.requires) - provided
            if missing:
                raise UserInputError(
                    f"passes: {one.name!r} requires {sorted(missing)}, which no earlier pass provides."
                )
            provided |= _names(one)

    def select(self, variant: GraphVariant, stage: Stage, ctx: PassContext) -> list[Pass]:
        """The passes of `stage` that `variant` asks for, that the tier allows and that apply to the bucket.

        Raises:
            UnknownNameError: the variant names a pass that does not exist.
            UserInputError: it names a pass without what that requires.
        """
        known = [p.name for p in self.order]
        for name in variant.passes or ():
            if name not in known:
                raise unknown_name("pass", name, known)
        if variant.passes is not None:
            self._check_requirements(variant.passes)
        chosen: list[Pass] = []
        for one in self.order:
            asked = one.default if variant.passes is None else one.name in variant.passes
            if not asked or one.stage is not stage or one.name in self.settings.skip_passes:
                continue
            if not self.numerics.allows(one.numerics) or not one.applies(ctx.bucket, ctx.device):
                continue
            if any(p.name in one.conflicts or one.name in p.conflicts for p in chosen):
                continue
            chosen.append(one)
        kept, _ = _without_orphans(chosen, [p for p in self.order if p.stage is stage and p not in chosen])
        return kept

    def _check_requirements(self, asked: Sequence[str]) -> None:
        named = [p for p in self.order if p.name in asked]
        _, orphans = _without_orphans(named, [p for p in self.order if p not in named])
        for one, missing in orphans:
            raise UserInputError(f"passes: {one.name!r} requires {missing}; ask for a pass that provides it too.")

    def rewrite(
        self, pristine: Callable[[], fx.GraphModule], passes: Sequence[Pass], ctx: PassContext, label: str
    ) -> tuple[fx.GraphModule, PipelineResult]:
        """Run `passes` on a copy from `pristine` and return it with what happened.

        A pass that raises, breaks the contract of its count, or leaves an illegal graph is left out, with those that
        require it, and the rest runs again from a fresh copy, so that no pass ever needs a snapshot of its own.

        Raises:
            PassFailedError: under strict, instead of leaving the pass out.
        """
        failures: list[tuple[str, str]] = []
        remaining = list(passes)
        dump = Dump.open(self.settings.dump_dir, label)
        while True:
            gm, result, failed = self._attempt(pristine(), remaining, ctx, dump)
            if failed is None:
                result.failures = failures
                return gm, result
            failures.append((failed[0].name, failed[1]))
            if self.strict:
                raise PassFailedError(f"pass {failed[0].name!r} failed on {label}: {failed[1]}")
            remaining, orphans = _without_orphans([p for p in remaining if p is not failed[0]], [failed[0]])
            failures += [(p.name, f"requires {missing}, which failed") for p, missing in orphans]

    def _attempt(
        self, gm: fx.GraphModule, passes: Sequence[Pass], ctx: PassContext, dump: Dump
    ) -> tuple[fx.GraphModule, PipelineResult, tuple[Pass, str] | None]:
        result = PipelineResult()
        for one in passes:
            ctx.begin(one.name)
            before = dump.before(gm)
            start = time.perf_counter()
            try:
                count = _run_checked(one, gm, ctx)
            except Exception as error:  # noqa: BLE001  a pass is foreign code: whatever it raises costs that pass only
                known = {IllegalGraph: "illegal graph", BrokenContract: "broken contract"}
                reason = f"{known.get(type(error), type(error).__name__)}: {error}"
                dump.failed(gm, one.name, before, reason, ctx.declines)
                return gm, result, (one, reason)
            result.seconds[one.name] = time.perf_counter() - start
            if count:
                result.rewrites[one.name] += count
            result.recognised.update(ctx.recognised)
            result.declines.update((d.pass_name, d.node, d.reason) for d in ctx.declines)
            dump.after(gm, one.name, before, count, result.seconds[one.name], ctx.declines)
        if result.rewrites:
            gm.recompile()
        return gm, result, None

    def rewrite_in_place(self, graph: fx.Graph, passes: Sequence[Pass], ctx: PassContext, label: str) -> PipelineResult:
        """Run `passes` on a graph that someone else owns (Inductor's), without ever leaving it half rewritten.

        The passes are rehearsed on a copy first; only those that succeed there run on the real graph.
        """
        owner = graph.owning_module
        assert owner is not None, "a graph inside Inductor always has an owner"
        assert owner.graph is graph, "the owner holds another graph: rewriting it would change nothing"
        if not passes:
            return PipelineResult()
        _, rehearsal = self.rewrite(lambda: copy_graph(owner), passes, ctx, label)
        failed = {name for name, _ in rehearsal.failures}
        for one in passes:
            if one.name not in failed and rehearsal.rewrites[one.name]:
                ctx.begin(one.name)
                count = one.run(owner, ctx)
                assert count == rehearsal.rewrites[one.name], (one.name, count, rehearsal.rewrites)
        return rehearsal


def _run_checked(one: Pass, gm: fx.GraphModule, ctx: PassContext) -> int:
    """Run a pass and check what it returned and left behind.

    Raises:
        BrokenContract: no count, or 0 from a graph that changed.
        IllegalGraph: a rule of `capture.spec`.
        SizeFixedError: the pass would hold for one size only.
    """
    before = Snapshot.of(gm)
    env = shape_env_of(gm)
    with contextlib.nullcontext() if env is None else sizes_stay_dynamic(env):
        count = one.run(gm, ctx)
    if type(count) is not int or count < 0:
        raise BrokenContract(f"run returned {count!r}, not a number of rewrites")
    if count:
        check_graph(gm, before)
        return count
    changed = before.changed(gm)
    if changed is not None:
        raise BrokenContract(f"run returned 0 but changed {changed}")
    return 0


def _names(one: Pass) -> set[str]:
    return {one.name, *one.provides}


def _without_orphans(passes: Sequence[Pass], gone: Sequence[Pass]) -> tuple[list[Pass], list[tuple[Pass, str]]]:
    """Those of `passes` that need nothing that only `gone` provides, and the others with what each lacks."""
    kept: list[Pass] = []
    orphans: list[tuple[Pass, str]] = []
    lost = {name for p in gone for name in _names(p)}
    for one in passes:
        provided = {name for p in kept for name in _names(p)}
        missing = [name for name in one.requires if name in lost and name not in provided]
        if missing:
            orphans.append((one, ", ".join(map(repr, missing))))
            lost |= _names(one)
        else:
            kept.append(one)
    return kept, orphans


def insert_passes(order: tuple[Pass, ...], extra: Sequence[Pass], before: str | None) -> tuple[Pass, ...]:
    """Put a user's passes into the order, before the pass named `before` or at the end of their stage.

    Raises:
        UserInputError: something is no `Pass`.
        UnknownNameError: `before` names no pass.
    """
    for one in extra:
        if not isinstance(one, Pass):
            raise UserInputError(f"passes: {one!r} is not an instance of fusewright.Pass.")
    if before is None:
        return (*order, *extra)
    names = [p.name for p in order]
    if before not in names:
        raise unknown_name("pass in before=", before, names)
    at = names.index(before)
    return (*order[:at], *extra, *order[at:])
