"""CUDA-graph regions on the null GPU: one capture, then launches, or a reason why not. On the CPU: plain calls."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fusewright.runtime.cudagraph.runner import AUTOGRAD, MOVING_INPUTS, TOO_MANY_BUCKETS, GraphPool, RegionRunner
from fusewright.runtime.cudagraph.tensors import (
    HandOut,
    hand_out,
    how_to_hand_out,
    overlapping_mutation,
    without_repeats,
)
from tests.nullgpu.child import mark
from tests.nullgpu.harness import Result, run_in_null_gpu

N = 6  # calls in each phase


def _linear(w: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    return [(x @ w).relu(), x.sum(0)]


def _stats(runner: RegionRunner) -> dict[str, Any]:
    stats = runner.stats
    assert stats.calls == stats.warmups + stats.replays + stats.plain.total(), stats
    return {
        "warmups": stats.warmups,
        "captures": stats.captures,
        "recaptures": stats.recaptures,
        "replays": stats.replays,
        "plain": dict(stats.plain),
    }


class _Lab:
    """Runs situations one after another in the child, each in a phase of the log of its own."""

    def __init__(self) -> None:
        self.w, self.x = torch.randn(64, 64, device="cuda"), torch.randn(8, 64, device="cuda")
        self.shared = GraphPool()
        self.seen: dict[str, Any] = {}

    def run(self, name: str, region: Any, calls: list[Any] | None = None, **options: Any) -> list[Any]:
        """Call a new runner with each of `calls` (by default N times the same) and note its statistics."""
        runner = RegionRunner(region, **options)
        with self.phase(name, runner), torch.no_grad():
            return [runner(*args) for args in calls or [(self.w, self.x)] * N]

    @contextmanager
    def phase(self, name: str, runner: RegionRunner) -> Iterator[None]:
        mark(name)
        yield
        mark(f"{name} done")
        self.seen[name] = _stats(runner)


def _reads_on_host(w: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    return [x * 2 if x.sum().item() >= 0 else x]


def _writes(w: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor | None]:
    w.mul_(0.9)
    x.add_(w[0])
    return [x.sum(), None]


def _captured(lab: _Lab) -> None:
    w, x, static = lab.w, lab.x, {"static_inputs": (0,)}
    outputs = lab.run("replays", _linear, [(w, torch.randn(8, 64, device="cuda")) for _ in range(N)], **static)
    lab.seen["outputs share memory"] = len({o[0].data_ptr() for o in outputs}) < N
    outputs = lab.run("aliases", _linear, alias_outputs=True, **static)
    lab.seen["aliases share memory"] = len({o[0].data_ptr() for o in outputs[1:]}) == 1
    lab.run("shared 1", _linear, pool=lab.shared, **static)
    lab.run("shared 2", _linear, [(w, x[:4])] * N, pool=lab.shared, **static)
    lab.run("buckets", _linear, [(w, x[: 1 + i % 4]) for i in range(12)], max_graphs=3, **static)
    moved = [torch.randn(64, 64, device="cuda") for _ in range(2)]
    lab.run("moved", _linear, [(moved[0], x)] * 3 + [(moved[1], x)] * 3, **static)
    lab.run("moving", _linear, [(moved[i % 2], x) for i in range(10)], max_recaptures=2, **static)
    outputs = lab.run("static out", lambda w, x: [w.t(), x * 2], **static)
    lab.seen["static output is a view"] = outputs[-1][0].data_ptr() == w.data_ptr()
    before = w._version
    lab.run("writes", _writes, **static)
    lab.seen["versions"] = w._version - before
    lab.run("expanded", lambda w, x: [x * 2], [(w, torch.zeros(1, 5, device="cuda").expand(3, 5))] * N)
    compiled = torch.compile(lambda w, x: ((x @ w).softmax(-1) * 2,), fullgraph=True)
    lab.run("inductor", compiled, **static)


def _refused(lab: _Lab) -> None:
    w, x, static = lab.w, lab.x, {"static_inputs": (0,)}
    lab.run("host read", _reads_on_host, pool=lab.shared)
    lab.run("after a failed capture", _linear, pool=lab.shared, **static)
    fresh = GraphPool()
    lab.run("host read first", _reads_on_host, pool=fresh)
    lab.run("after a failed first capture", _linear, pool=fresh, **static)
    lab.run("to host", lambda w, x: [x.cpu()])
    lab.run("cpu constant out", lambda w, x: [x * 2, torch.zeros(3)])
    lab.run("view out", lambda w, x: [x[1:]])
    lab.run("overlap", lambda a, b: [a.add_(1).sum() + b.sum()], [(x, x[:1])] * N)
    lab.run("cpu input", lambda w, x: [x * 2], [(w, torch.zeros(2))] * N)
    run = RegionRunner(_linear, **static)
    with lab.phase("autograd", run):
        for _ in range(N):
            run(w.requires_grad_(), x)
    w.requires_grad_(False)
    lab.seen["current stream is default"] = torch.cuda.current_stream() == torch.cuda.default_stream()


def _shared(lab: _Lab) -> None:
    w, x, static = lab.w, lab.x, {"static_inputs": (0,)}
    inner = RegionRunner(_linear, pool=lab.shared, **static)
    lab.run("nested", lambda w, x: inner(w, x), pool=lab.shared, **static)
    lab.seen["inner"] = _stats(inner)
    run, side = RegionRunner(_linear, **static), torch.cuda.Stream()
    with lab.phase("two streams", run):
        for i in range(N):
            with torch.cuda.stream(side if i % 2 else torch.cuda.default_stream()):
                run(w, x)
    run = RegionRunner(_linear, pool=lab.shared, **static)
    with lab.phase("threads", run), ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda i: run(w, x[: 1 + i % 2]), range(40)))
    run = RegionRunner(_linear, **static)
    with lab.phase("reset", run):
        for _ in range(3):
            run(w, x)
        run.reset()
        run(w, x)


def _scenarios() -> dict[str, Any]:
    lab = _Lab()
    for situations in (_captured, _refused, _shared):
        situations(lab)
    return lab.seen


@pytest.fixture(scope="module")
def ran() -> Result:
    return run_in_null_gpu(_scenarios)


def _expect(
    seen: dict[str, Any], *, captures: int = 0, replays: int = 0, warmups: int = 1, recaptures: int = 0
) -> None:
    assert (seen["captures"], seen["replays"], seen["warmups"], seen["recaptures"]) == (
        captures,
        replays,
        warmups,
        recaptures,
    ), seen


@pytest.mark.nullgpu
class TestOnNullGpu:
    def test_one_capture_then_a_graph_launch_for_each_call(self, ran: Result) -> None:
        _expect(ran.returned["replays"], captures=1, replays=N - 1)
        assert ran.returned["replays"]["plain"] == {}
        log = ran.phase("replays")
        assert log.count("capture_begin") == log.count("capture_end", ok="1") == log.count("graph_instantiate") == 1
        assert log.count("graph_launch") == N - 1
        assert log.count("launch", api="blas", capture="0") == 1, "only the warm-up may run the product"
        assert not log.violations
        assert not [e for e in log.events if e.fields.get("beside", "0") != "0"], "work escaped the capture"

    def test_a_replay_copies_in_then_launches_then_copies_out(self, ran: Result) -> None:
        ran_alone = [event for event in ran.phase("replays").events if "stream" in event.fields and not event.captured]
        *_, copy_in, graph, copy_out, copy_sum = [event for event in ran_alone if event.kind != "sync"]
        assert "multi_tensor_apply" in copy_in["name"]
        assert graph.kind == "graph_launch"
        assert (copy_out.kind, copy_out["bytes"]) == ("memcpy", str(8 * 64 * 4))
        assert (copy_sum.kind, copy_sum["bytes"]) == ("memcpy", str(64 * 4))
        assert len([name for name in ran.phase("replays").launched if "multi_tensor_apply" in name]) == N - 1

    def test_outputs_are_copies_unless_aliases_are_asked_for(self, ran: Result) -> None:
        assert not ran.returned["outputs share memory"]
        assert ran.returned["aliases share memory"]
        copies, aliases = ran.phase("replays"), ran.phase("aliases")
        assert len(copies.launched) + copies.count("memcpy") > len(aliases.launched) + aliases.count("memcpy")

    def test_runners_share_a_pool(self, ran: Result) -> None:
        for name in ("shared 1", "shared 2"):
            _expect(ran.returned[name], captures=1, replays=N - 1)
        own, second = ran.phase("shared 1"), ran.phase("shared 2")
        assert second.count("malloc") < own.count("malloc"), (
            "the second runner must find the pool's memory and workspace"
        )

    def test_each_bucket_has_its_graph_up_to_a_limit(self, ran: Result) -> None:
        _expect(ran.returned["buckets"], captures=3, replays=6, warmups=3)
        assert ran.returned["buckets"]["plain"] == {TOO_MANY_BUCKETS: 3}

    def test_a_moved_static_input_makes_a_new_capture(self, ran: Result) -> None:
        _expect(ran.returned["moved"], captures=2, replays=5, recaptures=1)
        log = ran.phase("moved")
        first, second = [event["graph"] for event in log.of("graph_instantiate")]
        assert [event["graph"] for event in log.of("graph_launch")] == [first] * 2 + [second] * 3
        assert log.of("graph_destroy")[0]["graph"] == first

    def test_inputs_that_keep_moving_are_given_up(self, ran: Result) -> None:
        _expect(ran.returned["moving"], captures=3, replays=3, recaptures=2)
        assert ran.returned["moving"]["plain"] == {MOVING_INPUTS: 6}

    @pytest.mark.parametrize("name", ["host read", "to host"])
    def test_a_failed_capture_is_counted_with_its_cause(self, ran: Result, name: str) -> None:
        _expect(ran.returned[name])
        ((reason, count),) = ran.returned[name]["plain"].items()
        assert count == N - 1
        assert reason.startswith("capture failed: ")
        assert ran.phase(name).count("capture_begin") == 1, "a refused bucket must not try again"

    @pytest.mark.parametrize("name", ["after a failed capture", "after a failed first capture"])
    def test_a_failed_capture_leaves_the_next_one_unharmed(self, ran: Result, name: str) -> None:
        _expect(ran.returned[name], captures=1, replays=N - 1)
        assert not ran.phase(name).violations
        assert ran.returned["current stream is default"]

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("cpu constant out", "output 1 is on cpu, where a replay does not write"),
            ("view out", "output 0 is a view of an input that is not static"),
            ("overlap", "input 0 is written to and shares memory with another input"),
        ],
    )
    def test_what_a_replay_would_get_wrong_is_refused(self, ran: Result, name: str, reason: str) -> None:
        _expect(ran.returned[name])
        assert ran.returned[name]["plain"] == {reason: N - 1}
        assert ran.phase(name).count("graph_launch") == 0

    def test_a_returned_static_input_is_a_view_of_it(self, ran: Result) -> None:
        _expect(ran.returned["static out"], captures=1, replays=N - 1)
        assert ran.returned["static output is a view"]

    def test_written_inputs_are_written_once_a_call(self, ran: Result) -> None:
        _expect(ran.returned["writes"], captures=1, replays=N - 1)
        assert ran.returned["versions"] >= N, "autograd must see each call's write to the static input"
        copies_back = ran.phase("writes").of("memcpy", capture="0", direction="3", bytes=str(8 * 64 * 4))
        assert len(copies_back) == N - 1, "the written input that is not static must be copied back"

    def test_unfit_calls_run_plainly(self, ran: Result) -> None:
        assert ran.returned["cpu input"]["plain"] == {"input 1 is on cpu": N}
        assert ran.returned["autograd"]["plain"] == {AUTOGRAD: N}

    def test_expanded_inputs_are_captured(self, ran: Result) -> None:
        _expect(ran.returned["expanded"], captures=1, replays=N - 1)

    def test_a_runner_inside_a_region_joins_the_outer_graph(self, ran: Result) -> None:
        _expect(ran.returned["nested"], captures=1, replays=N - 1)
        assert ran.phase("nested").count("graph_launch") == N - 1
        assert ran.returned["inner"]["captures"] == 0

    def test_calls_on_two_streams_take_turns(self, ran: Result) -> None:
        _expect(ran.returned["two streams"], captures=1, replays=N - 1)
        last = None
        waits: set[tuple[str, str]] = set()
        for event in ran.phase("two streams").events:
            if event.kind == "wait":
                waits.add((event["stream"], event["on"]))
            elif event.kind == "graph_launch":
                assert last is None or (event["stream"], last) in waits, "no order between this replay and the last"
                last = event["stream"]
                waits.clear()
        assert {e["stream"] for e in ran.phase("two streams").of("graph_launch")} == {"0", last}

    def test_kernels_of_inductor_are_captured(self, ran: Result) -> None:
        _expect(ran.returned["inductor"], captures=1, replays=N - 1)
        log = ran.phase("inductor")
        triton = [name for name in log.captured if name.startswith("triton_")]
        assert len(triton) == 1
        end = next(i for i, event in enumerate(log.events) if event.kind == "capture_end")
        alone = [e["name"] for e in log.events[end:] if e.kind == "launch" and e["api"] == "driver"]
        assert not alone, "after the capture it runs in the graph only"
        assert not log.violations

    def test_threads_share_a_runner(self, ran: Result) -> None:
        _expect(ran.returned["threads"], captures=2, replays=38, warmups=2)
        assert ran.phase("threads").count("graph_launch") == 38
        assert not ran.phase("threads").violations

    def test_reset_frees_the_graphs(self, ran: Result) -> None:
        _expect(ran.returned["reset"], captures=1, replays=2, warmups=2)
        assert ran.phase("reset").count("graph_destroy") >= 1


def test_plain_calls_on_the_cpu_are_right_and_counted() -> None:
    run = RegionRunner(_linear, static_inputs=(0,))
    w, x = torch.randn(4, 4), torch.randn(2, 4)
    for _ in range(3):
        got = run(w, x)
        assert torch.equal(got[0], (x @ w).relu())
        assert torch.equal(got[1], x.sum(0))
    assert run.stats.plain == {"input 0 is on cpu": 3}
    assert run.stats.calls == 3


def test_errors_of_the_region_reach_the_caller() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        RegionRunner(_linear)(torch.zeros(3, 3), torch.zeros(2, 4))


def test_aliases_from_a_shared_pool_are_refused() -> None:
    with pytest.raises(ValueError, match="alias_outputs"):
        RegionRunner(_linear, pool=GraphPool(), alias_outputs=True)


def test_copies_keep_values_strides_and_sharing() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    outputs = [base[1:3], base.t(), torch.ones(3, 1).expand(3, 4), torch.arange(6.0).reshape(2, 3).t(), 7, None]
    hows = [how_to_hand_out(output, outputs, set(), False) for output in outputs]
    copies = hand_out(outputs, hows)
    assert hows[3] is HandOut.CLONE
    for output, copied in zip(outputs[:4], copies[:4], strict=True):
        assert torch.equal(output, copied)
        assert output.stride() == copied.stride()
        assert output.untyped_storage().data_ptr() != copied.untyped_storage().data_ptr()
    assert copies[4:] == [7, None]
    copies[0].fill_(-1)
    assert (copies[1].t()[1:3] == -1).all(), "outputs that shared memory must share it still"
    assert (base[1:3] >= 0).all()


def test_written_static_inputs_may_share_memory() -> None:
    x = torch.zeros(4)
    assert overlapping_mutation((x, x), frozenset({0}), (0, 1)) is None
    assert overlapping_mutation((x, x), frozenset({0}), (0,)) is not None
    assert overlapping_mutation((x, x), frozenset(), ()) is None


def test_without_repeats_names_each_element_once() -> None:
    expanded = torch.arange(5.0).expand(3, 5)
    assert without_repeats(expanded).shape == (1, 5)
    expanded_buffer = torch.empty_strided(expanded.size(), expanded.stride())
    without_repeats(expanded_buffer).copy_(without_repeats(expanded))
    assert torch.equal(expanded_buffer, expanded)
