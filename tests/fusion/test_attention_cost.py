"""Attention is fused where that pays: by the sizes of the bucket on the CPU, always where nothing is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusewright
from fusewright.api import optimize_with
from fusewright.capture.variant import GraphVariant
from fusewright.fusion.ops.attention_cost import why_not

HEADS, SIZE = 2, 8
TOKENS = 2048  # 2 heads * 2048 * 2048 scores of 4 bytes are 32 MiB
DIMS = {name: {2: "tokens"} for name in "qkv"}


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    scores = q @ k.mT * 0.3
    return (scores if bias is None else scores + bias).softmax(-1) @ v


def qkv(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 1, HEADS, tokens, SIZE)
    return q, k, v


@pytest.fixture(autouse=True)
def priced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_COST", "on")


def fused(optimized: Any) -> int:
    count: int = fusewright.explain(optimized).to_dict()["rewrites"].get("fuse_attention", 0)
    return count


@pytest.mark.parametrize(
    ("facts", "pays"),
    [
        ({"scores": 1 << 23, "training": True}, True),
        ({"scores": (1 << 23) - 1, "training": True}, False),
        ({"scores": 1 << 23, "training": True, "itemsize": 2}, False),
        ({"scores": 1 << 22}, True),
        ({"scores": (1 << 22) - 1}, False),
        ({"scores": 1 << 22, "keys": 127}, False),
        ({"scores": 1 << 21, "masked": False}, True),
        ({"scores": 1 << 21, "masked": False, "keys": 127}, False),
        ({"scores": 1 << 21, "masked": False, "training": True}, False),
        ({"scores": (1 << 21) - 1, "masked": False}, False),
        ({"scores": 4, "device": "cuda"}, True),
    ],
    ids=str,
)
def test_rule(facts: dict[str, Any], pays: bool) -> None:
    told: dict[str, Any] = {"device": "cpu", "keys": 512, "itemsize": 4, "masked": True, "training": False}
    reason = why_not(**(told | facts))
    assert (reason is None) == pays
    assert reason is None or reason.startswith("does not pay: the scores take ")


def test_a_bucket_is_priced_at_its_upper_edge() -> None:
    optimized = fusewright.optimize(attend, dims=DIMS, buckets={"tokens": [64, TOKENS]}, verify="off", strict=True)
    with torch.no_grad():
        for tokens, expected in ((50, 0), (65, 1), (64, 1)):
            args = qkv(tokens)
            torch.testing.assert_close(optimized(*args), attend(*args))
            assert fused(optimized) == expected
    (decline,) = fusewright.explain(optimized).to_dict()["declines"]
    assert decline["reason"].startswith("does not pay: the scores take 0.0312 MiB")


def test_without_buckets_the_sizes_of_the_first_call_count() -> None:
    optimized = fusewright.optimize(attend, dims=DIMS, verify="off", strict=True)
    with torch.no_grad():
        optimized(*qkv(TOKENS))
    assert fused(optimized) == 1


def test_a_variant_that_names_its_passes_gets_them() -> None:
    optimized = optimize_with(
        attend, choose=lambda *_: GraphVariant(passes=("fuse_attention",)), verify="off", strict=True
    )
    with torch.no_grad():
        optimized(*qkv(10))
    assert fused(optimized) == 1


def test_cost_off_fuses_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_COST", "off")
    optimized = fusewright.optimize(attend, verify="off", strict=True)
    with torch.no_grad():
        optimized(*qkv(10))
    assert fused(optimized) == 1


def test_a_verdict_is_not_shared_between_prices() -> None:
    """One bucket without an upper edge, first met at two sizes in two processes: two graphs, two verdicts."""
    for tokens, known in ((16, False), (TOKENS, False), (16, True)):
        torch._dynamo.reset()
        optimized = fusewright.optimize(attend, dims=DIMS)
        with torch.no_grad():
            optimized(*qkv(tokens))
        (verdict,) = fusewright.explain(optimized).to_dict()["verified"]
        assert ("verified earlier" in verdict["what"]) == known
