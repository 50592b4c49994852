"""Finds the first pass, and in it the first rewrite, after which a graph computes something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fusewright.errors import UserInputError
from fusewright.passes.base import Pass, PassContext
from fusewright.tools.oracle import Rewriter, Verdict, context_of, forward_passes, mismatch


@dataclass(frozen=True)
class Culprit:
    """The first step of the pipeline after which the verdict is bad.

    Attributes:
        pass_name: the pass; empty where the captured graph itself is bad, before any pass.
        rewrite: number of the bad rewrite within the pass, from 1; None where the pass does not ask `ctx.allow`.
        node: name of the node, in the graph that the pass was given, at which it is made; empty where unknown.
        reason: what the verdict says after it.
        failures: (pass, reason) of passes that failed and so took no part.
        runs: how often the graph was rewritten and judged.
    """

    pass_name: str
    rewrite: int | None
    node: str
    reason: str
    failures: tuple[tuple[str, str], ...]
    runs: int

    def __str__(self) -> str:
        if not self.pass_name:
            return f"the captured graph is bad before any pass: {self.reason}"
        where = f", rewrite {self.rewrite} at {self.node}" if self.rewrite is not None else ""
        return f"pass {self.pass_name}{where}: {self.reason}"


def bisect(
    captured: fx.GraphModule,
    args: Sequence[Any],
    *,
    passes: Sequence[Pass] | None = None,
    verdict: Verdict = mismatch,
    ctx: PassContext | None = None,
) -> Culprit | None:
    """Find the first bad pass by halving the list of passes, then the first bad rewrite by halving its count.

    Args:
        captured: a captured graph; it is not changed.
        args: real arguments, one a placeholder.
        passes: passes of one stage in the order they run; default: the forward passes of `pipeline.order` that apply.
        verdict: what is wrong with a rewritten graph; default: rule A1 against the captured graph, both in eager.
        ctx: what the passes are told; default: the device of the first tensor, training where a tensor requires a
            gradient, no bucket.

    Returns:
        The culprit, or None where the graph with all its rewrites is good.

    Raises:
        UserInputError: the arguments do not fit the graph.
    """
    placeholders = sum(n.op == "placeholder" for n in captured.graph.nodes)
    if placeholders != len(args):
        raise UserInputError(f"args: the graph takes {placeholders} arguments, got {len(args)}.")
    told = ctx or context_of(args)
    chosen = forward_passes(told) if passes is None else tuple(passes)
    return _Search(Rewriter(chosen, told), captured, args, verdict).culprit()


class _Search:
    """One bisection: rewrites, judges and counts."""

    def __init__(self, rewriter: Rewriter, captured: fx.GraphModule, args: Sequence[Any], verdict: Verdict) -> None:
        self.rewriter, self.captured, self.args, self.verdict = rewriter, captured, args, verdict
        self.failures: tuple[tuple[str, str], ...] = ()
        self.allowed: tuple[str, ...] = ()
        self.runs = 0

    def judge(self, first: int, limits: dict[str, int]) -> str | None:
        """What is wrong after the `first` passes; `allowed` then lists the rewrites of the last of them."""
        self.runs += 1
        rewritten, result, ctx = self.rewriter.rewrite(self.captured, first, limits)
        self.failures, self.allowed = tuple(result.failures), tuple(ctx.allowed)
        return self.verdict(self.captured, rewritten, self.args)

    def first_bad(self, count: int, judge: Callable[[int], str | None]) -> int:
        """The smallest n for which n - 1 is good and n is bad, given that 0 is good and `count` is bad."""
        good, bad = 0, count
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (good, middle) if judge(middle) is not None else (middle, bad)
        return bad

    def culprit(self) -> Culprit | None:
        total = len(self.rewriter.passes)
        reason = self.judge(total, {})
        failures = self.failures
        if reason is None:
            return None
        untouched = self.judge(0, {})
        if untouched is not None or not total:
            return Culprit("", None, "", untouched or reason, failures, self.runs)
        first = self.first_bad(total, lambda n: self.judge(n, {}))
        name = self.rewriter.passes[first - 1].name
        reason = self.judge(first, {}) or reason
        rewrites = len(self.allowed)
        if not rewrites or self.judge(first, {name: 0}) is not None:  # a pass that does not ask is bad at any limit
            return Culprit(name, None, "", reason, failures, self.runs)
        rewrite = self.first_bad(rewrites, lambda n: self.judge(first, {name: n}))
        reason = self.judge(first, {name: rewrite}) or reason
        return Culprit(name, rewrite, self.allowed[rewrite - 1], reason, failures, self.runs)
