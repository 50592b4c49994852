"""`fusewright::rms_norm` on CPU: values, gradients, operator contract, compiled calls, bad input."""
# M rows, N row size

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fusewright.errors import UserInputError
from fusewright.fusion.ops.rms_norm import rms_norm, rms_norm_backward_reference, rms_norm_reference

EPS = 1e-6
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def relative_error(result: Tensor, exact: Tensor) -> float:
    return float(((result.double() - exact).norm() / exact.norm()).detach())


def inputs(dtype: torch.dtype, shape: tuple[int, ...], with_weight: bool = True) -> list[Tensor]:
    x = torch.randn(shape).to(dtype).requires_grad_()
    return [x, torch.randn(shape[-1]).to(dtype).requires_grad_()] if with_weight else [x]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3,), (2, 3, 40), (1, 7, 130), (300, 1000)], ids=str)  # the last in several chunks
@pytest.mark.parametrize("with_weight", [True, False])
def test_values_and_gradients(dtype: torch.dtype, shape: tuple[int, ...], with_weight: bool) -> None:
    given = inputs(dtype, shape, with_weight)
    y = rms_norm(*given, eps=EPS)
    dy = torch.randn(shape).to(dtype)
    grads = torch.autograd.grad(y, given, dy)
    wide = [t.detach().double().requires_grad_() for t in given]
    exact = functional.rms_norm(wide[0], shape[-1:], wide[1] if with_weight else None, EPS)
    exact_grads = torch.autograd.grad(exact, wide, dy.double())
    assert y.dtype == dtype
    assert relative_error(y, exact) <= TOLERANCE[dtype]
    for grad, right in zip(grads, exact_grads, strict=True):
        assert grad.dtype == dtype
        assert relative_error(grad, right) <= TOLERANCE[dtype]


def test_references_equal_the_operator() -> None:
    x, weight = (t.detach() for t in inputs(torch.bfloat16, (4, 9, 64)))
    dy = torch.randn(x.shape).bfloat16()
    y, rstd = torch.ops.fusewright.rms_norm(x, weight, EPS)
    torch.testing.assert_close((y, rstd), rms_norm_reference(x, weight, EPS))
    grads = torch.ops.fusewright.rms_norm_backward(dy, x, weight, rstd)
    torch.testing.assert_close(tuple(grads), rms_norm_backward_reference(dy, x, weight, rstd))


def test_a_strided_input_and_a_default_eps_are_as_in_torch() -> None:
    x = torch.randn(6, 5, 8).transpose(0, 1)[:, 1:].mul(1e-4)
    torch.testing.assert_close(rms_norm(x), functional.rms_norm(x, (8,)))
    assert rms_norm(x).is_contiguous()


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 8)], ids=str)
def test_empty_inputs_keep_their_shape(shape: tuple[int, ...]) -> None:
    given = inputs(torch.float32, shape)
    y = rms_norm(*given, eps=EPS)
    grads = torch.autograd.grad(y.sum(), given)
    assert y.shape == shape
    assert all(g.shape == t.shape and not g.any() for g, t in zip(grads, given, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own copies of the inputs
@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operator_contract(dtype: torch.dtype, with_weight: bool) -> None:
    x = torch.randn(3, 4, 8, dtype=dtype).transpose(0, 1).detach().requires_grad_()
    weight = torch.randn(8, dtype=dtype, requires_grad=True) if with_weight else None
    torch.library.opcheck(torch.ops.fusewright.rms_norm.default, (x, weight, EPS))
    x, weight = x.detach(), None if weight is None else weight.detach()
    rstd = torch.ops.fusewright.rms_norm(x, weight, EPS)[1]
    torch.library.opcheck(torch.ops.fusewright.rms_norm_backward.default, (x.clone(), x, weight, rstd))
    assert torch.Tag.pt2_compliant_tag in torch.ops.fusewright.rms_norm.default.tags


def test_one_dynamic_graph_serves_many_lengths() -> None:
    frames = 0

    def count_frames(graph: Any, example_inputs: Any) -> Any:
        nonlocal frames
        frames += 1
        return graph

    compiled = torch.compile(rms_norm, backend=count_frames, dynamic=True, fullgraph=True)
    weight = torch.randn(16)
    for tokens in (3, 5, 9, 17):
        x = torch.randn(2, tokens, 16)
        torch.testing.assert_close(compiled(x, weight, EPS), functional.rms_norm(x, (16,), weight, EPS))
    assert frames == 1


def test_rstd_is_not_differentiable_and_there_is_no_second_derivative() -> None:
    x, weight = inputs(torch.float32, (3, 8))
    y, rstd = torch.ops.fusewright.rms_norm(x, weight, EPS)
    assert not rstd.requires_grad
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="rms_norm_backward has no second derivative"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.ones(2, 3, dtype=torch.int32), None, "argument 'x' has dtype torch.int32"),
        (torch.tensor(1.0), None, "argument 'x' has no dimension"),
        (torch.ones(2, 3), torch.ones(2), r"argument 'weight' has shape \(2,\); expected \(3,\)"),
        (torch.ones(2, 3), torch.ones(1, 3), r"argument 'weight' has shape \(1, 3\)"),
        (torch.ones(2, 3), torch.ones(3, dtype=torch.float16), "argument 'weight' has dtype torch.float16"),
    ],
    ids=lambda case: str(case)[:24],
)
def test_bad_input_names_the_argument(x: Tensor, weight: Tensor | None, message: str) -> None:
    with pytest.raises(UserInputError, match=message) as caught:
        rms_norm(x, weight, EPS)
    assert isinstance(caught.value, ValueError)
