"""Scaled dot-product attention with grouped heads: `fusewright::attention` and its backward.

    out = softmax(scale * q @ k^T + mask, -1) @ v        lse = logsumexp(scale * q @ k^T + mask, -1)

Query head n reads key/value head n // (N / K). `causal` keeps key s for query t where s <= t (aligned at the top left
also where T != S, as `is_causal=True` of `torch.nn.functional.scaled_dot_product_attention`). A boolean mask keeps
where True. **A row with nothing kept gives NaN**, in out and in the gradients, as the written-out formula does (torch's
fused operator gives 0); a row masked by a finite but huge value (finfo.min) gives the plain average of v, as there.
`extents`, from `fusewright::attention_extents(mask)`, names the keys that the mask leaves to each chunk of rows; CPU
kernels do not read the others, so that a NaN in a hidden k or v stays where it is.
Sources: Dao, "FlashAttention-2", arXiv:2307.08691; Ainslie et al., "GQA", arXiv:2305.13245.
"""
# B batch, N query heads, K key/value heads, T query tokens, S key tokens, H head size

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusewright.fusion.ops import attention_exact as exact
from fusewright.fusion.ops.attention_extents import ROWS, has_dead_rows, parts
from fusewright.fusion.ops.library import (
    autocast_as_matmul,
    bad_input,
    define_op,
    forbid_second_derivative,
    register_gradient,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Above this magnitude a float32 log-sum-exp is off by more than 1e-5, and so is each probability made from it. Only a
# mask brings rows there (scores that large carry the same rounding themselves); they are recomputed with their maximum.
_LSE_LIMIT = 256.0


def _check(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, extents: Tensor | None = None, causal: bool = False
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise bad_input("attention", name, f"has {x.dim()} dims; expected 4: (batch, heads, tokens, head size)")
        if x.dtype not in DTYPES:
            raise bad_input(
                "attention", name, f"has dtype {x.dtype}; supported are float16, bfloat16, float32, float64"
            )
        if x.dtype != q.dtype:
            raise bad_input("attention", name, f"has dtype {x.dtype}; expected {q.dtype} as q")
    batch, heads, _, size = q.shape
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] != batch or x.shape[3] != size or x.shape[2] != k.shape[2] or x.shape[1] != k.shape[1]:
            expected = f"({batch}, {k.shape[1]}, {k.shape[2]}, {size})"
            raise bad_input("attention", name, f"has shape {tuple(x.shape)}; expected {expected}")
    if k.shape[1] == 0 or heads % k.shape[1] != 0:
        raise bad_input("attention", "k", f"has {k.shape[1]} heads, which do not divide the {heads} heads of q")
    if mask is not None:
        _check_mask(q, k, mask)
    if extents is not None:
        _check_extents(k, mask, extents, causal)


def _check_mask(q: Tensor, k: Tensor, mask: Tensor) -> None:
    if mask.dtype not in (torch.bool, q.dtype, torch.float32):
        raise bad_input("attention", "mask", f"has dtype {mask.dtype}; expected bool, {q.dtype} as q, or float32")
    full = (*q.shape[:3], k.shape[2])
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if mask.dim() > 4 or any(m != 1 and m != n for m, n in zip(shape, full, strict=False)):
        raise bad_input("attention", "mask", f"has shape {tuple(mask.shape)}, which does not broadcast to {full}")


def _check_extents(k: Tensor, mask: Tensor | None, extents: Tensor, causal: bool) -> None:
    # A row may find all keys that the mask shows it in the future; what counts then is known to the sum of both alone.
    if causal or mask is None or mask.dim() < 1 or mask.shape[-1] != k.shape[2]:
        raise bad_input(
            "attention", "extents", "needs the mask that it was made from, every key in its last dim, and no causal"
        )
    rows = 1 if mask.dim() == 1 else mask.shape[-2]
    expected = ((rows + ROWS - 1) // ROWS, 3)
    if tuple(extents.shape) != expected or extents.dtype != torch.int64:
        raise bad_input(
            "attention", "extents", f"is {extents.dtype} {tuple(extents.shape)}; expected torch.int64 {expected}"
        )


def _four_dims(mask: Tensor) -> Tensor:
    return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))


def _lse_like(q: Tensor) -> Tensor:
    # Tokens before heads in memory: the layout of torch's CPU kernel, so that neither side copies.
    batch, heads, tokens, _ = q.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((batch, tokens, heads), dtype=wide).transpose(1, 2)


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, extents: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    _check(q, k, v, mask, extents, causal)
    return torch.empty_like(q), _lse_like(q)


def _rows_contiguous(x: Tensor) -> Tensor:
    """The kernels read a head's values as one run; any other stride is theirs to choose."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _bias(mask: Tensor, q: Tensor, keys: int, causal: bool) -> Tensor:
    """The mask as torch's CPU kernel takes it: 4 dims, additive, causality included."""
    mask = _four_dims(mask)
    if mask.stride(-1) not in (0, 1):  # the kernel tells only a broadcast row from one without gaps
        mask = mask.contiguous()
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -math.inf)
    if causal:
        hidden = torch.ones(q.shape[2], keys, dtype=torch.bool).triu_(1)
        mask = mask.masked_fill(hidden, -math.inf)
    return mask


def _forward_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, extents: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    _check(q, k, v, mask, extents, causal)
    if q.numel() == 0 or k.shape[2] == 0:  # torch's kernel divides by zero here
        return torch.zeros_like(q), _lse_like(q).fill_(-math.inf)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    bias = None if mask is None else _bias(mask, q, k.shape[2], causal)
    like, (q, k, v) = q, map(_rows_contiguous, (q, k, v))
    out, lse = torch.empty_like(like), _lse_like(q)
    for rows, keys in parts(extents, q.shape[2], k.shape[2], q.shape[0] * q.shape[1]):
        if keys.start == keys.stop:
            out[:, :, rows], lse[:, :, rows] = math.nan, -math.inf
        elif rows.stop - rows.start == q.shape[2] and keys.stop - keys.start == k.shape[2]:
            out, lse = flash(q, k, v, 0.0, causal and bias is None, attn_mask=bias, scale=scale)
        else:
            operands = q[:, :, rows], k[:, :, keys], v[:, :, keys]
            part = _part_of(bias, rows, keys)
            out[:, :, rows], lse[:, :, rows] = flash(*operands, 0.0, False, attn_mask=part, scale=scale)
    if bias is not None and (extents is None or has_dead_rows(extents)):
        dead = bias.isneginf().all(-1)
        if dead.any():
            lse = lse.masked_fill_(dead, -math.inf)
            out = out.masked_fill_(dead.unsqueeze(-1), math.nan)
    return _as_declared(out, like, torch.empty_like), _as_declared(lse, q, _lse_like)


def _part_of(bias: Tensor | None, rows: slice, keys: slice) -> Tensor | None:
    """The bias (.., T or 1, S) of a part of the scores."""
    if bias is None:
        return None
    return bias[..., keys] if bias.shape[-2] == 1 else bias[..., rows, keys]


def _as_declared(x: Tensor, q: Tensor, rule: Callable[[Tensor], Tensor]) -> Tensor:
    """x with the strides that the shape rule gives; a copy only where torch's kernel chose others."""
    strides = rule(q).stride()
    return x if x.stride() == strides else x.new_empty_strided(x.shape, strides).copy_(x)


def _backward_fake(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    extents: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = (_tokens_first(x, x.dtype) for x in (q, k, v))
    if mask is None or not mask_grad:
        return (*grads, q.new_empty(0))  # type: ignore[return-value]
    return (*grads, torch.empty_like(mask, memory_format=torch.contiguous_format))  # type: ignore[return-value]


def _backward_exact(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, mask_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide_mask = None if mask is None else _four_dims(mask)
    dq, dk, dv, dmask = exact.backward(dout, q, k, v, wide_mask, causal, scale, mask_grad)
    dq, dk, dv = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (dq, dk, dv))
    return dq, dk, dv, q.new_empty(0) if dmask is None or mask is None else dmask.reshape(mask.shape)


def _backward_cpu(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    extents: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if q.numel() == 0 or k.shape[2] == 0:
        return tuple(  # type: ignore[return-value]
            x.zero_() for x in _backward_fake(dout, q, k, v, mask, extents, out, lse, causal, scale, mask_grad)
        )
    # `not (... < limit)`: a NaN log-sum-exp takes the exact path too.
    if mask is not None and (mask_grad or not bool(lse.abs().amax() < _LSE_LIMIT)):
        return _backward_exact(dout, q, k, v, mask, causal, scale, mask_grad)
    bias = None if mask is None else _bias(mask, q, k.shape[2], causal)
    operands = tuple(map(_rows_contiguous, (dout, q, k, v, out)))
    dq, dk, dv = _flash_backward(operands, lse, bias, extents, causal and bias is None, scale)
    dq, dk, dv = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (dq, dk, dv))  # no copy: its own layout
    return dq, dk, dv, q.new_empty(0)


def _flash_backward(
    operands: tuple[Tensor, ...],
    lse: Tensor,
    bias: Tensor | None,
    extents: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from torch's CPU kernel, one call per part of the scores; `operands` are dout, q, k, v, out."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dout, q, k, v, out = operands
    todo = list(parts(extents, q.shape[2], k.shape[2], q.shape[0] * q.shape[1]))
    if len(todo) == 1 and todo[0][1] == slice(0, k.shape[2]):
        return flash(*operands, lse, 0.0, causal, attn_mask=bias, scale=scale)  # type: ignore[no-any-return]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    dq = _tokens_first(q, q.dtype).zero_()
    dk, dv = (_tokens_first(x, wide).zero_() for x in (k, v))
    for rows, keys in todo:
        if keys.start < keys.stop:
            one = (dout[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows], lse[:, :, rows])
            dq[:, :, rows], dk_, dv_ = flash(*one, 0.0, False, attn_mask=_part_of(bias, rows, keys), scale=scale)
            dk[:, :, keys] += dk_
            dv[:, :, keys] += dv_
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _tokens_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised (B, X, T, H) whose memory runs (B, T, X, H), as a projection leaves it."""
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), dtype=dtype).transpose(1, 2)


def _has_kernel(q: Tensor, k: Tensor) -> bool:
    """Whether the Triton kernels serve this input; float64, heads above 256 (float32: 128) and empty ones take ATen."""
    from fusewright.fusion.kernels import attention_launch as kernels  # triton is absent from CPU builds of torch

    return kernels.supports(q.shape[3], q.dtype) and q.numel() > 0 and k.shape[2] > 0


def _forward_cuda(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, extents: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    _check(q, k, v, mask, extents, causal)
    mask = None if mask is None else _four_dims(mask)
    out, lse = torch.empty_like(q), _lse_like(q)
    if not _has_kernel(q, k):
        out_, lse_ = exact.forward(q, k, v, mask, causal, scale)
        return out.copy_(out_), lse.copy_(lse_)
    from fusewright.fusion.kernels import attention_launch as kernels

    row_out = _rows_contiguous(out)
    q, k, v = (_rows_contiguous(x) for x in (q, k, v))
    kernels.forward(q, k, v, mask, row_out, lse, causal, scale)
    return out if row_out is out else out.copy_(row_out), lse


def _backward_cuda(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    extents: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not _has_kernel(q, k) or (mask_grad and mask is not None):
        return _backward_exact(dout, q, k, v, mask, causal, scale, mask_grad)
    from fusewright.fusion.kernels import attention_launch as kernels

    dq, dk, dv, dmask = _backward_fake(dout, q, k, v, mask, extents, out, lse, causal, scale, mask_grad)
    dout, q, k, v, out = (_rows_contiguous(x) for x in (dout, q, k, v, out))
    kernels.backward(dout, q, k, v, None if mask is None else _four_dims(mask), out, lse, dq, dk, dv, causal, scale)
    return dq, dk, dv, dmask


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, extents, ctx.causal, ctx.scale = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, mask, extents, out, lse)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 7
    mask_grad = ctx.needs_input_grad[3]
    q, k, v, mask, extents, out, lse = ctx.saved_tensors
    backward = torch.ops.fusewright.attention_backward
    dq, dk, dv, dmask = backward(dout, q, k, v, mask, extents, out, lse, ctx.causal, ctx.scale, mask_grad)
    return dq, dk, dv, dmask if mask_grad else None, None, None, None


def _autocast(
    dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    extents: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Any, ...]:
    """Everything in the autocast dtype but float64 and boolean masks, as torch's own attention under autocast."""

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.dtype in (torch.float16, torch.bfloat16, torch.float32) else x

    return cast(q), cast(k), cast(v), None if mask is None else cast(mask), extents, causal, scale


define_op(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? extents, bool causal, float scale) "
    "-> (Tensor out, Tensor lse)",
    fake=_forward_fake,
    cpu=_forward_cpu,
    cuda=_forward_cuda,
)
define_op(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? extents, Tensor out, "
    "Tensor lse, bool causal, float scale, bool mask_grad) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask)",
    fake=_backward_fake,
    cpu=_backward_cpu,
    cuda=_backward_cuda,
)
register_gradient("attention", _setup_context, _gradient)
autocast_as_matmul("attention", _autocast)
forbid_second_derivative("attention_backward")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention of q (B, N, T, H) over k and v (B, K, S, H), N a multiple of K; the result is as q, strides included.

    mask: bool (True = attend) or additive, in q's dtype or float32, broadcastable to (B, N, T, S); it may require a
    gradient, which costs the slower exact backward. `causal` adds to it. `scale` defaults to 1 / sqrt(H).
    Dtypes: float16, bfloat16, float32, float64, the same for q, k and v.

    Raises:
        UserInputError: a wrong dtype or shape, heads that do not divide; the message names the argument.
    """
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    extents = None
    if mask is not None and not causal and q.device.type == "cpu":
        _check(q, k, v, mask)
        if mask.dim() > 0 and mask.shape[-1] == k.shape[2]:
            extents = torch.ops.fusewright.attention_extents(mask.detach())
    out: Tensor = torch.ops.fusewright.attention(q, k, v, mask, extents, causal, scale)[0]
    return out
