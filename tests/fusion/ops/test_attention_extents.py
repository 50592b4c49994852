"""`fusewright::attention_extents`: which keys a mask leaves, and that the CPU kernels may leave out the rest."""
# B batch, N heads, T query tokens, S key tokens, H head size

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusewright.errors import UserInputError
from fusewright.fusion.ops import attention_exact as exact
from fusewright.fusion.ops import attention_extents
from fusewright.fusion.ops.attention import attention
from fusewright.fusion.ops.attention_extents import ROWS, parts

T, S, H = 4 * ROWS + 30, 4 * ROWS + 10, 8
HUGE = torch.finfo(torch.float32).min


def _future() -> Tensor:
    return torch.ones(T, S, dtype=torch.bool).triu(1)


def _window() -> Tensor:
    query, key = torch.arange(T)[:, None], torch.arange(S)[None, :]
    kept = (query - key).abs() < 20
    kept[:, 3] = True  # one column that everyone sees would undo the left ends
    kept[ROWS:, 3] = False
    kept[S + 19 :, -1] = True
    return kept


def _no_chunk_sees_anything() -> Tensor:
    kept = ~_future()
    kept[ROWS : 2 * ROWS] = False
    return kept


def _average_in_one_row() -> Tensor:
    mask = torch.zeros(T, S).masked_fill(_future(), HUGE)
    mask[5] = HUGE
    return mask


MASKS: dict[str, Callable[[], Tensor]] = {
    "causal, finfo.min": lambda: torch.zeros(2, 1, T, S).masked_fill(_future(), HUGE),
    "causal, -inf, with biases": lambda: torch.randn(1, 2, T, S).masked_fill(_future(), -math.inf),
    "causal, -1e4 hides nothing": lambda: torch.zeros(T, S).masked_fill(_future(), -1e4),
    "causal, boolean": lambda: ~_future(),
    "window, boolean": _window,
    "padding, other in each batch": lambda: torch.arange(S) < torch.tensor([100, 60])[:, None, None, None],
    "padding, 1 dim": lambda: torch.zeros(S).masked_fill(torch.arange(S) >= 70, -math.inf),
    "a chunk without keys": _no_chunk_sees_anything,
    "one row averages": _average_in_one_row,
    "heads differ": lambda: torch.stack([_window(), ~_future()]),
}


@pytest.mark.parametrize("name", MASKS)
def test_extents_are_the_first_and_last_key_of_a_chunk(name: str) -> None:
    mask = MASKS[name]()
    extents = torch.ops.fusewright.attention_extents(mask).tolist()
    hidden = ~mask if mask.dtype == torch.bool else mask <= HUGE
    whole = hidden.all(-1, keepdim=True)
    if mask.dtype != torch.bool:
        hidden = hidden & ~(whole & (mask > -math.inf))
    rows = hidden.reshape(-1, *hidden.shape[-2:]) if hidden.dim() > 1 else hidden.reshape(1, 1, -1)
    assert len(extents) == math.ceil(rows.shape[1] / ROWS)
    for i, (first, stop, dead) in enumerate(extents):
        assert bool(dead) == bool(rows[:, i * ROWS : (i + 1) * ROWS].all(-1).any())
        seen = [(~block).any(0).nonzero().flatten() for block in rows[:, i * ROWS : (i + 1) * ROWS]]
        keys = torch.cat(seen)
        expected = [int(keys.min()), int(keys.max()) + 1] if keys.numel() else [0, 0]
        assert [first, stop] == expected


def _inputs(dtype: torch.dtype) -> list[Tensor]:
    q, k, v = (torch.randn(2, tokens, 2, H).to(dtype).transpose(1, 2) for tokens in (T, S, S))
    return [x.requires_grad_() for x in (q, k, v)]


@pytest.fixture
def small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_extents, "_CALL", 1)  # every part that saves something is a call of its own


@pytest.mark.usefixtures("small_calls")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_values_and_gradients_are_those_of_the_formula(name: str, dtype: torch.dtype) -> None:
    q, k, v = _inputs(dtype)
    mask = MASKS[name]()
    mask = mask if mask.dtype == torch.bool else mask.clamp(min=max(HUGE, torch.finfo(dtype).min)).to(dtype)
    if "-inf" in name and mask.dtype != torch.bool:
        mask = mask.masked_fill(MASKS[name]().isneginf(), -math.inf)
    out = attention(q, k, v, mask=mask)
    dout = torch.randn(out.shape).to(dtype)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    wide = [x.detach().double() for x in (q, k, v)]
    wide_mask = mask if mask.dtype == torch.bool else mask.double()
    wide_mask = wide_mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    right, _ = exact.forward(*wide, wide_mask, False, H**-0.5)
    right_grads = exact.backward(dout.double(), *wide, wide_mask, False, H**-0.5, False)[:3]
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for result, expected in zip((out, *grads), (right, *right_grads), strict=True):
        assert torch.equal(result.isnan(), expected.isnan())
        difference = (result.double() - expected).nan_to_num().norm()
        assert difference <= tolerance * (expected.nan_to_num().norm() + dout.norm())


def test_hidden_keys_are_not_read() -> None:
    q, k, v = (x.detach() for x in _inputs(torch.float32))
    mask = torch.arange(S) < 100
    clean = attention(q, k, v, mask=mask)
    k[:, :, 100:], v[:, :, 100:] = math.nan, math.nan
    torch.testing.assert_close(attention(q, k, v, mask=mask), clean, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [1, ROWS, ROWS + 1, 3 * ROWS + 5, 40 * ROWS])
def test_parts_cover_every_row_once_and_every_key_of_its_chunk(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    for _ in range(50):
        chunks = torch.randint(0, 500, (math.ceil(rows / ROWS), 2), generator=generator).sort(-1).values
        found = list(parts(chunks, rows, 500, 1 << 20))
        assert [r.start for r, _ in found] == [0, *(r.stop for r, _ in found[:-1])]
        assert found[-1][0].stop == rows
        assert len(found) <= 8
        assert list(parts(chunks, rows, 500, 0)) == [(slice(0, rows), found_union(found))]
        for part, keys in found:
            for low, high in chunks[part.start // ROWS : math.ceil(part.stop / ROWS)].tolist():
                assert low == high or (keys.start <= low and high <= keys.stop)


def found_union(found: list[tuple[slice, slice]]) -> slice:
    filled = [keys for _, keys in found if keys.start < keys.stop]
    return slice(min(k.start for k in filled), max(k.stop for k in filled)) if filled else slice(0, 0)


def test_a_triangle_is_split_and_an_even_mask_is_not() -> None:
    triangle = torch.ops.fusewright.attention_extents(torch.ones(1024, 1024, dtype=torch.bool).tril())
    work = sum((r.stop - r.start) * (k.stop - k.start) for r, k in parts(triangle, 1024, 1024, 1 << 20))
    assert work == 1024 * 1024 * 9 / 16
    even = torch.ops.fusewright.attention_extents(torch.ones(1024, 1024, dtype=torch.bool))
    assert list(parts(even, 1024, 1024, 1 << 20)) == [(slice(0, 1024), slice(0, 1024))]


@pytest.mark.parametrize("mask", [torch.zeros(4, 0), torch.zeros(0, 4), torch.ones(2, 1, 70, 0) > 0], ids=str)
def test_no_keys_or_no_rows(mask: Tensor) -> None:
    extents = torch.ops.fusewright.attention_extents(mask)
    assert extents.shape == (math.ceil(mask.shape[-2] / ROWS), 3)
    assert not extents[:, :2].any()
    q, k = torch.randn(2, 1, mask.shape[-2], 8), torch.randn(2, 1, mask.shape[-1], 8)
    assert attention(q, k, k, mask=mask).shape == q.shape


def test_not_a_number_hides_nothing() -> None:
    mask = torch.full((3, 9), -math.inf)
    mask[1, 4] = math.nan
    assert torch.ops.fusewright.attention_extents(mask).tolist() == [[4, 5, 1]]


@pytest.mark.parametrize(
    "mask",
    [torch.arange(130)[:, None].expand(2, 1, 130, 9) % 9 >= torch.arange(9), torch.randn(70, 9), torch.zeros(9)],
    ids=["boolean", "additive", "1 dim"],
)
def test_operator_contract(mask: Tensor) -> None:
    torch.library.opcheck(torch.ops.fusewright.attention_extents.default, (mask,))
    q, k, v = (torch.randn(2, 2, n, 4) for n in (mask.shape[-2] if mask.dim() > 1 else 20, 9, 9))
    extents = torch.ops.fusewright.attention_extents(mask)
    assert extents.shape == (math.ceil((mask.shape[-2] if mask.dim() > 1 else 1) / ROWS), 3)
    torch.library.opcheck(torch.ops.fusewright.attention.default, (q, k, v, mask, extents, False, 0.5))


@pytest.mark.parametrize(
    ("mask", "extents", "causal"),
    [
        (None, torch.zeros(1, 3, dtype=torch.int64), False),
        (torch.zeros(9, 1), torch.zeros(1, 3, dtype=torch.int64), False),
        (torch.zeros(9), torch.zeros(1, 3, dtype=torch.int64), True),
        (torch.zeros(9), torch.zeros(2, 3, dtype=torch.int64), False),
        (torch.zeros(9), torch.zeros(1, 3), False),
    ],
    ids=["no mask", "one column", "causal", "chunks", "dtype"],
)
def test_bad_extents_are_an_error(mask: Tensor | None, extents: Tensor, causal: bool) -> None:
    q = torch.ones(1, 1, 9, 8)
    with pytest.raises(UserInputError, match="argument 'extents'"):
        torch.ops.fusewright.attention(q, q, q, mask, extents, causal, 1.0)


@pytest.mark.parametrize("mask", [torch.zeros(3, 3, dtype=torch.int32), torch.zeros(()), torch.zeros(1, 1, 1, 1, 3)])
def test_bad_masks_are_an_error(mask: Tensor) -> None:
    with pytest.raises(UserInputError, match="attention_extents: argument 'mask'"):
        torch.ops.fusewright.attention_extents(mask)
