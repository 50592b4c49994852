"""Lowers a saved graph as a variant says and compares it with eager, as at the first call."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from torch import fx

from fusewright.capture.graph import CapturedGraph
from fusewright.capture.variant import GraphVariant, Launch
from fusewright.config import read_settings
from fusewright.passes.base import Stage
from fusewright.pipeline.order import ORDER
from fusewright.pipeline.pipeline import Pipeline
from fusewright.runtime.fakes import bucket_inputs
from fusewright.runtime.lower import GraphHook, lower
from fusewright.runtime.verify import Comparison, verify
from fusewright.tools.oracle import Verdict, context_of
from fusewright.tools.reproduced import check_folder, load


def replay(folder: pathlib.Path) -> Comparison:
    """Lower the graph in `folder` for exactly the saved sizes and print how it compares with eager.

    Args:
        folder: made by `runtime.reproducer.write_reproducer`.

    Raises:
        UserInputError: the folder is no reproducer.
    """
    taken = load(folder)
    variant = variant_of(folder)
    verdict = compare_lowered(taken.graph, taken.inputs, variant)
    print(f"{variant.label()}: ok={verdict.ok} ({verdict.what}) {verdict.detail}")
    return verdict


def variant_of(folder: pathlib.Path) -> GraphVariant:
    """The variant that a reproducer was written for, launched plainly: a single call would only warm a CUDA graph up.

    Raises:
        UserInputError: the folder is no reproducer.
    """
    check_folder(folder)
    variant = GraphVariant.from_json((folder / "variant.json").read_text())
    return dataclasses.replace(variant, launch=Launch.PLAIN)


def lowered_mismatch(variant: GraphVariant) -> Verdict:
    """What bisection asks where only compiled graphs disagree: a rewritten graph, lowered, against the captured one."""
    plain = dataclasses.replace(variant, passes=())

    def judge(captured: fx.GraphModule, rewritten: fx.GraphModule, args: Sequence[Any]) -> str | None:
        found = compare_lowered(rewritten, args, plain, captured)
        return f"{plain.label()}: {found.detail}" if found.ok is False else None

    return judge


def compare_lowered(
    graph: fx.GraphModule, args: Sequence[Any], variant: GraphVariant, against: fx.GraphModule | None = None
) -> Comparison:
    """Rewrite and lower a captured graph as `variant` says, and compare it with `against` in eager on `args`.

    Args:
        against: default: `graph` as it is.
    """
    captured = CapturedGraph.build(graph, list(args), {})
    ctx = context_of(args)
    pipeline = Pipeline(ORDER, read_settings())
    if pipeline.settings.cost and variant.passes is None:
        ctx.priced, ctx.sizes = True, captured.sizes(ctx.bucket, args)
    rewritten, _ = pipeline.rewrite(captured.copy, pipeline.select(variant, Stage.FORWARD, ctx), ctx, "replay")
    hooks = {}
    for stage in (Stage.JOINT, Stage.POST_GRAD):
        late = pipeline.select(variant, stage, ctx)
        if late:
            hooks[stage] = GraphHook(pipeline, late, ctx, "replay", lambda result: None)
    inputs = bucket_inputs(captured, args, ctx.bucket)
    call, mutated = lower(rewritten, inputs, variant, hooks, lambda node, reason: None)
    return verify(against or captured.gm, call, args, mutated, training=ctx.training)
