"""Small torch subjects whose accuracy is known, built inside real worker processes."""

from __future__ import annotations

from typing import Any

import torch

from fusewright.autotune.trial import Role
from fusewright.workload import ADVERSARIAL_SEED


class Product:
    """A linear layer; the candidate is off by `error`, relative to its largest output, in whatever `where` names."""

    def __init__(self, error: float, where: str, training: bool) -> None:
        self.error, self.where, self.training = error, where, training
        self.runs = 0

    def step(self) -> None:
        self.outputs(0, Role.CANDIDATE)

    def outputs(self, seed: int, role: Role) -> dict[str, Any]:
        self.runs += 1
        generator = torch.Generator().manual_seed(seed % 1000)
        dtype = torch.float64 if role is Role.FLOAT64 else torch.float32
        x = torch.randn(64, 32, generator=generator).to(dtype) * (100 if seed == ADVERSARIAL_SEED else 1)
        weight = torch.randn(32, 16, generator=generator).to(dtype).requires_grad_(self.training)
        found: dict[str, Any] = {"output": (x @ weight,), "buffers": {"count": torch.tensor(seed)}}
        if self.training:
            found["output"][0].square().mean().backward()
            found["gradients"] = {"weight": weight.grad}
        if role is Role.CANDIDATE:
            self._spoil(found, seed)
        if self.where == "eager" and role is Role.EAGER:
            found["output"] = (found["output"][0] + self.runs * 1e-6,)
        return found

    def _spoil(self, found: dict[str, Any], seed: int) -> None:
        output = found["output"][0].detach().clone()
        if self.where == "output" or (self.where == "hostile" and seed == ADVERSARIAL_SEED):
            output[0, 0] += self.error * output.abs().max()
        elif self.where == "nan":
            output[0, 0] = float("nan")
        elif self.where == "gradient":
            found["gradients"]["weight"] = found["gradients"]["weight"] * (1 + self.error)
        elif self.where == "buffer":
            found["buffers"]["count"] += 1
        elif self.where == "missing":
            del found["buffers"]["count"]
        elif self.where == "unsteady":
            output += self.runs * 1e-7
        found["output"] = (output,)


def product(error: float = 0.0, where: str = "", training: bool = False) -> Product:
    return Product(error, where, training)
