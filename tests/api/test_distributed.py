"""DDP and fully_shard around an optimized model, and optimize around them, train as without on two gloo ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fusewright
from tests.api.nets import WIDTH
from tests.parallel.ranks import run_ranks
from tests.runtime.dispatch_models import cheap

STEPS = 3
SITUATIONS = (
    "DistributedDataParallel(optimize(model))",
    "optimize(DistributedDataParallel(model))",
    "fully_shard(optimize(model))",
    "optimize(fully_shard(model))",
)


class Block(nn.Module):
    """A linear layer; a class of our own, since Dynamo never starts a graph in a frame of torch's."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width_in, width_out)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, width_in) -> (B, width_out)."""
        return nn.functional.gelu(self.linear(x))


class Stack(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Block(WIDTH, 16)
        self.two = Block(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, WIDTH) -> (B, 3)."""
        y: Tensor = self.head(self.two(self.one(x)))
        return y


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Stack()


def _shard(model: nn.Module, world: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (world,))
    for block in list(model.children())[:2]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _train(model: nn.Module, rank: int) -> tuple[list[float], list[Tensor]]:
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = nn.functional.cross_entropy(model(x), torch.arange(4) % 3)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [_whole(p) for p in model.parameters()]


class Folded(nn.Module):
    """What `frozen_weights` folds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, 16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, WIDTH) -> (B, 16)."""
        y: Tensor = self.norm(self.linear(x))
        return y


def _frozen(world: int) -> dict[str, Any]:
    """A sharded model whose weights change although they were promised not to."""
    folded = Folded().eval()
    plain = copy.deepcopy(folded)
    fully_shard(folded, mesh=init_device_mesh("cpu", (world,)))
    cheap(folded, frozen_weights=True)
    x, results = torch.ones(4, WIDTH), []
    with torch.no_grad():
        for factor in (1.0, 2.0):
            for model in (folded, plain):
                for parameter in model.parameters():
                    parameter.mul_(factor)
            results.append((folded(x), plain(x)))
    return {"results": results, "fallbacks": fusewright.explain(folded).to_dict()["fallbacks"]}


def work(rank: int, world: int) -> dict[str, Any]:
    """Train in every situation, on one rank of `world`."""
    reference = DistributedDataParallel(_model())
    out: dict[str, Any] = {"eager": _train(reference, rank)}
    for situation in SITUATIONS:
        model = _model()
        if situation == "DistributedDataParallel(optimize(model))":
            optimized = cheap(model)
            trained: nn.Module = DistributedDataParallel(optimized)
        elif situation == "optimize(DistributedDataParallel(model))":
            trained = optimized = cheap(DistributedDataParallel(model))
        elif situation == "fully_shard(optimize(model))":
            trained = optimized = _shard(cheap(model), world)
        else:
            trained = optimized = cheap(_shard(model, world))
        losses, parameters = _train(trained, rank)
        data = fusewright.explain(optimized).to_dict()
        kinds = sorted({f["kind"] for f in data["fallbacks"]})
        out[situation] = (losses, parameters, data["calls"], data["dispatched"], kinds)
    out["frozen"] = _frozen(world)
    return copy.deepcopy(out)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw."""
    return run_ranks(work, 2, tmp_path_factory.mktemp("ranks"), timeout_s=400)


@pytest.mark.multiprocess
@pytest.mark.parametrize("situation", SITUATIONS)
def test_training_is_that_of_the_plain_model(ranks: list[dict[str, Any]], situation: str) -> None:
    for result in ranks:
        losses, parameters = result["eager"]
        torch.testing.assert_close(result[situation][0], losses, rtol=1e-4, atol=1e-5)
        for one, other in zip(result[situation][1], parameters, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.multiprocess
@pytest.mark.parametrize("situation", SITUATIONS)
def test_graphs_ran_and_only_the_hooks_of_sharding_break_them(ranks: list[dict[str, Any]], situation: str) -> None:
    for result in ranks:
        _, _, calls, dispatched, kinds = result[situation]
        assert calls == STEPS
        assert dispatched >= STEPS
        assert kinds == ([] if "shard" not in situation and not situation.startswith("optimize") else kinds)
        assert set(kinds) <= {"graph_break", "skipped_frame"}


@pytest.mark.multiprocess
def test_weights_that_fsdp_gathers_are_never_taken_for_frozen(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        for found, expected in result["frozen"]["results"]:
            torch.testing.assert_close(found, expected)
        reasons = [f["reason"] for f in result["frozen"]["fallbacks"] if f["kind"] == "frozen_weights"]
        assert reasons == [
            "fully_shard gathers weights anew at each call, so that nothing computed from them can be kept"
        ]
