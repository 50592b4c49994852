"""Triton kernels of `fusewright::rms_norm`: one pass over the rows each way, weight gradient without atomics."""
# M rows, N row size (a power of two BLOCK_N covers it), R = BLOCK_M rows of a tile, P programs of the backward
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusewright.fusion.kernels.launch import KernelCase, KernelConfig, Wrap, identity


@triton.jit
def rms_norm_forward(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, x_stride, M, N, eps,
    HAS_WEIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = x * rstd * weight, rstd = rsqrt(mean(x^2) + eps).

    x (M, N) with row stride x_stride, weight (N,), y (M, N) contiguous, rstd (M,) float32; arithmetic in float32.
    Grid: (cdiv(M, BLOCK_M),). Traffic: 2 * M * N * itemsize + 4 * M bytes, weight once per program from L2.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    inside = (row[:, None] < M) & (col[None, :] < N)
    x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / N + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < M)
    y = x * rstd[:, None]
    if HAS_WEIGHT:
        y = y * tl.load(weight_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + row[:, None] * N + col[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, dy_stride, x_stride, M, N, tiles,
    HAS_WEIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dx = rstd * (g - x_hat * mean(g * x_hat)), g = dy * weight, x_hat = x * rstd; partial[p] = sum of dy * x_hat.

    dy, x (M, N) with row strides, dx (M, N) contiguous, partial (P, N) float32: program p sums over its own `tiles`
    consecutive tiles of BLOCK_M rows, and the caller adds the P partial sums in a fixed order, so that two runs agree
    bitwise. Grid: (P,). Traffic: 3 * M * N * itemsize + 4 * (M + P * N) bytes.
    """
    program = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_N)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        dweight = tl.zeros((BLOCK_N,), tl.float32)
    for tile in range(0, tiles):
        row = (program * tiles + tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (row[:, None] < M) & (col[None, :] < N)
        x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + row[:, None] * dy_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
        x_hat = x * rstd
        if HAS_WEIGHT:
            dweight += tl.sum(g * x_hat, 0)
            g = g * weight
        dx = rstd * (g - x_hat * (tl.sum(g * x_hat, 1) / N)[:, None])
        tl.store(dx_ptr + row[:, None] * N + col[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if HAS_WEIGHT:
        tl.store(partial_ptr + program * N + col, dweight, mask=col < N)


# A row must fit in one tile: above this the backward spills more than a few values (512 bytes a thread at 32768).
WIDEST_ROW = 16384


def default_config(N: int) -> KernelConfig:
    """A tile of about 4096 values, at least one row; 16 float32 values a thread and tensor."""
    block_n = triton.next_power_of_2(N)
    block_m = max(1, min(16, 4096 // block_n))
    warps = max(4, min(32, block_m * block_n // 512))
    return KernelConfig({"BLOCK_M": block_m, "BLOCK_N": block_n}, num_warps=warps, num_stages=1)


def forward(
    x_MN: Tensor, weight: Tensor | None, eps: float, config: KernelConfig | None = None, wrap: Wrap = identity
) -> tuple[Tensor, Tensor]:
    """y (M, N) contiguous in x's dtype and rstd (M,) float32, for x (M, N) of any row stride."""
    M, N = x_MN.shape
    if x_MN.stride(1) != 1:
        x_MN = x_MN.contiguous()
    config = config or default_config(N)
    y = torch.empty((M, N), dtype=x_MN.dtype, device=x_MN.device)
    rstd = torch.empty(M, dtype=torch.float32, device=x_MN.device)
    grid = (triton.cdiv(M, config.blocks["BLOCK_M"]),)
    wrap(rms_norm_forward)[grid](
        x_MN, weight, y, rstd, x_MN.stride(0), M, N, eps, HAS_WEIGHT=weight is not None, **config.blocks,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return y, rstd


def _backward_programs(device: torch.device) -> int:
    # Two programs a multiprocessor hide each other's loads; the partial sums stay a few MB.
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def backward(
    dy_MN: Tensor,
    x_MN: Tensor,
    weight: Tensor | None,
    rstd_M: Tensor,
    config: KernelConfig | None = None,
    wrap: Wrap = identity,
) -> tuple[Tensor, Tensor | None]:
    """dx (M, N) contiguous in x's dtype, and dweight (N,) in weight's dtype or None without a weight."""
    M, N = x_MN.shape
    dy_MN, x_MN = (t if t.stride(1) == 1 else t.contiguous() for t in (dy_MN, x_MN))
    config = config or default_config(N)
    row_tiles = triton.cdiv(M, config.blocks["BLOCK_M"])
    programs = min(row_tiles, _backward_programs(x_MN.device))
    tiles = triton.cdiv(row_tiles, programs)
    dx = torch.empty((M, N), dtype=x_MN.dtype, device=x_MN.device)
    partial = None
    if weight is not None:
        partial = torch.empty((programs, N), dtype=torch.float32, device=x_MN.device)
    wrap(rms_norm_backward)[(programs,)](
        dy_MN, x_MN, weight, rstd_M.contiguous(), dx, partial, dy_MN.stride(0), x_MN.stride(0), M, N, tiles,
        HAS_WEIGHT=weight is not None, **config.blocks, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if partial is None or weight is None:
        return dx, None
    return dx, partial.sum(0).to(weight.dtype)


def offline_cases(N: int, dtype: str = "bf16", config: KernelConfig | None = None) -> list[KernelCase]:
    """Both kernels as launched for rows of N values of `dtype` (Triton's name) with a weight, for compilation ahead."""
    config = config or default_config(N)
    sizes = {"x_stride": "i32", "dy_stride": "i32", "M": "i32", "N": "i32", "tiles": "i32", "eps": "fp32"}
    pointers = {f"{p}_ptr": f"*{dtype}" for p in ("x", "weight", "y", "dy", "dx")}
    types = {**sizes, **pointers, "rstd_ptr": "*fp32", "partial_ptr": "*fp32"}
    aligned = tuple(pointers) + ("rstd_ptr", "partial_ptr", "x_stride", "dy_stride") + (("N",) if N % 16 == 0 else ())
    return [
        KernelCase(
            name=f"{kernel.fn.__name__}[N={N},{dtype}]",
            kernel=kernel,
            types={n: t for n, t in types.items() if n in kernel.arg_names},
            constants={"HAS_WEIGHT": True, **config.blocks},
            divisible=tuple(n for n in aligned if n in kernel.arg_names),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        for kernel in (rms_norm_forward, rms_norm_backward)
    ]
