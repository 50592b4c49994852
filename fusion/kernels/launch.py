"""What a kernel launch is to the rest of the package: data that can be run, interpreted, traced or compiled ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class KernelConfig:
    """A point of a kernel's tuning space: block sizes (constexprs by name) and the compiler's launch options."""

    blocks: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class KernelCase:
    """A kernel with everything that decides its machine code, and no tensors.

    types: Triton type of each run-time argument ("*bf16", "i32", "fp32"); constants: each compile-time one.
    divisible: the arguments known to be multiples of 16 (aligned pointers, strides), as the launcher would find.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    extra_options: Mapping[str, Any] = field(default_factory=dict)


# How a launcher turns a kernel into something to be called as `wrap(kernel)[grid](...)`: identity on a GPU, the
# interpreter in tests, `torch.library.wrap_triton` where a graph is traced.
Wrap = Callable[[Any], Any]


def identity(kernel: Any) -> Any:
    """The kernel itself: launch on the GPU."""
    return kernel
