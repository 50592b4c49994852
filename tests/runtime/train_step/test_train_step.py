"""`TrainStep` against the eager loop it stands for: losses, parameters, buffers, optimizer state, reports."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from fusewright.runtime.train_step import TrainStep
from tests.runtime.train_step.step_pair import TOLERANCE, Make, Mlp, Pair, adam, adamw, batches, sgd, square


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return functional.relu_(self.norm(self.conv(x_BCHW))).mean((2, 3))


OPTIMIZERS = {
    "sgd": sgd(),
    "sgd-decay-maximize": sgd(weight_decay=0.1, maximize=True),
    "sgd-momentum": sgd(momentum=0.9),
    "sgd-dampening": sgd(momentum=0.9, dampening=0.5),
    "sgd-nesterov": sgd(momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd-fused": sgd(momentum=0.9, fused=True),
    "adam": adam(),
    "adam-decay-amsgrad": adam(weight_decay=0.1, amsgrad=True),
    "adam-foreach-betas": adam(foreach=True, betas=(0.8, 0.95), eps=1e-6),
    "adam-tensor-lr": adam(lr=torch.tensor(0.01)),
    "adamw": adamw(),
    "adamw-amsgrad-maximize": adamw(amsgrad=True, maximize=True, weight_decay=0.05),
    "adamw-fused": adamw(fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_match_the_eager_loop(make: Make) -> None:
    report = Pair(Mlp(), make).train()
    assert report["fallbacks"] == []
    assert (report["calls"], report["compiled_calls"]) == (5, 5 - len(report["graphs"]))
    assert all(graph["updated"] == 6 for graph in report["graphs"])


def test_one_graph_for_all_steps_of_an_optimizer() -> None:
    for make in (sgd(momentum=0.9), adam(), adamw(amsgrad=True)):
        assert len(Pair(Mlp(), make).train()["graphs"]) == 1


def test_inductor_matches_the_eager_loop_with_dropout_and_clipping() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.3))
    report = Pair(model, adamw(), clip=0.1, lowering="inductor").train(3)
    assert report["fallbacks"] == []
    assert (report["compiled_calls"], report["graphs"][0]["random"]) == (2, True)


def test_accumulation_and_clipping() -> None:
    pair = Pair(Mlp(), sgd(momentum=0.9), accumulate=3, clip=0.05)
    assert len(pair.train(4)["graphs"]) == 3  # first gradients, more gradients, update
    assert pair.model.inner.weight.grad is not None
    assert len(pair.train(8)["graphs"]) == 3


def test_gradients_that_were_there_before_are_added_to() -> None:
    pair = Pair(Mlp(), sgd())
    for model in (pair.model, pair.twin):
        square(model(torch.ones(5, 4))).backward()
    assert pair.train(3)["calls"] == 3  # `train` compares parameters and losses with the eager twin


def test_schedulers_and_edited_groups_do_not_recompile() -> None:
    pair = Pair(Mlp(), adamw(), verify="off")  # then no eager step tells the scheduler of one
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (pair.optimizer, pair.twin_optimizer)]
    for i, batch in enumerate(batches(5)):
        pair.both(batch)
        for scheduler in schedulers:
            scheduler.step()
        for optimizer in (pair.optimizer, pair.twin_optimizer):
            optimizer.param_groups[0]["weight_decay"] = 0.01 * (i + 1)
            optimizer.param_groups[0]["betas"] = (0.9 - 0.05 * i, 0.99)
    pair.check()
    assert len(pair.step.report()["graphs"]) == 1


def test_several_groups_with_own_settings() -> None:
    def make(parameters: Any) -> Optimizer:
        first, *rest = parameters
        return torch.optim.AdamW([{"params": [first], "weight_decay": 0.0}, {"params": rest, "lr": 0.1}], lr=0.01)

    pair = Pair(Mlp(), make)
    pair.train(3)
    for optimizer, model in ((pair.optimizer, pair.model), (pair.twin_optimizer, pair.twin)):
        assert len(optimizer.param_groups) == 2
        moved = optimizer.param_groups[1]["params"].pop()
        assert moved is model.outer.bias
        optimizer.add_param_group({"params": [moved], "lr": 0.5})
    pair.train(3)


def test_frozen_layers_and_thawing_them() -> None:
    pair = Pair(Mlp(), adam())
    before = pair.model.inner.weight.detach().clone()
    for model in (pair.model, pair.twin):
        model.inner.requires_grad_(False)
    pair.train(2)
    assert torch.equal(pair.model.inner.weight, before)
    for model in (pair.model, pair.twin):
        model.inner.requires_grad_(True)
    report = pair.train(3)  # from here on two step counters differ
    assert not torch.equal(pair.model.inner.weight, before)
    assert len(report["graphs"]) == 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, ids_BT: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.embed(ids_BT)).flatten(0, 1), ids_BT.flatten())


def test_tied_weights_and_unused_parameters() -> None:
    pair = Pair(Tied(), adam(), loss_fn=lambda loss: loss)
    for _ in range(3):
        pair.both(torch.randint(7, (2, 5)))
    pair.check()
    assert pair.model.head.weight is pair.model.embed.weight
    assert pair.model.unused not in pair.optimizer.state


class Same(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))

    def forward(self, x_3: Tensor) -> Tensor:
        return (self.first + self.second) * x_3


def test_equal_gradients_do_not_share_memory() -> None:
    pair = Pair(Same(), sgd(), accumulate=3, verify="off")
    pair.train(2, 3)
    pair.train(4, 3)
    assert pair.model.first.grad is None or pair.model.first.grad.data_ptr() != pair.model.second.grad.data_ptr()


def test_batch_norm_in_training_and_evaluation() -> None:
    pair = Pair(Conv(), sgd(momentum=0.9), lowering="aot_eager")
    pair.train(3, 2, 2, 6, 6)
    assert pair.model.norm.num_batches_tracked == 3
    for model in (pair.model, pair.twin):
        model.eval()
    report = pair.train(2, 2, 2, 6, 6)
    assert pair.model.norm.num_batches_tracked == 3
    assert len(report["graphs"]) == 2


def test_dropout_draws_the_eager_numbers_and_follows_its_setting() -> None:
    pair = Pair(Mlp(dropout=0.5), sgd())
    pair.train(3)
    for model in (pair.model, pair.twin):
        model.dropout.p = 0.1
    assert len(pair.train(3)["graphs"]) == 2


def test_a_new_shape_or_dtype_compiles_a_new_graph() -> None:
    pair = Pair(Mlp(), sgd())
    pair.train(2, 5, 4)
    pair.train(2, 6, 4)
    assert len(pair.train(2, 5, 4)["graphs"]) == 2
    for model in (pair.model, pair.twin):
        model.double()
    for batch in batches(2):
        pair.both(batch.double())
    assert len(pair.step.report()["graphs"]) == 3


def test_checkpoint_and_resume() -> None:
    pair = Pair(Mlp(), adamw())
    pair.train(3)
    file = io.BytesIO()
    torch.save({"model": pair.model.state_dict(), "optimizer": pair.optimizer.state_dict()}, file)
    for batch in batches(2):
        pair.step(batch)  # the twin stays where the checkpoint is
    file.seek(0)
    saved = torch.load(file)
    pair.model.load_state_dict(saved["model"])
    pair.optimizer.load_state_dict(saved["optimizer"])
    pair.check()
    assert len(pair.train(3)["graphs"]) == 1


def test_autocast_outside_and_checkpointing_inside() -> None:
    class Checkpointed(Mlp):
        def forward(self, x_BD: Tensor) -> Tensor:
            return self.outer(checkpoint(self.inner, x_BD, use_reentrant=False))

    pair = Pair(Checkpointed(), sgd())
    pair.train(3)
    for batch in batches(3):
        with torch.autocast(
            "cpu", dtype=torch.bfloat16
        ):  # one a step: eager's casts of weights live as long as it does
            pair.both(batch)
    pair.check()
    assert len(pair.step.report()["graphs"]) == 2


def test_hooks_on_modules_and_gradients() -> None:
    pair = Pair(Mlp(), sgd())
    pair.train(2)
    for model in (pair.model, pair.twin):
        model.inner.register_forward_hook(lambda module, args, out: out * 2)
        model.inner.weight.register_hook(lambda grad: grad * 3)
    assert len(pair.train(2)["graphs"]) == 2


def test_plain_tensor_attributes_are_inputs() -> None:
    class Scaled(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.tensor(2.0)

        def forward(self, x_BD: Tensor) -> Tensor:
            return super().forward(x_BD) * self.scale

    pair = Pair(Scaled(), sgd())
    pair.train(2)
    for model in (pair.model, pair.twin):
        model.scale = torch.tensor(-1.0)
    assert len(pair.train(2)["graphs"]) == 1


def test_loss_arguments_and_loss_with_parameters() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(1.0))

        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            return functional.cross_entropy(out * self.temperature, target)

    model, loss_fn = Mlp(), Loss()
    twin, twin_loss = copy.deepcopy(model), copy.deepcopy(loss_fn)
    optimizer = torch.optim.SGD([*model.parameters(), *loss_fn.parameters()], 0.1)
    twin_optimizer = torch.optim.SGD([*twin.parameters(), *twin_loss.parameters()], 0.1)
    step = TrainStep(model, loss_fn, optimizer, lowering="eager", strict=True)
    target = torch.tensor([0, 1, 2, 0, 1])
    for batch in batches(3):
        step(batch, loss_args=(target,))
        twin_loss(twin(batch), target).backward()
        twin_optimizer.step()
        twin_optimizer.zero_grad()
    assert step.report()["compiled_calls"] == 2
    torch.testing.assert_close(loss_fn.temperature, twin_loss.temperature)
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()))


def test_grad_scaler_skips_steps_with_infinities() -> None:
    model = Mlp()
    twin = copy.deepcopy(model)
    scaler, twin_scaler = (torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2))
    optimizer, twin_optimizer = adamw()(model.parameters()), adamw()(twin.parameters())
    step = TrainStep(model, square, optimizer, clip=0.1, scaler=scaler, lowering="eager", strict=True)
    for i, batch in enumerate(batches(6)):
        batch = batch * (float("inf") if i == 3 else 1.0)
        step(batch)
        twin_scaler.scale(square(twin(batch))).backward()
        twin_scaler.unscale_(twin_optimizer)
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        twin_scaler.step(twin_optimizer)
        twin_scaler.update()
        twin_optimizer.zero_grad()
        assert scaler.get_scale() == twin_scaler.get_scale()
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()), atol=TOLERANCE, rtol=TOLERANCE)
    assert optimizer.state[model.inner.weight]["step"] == 5
    assert step.report()["compiled_calls"] == 5


def test_keyword_arguments_and_constants_are_part_of_the_signature() -> None:
    class Scaled(Mlp):
        def forward(self, x_BD: Tensor, scale: float = 1.0, shift: Tensor | None = None) -> Tensor:
            out = super().forward(x_BD) * scale
            return out if shift is None else out + shift

    pair = Pair(Scaled(), sgd())
    for scale in (2.0, 3.0, 2.0):
        pair.both(torch.ones(5, 4), scale=scale)
    pair.both(torch.ones(5, 4), shift=torch.ones(3))
    pair.both(torch.ones(5, 4), shift=torch.zeros(3))
    pair.check()
    assert len(pair.step.report()["graphs"]) == 3


def test_values_that_the_loss_closes_over_are_part_of_the_signature() -> None:
    weight = 1.0

    def loss_fn(out: Tensor) -> Tensor:
        return square(out) * weight

    pair = Pair(Mlp(), sgd(), loss_fn=loss_fn)
    pair.train(2)
    weight = 2.0
    assert len(pair.train(2)["graphs"]) == 2
