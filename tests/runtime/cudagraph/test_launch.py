"""`launch=cuda_graphs`: on the null GPU regions are captured and replayed; elsewhere it is counted as a fallback."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright.api import optimize_with
from fusewright.capture.variant import GraphVariant, Launch, Lowering
from fusewright.config import Verify
from fusewright.errors import FallbackError
from fusewright.runtime import fragment
from fusewright.runtime.cudagraph.launch import _aligned, why_not_captured
from fusewright.runtime.fragment import Fragment
from tests.nullgpu.child import mark
from tests.nullgpu.harness import Result, run_in_null_gpu

CAPTURED = GraphVariant(launch=Launch.CUDA_GRAPHS)
PRETENDED = GraphVariant((), Lowering.AOT_EAGER)
CALLS = 6


class Gated(nn.Module):
    """Two layers; `host` puts a step on the host in between, which no graph can hold."""

    def __init__(self, host: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.host = nn.Linear(64, 64), nn.Linear(64, 64), host
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).softmax(-1)
        if self.host:
            y = y.cpu().cos().to(x.device)
        return self.second(y).relu()


class Counting(Gated):
    """Writes to a buffer at every call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(x) * self.calls


def optimized(model: nn.Module, **options: Any) -> nn.Module:
    return optimize_with(model, choose=lambda *_: CAPTURED, verify="off", **options)


def _scenarios() -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def run(
        name: str, model: Gated, rows: tuple[int, ...] = (8,) * CALLS, move_at: int = CALLS, **options: Any
    ) -> None:
        optimized(model.cuda().eval(), **options)
        mark(name)
        outputs = []
        for call, n in enumerate(rows):
            if call == move_at:
                model.first.weight.data = model.first.weight.data.clone()
            with torch.no_grad():
                outputs.append(model(torch.randn(n, 64, device="cuda")))
        mark(f"{name} done")
        told = fusewright.explain(model)
        seen[name] = told.to_dict() | {"text": str(told), "addresses": len({o.data_ptr() for o in outputs})}

    run("whole", Gated())
    run("moved", Gated(), move_at=3)
    run("split", Gated(host=True))
    run("writes", Counting())
    lengths = {"dims": {"x": {0: "rows"}}, "buckets": {"rows": [8, 16]}}
    run("buckets", Gated(), (4, 12, 4, 12, 4, 12), **lengths)
    model = Gated().cuda()
    optimized(model)
    for _ in range(3):
        model(torch.randn(8, 64, device="cuda")).sum().backward()
    seen["training"] = fusewright.explain(model).to_dict()
    return seen


@pytest.fixture(scope="module")
def ran() -> Result:
    return run_in_null_gpu(_scenarios)


@pytest.mark.nullgpu
class TestOnNullGpu:
    def test_a_whole_graph_is_captured_once_and_replayed(self, ran: Result) -> None:
        (region,) = ran.returned["whole"]["regions"]
        found = [region[name] for name in ("calls", "warmups", "captures", "replays", "recaptures")]
        assert found == [CALLS, 1, 1, CALLS - 1, 0]
        assert region["plain"] == {}
        assert ran.returned["whole"]["fallbacks"] == []
        log = ran.phase("whole")
        assert log.count("graph_launch") == CALLS - 1
        assert not log.violations
        assert ran.returned["whole"]["addresses"] > 1, "outputs must not be overwritten by the next call"

    def test_parameters_are_read_where_they_lie(self, ran: Result) -> None:
        (region,) = ran.returned["moved"]["regions"]
        assert (region["captures"], region["recaptures"]) == (2, 1), "a parameter that was copied in could move freely"

    def test_work_on_the_host_splits_the_graph(self, ran: Result) -> None:
        regions = ran.returned["split"]["regions"]
        assert [(r["captures"], r["replays"]) for r in regions] == [(1, CALLS - 1)] * 2
        assert ran.phase("split").count("graph_launch") == 2 * (CALLS - 1)

    def test_a_written_buffer_is_written_in_place(self, ran: Result) -> None:
        (region,) = ran.returned["writes"]["regions"]
        assert (region["captures"], region["replays"], region["plain"]) == (1, CALLS - 1, {})

    def test_each_bucket_has_regions_of_its_own(self, ran: Result) -> None:
        regions = ran.returned["buckets"]["regions"]
        assert [(r["range"], r["captures"], r["replays"]) for r in regions] == [
            ("rows=2..8", 1, 2),
            ("rows=9..16", 1, 2),
        ]

    def test_explain_shows_the_regions(self, ran: Result) -> None:
        assert "regions launched by CUDA graphs" in ran.returned["whole"]["text"]

    def test_training_runs_plainly_and_says_so(self, ran: Result) -> None:
        told = ran.returned["training"]
        assert told["regions"] == []
        (fallback,) = told["fallbacks"]
        assert (fallback["kind"], fallback["reason"]) == ("launch", "graphs that autograd records are not captured")


def test_without_a_gpu_it_runs_plainly_and_says_so() -> None:
    model = Gated().eval()
    x = torch.randn(8, 64)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(optimized(model)(x), expected)
    (fallback,) = fusewright.explain(model).to_dict()["fallbacks"]
    assert (fallback["kind"], fallback["where"][:6]) == ("launch", "graph0")
    assert "need a CUDA device" in fallback["reason"]


def test_without_a_gpu_it_is_an_error_under_strict() -> None:
    model = optimized(Gated().eval(), strict=True)
    with torch.no_grad(), pytest.raises(FallbackError, match="launch: CUDA graphs need a CUDA device"):
        model(torch.randn(8, 64))


def test_a_replay_is_compared_with_eager_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path))
    calls = 0

    def third_call_wrong(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return [out + (calls == 3) for out in call(*args)]

        return run

    @contextlib.contextmanager
    def one_region(self: Fragment, variant: GraphVariant, *_: Any) -> Iterator[list[str]]:
        yield ["a region"] if variant == PRETENDED else []

    real = fragment.lower
    monkeypatch.setattr(Fragment, "_regions", one_region)
    monkeypatch.setattr(fragment, "lower", lambda *args: (third_call_wrong(real(*args)[0]), None))
    model, x = Gated().eval(), torch.randn(8, 64)
    with torch.no_grad():
        expected = model(x)
        optimize_with(model, choose=lambda *_: PRETENDED)
        torch.testing.assert_close(model(x), expected)
    assert [f["kind"] for f in fusewright.explain(model).to_dict()["fallbacks"]] == ["verification"]


def test_comparing_every_call_rules_graphs_out() -> None:
    assert why_not_captured(CAPTURED, "cuda", False, Verify.FIRST_CALL) is None
    reason = why_not_captured(CAPTURED, "cuda", False, Verify.ALWAYS)
    assert reason is not None
    assert "verify='always'" in reason


def test_what_lies_askew_is_copied_and_written_back() -> None:
    askew, straight = torch.zeros(9)[1:], torch.ones(8)

    def region(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        assert all(tensor.data_ptr() % 16 == 0 for tensor in inputs)
        inputs[0].add_(inputs[1])
        return [inputs[0] * 2]

    (out,) = _aligned(region, {0})(askew, straight)
    assert torch.equal(askew, torch.ones(8))
    assert torch.equal(out, torch.full((8,), 2.0))
