"""Runs a reproducer folder: eager against the lowering that disagreed, compared as at the first call."""

from __future__ import annotations

import pathlib

import torch

from fusewright.capture.graph import CapturedGraph
from fusewright.capture.shapes import ShapeBucket
from fusewright.capture.variant import GraphVariant
from fusewright.config import read_settings
from fusewright.passes.base import PassContext, Stage
from fusewright.pipeline.order import ORDER
from fusewright.pipeline.pipeline import Pipeline
from fusewright.runtime.fakes import bucket_inputs
from fusewright.runtime.lower import GraphHook, lower
from fusewright.runtime.verify import Comparison, verify
from fusewright.tools.reproduced import load


def replay(folder: pathlib.Path) -> Comparison:
    """Lower the graph in `folder` for exactly the saved sizes and print how it compares with eager.

    Args:
        folder: made by `runtime.reproducer.write_reproducer`.

    Raises:
        UserInputError: the folder is no reproducer.
    """
    taken = load(folder)
    args = taken.inputs
    variant = GraphVariant.from_json((folder / "variant.json").read_text())
    captured = CapturedGraph.build(taken.graph, args, {})
    training = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    pipeline = Pipeline(ORDER, read_settings())
    ctx = PassContext(ShapeBucket(), args[0].device.type if isinstance(args[0], torch.Tensor) else "cpu", training)
    rewritten, _ = pipeline.rewrite(captured.copy, pipeline.select(variant, Stage.FORWARD, ctx), ctx, "replay")
    hooks = {}
    for stage in (Stage.JOINT, Stage.POST_GRAD):
        late = pipeline.select(variant, stage, ctx)
        if late:
            hooks[stage] = GraphHook(pipeline, late, ctx, "replay", lambda result: None)
    call, mutated = lower(rewritten, bucket_inputs(captured, args, ctx.bucket), variant, hooks)
    verdict = verify(captured.gm, call, args, mutated, training=training)
    print(f"{variant.label()}: ok={verdict.ok} ({verdict.what}) {verdict.detail}")
    return verdict
