"""Attention from the written-out formula in query chunks, on any device: the reference and the path for hard masks.

    P = softmax(scale * q @ k^T + mask, -1)        out = P @ v

The softmax is recomputed with its own row maximum instead of from a stored log-sum-exp. That matters where a whole
row carries a large finite mask: at finfo.min the log-sum-exp rounds to the maximum itself and every recomputed
probability would be 1 instead of 1 / S.
"""
# B batch, N query heads, K key/value heads, G = N / K, T query tokens, S key tokens, H head size, C rows of a chunk

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# Scores of a chunk are this many elements at most: 4 MiB in float32, near the last-level cache share of one core.
_CHUNK_ELEMENTS = 1 << 20


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _query_chunks(q: Tensor, keys: int) -> Iterator[slice]:
    batch, heads, tokens, _ = q.shape
    step = max(1, _CHUNK_ELEMENTS // max(1, batch * heads * keys))
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


def _fold_group(x_BNCH: Tensor, kv_heads: int) -> Tensor:
    """(B, N, C, H) -> (B, K, G * C, H): one matrix product serves all query heads of a key/value head, no copy of k."""
    batch, heads, rows, size = x_BNCH.shape
    return x_BNCH.reshape(batch, kv_heads, heads // kv_heads * rows, size)


def _unfold_group(x_BKXC: Tensor, heads: int) -> Tensor:
    batch, kv_heads, folded, size = x_BKXC.shape
    return x_BKXC.reshape(batch, heads, folded * kv_heads // heads, size)


def _probabilities(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, rows: slice
) -> tuple[Tensor, Tensor]:
    """Softmax of a chunk's scores (B, N, C, S) and its log-sum-exp (B, N, C), in the wide dtype."""
    wide = _wide(q.dtype)
    folded = _fold_group(q[:, :, rows].to(wide), k.shape[1])
    scores = _unfold_group(folded @ k.to(wide).mT, q.shape[1]).mul_(scale)
    if mask is not None:
        part = mask if mask.shape[-2] == 1 else mask[..., rows, :]
        scores = scores.masked_fill_(~part, -math.inf) if part.dtype == torch.bool else scores.add_(part)
    if causal:
        query = torch.arange(rows.start, rows.stop, device=q.device).unsqueeze(-1)
        scores.masked_fill_(query < torch.arange(k.shape[2], device=q.device), -math.inf)
    return torch.softmax(scores, -1), torch.logsumexp(scores, -1)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out (B, N, T, H) in q's dtype and lse (B, N, T) in the wide dtype, for q (B, N, T, H) and k, v (B, K, S, H).

    A row whose every score is -inf gives NaN, as softmax does. No keys at all (S = 0) give zeros.
    Arithmetic is float32 (float64 for float64) whatever the input dtype.
    """
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=_wide(q.dtype), device=q.device)
    for rows in _query_chunks(q, k.shape[2]):
        p, lse[:, :, rows] = _probabilities(q, k, mask, causal, scale, rows)
        out[:, :, rows] = _unfold_group(_fold_group(p, k.shape[1]) @ v.to(p.dtype), q.shape[1])
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, mask_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq (B, N, T, H), dk, dv (B, K, S, H) in the inputs' dtypes; with `mask_grad` dmask in mask's shape and dtype."""
    wide, heads, kv_heads = _wide(q.dtype), q.shape[1], k.shape[1]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(k.shape, dtype=wide, device=q.device) for _ in range(2))
    dmask = torch.zeros(mask.shape, dtype=wide, device=q.device) if mask_grad and mask is not None else None
    for rows in _query_chunks(q, k.shape[2]):
        p, _ = _probabilities(q, k, mask, causal, scale, rows)
        do = _fold_group(dout[:, :, rows].to(wide), kv_heads)
        dp = _unfold_group(do @ v.to(wide).mT, heads)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        if dmask is not None:
            part = dmask if dmask.shape[-2] == 1 else dmask[..., rows, :]
            part.add_(ds.sum_to_size(part.shape))
        p, ds = _fold_group(p, kv_heads), _fold_group(ds.mul_(scale), kv_heads)
        dv.add_(p.mT @ do)
        dk.add_(ds.mT @ _fold_group(q[:, :, rows].to(wide), kv_heads))
        dq[:, :, rows] = _unfold_group(ds @ k.to(wide), heads)
    dmask_out = None if dmask is None or mask is None else dmask.to(mask.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype), dmask_out
