"""What happened to one optimized model: frames, breaks, fallbacks, verdicts; thread-safe, append-only."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fallback:
    """One way in which something ran slower or plainer than asked.

    Attributes:
        kind: recompile_limit, graph_break, skipped_frame, inlined, forward_mode, pass, lowering,
            launch, frozen_weights, aliasing or verification.
        where: file:line of the user's frame, or the fragment's name.
        reason: what happened, in one sentence.
    """

    kind: str
    where: str
    reason: str


@dataclass(frozen=True)
class Verdict:
    """Outcome of comparing one lowering with eager.

    Attributes:
        graph: the fragment and bucket.
        what: what was compared, such as "outputs, gradients", or why nothing was.
        ok: True, False, or None where nothing could be compared.
        detail: the numbers behind it.
    """

    graph: str
    what: str
    ok: bool | None
    detail: str = ""


class Tick:
    """A counter that threads may bump without a lock: `next` on `itertools.count` is one bytecode-free C call."""

    __slots__ = ("_count", "bump")

    def __init__(self) -> None:
        import itertools

        self._count = itertools.count()
        self.bump = self._count.__next__

    @property
    def value(self) -> int:
        """How often `bump` was called; read from the repr because the count itself cannot be read without a bump."""
        return int(repr(self._count)[len("count(") : -1])


@dataclass
class Record:
    """Everything `explain` can say about one optimized model."""

    calls: Tick = field(default_factory=Tick)
    disabled_calls: Tick = field(default_factory=Tick)
    frames: Counter[str] = field(default_factory=Counter)
    breaks: Counter[tuple[str, str]] = field(default_factory=Counter)
    recompiles: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[Fallback] = field(default_factory=Counter)
    rewrites: Counter[str] = field(default_factory=Counter)
    recognised: Counter[str] = field(default_factory=Counter)
    declines: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    verdicts: list[Verdict] = field(default_factory=list)
    fragments: list[Any] = field(default_factory=list)  # runtime.fragment.Fragment, which this layer must not import
    seconds: Counter[str] = field(default_factory=Counter)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def add_frame(self, where: str, *, recompile: bool) -> None:
        """Count one frame that Dynamo captured."""
        with self._lock:
            self.frames[where] += 1
            if recompile:
                self.recompiles[where] += 1

    def add_break(self, where: str, reason: str) -> None:
        """Count one graph break; it is a fallback too, since what lies between two graphs runs eagerly."""
        with self._lock:
            self.breaks[where, reason] += 1
            self.fallbacks[Fallback("graph_break", where, reason)] += 1

    def add_fallback(self, kind: str, where: str, reason: str) -> None:
        """Count one fallback."""
        with self._lock:
            self.fallbacks[Fallback(kind, where, reason)] += 1

    def add_passes(
        self, rewrites: Counter[str], recognised: Counter[str], declines: Counter[tuple[str, str, str]]
    ) -> None:
        """Add what one run of the pipeline did."""
        with self._lock:
            self.rewrites.update(rewrites)
            self.recognised.update(recognised)
            self.declines.update(declines)

    def add_refusal(self, node: str, reason: str) -> None:
        """Count one rewrite of Inductor's own that its proof did not allow, among the declines of the passes."""
        with self._lock:
            self.declines["inductor", node, reason] += 1

    def add_verdict(self, verdict: Verdict) -> None:
        """Add one comparison with eager."""
        with self._lock:
            self.verdicts.append(verdict)

    def add_seconds(self, what: str, seconds: float) -> None:
        """Add time spent on `what` (capture, passes, lower, verify)."""
        with self._lock:
            self.seconds[what] += seconds  # type: ignore[assignment]

    def add_fragment(self, fragment: Any) -> int:
        """Register a fragment and return its number."""
        with self._lock:
            self.fragments.append(fragment)
            return len(self.fragments) - 1
