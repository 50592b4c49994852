"""A pass that would fix a dynamic size fails and is left out: nobody would check the guard that it adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import fx

from fusewright.capture.values import shape_env_of, tensor_of
from fusewright.config import read_settings
from fusewright.fusion.match.attention.fuse import FuseAttention
from fusewright.passes.base import Pass, PassContext
from fusewright.pipeline.pipeline import Pipeline


class AsksForASize(Pass):
    """Looks at a size as if it were a number."""

    name: ClassVar[str] = "asks_for_a_size"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        for node in gm.graph.nodes:
            tensor = tensor_of(node)
            if tensor is not None and tensor.dim() > 1 and tensor.shape[1] == 24:
                raise AssertionError("not reached where the size is dynamic")
        return 0


def captured(function: Callable[..., Any], *args: torch.Tensor) -> fx.GraphModule:
    """The graph of `function` with dimension 1 of its first argument dynamic."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.mark_dynamic(args[0], 1)
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    return graphs[0]


@pytest.mark.parametrize("one", [AsksForASize(), FuseAttention()], ids=lambda p: p.name)
def test_capture_knows_nothing_new_after_a_pass(one: Pass) -> None:
    def attention_with_a_cast_bias(x: torch.Tensor) -> torch.Tensor:
        bias = x.sum(-1, keepdim=True).to(torch.float64).to(torch.float32)
        return ((x @ x.mT) * 0.25 * bias + bias).softmax(-1) @ x

    gm = captured(attention_with_a_cast_bias, torch.randn(2, 24, 8))
    env = shape_env_of(gm)
    known = (len(env.guards), dict(env.replacements), env.frozen)
    _, result = Pipeline((one,), read_settings()).rewrite(lambda: gm, [one], PassContext(), "g")
    assert (len(env.guards), dict(env.replacements), env.frozen) == known
    failed = [name for name, reason in result.failures if "would fix a dynamic size" in reason]
    assert failed == (["asks_for_a_size"] if isinstance(one, AsksForASize) else [])
