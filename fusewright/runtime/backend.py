"""The Dynamo backend: makes a fragment of every captured graph and hands Dynamo its dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from fusewright.capture.dynamo_compat import symbol_sources
from fusewright.capture.frontend import FrameInfo, current_frame
from fusewright.capture.graph import CapturedGraph
from fusewright.runtime.fragment import Fragment, Services


@dataclass(frozen=True)
class FusewrightBackend:
    """Callable with Dynamo's backend signature."""

    services: Services

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        frame = current_frame()
        named = {} if frame is None else name_symbols(gm, example_inputs, frame)
        captured = CapturedGraph.build(gm, example_inputs, named)
        where = frame.where if frame is not None else "torch.compile"
        exact = frame is not None and bool(frame.sources)
        return Fragment(captured, self.services, where, exact=exact).dispatcher()


def name_symbols(gm: fx.GraphModule, example_inputs: Sequence[Any], frame: FrameInfo) -> Mapping[sympy.Symbol, str]:
    """Find which symbols of a graph are the user's named dimensions.

    In the root frame the source of a symbol (`L['args'][0].size()[1]`) says it exactly. After a graph break there are
    only sizes, and a symbol whose hint equals the size of a named dimension of the running call gets that name; a wrong
    guess costs a bucket choice, never a wrong result, because the symbol's own value picks the bucket.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    values = [n.meta.get("example_value") if n.meta.get("example_value") is not None else e
              for n, e in zip(placeholders, example_inputs, strict=True)]  # fmt: skip
    named: dict[sympy.Symbol, str] = {}
    by_size: dict[int, str] = {}
    for name, size in sorted(frame.sizes.items()):
        by_size.setdefault(size, name)
    for value in values:
        if not isinstance(value, torch.SymInt) or not isinstance(value.node.expr, sympy.Symbol):
            continue
        symbol, env = value.node.expr, value.node.shape_env
        found = _by_source(symbol_sources(env, symbol), frame)
        if found is None and not frame.sources and value.node.has_hint():
            found = by_size.get(int(value.node.hint))  # type: ignore[arg-type]
        if found is not None:
            named[symbol] = found
    return named


def _by_source(sources: Sequence[Any], frame: FrameInfo) -> str | None:
    texts = {str(source.name) for source in sources}
    for (base, dim), name in frame.sources.items():
        if f"{base}.size()[{dim}]" in texts:
            return name
    return None
