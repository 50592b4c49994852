"""Little passes and graphs for the tests of the pipeline: each does one thing, most of them something forbidden."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fusewright.capture.graph import copy_graph
from fusewright.config import Numerics, Settings, Verify
from fusewright.passes.base import Pass, PassContext, Stage
from fusewright.pipeline.pipeline import Pipeline
from fusewright.tools.pass_tester import capture


def settings(*, dump: pathlib.Path | None = None, skip: frozenset[str] = frozenset()) -> Settings:
    return Settings(False, pathlib.Path("unused"), dump, skip, False, Verify.OFF, None)


def pipeline(*order: Pass, **fields: Any) -> Pipeline:
    chosen = settings(dump=fields.pop("dump", None), skip=fields.pop("skip", frozenset()))
    return Pipeline(order, chosen, **fields)


def trig(x: Tensor) -> Tensor:
    """sin, cos, sin: what the little passes rewrite."""
    return x.sin().cos().sin() + 1.0


def captured() -> fx.GraphModule:
    return capture(trig, (torch.randn(3, 4),)).graph


def methods(gm: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_method"]


class Swap(Pass):
    """Replaces each call of the method `old` by `new`, values included."""

    name: ClassVar[str] = "swap"
    old, new = "sin", "tanh"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        count = 0
        for node in list(gm.graph.nodes):
            if node.op == "call_method" and node.target == self.old:
                if not ctx.allow(node):
                    continue
                node.target = self.new
                ctx.recognise(self.old)
                count += 1
            elif node.op == "call_method":
                ctx.declined(node, f"not {self.old}")
        return count


def swap(called: str, old: str, new: str, **attributes: Any) -> Pass:
    """An instance of its own subclass of Swap."""
    made: Pass = type(called, (Swap,), {"name": called, "old": old, "new": new, **attributes})()
    return made


def doing(what: Callable[[fx.GraphModule], object], *, called: str = "bad", **attributes: Any) -> Pass:
    """A pass whose `run` is `what`, with any result."""

    def run(self: Pass, gm: fx.GraphModule, ctx: PassContext) -> Any:
        return what(gm)

    made: Pass = type(called, (Pass,), {"name": called, "run": run, **attributes})()
    return made


def rewrite(
    line: Pipeline, gm: fx.GraphModule | None = None, **context: Any
) -> tuple[fx.GraphModule, Any, PassContext]:
    """Run every pass of `line` on copies of one captured graph."""
    pristine, ctx = captured() if gm is None else gm, PassContext(**context)
    out, result = line.rewrite(lambda: copy_graph(pristine), line.order, ctx, "a graph")
    return out, result, ctx


__all__ = [
    "Numerics",
    "Stage",
    "Swap",
    "captured",
    "doing",
    "methods",
    "pipeline",
    "rewrite",
    "settings",
    "swap",
    "trig",
]
