"""Shape buckets below Dynamo: a frame a mode, a lowering a bucket, every call dispatched, results those of eager."""

from __future__ import annotations

import copy
import pathlib
import random
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.config import read_settings
from tests.runtime.dispatch_models import MODES, WIDTH, Broken, One, Two, cheap

TOKENS = [8, 16, 32, 64]
LENGTHS = 200


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Verdicts of this test only."""
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    assert read_settings().cache_dir == tmp_path / "cache"


def lengths(seed: int) -> Callable[[], int]:
    draw = random.Random(seed)
    return lambda: draw.randint(2, TOKENS[-1])


def compare_call(model: nn.Module, reference: nn.Module, mode: str, args: tuple[Tensor, ...]) -> None:
    """Call both in `mode` and compare outputs and, where there are any, gradients."""
    training, context = MODES[mode]
    model.train(training)
    reference.train(training)
    with context():
        found, expected = model(*args), reference(*args)
    tolerance = 5e-2 if mode == "autocast" else 1e-4
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    if found.requires_grad:
        found.float().sum().backward()
        expected.float().sum().backward()
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert one.grad is not None
            torch.testing.assert_close(one.grad, other.grad, rtol=0.1, atol=0.5 if mode == "autocast" else 1e-3)
        model.zero_grad()
        reference.zero_grad()


def run_all_modes(
    models: list[nn.Module],
    draw: Callable[[], tuple[Tensor, ...]],
    cell: Callable[[tuple[Tensor, ...]], Any],
    **names: Any,
) -> list[tuple[int, set[str], set[tuple[str, Any]]]]:
    """Run LENGTHS calls in random modes; return for each model its calls, modes, and (mode, bucket) cells hit."""
    references = [copy.deepcopy(m) for m in models]
    for model in models:
        cheap(model, verify="off", **names)  # every call is compared here
    calls: dict[int, int] = defaultdict(int)
    modes: dict[int, set[str]] = defaultdict(set)
    cells: dict[int, set[tuple[str, Any]]] = defaultdict(set)
    choice = random.Random(1)
    for _ in range(LENGTHS):
        which, mode, args = choice.randrange(len(models)), choice.choice(list(MODES)), draw()
        compare_call(models[which], references[which], mode, args)
        calls[which] += 1
        if not any(isinstance(m, nn.BatchNorm1d) for m in models[which].modules()):
            mode = mode.replace("train", "eval")  # nothing in the model asks, so they share a frame
        modes[which].add(mode)
        cells[which].add((mode, cell(args)))
    return [(calls[i], modes[i], cells[i]) for i in range(len(models))]


def check_counts(
    model: nn.Module, hit: tuple[int, set[str], set[tuple[str, Any]]], fragments: int = 1
) -> dict[str, Any]:
    calls, modes, cells = hit
    data = fusewright.explain(model).to_dict()
    assert data["calls"] == calls
    assert data["dispatched"] == calls * fragments
    assert data["recompiles"] == 0
    assert data["graphs"] == len(modes) * fragments
    assert data["lowerings"] == len(cells) * fragments
    assert all(bucket["variant"] == "aot_eager" for bucket in data["buckets"])
    return data


def bucket_of(size: int) -> int:
    return next(edge for edge in TOKENS if size <= edge)


def test_two_hundred_lengths_in_five_modes_need_a_frame_a_mode_and_a_lowering_a_bucket() -> None:
    draw, model = lengths(0), One()
    hits = run_all_modes(
        [model], lambda: (torch.randn(3, draw(), WIDTH),), lambda args: bucket_of(args[0].shape[1]),
        dims={"x": {1: "tokens"}}, buckets={"tokens": TOKENS},
    )  # fmt: skip
    assert len(hits[0][1]) == 5
    data = check_counts(model, hits[0])
    assert data["dynamo_frames"] == 5
    assert data["fallbacks"] == []


def test_no_mark_of_ours_stays_on_a_tensor() -> None:
    marked, plain = torch.randn(3, 4, WIDTH), torch.randn(3, 4, WIDTH)
    torch._dynamo.maybe_mark_dynamic(marked, 0)  # the user's own
    kept = copy.deepcopy(vars(marked))
    for x in (marked, plain):
        cheap(Broken(), dims={"x": {1: "tokens"}})(x)
    assert vars(marked) == kept
    assert vars(plain) == {}


def test_two_lengths_that_are_sometimes_equal_get_a_table_of_two_axes() -> None:
    draw, model, coin = lengths(2), Two(), random.Random(3)

    def pair() -> tuple[Tensor, ...]:
        size = draw()
        other = size if coin.random() < 0.3 else draw()
        return torch.randn(2, size, WIDTH), torch.randn(2, other, WIDTH)

    hits = run_all_modes(
        [model], pair, lambda args: (args[0].shape[1] <= 16, args[1].shape[1] <= 32),
        dims={"x": {1: "q"}, "y": {1: "k"}}, buckets={"q": [16, 64], "k": [32, 64]},
    )  # fmt: skip
    data = check_counts(model, hits[0])
    assert data["dynamo_frames"] == 4
    assert data["fallbacks"] == []


def test_both_fragments_of_a_broken_graph_dispatch_every_call() -> None:
    draw, model = lengths(4), Broken()
    hits = run_all_modes(
        [model], lambda: (torch.randn(3, draw(), WIDTH),), lambda args: bucket_of(args[0].shape[1]),
        dims={"x": {1: "tokens"}}, buckets={"tokens": TOKENS},
    )  # fmt: skip
    data = check_counts(model, hits[0], fragments=2)
    assert data["dynamo_frames"] <= 5 * 3  # the call itself, the half before the break, the half after it
    assert {f["kind"] for f in data["fallbacks"]} == {"graph_break"}


@pytest.mark.parametrize("kind", [One, Broken])
def test_twelve_models_of_one_class_do_not_share_a_limit(kind: type[nn.Module]) -> None:
    """Dynamo's limit of 8 hangs on the code object of `forward`, which all of them share after a break."""
    draw, models = lengths(5), [kind() for _ in range(12)]
    references = [copy.deepcopy(m) for m in models]
    for model in models:
        cheap(model, dims={"x": {1: "tokens"}}, buckets={"tokens": [64]}, verify="off")
    for model, reference in zip(models * 2, references * 2, strict=True):
        compare_call(model, reference, "no_grad", (torch.randn(3, draw(), WIDTH),))
    for model in models:
        check_counts(model, (2, {"no_grad"}, {("no_grad", 0)}), fragments=2 if kind is Broken else 1)


def test_eight_threads_share_one_model() -> None:
    torch.manual_seed(0)
    model = One().eval()
    reference = copy.deepcopy(model)
    cheap(model, dims={"x": {1: "tokens"}}, buckets={"tokens": TOKENS})
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        draw = lengths(seed)
        try:
            for _ in range(25):
                x = torch.randn(3, draw(), WIDTH)
                with torch.no_grad():
                    torch.testing.assert_close(model(x), reference(x))
        except BaseException as error:  # noqa: BLE001  shown by the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    data = fusewright.explain(model).to_dict()
    assert data["calls"] == data["dispatched"] == 200
    assert (data["graphs"], data["lowerings"], data["recompiles"]) == (1, 4, 0)
    assert data["fallbacks"] == []


def test_sizes_of_one_and_zero_run_and_are_right() -> None:
    model = One().eval()
    reference = copy.deepcopy(model)
    cheap(model, dims={"x": {1: "tokens"}}, buckets={"tokens": TOKENS})
    for size in (1, 5, 0, 1, 40):
        compare_call(model, reference, "no_grad", (torch.randn(3, size, WIDTH),))
    data = fusewright.explain(model).to_dict()
    assert data["dispatched"] == data["calls"] == 5


class SameName(nn.Module):
    """Two inputs whose lengths the user gave one name, although nothing in the graph ties them."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y.sum(1)


def test_one_name_with_two_sizes_is_refused_at_any_call() -> None:
    model = cheap(SameName(), dims={"x": {1: "tokens"}, "y": {1: "tokens"}}, buckets={"tokens": [8, 64]})
    model(torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(fusewright.FusewrightError, match=r"'tokens' is 4 in .* but 9 in "):
        model(torch.ones(2, 4), torch.ones(2, 9))
    x, y = model(torch.ones(2, 5), torch.ones(2, 5))
    assert x.shape == (2, 5)
    assert y.tolist() == [5.0, 5.0]


@torch.library.custom_op("fusewright_tests::halve", mutates_args=())
def halve(x: Tensor) -> Tensor:
    """Half of x; how its gradient is computed depends on the length, as layouts of kernels do."""
    return x / 2


halve.register_fake(torch.empty_like)


def _halve_backward(ctx: Any, grad: Tensor) -> Tensor:
    if grad.shape[1] % 8 == 0:
        return (grad.reshape(grad.shape[0], -1, 8) * 2).reshape(grad.shape)
    return grad * 3


halve.register_autograd(_halve_backward)


class BranchBelow(nn.Module):
    """Dynamo sees the operator only: the branch is met when AOTAutograd traces the backward."""

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T) -> (B, T)."""
        y: Tensor = halve(x * 1)
        return y


@pytest.mark.parametrize("order", [(16, 17, 24, 18, 32), (17, 16, 24, 18, 32)])
def test_what_lowering_specialises_on_makes_a_second_entry_not_a_wrong_result(order: tuple[int, ...]) -> None:
    model = cheap(BranchBelow(), dims={"x": {1: "tokens"}}, buckets={"tokens": [64]})
    for size in order:
        x = torch.ones(2, size, requires_grad=True)
        out = model(x)
        assert out.unique().tolist() == [0.5]
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert grad.unique().tolist() == [2.0 if size % 8 == 0 else 3.0], size
    data = fusewright.explain(model).to_dict()
    assert data["dispatched"] == 5
    assert (data["dynamo_frames"], data["lowerings"]) == (1, 2)
    assert data["fallbacks"] == []


class ChangesInput(nn.Module):
    """Changes one argument in place and then reads another, which may be a view of the first."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2


def aliased(kind: str) -> tuple[Tensor, Tensor]:
    whole = torch.zeros(4, 6)
    if kind == "overlap":
        return whole, whole.view(24)[2:8]
    if kind == "neighbour":
        return whole[:2], whole.view(24)[12:18]
    return whole, torch.zeros(24)[2:8]


@pytest.mark.parametrize("order", [("overlap", "apart"), ("apart", "overlap"), ("neighbour", "overlap", "apart")])
@pytest.mark.parametrize("dims", [None, {"x": {0: "rows"}}])
def test_changed_arguments_that_overlap_never_meet_a_graph_made_for_separate_ones(
    order: tuple[str, ...], dims: dict[str, dict[int, str]] | None
) -> None:
    model = cheap(ChangesInput(), dims=dims)
    for kind in (*order, *order):
        x, y = aliased(kind)
        expected = 2.0 if kind == "overlap" else 0.0
        assert model(x, y).tolist() == [expected] * 6, kind
        assert x.unique().tolist() == [1.0]
    data = fusewright.explain(model).to_dict()
    assert {f["kind"] for f in data["fallbacks"]} == {"aliasing"}
    variants = {bucket["variant"] for bucket in data["buckets"]}
    assert variants == {"eager [no passes]", "aot_eager"}


def test_overlapping_changed_arguments_are_an_error_under_strict() -> None:
    model = cheap(ChangesInput(), strict=True)
    assert model(*aliased("apart")).tolist() == [0.0] * 6
    with pytest.raises(fusewright.FusewrightError, match="overlaps another one; clone one of them"):
        model(*aliased("overlap"))


def test_an_input_that_is_a_view_of_a_changed_buffer_is_seen() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)
            return x * 10

    model = Counts()
    cheap(model)
    assert model(torch.ones(4)).tolist() == [10.0] * 4
    assert model(model.seen[:]).tolist() == [20.0] * 4
    assert model(torch.ones(4)).tolist() == [10.0] * 4


class Wave(nn.Module):
    """A pointwise chain with one weight: the cheapest thing that Inductor compiles forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, WIDTH) -> (B, T, WIDTH)."""
        return (x * self.scale).sin() * 2


def test_the_default_lowering_serves_buckets_in_training_and_inference() -> None:
    model = Wave()
    reference = copy.deepcopy(model)
    fusewright.optimize(model, dims={"x": {1: "tokens"}}, buckets={"tokens": [8, 64]})
    for size in (5, 40, 7, 64):
        for mode in ("train", "no_grad"):
            compare_call(model, reference, mode, (torch.randn(3, size, WIDTH),))
    data = fusewright.explain(model).to_dict()
    assert (data["calls"], data["dispatched"], data["dynamo_frames"], data["lowerings"]) == (8, 8, 2, 4)
    assert {b["variant"] for b in data["buckets"]} == {"inductor"}
    assert all(v["ok"] for v in data["verified"])
    assert data["fallbacks"] == []
