"""The crossover benchmark compares two computations of one value, and states what the rule says."""

from __future__ import annotations

import pytest
import torch

from benchmarks.attention_crossover import fused, measure, written


@pytest.mark.parametrize("masked", [True, False])
def test_both_sides_compute_the_same(masked: bool) -> None:
    q, k, v = torch.randn(3, 2, 2, 130, 8)
    mask = torch.zeros(130, 130).masked_fill(torch.ones(130, 130).triu(1).bool(), -torch.inf) if masked else None
    torch.testing.assert_close(fused(q, k, v, mask, 0.3), written(q, k, v, mask, 0.3))


def test_a_row() -> None:
    row = measure((1, 2, 16), 8, masked=True, training=True, rounds=5)
    assert 0 < row["p20"] <= row["ratio"] <= row["p80"]
    assert row["written_ms"] > 0
    assert (row["rule"], row["mode"], row["score_mib"]) == ("leave", "training", 0.0)
