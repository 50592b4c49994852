"""On two real gloo ranks the bucketing pass changes no bit of a training run; ranks that would disagree are told so."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fusewright.errors import FusewrightError
from fusewright.parallel import shard
from fusewright.passes.base import PassContext
from fusewright.passes.comm.bucket_collectives import BucketCollectives
from fusewright.passes.comm.collectives import kind_of
from fusewright.passes.comm.order_check import check_ranks_agree, collective_digest
from tests.parallel.llama import Llama, aten_backend, tokens
from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.multiprocess
CAPS = {"none": None, "small": 8 << 10, "large": 32 << 20}


@dataclass
class Run:
    """What one training run left: tensors of this rank, and per graph the collectives and the buckets made."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    collectives: list[dict[str, int]] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    declines: list[str] = field(default_factory=list)


def local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach().clone()


def train(rank: int, world: int, cap_bytes: int | None) -> Run:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = shard(Llama(), init_device_mesh("cpu", (world,)), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run = Run()

    def rewrite(gm: fx.GraphModule) -> None:
        if cap_bytes is not None:
            ctx = PassContext()
            run.buckets.append(BucketCollectives(cap_bytes).run(gm, ctx))
            run.declines += [decline.reason for decline in ctx.declines]
        check_ranks_agree(collective_digest(gm))
        run.collectives.append(Counter(kind.value for kind in map(kind_of, gm.graph.nodes) if kind is not None))

    compiled = torch.compile(model, backend=aten_backend(rewrite), fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        out = compiled(tokens(rank, step))
        loss = torch.nn.functional.cross_entropy(out.float().flatten(0, 1), tokens(rank, step + 100).flatten())
        loss.backward()
        run.outputs.append(out.detach().clone())
        run.gradients.append({name: local(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    run.parameters = {name: local(p) for name, p in model.named_parameters()}
    return run


def disagree(rank: int) -> str:
    """Each rank would gather another number of elements; return what it is told."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3 + rank, device="meta")
    graph.output(graph.call_function(torch.ops._c10d_functional.all_gather_into_tensor.default, (x, 2, "0")))
    try:
        check_ranks_agree(collective_digest(fx.GraphModule(torch.nn.Module(), graph)))
    except FusewrightError as error:
        return str(error)
    return "nothing"


def work(rank: int, world: int) -> dict[str, Any]:
    runs: dict[str, Any] = {name: train(rank, world, cap) for name, cap in CAPS.items()}
    return {**runs, "disagree": disagree(rank)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(work, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("cap", ["small", "large"])
def test_training_is_bitwise_the_same(ranks: list[dict[str, Any]], cap: str) -> None:
    for results in ranks:
        plain, merged = results["none"], results[cap]
        assert all(torch.equal(a, b) for a, b in zip(plain.outputs, merged.outputs, strict=True))
        for before, after in zip(plain.gradients, merged.gradients, strict=True):
            assert before.keys() == after.keys()
            assert [n for n in before if not torch.equal(before[n], after[n])] == []
        assert [n for n, p in plain.parameters.items() if not torch.equal(p, merged.parameters[n])] == []


def test_the_run_trains_and_shards_are_uneven(ranks: list[dict[str, Any]]) -> None:
    """Guards the comparison above: equal results of a run that does nothing would prove nothing."""
    first, last = (results["none"].parameters for results in ranks)
    assert (first["embedding.weight"].shape[0], last["embedding.weight"].shape[0]) == (26, 25)
    assert (first["blocks.0.scale"].numel(), last["blocks.0.scale"].numel()) == (1, 0)
    assert all(g.abs().sum() > 0 for g in ranks[0]["none"].gradients[0].values())
    assert not torch.equal(ranks[0]["none"].outputs[0], ranks[1]["none"].outputs[0])


def test_collectives_become_fewer(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        forward, backward = results["none"].collectives
        assert forward["all_gather"] >= 14
        assert backward["all_gather"] >= 8
        assert backward["reduce_scatter"] >= 14
        # torch 2.14's partitioner hands the tied weight's gather to backward before the wait: it is declined there.
        declined = results["large"].declines
        assert set(declined) <= {"output uses it before a wait"}
        assert results["large"].collectives[0] == {"all_gather": 1 + len(declined)}
        assert results["large"].collectives[1] == {"all_gather": 1, "reduce_scatter": 1}
        assert results["large"].buckets == [1, 2]
        some = results["small"].collectives[0]["all_gather"]
        assert 1 + len(declined) < some < forward["all_gather"] / 2


def test_ranks_that_disagree_are_told_both_sides(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert "rank 0: _c10d_functional::all_gather_into_tensor" in results["disagree"]
        assert "float32[3]" in results["disagree"]
        assert "float32[4]" in results["disagree"]


def check_often(rank: int, world: int) -> int:
    """As a compiler does it: under the Python dispatcher. Return how many checks came to an end."""
    with enable_python_dispatcher():
        for _ in range(3000):
            check_ranks_agree(f"the same on all {world} ranks")
    return 3000


@pytest.mark.parametrize("world", [1, 2])
def test_a_check_inside_a_compiler_does_not_hang(world: int, tmp_path: Path) -> None:
    assert run_ranks(check_often, world, tmp_path, timeout_s=90.0) == [3000] * world
