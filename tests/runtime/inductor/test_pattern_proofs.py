"""Inductor's own pattern rewrites are proven: right where a plain torch.compile is silently wrong, with verify off."""
# B batch, N heads, T tokens, H head size; all of one size, so that any permutation of axes fits

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusewright

D = 6
FINFO_MIN = torch.finfo(torch.float32).min
Attention = Callable[..., Tensor]


def permuted(q_perm: tuple[int, ...], k_perm: tuple[int, ...], v_perm: tuple[int, ...], axis: int = -1) -> Attention:
    """Attention after permutations of its operands; torch's pattern knows (0, 2, 1, 3) and takes all others for it."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.permute(q_perm), k.permute(k_perm), v.permute(v_perm)
        return torch.matmul(q, k.transpose(-2, -1)).div(2.0).softmax(dim=axis).matmul(v)

    return attend


def filled(value: float, *, kept: int = 1, shape: tuple[int, ...] = (D, 1, 1, D)) -> Attention:
    """Keys hidden by `masked_fill`, as DistilBERT spells it; torch's pattern knows the fill -inf of `padding == 0`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
        scores = (q @ k.transpose(-2, -1)).div(2.0)
        hidden = (padding == 1 - kept).view(shape).expand_as(scores)
        return torch.softmax(scores.masked_fill(hidden, torch.full((), value)), dim=-1) @ v

    return attend


def chosen(value: float) -> Attention:
    """Keys hidden by `where`, as GPT-2 spells it; torch's pattern knows the least float32."""

    def attend(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
        scores = torch.matmul(q, k.permute(0, 1, 3, 2)).div(torch.full([], 2.0))
        scores = torch.where(padding.bool()[:, None, None], scores, torch.full((), value))
        return scores.softmax(dim=-1).matmul(v) + 0 * (k.sum() + v.sum())

    return attend


def safe(axis: int) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
        q, k = torch.ops.aten.mul.Scalar(q, 0.5), torch.ops.aten.mul.Scalar(k.transpose(-2, -1), 0.5)
        return torch.ops.aten._safe_softmax(q @ k, axis) @ v

    return attend


def flat(axis: int) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        return torch.bmm(q, k.transpose(1, 2)).softmax(axis).bmm(v)

    return attend


USUAL = (0, 2, 1, 3)
GROUPS: dict[str, list[Attention]] = {
    "axes": [
        *(permuted(USUAL, USUAL, USUAL, axis) for axis in (0, 1, 2)),
        *(lambda q, k, v, axis=axis: (q @ k.mT).mul(0.5).softmax(axis) @ v for axis in (0, 1, 2)),
        *(safe(axis) for axis in (1, 2)),
        *(flat(axis) for axis in (0, 1)),
    ],
    "permutations": [
        *(permuted(p, p, p) for p in ((0, 2, 3, 1), (2, 0, 1, 3), (3, 1, 2, 0), (1, 0, 2, 3), (0, 3, 1, 2))),
        permuted(USUAL, (2, 0, 1, 3), USUAL),
        permuted(USUAL, (0, 3, 1, 2), USUAL),
        permuted(USUAL, USUAL, (0, 3, 1, 2)),
    ],
    "masks": [
        *(filled(value) for value in (0.0, -1.0, -1e4, FINFO_MIN, -math.inf)),
        filled(-math.inf, kept=0),
        filled(-math.inf, shape=(D, 1, D, 1)),
        filled(-math.inf, shape=(1, D, 1, D)),
        *(chosen(value) for value in (0.0, -1.0, -1e4)),
    ],
}


def arguments(attend: Attention, *, training: bool) -> tuple[Tensor, ...]:
    tensors: tuple[Tensor, ...] = tuple(torch.randn(D, D, D, D, requires_grad=training) for _ in range(3))
    if "padding" in attend.__code__.co_varnames:
        padding = (torch.rand(D, D) < 0.7).long()
        padding[0] = 0  # a row without keys
        padding[1] = 1
        tensors += (padding,)
    return tensors


def results(function: Callable[..., Any], args: list[tuple[Tensor, ...]], *, training: bool) -> list[Tensor]:
    with torch.set_grad_enabled(training):
        outputs = function(args)
    if not training:
        return list(outputs)
    leaves = [x for each in args for x in each if x.requires_grad]
    cotangents = [torch.linspace(-1, 1, x.numel()).view(x.shape) for x in outputs]
    return [*outputs, *torch.autograd.grad(list(outputs), leaves, cotangents)]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("group", GROUPS)
def test_what_looks_like_attention_keeps_its_meaning(group: str, training: bool) -> None:
    attentions = GROUPS[group]
    args = [arguments(attend, training=training) for attend in attentions]

    def run_all(args: list[tuple[Tensor, ...]]) -> list[Tensor]:
        return [attend(*each) for attend, each in zip(attentions, args, strict=True)]

    optimized = fusewright.optimize(run_all, verify="off", strict=True)
    found = results(optimized, args, training=training)
    for i, (result, expected) in enumerate(zip(found, results(run_all, args, training=training), strict=True)):
        torch.testing.assert_close(
            result, expected, equal_nan=True, rtol=1e-4, atol=1e-4, msg=lambda m, i=i: f"{i}: {m}"
        )
    declines = fusewright.explain(optimized).to_dict()["declines"]
    refused = [d for d in declines if d["pass"] == "inductor"]
    # permutations are recognised by our own matcher, and in training torch knows no masks of these forms
    assert bool(refused) == (group == "axes" or (group == "masks" and not training))
    assert all("torch's own rewrite is refused" in d["reason"] for d in refused)
    assert not any("no reproducer" in d["reason"] for d in refused)


def test_what_does_not_pay_to_fuse_is_left_to_torch_and_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """As users have it: graphs as small as these go to torch's patterns, permutations and all."""
    monkeypatch.setenv("FUSEWRIGHT_COST", "on")
    attentions = GROUPS["permutations"]
    args = [arguments(attend, training=False) for attend in attentions]

    def run_all(args: list[tuple[Tensor, ...]]) -> list[Tensor]:
        return [attend(*each) for attend, each in zip(attentions, args, strict=True)]

    optimized = fusewright.optimize(run_all, verify="off", strict=True)
    with torch.no_grad():
        torch.testing.assert_close(optimized(args), run_all(args), rtol=1e-4, atol=1e-4)
    reasons = {d["reason"].split(":")[0] for d in fusewright.explain(optimized).to_dict()["declines"]}
    assert reasons == {"does not pay", "torch's own rewrite is refused"}


def test_hidden_rows_of_an_expanded_mask_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's fused attention gives 0 where a row has no key; the formula gives NaN."""
    monkeypatch.setenv("FUSEWRIGHT_COST", "on")

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return ((q @ k.transpose(-2, -1) / 2.0) + mask.expand(2, 4, D, D)).softmax(-1) @ v

    q, k, v = torch.randn(3, 2, 4, D, D)
    mask = torch.zeros(D, D)
    mask[1] = -math.inf
    with torch.no_grad():
        result = fusewright.optimize(attend, verify="off", strict=True)(q, k, v, mask)
    torch.testing.assert_close(result, attend(q, k, v, mask), equal_nan=True)


def test_a_wrong_graph_of_torch_compile_in_the_same_cache_is_not_taken() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).mul(0.5).softmax(-2) @ v

    args = tuple(torch.randn(2, 4, 8, 8) for _ in range(3))
    expected = attend(*args)
    with torch.no_grad():
        plain = torch.compile(attend)(*args)
        torch._dynamo.reset()
        result = fusewright.optimize(attend, verify="off")(*args)
    torch.testing.assert_close(result, expected)
    assert not torch.allclose(plain, expected), "torch.compile became right: find another example"


def test_integers_that_wrap_are_scaled_before_the_softmax() -> None:
    """`softmax(x * 3)` of bytes: torch's handler moves the product behind the subtraction of the maximum."""

    def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.softmax((x * 3).float(), -1), (x * 3).float().log_softmax(-1)

    x = torch.randint(0, 200, (D, D), dtype=torch.uint8)
    with torch.no_grad():
        torch.testing.assert_close(fusewright.optimize(scaled, verify="off", strict=True)(x), scaled(x))
