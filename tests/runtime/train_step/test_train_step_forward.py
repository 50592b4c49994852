"""Forward passes on whole steps: what they rewrite, when they are declined, and that no model runs for it."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fusewright.passes.base import Pass, PassContext
from fusewright.runtime import step_verify
from tests.runtime.train_step.step_pair import Mlp, Pair, sgd


class Spell(Pass):
    """Writes `a - b` as `torch.sub(a, b)`: a rewrite of every loss here."""

    name: ClassVar[str] = "spell_forward"
    target: ClassVar[Any] = torch.sub

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        found = [node for node in gm.graph.nodes if node.target is operator.sub and ctx.allow(node)]
        for node in found:
            node.target = self.target
        return len(found)


class Wrong(Spell):
    name: ClassVar[str] = "wrong_forward"
    target: ClassVar[Any] = torch.add


class Failing(Spell):
    name: ClassVar[str] = "failing_forward"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        raise ValueError("no luck")


class Attention(nn.Module):
    """Attention written out, behind a batch norm whose buffers the step updates."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.qkv = nn.Linear(16, 48)
        self.mask = torch.ones(10, 10).triu(1) * -1e9  # neither parameter nor buffer

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x_BTD.view(20, 16))).view(2, 10, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return ((q @ k.transpose(-2, -1)) * 8**-0.5 + self.mask).softmax(-1) @ v


class Breaks(Mlp):
    def forward(self, x_BD: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x_BD)


class Checkpointed(Mlp):
    def forward(self, x_BD: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x_BD, use_reentrant=False)
        return out


class Rebinds(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x_BD: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return super().forward(x_BD) * self.seen


class Remembers(Mlp):
    """Sets what is no tensor, which a graph of tensors says nothing of."""

    calls = 0

    def forward(self, x_BD: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x_BD)


def test_attention_is_fused_in_whole_steps() -> None:
    report = Pair(Attention(), sgd(momentum=0.9)).train(4, 2, 10, 16)
    assert report["rewrites"]["fuse_attention"] == 1
    assert (report["compiled_calls"], report["fallbacks"]) == (3, [])


class Language(nn.Module):
    """A language model whose head is its embedding; returns its loss, and logits that a training step does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)

    def forward(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        logits = functional.linear(self.embedding(ids_BT).tanh(), self.embedding.weight)
        return functional.cross_entropy(logits[:, :-1].reshape(-1, 40), ids_BT[:, 1:].reshape(-1)), logits


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_logits_that_only_the_loss_reads_are_never_whole(lowering: str) -> None:
    pair = Pair(Language(), sgd(momentum=0.9), loss_fn=lambda out: out[0], lowering=lowering)
    for seed in range(3):
        pair.both(torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(seed)))
    pair.check()
    report = pair.step.report()
    assert report["rewrites"]["fuse_linear_cross_entropy"] == 1
    assert (report["compiled_calls"], report["fallbacks"]) == (2, [])


def count_captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often Dynamo has captured a forward since, in a list of one."""
    calls, capture = [0], step_verify.capture_forward

    def counted(*args: Any) -> Any:
        calls[0] += 1
        return capture(*args)

    monkeypatch.setattr(step_verify, "capture_forward", counted)
    return calls


def test_every_kind_of_input_reaches_the_rewritten_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    target = torch.full((3,), 0.5)

    def distance(out: Tensor, scale: float = 2.0) -> Tensor:
        return ((out - target) * scale).square().mean()

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.target = nn.Buffer(target)
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, out: Tensor) -> Tensor:
            return ((out - self.target) * self.weight).square().mean()

    calls = count_captures(monkeypatch)
    pair = Pair(Mlp(), sgd(momentum=0.9), loss_fn=Loss(), passes=(Spell(),), accumulate=2, clip=0.05)
    report = pair.train(6)
    assert len(report["graphs"]) == 3
    assert calls == [1]  # signatures that differ in gradients and in the optimizer's part share one
    assert report["rewrites"]["spell_forward"] == len(report["graphs"])
    assert not any(row["pass"] == "spell_forward" for row in report["declines"])
    closed_over = Pair(Mlp(), sgd(), loss_fn=distance, passes=(Spell(),), strict=False).step
    closed_over(torch.randn(5, 4))
    assert "belongs to neither model, loss nor arguments" in decline(closed_over.report())


def decline(report: dict[str, Any]) -> str:
    """Why `spell_forward` was declined."""
    (reason,) = {row["reason"] for row in report["declines"] if row["pass"] == "spell_forward"}
    return str(reason)


@pytest.mark.parametrize(
    ("model", "why"),
    [(Breaks, "no single graph"), (Checkpointed, "whose inside only"), (Rebinds, "leaves more behind than the loss")],
)
def test_what_only_python_tells_is_traced_as_it_is(model: type[Mlp], why: str) -> None:
    report = Pair(model(), sgd(), passes=(Spell(),)).train(3)
    assert why in decline(report)
    assert report["compiled_calls"] > 0
    assert "spell_forward" not in report["rewrites"]


def test_a_module_that_sets_an_attribute_still_runs_eagerly_and_says_so() -> None:
    pair = Pair(Remembers(), sgd(), passes=(Spell(),), strict=False)
    report = pair.train(3)
    assert pair.model.calls == 3
    assert "forward sets attribute 'calls'" in decline(report)
    assert [(row["kind"], row["count"]) for row in report["fallbacks"]] == [("capture", 3)]


def test_wrong_and_failing_forward_passes_are_caught() -> None:
    report = Pair(Mlp(), sgd(), passes=(Wrong(),), strict=False).train(2)
    assert [(row["kind"], row["count"]) for row in report["fallbacks"]] == [("verification", 2)]
    report = Pair(Mlp(), sgd(), passes=(Failing(), Spell()), strict=False).train(2)
    assert [(row["kind"], row["where"]) for row in report["fallbacks"]] == [("pass", "step0.forward")]
    assert (report["rewrites"]["spell_forward"], report["compiled_calls"]) == (1, 1)


@torch._dynamo.config.patch(disable=True, suppress_errors=True)
def test_nothing_runs_where_dynamo_is_switched_off() -> None:
    pair = Pair(Attention(), sgd())  # a forward that ran would move the statistics of its batch norm
    report = pair.train(3, 2, 10, 16)
    assert {row["reason"] for row in report["declines"]} == {
        "forward and loss are no graph of their own: Dynamo made no single graph of it: _NotTraced: "
    }
    assert report["compiled_calls"] == 2
