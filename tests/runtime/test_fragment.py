"""A fragment's table: which call lands where, what is lowered when, and what happens outside of every bucket."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from fusewright.capture.shapes import ShapeBucket
from fusewright.capture.variant import GraphVariant, Launch, Lowering
from fusewright.errors import DimsError, UnknownNameError
from fusewright.runtime.fragment import Fragment
from fusewright.runtime.slot import EAGER, both, ladder
from tests.runtime.captured import Named, capture, services
from tests.runtime.dispatch_models import aot_eager, cheap


def outer(x: Tensor, y: Tensor) -> Tensor:
    return x[:, None] * y[None]


def flat(args: list[Any], sizes: dict[int, int]) -> list[Any]:
    """The same arguments with other sizes: `sizes` maps an old size to a new one."""
    return [torch.ones([sizes.get(n, n) for n in a.shape]) if isinstance(a, Tensor) else sizes.get(a, a) for a in args]


@pytest.fixture
def make(tmp_path: pathlib.Path) -> Callable[..., tuple[Fragment, list[Any]]]:
    def build(named: Named, edges: dict[str, list[int]], **options: Any) -> tuple[Fragment, list[Any]]:
        captured, args = capture(outer, (torch.ones(5), torch.ones(7)), named)
        return Fragment(captured, services(tmp_path, edges, **options), "here"), args

    return build


def test_a_bucket_is_lowered_at_its_first_call_and_only_then(make: Any) -> None:
    asked: list[str] = []

    def choose(fingerprint: str, bucket: ShapeBucket, device: torch.device) -> GraphVariant:
        asked.append(str(bucket))
        return aot_eager(fingerprint, bucket, device)

    fragment, args = make({(0, 0): "n"}, {"n": [8, 16]}, choose=choose)
    call = fragment.dispatcher()
    assert asked == []
    for size in (5, 8, 9, 16, 2):
        (out,) = call(*flat(args, {5: size}))
        assert out.shape == (size, 7)
    assert asked == ["n=2..8", "n=9..16"]
    assert [slot.hits.value for slot in fragment.slots] == [3, 2]
    assert fragment.dispatched == 5


def test_two_axes_make_a_table(make: Any) -> None:
    fragment, args = make({(0, 0): "a", (1, 0): "b"}, {"a": [8, 16], "b": [4, 8, 32]})
    call = fragment.dispatcher()
    for a, b in ((2, 3), (9, 3), (9, 5), (16, 32)):
        assert call(*flat(args, {5: a, 7: b}))[0].shape == (a, b)
    hit = [str(slot.bucket) for slot in fragment.slots if slot.hits.value]
    assert hit == ["a=2..8 b=2..4", "a=9..16 b=2..4", "a=9..16 b=5..8", "a=9..16 b=9..32"]


@pytest.mark.parametrize("named", [{(0, 0): "a"}, {(0, 0): "a", (1, 0): "b"}])
def test_a_size_above_the_last_edge_is_refused_with_the_remedy(make: Any, named: Named) -> None:
    fragment, args = make(named, {"a": [8]})
    call = fragment.dispatcher()
    with pytest.raises(DimsError, match=r"buckets\['a'\]: size 9 is above the last edge 8; add a larger edge"):
        call(*flat(args, {5: 9}))
    assert fragment.dispatched == 0


def test_one_name_with_two_sizes_is_refused_where_the_names_are_known(make: Any) -> None:
    fragment, args = make({(0, 0): "n", (1, 0): "n"}, {"n": [64]})
    call = fragment.dispatcher()
    with pytest.raises(DimsError, match=r"'n' is [57] in one argument but [57] in another"):
        call(*args)
    assert call(*flat(args, {7: 5}))[0].shape == (5, 5)
    guessed = Fragment(fragment.captured, fragment.services, "after a break", exact=False)
    assert guessed.dispatcher()(*args)[0].shape == (5, 7)


def test_a_steady_call_goes_straight_to_the_lowering(make: Any) -> None:
    fragment, args = make({}, {})
    call = fragment.dispatcher()
    filler = fragment.table[0]
    call(*args)
    assert fragment.table[0] is fragment.slots[0].entries[0].call
    assert fragment.table[0] is not filler


def test_a_wrong_option_of_a_variant_is_an_error_not_a_fallback(make: Any) -> None:
    variant = GraphVariant(lowering=Lowering.INDUCTOR, options=(("max_autotun", True),))
    fragment, args = make({}, {}, choose=lambda *_: variant)
    with pytest.raises(UnknownNameError, match=r"inductor option 'max_autotun'.*Did you mean 'max_autotune"):
        fragment.dispatcher()(*args)


def test_a_backward_is_compiled_with_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def note(which: str) -> Callable[..., Any]:
        def compile_graph(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            compiled.append(which)
            return make_boxed_func(gm.forward)

        return compile_graph

    noting = aot_autograd(fw_compiler=note("forward"), bw_compiler=note("backward"))
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: noting)
    model = cheap(torch.nn.Linear(4, 4), verify="off")
    model(torch.ones(2, 4))
    assert compiled == ["forward", "backward"]


def test_the_ladder_suspects_torchs_patterns_first_and_ends_without_inductor() -> None:
    graphs = GraphVariant(launch=Launch.CUDA_GRAPHS)
    assert ladder(graphs) == [graphs, *ladder(GraphVariant())]
    steps = ladder(GraphVariant())
    assert [step.lowering for step in steps] == [Lowering.INDUCTOR] * 3 + [Lowering.AOT_EAGER]
    assert steps[0] == GraphVariant()
    assert steps[1].options == (("pattern_matcher", False),)
    assert steps[1].passes is None
    assert steps[2].passes == steps[3].passes == ()
    assert ladder(GraphVariant((), Lowering.AOT_EAGER)) == [GraphVariant((), Lowering.AOT_EAGER)]
    assert EAGER.lowering is Lowering.EAGER


def test_both_joins_guards() -> None:
    even, small = (lambda args: args[0] % 2 == 0), (lambda args: args[0] < 10)
    assert both(None, None) is None
    assert both(even, None) is even
    assert both(None, small) is small
    joined = both(even, small)
    assert joined is not None
    assert [joined([n]) for n in (4, 5, 12)] == [True, False, False]
