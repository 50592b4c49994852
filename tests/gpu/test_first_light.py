"""What only a real GPU can answer: values of whole steps with our kernels in them, replays, and first times."""

from __future__ import annotations

import copy
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from benchmarks.workloads import COMPARABLE
from fusewright.api import optimize_with
from fusewright.capture.variant import GraphVariant, Launch
from fusewright.numerics import compare_trees
from fusewright.workload import observe_step
from tests.models.mini import MINI_LLAMA

pytestmark = pytest.mark.gpu
Record = Callable[..., None]
ROUNDS = 30
WARM_CALLS = 10


def explained(model: nn.Module) -> dict[str, Any]:
    told: dict[str, Any] = fusewright.explain(model).to_dict()
    return told


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_language_model_with_our_kernels_is_right(dtype: torch.dtype, training: bool, gpu_record: Record) -> None:
    eager = MINI_LLAMA.build(training=training).to("cuda", dtype)
    model = fusewright.optimize(copy.deepcopy(eager), dims=MINI_LLAMA.dims)
    run = functools.partial(observe_step, MINI_LLAMA, length=MINI_LLAMA.lengths[-1], training=training, steps=3)
    expected, found = run(model=eager), run(model=model)
    compared = compare_trees(
        found, expected, functools.partial(run, model=copy.deepcopy(eager).double()), training=training
    )
    told = explained(model)
    gpu_record(metric="accuracy", dtype=str(dtype), training=training, ok=compared.ok, rewrites=told["rewrites"])
    assert compared.ok, compared.reason
    assert told["fallbacks"] == []
    assert told["rewrites"]["fuse_attention"] == 2
    assert told["rewrites"]["fuse_rms_norm"] == 5


def test_replayed_graphs_give_the_values_of_plain_launches(gpu_record: Record) -> None:
    eager = MINI_LLAMA.build(training=False).to("cuda")
    graphs = GraphVariant(launch=Launch.CUDA_GRAPHS)
    model = optimize_with(copy.deepcopy(eager), choose=lambda *_: graphs, dims=MINI_LLAMA.dims)
    kept = []
    with torch.no_grad():
        for seed in range(6):
            _, kwargs = MINI_LLAMA.make_inputs(64, seed)
            ids = kwargs["input_ids"].cuda()
            kept.append((model(input_ids=ids).logits, eager(input_ids=ids).logits))
    for found, expected in kept:  # only now: a replay must not have overwritten what an earlier call returned
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    regions = explained(model)["regions"]
    gpu_record(metric="regions", regions=regions)
    assert sum(region["replays"] for region in regions) > 0
    assert all(region["plain"] == {} for region in regions)


def seconds(step: Callable[[], object]) -> float:
    """Device seconds of one step, by CUDA events."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    step()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


@pytest.mark.parametrize("name", ["llama_eager", "resnet50", "world_policy"])
def test_time_against_torch_compile_is_recorded(name: str, gpu_record: Record) -> None:
    workload = COMPARABLE[name]
    length = workload.lengths[-1]
    base = workload.build(training=False).cuda()
    args, kwargs = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().cuda(), workload.make_inputs(length)
    )
    plain = copy.deepcopy(base)
    plain.compile()
    ours = fusewright.optimize(copy.deepcopy(base), dims=workload.dims)
    graphs = optimize_with(
        copy.deepcopy(base), choose=lambda *_: GraphVariant(launch=Launch.CUDA_GRAPHS), dims=workload.dims
    )
    models = {"compile": plain, "fusewright": ours, "fusewright_cuda_graphs": graphs}
    times: dict[str, list[float]] = {side: [] for side in models}
    with torch.no_grad():
        for model in models.values():
            for _ in range(WARM_CALLS):
                model(*args, **kwargs)
        for _ in range(ROUNDS):
            for side, model in models.items():
                times[side].append(seconds(functools.partial(model, *args, **kwargs)))
    for side, taken in times.items():
        ratio = math.exp(statistics.median(math.log(a / b) for a, b in zip(times["compile"], taken, strict=True)))
        gpu_record(metric="inference_s", workload=name, side=side, value=statistics.median(taken), ratio=ratio)
        assert ratio > 0.5, f"{side} takes twice as long as torch.compile"
