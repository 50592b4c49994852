"""Attention kernels in the interpreter against float64: grouped heads, masks, odd sizes, rows with nothing to see."""
# B batch, N query heads, K key/value heads, T query tokens, S key tokens, H head size

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fusewright.fusion.kernels import attention_launch as kernels
from fusewright.fusion.kernels.launch import KernelConfig
from fusewright.testing.interpreter import interpreted

# Relative error in the Frobenius norm against float64 on the same (rounded) inputs.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
SCALE = 0.3


def config(*blocks: tuple[int, int]) -> kernels.AttentionConfig:
    return kernels.AttentionConfig(*(KernelConfig({"BLOCK_T": t, "BLOCK_S": s}) for t, s in blocks))


# Tiles of different shape in each kernel, so that a mix-up of their sizes shows. At most 128 programs x iterations.
CONFIG = config((16, 32), (32, 16), (16, 32))


def formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """softmax(scale * q @ k^T + mask) @ v as written, every mask added."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * SCALE
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -math.inf)
    if mask is not None:
        scores = scores + mask
    if causal:
        scores = scores + torch.full(scores.shape[-2:], -math.inf, dtype=q.dtype).triu(1)
    return scores.softmax(-1) @ v


def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dout: Tensor) -> list[Tensor]:
    """out and the three gradients from the interpreted kernels, into poisoned outputs."""
    B, N, T, _ = q.shape
    out = torch.full_like(q, 6e4)
    lse = torch.full((B, T, N), 6e4).transpose(1, 2)
    kernels.forward(q, k, v, mask, out, lse, causal, SCALE, CONFIG, interpreted)
    grads = [torch.full_like(x, 6e4) for x in (q, k, v)]
    kernels.backward(dout, q, k, v, mask, out, lse, *grads, causal, SCALE, CONFIG, interpreted)
    return [out, *grads]


def check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> None:
    dout = torch.randn(q.shape).to(q.dtype)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    wide_mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    exact = formula(*wide, wide_mask, causal)
    expected = [exact, *torch.autograd.grad(exact, wide, dout.double())]
    for name, result, right in zip(("out", "dq", "dk", "dv"), run(q, k, v, mask, causal, dout), expected, strict=True):
        assert torch.equal(result.isnan(), right.isnan()), f"{name}: NaN in other places"
        difference = (result.double() - right).nan_to_num().norm()
        assert difference <= TOLERANCE[q.dtype] * right.nan_to_num().norm() + 1e-30, name


def qkv(
    dtype: torch.dtype, N: int = 4, K: int = 2, T: int = 37, S: int = 45, H: int = 12, B: int = 1
) -> tuple[Tensor, ...]:
    q = torch.randn(B, T, N, H).to(dtype).transpose(1, 2)  # as a projection leaves it
    return q, torch.randn(B, K, S, H).to(dtype), torch.randn(B, S, K, H).to(dtype).transpose(1, 2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads(dtype: torch.dtype, causal: bool) -> None:
    check(*qkv(dtype), None, causal)


@pytest.mark.parametrize(
    "sizes",
    [
        {"N": 2, "K": 2, "T": 1, "S": 1, "H": 16},  # one token
        {"N": 3, "K": 1, "T": 50, "S": 20, "H": 16},  # more queries than keys
        {"N": 2, "K": 2, "T": 16, "S": 64, "H": 16, "B": 2},  # whole tiles only
        {"N": 2, "K": 1, "T": 20, "S": 70, "H": 33},
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_sizes(sizes: dict[str, int], causal: bool) -> None:
    check(*qkv(torch.float32, **sizes), None, causal)


def _masks(T: int, S: int) -> dict[str, Tensor]:
    huge = torch.finfo(torch.float32).min
    kept = torch.rand(1, 1, T, S) > 0.3
    kept[..., 0] = True
    dead = kept.clone()
    dead[:, :, 3] = False
    padding = torch.zeros(1, 1, 1, S)
    padding[..., S // 3 :] = -math.inf
    average = torch.zeros(1, 4, T, S)
    average[:, 1:, 4:] = huge
    late = torch.full((1, 1, T, S), -math.inf)  # whole tiles of keys without a visible one come first
    late[..., S - 2 :] = 0.5
    return {
        "additive": torch.randn(1, 1, T, S),
        "per head": torch.randn(1, 4, 1, S),
        "boolean": kept,
        "boolean with an empty row": dead,
        "padding of -inf": padding,
        "rows of finfo.min": average,
        "first keys hidden": late,
    }


@pytest.mark.parametrize("name", _masks(4, 6))
@pytest.mark.parametrize("causal", [False, True])
def test_masks(name: str, causal: bool) -> None:
    q, k, v = qkv(torch.float32)
    check(q, k, v, _masks(q.shape[2], k.shape[2])[name], causal)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_mask(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype)
    check(q, k, v, torch.randn(1, 1, 37, 45).to(dtype), True)


def test_default_tiles_of_small_heads_agree_too() -> None:
    q, k, v = qkv(torch.float32, N=2, K=1, T=70, S=70, H=16)
    out, lse = torch.empty_like(q), torch.empty(1, 2, 70)
    kernels.forward(q, k, v, None, out, lse, True, SCALE, wrap=interpreted)
    exact = formula(q.double(), k.double(), v.double(), None, True)
    assert float((out.double() - exact).norm() / exact.norm()) <= 1e-6
    scores = q.double() @ k.double().mT * SCALE + torch.full((70, 70), -math.inf).double().triu(1)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-6)
