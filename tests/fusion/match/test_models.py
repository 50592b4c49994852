"""Whole models as they are published: every layer is recognised, and outputs and gradients stay right."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fusewright.fusion.match import proof
from fusewright.fusion.match.attention.fuse import FuseAttention
from fusewright.fusion.match.rms_norm import FuseRMSNorm
from fusewright.passes.cleanup.canonicalize import Canonicalize
from fusewright.tools.pass_tester import PassTester, Report

LAYERS, TOKENS = 2, 7


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=32, n_layer=LAYERS, n_head=4, vocab_size=64, n_positions=32, use_cache=False, bos_token_id=0,
        eos_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()  # its attention dropout is 0.1 in training


class NanoBlock(nn.Module):
    """Causal self-attention with a registered triangle, one projection for q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q, k, v = (y.view(batch, tokens, 4, width // 4).transpose(1, 2) for y in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :tokens, :tokens] == 0, float("-inf"))
        att = self.drop(functional.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(batch, tokens, width)
        result: Tensor = self.out(y)
        return result


def attention_calls(report: Report) -> list[torch.fx.Node]:
    return [node for node in report.after.graph.nodes if node.target is torch.ops.fusewright.attention.default]


@pytest.mark.models
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("build", [llama, gpt2])
def test_language_model(build: Any, dynamic: bool) -> None:
    model, ids = build(), torch.randint(0, 64, (2, TOKENS))
    if dynamic:
        torch._dynamo.mark_dynamic(ids, 1)
    tester = PassTester(FuseAttention())
    report = tester.check(lambda x: model(x).logits, (ids,), expect_rewrites=LAYERS)
    assert report.declines == []
    for call in attention_calls(report):
        assert call.args[4] is not dynamic, "a static mask is known to be causal"
        keys = call.args[1].meta["example_value"]
        assert keys.shape[1] == (2 if build is llama else 4)


@pytest.mark.models
def test_padded_batch() -> None:
    """A padding mask depends on data: it stays a mask, and fully hidden rows (left padding) keep eager's values."""
    model, ids = llama(), torch.randint(0, 64, (2, TOKENS))
    padding = torch.ones(2, TOKENS, dtype=torch.long)
    padding[0, :3] = 0
    report = PassTester(FuseAttention()).check(
        lambda x, m: model(x, attention_mask=m).logits, (ids, padding), expect_rewrites=LAYERS
    )
    assert all(call.args[3] is not None for call in attention_calls(report))


@pytest.mark.models
def test_llama_norms() -> None:
    model, ids = llama(), torch.randint(0, 64, (2, TOKENS))
    report = PassTester(FuseRMSNorm()).check(lambda x: model(x).logits, (ids,), expect_rewrites=2 * LAYERS + 1)
    assert report.recognised == {"rms_norm": 2 * LAYERS + 1}


@pytest.mark.models
def test_canonicalized_first() -> None:
    """What canonicalize removes must not be what a matcher looks for."""
    model, ids = llama(), torch.randint(0, 64, (2, TOKENS))

    class Both(FuseAttention):
        def run(self, gm: torch.fx.GraphModule, ctx: Any) -> int:
            Canonicalize().run(gm, ctx)
            return super().run(gm, ctx)

    report = PassTester(Both()).check(lambda x: model(x).logits, (ids,), expect_rewrites=LAYERS)
    assert "dropout" in report.before.code
    assert "dropout" not in report.after.code


@pytest.mark.models
def test_bfloat16_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_VERDICTS", {})
    model, ids = llama().to(torch.bfloat16), torch.randint(0, 64, (2, TOKENS))
    report = PassTester(FuseAttention()).check(lambda x: model(x).logits, (ids,), expect_rewrites=LAYERS)
    assert list(proof._VERDICTS.values()) == [None], "two equal layers are one proof"
    assert report.recognised == {"attention": LAYERS}


def test_nano_block() -> None:
    report = PassTester(FuseAttention()).check(NanoBlock(), (torch.randn(2, TOKENS, 32),), expect_rewrites=1)
    assert report.after.code.count(".contiguous()") == 1
    assert attention_calls(report)[0].args[3] is not None


def test_dropout_in_training_is_left() -> None:
    block = NanoBlock()
    block.drop.p = 0.1
    tester = PassTester(FuseAttention())
    tester.check_declines(block, (torch.randn(2, TOKENS, 32),), reason="dropout with p=0.1")
    report = tester.check(block.eval(), (torch.randn(2, TOKENS, 32),), expect_rewrites=1)
    assert report.declines == []
