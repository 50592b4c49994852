"""Cross entropy of a linear layer's outputs without the logits in memory: `fusewright::linear_cross_entropy`.

    logits = x W^T + b      loss = sum or mean over the rows that count of  log(sum(exp(logits))) - logits[target]

Rows are taken in chunks: the logits of a chunk are made, judged and turned into the gradients of x, W and b, and the
next chunk uses their memory again. So the gradients are made in the forward pass, for a loss gradient of 1, and the
backward pass only scales them: three products, as without chunks, where a recomputation would need four.
Source: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024, arXiv:2410.10989, section 3.2.
"""
# M rows (all leading dims), D size of a row, V classes, R rows of a chunk

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusewright.fusion.ops.library import autocast_as_matmul, bad_input, define_op, register_gradient

DTYPES = (torch.bfloat16, torch.float32, torch.float64)

# Rows of a chunk: enough for the products, which read and write W and its gradient whole for each chunk. Twice as many
# are 2 % faster in those, and lose that on fresh pages: with 32,000 classes these stay below the 32 MiB from which
# glibc gives memory back to the system at once.
_ROWS = 256
# At most so many logits in memory at a time.
_CHUNK_ELEMENTS = 1 << 26
# What is worked on at a time between two products, so that it stays in the cores' caches.
_BLOCK_ELEMENTS = 1 << 19
_PAYS = 1 << 27  # bytes of logits; below, times are within 10 % of the written form, either way


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> None:
    op = "linear_cross_entropy"
    if x.dtype not in DTYPES:
        raise bad_input(op, "x", f"has dtype {x.dtype}; supported are bfloat16, float32, float64")
    if x.dim() < 2:
        raise bad_input(op, "x", f"has {x.dim()} dimensions; expected (..., size)")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.shape[0] == 0:
        raise bad_input(op, "weight", f"has shape {tuple(weight.shape)}; expected (classes, {x.shape[-1]})")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        raise bad_input(op, "bias", f"has shape {tuple(bias.shape)}; expected ({weight.shape[0]},)")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise bad_input(op, name, f"has dtype {tensor.dtype}; expected {x.dtype} as x")
    rows = math.prod(x.shape[:-1])
    # nothing is asked of a symbolic size that would fix it
    if target.dtype != torch.int64 or statically_known_true(target.numel() != rows):
        raise bad_input(
            op, "target", f"is {target.dtype} {tuple(target.shape)}; expected torch.int64, one for each row"
        )


def why_not(logits: int) -> str | None:
    """Why the operator does not pay for so many bytes of logits, or None where it does."""
    if logits >= _PAYS:
        return None
    return f"does not pay: the logits take {logits / (1 << 20):.3g} MiB (FUSEWRIGHT_COST=off fuses all the same)"


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that the loss is computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    mean: bool,
    label_smoothing: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(x, weight, bias, target)
    return (
        x.new_empty((), dtype=accumulator(x.dtype)),
        torch.empty_like(x, memory_format=torch.contiguous_format) if wanted[0] else x.new_empty(0),
        torch.empty_like(weight, memory_format=torch.contiguous_format) if wanted[1] else x.new_empty(0),
        torch.empty_like(bias) if wanted[2] and bias is not None else x.new_empty(0),
    )


def _parts(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, max(step, 1)):
        yield slice(start, min(start + max(step, 1), length))


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    mean: bool,
    label_smoothing: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits stand as (V, R): in the products of that form, MKL is up to a third faster (2 cores of an AMD EPYC).

    With c the weight of a row, 0 where it is ignored, the gradient of its logits is c / s times what `_judge` leaves.
    That factor is applied to rows of x and of the product, (R, D), and never to the logits.
    """
    loss, dx, dweight, dbias = _fake(x, weight, bias, target, ignore_index, mean, label_smoothing, wanted)
    x_MD, target_M = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    rows, classes = x_MD.shape[0], weight.shape[0]
    counts_M = target_M != ignore_index
    target_M = target_M.where(counts_M, 0)
    number = counts_M.sum() if mean else x.new_ones((), dtype=torch.int64)
    sums = _Sums(loss, dweight if wanted[1] else None, dbias if wanted[2] and bias is not None else None)
    step = min(rows, _ROWS, max(1, _CHUNK_ELEMENTS // max(classes, 1)))
    buffer = x.new_empty(classes * step)
    for chunk in _parts(rows, step):
        x_RD, counts_R = x_MD[chunk], counts_M[chunk]
        logits_VR = buffer[: classes * len(x_RD)].view(classes, len(x_RD))
        if bias is None:
            torch.mm(weight, x_RD.t(), out=logits_VR)
        else:
            torch.addmm(bias.unsqueeze(1), weight, x_RD.t(), out=logits_VR)
        loss_R, s_R = _judge(logits_VR, target_M[chunk], label_smoothing, any(wanted))
        factor_R = (1.0 / (s_R * number)).where(counts_R, 0.0)
        sums.add(loss_R.where(counts_R, 0.0), logits_VR, x_RD, factor_R)
        if wanted[0]:
            torch.mm(logits_VR.t(), weight, out=dx.view(x_MD.shape)[chunk]).mul_(factor_R.unsqueeze(1))
    sums.write()
    return loss.div_(number), dx, dweight, dbias


def _judge(logits_VR: Tensor, target_R: Tensor, label_smoothing: float, gradient: bool) -> tuple[Tensor, Tensor]:
    """Loss and s = sum(exp(logits - max)) of each row, in the dtype of `accumulator`; logits are overwritten.

    With `gradient`, by s times their own gradient, which takes no division:
    exp(logits - max) - s * ((1 - label_smoothing) * onehot(target) + label_smoothing / V).
    """
    (classes, rows), wide = logits_VR.shape, accumulator(logits_VR.dtype)
    smooth, at_1R = label_smoothing / max(classes, 1), target_R.unsqueeze(0)
    hit_1R = logits_VR.gather(0, at_1R).to(wide)
    largest_1R = logits_VR.amax(0, keepdim=True).to(wide)
    loss_1R = largest_1R - (1.0 - label_smoothing) * hit_1R
    if smooth:
        loss_1R -= smooth * logits_VR.sum(0, dtype=wide)
    s_1R = torch.zeros_like(loss_1R)
    for block in _parts(classes, _BLOCK_ELEMENTS // max(rows, 1)):
        e = logits_VR[block].to(wide).sub_(largest_1R).exp_()  # in place where the logits are wide
        s_1R += e.sum(0)
        if gradient and e.dtype != logits_VR.dtype:
            logits_VR[block] = e
    if gradient:
        if smooth:
            logits_VR -= (smooth * s_1R).to(logits_VR.dtype)
        at_target = (hit_1R - largest_1R).exp_() - (1.0 - label_smoothing + smooth) * s_1R
        logits_VR.scatter_(0, at_1R, at_target.to(logits_VR.dtype))
    return loss_1R.add_(s_1R.log()).squeeze(0), s_1R.squeeze(0)


class _Sums:
    """What is summed over chunks, in the dtype of `accumulator`; `write` puts it into the given outputs."""

    def __init__(self, loss: Tensor, dweight: Tensor | None, dbias: Tensor | None) -> None:
        self._loss, self._outputs = loss.zero_(), (dweight, dbias)
        self._dweight = None if dweight is None else dweight.to(loss.dtype)
        self._dbias = None if dbias is None else dbias.to(loss.dtype).zero_()
        self._is_first = True

    def add(self, loss_R: Tensor, logits_VR: Tensor, x_RD: Tensor, factor_R: Tensor) -> None:
        """Add a chunk; `logits_VR` holds what `_judge` leaves there."""
        self._loss += loss_R.sum()
        if self._dweight is not None:
            scaled_RD = (x_RD * factor_R.unsqueeze(1)).to(x_RD.dtype)
            if self._dweight.dtype == x_RD.dtype:
                self._dweight.addmm_(logits_VR, scaled_RD, beta=0 if self._is_first else 1)
            elif self._is_first:
                self._dweight.copy_(torch.mm(logits_VR, scaled_RD))
            else:
                self._dweight += torch.mm(logits_VR, scaled_RD)
        if self._dbias is not None:
            for block in _parts(len(logits_VR), _BLOCK_ELEMENTS // max(len(factor_R), 1)):
                self._dbias[block] += torch.mv(logits_VR[block].to(factor_R.dtype), factor_R)
        self._is_first = False

    def write(self) -> None:
        """Round the sums to the dtype of the outputs where that is another one."""
        if self._is_first and self._dweight is not None:
            self._dweight.zero_()
        for out, total in zip(self._outputs, (self._dweight, self._dbias), strict=True):
            if out is not None and total is not None and out is not total:
                out.copy_(total)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, bias, *_, wanted = inputs
    _, *gradients = output
    ctx.wanted = [*wanted[:2], wanted[2] and bias is not None]
    ctx.save_for_backward(*gradients)
    ctx.mark_non_differentiable(*gradients)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dloss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,) * 8
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "fusewright::linear_cross_entropy has no second derivative; turn the rewrite off for this model"
        )
    missing = [needed and not wanted for needed, wanted in zip(ctx.needs_input_grad, ctx.wanted, strict=False)]
    if any(missing):
        raise NotImplementedError("fusewright::linear_cross_entropy: a gradient is needed that was not asked for")
    dx, dweight, dbias = (
        (saved * dloss).to(saved.dtype) if wanted else None
        for saved, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    )
    return dx, dweight, dbias, None, None, None, None, None


def _cast(dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Any, ...]:
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), *rest


define_op(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor target, int ignore_index, bool mean,"
    " float label_smoothing, bool[3] wanted) -> (Tensor loss, Tensor dx, Tensor dweight, Tensor dbias)",
    fake=_fake,
    cpu=_forward,
    cuda=_forward,
)
register_gradient("linear_cross_entropy", _setup_context, _gradient)
autocast_as_matmul("linear_cross_entropy", _cast)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`cross_entropy(linear(x, weight, bias), target)` of x (..., D), weight (V, D), bias (V,), target (...) of int64.

    Dtypes: bfloat16, float32 or float64, one for x, weight and bias; the loss is float32 (float64 for float64).
    `reduction` is "mean" over the rows whose target is not `ignore_index`, or "sum".

    Raises:
        UserInputError: a wrong dtype, shape or reduction; the message names the argument.
        RuntimeError: a target outside of 0 to V - 1 that is not `ignore_index`.
    """
    if reduction not in ("mean", "sum"):
        raise bad_input("linear_cross_entropy", "reduction", f"is {reduction!r}; expected 'mean' or 'sum'")
    needed = torch.is_grad_enabled()
    wanted = [needed and tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)]
    loss: Tensor = torch.ops.fusewright.linear_cross_entropy(
        *(x, weight, bias, target), *(ignore_index, reduction == "mean", label_smoothing, wanted)
    )[0]
    return loss
