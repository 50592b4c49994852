"""The null GPU itself: unmodified torch sees a GPU, compiled steps launch and replay, broken rules are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.nullgpu import build as build_module
from tests.nullgpu.child import mark, memory
from tests.nullgpu.harness import NullGpuRunError, Result, run_in_null_gpu

pytestmark = pytest.mark.nullgpu


def _what_torch_sees() -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    block = torch.empty(600 << 20, dtype=torch.uint8, device="cuda")
    used, peak = memory()
    return {
        "count": torch.cuda.device_count(),
        "name": properties.name,
        "sms": properties.multi_processor_count,
        "capability": torch.cuda.get_device_capability(),
        "total": properties.total_memory,
        "driver_holds": used,
        "torch_holds": torch.cuda.memory_reserved(),
        "pinned": torch.empty(4).pin_memory().is_pinned(),
        "peak_ok": peak >= used >= block.numel(),
        "index_survives_the_device": torch.tensor([3, 1, 2], device="cuda").tolist(),
    }


def test_torch_sees_one_h200() -> None:
    seen = run_in_null_gpu(_what_torch_sees).returned
    assert (seen["count"], seen["sms"], seen["capability"]) == (1, 132, [9, 0])
    assert "H200" in seen["name"]
    assert seen["total"] == 141 << 30
    assert seen["driver_holds"] == seen["torch_holds"]
    assert seen["peak_ok"]
    assert seen["pinned"]
    assert seen["index_survives_the_device"] == [3, 1, 2]


def _train(mode: str) -> int:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8)).cuda()
    step = torch.compile(lambda x: model(x).softmax(-1).square().mean(), mode=mode)
    x = torch.randn(16, 64, device="cuda")
    for i in range(5):
        mark(f"step {i}")
        model.zero_grad()  # a gradient kept from the last step would lie in memory of the CUDA graphs
        torch.compiler.cudagraph_mark_step_begin()
        step(x).backward()
    mark("end")
    return sum(parameter.grad is not None for parameter in model.parameters())


def test_compiled_training_step_launches_triton_kernels() -> None:
    result = run_in_null_gpu(_train, mode="default")
    assert result.returned == 4
    step = result.phase("step 4")
    triton = [name for name in step.launched if name.startswith("triton_")]
    assert len(triton) >= 2, step.launched
    assert step.count("launch", api="blas") == 5  # two products forward, three backward: the input needs no gradient
    assert not result.violations
    assert not result.count("capture_begin")


def test_reduce_overhead_captures_and_replays() -> None:
    result = run_in_null_gpu(_train, mode="reduce-overhead")
    captured = [int(event["kernels"]) for event in result.of("capture_end", ok="1") if event["kernels"] != "0"]
    assert len(captured) == 2, captured  # forward, backward
    last = result.phase("step 4")
    assert last.count("graph_launch") == 2
    assert sorted(int(event["kernels"]) for event in last.of("graph_launch")) == sorted(captured)
    assert not last.count("capture_begin")
    assert not last.of("launch", api="blas")
    assert not result.violations


def _break_capture_rules() -> list[str]:
    import torch

    side, joined = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.zeros(4, device="cuda")

    def synchronize() -> None:
        torch.cuda.synchronize()

    def read_on_host() -> None:
        x.sum().item()

    def fork_without_join() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)

    def fork_and_join() -> None:
        joined.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(joined):
            x.add_(1)
        torch.cuda.current_stream().wait_stream(joined)

    def wait_for_outside_work() -> None:
        outside = torch.cuda.Stream()
        torch.cuda.current_stream().wait_event(outside.record_event())

    outcomes = []
    for act in (synchronize, read_on_host, fork_without_join, wait_for_outside_work, fork_and_join):
        mark(act.__name__)
        try:
            # The outer context restores the stream where ending the capture fails.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(torch.cuda.CUDAGraph()):
                x.mul_(2)
                act()
            outcomes.append("captured")
        except RuntimeError as error:
            outcomes.append(str(error).splitlines()[0])
    return outcomes


def test_capture_rules_are_kept() -> None:
    result = run_in_null_gpu(_break_capture_rules)
    *broken, joined = result.returned
    assert joined == "captured"
    assert not result.phase("fork_and_join").violations
    assert all("captur" in outcome and outcome != "captured" for outcome in broken), broken
    expected = {
        "synchronize": "cudaDeviceSynchronize",
        "read_on_host": "cudaStreamSynchronize",
        "fork_without_join": "a forked stream was not joined",
        "wait_for_outside_work": "wait for an event outside the capture",
    }
    for phase, words in expected.items():
        assert any(words in violation for violation in result.phase(phase).violations), (phase, result.phase(phase))


def _compare_values() -> None:
    import torch

    torch.allclose(torch.zeros(2, device="cuda"), torch.zeros(2, device="cuda"))


def test_comparing_values_is_an_error() -> None:
    with pytest.raises(NullGpuRunError, match="StructureOnlyError"):
        run_in_null_gpu(_compare_values)


def test_refuses_beside_a_real_gpu(tmp_path: Path) -> None:
    with pytest.raises(NullGpuRunError, match="refused to load"):
        run_in_null_gpu(_what_torch_sees, env={"NULLGPU_EXTRA_SIGN": str(tmp_path)})


def test_unknown_compute_capability_is_refused() -> None:
    with pytest.raises(NullGpuRunError, match="no device of compute capability 75"):
        run_in_null_gpu(_what_torch_sees, cc=75)


def test_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(build_module.NullGpuUnavailableError, match="gcc is not installed"):
        build_module.build()


def test_stubs_log_products_as_launches_and_the_rest_as_stubs() -> None:
    source = build_module.stub_source({"cublasSgemm_v2", "cublasGemmEx", "cublasSetVectorAsync", "cudaHostRegister"})
    assert "BLAS(cublasSgemm_v2)" in source
    assert "BLAS(cublasGemmEx)" in source
    assert "STUB(cublasSetVectorAsync)" in source
    assert "STUB(cudaHostRegister)" in source


def test_phase_of_an_unknown_mark_is_an_error() -> None:
    with pytest.raises(KeyError, match="no mark 'x'"):
        Result(None, (), "", "").phase("x")
