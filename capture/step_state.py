"""Reads what a training step depends on from the live module and optimizer, and says cheaply when it has changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusewright.capture.optimizer_update import UpdateRule, rule_of, scalars
from fusewright.capture.whole_step import Slot

_CONTAINERS = ("_parameters", "_buffers", "_modules")
_BY_VALUE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass
class Layout:
    """What a scan of the module found. `structure` is equal for equal modules; it keeps alive what it names by id."""

    structure: int
    parameters: list[Tensor]
    names: list[str]
    buffers: list[Tensor]
    buffer_names: list[str]
    attributes: list[tuple[nn.Module, str]]


class ModuleState:
    """The module's parameters, buffers and settings, scanned again only where some attribute was assigned.

    Contents of containers that are attributes (a configuration object, a list) are watched by identity only.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self._module = module
        self._optimizer = optimizer
        self._watched: list[tuple[Mapping[Any, Any], list[Any]]] = []
        self._groups: list[list[Any]] = []
        self._structures: dict[Hashable, tuple[int, list[Any]]] = {}
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
            or any(not _same(live.values(), last) for live, last in self._watched)
        )

    def _scan(self) -> Layout:
        watched: list[tuple[Mapping[Any, Any], list[Any]]] = []
        described: list[Hashable] = []
        kept_alive: list[Any] = []
        attributes: list[tuple[nn.Module, str]] = []
        for part in self._module.modules():
            live = vars(part)
            watched.append((live, list(live.values())))
            settings: list[Hashable] = [type(part)]
            for name, value in live.items():
                if isinstance(value, Tensor):
                    attributes.append((part, name))
                    settings.append((name, "tensor"))
                elif isinstance(value, _BY_VALUE):
                    settings.append((name, type(value), value))
                elif name in _CONTAINERS or name.endswith("_hooks"):
                    watched.append((value, list(value.values())))
                    settings.append((name, tuple(value) if name in _CONTAINERS else _ids(value.values())))
                    kept_alive += [] if name in _CONTAINERS else list(value.values())
                else:
                    settings.append((name, id(value)))
                    kept_alive.append(value)
            described.append(tuple(settings))
        named = dict(self._module.named_parameters())
        parameters, names = list(named.values()), list(named)
        known = {id(parameter) for parameter in parameters}
        for group in self._optimizer.param_groups:
            extra = [parameter for parameter in group["params"] if id(parameter) not in known]
            parameters += extra
            names += [""] * len(extra)
            known |= {id(parameter) for parameter in extra}
        buffers = dict(self._module.named_buffers())
        self._watched = watched
        self._groups = [list(group["params"]) for group in self._optimizer.param_groups]
        key = (tuple(described), tuple(names), tuple(buffers), _tied(self._module), len(self._optimizer.param_groups))
        number, _ = self._structures.setdefault(key, (len(self._structures), kept_alive))
        return Layout(number, parameters, names, list(buffers.values()), list(buffers), attributes)


@dataclass
class OptimizerView:
    """How the optimizer updates each parameter at this step: `bucket[i]` for parameter i, None where it does not."""

    bucket: list[int | None]
    rules: list[UpdateRule]
    values: list[tuple[float, ...]]

    def rule(self, i: int) -> UpdateRule:
        """The rule of parameter i, which the optimizer updates."""
        bucket = self.bucket[i]
        assert bucket is not None, f"parameter {i} is not updated"
        return self.rules[bucket]


class OptimizerState:
    """The optimizer's parameter groups and state, read and written in torch's own layout."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._counters: dict[int, tuple[Tensor, int, float]] = {}

    def view(self, parameters: Sequence[Tensor]) -> OptimizerView:
        """Rules, scalars and buckets: parameters of one group with equal step counters share a bucket."""
        place = {id(parameter): i for i, parameter in enumerate(parameters)}
        view = OptimizerView([None] * len(parameters), [], [])
        for group in self._optimizer.param_groups:
            rule = rule_of(self._optimizer, group)
            buckets: dict[float, int] = {}
            for parameter in group["params"]:
                if not parameter.requires_grad and parameter.grad is None:
                    continue  # frozen
                i = place[id(parameter)]
                step = self._next_step(i, parameter, rule, group)
                if step not in buckets:
                    buckets[step] = len(view.rules)
                    view.rules.append(rule)
                    view.values.append(scalars(rule, group, step))
                view.bucket[i] = buckets[step]
        return view

    def _next_step(self, i: int, parameter: Tensor, rule: UpdateRule, group: Mapping[str, Any]) -> float:
        """The counter after this step; for SGD, 1 where dampening must not apply yet and 2 elsewhere."""
        state = self._optimizer.state.get(parameter, {})
        if "momentum" in group:
            return 1.0 if group["dampening"] != 0 and state.get("momentum_buffer") is None else 2.0
        if rule.device_steps:
            return 1.0
        counter = state.get("step")
        if not isinstance(counter, Tensor):
            return 1.0 if counter is None else float(counter) + 1
        tensor, version, value = self._counters.get(i, (None, -1, 0.0))
        if tensor is not counter or version != counter._version:
            value = float(counter)
            self._counters[i] = (counter, counter._version, value)
        return value + 1

    def tensor(self, parameter: Tensor, name: str, fresh: dict[Tensor, dict[str, Tensor]]) -> Tensor:
        """State `name` of `parameter`; where torch has made none yet, its initial value, kept in `fresh`."""
        found = self._optimizer.state.get(parameter, {}).get(name)
        if isinstance(found, Tensor):
            return found
        made = fresh.setdefault(parameter, {})
        if name not in made:
            made[name] = (
                torch.zeros((), dtype=_counter_dtype(), device=parameter.device)
                if name == "step"
                else torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
            )
        return made[name]

    def commit(
        self, parameters: Iterable[Tensor], rules: Iterable[UpdateRule], fresh: Mapping[Tensor, dict[str, Tensor]]
    ) -> None:
        """Write `fresh` into the optimizer and count one step for `parameters`, as `optimizer.step()` does."""
        counters = []
        for parameter, rule in zip(parameters, rules, strict=True):
            if not rule.state_names:
                continue  # torch makes no entry either
            state = self._optimizer.state[parameter]
            state.update(fresh.get(parameter, {}))
            if "exp_avg" in rule.state_names and not rule.device_steps:
                if "step" not in state:
                    # torch puts the counter first; a checkpoint keeps that order
                    moments = dict(state)
                    state.clear()
                    state |= {"step": torch.zeros((), dtype=_counter_dtype())} | moments
                counters.append(state["step"])
        if counters:
            torch._foreach_add_(counters, 1)
        if hasattr(self._optimizer.step, "_wrapped_by_lr_sched"):
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn of a missing step


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
                _ids(_hooks(parameter)),
                bool(parameter._post_accumulate_grad_hooks),  # type: ignore[attr-defined]
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


def overlapping(tensors: Mapping[Slot, Tensor], written: Iterable[Slot]) -> Slot | None:
    """A written slot whose memory another slot shares, or None. Meant for one check per graph: it sorts all tensors."""
    changed = set(written)
    spans = sorted(
        (
            (t.untyped_storage().data_ptr(), t.storage_offset() * t.itemsize, _end(t), slot)
            for slot, t in tensors.items()
        ),
        key=lambda span: span[:3],
    )
    reach: dict[int, tuple[int, Slot]] = {}
    for storage, start, end, slot in spans:
        last = reach.get(storage)
        if last is not None and start < last[0] and (slot in changed or last[1] in changed):
            return slot if slot in changed else last[1]
        if last is None or end > last[0]:
            reach[storage] = (end, slot)
    return None


def _end(tensor: Tensor) -> int:
    """First byte after the tensor in its storage; its start where it is empty."""
    if tensor.numel() == 0:
        return tensor.storage_offset() * tensor.itemsize
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + extent + 1) * tensor.itemsize


def _same(live: Collection[Any], last: list[Any]) -> bool:
    return len(live) == len(last) and all(map(is_, live, last))


def _ids(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(id, values))


def _hooks(parameter: Tensor) -> Iterable[Callable[..., Any]]:
    hooks = parameter._backward_hooks
    return () if not hooks else hooks.values()


def _tied(module: nn.Module) -> tuple[int, ...]:
    """For each occurrence of a parameter or buffer, the first occurrence of the same tensor."""
    first: dict[int, int] = {}
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return tuple(first.setdefault(id(tensor), i) for i, (_, tensor) in enumerate(every))


def _counter_dtype() -> torch.dtype:
    return torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
