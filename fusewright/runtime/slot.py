"""What stands in one bucket of one graph, and what is tried in turn to fill it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusewright.capture.record import Tick
from fusewright.capture.shapes import ShapeBucket
from fusewright.capture.variant import GraphVariant, Launch, Lowering
from fusewright.runtime.cudagraph.runner import RegionRunner
from fusewright.runtime.verify import Comparison

Callee = Callable[..., Any]
Test = Callable[[Sequence[Any]], bool]
EAGER = GraphVariant((), Lowering.EAGER)


@dataclass
class Lowered:
    """One callable in a bucket's slot."""

    call: Callee
    variant: GraphVariant
    guard: Test | None
    verdict: Comparison
    regions: Sequence[RegionRunner] = ()


class BucketSlot:
    """One bucket of one fragment: usually one callable, more where lowering assumed something that a call broke."""

    def __init__(self, bucket: ShapeBucket) -> None:
        self.bucket = bucket
        self.entries: list[Lowered] = []
        self.hits = Tick()

    def find(self, args: Sequence[Any]) -> Lowered | None:
        """The first entry whose assumptions `args` meet."""
        return next((e for e in self.entries if e.guard is None or e.guard(args)), None)


def both(first: Test | None, second: Test | None) -> Test | None:
    """The conjunction of two tests, either of which may be absent."""
    if first is None or second is None:
        return first or second
    return lambda args: first(args) and second(args)


def ladder(asked: GraphVariant) -> list[GraphVariant]:
    """What to try where a lowering fails or disagrees with eager: first suspect torch's own patterns, then ours.

    Inductor's traced attention patterns ignore ints and lists and are the known source of wrong graphs; there is no
    switch for them but `pattern_matcher`.
    """
    safe = (("pattern_matcher", False),)
    steps = [asked, replace(asked, launch=Launch.PLAIN)]
    if asked.lowering is Lowering.INDUCTOR:
        steps.append(GraphVariant(asked.passes, Lowering.INDUCTOR, safe))
        steps.append(GraphVariant((), Lowering.INDUCTOR, safe))
    steps.append(GraphVariant((), Lowering.AOT_EAGER))
    return list(dict.fromkeys(steps))
