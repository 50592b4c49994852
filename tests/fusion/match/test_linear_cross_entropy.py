"""Cross entropy of a linear layer is recognised as modelling code spells it, and near misses are left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fusewright
from fusewright.api import optimize_with
from fusewright.capture.variant import GraphVariant, Lowering
from fusewright.fusion.match.linear_cross_entropy import FuseLinearCrossEntropy
from fusewright.passes.base import PassContext
from fusewright.tools.pass_tester import PassTester, capture

B, T, D, V = 2, 6, 12, 40
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def plain(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x, w, b).view(-1, V), y.view(-1))


def llama(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Labels are shifted, so that no logits are sliced; the sum is divided by a number of tokens."""
    logits = functional.linear(x[:, slice(0, None), :], w).float()
    shifted = functional.pad(y, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    loss = functional.cross_entropy(logits.view(-1, V), shifted, ignore_index=-100, reduction="sum")
    return loss / 17


def sliced_logits(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = functional.linear(x, w, b)
    return nn.CrossEntropyLoss(ignore_index=3)(logits[..., :-1, :].contiguous().view(-1, V), y[:, 1:].reshape(-1))


def classes_on_axis_1(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x, w, b).transpose(1, 2), y, label_smoothing=0.1)


def tied_product(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy((x @ w.t()).flatten(0, 1), y.flatten())


def two_steps(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = functional.linear(x, w, b).reshape(-1, V).to(torch.float32)
    return functional.nll_loss(functional.log_softmax(logits, dim=-1), y.reshape(-1), ignore_index=0)


def whole_axis_last(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x[:, 0], w, b)[:], y[:, 0], reduction="sum")


SPELLINGS: list[Function] = [
    *(plain, llama, sliced_logits, classes_on_axis_1, tied_product, two_steps, whole_axis_last),
]


def args(dtype: torch.dtype = torch.float32, *, training: bool = True) -> tuple[Tensor, ...]:
    floats = [(torch.randn(shape) * 0.5).to(dtype).requires_grad_(training) for shape in ((B, T, D), (V, D), (V,))]
    return (*floats, torch.randint(V, (B, T)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("function", SPELLINGS)
def test_spelling(function: Function, dtype: torch.dtype, training: bool) -> None:
    tester = PassTester(FuseLinearCrossEntropy())
    report = tester.check(function, args(dtype, training=training), expect_rewrites=1, training=training)
    assert report.recognised == {"linear_cross_entropy": 1}
    assert "fusewright.linear_cross_entropy" in report.after.code


@pytest.mark.parametrize("function", SPELLINGS)
def test_one_rewritten_graph_serves_every_length(function: Function) -> None:
    """Under strict, a pass that would fix a dynamic size is an error."""
    dims = {name: {0: "batch", 1: "tokens"} for name in "xy"}
    eager = GraphVariant(lowering=Lowering.EAGER)
    optimized = optimize_with(function, choose=lambda *_: eager, dims=dims, strict=True, verify="off")
    for batch, tokens in ((2, 6), (3, 9), (5, 4)):
        x, w, b, _ = args(training=False)
        x, y = torch.randn(batch, tokens, D), torch.randint(V, (batch, tokens))
        torch.testing.assert_close(optimized(x, w, b, y), function(x, w, b, y))
    told = fusewright.explain(optimized).to_dict()
    assert told["rewrites"]["fuse_linear_cross_entropy"] == 1
    assert (told["graphs"], told["fallbacks"]) == (1, [])


def test_gradients_that_nobody_needs_are_not_made() -> None:
    """A frozen head under a trained body: the weight's gradient would be as large as the weight."""
    x, w, b, y = args()
    report = PassTester(FuseLinearCrossEntropy()).check(plain, (x, w.detach(), b.detach(), y), expect_rewrites=1)
    targets = torch.ops.fusewright.linear_cross_entropy.default
    (call,) = [node for node in report.after.graph.nodes if node.target is targets]
    assert call.args[-1] == [True, False, False]


def _autocast(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return plain(x, w, b, y)


def test_autocast() -> None:
    report = PassTester(FuseLinearCrossEntropy()).check(_autocast, args(), expect_rewrites=1)
    assert "fusewright.linear_cross_entropy" in report.after.code


def loss_of(change: Callable[[Tensor], Tensor], **options: Any) -> Function:
    """Cross entropy of what `change` makes of the logits (B, T, V)."""
    return lambda x, w, b, y: functional.cross_entropy(
        change(functional.linear(x, w, b)).reshape(-1, V), y.reshape(-1), **options
    )


def _returned(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = functional.linear(x, w, b)
    return functional.cross_entropy(logits.view(-1, V), y.view(-1)), logits


NEAR_MISSES: dict[str, tuple[Function, str]] = {
    "returned": (_returned, "returned by the model"),
    "softcap": (loss_of(lambda z: torch.tanh(z / 30.0) * 30.0), "mul lies between the layer and the loss"),
    "temperature": (loss_of(lambda z: z / 2.0), "truediv lies between"),
    "to float32 from float64": (
        lambda x, w, b, y: functional.cross_entropy(
            functional.linear(x.double(), w.double()).float().view(-1, V), y.view(-1)
        ),
        "float lies between",
    ),
    "cast down": (loss_of(lambda z: z.bfloat16()), "bfloat16 lies between"),
    "classes regrouped": (loss_of(lambda z: z.transpose(1, 2).reshape(B, T, V)), "reshape lies between"),
    "classes sliced": (loss_of(lambda z: z[..., 1:].repeat(1, 1, V // (V - 1) + 1)[..., :V]), "lies between"),
    "rows permuted": (loss_of(lambda z: z.transpose(0, 1)), "lies between"),
    "class weights": (loss_of(lambda z: z, weight=torch.ones(V)), "the loss is given 'weight'"),
    "no reduction": (loss_of(lambda z: z, reduction="none"), "reduction 'none'"),
    "probabilities": (
        lambda x, w, b, y: functional.cross_entropy(
            functional.linear(x, w, b).view(-1, V), functional.one_hot(y.view(-1), V).float()
        ),
        "not a class number",
    ),
    "weight not turned": (
        lambda x, w, b, y: functional.cross_entropy((x @ (w * 2).view(D, V)).view(-1, V), y.view(-1)),
        "not with a transposed weight",
    ),
    "softmax over rows": (
        lambda x, w, b, y: functional.nll_loss(
            functional.log_softmax(functional.linear(x, w, b).view(-1, V), 0), y.view(-1)
        ),
        "log_softmax over axis 0",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss(name: str) -> None:
    function, reason = NEAR_MISSES[name]
    report = PassTester(FuseLinearCrossEntropy()).check_declines(function, args(), reason=reason)
    assert "fusewright" not in report.after.code


def test_logits_that_are_read_twice_stay() -> None:
    def both(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        logits = functional.linear(x, w, b)
        return functional.cross_entropy(logits.view(-1, V), y.view(-1)) + logits.square().mean()

    PassTester(FuseLinearCrossEntropy()).check_declines(both, args(), reason="the logits are also used by")


def test_small_logits_are_left_to_the_compiler() -> None:
    captured = capture(plain, args())
    for priced, count in ((True, 0), (False, 1)):
        ctx = PassContext(training=True, priced=priced)
        ctx.begin("fuse_linear_cross_entropy")
        assert FuseLinearCrossEntropy().run(captured.graph, ctx) == count
        assert [("does not pay" in decline.reason) for decline in ctx.declines] == [True] * (1 - count)


class Language(nn.Module):
    """Only the loss leaves the model, as training loops that need no logits write it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import transformers

        small = {"vocab_size": V, "use_cache": False}
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        pairs = {"num_key_value_heads": 2, "intermediate_size": 16}
        t = transformers
        config, model = {
            "llama": (t.LlamaConfig(**small, **sizes, intermediate_size=16), t.LlamaForCausalLM),
            "gpt2": (t.GPT2Config(**small, n_embd=16, n_layer=1, n_head=2), t.GPT2LMHeadModel),
            "bert": (t.BertConfig(**small, **sizes, intermediate_size=16), t.BertForMaskedLM),
            "mixtral": (t.MixtralConfig(**small, **sizes, **pairs, num_local_experts=2), t.MixtralForCausalLM),
            "qwen3": (t.Qwen3Config(**small, **sizes, **pairs, head_dim=8), t.Qwen3ForCausalLM),
            "opt": (t.OPTConfig(**small, **sizes, ffn_dim=16, word_embed_proj_dim=16), t.OPTForCausalLM),
            "t5": (
                t.T5Config(**small, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0),
                t.T5ForConditionalGeneration,
            ),
        }[kind]
        self.model = model(config)
        if kind == "gpt2":
            self.model.loss_type = "ForCausalLM"  # else a warning is logged, at which Dynamo breaks the graph

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


@pytest.mark.models
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "mixtral", "qwen3", "opt", "t5"])
def test_library_models(kind: str) -> None:
    ids, model = torch.randint(4, V, (B, T)), Language(kind).eval()
    report = PassTester(FuseLinearCrossEntropy()).check(model, (ids,), expect_rewrites=1)
    assert report.recognised == {"linear_cross_entropy": 1}
