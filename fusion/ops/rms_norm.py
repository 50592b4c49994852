"""RMS normalization over the last dimension: `fusewright::rms_norm` and its backward.

    rstd = 1 / sqrt(mean(x^2, -1) + eps)        y = x * rstd * weight

All arithmetic is float32 (float64 for float64 input) and rounded once, on store.
Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467.
"""
# M rows (all leading dims), N size of the last dim

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusewright.fusion.ops.library import bad_input, define_op, forbid_second_derivative, register_gradient

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Rows are normalized in chunks whose float32 temporaries stay in a core's L2 cache (1 MiB on the machines tried):
# on (2, 2048, 1024) the whole-tensor form spends most of its time in page faults on fresh temporaries.
_CHUNK_ELEMENTS = 1 << 17


def _check(op: str, x: Tensor, weight: Tensor | None) -> None:
    if x.dtype not in DTYPES:
        raise bad_input(op, "x", f"has dtype {x.dtype}; supported are float16, bfloat16, float32, float64")
    if x.dim() == 0:
        raise bad_input(op, "x", "has no dimension; at least one is needed")
    if weight is None:
        return
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise bad_input(op, "weight", f"has shape {tuple(weight.shape)}; expected ({x.shape[-1]},), the last dim of x")
    if weight.dtype != x.dtype and (weight.dtype != torch.float32 or x.dtype == torch.float64):
        raise bad_input(op, "weight", f"has dtype {weight.dtype}; expected {x.dtype} as x, or float32")


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunks(rows: int, size: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(size, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The formula in plain ATen, traceable: what the operator must equal and what Inductor may fuse instead of it.

    Shapes: x (..., N), weight (N,) -> y (..., N) in x's dtype, rstd (...) in the accumulation dtype.
    """
    x_wide = x.to(_accumulator(x.dtype))
    rstd = torch.rsqrt(x_wide.square().mean(-1) + eps)
    y = x_wide * rstd.unsqueeze(-1)
    if weight is not None:
        y = y * weight
    return y.to(x.dtype), rstd


def rms_norm_backward_reference(dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient in plain ATen, traceable. Returns dx (..., N) and dweight (N,), or (0,) without a weight."""
    wide = rstd.dtype
    x_wide, dy_wide = x.to(wide), dy.to(wide)
    x_hat = x_wide * rstd.unsqueeze(-1)
    g = dy_wide if weight is None else dy_wide * weight
    dx = rstd.unsqueeze(-1) * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
    if weight is None:
        return dx.to(x.dtype), x.new_empty(0)
    return dx.to(x.dtype), (dy_wide * x_hat).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)


def _forward_fake(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    _check("rms_norm", x, weight)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(x.shape[:-1], dtype=_accumulator(x.dtype))


def _forward_cpu(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    y, rstd = _forward_fake(x, weight, eps)
    if x.numel() == 0:
        return y, rstd.fill_(torch.nan if x.shape[-1] == 0 else 0.0)
    size, wide = x.shape[-1], rstd.dtype
    x_MN, y_MN = x.reshape(-1, size), y.view(-1, size)
    # The norm squared is one vectorized pass; x.square().mean() would write and read a temporary.
    torch.linalg.vector_norm(x_MN, dim=-1, dtype=wide, out=rstd.view(-1))
    rstd.square_().div_(size).add_(eps).rsqrt_()
    rstd_M1 = rstd.view(-1, 1)
    w = None if weight is None else weight.to(wide)
    for rows in _chunks(x_MN.shape[0], size):
        if x.dtype == wide:
            out = torch.mul(x_MN[rows], rstd_M1[rows], out=y_MN[rows])
            if w is not None:
                out.mul_(w)
        else:
            out = x_MN[rows].to(wide).mul_(rstd_M1[rows])
            y_MN[rows] = out if w is None else out.mul_(w)
    return y, rstd


def _backward_fake(dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, x.new_empty(0) if weight is None else torch.empty_like(weight)


def _backward_cpu(dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Both reductions are matrix-vector products of t = x * dy, made once:

    c = t @ weight (per row)      dweight = rstd @ t      dx = rstd * dy * weight - x * c * rstd^3 / N
    """
    dx, dweight = _backward_fake(dy, x, weight, rstd)
    if x.numel() == 0:
        return dx, dweight.zero_()
    size, wide = x.shape[-1], rstd.dtype
    x_MN, dy_MN, dx_MN, rstd_M = x.reshape(-1, size), dy.reshape(-1, size), dx.view(-1, size), rstd.reshape(-1)
    w = x.new_ones(size, dtype=wide) if weight is None else weight.to(wide)
    dw = torch.zeros(size, dtype=wide)
    for rows in _chunks(x_MN.shape[0], size):
        x_wide, dy_wide, r = x_MN[rows].to(wide), dy_MN[rows].to(wide), rstd_M[rows]
        t = x_wide * dy_wide
        coefficient = torch.mv(t, w).mul_(r.pow(3)).div_(size).unsqueeze(-1)
        if weight is not None:
            dw.addmv_(t.t(), r)
        g = torch.mul(dy_wide, w, out=t).mul_(r.unsqueeze(-1))
        dx_MN[rows] = g.addcmul_(x_wide, coefficient, value=-1.0)
    if weight is not None:
        dweight.copy_(dw)
    return dx, dweight


def _forward_cuda(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    _check("rms_norm", x, weight)
    if not _has_kernel(x):
        y, rstd = rms_norm_reference(x, weight, eps)
        return y.contiguous(), rstd
    from fusewright.fusion.kernels import rms_norm as kernels

    y_MN, rstd_M = kernels.forward(x.reshape(-1, x.shape[-1]), weight, eps)
    return y_MN.view(x.shape), rstd_M.view(x.shape[:-1])


def _backward_cuda(dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
    if not _has_kernel(x):
        dx, dweight = rms_norm_backward_reference(dy, x, weight, rstd)
        return dx.contiguous(), dweight
    from fusewright.fusion.kernels import rms_norm as kernels

    size = x.shape[-1]
    dx_MN, dw = kernels.backward(dy.reshape(-1, size), x.reshape(-1, size), weight, rstd.reshape(-1))
    return dx_MN.view(x.shape), x.new_empty(0) if dw is None else dw


def _has_kernel(x: Tensor) -> bool:
    """Whether the Triton kernels serve this input; float64, rows too wide for one tile and empty inputs take ATen."""
    from fusewright.fusion.kernels import rms_norm as kernels  # triton is absent from CPU builds of torch

    return x.dtype != torch.float64 and x.numel() > 0 and x.shape[-1] <= kernels.WIDEST_ROW


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    _, rstd = output
    ctx.save_for_backward(x, weight, rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dy: Tensor | None, drstd: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, rstd = ctx.saved_tensors
    if dy is None:
        return None, None, None
    dx, dweight = torch.ops.fusewright.rms_norm_backward(dy, x, weight, rstd)
    return dx, None if weight is None else dweight, None


define_op(
    "rms_norm(Tensor x, Tensor? weight, float eps) -> (Tensor y, Tensor rstd)",
    fake=_forward_fake,
    cpu=_forward_cpu,
    cuda=_forward_cuda,
)
define_op(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd) -> (Tensor dx, Tensor dweight)",
    fake=_backward_fake,
    cpu=_backward_cpu,
    cuda=_backward_cuda,
)
register_gradient("rms_norm", _setup_context, _gradient)
forbid_second_derivative("rms_norm_backward")


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Normalize x (..., N) by the root mean square of its last dim and scale by weight (N,).

    Dtypes: x float16, bfloat16, float32 or float64; weight as x, or float32. The result has x's dtype and is
    contiguous. `eps` defaults to the machine epsilon of x's dtype, as in `torch.nn.functional.rms_norm`.

    Raises:
        UserInputError: a wrong dtype or shape; the message names the argument.
    """
    if eps is None:
        eps = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
    y: Tensor = torch.ops.fusewright.rms_norm(x, weight, eps)[0]
    return y
