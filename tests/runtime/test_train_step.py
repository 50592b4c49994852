"""`TrainStep` against the eager loop it stands for: losses, parameters, buffers, optimizer state, reports."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from fusewright.errors import CaptureError, FallbackError, UnknownNameError, UserInputError, VerificationError
from fusewright.runtime import train_step as train_step_module
from fusewright.runtime.train_step import TrainStep

Make = Callable[[Any], Optimizer]

TOLERANCE = 1e-6


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(dropout)
        self.outer = nn.Linear(8, 3)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.outer(self.dropout(F.gelu(self.norm(self.inner(x_BD)))))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.relu_(self.norm(self.conv(x_BCHW))).mean((2, 3))


def square(out: Tensor) -> Tensor:
    return (out - 0.5).square().mean()


def batches(count: int, *shape: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(*(shape or (5, 4)), generator=generator)


class Pair:
    """A `TrainStep` and the eager loop, on equal copies."""

    def __init__(self, model: nn.Module, make: Make, **options: Any) -> None:
        self.model, self.twin = model, copy.deepcopy(model)
        self.optimizer, self.twin_optimizer = make(model.parameters()), make(self.twin.parameters())
        self.accumulate, self.clip = options.get("accumulate", 1), options.get("clip")
        self.loss_fn = options.pop("loss_fn", square)
        self.calls = 0
        options = {"lowering": "eager", "strict": True} | options
        self.step = TrainStep(self.model, self.loss_fn, self.optimizer, **options)

    def eager(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = self.loss_fn(self.twin(*args, **kwargs)) / self.accumulate
        loss.backward()
        self.calls += 1
        if self.calls % self.accumulate == 0:
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.twin.parameters(), self.clip)
            self.twin_optimizer.step()
            self.twin_optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def both(self, *args: Any, **kwargs: Any) -> None:
        state = torch.get_rng_state()
        loss = self.step(*args, **kwargs)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        expected = self.eager(*args, **kwargs)
        assert not loss.requires_grad
        torch.testing.assert_close(loss, expected, atol=TOLERANCE, rtol=TOLERANCE)
        assert torch.equal(after, torch.get_rng_state()), "the step drew other random numbers than the eager loop"

    def check(self) -> None:
        close = {"atol": TOLERANCE, "rtol": 1e-5}
        torch.testing.assert_close(dict(self.model.state_dict()), dict(self.twin.state_dict()), **close)
        mine, twin = self.optimizer.state_dict(), self.twin_optimizer.state_dict()
        assert [list(s) for s in mine["state"].values()] == [list(s) for s in twin["state"].values()]
        assert mine["param_groups"] == twin["param_groups"]
        torch.testing.assert_close(mine["state"], twin["state"], **close)
        for (name, p), q in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, **close)

    def train(self, count: int = 5, *shape: int) -> dict[str, Any]:
        for batch in batches(count, *shape):
            self.both(batch)
        self.check()
        return self.step.report()


def sgd(**options: Any) -> Make:
    return lambda parameters: torch.optim.SGD(parameters, **{"lr": 0.1} | options)


def adam(**options: Any) -> Make:
    return lambda parameters: torch.optim.Adam(parameters, **{"lr": 0.01} | options)


def adamw(**options: Any) -> Make:
    return lambda parameters: torch.optim.AdamW(parameters, **{"lr": 0.01} | options)


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
    pair.train(3)


def test_schedulers_and_edited_groups_do_not_recompile() -> None:
    pair = Pair(Mlp(), adamw())
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
        return F.cross_entropy(self.head(self.embed(ids_BT)).flatten(0, 1), ids_BT.flatten())


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
    pair = Pair(Same(), sgd(), accumulate=3)
    pair.train(2, 3)
    pair.train(4, 3)


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


def test_checkpointed_dropout_runs_eagerly_and_right() -> None:
    class Checkpointed(Mlp):
        def forward(self, x_BD: Tensor) -> Tensor:
            return checkpoint(super().forward, x_BD, use_reentrant=False)

    report = Pair(Checkpointed(dropout=0.5), sgd(), strict=False).train(3)
    assert [(f["kind"], f["count"]) for f in report["fallbacks"]] == [("capture", 3)]
    assert "random number generator" in report["fallbacks"][0]["reason"]


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
            return F.cross_entropy(out * self.temperature, target)

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


def test_other_optimizers_run_eagerly_and_are_counted() -> None:
    def rmsprop(parameters: Any) -> Optimizer:
        return torch.optim.RMSprop(parameters, lr=0.01)

    report = Pair(Mlp(), rmsprop, strict=False).train(3)
    assert report["compiled_calls"] == 2
    assert [(f["kind"], f["where"], f["count"]) for f in report["fallbacks"]] == [("optimizer", "RMSprop", 3)]
    model = Mlp()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FallbackError, match="RMSprop is not one of"):
        TrainStep(model, square, rmsprop(model.parameters()), strict=True)(torch.ones(5, 4))
    torch.testing.assert_close(dict(model.state_dict()), dict(before), atol=0, rtol=0)


class Branch(Mlp):
    def forward(self, x_BD: Tensor) -> Tensor:
        out = super().forward(x_BD)
        return out * 2 if out.sum() > 0 else out


class Counting(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x_BD: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x_BD) * self.calls


OUTSIDE = torch.tensor(3.0)


class Outside(Mlp):
    def forward(self, x_BD: Tensor) -> Tensor:
        return super().forward(x_BD) * OUTSIDE


@pytest.mark.parametrize(
    ("kind", "reason"), [(Branch, "DataDependent"), (Counting, "sets attribute 'calls'"), (Outside, "FakeTensor")]
)
def test_what_no_graph_can_hold_runs_eagerly(kind: type[Mlp], reason: str) -> None:
    pair = Pair(kind(), sgd(), strict=False)
    report = pair.train(4)
    assert report["compiled_calls"] == 0
    assert {f["kind"] for f in report["fallbacks"]} == {"capture"}
    assert sum(f["count"] for f in report["fallbacks"]) == 4
    assert reason in report["fallbacks"][0]["reason"]
    model = kind()
    with pytest.raises(CaptureError, match=reason):
        TrainStep(model, square, sgd()(model.parameters()), strict=True)(torch.ones(5, 4))


def test_a_wrong_lowering_is_caught_and_the_eager_result_used(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = train_step_module._lower

    def broken(*args: Any) -> Callable[..., Any]:
        run = lower(*args)

        def wrong(*tensors: Tensor) -> Any:
            results = run(*tensors)
            tensors[0].add_(0.1)
            return results

        return wrong

    monkeypatch.setattr(train_step_module, "_lower", broken)
    report = Pair(Mlp(), sgd(), strict=False).train(3)
    assert [(f["kind"], f["count"]) for f in report["fallbacks"]] == [("verification", 3)]
    with pytest.raises(VerificationError, match="param 0"):
        Pair(Mlp(), sgd()).train(1)
    unchecked = Pair(Mlp(), sgd(), verify="off")
    with pytest.raises(AssertionError):
        unchecked.train(2)


def test_errors_of_the_model_come_through() -> None:
    model = Mlp()
    step = TrainStep(model, square, sgd()(model.parameters()), lowering="eager")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step(torch.ones(5, 3))
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        step(torch.ones(5, 4))


def test_bad_arguments_are_named() -> None:
    model = Mlp()
    optimizer = sgd()(model.parameters())
    for bad, name in (
        ((square, square, optimizer, {}), "model"),
        ((model, None, optimizer, {}), "loss_fn"),
        ((model, square, model, {}), "optimizer"),
        ((model, square, optimizer, {"accumulate": 0}), "accumulate"),
        ((model, square, optimizer, {"clip": -1.0}), "clip"),
        ((model, square, optimizer, {"verify": "always"}), "verify"),
    ):
        *arguments, options = bad
        with pytest.raises(UserInputError, match=name):
            TrainStep(*arguments, **options)
    with pytest.raises(UnknownNameError, match="Did you mean 'inductor'"):
        TrainStep(model, square, optimizer, lowering="inducter")


def test_signatures_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_step_module, "MAX_SIGNATURES", 2)
    pair = Pair(Mlp(), sgd(), strict=False)
    for size in (2, 3, 4, 5):
        pair.train(1, size, 4)
    assert [(f["kind"], f["count"]) for f in pair.step.report()["fallbacks"]] == [("signature_limit", 2)]
