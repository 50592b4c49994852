"""THE order of passes. One literal; a comment for every constraint; tests/pipeline/test_order.py shows each is real."""

from __future__ import annotations

from fusewright.passes.base import Pass

ORDER: tuple[Pass, ...] = ()
