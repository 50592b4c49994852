"""Training loops as users write them give the losses that they give without optimize."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import fusewright
from tests.api.nets import WIDTH, Net, batch
from tests.runtime.dispatch_models import cheap

STEPS = 6
Loop = Callable[[nn.Module], list[float]]


def compare_losses(loop: Loop, make: Callable[[], nn.Module] = Net) -> nn.Module:
    """Run `loop` with and without optimize; losses and final parameters must agree. Returns the optimized model."""
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    cheap(model)
    torch.testing.assert_close(loop(model), loop(reference), rtol=1e-4, atol=1e-5)
    for (name, one), (_, other) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    data = fusewright.explain(model).to_dict()
    assert data["calls"] > 0
    assert data["dispatched"] >= data["calls"]
    assert data["fallbacks"] == []
    return model


def loss_of(model: nn.Module, seed: int) -> Tensor:
    return nn.functional.cross_entropy(model(batch(seed=seed)), torch.arange(5) % 3)


def test_plain_steps_and_buffers_counted_once() -> None:
    def loop(model: nn.Module) -> list[float]:
        optimizer, losses = AdamW(model.parameters(), 1e-2), []
        for seed in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, seed)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model = compare_losses(loop)
    assert model.get_submodule("norm").num_batches_tracked.item() == STEPS


def test_an_optimizer_built_before_optimize_steps_the_same_parameters() -> None:
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    losses: list[list[float]] = [[], []]
    for net, kept in zip((model, reference), losses, strict=True):
        optimizer = SGD(net.parameters(), 0.1, momentum=0.9)
        if net is model:
            cheap(net)
        for seed in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            loss = loss_of(net, seed)
            loss.backward()
            optimizer.step()
            kept.append(loss.item())
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)


def test_accumulation_clipping_and_scaler() -> None:
    def loop(model: nn.Module) -> list[float]:
        optimizer, scaler, losses = SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu"), []
        for seed in range(STEPS):
            loss = loss_of(model, seed) / 2
            scaler.scale(loss).backward()
            if seed % 2:
                scaler.unscale_(optimizer)
                losses.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model = compare_losses(loop)
    assert fusewright.explain(model).to_dict()["calls"] == STEPS


def test_autocast_training() -> None:
    def loop(model: nn.Module) -> list[float]:
        optimizer, losses = SGD(model.parameters(), 0.01), []
        for seed in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, seed)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    cheap(model)
    torch.testing.assert_close(loop(model), loop(reference), rtol=2e-2, atol=2e-2)


def test_averaged_model_copies_and_follows() -> None:
    averages: list[AveragedModel] = []

    def loop(model: nn.Module) -> list[float]:
        optimizer, losses = SGD(model.parameters(), 0.1), []
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        averages.append(average)
        for seed in range(STEPS):
            loss = loss_of(model, seed)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            losses += [loss.item(), loss_of(average.eval(), seed).item()]
        return losses

    compare_losses(loop)
    inner = averages[0].module
    assert fusewright.explain(inner).to_dict()["dispatched"] == STEPS


def test_layers_frozen_and_thawed_between_steps() -> None:
    def loop(model: nn.Module) -> list[float]:
        optimizer, losses = SGD(model.parameters(), 0.1), []
        for seed in range(STEPS):
            model.get_submodule("first").requires_grad_(seed % 2 == 0)
            loss = loss_of(model, seed)
            loss.backward()
            losses.append(sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model = compare_losses(loop)
    assert fusewright.explain(model).to_dict()["calls"] == STEPS


class Checkpointed(nn.Module):
    """A block that is recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, WIDTH) -> (B, 3)."""
        y: Tensor = self.last(checkpoint(self.block, x, use_reentrant=False))
        return y


def plain_loop(model: nn.Module) -> list[float]:
    optimizer, losses = SGD(model.parameters(), 0.1), []
    for seed in range(3):
        loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_checkpointing_inside_the_model() -> None:
    data = fusewright.explain(compare_losses(plain_loop, Checkpointed)).to_dict()
    assert data["dispatched"] == data["calls"] == 3  # the recomputation is part of the graph's backward


class Outer(nn.Module):
    """Checkpoints a module that is optimized itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        """x (B, WIDTH) -> (B, 3)."""
        return checkpoint(self.inner, x, use_reentrant=False)


def test_checkpointing_around_an_optimized_module() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    reference = Outer(copy.deepcopy(inner))
    model = Outer(cheap(inner))
    torch.testing.assert_close(plain_loop(model), plain_loop(reference), rtol=1e-4, atol=1e-5)
    data = fusewright.explain(inner).to_dict()
    assert data["dispatched"] == data["calls"] == 6  # forward and recomputation of three steps


def test_double_backward_raises_torchs_own_error() -> None:
    model = cheap(Net())
    x = batch().requires_grad_()
    with pytest.raises(RuntimeError, match=r"double backward|donated buffers"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
