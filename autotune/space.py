"""Which variants a tuning run tries, by effort, and which of them turn out to be the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fusewright.capture.variant import DEFAULT_VARIANT, GraphVariant
from fusewright.config import Effort
from fusewright.pipeline.order import ORDER

# The default leaves out a fusion that a price rule expects to gain nothing; the rules hold for the machine they were
# measured on. A variant that names its passes is not priced.
EVERYWHERE = GraphVariant(passes=tuple(one.name for one in ORDER if one.default))
CPP_WRAPPER = ("cpp_wrapper", True)
MAX_AUTOTUNE = ("max_autotune", True)


def variants(effort: Effort) -> tuple[GraphVariant, ...]:
    """What to try beside the baselines: priced, everywhere, launched from C++; in full also Inductor's own search."""
    quick = (DEFAULT_VARIANT, EVERYWHERE, GraphVariant(options=(CPP_WRAPPER,)))
    if effort is not Effort.FULL:
        return quick
    both = tuple(replace(one, options=(CPP_WRAPPER, MAX_AUTOTUNE)) for one in (DEFAULT_VARIANT, EVERYWHERE))
    return (*quick, replace(EVERYWHERE, options=(CPP_WRAPPER,)), GraphVariant(options=(MAX_AUTOTUNE,)), *both)


class Rewritten:
    """What the passes did under each variant that was built, to find two that differ in name only."""

    def __init__(self) -> None:
        self._seen: list[tuple[GraphVariant, Any]] = []

    def same_as(self, variant: GraphVariant, facts: Mapping[str, Any]) -> GraphVariant | None:
        """An earlier variant, equal but for the passes it names, whose passes made as many rewrites each; else None.

        `facts`: of the worker that built it; without "rewrites" there nothing is known, and nothing is the same.
        """
        rewrites = facts.get("rewrites")
        if rewrites is None:
            return None
        for other, made in self._seen:
            if made == rewrites and replace(other, passes=None) == replace(variant, passes=None):
                return other
        self._seen.append((variant, rewrites))
        return None
