"""Where CUDA-graph regions start and end: fake CUDA tensors on any machine, one planned region run on the null GPU."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusewright.passes.cudagraph_regions import Boundary, Region, plan_regions
from fusewright.runtime.cudagraph.runner import RegionRunner
from tests.nullgpu.harness import run_in_null_gpu

aten = torch.ops.aten


def trace(function: Callable[..., Any], *args: torch.Tensor) -> fx.GraphModule:
    """The ATen graph of `function` on fake tensors; sizes that depend on data become symbols."""
    with args[0].fake_mode:  # type: ignore[attr-defined]
        return make_fx(function)(*args)


def to_cuda(x: torch.Tensor) -> torch.Tensor:
    """`x.cuda()` for machines without CUDA, where that would look for a driver first."""
    return aten._to_copy.default(x, device=torch.device("cuda", 0))


def fake(*shape: int, device: str = "cuda", mode: FakeTensorMode, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with mode:
        return torch.empty(shape, device=device, dtype=dtype)


@pytest.fixture
def mode() -> FakeTensorMode:
    return FakeTensorMode(shape_env=ShapeEnv())


def kinds(regions: list[Region]) -> list[bool]:
    return [region.capturable for region in regions]


def refused(regions: list[Region]) -> list[Boundary]:
    return [reason.kind for region in regions for reason in region.refusals]


def check(gm: fx.GraphModule, regions: list[Region]) -> list[Region]:
    """What holds for every plan: all calls once, reasons chained, capturable exactly where nothing was refused."""
    calls = [n.name for n in gm.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    planned = [name for region in regions for name in region.nodes]
    constants = {name for region in regions for name in region.constants}
    assert len(planned) == len(set(planned))
    assert set(calls) - constants == set(planned) - constants
    for region, following in pairwise(regions):
        assert region.ends == following.starts
        assert region.ends.kind not in (Boundary.GRAPH_START, Boundary.GRAPH_END)
    if regions:
        assert regions[0].starts.kind is Boundary.GRAPH_START
        assert regions[-1].ends.kind is Boundary.GRAPH_END
    for region in regions:
        assert region.capturable == (not region.refusals) == (region.device is not None)
        assert not region.capturable or region.launches > 0
    return regions


def plan(function: Callable[..., Any], *args: torch.Tensor) -> list[Region]:
    gm = trace(function, *args)
    return check(gm, plan_regions(gm))


def test_a_step_without_obstacles_is_one_region(mode: FakeTensorMode) -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.dropout((x @ w).relu(), 0.5)
        return torch.ops.aten.native_layer_norm(h, [16], None, None, 1e-5)[0].sum()

    (region,) = plan(step, fake(8, 16, mode=mode), fake(16, 16, mode=mode))
    assert region.capturable
    assert region.device == torch.device("cuda", 0)
    assert region.launches >= 5


def test_views_and_allocations_are_not_launches(mode: FakeTensorMode) -> None:
    (region,) = plan(lambda x: x.t().reshape(2, 8).unsqueeze(0) * 2, fake(4, 4, mode=mode))
    assert region.launches == 1 + sum("clone" in name for name in region.nodes)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: x * 2 if x.sum().item() is None else x * 3, Boundary.HOST_READ),
        (lambda x: x.nonzero() * 2, Boundary.HOST_READ),
        (lambda x: x[x > 0] * 2, Boundary.HOST_READ),
        (lambda x: aten.index_put(x, [x[:, 0] > 0], x[0, 0]) * 2, Boundary.HOST_READ),
        (lambda x: to_cuda(x.cpu()) * 2, Boundary.DEVICE_COPY),
        (lambda x: to_cuda(torch.zeros(3)) + x[0, 0], Boundary.CPU_OP),
        (lambda x: torch.linalg.eigh(x)[0] * 2, Boundary.UNSAFE_OP),
    ],
)
def test_obstacles_split_the_graph(function: Callable[..., Any], kind: Boundary, mode: FakeTensorMode) -> None:
    regions = plan(lambda x: function(torch.sin(x)), fake(4, 4, mode=mode))
    assert kind in refused(regions)
    assert False in kinds(regions)
    assert all(reason.node in reason.text for region in regions for reason in region.refusals)


def test_both_sides_of_a_host_copy_are_captured(mode: FakeTensorMode) -> None:
    regions = plan(lambda x: to_cuda(x.sin().cpu().neg()).cos(), fake(4, 4, mode=mode))
    assert kinds(regions) == [True, False, True]
    assert refused(regions) == [Boundary.DEVICE_COPY, Boundary.CPU_OP, Boundary.DEVICE_COPY]
    assert regions[0].ends.kind is regions[2].starts.kind is Boundary.DEVICE_COPY
    assert regions[0].ends != regions[2].starts


def test_integer_indexing_is_captured_and_mask_indexing_is_not(mode: FakeTensorMode) -> None:
    x, index = fake(4, 4, mode=mode), fake(2, dtype=torch.int64, mode=mode)
    assert kinds(plan(lambda x, i: x[i] * 2, x, index)) == [True]
    assert kinds(plan(lambda x, i: aten.index_put(x, [i], x[:2]), x, index)) == [True]
    assert kinds(plan(lambda x, i: x[x > 0], x, index)) == [True, False]


def test_sizes_known_on_the_device_only_stay_outside(mode: FakeTensorMode) -> None:
    regions = plan(lambda x: (x.nonzero().float() * 2).sum() + x.sum(), fake(4, 4, mode=mode))
    assert refused(regions).count(Boundary.UNBACKED_SIZE) >= 2
    assert regions[-1].capturable, "the sum of x has no such size"


def test_host_constants_of_pointwise_operators_are_baked_in(mode: FakeTensorMode) -> None:
    (region,) = plan(lambda x: x * torch.full((), 0.5) + 1, fake(4, mode=mode))
    assert region.capturable
    assert len(region.constants) == 1
    assert region.constants[0] not in region.nodes


def test_a_constant_in_where_needs_a_compiler_that_inlines_it(mode: FakeTensorMode) -> None:
    gm = trace(lambda x: torch.where(x > 0, x, torch.full((), float("-inf"))) * 2, fake(4, mode=mode))
    assert refused(check(gm, plan_regions(gm))) == [Boundary.DEVICE_COPY]
    (region,) = check(gm, plan_regions(gm, inlines_constants=True))
    assert region.capturable
    assert len(region.constants) == 1


def test_each_region_names_the_constants_it_needs(mode: FakeTensorMode) -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        c = torch.full((), 2.0) * 3
        return to_cuda((x * c).cpu()) * c

    regions = plan(twice, fake(4, mode=mode))
    assert kinds(regions) == [True, False, True]
    assert regions[0].constants == regions[2].constants
    assert len(regions[0].constants) == 2


def test_a_host_number_that_may_change_is_not_baked_in(mode: FakeTensorMode) -> None:
    x, scale = fake(4, mode=mode), fake(device="cpu", mode=mode)
    assert refused(plan(lambda x, s: x * s, x, scale)) == [Boundary.HOST_SCALAR]
    assert Boundary.CPU_OP in refused(plan(lambda x: x * torch.rand(()), x))


def test_a_constant_copied_to_the_device_is_a_copy(mode: FakeTensorMode) -> None:
    assert Boundary.DEVICE_COPY in refused(plan(lambda x: to_cuda(torch.full((), 2.0)) * x, fake(4, mode=mode)))


def graph(*calls: tuple[Any, tuple[Any, ...], Any], mode: FakeTensorMode) -> fx.GraphModule:
    """A graph by hand: each call takes the result before it and the given arguments, and has the given fake value."""
    made = fx.Graph()
    last = made.placeholder("x")
    last.meta["val"] = fake(4, mode=mode)
    for target, args, value in calls:
        last = made.call_function(target, (last, *args))
        if value is not None:
            last.meta["val"] = value
    made.output(last)
    return fx.GraphModule({}, made)


def test_collectives_and_their_waits_stay_outside(mode: FakeTensorMode) -> None:
    functional = torch.ops._c10d_functional
    x = fake(4, mode=mode)
    gm = graph(
        (aten.sin.default, (), x),
        (functional.all_reduce.default, ("sum", "0"), x),
        (functional.wait_tensor.default, (), x),
        (aten.cos.default, (), x),
        mode=mode,
    )
    regions = check(gm, plan_regions(gm))
    assert kinds(regions) == [True, False, True]
    assert refused(regions) == [Boundary.COLLECTIVE] * 2


def test_another_device_starts_another_region(mode: FakeTensorMode) -> None:
    first = fake(4, mode=mode)
    gm = graph((aten.sin.default, (), first), mode=mode)
    with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op == "output")):
        made = gm.graph.call_function(aten.full.default, ([4], 1.0))
        made.meta["val"] = fake(4, device="cuda:1", mode=mode)
    regions = check(gm, plan_regions(gm))
    assert kinds(regions) == [True, True]
    assert regions[0].ends.kind is Boundary.DEVICE_CHANGE
    assert regions[1].device == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("target", "args", "kind"),
    [
        (aten.sym_constrain_range_for_size.default, (), Boundary.EFFECT),
        (aten._assert_scalar.default, ("message",), Boundary.EFFECT),
        (torch.sin, (), Boundary.UNKNOWN),
        (aten.sin.default, (), Boundary.UNKNOWN),  # without a fake value
        (torch.ops.higher_order.cond, (), Boundary.CONTROL_FLOW),
        (torch.ops.higher_order.with_effects, (), Boundary.EFFECT),
        (torch.ops.higher_order.wrap, (), Boundary.UNKNOWN),
    ],
)
def test_what_is_not_plain_device_work_is_refused(target: Any, args: Any, kind: Boundary, mode: FakeTensorMode) -> None:
    gm = graph((target, args, None), mode=mode)
    assert refused(check(gm, plan_regions(gm))) == [kind]


def test_an_operator_its_author_calls_unsafe_is_refused(mode: FakeTensorMode) -> None:
    lib = torch.library.Library("fusewright_test_regions", "DEF")
    lib.define("unsafe(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
    lib.define("fine(Tensor x) -> Tensor")
    ops, x = torch.ops.fusewright_test_regions, fake(4, mode=mode)
    gm = graph((ops.fine.default, (), x), (ops.unsafe.default, (), x), mode=mode)
    regions = check(gm, plan_regions(gm))
    assert kinds(regions) == [True, False]
    assert refused(regions) == [Boundary.UNSAFE_OP]
    lib._destroy()


def test_parts_of_a_result_stay_with_their_producer(mode: FakeTensorMode) -> None:
    x = fake(4, 4, mode=mode)
    gm = trace(lambda x: aten.max.dim(x.sin(), 0)[1].cpu(), x)
    part = next(n for n in gm.graph.nodes if n.target is operator.getitem and n.args[1] == 1)
    copy = next(n for n in gm.graph.nodes if n.name.startswith("_to_copy"))
    late = gm.graph.node_copy(part)
    copy.append(late)
    late.users.clear()
    regions = check(gm, plan_regions(gm))
    assert late.name in regions[0].nodes
    assert regions[0].capturable


def test_a_run_without_work_is_not_worth_a_graph(mode: FakeTensorMode) -> None:
    (region,) = plan(lambda x: x.t().reshape(16), fake(4, 4, mode=mode))
    assert Boundary.NO_WORK in [reason.kind for reason in region.refusals] or region.launches
    (region,) = plan(lambda x: x.t(), fake(4, 4, mode=mode))
    assert [reason.kind for reason in region.refusals] == [Boundary.NO_WORK]


def test_a_host_graph_and_an_empty_graph(mode: FakeTensorMode) -> None:
    (region,) = plan(lambda x: x.sin().cos(), fake(4, device="cpu", mode=mode))
    assert {reason.kind for reason in region.refusals} == {Boundary.CPU_OP}
    assert plan(lambda x: x, fake(4, mode=mode)) == []


def test_planning_changes_nothing_and_takes_linear_time(mode: FakeTensorMode) -> None:
    def seconds(n: int) -> float:
        x = fake(4, mode=mode)
        host = fake(4, device="cpu", mode=mode)
        step = [(aten.sin.default, (), x)] * 8 + [(aten._to_copy.default, (), host), (aten._to_copy.default, (), x)]
        gm = graph(*step * (n // 10), mode=mode)
        before = str(gm.graph)
        start = time.process_time()
        regions = plan_regions(gm)
        took = time.process_time() - start
        assert str(gm.graph) == before
        assert len(regions) == 2 * (n // 10)
        return took

    seconds(1_000)
    small, large = min(seconds(1_000) for _ in range(3)), seconds(8_000)
    assert large < 8 * small * 4, (small, large)


def _planned_regions_on_the_null_gpu(calls: int) -> dict[str, Any]:
    """Trace, plan, cut the first region out, run it by graphs; then a region the plan refuses, run all the same."""

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = (x @ w).relu()
        return (h * h.sum().item()).sum()

    x, w = torch.randn(8, 16, device="cuda"), torch.randn(16, 16, device="cuda")
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        gm = make_fx(step)(mode.from_tensor(x), mode.from_tensor(w))
    regions = plan_regions(gm)

    cut = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder" or node.name in regions[0].nodes:
            env[node] = cut.node_copy(node, env.__getitem__)
    last = next(n for n in reversed(gm.graph.nodes) if n.name in regions[0].nodes)
    cut.output((env[last],))
    safe = RegionRunner(fx.GraphModule({}, cut), static_inputs=(1,))
    whole = RegionRunner(lambda *args: [gm(*args)], static_inputs=(1,))
    with torch.no_grad():
        for _ in range(calls):
            safe(x, w)
        for _ in range(calls):
            whole(x, w)
    return {
        "plan": [region.capturable for region in regions],
        "refusals": [reason.kind.name for reason in regions[1].refusals],
        "safe": [safe.stats.captures, safe.stats.replays, dict(safe.stats.plain)],
        "whole": [whole.stats.captures, whole.stats.replays, dict(whole.stats.plain)],
    }


@pytest.mark.nullgpu
def test_a_planned_region_replays_and_a_refused_one_cannot() -> None:
    result = run_in_null_gpu(_planned_regions_on_the_null_gpu, calls=5)
    seen = result.returned
    assert seen["plan"] == [True, False, True]
    assert seen["refusals"] == ["HOST_READ", "UNBACKED_SIZE"], "the read, and the product that takes what was read"
    assert seen["safe"] == [1, 4, {}]
    assert result.count("graph_launch") == 4
    captures, replays, plain = seen["whole"]
    assert (captures, replays) == (0, 0)
    assert list(plain.values()) == [4]
    assert len(result.violations) == 1, "the refused region breaks a rule of capture, once"
