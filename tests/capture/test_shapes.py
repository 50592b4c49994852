"""Buckets cut named dimensions without a hole, and every wrong description is told apart."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusewright.capture.shapes import UNBOUNDED, Axis, DimRange, ShapeBucket, check_buckets, check_dims
from fusewright.errors import DimsError

DIMS = {"ids": {1: "tokens"}, "image": {2: "height", 3: "width"}}


@given(st.lists(st.integers(2, 5000), min_size=1, max_size=6, unique=True), st.integers(2, 6000))
def test_every_size_lies_in_its_bucket(edges: list[int], size: int) -> None:
    axis = Axis("tokens", tuple(sorted(edges)))
    index = axis.index(size)
    if index == len(edges):
        assert size > max(edges)
    else:
        assert size in axis.range(index)
        assert sum(size in axis.range(i) for i in range(len(edges))) == 1


def test_edges() -> None:
    axis = Axis("tokens", (128, 512))
    assert [axis.index(n) for n in (2, 128, 129, 512, 513)] == [0, 0, 1, 1, 2]
    assert [str(axis.range(i)) for i in (0, 1)] == ["tokens=2..128", "tokens=129..512"]


def test_a_bucket_round_trips() -> None:
    bucket = ShapeBucket((DimRange("height", 2, 64), DimRange("tokens", 128, 128)))
    assert ShapeBucket.from_json(bucket.to_json()) == bucket
    assert hash(ShapeBucket.from_json(bucket.to_json())) == hash(bucket)
    assert str(bucket) == "height=2..64 tokens=128"
    assert str(ShapeBucket()) == "static"
    assert bucket.range_of("tokens") == DimRange("tokens", 128, 128)
    assert bucket.range_of("width") is None


@pytest.mark.parametrize(("low", "high"), [(5, 4), (-1, 4)])
def test_an_empty_range(low: int, high: int) -> None:
    with pytest.raises(DimsError, match=rf"range {low}\.\.{high} of 'n' is empty"):
        DimRange("n", low, high)


def test_dims() -> None:
    assert check_dims(None, ["x"]) == {}
    assert check_dims(DIMS, ["ids", "image"]) == DIMS
    assert check_dims(DIMS, None) == DIMS


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        ({"idz": {1: "tokens"}}, "dims: forward has no argument 'idz'; it takes ids, image."),
        ({"ids": ["tokens"]}, "dims['ids']: expected {dimension: name}, got list."),
        ({"ids": {-1: "tokens"}}, "dims['ids']: dimension -1 must be an int >= 0."),
        ({"ids": {True: "tokens"}}, "dims['ids']: dimension True must be an int >= 0."),
        ({"ids": {"1": "tokens"}}, "dims['ids']: dimension '1' must be an int >= 0."),
        ({"ids": {1: "two words"}}, "dims['ids'][1]: 'two words' must be an identifier"),
        ({"ids": {1: 4}}, "dims['ids'][1]: 4 must be an identifier"),
    ],
)
def test_wrong_dims(dims: Any, said: str) -> None:
    with pytest.raises(DimsError, match=re.escape(said)):
        check_dims(dims, ["ids", "image"])


def test_buckets_from_edges_or_ranges() -> None:
    edges = check_buckets({"tokens": [128, 512]}, DIMS)
    assert edges == check_buckets({"tokens": [(2, 128), (129, 512)]}, DIMS)
    assert edges.axis("tokens").edges == (128, 512)
    assert edges.axis("width") == Axis("width", (UNBOUNDED,))
    both = check_buckets({"width": [64], "height": [32]}, DIMS)
    assert [axis.name for axis in both.axes] == ["height", "width"]
    assert check_buckets(None, DIMS).axes == ()


@pytest.mark.parametrize(
    ("sizes", "edges"),
    [({4, 8}, (3, 4, 7, 8)), ({2}, (2,)), ({2, 3}, (2, 3)), ({5}, (4, 5)), (frozenset({9, 7, 8}), (6, 7, 8, 9))],
)
def test_exact_sizes_get_buckets_of_their_own(sizes: Any, edges: tuple[int, ...]) -> None:
    (axis,) = check_buckets({"tokens": sizes}, DIMS).axes
    assert axis.edges == edges
    for size in sizes:
        found = axis.range(axis.index(size))
        assert (found.low, found.high) == (size, size)


@pytest.mark.parametrize(
    ("buckets", "said"),
    [
        ({"token": [128]}, "buckets: 'token' is not named in dims; dims names height, tokens, width."),
        ({"tokens": []}, "buckets['tokens'] is empty; give upper edges such as [128, 256]."),
        ({"tokens": [128, 128]}, "buckets['tokens']: edges must ascend, 128 follows 128."),
        ({"tokens": [128, 64]}, "buckets['tokens']: edges must ascend, 64 follows 128."),
        ({"tokens": [1]}, "buckets['tokens']: edge 1 is below 2"),
        ({"tokens": {1, 8}}, "buckets['tokens']: edge 1 is below 2"),
        ({"tokens": set()}, "buckets['tokens'] is empty"),
        ({"tokens": {"8"}}, "buckets['tokens']: expected a list of upper edges such as [128, 256], got {'8'}."),
        ({"tokens": [(2, 128), (100, 200)]}, "range (100, 200) overlaps the one before; it should start at 129."),
        ({"tokens": [(2, 128), (140, 200)]}, "range (140, 200) leaves a gap; it should start at 129."),
        ({"tokens": [(9, 5)]}, "buckets['tokens']: range (9, 5) is empty."),
        ({"tokens": [(1, 2, 3)]}, "buckets['tokens']: an edge is an int and a range is (low, high), got (1, 2, 3)."),
    ],
)
def test_wrong_buckets(buckets: Any, said: str) -> None:
    with pytest.raises(DimsError, match=re.escape(said)):
        check_buckets(buckets, DIMS)
