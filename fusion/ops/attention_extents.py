"""Which keys the rows of a mask attend to, in chunks of rows: `fusewright::attention_extents`.

Written-out attention adds its mask to every score, hidden or not. Of a causal mask half the scores are hidden, of a
window or a padded batch more, and a kernel that is told so leaves them out. The mask says it itself, whatever it is
made from; it is read once for all layers that share it.
"""
# T query tokens, S key tokens, C chunks of ROWS query tokens

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fusewright.fusion.ops.library import bad_input, define_op

ROWS = 64
"""Query rows of a chunk."""

# An additive mask hides a key at or below this value: exp(score + it - maximum) is then 0 in every dtype whatever the
# score, provided that the row's largest mask value lies above _VISIBLE. Float16 has no such value but -inf.
_HIDDEN = -1e30
_VISIBLE = -1e20

_MOST_PARTS = 8  # calls of the kernel; more of them save little work, and each has fewer rows to share out
_WORTH = 0.95  # two neighbouring parts stay apart where that leaves at most this share of their scores


def _check(mask: Tensor) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise bad_input("attention_extents", "mask", f"has dtype {mask.dtype}; expected bool or a floating dtype")
    if not 1 <= mask.dim() <= 4:
        raise bad_input("attention_extents", "mask", f"has {mask.dim()} dims; expected 1 to 4, the last one keys")


def _extents_fake(mask: Tensor) -> Tensor:
    _check(mask)
    rows = 1 if mask.dim() == 1 else mask.shape[-2]
    return mask.new_empty(((rows + ROWS - 1) // ROWS, 2), dtype=torch.int64)


def _kept(mask: Tensor) -> Tensor:
    """Where a score counts; a row of large finite values everywhere is an average over all keys, so all count."""
    if mask.dtype == torch.bool:
        return mask
    hidden = -math.inf if mask.dtype == torch.float16 else _HIDDEN
    kept = (mask <= hidden).logical_not_()  # NaN counts
    if mask.shape[-1] == 0:
        return kept
    largest = mask.amax(-1, keepdim=True)
    return kept.logical_or_((largest <= _VISIBLE) & (largest > -math.inf))


def _extents(mask: Tensor) -> Tensor:
    _check(mask)
    kept = _kept(mask)
    kept = kept.view(1, -1) if kept.dim() == 1 else kept
    if kept.dim() > 2:
        kept = kept.flatten(0, -3).any(0)  # (T, S): what any batch entry or head needs
    rows, keys = kept.shape
    kept = torch.nn.functional.pad(kept, (0, 0, 0, -rows % ROWS)).view(-1, ROWS, keys).any(1)
    if keys == 0:
        return kept.new_zeros((kept.shape[0], 2), dtype=torch.int64)
    places = kept.to(torch.uint8)
    first, last = places.argmax(-1), keys - places.flip(-1).argmax(-1)
    return torch.stack((first, last), -1).masked_fill_(~kept.any(-1, keepdim=True), 0)


define_op("attention_extents(Tensor mask) -> Tensor", fake=_extents_fake, cpu=_extents, cuda=_extents)


def parts(extents: Tensor | None, rows: int, keys: int) -> Iterator[tuple[slice, slice]]:
    """Split the `rows` queries of an attention over `keys` keys into (rows, keys) that a kernel must compute.

    Together the parts cover all rows, ascending; a part may have no key. extents: (C, 2) of `attention_extents`, or
    None for all keys everywhere; one chunk (a mask that broadcasts over rows) stands for all rows.
    """
    if extents is None:
        yield slice(0, rows), slice(0, keys)
        return
    chunks: list[list[int]] = extents.tolist()
    if len(chunks) == 1:
        yield slice(0, rows), slice(*chunks[0])
        return
    step = math.ceil(len(chunks) / _MOST_PARTS)
    start, (low, high) = 0, _union(chunks[:step])
    for i in range(step, len(chunks), step):
        border, below = min(i * ROWS, rows), _union(chunks[i : i + step])
        both = _union([[low, high], list(below)])
        end = min((i + step) * ROWS, rows)
        apart = (border - start) * (high - low) + (end - border) * (below[1] - below[0])
        if apart > _WORTH * (end - start) * (both[1] - both[0]):
            low, high = both
        else:
            yield slice(start, border), slice(low, high)
            start, (low, high) = border, below
    yield slice(start, rows), slice(low, high)


def _union(ranges: list[list[int]]) -> tuple[int, int]:
    filled = [(a, b) for a, b in ranges if a < b]
    return (min(a for a, _ in filled), max(b for _, b in filled)) if filled else (0, 0)
