"""A graph cut into regions computes what it computed whole; on the null GPU its capturable parts replay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusewright.passes.cudagraph_regions import Boundary, Reason, Region, plan_regions
from fusewright.runtime.cudagraph.split import RegionSequence, cut
from tests.nullgpu.harness import run_in_null_gpu


def _step(x: torch.Tensor, w: torch.Tensor) -> list[Any]:
    scale = torch.full((), 3.0)
    h = (x @ w).relu() * scale
    values, index = h.max(0)
    return [(values * scale).sum(), index, None, x, scale]


def _in_pieces_of(gm: fx.GraphModule, size: int) -> list[Region]:
    """Regions of `size` nodes each, as if every second one could be captured; parts stay with their producer."""
    (whole,) = plan_regions(gm)
    names = [name for name in whole.nodes if not name.startswith("getitem")]
    no_reason = Reason(Boundary.CPU_OP, "", "")
    regions = []
    for start in range(0, len(names), size):
        chunk = names[start : start + size]
        parts = [n.name for n in gm.graph.nodes if n.name.startswith("getitem") and n.args[0].name in chunk]
        nodes = tuple(n.name for n in gm.graph.nodes if n.name in (*chunk, *parts))
        regions.append(replace(whole, nodes=nodes, capturable=start % 2 == 0, starts=no_reason, ends=no_reason))
    return regions


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_pieces_compute_what_the_whole_computes(size: int) -> None:
    x, w = torch.randn(5, 4), torch.randn(4, 3)
    gm = make_fx(_step)(x, w)
    for node in gm.graph.nodes:
        assert "val" in node.meta or node.op == "output"
    before = str(gm.graph)
    run = RegionSequence(gm, _in_pieces_of(gm, size), static_inputs=(1,))
    for _ in range(2):
        got, expected = run(x, w), gm(x, w)
        assert len(got) == len(expected) == 5
        assert got[2] is None
        assert got[3] is x
        for position in (0, 1, 4):
            assert torch.equal(got[position], expected[position])
    assert str(gm.graph) == before
    assert run.runners[0].stats.plain.total() == 2


def test_values_are_dropped_after_their_last_use() -> None:
    gm = make_fx(lambda x: [x.sin().cos().tan().exp()])(torch.randn(3))
    pieces = cut(gm, _in_pieces_of(gm, 1))
    assert [piece.inputs for piece in pieces[1:]] == [piece.outputs for piece in pieces[:-1]]
    assert [piece.dead for piece in pieces] == [piece.inputs for piece in pieces]


def test_each_module_can_be_lowered() -> None:
    lowered = []

    def lower(module: fx.GraphModule) -> Any:
        lowered.append(module)
        return module.forward

    x, w = torch.randn(5, 4), torch.randn(4, 3)
    gm = make_fx(_step)(x, w)
    run = RegionSequence(gm, _in_pieces_of(gm, 3), lower=lower)
    assert torch.equal(run(x, w)[0], gm(x, w)[0])
    assert len(lowered) >= 2


def _planned_on_the_null_gpu(calls: int) -> dict[str, Any]:
    def step(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        h = (x @ w) * torch.full((), 0.5)
        return [(h.cpu().neg().cuda() @ w).sum(), h]

    x, w = torch.randn(16, 16, device="cuda"), torch.randn(16, 16, device="cuda")
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        gm = make_fx(step)(mode.from_tensor(x), mode.from_tensor(w))
    run = RegionSequence(gm, plan_regions(gm), static_inputs=(1,))

    def masked(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.where(x > 0, x.sin(), torch.full((), float("-inf"))).cos()]

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        mask = make_fx(masked)(mode.from_tensor(x))
    # What the planner says of `where` is true of ATen and of Inductor: see the refusal and the capture below.
    aten = RegionSequence(mask, plan_regions(mask, inlines_constants=True))
    inductor = RegionSequence(mask, plan_regions(mask, inlines_constants=True), lower=torch.compile)
    with torch.no_grad():
        for _ in range(calls):
            run(x, w)
            aten(x)
            inductor(x)
    return {
        name: [[r.stats.captures, r.stats.replays, sum(r.stats.plain.values())] for r in sequence.runners]
        for name, sequence in (("run", run), ("aten", aten), ("inductor", inductor))
    }


@pytest.mark.nullgpu
def test_capturable_parts_replay_around_a_visit_to_the_host() -> None:
    result = run_in_null_gpu(_planned_on_the_null_gpu, calls=5)
    assert result.returned["run"] == [[1, 4, 0], [1, 4, 0]]
    assert result.returned["aten"] == [[0, 0, 4]]
    assert result.returned["inductor"] == [[1, 4, 0]]
    assert result.count("graph_launch") == 12
