"""Runs passes in order: selects, times, checks, dumps, counts, and leaves out a pass that fails."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import fx

from fusewright.capture.graph import copy_graph
from fusewright.capture.spec import IllegalGraph, check_graph
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
            provided |= {one.name, *one.provides}

    def select(self, variant: GraphVariant, stage: Stage, ctx: PassContext) -> list[Pass]:
        """The passes of `stage` that `variant` asks for, that the tier allows and that apply to the bucket.

        Raises:
            UnknownNameError: the variant names a pass that does not exist.
        """
        known = [p.name for p in self.order]
        for name in variant.passes or ():
            if name not in known:
                raise unknown_name("pass", name, known)
        chosen: list[Pass] = []
        for one in self.order:
            asked = one.default if variant.passes is None else one.name in variant.passes
            if not asked or one.stage is not stage or one.name in self.settings.skip_passes:
                continue
            if not self.numerics.allows(one.numerics) or not one.applies(ctx.bucket, ctx.device):
                continue
            if any(c in {p.name for p in chosen} for c in one.conflicts):
                continue
            chosen.append(one)
        return chosen

    def rewrite(
        self, pristine: Callable[[], fx.GraphModule], passes: Sequence[Pass], ctx: PassContext, label: str
    ) -> tuple[fx.GraphModule, PipelineResult]:
        """Run `passes` on a copy from `pristine` and return it with what happened.

        A pass that raises or leaves an illegal graph is left out and the rest runs again from a fresh copy, so that no
        pass ever needs a snapshot of its own.

        Raises:
            PassFailedError: under strict, instead of leaving the pass out.
        """
        failures: list[tuple[str, str]] = []
        remaining = list(passes)
        while True:
            gm, result, failed = self._attempt(pristine(), remaining, ctx, label)
            if failed is None:
                result.failures = failures
                return gm, result
            failures.append((failed[0].name, failed[1]))
            if self.strict:
                raise PassFailedError(f"pass {failed[0].name!r} failed on {label}: {failed[1]}")
            remaining.remove(failed[0])

    def _attempt(
        self, gm: fx.GraphModule, passes: Sequence[Pass], ctx: PassContext, label: str
    ) -> tuple[fx.GraphModule, PipelineResult, tuple[Pass, str] | None]:
        result = PipelineResult()
        dump = Dump.open(self.settings.dump_dir, label)
        names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
        for one in passes:
            ctx.pass_name, ctx.declines, ctx.recognised = one.name, [], {}
            before = dump.before(gm)
            known = {n.name for n in gm.graph.nodes}
            start = time.perf_counter()
            try:
                count = one.run(gm, ctx)
                if count:
                    check_graph(gm, placeholders=names, known=known)
            except IllegalGraph as error:
                return gm, result, (one, f"illegal graph: {error}")
            except Exception as error:  # noqa: BLE001  a pass is foreign code: whatever it raises costs that pass only
                return gm, result, (one, f"{type(error).__name__}: {error}")
            result.seconds[one.name] = time.perf_counter() - start
            if count:
                gm.recompile()
                result.rewrites[one.name] += count
            result.recognised.update(ctx.recognised)
            result.declines.update((d.pass_name, d.node, d.reason) for d in ctx.declines)
            dump.after(gm, one.name, before, count, result.seconds[one.name], ctx.declines)
        return gm, result, None

    def rewrite_in_place(self, graph: fx.Graph, passes: Sequence[Pass], ctx: PassContext, label: str) -> PipelineResult:
        """Run `passes` on a graph that someone else owns (Inductor's), without ever leaving it half rewritten.

        The passes are rehearsed on a copy first; only those that succeed there run on the real graph.
        """
        owner = graph.owning_module
        assert owner is not None, "a graph inside Inductor always has an owner"
        if not passes:
            return PipelineResult()
        _, rehearsal = self.rewrite(lambda: copy_graph(owner), passes, ctx, label)
        failed = {name for name, _ in rehearsal.failures}
        for one in passes:
            if one.name not in failed and rehearsal.rewrites[one.name]:
                ctx.pass_name, ctx.declines, ctx.recognised = one.name, [], {}
                one.run(owner, ctx)
        return rehearsal


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
