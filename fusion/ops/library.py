"""The `fusewright::` operator namespace and the one way an operator is put into it."""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from fusewright.errors import UserInputError

# FRAGMENT, not DEF: each operator module adds its own part, and a user's out-of-tree operators may too.
LIBRARY = torch.library.Library("fusewright", "FRAGMENT")


def define_op(
    schema: str,
    *,
    fake: Callable[..., Any],
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
) -> None:
    """Define one functional operator from its schema string, with its shape rule and both device implementations.

    A raw `Library` rather than `custom_op`: the latter adds an alias check to every call, which these
    implementations cannot fail (they return fresh tensors) and `opcheck` tests once instead.
    """
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"fusewright::{name}", fake, lib=LIBRARY)


def register_gradient(name: str, setup_context: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Give the operator `name` its autograd formula."""
    torch.library.register_autograd(f"fusewright::{name}", backward, setup_context=setup_context, lib=LIBRARY)


def autocast_as_matmul(name: str, cast: Callable[..., tuple[Any, ...]]) -> None:
    """Make the operator `name` run in the autocast dtype, as torch does with products and its own attention.

    `cast(dtype, *args)` returns the arguments in that dtype. The device of the cast is the autocast key's own.
    """
    operator = getattr(torch.ops.fusewright, name)
    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def run(*args: Any, device: str = device, keys: Any = keys) -> Any:
            dtype = torch.get_autocast_dtype(device)
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return operator(*cast(dtype, *args))

        LIBRARY.impl(name, run, key)


def forbid_second_derivative(name: str) -> None:
    """Make differentiating through the backward operator `name` an error; the default of torch only warns."""

    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise NotImplementedError(f"fusewright::{name} has no second derivative; turn the rewrite off for this model")

    register_gradient(name, lambda ctx, inputs, output: None, backward)


def bad_input(op: str, argument: str, problem: str) -> UserInputError:
    """The error for an operator argument that cannot be computed with; it is a `ValueError` too."""
    return UserInputError(f"{op}: argument '{argument}' {problem}")
