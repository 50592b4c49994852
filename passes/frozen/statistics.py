"""Notices changes of running statistics, which eager training writes without raising the version of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

LARGEST = 8192  # elements; wider norms are left to their versions, so that a call never compares a large table


@dataclass(frozen=True)
class _Group:
    """The small buffers of one device and dtype at some calls' `positions`, and what they held, end to end."""

    positions: tuple[int, ...]
    join: Callable[[list[Tensor]], Tensor]
    held: Tensor


@dataclass(frozen=True)
class Contents:
    """What the small floating-point tensors among some sources held; parameters are left to their versions.

    Batch norm in training writes to its running statistics, in eager mode, behind the version counter.
    """

    groups: tuple[_Group, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Contents:
        """Copy what `tensors` hold now."""
        found: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
        for position, tensor in enumerate(tensors):
            if not isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and tensor.numel() <= LARGEST:
                found.setdefault((tensor.device, tensor.dtype, tensor.dim() == 1), []).append(position)
        groups = []
        for (_, _, is_flat), positions in found.items():
            # Concatenating 106 vectors takes two thirds of the time that flattening them first does.
            join = torch.cat if is_flat else _flatten_dense_tensors
            # A single tensor may come back as it is.
            groups.append(_Group(tuple(positions), join, join([tensors[i] for i in positions]).detach().clone()))
        return cls(tuple(groups))

    def unchanged(self, tensors: Sequence[Tensor]) -> bool:
        """Whether `tensors`, of the same places in memory as those copied, hold the same; not-a-number never does.

        On a GPU this waits for one number a group. While a CUDA graph is captured it must not, and a replay could see
        no change anyway: the answer is True.
        """
        for group in self.groups:
            if group.held.is_cuda and torch.cuda.is_current_stream_capturing():
                continue
            if not torch.equal(group.join([tensors[i] for i in group.positions]), group.held):
                return False
        return True
