"""Attention in the modelling classes of transformers, as they stand: recognised, right, each miss explained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from fusewright.fusion.match.attention.fuse import FuseAttention
from fusewright.tools.pass_tester import PassTester, capture
from tests.fusion.match.library_models import (
    CAUSAL,
    ENCODERS,
    LAYERS,
    TRANSLATORS,
    VISION,
    FirstOutput,
    build,
    inputs,
)

GRADIENT = "the mask requires a gradient"
MIXED = "some masks are added, some fill, in training"

MISSES: dict[tuple[str, bool], tuple[int, str]] = {
    **dict.fromkeys(
        (("gemma2", True), ("gemma2", False)), (2, "tanh stands between the score product and the softmax")
    ),
    **dict.fromkeys((("xglm", True), ("xglm", False)), (2, "is not understood")),
    **dict.fromkeys((("gpt_oss", True), ("gpt_oss", False)), (2, "the scores are also used by max")),
    ("gpt_neo", True): (2, MIXED),
    ("mpt", True): (2, MIXED),
    ("mpnet", True): (2, GRADIENT),
    ("t5", True): (4, GRADIENT),
    ("swin", True): (4, GRADIENT),
}
"""(model, training) -> how many of its attentions are left alone, and why."""


def _is_softmax_of_attention(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return "softmax" in str(node.target) and isinstance(value, torch.Tensor) and value.dim() > 2  # not of routers


@pytest.mark.models
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("kind", [*CAUSAL, *ENCODERS, *TRANSLATORS, *VISION])
def test_library_model(kind: str, training: bool) -> None:
    module: Any = FirstOutput(build(kind, training=training), kind)
    captured = capture(module, inputs(kind))
    found = sum(_is_softmax_of_attention(node) for node in captured.graph.graph.nodes)
    missed, why = MISSES.get((kind, training), (0, ""))
    assert found >= LAYERS
    report = PassTester(FuseAttention()).check(module, inputs(kind), expect_rewrites=found - missed, training=training)
    reasons = [decline.reason for decline in report.declines if "the softmax has 2 axes" not in decline.reason]
    assert len(reasons) == missed
    assert all(why in reason for reason in reasons), reasons
