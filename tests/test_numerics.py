"""The accuracy rule: what passes, what fails, and that the numbers beside the verdict are right."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fusewright import numerics
from fusewright.errors import UserInputError
from fusewright.numerics import Tolerance, compare, compare_trees, tolerance_for
from fusewright.trees import bitwise_difference, bitwise_equal, cast_floats


def never() -> Tensor:
    raise AssertionError("the float64 reference was evaluated without need")


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("dtype", "training", "numel", "expected"),
    [
        (torch.float32, False, 1000, Tolerance(1e-4, 2)),
        (torch.float32, True, 1000, Tolerance(1e-3, 2)),
        (torch.float32, True, 999, Tolerance(1e-3, 3)),
        (torch.bfloat16, True, 5000, Tolerance(1e-2, 3)),
        (torch.float16, False, 5000, Tolerance(1e-2, 3)),
    ],
)
def test_tolerances_are_the_rules(dtype: torch.dtype, training: bool, numel: int, expected: Tolerance) -> None:
    assert tolerance_for(dtype, numel, training=training) == expected


def test_integers_have_no_tolerance() -> None:
    with pytest.raises(UserInputError, match=r"torch\.int64"):
        tolerance_for(torch.int64, 1, training=False)


def test_allclose_passes_without_the_reference_and_reports_numbers() -> None:
    ref = noise(40, 50).float()
    res = ref.clone()
    res[3, 4] += 5e-5
    found = compare(res, ref, never, training=False)
    assert found.ok
    assert found.rule == "allclose"
    assert found.max_abs_error == pytest.approx(5e-5, rel=1e-2)
    assert found.severity == pytest.approx(5e-5 / (1e-4 + 1e-4 * abs(ref[3, 4].item())), rel=1e-2)
    assert found.cosine == pytest.approx(1.0)
    assert found.rmse_res is None


@pytest.mark.parametrize(("factor", "ok"), [(1.9, True), (2.2, False)])
def test_rmse_rule_allows_twice_eagers_own_error(factor: float, ok: bool) -> None:
    r64 = noise(100, 100)
    error = noise(100, 100).flip(0) * 0.01
    res, ref = (r64 + factor * error).float(), (r64 - error).float()
    found = compare(res, ref, r64, training=False)
    assert found.ok is ok
    assert found.rule == "float64"
    assert found.rmse_ref == pytest.approx(error.square().mean().sqrt().item(), rel=1e-4)
    assert found.rmse_res == pytest.approx(factor * found.rmse_ref, rel=1e-4)


@pytest.mark.parametrize(("numel", "ok"), [(999, True), (1000, False)])
def test_small_tensors_get_multiplier_three(numel: int, ok: bool) -> None:
    r64 = noise(numel)
    res, ref = (r64 + 0.025).float(), (r64 - 0.01).float()
    assert compare(res, ref, r64, training=True).ok is ok


@pytest.mark.parametrize("training", [False, True])
def test_the_bound_adds_a_tenth_of_the_tolerance(training: bool) -> None:
    tol = 1e-3 if training else 1e-4
    r64 = torch.zeros(2000, dtype=torch.float64)
    ref = r64.float()
    inside, outside = ref.clone(), ref.clone()
    inside[0] = 0.09 * tol * math.sqrt(2000)  # an RMSE of 0.09 tol, in one element
    outside[0] = 0.11 * tol * math.sqrt(2000)
    assert compare(inside, ref, r64, training=training).rule == "float64"
    assert compare(inside, ref, r64, training=training).ok
    assert not compare(outside, ref, r64, training=training).ok


def test_tolerance_can_be_given() -> None:
    ref, res = torch.zeros(5), torch.full((5,), 0.5)
    assert not compare(res, ref, ref.double(), training=False).ok
    assert compare(res, ref, never, training=False, tolerance=Tolerance(0.6, 1)).ok
    assert compare(ref, ref, never, training=False, tolerance=Tolerance(0.0, 1)).ok
    with pytest.raises(UserInputError, match="multiplier"):
        Tolerance(1e-3, 0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_must_stand_in_the_same_places(value: float) -> None:
    ref = noise(2000).float()
    ref[7] = value
    assert compare(ref.clone(), ref, never, training=False).ok
    moved = ref.clone()
    moved[7] = 1.0
    for res, other in ((moved, ref), (ref, moved)):
        found = compare(res, other, never, training=False)
        assert not found.ok
        assert "1 elements" in found.reason
        assert found.severity == math.inf


def test_infinities_of_opposite_sign_differ() -> None:
    assert not compare(torch.tensor([math.inf]), torch.tensor([-math.inf]), never, training=False).ok


def test_shared_nan_is_left_out_of_the_rmse() -> None:
    r64 = noise(3000)
    ref, res = (r64 - 0.01).float(), (r64 + 0.015).float()
    ref[5] = res[5] = math.nan
    found = compare(res, ref, r64, training=False)
    assert found.ok
    assert found.rmse_ref == pytest.approx(0.01, rel=1e-3)


def test_a_float64_reference_that_overflows_proves_nothing() -> None:
    ref = torch.zeros(2000)
    r64 = torch.full((2000,), math.nan, dtype=torch.float64)
    assert not compare(ref + 1, ref, r64, training=False).ok


@pytest.mark.parametrize(
    ("source", "said"),
    [(None, "no float64 reference"), (lambda: None, "no float64 reference")],
)
def test_without_float64_the_cosine_decides_and_says_so(source: Callable[[], Tensor | None] | None, said: str) -> None:
    ref = noise(2000).float()
    near, far = ref + 0.05 * noise(2000).flip(0).float(), ref + 0.5 * noise(2000).flip(0).float()
    for res, ok in ((near, True), (far, False)):
        found = compare(res, ref, source, training=False)
        expected = torch.nn.functional.cosine_similarity(res.double(), ref.double(), dim=0).item()
        assert (found.ok, found.rule) == (ok, "cosine")
        assert found.cosine == pytest.approx(expected, abs=1e-9)
        assert said in found.reason


def test_a_failing_reference_is_named_and_other_errors_pass_through() -> None:
    def no_kernel() -> Tensor:
        raise NotImplementedError("conv has no kernel for Double\nmore")

    def our_bug() -> Tensor:
        raise KeyError("x")

    ref = noise(2000).float()
    found = compare(ref * 1.01, ref, no_kernel, training=False)
    assert found.ok
    assert found.reason.startswith("float64 reference failed (conv has no kernel for Double); cosine")
    with pytest.raises(KeyError):
        compare(ref * 1.01, ref, our_bug, training=False)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integers_and_booleans_are_exact(dtype: torch.dtype) -> None:
    ref = torch.arange(10).remainder(2).to(dtype)
    res = ref.clone()
    assert compare(res, ref, never, training=True).ok
    res[3] = 0
    found = compare(res, ref, never, training=True)
    assert (found.ok, found.rule, found.max_abs_error) == (False, "exact", 1.0)
    assert found.reason == "1 of 10 elements differ"


def test_shape_and_dtype_must_agree_but_strides_need_not() -> None:
    ref = noise(30, 40).float()
    assert compare(ref.t().contiguous().t(), ref, never, training=False).ok
    assert compare(ref[:, :20], ref, never, training=False).reason == "shape (30, 20) instead of (30, 40)"
    assert "dtype torch.float64 instead" in compare(ref.double(), ref, never, training=False).reason
    assert compare(torch.empty(0, 3), torch.empty(0, 3), never, training=False).ok


def test_complex_and_half_are_compared() -> None:
    z = torch.view_as_complex(noise(50, 2).float())
    assert compare(z.conj().resolve_conj().conj(), z, never, training=False).ok
    assert not compare(z + 1j, z, z.to(torch.complex128), training=False).ok
    half = noise(2000).bfloat16()
    assert compare(half * 1.001, half, never, training=False).ok


def test_large_tensors_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    r64 = noise(1013)
    ref, res = (r64 - 0.01).float(), (r64 + 0.03 * noise(1013).flip(0)).float()
    whole = compare(res, ref, r64, training=False)
    monkeypatch.setattr(numerics, "_CHUNK", 100)
    pieces = compare(res, ref, r64, training=False)
    assert pieces.ok == whole.ok
    for field in ("severity", "max_abs_error", "rmse_res", "rmse_ref", "cosine"):
        assert getattr(pieces, field) == pytest.approx(getattr(whole, field), rel=1e-12)


@dataclasses.dataclass
class Output:
    logits: Tensor
    extra: Any = None


Pair = collections.namedtuple("Pair", ["left", "right"])


class Opaque:
    """Registered as a pytree node without key paths."""

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner


pytree.register_pytree_node(Opaque, lambda node: ([node.inner], None), lambda children, _: Opaque(*children))


def tree() -> dict[str, Any]:
    return {
        "out": Output(noise(20).float(), [noise(3).float(), None, 2, 0.5]),
        "pair": Pair(torch.arange(3), "name"),
        "opaque": Opaque(noise(2).float()),
        "empty": (),
    }


def test_trees_agree_with_themselves() -> None:
    found = compare_trees(tree(), tree(), never, training=False)
    assert found.ok
    assert found.first is None
    assert [leaf.path for leaf in found.leaves] == [
        "['out'].logits", "['out'].extra[0]", "['out'].extra[1]", "['out'].extra[2]", "['out'].extra[3]",
        "['pair'].left", "['pair'].right", "['opaque']<0>",
    ]  # fmt: skip


def change(path: str, edit: Callable[[dict[str, Any]], None]) -> Any:
    return pytest.param(path, edit, id=path)


@pytest.mark.parametrize(
    ("path", "edit"),
    [
        change("['out'].logits", lambda t: t["out"].logits.add_(1)),
        change("['out'].extra[1]", lambda t: t["out"].extra.__setitem__(1, torch.zeros(1))),
        change("['out'].extra[2]", lambda t: t["out"].extra.__setitem__(2, 3)),
        change("['out'].extra[3]", lambda t: t["out"].extra.__setitem__(3, 0.6)),
        change("['out'].extra[4]", lambda t: t["out"].extra.append(1)),
        change("['out'].extra", lambda t: setattr(t["out"], "extra", tuple(t["out"].extra))),
        change("['pair'].left", lambda t: t["pair"].left.add_(1)),
        change("['pair'].right", lambda t: t.__setitem__("pair", Pair(t["pair"].left, "other"))),
        change("['opaque']<0>", lambda t: t["opaque"].inner.add_(1)),
        change("['empty']", lambda t: t.pop("empty")),
    ],
)
def test_each_difference_between_trees_is_found_where_it_is(path: str, edit: Callable[[dict[str, Any]], None]) -> None:
    changed = tree()
    edit(changed)
    found = compare_trees(changed, tree(), cast_floats(tree(), torch.float64), training=False)
    assert not found.ok
    assert found.first is not None
    assert found.first.path == path
    assert found.to_dict()["ok"] is False
    assert bitwise_difference(changed, tree()) is not None
    assert str(bitwise_difference(changed, tree())).startswith(path + ":")


def test_first_and_worst_are_told_apart_and_the_reference_is_made_once() -> None:
    calls: list[int] = []

    def r64() -> list[Tensor]:
        calls.append(1)
        return [torch.zeros(4, dtype=torch.float64)] * 3

    ref = [torch.zeros(4)] * 3
    found = compare_trees([torch.zeros(4), torch.ones(4), torch.full((4,), 9.0)], ref, r64, training=False)
    assert found.first is not None
    assert found.worst is not None
    assert (found.first.path, found.worst.path, len(calls)) == ("[1]", "[2]", 1)
    assert found.reason.startswith("2 of 3 leaves differ; first: [1]:")


def test_a_failed_reference_of_a_tree_is_named_in_each_leaf() -> None:
    def fails() -> None:
        raise RuntimeError("no double here")

    ref = [noise(2000).float(), noise(2000).float()]
    found = compare_trees([t * 1.01 for t in ref], ref, fails, training=False)
    assert found.ok
    assert all("no double here" in leaf.reason for leaf in found.leaves)


def test_a_leaf_missing_from_the_reference_is_judged_by_cosine() -> None:
    ref = {"a": noise(2000).float()}
    found = compare_trees({"a": ref["a"] * 1.01}, ref, {"b": ref["a"].double()}, training=False)
    assert [leaf.rule for leaf in found.leaves] == ["cosine"]


def test_bitwise_sees_signs_of_zero_and_accepts_equal_nans() -> None:
    assert not bitwise_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert bitwise_equal(torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]))
    assert bitwise_equal(noise(3, 4).t(), noise(3, 4).t().contiguous())
    assert not bitwise_equal(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not bitwise_equal(torch.zeros(2), torch.zeros(1, 2))
    assert bitwise_equal(torch.tensor(1.5), torch.tensor(1.5))
    assert bitwise_equal([None, torch.tensor(True)], [None, torch.tensor(True)])
    assert not bitwise_equal([None], [0])


def test_cast_floats_leaves_the_rest_alone() -> None:
    count, weight = torch.arange(3), torch.ones(2, requires_grad=True)
    cast = cast_floats({"count": count, "weight": weight, "flag": True}, torch.float64)
    assert cast["count"] is count
    assert cast["flag"] is True
    assert cast["weight"].dtype == torch.float64
    assert cast["weight"].requires_grad
    assert cast["weight"].is_leaf


def test_model_outputs_are_walked() -> None:
    modeling = pytest.importorskip("transformers.modeling_outputs")
    made = modeling.CausalLMOutput(loss=torch.tensor(1.0), logits=noise(4).float())
    other = modeling.CausalLMOutput(loss=torch.tensor(1.0), logits=noise(4).float() + 1)
    found = compare_trees(other, made, {"loss": torch.tensor(1.0).double(), "logits": noise(4)}, training=False)
    assert found.first is not None
    assert found.first.path == "['logits']"
