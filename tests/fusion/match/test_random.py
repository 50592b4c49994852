"""Random graphs around attention: what the matcher replaces computes what it did, and both kinds are drawn."""

from __future__ import annotations

import pytest
import torch

from benchmarks.models.random_attention import draw, inputs
from fusewright.fusion.match.attention.fuse import FuseAttention
from fusewright.tools.pass_tester import PassTester

SEEDS, GROUP = 240, 40


@pytest.mark.parametrize("first", range(0, SEEDS, GROUP))
def test_what_is_replaced_computes_the_same(first: int) -> None:
    """`check` compares outputs and gradients; `python -m benchmarks.random_graphs` does it for thousands."""
    tester, replaced = PassTester(FuseAttention()), 0
    for seed in range(first, first + GROUP):
        recipe = draw(seed)
        replaced += tester.check(recipe, inputs(recipe, seed), expect_rewrites=None, training=seed % 2 == 0).rewrites
    assert GROUP * 0.2 < replaced < GROUP * 0.8


def test_a_recipe_is_the_same_everywhere() -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    first, second = (inputs(draw(7), 7) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
