"""`fusewright::linear_cross_entropy` on CPU: values, gradients, memory, operator contract, autocast, bad input."""
# M rows, D row size, V classes

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fusewright.errors import UserInputError
from fusewright.fusion.ops import linear_cross_entropy as op
from fusewright.fusion.ops.linear_cross_entropy import linear_cross_entropy

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}
M, D, V = 37, 16, 50
IGNORED = -100


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five chunks of rows, the last one shorter, each in many blocks of classes, the last one shorter."""
    monkeypatch.setattr(op, "_ROWS", 9)
    monkeypatch.setattr(op, "_BLOCK_ELEMENTS", 70)


def inputs(dtype: torch.dtype, *, bias: bool = True, scale: float = 1.0) -> tuple[list[Tensor], Tensor]:
    shapes = [(M, D), (V, D), (V,)][: 3 if bias else 2]
    given = [(torch.randn(shape) * scale).to(dtype).requires_grad_() for shape in shapes]
    return given, torch.randint(V, (M,)).masked_fill(torch.rand(M) < 0.2, IGNORED)


def exact(given: list[Tensor], target: Tensor, **options: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    loss = functional.cross_entropy(functional.linear(*wide), target, **options)
    return loss.detach(), torch.autograd.grad(loss * 3.0, wide)


def run(given: list[Tensor], target: Tensor, **options: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    x, weight, *bias = given
    loss = linear_cross_entropy(x, weight, target, *bias, **options)
    return loss.detach(), torch.autograd.grad(loss * 3.0, given)


def relative_error(result: Tensor, right: Tensor) -> float:
    return float((result.double() - right).norm() / right.norm())


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}], ids=str)
@pytest.mark.parametrize("scale", [1.0, 8.0])  # the second: rows that are nearly certain, and losses in the hundreds
def test_values_and_gradients(dtype: torch.dtype, bias: bool, options: dict[str, Any], scale: float) -> None:
    given, target = inputs(dtype, bias=bias, scale=scale)
    loss, grads = run(given, target, **options)
    right, right_grads = exact(given, target, **options)
    eager = torch.autograd.grad(functional.cross_entropy(functional.linear(*given), target, **options) * 3.0, given)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert abs(loss - right) <= TOLERANCE[dtype] * abs(right)
    for grad, right_grad, plain, tensor in zip(grads, right_grads, eager, given, strict=True):
        assert (grad.dtype, grad.shape) == (dtype, tensor.shape)
        # large logits are rounded before anything is made of them, here as in eager
        assert relative_error(grad, right_grad) <= max(TOLERANCE[dtype], 4 * relative_error(plain, right_grad))


def test_certain_rows_keep_small_gradients() -> None:
    """Their logits' gradient is p - 1 with p near 1: subtracted before it is rounded to the dtype of the logits."""
    weight = torch.eye(8)[:, :8] * 16.0
    x, target = torch.eye(8) * 0.5, torch.arange(8)  # exp(-8) each for seven other classes
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        given = [tensor.to(dtype).requires_grad_() for tensor in (x, weight)]
        _, grads = run(given, target)
        _, right = exact(given, target)
        assert all(relative_error(grad, r) <= tolerance for grad, r in zip(grads, right, strict=True))


def test_leading_axes_and_chosen_gradients() -> None:
    (x, weight), target = inputs(torch.float32, bias=False)
    x, target = x.detach()[:36].view(4, 9, D), target[:36].view(4, 9)
    loss = linear_cross_entropy(x, weight, target)
    torch.testing.assert_close(loss, functional.cross_entropy((x @ weight.t()).view(36, V), target.view(36)))
    (dweight,) = torch.autograd.grad(loss, [weight])
    assert dweight.shape == weight.shape
    _, dx, dw, db = torch.ops.fusewright.linear_cross_entropy(
        *(x.view(36, D), weight.detach(), None, target.view(36)), *(IGNORED, True, 0.0, [False, True, False])
    )
    assert (dx.numel(), dw.shape, db.numel()) == (0, weight.shape, 0)


def test_all_rows_ignored_and_no_rows_are_as_in_torch() -> None:
    for rows in (M, 0):
        given, _ = inputs(torch.float32)
        given[0] = given[0].detach()[:rows].requires_grad_()
        target = torch.full((rows,), IGNORED)
        loss, grads = run(given, target)
        assert math.isnan(loss)
        assert math.isnan(functional.cross_entropy(functional.linear(*given), target).detach())
        assert not any(grad.any() for grad in grads)
        assert run(given, target, reduction="sum")[0] == 0


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return out


@pytest.mark.usefixtures("small_chunks")
def test_logits_are_never_whole() -> None:
    given, target = inputs(torch.float32)
    arguments = (*given, target, IGNORED, True, 0.0, [True] * 3)
    with torch.no_grad(), LargestTensor() as seen:
        op._forward(*arguments)
    assert seen.elements == V * D  # the weight's gradient; nine rows of logits are less
    with torch.no_grad(), LargestTensor() as seen:
        functional.linear(*given)
    assert seen.elements == M * V


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own copies of the inputs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operator_contract(dtype: torch.dtype) -> None:
    given, target = inputs(dtype)
    arguments = (*given, target, IGNORED, True, 0.1, [True] * 3)
    torch.library.opcheck(torch.ops.fusewright.linear_cross_entropy.default, arguments)
    assert torch.Tag.pt2_compliant_tag in torch.ops.fusewright.linear_cross_entropy.default.tags


def test_autocast_is_that_of_the_product() -> None:
    given, target = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss, grads = run(given, target)
        right = functional.cross_entropy(functional.linear(*given), target)
    assert loss.dtype == right.dtype == torch.float32
    torch.testing.assert_close(loss, right.detach(), atol=1e-2, rtol=1e-2)
    assert all(grad.dtype == torch.float32 for grad in grads)


def test_what_has_no_derivative_says_so() -> None:
    given, target = inputs(torch.float32)
    loss = linear_cross_entropy(*given[:2], target)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(loss, given[:2], create_graph=True)
    loss = torch.ops.fusewright.linear_cross_entropy(*given, target, IGNORED, True, 0.0, [True, False, True])[0]
    with pytest.raises(NotImplementedError, match="not asked for"):
        torch.autograd.grad(loss, given)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"x": torch.randn(M, D).half()}, "argument 'x' has dtype torch.float16"),
        ({"weight": torch.randn(V, D + 1)}, "argument 'weight' has shape"),
        ({"weight": torch.randn(0, D)}, "argument 'weight' has shape"),
        ({"weight": torch.randn(V, D).double()}, "argument 'weight' has dtype"),
        ({"bias": torch.randn(V + 1)}, "argument 'bias' has shape"),
        ({"target": torch.zeros(M)}, "argument 'target' is torch.float32"),
        ({"target": torch.zeros(M - 1, dtype=torch.int64)}, "argument 'target' is torch.int64"),
        ({"reduction": "none"}, "argument 'reduction' is 'none'"),
    ],
)
def test_bad_input(change: dict[str, Any], named: str) -> None:
    given, target = inputs(torch.float32)
    x, weight, bias = (tensor.detach() for tensor in given)
    arguments = {"x": x, "weight": weight, "bias": bias, "target": target} | change
    with pytest.raises(UserInputError, match=named):
        linear_cross_entropy(**arguments)


@pytest.mark.parametrize("wrong", [V, -1])
def test_a_target_that_is_no_class_is_an_error(wrong: int) -> None:
    given, target = inputs(torch.float32)
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(*given[:2], target.index_fill(0, torch.tensor(3), wrong))
