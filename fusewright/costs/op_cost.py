"""Counts the floating-point operations of a step: matrix products, convolutions and attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

Shape = Sequence[int]
aten = torch.ops.aten


def count_flops(step: Callable[[], object]) -> int:
    """Run `step` once in eager and count its model FLOPs, two for each multiply-add.

    Elementwise work, reductions and normalizations are not counted, as usual for MFU. The backward of attention counts
    as twice its forward: the scores that a fused kernel computes anew are no work of the model (PROTOCOLS T8).

    Args:
        step: calls ATen operators only; compiled code would hide them.
    """
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
        step()
    return int(counter.get_total_flops())


def attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """FLOPs of softmax(q @ k^T) @ v; query (*, T, H), key (*, S, H), value (*, S, V)."""
    scores = math.prod(query[:-1]) * key[-2]
    return 2 * scores * (query[-1] + value[-1])


def attention_backward_flops(grad: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Four products: the gradients of the weights' two factors and of the scores' two factors."""
    return 2 * attention_flops(query, key, value)


_FORWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
)
_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
)
_ATTENTION: dict[Any, Callable[..., int]] = dict.fromkeys(_FORWARD, attention_flops) | dict.fromkeys(
    _BACKWARD, attention_backward_flops
)
