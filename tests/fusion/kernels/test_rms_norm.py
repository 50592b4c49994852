"""RMSNorm kernels in the interpreter against float64."""
# M rows, N row size

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusewright.fusion.kernels import rms_norm as kernels
from fusewright.fusion.kernels.launch import KernelConfig
from fusewright.testing.interpreter import interpreted

# Relative error in the Frobenius norm against float64 on the same (rounded) inputs.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
EPS = 1e-6


def relative_error(result: Tensor, exact: Tensor) -> float:
    return float(((result.double() - exact).norm() / exact.norm()).detach())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("M", "N"), [(1, 1), (7, 40), (33, 130), (5, 256)])
@pytest.mark.parametrize("with_weight", [True, False])
def test_forward_and_backward(dtype: torch.dtype, M: int, N: int, with_weight: bool) -> None:
    x = torch.randn(M, N + 3).to(dtype)[:, :N]  # rows further apart than they are long
    dy = torch.randn(M, 2 * N).to(dtype)[:, ::2]  # not contiguous at all
    weight = torch.randn(N).to(dtype) if with_weight else None
    exact_inputs = [t.double().requires_grad_() for t in (x, weight) if t is not None]
    exact = torch.nn.functional.rms_norm(exact_inputs[0], (N,), exact_inputs[1] if with_weight else None, EPS)
    exact_grads = torch.autograd.grad(exact, exact_inputs, dy.double())

    y, rstd = kernels.forward(x, weight, EPS, wrap=interpreted)
    dx, dweight = kernels.backward(dy, x, weight, rstd, wrap=interpreted)

    tolerance = TOLERANCE[dtype]
    assert relative_error(y, exact) <= tolerance
    assert relative_error(rstd, (x.double().square().mean(1) + EPS).rsqrt()) <= 1e-6
    scale = float(rstd.double().norm() * dy.double().norm() / M)  # N = 1 has an exact gradient near 0
    assert float((dx.double() - exact_grads[0]).norm()) <= tolerance * max(float(exact_grads[0].norm()), scale)
    assert (dweight is None) == (weight is None)
    if dweight is not None:
        assert relative_error(dweight, exact_grads[1]) <= tolerance


def test_a_float32_weight_serves_bf16_rows() -> None:
    x, weight, dy = torch.randn(6, 48).bfloat16(), torch.randn(48), torch.randn(6, 48).bfloat16()
    y, rstd = kernels.forward(x, weight, EPS, wrap=interpreted)
    _, dweight = kernels.backward(dy, x, weight, rstd, wrap=interpreted)
    assert y.dtype == torch.bfloat16
    assert dweight is not None
    assert dweight.dtype == torch.float32
    x_hat = torch.nn.functional.rms_norm(x.double(), (48,), None, EPS)
    assert relative_error(dweight, (dy.double() * x_hat).sum(0)) <= 1e-6


def test_weight_gradient_does_not_depend_on_the_tile() -> None:
    x, weight, dy = torch.randn(21, 20), torch.randn(20), torch.randn(21, 20)
    _, rstd = kernels.forward(x, weight, EPS, wrap=interpreted)
    results = [
        kernels.backward(dy, x, weight, rstd, KernelConfig({"BLOCK_M": rows, "BLOCK_N": 32}), interpreted)
        for rows in (1, 2, 16)
    ]
    for dx, dweight in results[1:]:
        torch.testing.assert_close(dx, results[0][0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(dweight, results[0][1], rtol=1e-5, atol=1e-6)
