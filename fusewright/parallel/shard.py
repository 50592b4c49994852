"""Wraps a module so that parameters live sharded and each use gathers them inside the compiled graph.

The technique is SimpleFSDP's (Zhang et al. 2024, https://arxiv.org/abs/2411.00284): a parameter is a DTensor, and
reading it is a differentiable function of it. Forward shows a functional all-gather, backward a functional
reduce-scatter; no hook runs on the side, so nothing breaks the graph and a pass may move or merge what it sees.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fusewright.config import to_enum
from fusewright.errors import UserInputError


class ShardMode(enum.Enum):
    """Where a parameter lives between its uses."""

    FULLY_SHARD = "fully_shard"  # ZeRO-3: split along dim 0, gathered for forward and again for backward
    REPLICATE = "replicate"  # data parallel: whole on every rank, gradients all-reduced


class _MeanGradient(torch.autograd.Function):
    """Identity whose gradient is divided by the number of ranks.

    Division comes before the sum: it works on every backend (gloo has no averaging reduction) and a half-precision sum
    cannot overflow where the mean does not.
    """

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad / ctx.ranks, None


@dataclass(frozen=True)
class _Plan:
    """How every parameter of one `shard` call is stored and gathered."""

    mesh: DeviceMesh
    mode: ShardMode
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None

    @property
    def stored(self) -> Placement:
        return Shard(0) if self.mode is ShardMode.FULLY_SHARD else Replicate()

    def whole(self, parameter: DTensor) -> torch.Tensor:
        """The parameter as a plain tensor of its full shape, in `param_dtype`."""
        if self.mode is ShardMode.FULLY_SHARD and torch.is_grad_enabled():
            # Marks the gather as cheap to repeat: the partitioner keeps the shard for backward, not the whole.
            full: torch.Tensor = checkpoint(self._gather, parameter, use_reentrant=False)
            return full
        return self._gather(parameter)

    def _gather(self, parameter: DTensor) -> torch.Tensor:
        replicated = parameter.redistribute(
            placements=[Replicate()], forward_dtype=self.param_dtype, backward_dtype=self.reduce_dtype
        )
        full = replicated.to_local(grad_placements=[Partial("sum")])
        mean: torch.Tensor = _MeanGradient.apply(full, self.mesh.size())
        return mean


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    mode: ShardMode | str = ShardMode.FULLY_SHARD,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Turn the parameters of `module` into DTensors over `mesh`, gathered where forward reads them; in place.

    Every rank must call it with the same parameter values (rank 0's are not broadcast). Gradients are the mean over
    ranks, and are DTensors placed as their parameter. Names in `state_dict()` stay. Any dim 0 works, also one smaller
    than the mesh. A parameter shared by two modules stays shared. Outside forward, reading `module.weight` gathers
    too: initialise before sharding, and write through `parameters()`.

    Args:
        module: its parameters are whole, plain tensors on the mesh's device type.
        mesh: one dimension.
        mode: "fully_shard" splits along dim 0, "replicate" keeps whole parameters and all-reduces gradients.
        param_dtype: dtype that forward sees; the cast comes before the gather. None: the stored dtype.
        reduce_dtype: dtype in which gradients are summed. None: the dtype that forward sees.

    Returns:
        `module` itself; the class of each submodule with parameters is replaced by a subclass of the same name.

    Raises:
        UserInputError: the mesh has several dimensions, a parameter is a DTensor already, or a submodule keeps packed
            copies of its weights (`nn.LSTM`, `nn.GRU`, `nn.RNN`). Nothing was changed.
        UnknownNameError: `mode` is not known.
    """
    plan = _Plan(mesh, to_enum(ShardMode, mode, "mode"), param_dtype, reduce_dtype)
    _check(module, mesh)
    moved: dict[int, nn.Parameter] = {}
    classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}
    for owner in module.modules():
        own = dict(owner.named_parameters(recurse=False, remove_duplicate=False))
        for name, parameter in own.items():
            if id(parameter) not in moved:
                spread = distribute_tensor(parameter.detach(), mesh, [plan.stored], src_data_rank=None)
                moved[id(parameter)] = nn.Parameter(spread, requires_grad=parameter.requires_grad)
            owner.register_parameter(name, moved[id(parameter)])
        if own:
            key = (type(owner), tuple(own))
            if key not in classes:
                classes[key] = _gathering_class(type(owner), tuple(own), plan)
            owner.__class__ = classes[key]
    return module


def _check(module: nn.Module, mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise UserInputError(
            f"shard(mesh=...): needs a mesh of one dimension, got {mesh.ndim}; pass a slice such as mesh['dp']."
        )
    for path, child in module.named_modules():
        if isinstance(child, nn.RNNBase):
            raise UserInputError(
                f"shard(module=...): {path or 'it'} is {type(child).__name__}, which packs its weights."
            )
    for path, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise UserInputError(f"shard(module=...): parameter {path!r} is a DTensor already; shard a module once.")


def _gathering_class(base: type[nn.Module], names: tuple[str, ...], plan: _Plan) -> type[nn.Module]:
    """A subclass of `base` in which reading one of `names` gathers it."""

    def reader(name: str) -> property:
        # Only the getter: nn.Module.__setattr__ stores parameters itself and never asks the class.
        return property(lambda self: plan.whole(self._parameters[name]))

    members: dict[str, object] = {name: reader(name) for name in names}
    return type(base.__name__, (base,), {**members, "__module__": base.__module__, "__qualname__": base.__qualname__})
