"""The operators' CUDA implementations on CPU tensors, their kernels interpreted: shapes, strides, masks, hand-over."""
# B batch, N query heads, K key/value heads, T query tokens, S key tokens, H head size

from __future__ import annotations

import functools

import pytest
import torch

from fusewright.fusion.kernels import attention_launch
from fusewright.fusion.kernels import rms_norm as rms_norm_kernels
from fusewright.fusion.ops import attention, rms_norm
from fusewright.testing.interpreter import interpreted

SCALE = 0.3


@pytest.fixture(autouse=True)
def interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention_launch, rms_norm_kernels):
        for name in ("forward", "backward"):
            monkeypatch.setattr(module, name, functools.partial(getattr(module, name), wrap=interpreted))


@pytest.mark.parametrize("mask_shape", [None, (5, 1), (4, 1, 7)], ids=str)
@pytest.mark.parametrize("boolean", [False, True])
def test_attention_equals_the_cpu_implementation(mask_shape: tuple[int, ...] | None, boolean: bool) -> None:
    q = torch.randn(2, 5, 4, 8).transpose(1, 2)
    k, v = torch.randn(2, 2, 2, 8, 7).mT  # last dim not contiguous
    mask = None if mask_shape is None else torch.randn(mask_shape)
    if boolean and mask is not None:
        mask = mask > -2
    out, lse = attention._forward_cuda(q, k, v, mask, None, True, SCALE)
    expected_out, expected_lse = attention._forward_cpu(q, k, v, mask, None, True, SCALE)
    torch.testing.assert_close((out, lse), (expected_out, expected_lse))
    assert (out.stride(), lse.stride()) == (expected_out.stride(), expected_lse.stride())
    dout = torch.randn(2, 4, 8, 5).mT
    grads = attention._backward_cuda(dout, q, k, v, mask, None, out, lse, True, SCALE, False)
    expected = attention._backward_cpu(dout, q, k, v, mask, None, out, lse, True, SCALE, False)
    torch.testing.assert_close(tuple(grads), tuple(expected))
    assert [g.stride() for g in grads] == [g.stride() for g in expected]


def test_what_the_kernels_do_not_take_is_computed_by_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_launch, "forward", None)  # a call would fail
    monkeypatch.setattr(attention_launch, "backward", None)
    for q in (torch.randn(1, 2, 3, 300), torch.randn(1, 2, 3, 8).double()):
        result = attention._forward_cuda(q, q, q, None, None, True, SCALE)
        torch.testing.assert_close(result, attention._forward_cpu(q, q, q, None, None, True, SCALE))
    q, mask = torch.randn(1, 2, 3, 8), torch.randn(2, 3, 3)
    out, lse = attention._forward_cpu(q, q, q, mask, None, False, SCALE)
    grads = attention._backward_cuda(out, q, q, q, mask, None, out, lse, False, SCALE, True)
    torch.testing.assert_close(grads, attention._backward_cpu(out, q, q, q, mask, None, out, lse, False, SCALE, True))


@pytest.mark.parametrize("with_weight", [True, False])
def test_rms_norm_equals_the_cpu_implementation(with_weight: bool) -> None:
    x = torch.randn(3, 4, 24).transpose(0, 1)
    weight = torch.randn(24) if with_weight else None
    y, rstd = rms_norm._forward_cuda(x, weight, 1e-6)
    torch.testing.assert_close((y, rstd), rms_norm._forward_cpu(x, weight, 1e-6))
    dy = torch.randn(4, 3, 24)
    grads = rms_norm._backward_cuda(dy, x, weight, rstd)
    torch.testing.assert_close(grads, rms_norm._backward_cpu(dy, x, weight, rstd))
    assert y.is_contiguous()
    assert grads[0].is_contiguous()
