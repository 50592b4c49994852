"""`Workload`: a model, its inputs per bucket and its loss, as one value that tests, tuner and benchmarks all take."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fusewright.errors import DimsError, UserInputError
from fusewright.trees import cast_floats

Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

LEARNING_RATE = 1e-3  # of the steps of descent that `observe_step` takes
ADVERSARIAL_SEED = 2**31 - 1
"""Passed as `seed` to `Workload.inputs` where a hostile draw is wanted: large magnitudes, masked rows, empty segments.

An `inputs` function that knows no hostile draw may treat it as any other seed.
"""


@dataclass(frozen=True, eq=False)
class Workload:
    """One model to tune, check or measure.

    Attributes:
        name: letters, digits, `_`, `-`, `.`; unique in a job file.
        family: what it is averaged with, as "language" or "convolution".
        model: makes a new module with random or loaded weights; called under a fixed seed (`build`).
        inputs: `inputs(length, seed) -> (args, kwargs)` of one forward call, on CPU. The same arguments give the same
            values. Input tensors that require grad have their gradients compared too.
        lengths: the sizes to run, ascending: tokens, or the batch size where a model has no length.
        dims: which dims of which forward argument vary and their names, as for `optimize(dims=...)`:
            `{"input_ids": {1: "tokens"}}`. Keys are argument names of `forward`, also of arguments passed by position.
            The first name is the one that `lengths` counts; further names may grow in their own way.
        loss: a scalar tensor from whatever the model returns.
        dtype: floating dtype of parameters and floating inputs.
        train: False for a model that only runs inference.
        flops: `flops(length, mode) -> FLOPs` of one step, mode "inference" or "training"; a multiply-add is 2. None:
            counted from the graph.

    Raises:
        UserInputError: a field that cannot be right, named in the message.
    """

    name: str
    family: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int, int], Inputs]
    lengths: tuple[int, ...]
    dims: Mapping[str, Mapping[int, str]]
    loss: Callable[[Any], Tensor]
    dtype: torch.dtype = torch.float32
    train: bool = True
    flops: Callable[[int, str], float] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", self.name):
            raise UserInputError(f"Workload name {self.name!r}: use letters, digits, '_', '-' and '.'.")
        if not isinstance(self.family, str) or not self.family:
            raise self._wrong("family", "must be a word such as 'language'")
        for field in ("model", "inputs", "loss"):
            if not callable(getattr(self, field)):
                raise self._wrong(field, f"must be callable, not {type(getattr(self, field)).__name__}")
        if isinstance(self.model, nn.Module):
            raise self._wrong("model", "must be a function that makes the module, not the module itself: pass a lambda")
        if self.flops is not None and not callable(self.flops):
            raise self._wrong("flops", "must be callable or None")
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise self._wrong("dtype", f"must be a floating torch.dtype, not {self.dtype!r}")
        object.__setattr__(self, "lengths", self._checked_lengths())
        object.__setattr__(self, "dims", self._checked_dims())

    def _wrong(self, field: str, problem: str) -> UserInputError:
        return UserInputError(f"Workload {self.name!r}: {field} {problem}.")

    def _checked_lengths(self) -> tuple[int, ...]:
        lengths = tuple(self.lengths) if isinstance(self.lengths, (tuple, list)) else ()
        if not lengths or any(type(length) is not int or length < 1 for length in lengths):
            raise self._wrong("lengths", f"must be a tuple of positive integers, not {self.lengths!r}")
        if any(a >= b for a, b in itertools.pairwise(lengths)):
            raise self._wrong("lengths", f"must ascend without repeats, not {lengths}")
        return lengths

    def _checked_dims(self) -> dict[str, dict[int, str]]:
        if not isinstance(self.dims, Mapping):
            raise self._wrong("dims", f"must map argument names to {{dim: name}}, not {type(self.dims).__name__}")
        if not self.dims and len(self.lengths) > 1:
            raise self._wrong("dims", f"names nothing that changes between the lengths {self.lengths}")
        for argument, names in self.dims.items():
            good = isinstance(names, Mapping) and all(
                type(dim) is int and dim >= 0 and isinstance(name, str) and name.isidentifier()
                for dim, name in names.items()
            )
            if not isinstance(argument, str) or not good or not names:
                raise self._wrong("dims", f"entry {argument!r}: {names!r} is not like 'input_ids': {{1: 'tokens'}}")
        return {argument: dict(names) for argument, names in self.dims.items()}

    @property
    def length_name(self) -> str | None:
        """The dim name that `lengths` counts: the first in `dims`; None where nothing varies."""
        return next((name for names in self.dims.values() for name in names.values()), None)

    def build(self, seed: int = 0, *, training: bool | None = None) -> nn.Module:
        """Make the model under `seed`, in `dtype`, in training mode by `training` (default: `train`).

        The global random state is as before afterwards.

        Raises:
            UserInputError: the factory returned something else than a module.
        """
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = self.model()
        if not isinstance(model, nn.Module):
            raise self._wrong("model", f"returned {type(model).__name__}, not a torch.nn.Module")
        if any(p.is_floating_point() and p.dtype != self.dtype for p in model.parameters()):
            model = model.to(self.dtype)
        return model.train(self.train if training is None else training)

    def make_inputs(self, length: int, seed: int = 0) -> Inputs:
        """The inputs of one call, floating tensors cast to `dtype`; the global random state is as before afterwards.

        Raises:
            UserInputError: `inputs` returned something else than (args, kwargs).
        """
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            made = self.inputs(length, seed)
        if not (
            isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], tuple) and isinstance(made[1], dict)
        ):
            raise self._wrong("inputs", f"must return (args tuple, kwargs dict), not {type(made).__name__}")
        args, kwargs = cast_floats(made, self.dtype)
        return args, kwargs

    def scalar_loss(self, output: Any) -> Tensor:
        """`loss(output)`, checked.

        Raises:
            UserInputError: the loss is no scalar tensor.
        """
        value = self.loss(output)
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise self._wrong("loss", f"must return a tensor of one element, not {what}")
        return value

    def check(self, model: nn.Module | None = None) -> None:
        """Make the inputs of every length and hold them against `dims`, without running the model.

        Raises:
            DimsError: an argument in `dims` is missing or no tensor, a dim is out of range, one name has two sizes in
                one call, or the first name does not have the size of the length.
        """
        model = self.build() if model is None else model
        for length in self.lengths:
            args, kwargs = self.make_inputs(length)
            sizes = named_sizes(model, args, kwargs, self.dims)
            if self.length_name is not None and sizes[self.length_name] != length:
                raise DimsError(
                    f"Workload {self.name!r}: inputs({length}, 0) give {self.length_name!r} the size "
                    f"{sizes[self.length_name]}; the first name in dims must have the size of the length."
                )


def named_sizes(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dims: Mapping[str, Mapping[int, str]]
) -> dict[str, int]:
    """Size of each name of `dims` in a call `model(*args, **kwargs)`.

    Raises:
        DimsError: an argument is missing or no tensor, a dim is out of range, or one name has two sizes.
    """
    arguments = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    flat = {**arguments, **arguments.get("kwargs", {})} if isinstance(arguments.get("kwargs", {}), dict) else arguments
    sizes: dict[str, int] = {}
    for argument, names in dims.items():
        value = flat.get(argument)
        if not isinstance(value, Tensor):
            known = ", ".join(name for name, given in flat.items() if isinstance(given, Tensor))
            raise DimsError(
                f"dims name the argument {argument!r}, but the tensors of this call are: {known or 'none'}."
            )
        for dim, name in names.items():
            if dim >= value.dim():
                raise DimsError(f"dims name dim {dim} of {argument!r}, which has {value.dim()} dims.")
            if sizes.setdefault(name, value.shape[dim]) != value.shape[dim]:
                raise DimsError(
                    f"{name!r} is {sizes[name]} and {value.shape[dim]} in one call (dim {dim} of {argument!r}); "
                    "give the second dim its own name."
                )
    return sizes


def move_inputs(tree: Any, device: torch.device) -> Any:
    """`tree` with its tensors on `device`, as leaves of autograd where they required grad."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().to(device).requires_grad_(leaf.requires_grad)

    return pytree.tree_map(move, tree)


def observe(workload: Workload, model: nn.Module, length: int, seed: int = 0, *, training: bool) -> dict[str, Any]:
    """Run one step of `model` on fresh inputs and return everything that a correct step determines.

    The model's own mode is used as it is. Random operations draw from `seed`; the global random state is as before
    afterwards. Gradients of the parameters are reset before and left after a training step.

    Returns:
        `output` as the model returned it; `buffers` {name: copy after the step}; and for a training step `loss` and
        `gradients` {name: tensor or None} of the parameters and, as `input:<argument>`, of inputs that require grad.
    """
    device = next(model.parameters(), torch.empty(0)).device
    # The model's own dtype, so that the float64 reference is `observe` of a `deepcopy(model).double()`.
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), workload.dtype)
    args, kwargs = move_inputs(cast_floats(workload.make_inputs(length, seed), dtype), device)
    with torch.random.fork_rng(), torch.set_grad_enabled(training):
        torch.manual_seed(seed)
        model.zero_grad(set_to_none=True)
        output = model(*args, **kwargs)
        seen: dict[str, Any] = {"output": output}
        if training:
            seen["loss"] = workload.scalar_loss(output)
            seen["loss"].backward()
            seen["gradients"] = {name: p.grad for name, p in model.named_parameters()}
            seen["gradients"] |= {
                f"input:{name}": value.grad
                for name, value in {**dict(enumerate(args)), **kwargs}.items()
                if isinstance(value, Tensor) and value.requires_grad
            }
    seen["buffers"] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return seen


def observe_step(
    workload: Workload, model: nn.Module, length: int, seed: int = 0, *, training: bool, steps: int = 1
) -> dict[str, Any]:
    """`observe`, and for training also `parameters` {name: copy} after `steps` steps of plain gradient descent.

    Output, loss and gradients are those of the first step; buffers are those after the last. The k-th step (from 0)
    takes the inputs of `seed` + k. The gradients of the parameters are cleared afterwards.
    """
    seen = observe(workload, model, length, seed, training=training)
    if not training:
        return seen
    descent = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    descent.step()
    for step in range(1, steps):
        seen["buffers"] = observe(workload, model, length, seed + step, training=True)["buffers"]
        descent.step()
    seen["parameters"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return seen
