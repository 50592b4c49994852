"""`fusewright::attention` on CPU: values and gradients against the written-out formula, contract, bad input."""
# B batch, N query heads, K key/value heads, T query tokens, S key tokens, H head size

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fusewright.errors import UserInputError
from fusewright.fusion.ops import attention as module
from fusewright.fusion.ops import attention_exact as exact
from fusewright.fusion.ops.attention import attention

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SCALE = 0.3
HUGE = torch.finfo(torch.float32).min


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


def qkv(
    dtype: torch.dtype, B: int = 2, N: int = 4, K: int = 2, T: int = 19, S: int = 23, H: int = 12
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(B, T, N, H).to(dtype).transpose(1, 2)  # as a projection leaves it
    k, v = torch.randn(2, B, K, S, H).to(dtype)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> None:
    """out and the gradients of everything that requires one, NaN in the same places."""
    given = [q, k, v] + ([mask] if mask is not None and mask.requires_grad else [])
    out = attention(q, k, v, mask=mask, causal=causal, scale=SCALE)
    dout = torch.randn(out.shape).to(out.dtype)
    grads = torch.autograd.grad(out, given, dout)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wide_mask = mask
    if mask is not None and mask.dtype != torch.bool:
        wide_mask = mask.detach().double().requires_grad_(mask.requires_grad)
    right = formula(*wide, wide_mask, causal)
    wide_given = wide + ([wide_mask] if wide_mask is not None and wide_mask.requires_grad else [])
    right_grads = torch.autograd.grad(right, wide_given, dout.double())
    assert out.stride() == torch.empty_like(q).stride()
    for result, expected in zip((out, *grads), (right, *right_grads), strict=True):
        assert torch.equal(result.isnan(), expected.isnan())
        difference = (result.double() - expected).nan_to_num().norm()
        # Some gradients are exactly 0 (one visible key; a mask that shifts a row): dout is the unit of their rounding.
        assert difference <= TOLERANCE[q.dtype] * (expected.nan_to_num().norm() + dout.norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads(dtype: torch.dtype, causal: bool) -> None:
    check(*qkv(dtype), None, causal)


@pytest.mark.parametrize(
    "sizes", [{"K": 1}, {"K": 4}, {"T": 1}, {"T": 40, "S": 7}, {"S": 1}, {"H": 1}, {"H": 300, "B": 1}], ids=str
)
@pytest.mark.parametrize("causal", [False, True])
def test_sizes(sizes: dict[str, int], causal: bool) -> None:
    check(*qkv(torch.float32, **sizes), None, causal)


def _masks(T: int = 19, S: int = 23) -> dict[str, Tensor]:
    kept = torch.rand(1, 4, T, S) > 0.3
    kept[..., 0] = True
    dead = kept[:, :1].clone()
    dead[:, :, 3] = False
    padding = torch.zeros(S)
    padding[5:] = -math.inf
    average = torch.zeros(2, 1, T, S)
    average[0, :, 4:] = HUGE
    return {
        "additive, 4 dims": torch.randn(2, 1, T, S),
        "additive, 3 dims": torch.randn(4, 1, S),
        "additive, transposed": torch.randn(2, 1, S, T).mT,
        "one column": torch.randn(2, 1, T, 1),
        "boolean": kept,
        "boolean, 2 dims": kept[0, 0],
        "boolean with an empty row": dead,
        "padding of -inf, 1 dim": padding,
        "rows of finfo.min": average,
    }


@pytest.mark.parametrize("name", _masks())
@pytest.mark.parametrize("causal", [False, True])
def test_masks(name: str, causal: bool) -> None:
    check(*qkv(torch.float32), _masks()[name], causal)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask_dtype", [torch.float32, None], ids=["float32 mask", "same dtype"])
def test_low_precision_masks(dtype: torch.dtype, mask_dtype: torch.dtype | None) -> None:
    check(*qkv(dtype), torch.randn(2, 1, 19, 23).to(mask_dtype or dtype), True)


@pytest.mark.parametrize("shape", [(2, 4, 19, 23), (1, 4, 19, 23), (2, 1, 1, 23), (4, 19, 1), (23,)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_gradient_of_the_mask(shape: tuple[int, ...], causal: bool) -> None:
    check(*qkv(torch.float32), torch.randn(shape).requires_grad_(), causal)


def test_an_empty_row_is_nan_and_a_huge_finite_one_is_the_average() -> None:
    q, k, v = (x.detach() for x in qkv(torch.float32, N=2, K=2))
    mask = torch.zeros(2, 1, 19, 23)
    mask[0, 0, 3] = -math.inf
    mask[1, 0, 5] = HUGE
    out = attention(q, k, v, mask=mask)
    assert out[0, :, 3].isnan().all()
    assert int(out.isnan().any(-1).sum()) == 2
    torch.testing.assert_close(out[1, :, 5], v[1].mean(1))


def test_row_chunks_of_the_exact_path_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_CHUNK_ELEMENTS", 2 * 4 * 23 * 5)  # five rows at a time: 19 = 5 + 5 + 5 + 4
    for mask in (torch.randn(2, 1, 19, 23), torch.randn(1, 4, 1, 23)):
        check(*qkv(torch.float32), mask.requires_grad_(), True)
    q, k, v = (x.detach() for x in qkv(torch.float32))
    out, lse = exact.forward(q, k, v, None, True, SCALE)
    for result, expected in zip(
        (out, lse), torch.ops.fusewright.attention(q, k, v, None, None, True, SCALE), strict=True
    ):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize(("T", "S"), [(0, 5), (5, 0)])
def test_no_tokens(T: int, S: int) -> None:
    q, k, v = qkv(torch.float32, T=T, S=S)
    out = attention(q, k, v)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert out.shape == q.shape
    assert not out.any()
    assert not any(g.any() for g in grads)


def test_defaults_are_those_of_torch() -> None:
    q, k, v = qkv(torch.float32, K=4)
    for causal in (False, True):
        expected = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        torch.testing.assert_close(attention(q, k, v, causal=causal), expected)


def test_a_last_dim_that_is_not_contiguous() -> None:
    q, k, v = (torch.randn(2, 4, 12, 9).mT.detach().requires_grad_() for _ in range(3))
    check(q, k, v, None, True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own copies of the inputs
@pytest.mark.parametrize("kind", ["none", "additive", "boolean", "learned"])
def test_operator_contract(kind: str) -> None:
    masks = {"additive": torch.randn(2, 1, 7, 9), "boolean": torch.rand(7, 9) > 0.2, "learned": torch.randn(4, 1, 9)}
    mask = masks[kind].requires_grad_(kind == "learned") if kind in masks else None
    q, k, v = (x.detach().requires_grad_() for x in qkv(torch.float32, T=7, S=9, H=4))
    torch.library.opcheck(torch.ops.fusewright.attention.default, (q, k, v, mask, None, True, SCALE))
    q, k, v, mask = (None if x is None else x.detach() for x in (q, k, v, mask))
    out, lse = torch.ops.fusewright.attention(q, k, v, mask, None, True, SCALE)
    arguments = (torch.randn(out.shape), q, k, v, mask, None, out, lse, True, SCALE, kind == "learned")
    torch.library.opcheck(torch.ops.fusewright.attention_backward.default, arguments)
    assert torch.Tag.pt2_compliant_tag in torch.ops.fusewright.attention.default.tags


def test_one_dynamic_graph_serves_many_lengths() -> None:
    frames = 0

    def count_frames(graph: Any, example_inputs: Any) -> Any:
        nonlocal frames
        frames += 1
        return graph

    compiled = torch.compile(attention, backend=count_frames, dynamic=True, fullgraph=True)
    for tokens in (3, 5, 9, 17):
        q, k, v = qkv(torch.float32, T=tokens, S=tokens)
        mask = torch.randn(2, 1, tokens, tokens)
        torch.testing.assert_close(compiled(q, k, v, mask=mask, scale=SCALE), formula(q, k, v, mask, False))
    assert frames == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_does_as_torch_does(compiled: bool) -> None:
    q, k, v = qkv(torch.float32, K=4)
    mask = torch.randn(2, 1, 19, 23)
    ours: Any = torch.compile(attention, backend="aot_eager", fullgraph=True) if compiled else attention
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(q, k, v, mask=mask)
        expected = functional.scaled_dot_product_attention(q, k, v, mask)
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected)
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert dq.dtype == torch.float32
    torch.testing.assert_close(dq, torch.autograd.grad(expected.sum(), q)[0])


def test_lse_is_the_logarithm_of_the_mass_and_carries_no_gradient() -> None:
    q, k, v = qkv(torch.float32, N=2, K=2)
    out, lse = torch.ops.fusewright.attention(q, k, v, None, None, False, SCALE)
    torch.testing.assert_close(lse, (q @ k.mT * SCALE).logsumexp(-1).detach())
    assert not lse.requires_grad
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="attention_backward has no second derivative"):
        dq.sum().backward()


def test_the_fast_backward_is_left_only_where_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = module._backward_exact
    monkeypatch.setattr(module, "_backward_exact", lambda *a: calls.append("exact") or original(*a))
    check(*qkv(torch.float32), torch.randn(2, 1, 19, 23), False)
    assert calls == []
    check(*qkv(torch.float32), _masks()["rows of finfo.min"], False)
    assert calls == ["exact"]


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("q", "k", "v", "mask", "message"),
    [
        (_ones(1, 4, 2, 8), _ones(1, 3, 2, 8), _ones(1, 3, 2, 8), None, "'k' has 3 heads, which do not divide the 4"),
        (_ones(4, 2, 8), _ones(1, 4, 2, 8), _ones(1, 4, 2, 8), None, "'q' has 3 dims; expected 4"),
        (_ones(1, 2, 2, 8), _ones(1, 2, 2, 6), _ones(1, 2, 2, 8), None, r"'k' has shape \(1, 2, 2, 6\)"),
        (_ones(1, 2, 2, 8), _ones(1, 2, 3, 8), _ones(1, 2, 2, 8), None, r"'v' has shape \(1, 2, 2, 8\)"),
        (*(_ones(1, 2, 2, 8, dtype=torch.int32),) * 3, None, "'q' has dtype torch.int32"),
        (_ones(1, 2, 2, 8), _ones(1, 2, 2, 8), _ones(1, 2, 2, 8).half(), None, "'v' has dtype torch.float16"),
        (*(_ones(1, 2, 2, 8),) * 3, _ones(3, 2), r"'mask' has shape \(3, 2\), which does not broadcast"),
        (*(_ones(1, 2, 2, 8),) * 3, _ones(1, 1, 1, 2, 2), "'mask' has shape"),
        (*(_ones(1, 2, 2, 8),) * 3, _ones(2, 2).half(), "'mask' has dtype torch.float16"),
    ],
    ids=lambda case: case[:24] if isinstance(case, str) else "",
)
def test_bad_input_names_the_argument(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, message: str) -> None:
    with pytest.raises(UserInputError, match="argument " + message):
        attention(q, k, v, mask=mask)
