"""Counted FLOPs equal those computed by hand from the architecture, within 1 %."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.workloads import COMPARABLE
from fusewright.costs.op_cost import count_flops

B, T = 2, 128


def transformer(tokens: int, layers: int, products: int, attended: int, heads_width: int, head: int = 0) -> int:
    """Two FLOPs a weight and token, two products of scores a layer, and the output layer."""
    return 2 * tokens * (layers * products + head) + layers * 4 * tokens * attended * heads_width


def llama() -> int:
    d, kv, ff, vocabulary = 512, 256, 1408, 32000
    return transformer(B * T, 6, 2 * d * d + 2 * d * kv + 3 * d * ff, T, d, d * vocabulary)


def llama_eager() -> int:
    d, kv, ff, vocabulary = 256, 128, 704, 8192
    return transformer(256, 4, 2 * d * d + 2 * d * kv + 3 * d * ff, 256, d, d * vocabulary)


def gpt2() -> int:
    d = 384
    return transformer(B * T, 6, 12 * d * d, T, d, d * 8192)


def bert() -> int:
    d, ff = 384, 1536
    return transformer(4 * 64, 6, 4 * d * d + 2 * d * ff, 64, d, d * d + d * 30522)


def vit() -> int:
    d, tokens = 384, 197
    patches = 2 * 196 * d * 3 * 16 * 16
    return transformer(tokens, 12, 12 * d * d, tokens, d) + patches + 2 * d * 1000


def mlp() -> int:
    return 2 * (256 * 256 * 2 + 256 * 64)


def resnet50() -> int:
    """Bottlenecks of 3, 4, 6 and 3 blocks; the stride sits in the 3x3 convolution."""
    total, size, width = 112 * 112 * 64 * 3 * 49, 56, 64
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner, outer = width * 2**stage, 4 * width * 2**stage
        for block in range(blocks):
            before = size
            size = size // 2 if stage and not block else size
            total += before**2 * channels * inner + size**2 * inner * inner * 9 + size**2 * inner * outer
            total += size**2 * channels * outer if not block else 0
            channels = outer
    return 2 * (total + channels * 1000)


def dit() -> int:
    """Tokens of 2x2 patches; adaptive norms and the output layers depend on the timestep, once per image."""
    d, tokens = 384, 256
    patches = 2 * tokens * d * 4 * 4
    once = 6 * (2 * (256 * d + d * d) + 2 * d * 6 * d) + 2 * (256 * d + d * d) + 2 * d * 2 * d
    return transformer(tokens, 6, 12 * d * d, tokens, d) + patches + once + 2 * tokens * d * 4 * 8


CASES = {
    "llama": (llama, 128),
    "llama_eager": (llama_eager, 256),
    "gpt2": (gpt2, 128),
    "bert": (bert, 64),
    "vit": (vit, 1),
    "mlp": (mlp, 1),
    "resnet50": (resnet50, 1),
    "dit": (dit, 1),
}


def step(name: str, length: int, training: bool) -> Any:
    workload = COMPARABLE[name]
    model = workload.build(training=training)
    args, kwargs = workload.make_inputs(length)

    def run() -> None:
        with torch.set_grad_enabled(training):
            output = model(*args, **kwargs)
            if training:
                workload.scalar_loss(output).backward()

    return run


@pytest.mark.parametrize("name", CASES)
def test_a_forward_pass(name: str) -> None:
    by_hand, length = CASES[name]
    assert count_flops(step(name, length, training=False)) == pytest.approx(by_hand(), rel=0.01)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_training_step_costs_three_forward_passes(name: str) -> None:
    by_hand, length = CASES[name]
    assert count_flops(step(name, length, training=True)) == pytest.approx(3 * by_hand(), rel=0.01)


def test_fused_and_written_attention_count_the_same() -> None:
    q, k, v = (torch.randn(2, 4, n, 16, requires_grad=True) for n in (32, 48, 48))

    def fused() -> None:
        nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()

    def written() -> None:
        ((q @ k.mT * 0.25).softmax(-1) @ v).sum().backward()

    assert count_flops(fused) == count_flops(written) == 3 * 2 * 2 * 4 * 32 * 48 * 32
