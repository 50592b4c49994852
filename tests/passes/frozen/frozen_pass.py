"""Runs a pass on the captured inference graph of a module, as if the user had frozen the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fusewright.capture.graph import copy_graph
from fusewright.capture.spec import Snapshot, check_graph
from fusewright.numerics import compare_trees
from fusewright.passes.base import Pass, PassContext
from fusewright.tools.pass_tester import Report, capture, run


def rewrite(pass_: Pass, module: nn.Module, args: Sequence[Any], *, training: bool = False) -> Report:
    """Run `pass_` twice; the graph must be legal and right after the first run, and untouched by the second."""
    with torch.no_grad():
        captured = capture(module, args)
    after = copy_graph(captured.graph)
    before = Snapshot.of(after)
    ctx = PassContext(training=training, frozen_weights=True, pass_name=pass_.name)
    rewrites = pass_.run(after, ctx)
    check_graph(after, before)
    if rewrites == 0:
        assert before.changed(after) is None
    again = pass_.run(after, PassContext(training=training, frozen_weights=True, pass_name=pass_.name))
    assert again == 0, after.code
    reference = run(captured.graph, captured.inputs, False)
    found = run(after, captured.inputs, False)
    wide = lambda: run(captured.graph, captured.inputs, False, wide=True)  # noqa: E731 - evaluated if needed
    result = compare_trees(found, reference, wide, training=False)
    assert result.ok, f"{result.reason}\n{after.code}"
    return Report(rewrites, captured.graph, after, ctx.recognised, ctx.declines)


def declines(pass_: Pass, module: nn.Module, args: Sequence[Any], *, training: bool = False) -> str:
    """Why `pass_` left the graph alone, all reasons in one text; nothing may be rewritten."""
    report = rewrite(pass_, module, args, training=training)
    assert report.rewrites == 0, report.after.code
    return "; ".join(d.reason for d in report.declines)


def randomized(module: nn.Module) -> nn.Module:
    """`module` in evaluation, with statistics and affine parameters far from their defaults."""
    for one in module.modules():
        if isinstance(one, nn.modules.batchnorm._BatchNorm) and one.running_mean is not None:
            one.running_mean.normal_()
            assert one.running_var is not None
            one.running_var.uniform_(0.3, 3.0)
            if one.affine:
                nn.init.normal_(one.weight)
                nn.init.normal_(one.bias)
    return module.eval()
