"""A sharded model computes what the whole one does, on uneven shards too, and keeps its names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fusewright.errors import UnknownNameError, UserInputError
from fusewright.parallel import shard
from tests.parallel.llama import Llama, tokens
from tests.parallel.ranks import run_ranks

MODES = ["fully_shard", "replicate"]


def losses_and_gradients(model: nn.Module, rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(tokens(rank, 0)).float().square().mean()
    loss.backward()
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        if isinstance(grad, DTensor):
            assert isinstance(parameter, DTensor)
            assert grad.placements == parameter.placements
            gradients[name] = grad.full_tensor()
        else:
            dist.all_reduce(grad)
            gradients[name] = grad / dist.get_world_size()
    return loss.detach(), gradients


def work(rank: int, world: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    whole = Llama()
    facts: dict[str, Any] = {"whole": losses_and_gradients(copy.deepcopy(whole), rank)}
    for mode in MODES:
        model = copy.deepcopy(whole)
        parts = shard(model, mesh, mode=mode)
        stored = {n: p.placements[0] for n, p in model.named_parameters() if isinstance(p, DTensor)}
        facts[mode] = {
            "same_object": parts is model,
            "is_instance": isinstance(model, Llama),
            "keys": list(model.state_dict()) == list(whole.state_dict()),
            "tied": model.head._parameters["weight"] is model.embedding._parameters["weight"],
            "placements": set(stored.values()),
            "all_moved": len(stored) == len(list(whole.parameters())),
            "result": losses_and_gradients(model, rank),
        }
    model = shard(copy.deepcopy(whole), mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    facts["bf16_out"] = model(tokens(rank, 0)).dtype
    facts["bf16_grads"] = {g.dtype for g in losses_and_gradients(model, rank)[1].values()}
    zeros = {name: torch.zeros_like(p) for name, p in model.state_dict().items()}
    model.load_state_dict(zeros)
    facts["loaded"] = float(model(tokens(rank, 0)).abs().sum())
    facts["twice"] = _message(lambda: shard(model, mesh))
    facts["mode"] = _message(lambda: shard(nn.Linear(2, 2), mesh, mode="fuly_shard"))
    return facts


def _message(call: Any) -> tuple[str, str]:
    try:
        call()
    except UserInputError as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(work, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.multiprocess
@pytest.mark.parametrize("mode", MODES)
def test_loss_and_mean_gradients_are_those_of_the_whole_model(ranks: list[dict[str, Any]], mode: str) -> None:
    for facts in ranks:
        loss, gradients = facts[mode]["result"]
        whole_loss, whole_gradients = facts["whole"]
        assert torch.equal(loss, whole_loss)
        assert gradients.keys() == whole_gradients.keys()
        # Halving before the sum and after it are the same bits: a power of two, and two numbers commute. The tied
        # weight's two uses are summed over ranks one by one, so its additions are associated otherwise.
        for name, gradient in gradients.items():
            if name == "embedding.weight":
                torch.testing.assert_close(gradient, whole_gradients[name])
            else:
                assert torch.equal(gradient, whole_gradients[name]), name


@pytest.mark.multiprocess
@pytest.mark.parametrize("mode", MODES)
def test_names_object_class_and_ties_stay(ranks: list[dict[str, Any]], mode: str) -> None:
    for facts in ranks:
        checks = ("same_object", "is_instance", "keys", "tied", "all_moved")
        assert {check: facts[mode][check] for check in checks} == dict.fromkeys(checks, True)
        assert facts[mode]["placements"] == {Shard(0) if mode == "fully_shard" else Replicate()}


@pytest.mark.multiprocess
def test_dtypes_of_compute_and_gradients(ranks: list[dict[str, Any]]) -> None:
    for facts in ranks:
        assert facts["bf16_out"] is torch.bfloat16
        assert facts["bf16_grads"] == {torch.float32}


@pytest.mark.multiprocess
def test_loading_a_state_dict_takes_effect(ranks: list[dict[str, Any]]) -> None:
    assert [facts["loaded"] for facts in ranks] == [0.0, 0.0]


@pytest.mark.multiprocess
def test_wrong_use_is_refused(ranks: list[dict[str, Any]]) -> None:
    for facts in ranks:
        assert facts["twice"][0] == UserInputError.__name__
        assert "a DTensor already" in facts["twice"][1]
        assert facts["mode"][0] == UnknownNameError.__name__
        assert "Did you mean 'fully_shard'?" in facts["mode"][1]


@pytest.fixture
def fake_mesh(fake_world: int) -> Any:
    return init_device_mesh("cpu", (2, fake_world // 2), mesh_dim_names=("dp", "tp"))


def test_meshes_and_modules_that_do_not_fit(fake_mesh: Any) -> None:
    layer, recurrent = nn.Linear(2, 2), nn.Sequential(nn.LSTM(2, 2))
    with pytest.raises(UserInputError, match="mesh of one dimension, got 2"):
        shard(layer, fake_mesh)
    with pytest.raises(UserInputError, match="0 is LSTM"):
        shard(recurrent, fake_mesh["dp"])
    assert not any(isinstance(p, DTensor) for m in (layer, recurrent) for p in m.parameters())
