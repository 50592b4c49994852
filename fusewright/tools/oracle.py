"""Says whether rewritten graphs still compute what the captured graph does; what bisection and minifying ask."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fusewright.capture.graph import copy_graph
from fusewright.capture.values import device_of
from fusewright.config import Numerics, Settings, Verify
from fusewright.numerics import compare_trees
from fusewright.passes.base import Pass, PassContext, Stage
from fusewright.pipeline.order import ORDER
from fusewright.pipeline.pipeline import Pipeline, PipelineResult
from fusewright.tools.pass_tester import run

Verdict = Callable[[fx.GraphModule, fx.GraphModule, Sequence[Any]], str | None]
"""(captured, rewritten, arguments) -> what is wrong with `rewritten`, or None where nothing is."""


def mismatch(captured: fx.GraphModule, rewritten: fx.GraphModule, args: Sequence[Any]) -> str | None:
    """Compare outputs, and gradients where an argument requires one, by rule A1; both run in eager on ATen kernels.

    Args:
        captured: the graph before any rewrite; also run in float64 as the judge.
        rewritten: the graph in question.
        args: real arguments, one a placeholder; cloned before each run.

    Returns:
        The first difference, or the error that only `rewritten` raises; None where they agree.
    """
    training = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    ref = run(captured, args, training)
    try:
        res = run(rewritten, args, training)
    except Exception as error:  # noqa: BLE001  a wrong rewrite may raise anything; that is the finding
        return f"{type(error).__name__}: {error}"
    result = compare_trees(res, ref, lambda: run(captured, args, training, wide=True), training=training)
    return None if result.ok else result.reason


@dataclass(frozen=True)
class Rewriter:
    """Runs given passes on copies of a captured graph, outside of any compiler.

    Attributes:
        passes: the passes to run, in order.
        ctx: what the passes are told about bucket, device and training; the graph itself may live elsewhere.
    """

    passes: tuple[Pass, ...]
    ctx: PassContext

    def rewrite(
        self, captured: fx.GraphModule, first: int, limits: dict[str, int]
    ) -> tuple[fx.GraphModule, PipelineResult, PassContext]:
        """Rewrite a copy of `captured` with the `first` passes, none making more rewrites than `limits` says."""
        passes = self.passes[:first]
        settings = Settings(False, pathlib.Path(), None, frozenset(), False, Verify.OFF, None)
        ctx = dataclasses.replace(self.ctx, limits=limits)
        line = Pipeline(self.passes, settings, Numerics.LOSSY)
        rewritten, result = line.rewrite(lambda: copy_graph(captured), passes, ctx, "bisect")
        return rewritten, result, ctx


def context_of(args: Sequence[Any]) -> PassContext:
    """What passes are told by default: the device of the tensors, training where one requires a gradient."""
    training = any(a.requires_grad for a in args if isinstance(a, torch.Tensor))
    return PassContext(device=device_of(args).type, training=training)


def forward_passes(ctx: PassContext) -> tuple[Pass, ...]:
    """The forward passes of `pipeline.order` that run by default under `ctx`."""
    return tuple(p for p in ORDER if p.stage is Stage.FORWARD and p.default and p.applies(ctx.bucket, ctx.device))
