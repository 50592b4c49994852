"""`Workload`: what it refuses, what it makes, and what one observed step holds."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusewright.errors import DimsError, UserInputError
from fusewright.numerics import compare_trees
from fusewright.trees import bitwise_difference, bitwise_equal
from fusewright.workload import Inputs, Workload, named_sizes, observe, observe_step
from tests.models.mini import MINI, MINI_CONVNET, MINI_LLAMA


def inputs(length: int, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(length, 4, generator=generator),), {}


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def make(**changes: Any) -> Workload:
    fields: dict[str, Any] = {
        "name": "line", "family": "small", "model": lambda: nn.Linear(4, 3), "inputs": inputs, "lengths": (2, 5),
        "dims": {"input": {0: "batch"}}, "loss": square,
    }  # fmt: skip
    return Workload(**{**fields, **changes})


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("name", "a b", "letters, digits"),
        ("name", "", "letters, digits"),
        ("family", "", "family must be a word"),
        ("model", nn.Linear(1, 1), "pass a lambda"),
        ("model", "llama", "model must be callable, not str"),
        ("inputs", None, "inputs must be callable"),
        ("loss", 3, "loss must be callable"),
        ("flops", 3.0, "flops must be callable or None"),
        ("lengths", (), "tuple of positive integers"),
        ("lengths", 8, "tuple of positive integers"),
        ("lengths", (0, 1), "tuple of positive integers"),
        ("lengths", (1.0,), "tuple of positive integers"),
        ("lengths", (4, 2), "must ascend"),
        ("lengths", (4, 4), "must ascend"),
        ("dims", {}, "names nothing that changes"),
        ("dims", ["x"], "must map argument names"),
        ("dims", {"x": 0}, "is not like"),
        ("dims", {"x": {}}, "is not like"),
        ("dims", {"x": {-1: "batch"}}, "is not like"),
        ("dims", {"x": {0: "two words"}}, "is not like"),
        ("dtype", "float32", "floating torch.dtype"),
        ("dtype", torch.int32, "floating torch.dtype"),
    ],
)
def test_a_field_that_cannot_be_right_is_refused(field: str, value: Any, said: str) -> None:
    with pytest.raises(UserInputError, match=said):
        make(**{field: value})


def test_lists_become_tuples_and_mappings_are_copied() -> None:
    dims = {"input": {0: "batch"}}
    workload = make(lengths=[2, 5], dims=dims)
    dims["input"][0] = "other"
    assert workload.lengths == (2, 5)
    assert workload.dims == {"input": {0: "batch"}}
    assert workload.length_name == "batch"
    assert make(lengths=(3,), dims={}).length_name is None


def test_building_is_repeatable_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    first, second, other = make().build(), make().build(), make().build(seed=1)
    make().make_inputs(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert bitwise_equal(first.state_dict(), second.state_dict())
    assert not bitwise_equal(first.state_dict(), other.state_dict())


def test_mode_and_dtype_follow_the_fields() -> None:
    assert make().build().training
    assert not make(train=False).build().training
    assert not make().build(training=False).training
    half = make(dtype=torch.bfloat16)
    assert next(half.build().parameters()).dtype == torch.bfloat16
    assert half.make_inputs(2)[0][0].dtype == torch.bfloat16
    assert dataclasses.replace(half, dtype=torch.float32).make_inputs(2)[0][0].dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "act", "said"),
    [
        ({"model": lambda: torch.relu}, lambda w: w.build(), "not a torch.nn.Module"),
        ({"inputs": lambda n, s: torch.ones(n)}, lambda w: w.make_inputs(2), "must return"),
        ({"inputs": lambda n, s: ([], {})}, lambda w: w.make_inputs(2), "must return"),
        ({"loss": lambda output: output}, lambda w: w.scalar_loss(torch.ones(2)), r"not \(2,\)"),
        ({"loss": lambda output: 1.0}, lambda w: w.scalar_loss(torch.ones(2)), "not float"),
    ],
)
def test_what_the_users_functions_return_is_checked(changes: dict[str, Any], act: Any, said: str) -> None:
    with pytest.raises(UserInputError, match=said):
        act(make(**changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dims": {"x": {0: "batch"}}}, "argument 'x', but the tensors of this call are: input"),
        ({"dims": {"input": {2: "batch"}}}, "which has 2 dims"),
        ({"dims": {"input": {0: "batch", 1: "batch"}}}, "'batch' is 2 and 4 in one call"),
        ({"dims": {"input": {1: "width"}}}, "must have the size of the length"),
    ],
)
def test_inputs_that_contradict_dims_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DimsError, match=said):
        make(**changes).check()


def test_dims_reach_keyword_only_calls_and_forwards_with_kwargs() -> None:
    class Takes(nn.Module):
        def forward(self, x: Tensor, **kwargs: Tensor) -> Tensor:
            return x + kwargs["bias"]

    call = {"x": torch.ones(2, 3), "bias": torch.ones(3)}
    assert named_sizes(Takes(), (), call, {"x": {0: "rows"}, "bias": {0: "columns"}}) == {"rows": 2, "columns": 3}


def test_an_observed_step_holds_outputs_gradients_and_buffers() -> None:
    def with_grad(length: int, seed: int) -> Inputs:
        return (), {"input": inputs(length, seed)[0][0].requires_grad_()}

    workload = make(inputs=with_grad)
    model = workload.build()
    seen = observe(workload, model, 2, training=True)
    assert set(seen["gradients"]) == {"weight", "bias", "input:input"}
    data = with_grad(2, 0)[1]["input"]
    expected = torch.autograd.grad(square(model(data)), [model.weight, data])
    assert torch.equal(seen["gradients"]["weight"], expected[0])
    assert torch.equal(seen["gradients"]["input:input"], expected[1])
    assert set(observe(workload, model, 2, training=False)) == {"output", "buffers"}


def test_several_steps_show_the_first_result_and_the_last_state() -> None:
    workload = make(model=lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)))
    model, one, by_hand = (workload.build() for _ in range(3))
    seen, first = observe_step(workload, model, 5, training=True, steps=3), observe(workload, one, 5, training=True)
    for seed in range(3):
        gradients = observe(workload, by_hand, 5, seed, training=True)["gradients"]
        with torch.no_grad():
            for name, parameter in by_hand.named_parameters():
                parameter -= 1e-3 * gradients[name]
    for part in ("output", "loss", "gradients"):
        assert bitwise_equal(seen[part], first[part])
    assert seen["buffers"]["0.num_batches_tracked"] == 3
    assert bitwise_equal(seen["buffers"], dict(by_hand.named_buffers()))
    for name, parameter in by_hand.named_parameters():
        torch.testing.assert_close(seen["parameters"][name], parameter.detach(), rtol=0, atol=1e-7)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_batch_norm_statistics_are_observed_as_they_were() -> None:
    model = MINI_CONVNET.build()
    first = observe(MINI_CONVNET, model, 4, training=True)["buffers"]
    second = observe(MINI_CONVNET, model, 4, training=True)["buffers"]
    assert (int(first["stem.1.num_batches_tracked"]), int(second["stem.1.num_batches_tracked"])) == (1, 2)
    assert not torch.equal(first["stem.1.running_mean"], second["stem.1.running_mean"])


def test_a_random_model_is_repeatable_under_its_seed() -> None:
    workload = make(model=lambda: nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)))
    model = workload.build()
    first, again, other = (observe(workload, model, 5, seed=s, training=True)["output"] for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first == 0, other == 0)


@pytest.mark.models
@pytest.mark.parametrize("name", sorted(MINI))
def test_mini_models_step_repeatably_and_close_to_float64(name: str) -> None:
    workload = MINI[name]
    workload.check()
    model = workload.build()
    r64 = observe(workload, copy.deepcopy(model).double(), workload.lengths[0], training=True)
    seen = observe(workload, model, workload.lengths[0], training=True)
    again = observe(workload, workload.build(), workload.lengths[0], training=True)
    assert bitwise_difference(seen, again) is None
    assert [n for n, g in seen["gradients"].items() if g is None or not g.any()] == []
    rounded = {name: gradient.float() for name, gradient in r64["gradients"].items()}
    found = compare_trees(rounded, seen["gradients"], None, training=True)
    assert {leaf.rule for leaf in found.leaves} == {"allclose"}
    assert found.ok


@pytest.mark.models
def test_the_mini_llama_attends_eagerly() -> None:
    assert MINI_LLAMA.build().config._attn_implementation == "eager"


def test_workloads_need_no_model_library() -> None:
    code = (
        "import sys, fusewright.workload, benchmarks.workloads as w; w.get('llama'); w.get('vit'); w.get('unet');"
        "assert not {'transformers', 'timm', 'diffusers'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
