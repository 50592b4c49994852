"""Small torch subjects whose accuracy is known, built inside real worker processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusewright.autotune.plan import Choose
from fusewright.autotune.trial import Role
from fusewright.capture.shapes import DimRange, ShapeBucket
from fusewright.capture.variant import GraphVariant
from fusewright.workload import ADVERSARIAL_SEED, Inputs, Workload


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


def toy_inputs(length: int, seed: int) -> Inputs:
    return (torch.randn(length, 8, generator=torch.Generator().manual_seed(seed % 1000)).requires_grad_(),), {}


def toy_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


TOY = Workload("toy", "small", toy_model, toy_inputs, (4, 8), {"input": {0: "rows"}}, lambda y: y.square().mean())
WIDE = Workload(
    "wide",
    "small",
    lambda: nn.Sequential(nn.Linear(8, 1 << 18), nn.ReLU()),
    toy_inputs,
    (4,),
    {"input": {0: "rows"}},
    torch.sum,
)


def make_toy() -> Workload:
    return TOY


def optimize_eagerly(model: nn.Module, *, choose: Choose, dims: Any, buckets: Any, verify: str) -> nn.Module:
    """Asks for a variant at the first call, as the backend does, and then runs the model as it is.

    An option `scale` of the variant makes it wrong.
    """
    assert dims == TOY.dims
    assert buckets == {"rows": [4, 8]}
    assert verify == "off"
    asked: list[GraphVariant] = []

    def ask(module: nn.Module, args: Any) -> None:
        if not asked:
            asked.append(choose("f" * 32, ShapeBucket((DimRange("rows", 2, 4),)), torch.device("cpu")))

    def spoil(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * dict(asked[0].options).get("scale", 1.0)

    model.register_forward_pre_hook(ask)
    model.register_forward_hook(spoil)
    return model


def optimize_nothing(model: nn.Module, **options: Any) -> nn.Module:
    return model
