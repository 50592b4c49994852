"""RMS normalization is recognised in the spellings of the usual libraries, and near misses are left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fusewright.fusion.match.rms_norm import FuseRMSNorm
from fusewright.passes.base import PassContext
from fusewright.tools.pass_tester import PassTester, capture

H = 24
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Function = Callable[[Tensor, Tensor], Tensor]


def over_root(x: Tensor, w: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


def power(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * (x.square().mean(dim=-1, keepdim=True) + 1e-6) ** -0.5)


def without_weight(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(1e-6 + torch.mean(x**2, 2, True)) + w


def upcast(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * w


def one_plus_weight(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * (1.0 + w.float())).type_as(x)


def functional_default(x: Tensor, w: Tensor) -> Tensor:
    return functional.rms_norm(x, (H,), w)


SPELLINGS: list[Function] = [over_root, power, without_weight, upcast, one_plus_weight, functional_default]


def args(dtype: torch.dtype, *, training: bool = True) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 5, H).to(dtype).requires_grad_(training)
    return x, torch.randn(H).to(dtype).requires_grad_(training)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", SPELLINGS)
def test_spelling(function: Function, dtype: torch.dtype) -> None:
    report = PassTester(FuseRMSNorm()).check(function, args(dtype), expect_rewrites=1)
    assert report.recognised == {"rms_norm": 1}
    assert "fusewright.rms_norm" in report.after.code


@pytest.mark.models
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_library_modules(dtype: torch.dtype) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    for module in (LlamaRMSNorm(H), GemmaRMSNorm(H), T5LayerNorm(H), nn.RMSNorm(H), nn.RMSNorm(H, 1e-3)):
        x = args(dtype)[0]
        report = PassTester(FuseRMSNorm()).check(module.to(dtype), (x,), expect_rewrites=1)
        assert "fusewright.rms_norm" in report.after.code


def test_default_epsilon_is_that_of_the_computation() -> None:
    """Half precision is normalized in float32, whose epsilon torch takes; the operator's argument shows it."""
    for dtype in DTYPES:
        after = PassTester(FuseRMSNorm()).check(functional_default, args(dtype), expect_rewrites=1).after
        call = next(n for n in after.graph.nodes if n.target is torch.ops.fusewright.rms_norm.default)
        assert call.args[2] == torch.finfo(torch.float32).eps


NEAR_MISSES: dict[str, tuple[Function, str]] = {
    "over tokens": (lambda x, w: x * (x.pow(2).mean(-2, keepdim=True) + 1e-6).rsqrt() * w, "the mean is over (1,)"),
    "over both": (lambda x, w: x * (x.pow(2).mean((1, 2), keepdim=True) + 1e-6).rsqrt(), "the mean is over (1, 2)"),
    "sum": (lambda x, w: x * (x.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt(), "not taken of a mean"),
    "cube": (lambda x, w: x * (x.pow(4).mean(-1, keepdim=True) + 1e-6).rsqrt(), "not taken of a square"),
    "other": (lambda x, w: (x + 1) * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(), "is scaled, but the mean"),
    "product": (lambda x, w: x * ((x * x.abs()).mean(-1, keepdim=True) + 1e-6).rsqrt(), "not taken of a square"),
    "no epsilon": (lambda x, w: x * x.pow(2).mean(-1, keepdim=True).rsqrt(), "no constant epsilon"),
    "learned epsilon": (lambda x, w: x * (x.pow(2).mean(-1, keepdim=True) + w[0]).rsqrt(), "no constant epsilon"),
    "upside down": (lambda x, w: (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() / x, "goes into truediv"),
    "two axes": (lambda x, w: functional.rms_norm(x, x.shape[1:]), "normalizes over 2 axes"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss(name: str) -> None:
    function, reason = NEAR_MISSES[name]
    report = PassTester(FuseRMSNorm()).check_declines(function, args(torch.float32), reason=reason)
    assert "fusewright" not in report.after.code


def test_root_that_is_used_twice_stays() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * root, root

    report = PassTester(FuseRMSNorm()).check_declines(function, args(torch.float32), reason="returned by the model")
    assert report.recognised == {}


def test_dynamic_tokens() -> None:
    x, w = args(torch.float32)
    torch._dynamo.mark_dynamic(x, 1)
    report = PassTester(FuseRMSNorm()).check(upcast, (x, w), expect_rewrites=1)
    (result,) = report.after.graph.output_node().args[0]
    assert isinstance(result.meta["example_value"].shape[1], torch.SymInt)


def test_only_on_a_gpu() -> None:
    pass_, bucket = FuseRMSNorm(), PassContext().bucket
    assert pass_.applies(bucket, "cuda")
    assert not pass_.applies(bucket, "cpu")


def test_sees_through_a_write() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x * 1.0
        root = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        y.mul_(2.0)
        return y * root

    captured = capture(function, args(torch.float32))
    assert PassTester(FuseRMSNorm()).run(captured, training=True).rewrites == 0
