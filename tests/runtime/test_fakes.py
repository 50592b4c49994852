"""Fake inputs of a bucket keep the capture's symbols apart, ranged and shared as the real ones may be."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from fusewright.capture.shapes import DimRange, ShapeBucket
from fusewright.runtime.fakes import BucketInputs, bucket_inputs, separate_memory
from tests.runtime.captured import capture


def product(x: Tensor, y: Tensor) -> Tensor:
    return x.sum(0, keepdim=True) * y.sum(1, keepdim=True)


BOTH = {(0, 1): "cols", (1, 0): "rows"}


def ranges(inputs: BucketInputs) -> dict[str, tuple[int, float]]:
    """Source position of each symbol -> its range."""
    env: Any = inputs.mode.shape_env
    found = {}
    for symbol, where in inputs.where.items():
        limits = env.bound_sympy(symbol)
        found[str(where)] = (int(limits.lower), float(limits.upper))
    return found


def test_a_named_symbol_gets_the_range_of_its_bucket_and_no_other_does() -> None:
    captured, args = capture(product, (torch.ones(3, 5), torch.ones(7, 4)), BOTH)
    bucket = ShapeBucket((DimRange("cols", 2, 8), DimRange("rows", 5, 16)))
    inputs = bucket_inputs(captured, args, bucket)
    assert sorted(ranges(inputs).values()) == [(2, 8), (5, 16)]
    assert inputs.guard() is None
    free = bucket_inputs(captured, args, ShapeBucket((DimRange("cols", 2, 8),)))
    assert (2, 8) in ranges(free).values()
    assert (5, 16) not in ranges(free).values()


def test_a_bucket_of_one_size_is_static() -> None:
    captured, args = capture(product, (torch.ones(3, 5), torch.ones(7, 4)), BOTH)
    inputs = bucket_inputs(captured, args, ShapeBucket((DimRange("cols", 5, 5), DimRange("rows", 5, 16))))
    tensors = [v for v in inputs.values if isinstance(v, Tensor)]
    assert tuple(map(str, tensors[0].shape)) == ("3", "5")
    assert len(inputs.where) == 1


def test_two_sizes_that_are_equal_at_the_first_call_stay_two_symbols() -> None:
    captured, args = capture(product, (torch.ones(3, 6), torch.ones(7, 4)), BOTH)
    tensors = {(3, 6): torch.ones(3, 6), (7, 4): torch.ones(6, 4)}
    equal = [tensors[tuple(a.shape)] if isinstance(a, Tensor) else 6 for a in args]
    inputs = bucket_inputs(captured, equal, ShapeBucket((DimRange("cols", 2, 8), DimRange("rows", 2, 8))))
    assert len(inputs.where) == 2


def test_only_the_symbol_that_chose_the_bucket_is_ranged() -> None:
    same = {(0, 1): "n", (1, 0): "n"}
    captured, args = capture(product, (torch.ones(3, 5), torch.ones(7, 4)), same)
    first = min((s for s in captured.named), key=str)
    inputs = bucket_inputs(captured, args, ShapeBucket((DimRange("n", 2, 8),)), axes={first})
    assert list(ranges(inputs).values()).count((2, 8)) == 1


def test_the_guard_tells_what_lowering_assumed() -> None:
    captured, args = capture(product, (torch.ones(3, 16), torch.ones(7, 4)), BOTH)
    inputs = bucket_inputs(captured, args, ShapeBucket((DimRange("cols", 2, 64), DimRange("rows", 2, 64))))
    x = next(v for v in inputs.values if isinstance(v, Tensor) and str(v.shape[0]) == "3")
    assert bool(x.shape[1] % 8 == 0)  # as AOTAutograd or Inductor might ask
    guard = inputs.guard()
    assert guard is not None
    position = next(i for i, a in enumerate(args) if isinstance(a, Tensor) and a.shape == (3, 16))
    for size in (8, 9, 24, 17):
        call = [size if not isinstance(a, Tensor) and a == 16 else a for a in args]
        call[position] = torch.ones(3, size)
        assert guard(call) is (size % 8 == 0), size


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, in a bare torch.compile
@pytest.mark.parametrize("leaf", [True, False])
def test_gradients_and_leaves_are_those_of_the_arguments(leaf: bool) -> None:
    x = torch.ones(3, 5, requires_grad=True)
    x = x if leaf else x * 1
    captured, args = capture(lambda x: x * 2, (x,), {(0, 1): "cols"})
    inputs = bucket_inputs(captured, args, ShapeBucket((DimRange("cols", 2, 8),)))
    (fake,) = [v for v in inputs.values if isinstance(v, Tensor)]
    assert fake.requires_grad
    assert fake.is_leaf is leaf


def test_strides_of_a_transposed_argument_follow_its_symbol() -> None:
    captured, args = capture(lambda x: x * 2, (torch.ones(5, 3).t(),), {(0, 1): "cols"})
    inputs = bucket_inputs(captured, args, ShapeBucket((DimRange("cols", 2, 8),)))
    (fake,) = [v for v in inputs.values if isinstance(v, Tensor)]
    assert [str(s) for s in fake.stride()] == ["1", "3"]
    assert isinstance(fake.shape[1].node.expr, sympy.Symbol)


def in_place(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    return y * 2


def test_separate_memory_tells_overlap_from_neighbours() -> None:
    captured, _ = capture(in_place, (torch.ones(4), torch.ones(4)), {})
    assert separate_memory(captured, None) is None
    assert separate_memory(captured, ()) is None
    separate = separate_memory(captured, (0,))
    assert separate is not None
    whole = torch.zeros(8)
    assert separate([torch.ones(4), torch.ones(4)])
    assert separate([whole[:4], whole[4:]])
    assert not separate([whole[:4], whole[3:7]])
    assert not separate([whole, whole])
    grid = torch.zeros(4, 4)
    assert separate([grid[:, :2], grid[:, 2:]])


def test_unchanged_arguments_may_overlap() -> None:
    def three(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        x.add_(1)
        return y * z

    captured, _ = capture(three, (torch.ones(4), torch.ones(4), torch.ones(4)), {})
    separate = separate_memory(captured, (0,))
    assert separate is not None
    whole = torch.zeros(8)
    assert separate([torch.ones(4), whole[:4], whole[2:6]])
    assert not separate([whole[:4], torch.ones(4), whole[2:6]])
