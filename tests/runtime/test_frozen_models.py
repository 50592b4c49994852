"""Frozen weights of published models, and through Inductor beside torch.compile."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.api import explain
from tests.passes.frozen.frozen_pass import randomized
from tests.runtime.test_frozen import Net, check, frozen, in_place


def test_hugging_face_llama() -> None:
    pytest.importorskip("transformers")
    from tests.models.mini import _llama

    model, ids = frozen(_llama().eval(), strict=True), torch.randint(100, (2, 9))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(
                model(input_ids=ids).logits, model._call_impl(input_ids=ids).logits, rtol=1e-4, atol=1e-5
            )
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    rewrites = explain(model).to_dict()["rewrites"]
    assert (rewrites["merge_linears"], rewrites["fuse_attention"]) == (4, 2)


def test_timm_residual_network() -> None:
    timm = pytest.importorskip("timm")
    net = timm.models.resnet.ResNet(timm.models.resnet.Bottleneck, (1, 1, 1, 1), channels=(8, 8, 8, 8), num_classes=5)
    model, images = frozen(randomized(net), strict=True), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        check(model, images)
    assert explain(model).to_dict()["rewrites"]["fold_batch_norm"] == sum(
        isinstance(m, nn.BatchNorm2d) for m in net.modules()
    )


@pytest.mark.slow
def test_inductor_agrees_with_torch_compile() -> None:
    x: Tensor = torch.randn(2, 3, 7, 7)
    plain = randomized(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)))
    model = fusewright.optimize(copy.deepcopy(plain), frozen_weights=True, strict=True)
    rival = torch.compile(plain)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(x), rival(x), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(model(x), plain._call_impl(x), rtol=1e-4, atol=1e-5)
            for one in (model, plain):
                one[0].weight.mul_(2.0)
                one[1].running_mean.add_(1.0)
    told = explain(model).to_dict()
    assert (told["rewrites"], told["fallbacks"]) == ({"fold_batch_norm": 1}, [])
    assert [v["ok"] for v in told["verified"]] == [True]


def test_dynamic_shapes_share_the_folded_weights() -> None:
    model = frozen(randomized(Net()), dims={"x": {0: "batch"}}, buckets={"batch": [4, 16]}, strict=True)
    with torch.no_grad():
        for size in (2, 3, 9, 4, 16):
            check(model, torch.randn(size, 3, 7, 7))
        in_place(model)
        for size in (2, 9):
            check(model, torch.randn(size, 3, 7, 7))
