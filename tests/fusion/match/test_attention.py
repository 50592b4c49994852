"""Attention is recognised in every usual spelling, and what only looks like it is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fusewright.fusion.match.attention.fuse import FuseAttention
from fusewright.numerics import compare_trees
from fusewright.tools.pass_tester import PassTester, capture, run
from tests.fusion.match import corpus
from tests.fusion.match.corpus import ATTENTION, NEAR_MISSES, Case


def names(cases: list[Case]) -> list[str]:
    return [case.function.__name__ for case in cases]


def calls(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in gm.graph.nodes if node.target is torch.ops.fusewright.attention.default]


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("case", ATTENTION, ids=names(ATTENTION))
def test_spelling(case: Case, training: bool) -> None:
    args = case.args(training=training)
    report = PassTester(FuseAttention()).check(case.function, args, expect_rewrites=1, training=training)
    assert report.recognised == {"attention": 1}
    assert len(calls(report.after)) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["float32_softmax", "masked_fill_in_place", "grouped", "three_axes"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    case = next(case for case in ATTENTION if case.function.__name__ == name)
    report = PassTester(FuseAttention()).check(case.function, case.args(dtype), expect_rewrites=1)
    assert all(value.dtype == dtype for value in calls(report.after)[0].meta["example_value"][:1])


@pytest.mark.parametrize("case", NEAR_MISSES, ids=lambda case: case.reason or "permuted")
def test_near_miss(case: Case) -> None:
    args = case.args()
    if case.reason == "":  # attention of a permuted operand: right only with the permutation kept
        PassTester(FuseAttention()).check(case.function, args, expect_rewrites=1)
        return
    report = PassTester(FuseAttention()).check_declines(case.function, args, reason=case.reason)
    assert not calls(report.after)


@pytest.mark.parametrize("fill_first", [True, False], ids=["filled, added", "added, filled"])
@pytest.mark.parametrize("fill", [-torch.inf, corpus.FINFO_MIN], ids=str)
def test_fills_and_sums_together(fill_first: bool, fill: float) -> None:
    """Rows that the fill hides alone, that both hide together, and that are hidden by neither."""

    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, bias: Tensor) -> Tensor:
        scores = q @ k.mT
        scores = torch.where(keep, scores, fill) + bias if fill_first else (scores + bias).masked_fill(~keep, fill)
        return scores.softmax(-1) @ v

    args = Case(attend, "q q q keep bias").args(training=False)
    keep, bias = args[3:]
    keep[0, 0, 1] = False
    keep[1, 0, 2], bias[1, 0, 2] = torch.arange(corpus.T) < 3, torch.zeros(corpus.T)
    bias[1, 0, 2, :3] = corpus.FINFO_MIN
    report = PassTester(FuseAttention()).check(attend, args, expect_rewrites=1, training=False)
    output = run(report.after, capture(attend, args).inputs, False)["outputs"][0]
    assert output[0, :, 1].isnan().all() == (fill == -torch.inf)
    assert output[0, :, 2:].isfinite().all()


@pytest.mark.parametrize("function", corpus.NOT_SOFTMAX)
def test_not_a_softmax(function: Any) -> None:
    report = PassTester(FuseAttention()).run(capture(function, Case(function).args()), training=True)
    assert (report.rewrites, report.recognised) == (0, {})


def test_rows_without_keys_of_a_finite_fill_are_averages() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~pad, -1e9).softmax(-1) @ v

    args = Case(attend, "q q q pad").args()
    args[3][1] = False
    report = PassTester(FuseAttention()).check(attend, args, expect_rewrites=1)
    output = run(report.after, capture(attend, args).inputs, True)["outputs"][0]
    torch.testing.assert_close(output[1], args[2][1].mean(1, keepdim=True).expand_as(output[1]))


def test_a_write_elsewhere_does_no_harm() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = q @ k.mT
        other = torch.zeros_like(v)
        other += 1
        other[0] = 2.0
        return scores.softmax(-1) @ v, other

    report = PassTester(FuseAttention()).check(attend, Case(attend).args(), expect_rewrites=1)
    assert report.declines == []


def test_a_write_to_an_argument_may_be_a_write_to_another() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, other: Tensor) -> Tensor:
        scores = q @ k.mT
        other.mul_(2)
        return scores.softmax(-1) @ v

    args = (*Case(attend).args(training=False), torch.zeros(3))
    PassTester(FuseAttention()).check_declines(attend, args, reason="mul_ writes to a tensor", training=False)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", ["masked_fill_in_place", "where_kept", "where_hidden", "two_fills", "additive_mask"])
def test_hidden_row(name: str, training: bool) -> None:
    """A query that sees no key: NaN or the average of v, and the same gradients as eager, NaN included."""
    case = next(case for case in ATTENTION if case.function.__name__ == name)
    args = case.args(training=training)
    mask = args[3]
    mask[1] = -torch.inf if mask.is_floating_point() else False
    report = PassTester(FuseAttention()).check(case.function, args, expect_rewrites=1, training=training)
    output = run(report.after, capture(case.function, args).inputs, training)["outputs"][0]
    assert output[0].isfinite().all()
    hidden_is_nan = name != "masked_fill_in_place"
    assert output[1].isnan().all() == hidden_is_nan or name == "two_fills"


@pytest.mark.parametrize("name", ["masked_fill_causal", "where_causal", "where_arange", "masked_fill_causal_buffer"])
def test_causal_is_known_only_where_the_mask_is(name: str) -> None:
    case = next(case for case in ATTENTION if case.function.__name__ == name)
    report = PassTester(FuseAttention()).check(case.function, case.args(), expect_rewrites=1)
    mask, _, causal = calls(report.after)[0].args[3:6]
    assert causal == (name != "masked_fill_causal_buffer"), "a buffer's values are not known while compiling"
    assert (mask is None) == causal


@pytest.mark.parametrize(
    "mask",
    [
        lambda t: torch.ones(t, t, dtype=torch.bool).triu(2),
        lambda t: torch.ones(t, t, dtype=torch.bool).tril(),
        lambda t: torch.ones(t, t, dtype=torch.bool).triu(1) | (torch.arange(t) == 1),
        lambda t: (torch.arange(t)[:, None] - torch.arange(t)[None, :]).gt(3) | torch.ones(t, t).triu(1).bool(),
    ],
    ids=["one ahead", "past", "and a column", "window"],
)
def test_nearly_causal(mask: Any) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = mask(q.size(2))
        hidden = hidden & ~torch.eye(q.size(2), dtype=torch.bool)
        return (q @ k.mT).masked_fill(hidden, float("-inf")).softmax(-1) @ v

    report = PassTester(FuseAttention()).check(attend, Case(attend).args(), expect_rewrites=1)
    assert calls(report.after)[0].args[5] is False


@pytest.mark.parametrize(
    "name",
    ["masked_fill_causal", "where_causal", "grouped_dynamic", "additive_mask", "three_axes", "masked_fill_in_place"],
)
def test_dynamic_tokens(name: str) -> None:
    def grouped_dynamic(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (corpus.repeat_kv(x, 2) for x in (k, v))
        return (q @ k.transpose(2, 3) * 0.3).softmax(-1) @ v

    cases = {case.function.__name__: case for case in [*ATTENTION, Case(grouped_dynamic, "q kv kv")]}
    args = cases[name].args()
    for x in args:
        axes = [axis for axis in (x.dim() - 2, x.dim() - 1) if x.shape[axis] == corpus.T]
        torch._dynamo.mark_dynamic(x, axes)
    report = PassTester(FuseAttention()).check(cases[name].function, args, expect_rewrites=1)
    sizes = [size for node in report.after.graph.nodes if node.op == "placeholder" for size in _sizes(node)]
    assert any(isinstance(size, torch.SymInt) for size in sizes), "the capture was static"
    assert calls(report.after)[0].args[5] is ("causal" in name)


def _sizes(node: torch.fx.Node) -> tuple[Any, ...]:
    value = node.meta["example_value"]
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def test_grouped_heads_are_not_repeated() -> None:
    for name in ("grouped", "grouped_interleaved", "grouped_tokens_first"):
        case = next(case for case in ATTENTION if case.function.__name__ == name)
        after = PassTester(FuseAttention()).check(case.function, case.args(), expect_rewrites=1).after
        keys = calls(after)[0].args[1]
        assert keys.meta["example_value"].shape[1] == corpus.K, after.code


def test_repeat_in_another_order_is_not_undone() -> None:
    def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k[:, None].expand(corpus.B, 2, corpus.K, corpus.T, corpus.H).reshape(q.shape)
        return (q @ k.mT).softmax(-1) @ v.repeat(1, 2, 1, 1)

    after = PassTester(FuseAttention()).check(tiled, Case(tiled, "q kv kv").args(), expect_rewrites=1).after
    assert calls(after)[0].args[1].meta["example_value"].shape[1] == corpus.N


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    """An ambient autocast is not in the graph: only the dtype of the product shows it."""
    case = next(case for case in ATTENTION if case.function.__name__ == "multiplied")
    with torch.autocast("cpu", dtype):
        captured = capture(case.function, case.args())
        report = PassTester(FuseAttention()).run(captured, training=True)
        assert report.rewrites == 1, report.declines
        ref, res = (run(gm, captured.inputs, True) for gm in (report.before, report.after))
    assert compare_trees(res, ref, None, training=True).ok
    assert res["outputs"][0].dtype == dtype


def test_view_below_keeps_its_strides() -> None:
    """Eager's product is contiguous, so a `view` of it is legal; the operator's result has the strides of q."""

    def flattened(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return ((q @ k.mT).softmax(-1) @ v).view(corpus.B * corpus.N, corpus.T * corpus.H)

    after = PassTester(FuseAttention()).check(flattened, Case(flattened, "x x x").args(), expect_rewrites=1).after
    assert "contiguous" in after.code


def test_no_copy_where_nothing_sees_the_strides() -> None:
    def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).contiguous().view(corpus.B, corpus.T, -1)

    after = PassTester(FuseAttention()).check(merged, Case(merged, "x x x").args(), expect_rewrites=1).after
    assert after.code.count(".contiguous()") == 1


def test_library_attention_is_counted_and_left() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v)

    report = PassTester(FuseAttention()).run(capture(attend, Case(attend).args()), training=True)
    assert (report.rewrites, report.recognised, report.declines) == (0, {"sdpa": 1}, [])


def zero_column(mask: Tensor) -> None:
    mask[:, 0] = 1.0


def zero_entry_of_view(mask: Tensor) -> None:
    mask.view(-1)[3] = 1.0


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("write", [zero_column, zero_entry_of_view])
def test_written_mask_is_not_known(write: Any, dynamic: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = torch.tril(torch.ones(q.size(2), q.size(2)))
        write(kept)
        return (q @ k.mT).masked_fill(kept == 0, float("-inf")).softmax(-1) @ v

    args = Case(attend).args()
    if dynamic:
        for x in args:
            torch._dynamo.mark_dynamic(x, 2)
    report = PassTester(FuseAttention()).check(attend, args, expect_rewrites=1)
    assert calls(report.after)[0].args[5] is False


@pytest.mark.parametrize(
    "index",
    [lambda m: m[torch.arange(m.size(0)).flip(0)], lambda m: m[:, torch.arange(m.size(0)).flip(0)]],
    ids=["rows", "columns"],
)
def test_reordered_triangle_is_not_causal(index: Any) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = index(torch.tril(torch.ones(q.size(2), q.size(2))))
        return (q @ k.mT).masked_fill(kept == 0, float("-inf")).softmax(-1) @ v

    args = Case(attend).args()
    for x in args:
        torch._dynamo.mark_dynamic(x, 2)
    report = PassTester(FuseAttention()).check(attend, args, expect_rewrites=1)
    assert calls(report.after)[0].args[5] is False


def test_integers_are_not_a_causal_mask() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT + -torch.ones(corpus.T, corpus.T, dtype=torch.int64).triu(1)).softmax(-1) @ v

    tester = PassTester(FuseAttention())
    report = tester.check_declines(attend, Case(attend).args(), reason="a mask of dtype torch.int64 is added")
    assert report.recognised == {"attention": 1}
