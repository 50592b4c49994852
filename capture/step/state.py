"""Reads what a training step depends on from the live module and optimizer, and says cheaply when it has changed."""

from __future__ import annotations

import argparse
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from itertools import chain
from operator import is_
from pathlib import PurePath
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fusewright.capture.step.function import Constant, ParameterPlan, Slot, StepFunction, StepPlan, tensor_key
from fusewright.capture.step.optimizer_update import OptimizerState, OptimizerView
from fusewright.capture.step.trace import WholeStep, ambient_key
from fusewright.errors import CaptureError

Inputs = tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]

_CONTAINERS = ("_parameters", "_buffers", "_modules")
_BY_VALUE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, PurePath, np.generic)
_SEQUENCES = (list, tuple, set, frozenset, deque)
_VALUES = (dict, types.MappingProxyType, *_SEQUENCES, types.SimpleNamespace, argparse.Namespace)
_NOT_OPENED = frozenset({"torch", "logging", "threading", "multiprocessing", "concurrent", "asyncio", "_io"})
_TORCH_OWN = frozenset(vars(nn.Module())) - {"training"}
_STDLIB, _TRUSTED = sysconfig.get_path("stdlib"), sys.stdlib_module_names | {"torch"}
_DEEPEST, _MOST = 4, 4000


class Same:
    """Equal only to another of the very same object, which it keeps alive, so that no other can take its id."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Snapshot:
    """Python state as a hashable value that differs where a trace of the code that reads it might.

    Containers count by what they hold; other objects by identity and attributes; functions by code, closure, defaults
    and the globals that they name. Installed code (torch, the standard library, packages) is trusted with its globals.
    """

    def __init__(self, known: Iterable[object]) -> None:
        self._seen = {id(value): (i, value) for i, value in enumerate(known)}  # with the value, so that ids stay taken
        self._left = _MOST

    def of(self, roots: Iterable[object]) -> Hashable:
        """The state of `roots` but for the `known` objects; CaptureError where that is too much for every call."""
        self._queue = list(roots)
        return tuple(self._at(value, 0) for value in self._queue)  # which grows by the functions that are met

    def _at(self, value: object, depth: int) -> Hashable:
        if isinstance(value, _BY_VALUE):  # 0.0 and -0.0 are equal, and nan is not even equal to itself
            return (type(value), value if value and value == value else repr(value))
        if id(value) in self._seen:
            return self._seen[id(value)][0]
        if depth and isinstance(value, types.FunctionType):
            self._queue.append(value)
            return types.FunctionType
        self._seen[id(value)] = (len(self._seen), value)
        head, held = _opened(value)
        self._left -= len(held)
        if self._left < 0 or (held and depth > _DEEPEST):
            raise CaptureError(f"{type(value).__name__}: over {_MOST} values, or over {_DEEPEST} deep, to watch")
        parts = [self._at(child, depth + 1) for child in held]
        return (type(value), head, frozenset(parts) if isinstance(value, set | frozenset) else tuple(parts))


def _opened(value: Any) -> tuple[Hashable, list[object]]:
    """What of `value` counts by identity, and the objects that it holds."""
    kind: Any = type(value)
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]  # not empty
        if _is_trusted(value.__globals__.get("__name__")):  # keeps caches, but may wrap a function of the user
            return Same(value.__code__), [cell for cell in cells if isinstance(cell, types.FunctionType)]
        return Same(value.__code__), [*cells, value.__defaults__, value.__kwdefaults__, vars(value), *_read(value)]
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape), value.ravel()[: _MOST + 1].tolist()
    if isinstance(value, nn.Module):
        own = [{k: v for k, v in vars(part).items() if k not in _TORCH_OWN} for part in value.modules()]
        return tuple(map(Same, value.modules())), [*own, *(type(part).forward for part in value.modules())]
    if isinstance(value, type | types.ModuleType) or kind.__module__.partition(".")[0] in _NOT_OPENED:
        return Same(value), []
    held: list[object] = [*value] if isinstance(value, _SEQUENCES) else []
    held += chain.from_iterable(value.items()) if isinstance(value, dict | types.MappingProxyType) else ()
    held += chain.from_iterable(vars(value).items()) if kind.__dictoffset__ else ()
    held += [slot.__get__(value) for slot in _slots(kind) if hasattr(value, slot.__name__)]
    if isinstance(value, _VALUES) or is_dataclass(kind):
        return None, held
    return Same(value), [*held, kind.__call__] if callable(value) else held


def _is_trusted(module: object) -> bool:
    return str(module).partition(".")[0] in _TRUSTED


@cache
def _slots(kind: type) -> list[types.MemberDescriptorType]:
    found = [d for base in kind.__mro__ for d in vars(base).values() if isinstance(d, types.MemberDescriptorType)]
    return [slot for slot in found if not slot.__name__.endswith("offset__")]  # of the C type, such as __dictoffset__


def _read(function: types.FunctionType) -> list[object]:
    """The globals that a function names, and what it names of modules and classes among them."""
    names = _names(function.__code__)
    found = [function.__globals__.get(name) for name in names]
    for item in found[:]:
        if isinstance(item, type | types.ModuleType) and not _is_trusted(vars(item).get("__module__", item.__name__)):
            found += [vars(item).get(name) for name in names]
    return found


@cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The names that code and the code inside of it look up; none for installed code."""
    if "site-packages" in code.co_filename or code.co_filename.startswith((_STDLIB, "<frozen")):
        return ()
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names(const)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


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
    """The module's parameters, buffers and settings, scanned again only where some attribute was assigned."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self._module = module
        self._optimizer = optimizer
        self._structures: dict[Hashable, int] = {}
        self._layout: Layout | None = None

    def layout(self) -> Layout:
        """The current layout; costs one identity check per attribute where nothing was assigned."""
        if self._layout is None or self._changed():
            self._layout = self._scan()
        return self._layout

    def values(self, constants: Iterable[object]) -> Hashable:
        """Of `constants` and the module, what may have changed since `layout` without an assignment: see Snapshot."""
        return Snapshot(self._parts).of([*self._roots, *constants])

    def _changed(self) -> bool:
        groups = self._optimizer.param_groups
        return (
            len(groups) != len(self._groups)
            or any(not _same(group["params"], last) for group, last in zip(groups, self._groups, strict=True))
            or any(not _same(live.values(), last) for live, last in self._watched)
        )

    def _scan(self) -> Layout:
        self._watched: list[tuple[Mapping[Any, Any], list[Any]]] = []
        described: list[Hashable] = []
        attributes: list[tuple[nn.Module, str]] = []
        self._parts = list(self._module.modules())
        self._roots: list[object] = list({type(part).forward: None for part in self._parts})
        for part in self._parts:
            live = vars(part)
            self._watched.append((live, list(live.values())))
            settings: list[Hashable] = [Same(type(part))]
            for name, value in live.items():
                if isinstance(value, Tensor):
                    attributes.append((part, name))
                    settings.append((name, "tensor"))
                elif isinstance(value, Mapping) and (name in _CONTAINERS or name.endswith("_hooks")):
                    self._watched.append((value, list(value.values())))
                    settings.append((name, tuple(value if name in _CONTAINERS else map(Same, value.values()))))
                elif name in _TORCH_OWN:
                    settings.append((name, Same(value)))
                elif all(isinstance(item, _BY_VALUE) for item in (value if isinstance(value, tuple) else (value,))):
                    settings.append((name, Snapshot(()).of([value])))
                else:
                    self._roots.append(value)
                    settings.append((name, type(value)))
            described.append(tuple(settings))
        named = dict(self._module.named_parameters())
        groups = self._optimizer.param_groups
        parameters: list[Tensor] = list(dict.fromkeys(chain(named.values(), *(group["params"] for group in groups))))
        names = [*named, *[""] * (len(parameters) - len(named))]
        buffers = dict(self._module.named_buffers())
        self._groups = [list(group["params"]) for group in groups]
        key = (tuple(described), tuple(names), tuple(buffers), _tied(self._module), len(groups))
        number = self._structures.setdefault(key, len(self._structures))
        return Layout(number, parameters, names, list(buffers.values()), list(buffers), attributes)


@dataclass
class Call:
    """One call as the graph sees it.

    Attributes:
        view: what the optimizer would do; updates nothing where the optimizer runs outside of the graph.
        tensors, constants, spec: the arguments, `inputs`, taken apart; constants has None in the place of a tensor.
        updates: whether the optimizer's update is part of the graph.
        fresh: optimizer state that torch has not made yet, by parameter; goes to the optimizer with the step.
    """

    layout: Layout
    view: OptimizerView
    tensors: list[Tensor]
    constants: tuple[Constant | None, ...]
    spec: pytree.TreeSpec
    inputs: Inputs
    updates: bool
    fresh: dict[Tensor, dict[str, Tensor]] = field(default_factory=dict)


@dataclass
class LiveStep:
    """The live objects of a training step: what a call looks like, which graph it needs, and that graph's inputs.

    Args:
        module: takes the arguments' trees and returns the loss.
        scale: the loss scale on a device, where a GradScaler is used.
    """

    module: nn.Module
    optimizer: Optimizer
    accumulate: int
    clip: float | None
    scale: Callable[[torch.device], Tensor] | None

    def __post_init__(self) -> None:
        self.module_state = ModuleState(self.module, self.optimizer)
        self._optimizer_state = OptimizerState(self.optimizer)

    def describe(self, inputs: Inputs, *, updates: bool) -> Call:
        """Look at a call; with `updates`, the optimizer's update is part of its graph."""
        layout = self.module_state.layout()
        leaves, spec = pytree.tree_flatten(inputs)
        parameters = layout.parameters
        view = self._optimizer_state.view(parameters) if updates else OptimizerView([None] * len(parameters), [], [])
        constants = tuple(None if isinstance(leaf, Tensor) else Constant(leaf) for leaf in leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return Call(layout, view, tensors, constants, spec, inputs, updates)

    def key(self, call: Call) -> Hashable:
        """Everything that a graph for `call` assumes."""
        parameters = call.layout.parameters
        devices = sorted({parameter.device.type for parameter in parameters} | {t.device.type for t in call.tensors})
        return (
            call.layout.structure,
            tuple(call.view.rules),
            parameter_key(parameters, call.view.bucket),
            state_key(self.optimizer.state, parameters) if call.view.rules else (),
            tuple(map(tensor_key, call.layout.buffers)),
            tuple(tensor_key(vars(owner)[name]) for owner, name in call.layout.attributes),
            tuple(map(tensor_key, call.tensors)),
            call.spec,
            self.module_state.values(call.constants),
            ambient_key(devices),
        )

    def forward_key(self, call: Call) -> Hashable:
        """Everything that a graph of forward and loss alone assumes: neither gradients nor the optimizer."""
        layout = call.layout
        attributes = [vars(owner)[name] for owner, name in layout.attributes]
        tensors = [*layout.parameters, *layout.buffers, *attributes, *call.tensors]
        ambient = ambient_key(sorted({tensor.device.type for tensor in tensors}))
        values = self.module_state.values(call.constants)
        return (layout.structure, tuple(map(tensor_key, tensors)), call.spec, values, ambient)

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
        parameters = zip(layout.names, layout.parameters, call.view.bucket, strict=True)
        plan = StepPlan(
            tuple(ParameterPlan(name, p.requires_grad, p.grad is not None, bucket) for name, p, bucket in parameters),
            tuple(layout.buffer_names),
            tuple(layout.attributes),
            tuple(call.view.rules),
            *(call.spec, call.constants, self.accumulate, self.clip, self.scale is not None),
        )
        hooks = {i: list(p._backward_hooks.values()) for i, p in enumerate(layout.parameters) if p._backward_hooks}
        function = StepFunction(self.module, plan, hooks)
        return function, self.gather(function.slots, call)

    def gather(self, slots: Iterable[Slot], call: Call) -> list[Tensor]:
        """The live tensor of each slot; initial optimizer state that does not exist yet is put into `call.fresh`."""
        scalars = [torch.tensor(values, dtype=torch.float64).unbind() for values in call.view.values]
        names = [rule.scalar_names for rule in call.view.rules]
        found: list[Tensor | None] = []
        for role, i, name in slots:
            if role == "state":
                found.append(self._optimizer_state.tensor(call.layout.parameters[i], name, call.fresh))
            elif role == "scalar":
                found.append(scalars[i][names[i].index(name)])
            elif role == "scale":
                found.append(None if self.scale is None else self.scale(call.layout.parameters[0].device))
            else:
                found.append(call.tensors[i] if role == "argument" else _held(call.layout, role, i))
        tensors = [tensor for tensor in found if tensor is not None]
        assert len(tensors) == len(found), "a slot holds no tensor, and the signature says that it does"
        return tensors

    def results(self, step: WholeStep) -> dict[Slot, Tensor]:
        """What lies now in the slots that `step` writes, and the gradients that it would hand out."""
        layout = self.module_state.layout()
        state = self.optimizer.state
        found: dict[Slot, Tensor | None] = {}
        for role, i, name in step.results:
            found[Slot(role, i, name)] = (
                state[layout.parameters[i]][name] if role == "state" else _held(layout, role, i)
            )
        return {slot: tensor.detach() for slot, tensor in found.items() if tensor is not None}

    def finish(self, step: WholeStep, call: Call) -> None:
        """After the graph's update: count the optimizer's step and drop the gradients that it used."""
        parameters = call.layout.parameters
        rules = [call.view.rule(i) for i in step.updated]
        self._optimizer_state.commit([parameters[i] for i in step.updated], rules, call.fresh)
        for parameter, bucket in zip(parameters, call.view.bucket, strict=True):
            if bucket is not None:
                parameter.grad = None


def _held(layout: Layout, role: str, i: int) -> Tensor | None:
    """What the module holds in a slot."""
    if role == "attribute":
        owner, name = layout.attributes[i]
        assert isinstance(vars(owner)[name], Tensor), f"attribute {name!r} is no tensor any more"
        return cast(Tensor, vars(owner)[name])
    if role == "buffer":
        return layout.buffers[i]
    assert role in ("param", "grad"), f"the module has no {role}"
    return layout.parameters[i] if role == "param" else layout.parameters[i].grad


def parameter_key(parameters: Sequence[Tensor], buckets: Sequence[int | None]) -> tuple[Hashable, ...]:
    """All that the graph assumes about the parameters and their gradients."""
    return tuple(
        (
            *tensor_key(parameter),
            bucket,
            None if parameter.grad is None else tensor_key(parameter.grad),
            tuple(map(Same, (parameter._backward_hooks or {}).values())),
            bool(parameter._post_accumulate_grad_hooks),
        )
        for parameter, bucket in zip(parameters, buckets, strict=True)
    )


def state_key(state: Mapping[Tensor, Mapping[str, Any]], parameters: Sequence[Tensor]) -> tuple[Hashable, ...]:
    """State tensors that are not laid out as their parameter (moved to another device, another dtype, ...)."""
    return tuple(
        (i, name, *tensor_key(tensor))
        for i, p in enumerate(parameters)
        for name, tensor in state.get(p, {}).items()
        if name != "step" and isinstance(tensor, Tensor)
        if (tensor.dtype, tensor.device, tensor.stride()) != (p.dtype, p.device, p.stride())
    )


def _same(live: Collection[Any], last: list[Any]) -> bool:
    return len(live) == len(last) and (not last or all(map(is_, live, last)))


def _tied(module: nn.Module) -> tuple[int, ...]:
    """For each occurrence of a parameter or buffer, the first occurrence of the same tensor."""
    first: dict[int, int] = {}
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return tuple(first.setdefault(id(tensor), i) for i, (_, tensor) in enumerate(every))
