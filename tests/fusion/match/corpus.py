"""Attention as people write it, and small graphs that look like attention and are not."""
# B batch, N query heads, K key/value heads, T query tokens, S key tokens, H head size; B=2 N=4 K=2 T=6 S=6 H=8

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Function = Callable[..., Any]
B, N, K, T, H = 2, 4, 2, 6, 8
FINFO_MIN = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Case:
    """A function, the kinds of its arguments, and what a near miss is declined for ("" for attention).

    Kinds: q (B,N,T,H), kv (B,K,T,H), x (B,T,N,H), g (B*N,T,H), keep bool (B,1,T,T), pad bool (B,1,1,T),
    bias float (B,1,T,T), gbias float (B*N,1,T), tril (1,1,T,T) float.
    """

    function: Function
    kinds: str = "q q q"
    reason: str = ""

    def args(self, dtype: torch.dtype = torch.float32, *, training: bool = True) -> tuple[Tensor, ...]:
        return tuple(make(kind, dtype, training) for kind in self.kinds.split())


_SHAPES = {"q": (B, N, T, H), "kv": (B, K, T, H), "x": (B, T, N, H), "g": (B * N, T, H), "square": (N, N, N, N)}


def make(kind: str, dtype: torch.dtype, training: bool) -> Tensor:
    """One random argument of `kind`."""
    if kind in _SHAPES:
        return torch.randn(_SHAPES[kind]).to(dtype).requires_grad_(training)
    if kind == "keep":
        return (torch.rand(B, 1, T, T) < 0.6) | torch.eye(T, dtype=torch.bool)
    if kind == "pad":
        return (torch.rand(B, 1, 1, T) < 0.6) | (torch.arange(T) == 0)
    if kind == "tril":
        return torch.tril(torch.ones(T, T)).view(1, 1, T, T)
    if kind == "gbias":
        return torch.randn(B * N, 1, T).to(dtype)
    assert kind == "bias", kind
    return torch.randn(B, 1, T, T).masked_fill(torch.rand(B, 1, T, T) < 0.3, torch.finfo(dtype).min).to(dtype)


def repeat_kv(x: Tensor, repeats: int) -> Tensor:
    batch, heads, tokens, size = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, repeats, tokens, size)
    return x.reshape(batch, heads * repeats, tokens, size)


def no_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


def divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(torch.matmul(q, k.transpose(2, 3)) / math.sqrt(H), dim=-1) @ v


def multiplied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.softmax(torch.matmul(q, k.mT) * H**-0.5, -1).matmul(v)


def scaled_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q * H**-0.5 @ k.permute(0, 1, 3, 2)).softmax(dim=3) @ v


def scaled_both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q * H**-0.25) @ (k / H**0.25).swapaxes(-1, -2)).softmax(-1) @ v


def scaled_thrice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (2 * ((q / 2) @ (k * 3).transpose(-1, -2)).div(5)).softmax(-1) @ v


def additive_mask(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return functional.softmax(q @ k.transpose(-1, -2) / math.sqrt(H) + bias, dim=-1) @ v


def two_additive_masks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, tril: Tensor) -> Tensor:
    return functional.softmax(tril + (q @ k.transpose(-1, -2) * 0.3 - bias.clamp(-9, 9)), dim=-1) @ v


def in_place_scores(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    scores /= math.sqrt(H)
    scores += bias
    return scores.softmax(-1) @ v


def float32_softmax(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3) * 0.3 + bias
    return (
        functional.dropout(functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), p=0.0, training=True)
        @ v
    )


def float32_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(2, 3) * 0.3).float().softmax(-1).type_as(v) @ v


def masked_fill_causal_buffer(q: Tensor, k: Tensor, v: Tensor, tril: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(tril[:, :, : q.size(2), : q.size(2)] == 0, float("-inf"))
    return functional.dropout(functional.softmax(scores, dim=-1), 0.1, training=False) @ v


def masked_fill_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    future = torch.triu(torch.ones(q.size(2), q.size(2), dtype=torch.bool), diagonal=1)
    return (q @ k.mT * 0.3).masked_fill(future, float("-inf")).softmax(-1) @ v


def masked_fill_in_place(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill_(~pad, torch.finfo(q.dtype).min).softmax(-1) @ v


def where_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kept = torch.tril(torch.ones(q.size(2), q.size(2))).bool()
    return torch.where(kept, q @ k.mT / 3, float("-inf")).softmax(-1) @ v


def where_arange(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(q.size(2))
    hidden = torch.full([], torch.finfo(q.dtype).min, dtype=q.dtype)
    return torch.where(at[None, :] <= at[:, None], q @ k.mT / 3, hidden).softmax(-1) @ v


def where_kept(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep, q @ k.mT / 3, torch.tensor(float("-inf"), dtype=q.dtype)).softmax(-1) @ v


def where_hidden(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return torch.where(~keep, float("-inf"), q @ k.mT / 3).softmax(-1) @ v


def two_fills(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, pad: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(~keep, float("-inf"))
    return torch.where(pad | torch.eye(T, dtype=torch.bool), scores, float("-inf")).softmax(-1) @ v


def einsum_heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhkd->bhqd", (torch.einsum("bhqd,bhkd->bhqk", q, k) / 3).softmax(-1), v)


def einsum_tokens_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bthd,bshd->bhts", q, k) * H**-0.5
    return torch.einsum("bhts,bshd->bthd", functional.softmax(scores, -1), v)


def tokens_first(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ((q @ k.transpose(2, 3) * 0.3 + bias).softmax(-1) @ v).transpose(1, 2).reshape(B, T, N * H)


def keys_permuted_once(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q.permute(0, 2, 1, 3) @ k.permute(0, 2, 3, 1)).softmax(-1) @ v.permute(0, 2, 1, 3)


def three_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(functional.softmax(torch.bmm(q * 0.3, k.transpose(1, 2)), dim=-1), v)


def three_axes_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    unused = torch.empty(q.size(0), q.size(1), k.size(1), dtype=q.dtype)
    scores = torch.baddbmm(unused, q, k.transpose(1, 2), beta=0, alpha=0.3)
    return torch.bmm(scores.softmax(-1), v)


def bias_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    slopes = torch.linspace(-1, 1, T).view(1, 1, T).to(q.dtype).expand(q.size(0), 1, T)
    return torch.bmm(slopes.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=0.3).softmax(-1), v)


def three_axes_masked_by_four(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = torch.bmm(q * 0.3, k.transpose(1, 2)).view(B, N, T, T) + bias
    return torch.bmm(functional.softmax(scores.view(B * N, T, T), dim=-1), v)


def grouped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    k, v = repeat_kv(k, N // K), repeat_kv(v, N // K)
    return ((q @ k.transpose(2, 3)) * 0.3 + bias).softmax(-1) @ v


def grouped_interleaved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k.repeat_interleave(2, dim=1), torch.repeat_interleave(v, 2, dim=1)
    return ((q @ k.transpose(2, 3)) * 0.3).softmax(-1) @ v


def grouped_tokens_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.transpose(1, 2) for x in (k, v))
    k, v = (x[:, :, :, None, :].expand(B, T, K, 2, H).reshape(B, T, N, H).transpose(1, 2) for x in (k, v))
    return ((q @ k.transpose(2, 3)) * 0.3).softmax(-1) @ v


def one_key_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k[:, :1], v[:, :1]
    return (q @ k.mT * 0.3).softmax(-1) @ v


def alibi_baddbmm(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, bias: Tensor) -> Tensor:
    """As Bloom: one bias per batch and head goes in before the scores are split into heads, the mask after."""
    scores = slopes.baddbmm(q.flatten(0, 1), k.flatten(0, 1).mT, beta=1.0, alpha=0.3)
    scores = scores.view(B, N, T, T) + bias
    return (scores.softmax(-1).view(B * N, T, T) @ v.flatten(0, 1)).view(B, N, T, H)


def filled_before_the_split(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = (q.flatten(0, 1) @ k.flatten(0, 1).mT).masked_fill(~keep.expand(B, N, T, T).flatten(0, 1), -math.inf)
    return scores.view(B, N, T, T).softmax(-1) @ v


def expanded_as_the_scores(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
    """As DistilBERT: the mask takes its shape from the scores."""
    scores = q @ k.mT * 0.3
    hidden = (pad.long() == 0).expand_as(scores)
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def expanded_to_sizes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT + bias.expand(B, N, T, T)).softmax(-1) @ v


def exponentials(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = torch.where(keep, (q * 0.3) @ k.mT, -1e9)
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return torch.matmul(weights, v)


def exponentials_by_function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    weights = torch.exp(torch.sub(scores, torch.amax(scores, -1, True)))
    return torch.div(weights, torch.sum(weights, 3, True)) @ v


def fill_of_a_billion(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~pad, -1e9).softmax(-1) @ v


def inputs_that_are_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = q * torch.linspace(0, 1, H).to(q), k.tanh()
    return (q @ k.mT).softmax(-1) @ (v * 2)


ATTENTION = [
    Case(no_scale), Case(divided), Case(multiplied), Case(scaled_query), Case(scaled_both), Case(scaled_thrice),
    Case(additive_mask, "q q q bias"), Case(two_additive_masks, "q q q bias tril"),
    Case(in_place_scores, "q q q bias"), Case(float32_softmax, "q q q bias"), Case(float32_scores),
    Case(masked_fill_causal_buffer, "q q q tril"), Case(masked_fill_causal), Case(masked_fill_in_place, "q q q pad"),
    Case(where_causal), Case(where_arange), Case(where_kept, "q q q keep"), Case(where_hidden, "q q q keep"),
    Case(two_fills, "q q q keep pad"), Case(einsum_heads_first), Case(einsum_tokens_first, "x x x"),
    Case(tokens_first, "x x x bias"), Case(keys_permuted_once, "x x x"), Case(three_axes, "g g g"),
    Case(three_axes_baddbmm, "g g g"), Case(bias_baddbmm, "g g g"), Case(three_axes_masked_by_four, "g g g bias"),
    Case(grouped, "q kv kv bias"), Case(grouped_interleaved, "q kv kv"), Case(grouped_tokens_first, "q kv kv"),
    Case(inputs_that_are_scaled), Case(one_key_head), Case(alibi_baddbmm, "q q q gbias bias"),
    Case(filled_before_the_split, "q q q keep"), Case(expanded_as_the_scores, "q q q pad"),
    Case(expanded_to_sizes, "q q q bias"), Case(exponentials, "q q q keep"), Case(exponentials_by_function),
    Case(fill_of_a_billion, "q q q pad"),
]  # fmt: skip


def _masked(value: float) -> Function:
    def filled(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~keep, value).softmax(-1) @ v

    return filled


def _returns_probabilities(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    probabilities = (q @ k.mT).softmax(-1)
    return probabilities @ v, probabilities


def _reads_probabilities(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    probabilities = (q @ k.mT).softmax(-1)
    return probabilities @ v, probabilities.amax(-1)


def _returns_scores(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT
    return scores.softmax(-1) @ v, scores


def _compares_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return scores.masked_fill(scores < 0, -math.inf).softmax(-1) @ v


def _written_product(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    bias = (q @ k.mT * 0.0).flatten(0, 1)
    scores = bias.baddbmm_(q.flatten(0, 1), k.flatten(0, 1).mT)
    return scores.softmax(-1) @ v.flatten(0, 1), bias


def _learned_mask(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return (q @ k.mT + g[:N, :, :T]).softmax(-1) @ v


def _overwritten_mask(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    mask = bias * 1.0
    scores = q @ k.mT + mask
    mask.zero_()
    return scores.softmax(-1) @ v


def _exponentials(shift_axis: int = -1, sum_axis: int = -1, *, keep_shift: bool = False) -> Function:
    """Softmax written out, with another axis somewhere, or with a part that is used again."""

    def written(q: Tensor, k: Tensor, v: Tensor) -> Any:
        scores = q @ k.mT
        largest = scores.amax(shift_axis, keepdim=True)
        weights = (scores - largest).exp()
        out = (weights / weights.sum(sum_axis, keepdim=True)) @ v
        return (out, largest) if keep_shift else out

    return written


NOT_SOFTMAX = [_exponentials(2), _exponentials(-1, 2), _exponentials(keep_shift=True)]
"""What looks like a softmax spelled out and is none: nothing is recognised, so that no reason is given."""

NEAR_MISSES = [
    Case(lambda q, k, v: (q @ k.mT).softmax(-2) @ v, reason="the softmax is over axis 2"),
    Case(lambda q, k, v: (q @ k.mT).softmax(1) @ v, reason="the softmax is over axis 1"),
    Case(lambda q, k, v: (q @ k.permute(1, 0, 3, 2)).softmax(-1) @ v, "square square square", reason=""),
    Case(_masked(0.0), "q q q keep", reason="the fill value 0 does not hide"),
    Case(_masked(-1.0), "q q q keep", reason="the fill value -1 does not hide"),
    Case(_masked(-1e4), "q q q keep", reason="the fill value -10000 does not hide"),
    Case(_masked(math.nan), "q q q keep", reason="the fill value nan does not hide"),
    Case(_returns_probabilities, reason="the probabilities are returned by the model"),
    Case(_reads_probabilities, reason="the probabilities are also used by"),
    Case(_returns_scores, reason="the scores are returned by the model"),
    Case(_written_product, reason="the score product is written over an operand"),
    Case(_compares_scores, reason="the scores are also used by"),
    Case(lambda q, k, v: (q @ k.mT * q.mean()).softmax(-1) @ v, reason="scaled by a tensor"),
    Case(lambda q, k, v: (q @ k.mT / torch.full((), 3.0).sqrt()).softmax(-1) @ v, reason="scaled by a tensor"),
    Case(lambda q, k, v: (2.0 / (q @ k.mT)).softmax(-1) @ v, reason="divide a constant"),
    Case(lambda q, k, v: (q @ k.mT * -0.3).softmax(-1) @ v, reason="not a positive number"),
    Case(lambda q, k, v: functional.dropout((q @ k.mT).softmax(-1), 0.1) @ v, reason="dropout with p=0.1"),
    Case(lambda q, k, v: functional.dropout((q @ k.mT), 0.1).softmax(-1) @ v, reason="dropout stands between"),
    Case(lambda q, k, v: ((q @ k.mT).softmax(-1) @ v.mT.reshape(B, N, T, H)), reason=""),
    Case(lambda q, k, v: (q @ k.mT).softmax(-1).transpose(-1, -2) @ v, reason="permute stands between the softmax"),
    Case(lambda q, k, v: (q @ k.mT).transpose(-1, -2).softmax(-1) @ v, reason="permute stands between the score"),
    Case(lambda q, k, v: v.mT @ (q @ k.mT).softmax(-1), reason="does not sum the probabilities over keys"),
    Case(lambda q, k, v: torch.tanh((q @ k.mT) / 5).mul(5).softmax(-1) @ v, reason="tanh stands between"),
    Case(lambda q, k, v, b: ((q @ k.mT + b) * 0.3).softmax(-1) @ v, "q q q bias", reason="after the mask"),
    Case(lambda q, k, v, m: (q @ k.mT + m).softmax(-1) @ v, "q q q keep", reason="a mask of dtype torch.bool is added"),
    Case(lambda q, k, v, m: (q @ k.mT).masked_fill(m, 0.0).masked_fill(~m, float("-inf")).softmax(-1) @ v,
         "q q q keep", reason="the fill value 0"),
    Case(lambda q, k, v: (q @ k.mT).view(B, T, N, T).softmax(-1).view(B, N, T, T) @ v, reason="a view regroups"),
    Case(_learned_mask, "q q q g", reason="the mask requires a gradient"),
    Case(_overwritten_mask, "q q q bias", reason="writes to a tensor"),
    Case(lambda q, k, v, m, b: ((q @ k.mT).masked_fill(~m, FINFO_MIN) + b).softmax(-1) @ v, "q q q keep bias",
         reason="some masks are added, some fill, in training"),
    Case(lambda q, k, v: (q @ k[:, :1].mT).softmax(-1) @ v, reason="k broadcasts its batch or head axes"),
    Case(lambda q, k, v: (q @ k[:1].mT).softmax(-1) @ v, reason="k broadcasts its batch or head axes"),
    Case(lambda q, k, v: (q @ k.mT).softmax(-1).masked_fill(torch.eye(T).bool(), 0.0) @ v, reason="masked_fill stands"),
    Case(lambda q, k, v: (q @ k.mT).softmax(-1) + v.mean(), reason="add stands between the softmax"),
    Case(lambda q, k, v: (q + k).softmax(-1) * v, reason="is not understood"),
    Case(lambda q, k, v: torch.einsum("bhtd,bhsd->bths", q, k).softmax(-1), reason="the last two axes"),
]  # fmt: skip
