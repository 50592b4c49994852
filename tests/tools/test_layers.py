"""The first bad layer is found by name, and the pass that spoilt it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import fx, nn

from fusewright.api import optimize_with
from fusewright.capture.variant import GraphVariant, Lowering
from fusewright.config import Numerics
from fusewright.passes.base import Pass, PassContext
from fusewright.tools.layers import Call, first_bad_layer


class SpoilTanh(Pass):
    """Takes sin for tanh: close for small values, and wrong."""

    name: ClassVar[str] = "spoil_tanh"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        found = [n for n in gm.graph.nodes if n.target in (torch.tanh, "tanh")]
        for node in found:
            node.target = torch.sin if node.op == "call_function" else "sin"
        return len(found)


class Inner(nn.Module):
    """A linear layer, and tanh where `tanh` is set."""

    def __init__(self, tanh: bool) -> None:
        super().__init__()
        self.tanh = tanh
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.tanh(y) if self.tanh else y

    def extra_repr(self) -> str:
        return f"tanh={self.tanh}"


class Outer(nn.Module):
    """Four inner layers, the third with tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Inner(number == 2) for number in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def spoiling(module: nn.Module) -> nn.Module:
    variant = GraphVariant(lowering=Lowering.AOT_EAGER)
    return optimize_with(module, choose=lambda *_: variant, passes=[SpoilTanh()], verify="off")


def honest(module: nn.Module) -> nn.Module:
    return optimize_with(module, choose=lambda *_: GraphVariant(lowering=Lowering.AOT_EAGER), verify="off")


def test_the_layer_that_a_pass_spoils_is_named() -> None:
    torch.manual_seed(0)
    found = first_bad_layer(Outer(), Call((3 * torch.randn(4, 8),), {}), spoiling, training=True)
    assert found is not None
    assert (found.name, found.kind) == ("layers.2", "Inner")
    assert "the lowering is" in str(found), "the product's own passes are not at fault"


def test_a_model_that_agrees_has_no_bad_layer() -> None:
    assert first_bad_layer(Outer(), Call((torch.randn(4, 8),), {}), honest, training=True) is None
