"""Each constraint that fusewright/pipeline/order.py states is real: swapping the two passes loses something."""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fusewright.capture.graph import copy_graph
from fusewright.capture.variant import DEFAULT_VARIANT
from fusewright.passes.base import Pass, PassContext, Stage
from fusewright.pipeline.order import ORDER
from fusewright.pipeline.pipeline import PipelineResult
from fusewright.tools.pass_tester import capture
from tests.pipeline.little import pipeline


def run(gm: fx.GraphModule, passes: list[Pass], *, frozen: bool = False, device: str = "cuda") -> PipelineResult:
    line, ctx = pipeline(*passes), PassContext(device=device, frozen_weights=frozen)
    _, result = line.rewrite(lambda: copy_graph(gm), passes, ctx, "order")
    assert result.failures == []
    return result


def named(*names: str) -> list[Pass]:
    return [next(p for p in ORDER if p.name == name) for name in names]


def test_the_names_are_in_the_order_that_is_tested() -> None:
    frozen = ["fold_batch_norm", "fold_scale", "merge_linears"]
    names = ["canonicalize", *frozen, "fuse_rms_norm", "fuse_attention", "fuse_linear_cross_entropy"]
    assert [p.name for p in ORDER] == [*names, "bucket_collectives"]


def attention_of_idle_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = functional.dropout(q @ k.transpose(-1, -2) / math.sqrt(8), 0.5, False)
    return scores.softmax(-1) @ v


def norm_of_idle_cast(x: Tensor, weight: Tensor) -> Tensor:
    wide = x * 2.0
    return weight * (wide * torch.rsqrt(wide.pow(2).float().mean(-1, keepdim=True) + 1e-6))


def normed_attention(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    q, k = (weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) for x in (q, k))
    out = (q @ k.transpose(-1, -2) * 0.3).softmax(-1) @ v
    return out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + 1e-6)


def tensors(count: int) -> list[Tensor]:
    return [torch.randn(2, 3, 5, 8) for _ in range(count)]


def test_canonicalize_before_attention() -> None:
    gm = capture(attention_of_idle_dropout, tensors(3)).graph
    assert run(gm, named("canonicalize", "fuse_attention")).rewrites == {"canonicalize": 1, "fuse_attention": 1}
    swapped = run(gm, named("fuse_attention", "canonicalize"))
    assert swapped.rewrites == {"canonicalize": 1}
    assert ["dropout stands between" in reason for _, _, reason in swapped.declines] == [True]


def test_canonicalize_before_rms_norm() -> None:
    gm = capture(norm_of_idle_cast, [torch.randn(4, 8), torch.randn(8)]).graph
    assert run(gm, named("canonicalize", "fuse_rms_norm")).rewrites == {"canonicalize": 1, "fuse_rms_norm": 1}
    assert run(gm, named("fuse_rms_norm", "canonicalize")).rewrites == {"canonicalize": 1}


def loss_of_idle_dropout(x: Tensor, weight: Tensor) -> Tensor:
    logits = functional.dropout(functional.linear(x, weight), 0.5, False)
    return functional.cross_entropy(logits, torch.zeros(4, dtype=torch.int64))


def test_canonicalize_before_linear_cross_entropy() -> None:
    gm = capture(loss_of_idle_dropout, [torch.randn(4, 8), torch.randn(5, 8)]).graph
    names = ("canonicalize", "fuse_linear_cross_entropy")
    assert run(gm, named(*names), device="cpu").rewrites == dict.fromkeys(names, 1)
    swapped = run(gm, named(*reversed(names)), device="cpu")
    assert swapped.rewrites == {"canonicalize": 1}
    assert ["dropout lies between" in reason for _, _, reason in swapped.declines] == [True]


def test_rms_norm_and_attention_either_way_round() -> None:
    """Not a constraint, and the comment says so: norms of queries and keys, and one of the output."""
    gm = capture(normed_attention, [*tensors(3), torch.randn(8)]).graph
    for names in (("fuse_rms_norm", "fuse_attention"), ("fuse_attention", "fuse_rms_norm")):
        assert run(gm, named(*names)).rewrites == {"fuse_rms_norm": 3, "fuse_attention": 1}


class IdleDropouts(nn.Module):
    """Dropouts of evaluation: between a convolution and its norm, and before one of two layers of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.gate, self.up = nn.Linear(4, 8), nn.Linear(4, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.drop(self.conv(x))).mean((2, 3))
        result: Tensor = self.gate(x) * self.up(self.drop(x))
        return result


def test_canonicalize_before_the_frozen_passes() -> None:
    model = IdleDropouts().eval().requires_grad_(False)
    gm = capture(model, (torch.randn(2, 3, 6, 6),)).graph
    passes = named("canonicalize", "fold_batch_norm", "merge_linears")
    assert run(gm, passes, frozen=True).rewrites == {"canonicalize": 2, "fold_batch_norm": 1, "merge_linears": 1}
    swapped = run(gm, [*passes[1:], passes[0]], frozen=True)
    assert swapped.rewrites == {"canonicalize": 2}
    assert {name for name, _, _ in swapped.declines} >= {"fold_batch_norm"}


def test_no_two_stages_share_a_run() -> None:
    line = pipeline(*ORDER)
    for stage in Stage:
        chosen = [
            p for device in ("cpu", "cuda") for p in line.select(DEFAULT_VARIANT, stage, PassContext(device=device))
        ]
        assert {p.name for p in chosen} == {p.name for p in ORDER if p.stage is stage}
