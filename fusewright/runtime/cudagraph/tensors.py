"""How tensors get into and out of a CUDA graph: buffers, what a replay cannot renew, copies that the caller keeps."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Value: TypeAlias = Tensor | int | None
"""What goes into and comes out of a region. Integers are sizes: each new combination of them is a new bucket."""


class CannotCaptureError(Exception):
    """A region does something that replays would get wrong; the message becomes the reason."""


class HandOut(enum.Enum):
    """How a caller gets an output that is his to keep."""

    AS_IS = enum.auto()  # an integer or None
    VIEW = enum.auto()  # it lies in a static input, so it is the caller's memory already; or aliases were asked for
    CLONE = enum.auto()
    CLONE_STORAGE = enum.auto()  # its memory is shared with another output or has gaps, and the copy's must be so too


def how_to_hand_out(output: Value, outputs: Sequence[Value], static: Collection[int], alias: bool) -> HandOut:
    """Decide for one of a graph's `outputs`. `static`: storages of static inputs; `alias`: copies are not wanted."""
    if not isinstance(output, Tensor):
        return HandOut.AS_IS
    if alias or storage_of(output) in static:
        return HandOut.VIEW
    alone = sum(isinstance(o, Tensor) and storage_of(o) == storage_of(output) for o in outputs) == 1
    return HandOut.CLONE if alone and _is_dense(output) else HandOut.CLONE_STORAGE


def hand_out(outputs: Sequence[Value], hows: Sequence[HandOut]) -> list[Value]:
    """Return what the caller may keep of a graph's outputs. Enqueues copies on the current stream."""
    copies: dict[int, torch.UntypedStorage] = {}
    handed: list[Value] = []
    for output, how in zip(outputs, hows, strict=True):
        if not isinstance(output, Tensor):
            handed.append(output)
        elif how is HandOut.VIEW:
            handed.append(output.detach())
        elif how is HandOut.CLONE:
            handed.append(output.clone())
        else:
            storage = output.untyped_storage()
            if storage.data_ptr() not in copies:
                copies[storage.data_ptr()] = storage.clone()
            empty = torch.empty(0, dtype=output.dtype, device=output.device)
            new = copies[storage.data_ptr()]
            handed.append(empty.set_(new, output.storage_offset(), output.size(), output.stride()))
    return handed


def check_outputs(outputs: list[Value], buffers: list[Tensor], device: torch.device) -> None:
    """Raise for outputs that a replay would not renew or that would lose their tie to an input."""
    storages = {storage_of(buffer) for buffer in buffers}
    for position, output in enumerate(outputs):
        if not isinstance(output, Tensor):
            continue
        if output.device != device:
            raise CannotCaptureError(f"output {position} is on {output.device}, where a replay does not write")
        if storage_of(output) in storages and output.numel():
            raise CannotCaptureError(f"output {position} is a view of an input that is not static")


def overlapping_mutation(args: tuple[Value, ...], mutated: frozenset[int], static: Collection[int]) -> str | None:
    """Say which written input shares memory with another one such that a buffer of its own would part them, or None."""
    users: dict[int, list[int]] = defaultdict(list)
    for position, arg in enumerate(args):
        if isinstance(arg, Tensor) and arg.numel():
            users[storage_of(arg)].append(position)
    for together in users.values():
        written = mutated.intersection(together)
        if len(together) > 1 and written and not set(together) <= set(static):
            return f"input {min(written)} is written to and shares memory with another input"
    return None


def buffer_like(tensor: Tensor) -> Tensor:
    """An uninitialized tensor of the same shape, strides, dtype and device."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def without_repeats(tensor: Tensor) -> Tensor:
    """The view that names each element of an expanded tensor once, since a copy must not write one place twice."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def storage_of(tensor: Tensor) -> int:
    """Address of the memory behind a tensor: equal for views of one another."""
    return tensor.untyped_storage().data_ptr()


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one block of memory, each once, in any order of dimensions (`clone` keeps strides)."""
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in dims if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def as_tensor(value: Value) -> Tensor:
    """Narrow the type of a value that must be a tensor."""
    assert isinstance(value, Tensor), f"static and mutated inputs must be tensors, not {type(value).__name__}"
    return value
