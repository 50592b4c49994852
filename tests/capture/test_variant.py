"""A variant is plain data: equal however it was spelled, hashable, and the same after a round trip."""

from __future__ import annotations

import itertools

import pytest

from fusewright.capture.variant import DEFAULT_VARIANT, GraphVariant, Launch, Lowering
from fusewright.errors import UnknownNameError, UserInputError

VARIANTS = [
    DEFAULT_VARIANT,
    GraphVariant(passes=()),
    GraphVariant(passes=("a", "b"), lowering=Lowering.EAGER),
    GraphVariant(lowering=Lowering.AOT_EAGER),
    GraphVariant(options=(("max_autotune", True),)),
    GraphVariant(launch=Launch.CUDA_GRAPHS),
    GraphVariant(options=(("max_autotune", False), ("x.y", 1.5), ("name", "text"), ("n", 3))),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=GraphVariant.label)
def test_round_trip(variant: GraphVariant) -> None:
    again = GraphVariant.from_json(variant.to_json())
    assert again == variant
    assert hash(again) == hash(variant)
    assert again.to_json() == variant.to_json()
    assert "\n" not in variant.to_json()


def test_a_variant_of_an_older_store_is_launched_plainly() -> None:
    old = '{"lowering":"inductor","options":[["cpp_wrapper",true]],"passes":null}'
    assert GraphVariant.from_json(old) == GraphVariant(options=(("cpp_wrapper", True),))


def test_variants_differ() -> None:
    assert len({v.to_json() for v in VARIANTS}) == len(set(VARIANTS)) == len(VARIANTS)
    assert len({v.label() for v in VARIANTS}) == len(VARIANTS)


def test_spelling_does_not_matter() -> None:
    one = GraphVariant(passes=("b", "a", "b"), lowering="eager", options=(("y", 1), ("x", 2)))  # type: ignore[arg-type]
    assert one == GraphVariant(passes=("a", "b"), lowering=Lowering.EAGER, options=(("x", 2), ("y", 1)))
    assert one.passes == ("a", "b")


def test_wrong_input() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown lowering 'inducter'\. Did you mean 'inductor'\?"):
        GraphVariant(lowering="inducter")  # type: ignore[arg-type]
    for text in ("[]", "{}", '{"passes": null, "lowering": "eager"}'):
        with pytest.raises(UserInputError, match="not a GraphVariant"):
            GraphVariant.from_json(text)


def test_cuda_graphs_are_captured_from_inductor_only() -> None:
    with pytest.raises(UserInputError, match="cuda_graphs needs the lowering inductor, not eager"):
        GraphVariant(lowering=Lowering.EAGER, launch=Launch.CUDA_GRAPHS)
    with pytest.raises(UserInputError, match="cpp_wrapper=True"):
        GraphVariant(options=(("cpp_wrapper", True),), launch=Launch.CUDA_GRAPHS)


def test_the_simpler_variant_is_smaller() -> None:
    ordered = [
        GraphVariant(lowering=Lowering.EAGER),
        GraphVariant(lowering=Lowering.AOT_EAGER),
        DEFAULT_VARIANT,
        GraphVariant(passes=("a",)),
        GraphVariant(passes=("a", "b")),
        GraphVariant(options=(("x", 1),)),
    ]
    for simple, less_simple in itertools.pairwise(ordered):
        assert simple.complexity() < less_simple.complexity()


def test_labels() -> None:
    assert DEFAULT_VARIANT.label() == "inductor"
    assert GraphVariant(passes=()).label() == "inductor [no passes]"
    assert GraphVariant(passes=("b", "a"), options=(("x", True), ("y", 2))).label() == "inductor(x,y=2) [a+b]"
