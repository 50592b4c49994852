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
from torch.nn import functional

from fusewright.fusion.ops.library import bad_input, define_op

ROWS = 64
"""Query rows of a chunk."""

# An additive mask hides a key at or below this value: exp(score + it - maximum) is 0 in every dtype whatever the score,
# where some key of the row lies above it. Float16 has no such value but -inf.
_HIDDEN = -1e30

_MOST_PARTS = 8  # calls of the kernel; more of them save little work, and each has fewer rows to share out
_WORTH = 0.05  # two neighbouring parts stay apart where that saves this share of their scores,
_CALL = 1 << 18  # and at least this many scores over all heads: what one more call costs, about 0.2 ms


def _check(mask: Tensor) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise bad_input("attention_extents", "mask", f"has dtype {mask.dtype}; expected bool or a floating dtype")
    if not 1 <= mask.dim() <= 4:
        raise bad_input("attention_extents", "mask", f"has {mask.dim()} dims; expected 1 to 4, the last one keys")


def _extents_fake(mask: Tensor) -> Tensor:
    _check(mask)
    rows = 1 if mask.dim() == 1 else mask.shape[-2]
    return mask.new_empty(((rows + ROWS - 1) // ROWS, 3), dtype=torch.int64)


def _kept(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where a score counts (..., T, S), and rows of which none does (..., T).

    In a row that is hidden by finite values throughout, all scores count: the result is the average over its keys.
    """
    kept = mask if mask.dtype == torch.bool else (mask <= _hidden(mask.dtype)).logical_not_()  # NaN counts
    dead = kept.any(-1).logical_not_()
    if mask.dtype != torch.bool and mask.shape[-1] > 0 and dead.any():
        averaged = dead & (mask.amax(-1) > -math.inf)
        return kept.logical_or_(averaged.unsqueeze(-1)), dead & ~averaged
    return kept, dead


def _hidden(dtype: torch.dtype) -> float:
    return -math.inf if dtype == torch.float16 else _HIDDEN


def _extents(mask: Tensor) -> Tensor:
    _check(mask)
    kept, dead = _kept(mask.unsqueeze(0) if mask.dim() == 1 else mask)
    if kept.dim() > 2:  # what any batch entry or head needs
        kept, dead = kept.flatten(0, -3).any(0), dead.flatten(0, -2).any(0)
    rows, keys = kept.shape
    kept = functional.pad(kept, (0, 0, 0, -rows % ROWS)).view((rows + ROWS - 1) // ROWS, ROWS, keys).any(1)
    dead = functional.pad(dead, (0, -rows % ROWS)).view(-1, ROWS).any(1)
    if keys == 0:
        first = last = torch.zeros(kept.shape[0], dtype=torch.int64, device=mask.device)
    else:
        places = kept.to(torch.uint8)
        some = kept.any(-1)
        first, last = places.argmax(-1) * some, (keys - places.flip(-1).argmax(-1)) * some
    return torch.stack((first, last, dead.long()), -1)


define_op("attention_extents(Tensor mask) -> Tensor", fake=_extents_fake, cpu=_extents, cuda=_extents)


def has_dead_rows(extents: Tensor) -> bool:
    """Whether some row has no key at all."""
    return bool(extents[:, 2].any())


def parts(extents: Tensor | None, rows: int, keys: int, lanes: int) -> Iterator[tuple[slice, slice]]:
    """Split the `rows` queries of an attention over `keys` keys into (rows, keys) that a kernel must compute.

    Together the parts cover all rows, ascending; a part may have no key.

    Args:
        extents: (C, 3) of `attention_extents`, or None for all keys everywhere; one chunk (a mask that broadcasts over
            rows) stands for all rows.
        rows: queries of one head.
        keys: keys of one head.
        lanes: batch * heads, which share the extents.
    """
    if extents is None:
        yield slice(0, rows), slice(0, keys)
        return
    chunks: list[list[int]] = extents[:, :2].tolist()
    if len(chunks) == 1:
        yield slice(0, rows), slice(*chunks[0])
        return
    step = math.ceil(len(chunks) / _MOST_PARTS)
    start, (low, high) = 0, _union(chunks[:step])
    for i in range(step, len(chunks), step):
        border, below = min(i * ROWS, rows), _union(chunks[i : i + step])
        both = _union([[low, high], list(below)])
        end = min((i + step) * ROWS, rows)
        together = (end - start) * (both[1] - both[0])
        saved = together - (border - start) * (high - low) - (end - border) * (below[1] - below[0])
        if saved < _WORTH * together or saved * lanes < _CALL:
            low, high = both
        else:
            yield slice(start, border), slice(low, high)
            start, (low, high) = border, below
    yield slice(start, rows), slice(low, high)


def _union(ranges: list[list[int]]) -> tuple[int, int]:
    filled = [(a, b) for a, b in ranges if a < b]
    return (min(a for a, _ in filled), max(b for _, b in filled)) if filled else (0, 0)
