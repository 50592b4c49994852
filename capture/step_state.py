"""Reads what a training step depends on from the live module and optimizer, and says cheaply when it has changed."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fusewright.capture.optimizer_update import OptimizerState, OptimizerView
from fusewright.capture.whole_step import Constant, ParameterPlan, Slot, StepFunction, StepPlan, WholeStep
from fusewright.errors import CaptureError

Inputs = tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]

_CONTAINERS = ("_parameters", "_buffers", "_modules")
_BY_VALUE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Same:
    """Equal only to another of the very same object, which it keeps alive, so that no other can take its id."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass
class Layout:
    """What a scan of the module found. `structure` is equal for equal modules."""

    structure: int
    parameters: list[Tensor]
    names: list[str]
    buffers: list[Tensor]
    buffer_names: list[str]
    attributes: list[tuple[nn.Module, str]]


class ModuleState:
    """The module's parameters, buffers and settings, scanned again only where some attribute was assigned.

    Attributes that are containers (a configuration object, a list) are watched by identity only.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self._module = module
        self._optimizer = optimizer
        self._watched: list[tuple[Mapping[Any, Any], list[Any]]] = []
        self._empty: list[Mapping[Any, Any]] = []
        self._groups: list[list[Any]] = []
        self._structures: dict[Hashable, int] = {}
        self._layout: Layout | None = None

    def layout(self) -> Layout:
        """The current layout; costs one identity check per attribute where nothing was assigned."""
        if self._layout is None or self._changed():
            self._layout = self._scan()
        return self._layout

    def _changed(self) -> bool:
        groups = self._optimizer.param_groups
        return (
            len(groups) != len(self._groups)
            or any(not _same(group["params"], last) for group, last in zip(groups, self._groups, strict=True))
            or any(self._empty)
            or any(not _same(live.values(), last) for live, last in self._watched)
        )

    def _scan(self) -> Layout:
        watched: list[tuple[Mapping[Any, Any], list[Any]]] = []
        described: list[Hashable] = []
        attributes: list[tuple[nn.Module, str]] = []
        for part in self._module.modules():
            live = vars(part)
            watched.append((live, list(live.values())))
            settings: list[Hashable] = [Same(type(part))]
            for name, value in live.items():
                if isinstance(value, Tensor):
                    attributes.append((part, name))
                    settings.append((name, "tensor"))
                elif isinstance(value, _BY_VALUE):
                    settings.append((name, type(value), value))
                elif isinstance(value, Mapping) and (name in _CONTAINERS or name.endswith("_hooks")):
                    watched.append((value, list(value.values())))
                    settings.append((name, tuple(value if name in _CONTAINERS else map(Same, value.values()))))
                else:
                    settings.append((name, Same(value)))
            described.append(tuple(settings))
        named = dict(self._module.named_parameters())
        parameters, names = cast(list[Tensor], list(named.values())), list(named)
        known = {id(parameter) for parameter in parameters}
        for group in self._optimizer.param_groups:
            extra = [parameter for parameter in group["params"] if id(parameter) not in known]
            parameters += extra
            names += [""] * len(extra)
            known |= {id(parameter) for parameter in extra}
        buffers = dict(self._module.named_buffers())
        self._watched = [(live, last) for live, last in watched if last]
        self._empty = [live for live, last in watched if not last]
        self._groups = [list(group["params"]) for group in self._optimizer.param_groups]
        key = (tuple(described), tuple(names), tuple(buffers), _tied(self._module), len(self._optimizer.param_groups))
        number = self._structures.setdefault(key, len(self._structures))
        return Layout(number, parameters, names, list(buffers.values()), list(buffers), attributes)


@dataclass
class Call:
    """One call as the graph sees it.

    Attributes:
        view: what the optimizer would do; updates nothing where the optimizer runs outside of the graph.
        tensors, constants, spec: the arguments; constants has None in the place of a tensor.
        fresh: optimizer state that torch has not made yet, by parameter; goes to the optimizer with the step.
    """

    layout: Layout
    view: OptimizerView
    tensors: list[Tensor]
    constants: tuple[Constant | None, ...]
    spec: pytree.TreeSpec
    fresh: dict[Tensor, dict[str, Tensor]] = field(default_factory=dict)


class LiveStep:
    """The live objects of a training step: what a call looks like, which graph it needs, and that graph's inputs.

    Args:
        module: takes the arguments' trees and returns the loss; `loss_fn` is watched for values that it closes over.
        scale: the loss scale on a device, where a GradScaler is used.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_fn: object,
        optimizer: Optimizer,
        *,
        accumulate: int,
        clip: float | None,
        scale: Callable[[torch.device], Tensor] | None,
    ) -> None:
        self._module = module
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._accumulate = accumulate
        self._clip = clip
        self._scale = scale
        self._module_state = ModuleState(module, optimizer)
        self._optimizer_state = OptimizerState(optimizer)

    def describe(self, inputs: Inputs, *, updates: bool) -> Call:
        """Look at a call; with `updates`, the optimizer's update is part of its graph."""
        layout = self._module_state.layout()
        leaves, spec = pytree.tree_flatten(inputs)
        return Call(
            layout,
            self._optimizer_state.view(layout.parameters)
            if updates
            else OptimizerView([None] * len(layout.parameters), [], []),
            [leaf for leaf in leaves if isinstance(leaf, Tensor)],
            tuple(None if isinstance(leaf, Tensor) else Constant(leaf) for leaf in leaves),
            spec,
        )

    def key(self, call: Call) -> Hashable:
        """Everything that a graph for `call` assumes."""
        parameters = call.layout.parameters
        devices = sorted({parameter.device.type for parameter in parameters} | {t.device.type for t in call.tensors})
        return (
            call.layout.structure,
            tuple(call.view.rules),
            parameter_key(parameters, call.view.bucket),
            state_key(self._optimizer.state, parameters) if call.view.rules else (),
            tuple(map(tensor_key, call.layout.buffers)),
            tuple(tensor_key(vars(owner)[name]) for owner, name in call.layout.attributes),
            tuple(map(tensor_key, call.tensors)),
            tuple(None if constant is None else constant_key(constant.value) for constant in call.constants),
            call.spec,
            closure_key(self._loss_fn),
            ambient_key(devices),
        )

    def function(self, call: Call) -> tuple[StepFunction, list[Tensor]]:
        """The step as a function, and its inputs now.

        Raises:
            CaptureError: a graph could not do what the eager loop does here.
        """
        layout = call.layout
        for name, parameter in zip(layout.names, layout.parameters, strict=True):
            if parameter._post_accumulate_grad_hooks:
                raise CaptureError(f"parameter {name!r} has a hook that runs after its gradient is accumulated")
        if any(tensor.requires_grad for tensor in call.tensors):
            raise CaptureError("an argument requires a gradient")
        for constant in call.constants:
            if constant is not None and constant_key(constant.value) == _unhashable(constant.value):
                raise CaptureError(f"an argument of type {type(constant.value).__name__} is no tensor and not hashable")
        plan = StepPlan(
            tuple(
                ParameterPlan(name, parameter.requires_grad, parameter.grad is not None, bucket)
                for name, parameter, bucket in zip(layout.names, layout.parameters, call.view.bucket, strict=True)
            ),
            tuple(layout.buffer_names),
            tuple(layout.attributes),
            tuple(call.view.rules),
            call.spec,
            call.constants,
            self._accumulate,
            self._clip,
            self._scale is not None,
        )
        function = StepFunction(self._module, plan, gradient_hooks(layout.parameters))
        return function, self.gather(function.slots, call)

    def gather(self, slots: Iterable[Slot], call: Call) -> list[Tensor]:
        """The live tensor of each slot; initial optimizer state that does not exist yet is put into `call.fresh`."""
        scalars = [torch.tensor(values, dtype=torch.float64).unbind() for values in call.view.values]
        names = [rule.scalar_names for rule in call.view.rules]
        found: list[Tensor] = []
        for slot in slots:
            role, i, name = slot
            if role == "state":
                found.append(self._optimizer_state.tensor(call.layout.parameters[i], name, call.fresh))
            elif role == "scalar":
                found.append(scalars[i][names[i].index(name)])
            elif role == "argument":
                found.append(call.tensors[i])
            elif role == "scale":
                assert self._scale is not None, "a scale without a scaler"
                found.append(self._scale(call.layout.parameters[0].device))
            else:
                tensor = _held(call.layout, slot)
                assert tensor is not None, f"{slot} holds no tensor, and the signature says that it does"
                found.append(tensor)
        return found

    def results(self, step: WholeStep) -> dict[Slot, Tensor]:
        """What lies now in the slots that `step` writes, and the gradients that it would hand out."""
        layout = self._module_state.layout()
        found: dict[Slot, Tensor] = {}
        for slot in step.results:
            state = self._optimizer.state[layout.parameters[slot.number]] if slot.role == "state" else None
            tensor = _held(layout, slot) if state is None else state[slot.name]
            if tensor is not None:
                found[slot] = tensor.detach()
        return found

    def restore(self, before: Mapping[Slot, Tensor], call: Call, *, updated: Iterable[int]) -> None:
        """Put the tensors of `before` into these objects: copies of those that `call` described, one step later."""
        layout, state = self._module_state.layout(), self._optimizer.state
        for parameter, original in zip(layout.parameters, call.layout.parameters, strict=True):
            parameter.grad = None
            if original in call.fresh:
                state.pop(parameter, None)
        for i in updated:
            counter = state.get(layout.parameters[i], {}).get("step")
            if isinstance(counter, Tensor) and Slot("state", i, "step") not in before:
                counter.sub_(1)
        for (role, i, name), tensor in before.items():  # parameters come first: their gradients need their dtype
            if role in ("param", "buffer"):
                (layout.parameters if role == "param" else layout.buffers)[i].data = tensor
            elif role == "attribute":
                owner, attribute = layout.attributes[i]
                vars(owner)[attribute] = tensor
            elif role == "grad":
                layout.parameters[i].grad = tensor
            elif role == "state" and layout.parameters[i] in state:
                state[layout.parameters[i]][name] = tensor

    def finish(self, step: WholeStep, call: Call) -> None:
        """After the graph's update: count the optimizer's step and drop the gradients that it used."""
        parameters = call.layout.parameters
        rules = [call.view.rule(i) for i in step.updated]
        self._optimizer_state.commit([parameters[i] for i in step.updated], rules, call.fresh)
        for parameter, bucket in zip(parameters, call.view.bucket, strict=True):
            if bucket is not None:
                parameter.grad = None


def _held(layout: Layout, slot: Slot) -> Tensor | None:
    """What the module holds in a slot."""
    if slot.role == "param":
        return layout.parameters[slot.number]
    if slot.role == "grad":
        return layout.parameters[slot.number].grad
    if slot.role == "buffer":
        return layout.buffers[slot.number]
    assert slot.role == "attribute", f"the module has no {slot.role}"
    owner, name = layout.attributes[slot.number]
    found = vars(owner)[name]
    assert isinstance(found, Tensor), f"attribute {name!r} is no tensor any more"
    return found


def constant_key(value: object) -> Hashable:
    """A constant by type and value; a type that cannot be hashed has one key, and `LiveStep.function` refuses it."""
    try:
        hash(value)
    except TypeError:
        return _unhashable(value)
    return (type(value), value)


def _unhashable(value: object) -> Hashable:
    return ("not hashable", type(value))


def closure_key(function: object) -> tuple[Hashable, ...]:
    """The values that a plain function closes over: plain ones by value, others by identity."""
    if not isinstance(function, types.FunctionType) or function.__closure__ is None:
        return ()
    values = [cell.cell_contents for cell in function.__closure__]
    return tuple((type(value), value) if isinstance(value, _BY_VALUE) else Same(value) for value in values)


def parameter_key(parameters: Sequence[Tensor], buckets: Sequence[int | None]) -> tuple[Hashable, ...]:
    """All that the graph assumes about the parameters and their gradients."""
    key: list[Hashable] = []
    for parameter, bucket in zip(parameters, buckets, strict=True):
        grad = parameter.grad
        key.append(
            (
                *tensor_key(parameter),
                bucket,
                None if grad is None else tensor_key(grad),
                tuple(map(Same, _hooks(parameter))),
                bool(parameter._post_accumulate_grad_hooks),
            )
        )
    return tuple(key)


def state_key(state: Mapping[Tensor, Mapping[str, Any]], parameters: Sequence[Tensor]) -> tuple[Hashable, ...]:
    """State tensors that are not laid out as their parameter (moved to another device, another dtype, ...)."""
    odd: list[Hashable] = []
    for i, parameter in enumerate(parameters):
        for name, tensor in state.get(parameter, {}).items():
            if (
                name != "step"
                and isinstance(tensor, Tensor)
                and (
                    tensor.dtype is not parameter.dtype
                    or tensor.device != parameter.device
                    or tensor.stride() != parameter.stride()
                )
            ):
                odd.append((i, name, *tensor_key(tensor)))
    return tuple(odd)


def tensor_key(tensor: Tensor) -> tuple[Hashable, ...]:
    """What a graph assumes about one tensor."""
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, type(tensor))


def ambient_key(device_types: Iterable[str]) -> tuple[Hashable, ...]:
    """Process-wide settings that a trace bakes in."""
    autocast = [(t, torch.get_autocast_dtype(t)) for t in device_types if torch.is_autocast_enabled(t)]
    return (
        tuple(autocast),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_inference_mode_enabled(),
    )


def gradient_hooks(parameters: Sequence[Tensor]) -> dict[int, list[Callable[..., Any]]]:
    """The hooks that users registered on parameters, by position."""
    return {i: list(_hooks(parameter)) for i, parameter in enumerate(parameters) if _hooks(parameter)}


def _same(live: Collection[Any], last: list[Any]) -> bool:
    return len(live) == len(last) and all(map(is_, live, last))


def _hooks(parameter: Tensor) -> Iterable[Callable[..., Any]]:
    hooks = parameter._backward_hooks
    return () if not hooks else hooks.values()


def _tied(module: nn.Module) -> tuple[int, ...]:
    """For each occurrence of a parameter or buffer, the first occurrence of the same tensor."""
    first: dict[int, int] = {}
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return tuple(first.setdefault(id(tensor), i) for i, (_, tensor) in enumerate(every))
