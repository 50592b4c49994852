"""A `TrainStep` beside the eager loop that it stands for, on equal copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

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
        return self.outer(self.dropout(functional.gelu(self.norm(self.inner(x_BD)))))


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
