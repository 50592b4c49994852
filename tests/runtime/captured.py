"""Captures a function's graph through Dynamo as the backend does, for tests below the API."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo as dynamo

from fusewright.capture.frontend import FrameInfo
from fusewright.capture.graph import CapturedGraph
from fusewright.capture.record import Record
from fusewright.capture.shapes import Axis, Buckets
from fusewright.config import Verify, read_settings
from fusewright.pipeline.order import ORDER
from fusewright.pipeline.pipeline import Pipeline
from fusewright.runtime.backend import name_symbols
from fusewright.runtime.fragment import Choose, Services
from fusewright.runtime.verdicts import VerdictFolder
from tests.runtime.dispatch_models import aot_eager

Named = Mapping[tuple[int, int], str]  # (argument, dimension) -> name


def capture(function: Callable[..., Any], args: Sequence[Any], named: Named) -> tuple[CapturedGraph, list[Any]]:
    """The graph of `function` and the flat arguments that Dynamo calls it with."""
    seen: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        names = list(function.__code__.co_varnames)
        sources = {(f"L['{names[i]}']", dim): name for (i, dim), name in named.items()}
        seen.append(
            CapturedGraph.build(gm, example_inputs, name_symbols(gm, example_inputs, FrameInfo({}, sources, "")))
        )

        def run(*flat: Any) -> Any:
            seen.append(list(flat))
            return gm(*flat)

        return run

    dynamo.reset()
    for index, dim in named:
        dynamo.mark_dynamic(args[index], dim)
    torch.compile(function, backend=backend)(*args)
    captured, flat = seen
    return captured, flat


def services(cache: pathlib.Path, edges: Mapping[str, Sequence[int]], choose: Choose = aot_eager) -> Services:
    """What a fragment needs, with edges for named dimensions."""
    return Services(
        pipeline=Pipeline(ORDER, read_settings()),
        record=Record(),
        choose=choose,
        buckets=Buckets(tuple(Axis(name, tuple(e)) for name, e in sorted(edges.items()))),
        verdicts=VerdictFolder.under(cache),
        verify=Verify.FIRST_CALL,
    )
