"""The update rules of torch's SGD, Adam and AdamW as functions of tensors, so that a whole-step graph can hold them.

`OptimizerState` is the bridge to the live optimizer, whose state keeps torch's own layout.

Every hyper-parameter enters the graph as a 0-dim float64 tensor: a scheduler or an edited parameter group changes a
value, never the graph. Only what changes the formula (momentum at all, nesterov, amsgrad, ...) is part of the graph's
identity (`UpdateRule`).

Step counters that lie on the CPU (torch's default) are read on the host, and what depends on them is computed there in
double precision as torch's own implementation does. Counters on a device (capturable, fused) stay there: reading them
would wait for the device, so the same values are computed inside the graph.

Formulas: torch.optim.SGD, torch.optim.Adam (Kingma and Ba, arXiv:1412.6980), torch.optim.AdamW (Loshchilov and Hutter,
arXiv:1711.05101), amsgrad (Reddi et al., ICLR 2018).
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer


class Family(enum.Enum):
    """Which formula."""

    SGD = "sgd"
    ADAM = "adam"


@dataclass(frozen=True)
class UpdateRule:
    """What of one parameter group changes the formula; two groups with equal rules share their graph."""

    family: Family
    maximize: bool
    weight_decay: bool
    momentum: bool = False
    nesterov: bool = False
    decoupled: bool = False
    amsgrad: bool = False
    device_steps: bool = False

    @property
    def state_names(self) -> tuple[str, ...]:
        """The state tensors of a parameter that have the parameter's shape, by torch's names."""
        if self.family is Family.SGD:
            return ("momentum_buffer",) if self.momentum else ()
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.amsgrad else ()))

    @property
    def input_names(self) -> tuple[str, ...]:
        """The state tensors that the graph takes: with counters on a device, the counter too."""
        return (*self.state_names, "step") if self.device_steps else self.state_names

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """The 0-dim float64 inputs that all parameters of one group with equal step counters share."""
        if self.family is Family.SGD:
            return ("neg_lr", "weight_decay", "momentum", "grad_weight")
        if self.device_steps:
            return ("neg_lr", "decay", "beta1", "grad_weight", "beta2", "square_weight", "eps")
        return ("neg_step_size", "decay", "grad_weight", "beta2", "square_weight", "bias_correction2_sqrt", "eps")


class OptimizerSteps:
    """Counts the steps of all optimizers, for whoever caches what was made from weights.

    Fused optimizers write to parameters without raising their version. A step inside a captured graph calls no hook, so
    it counts itself.
    """

    taken = 0

    @classmethod
    @functools.cache
    def watch(cls) -> None:
        """Start to count, once for the process."""
        torch_optimizer.register_optimizer_step_post_hook(cls.count)

    @classmethod
    def count(cls, *_: Any) -> None:
        """One step was taken; the signature is that of a step hook."""
        cls.taken += 1


def _foreign_global_hooks() -> bool:
    ours = OptimizerSteps.count
    after = torch_optimizer._global_optimizer_post_hooks.values()
    return bool(torch_optimizer._global_optimizer_pre_hooks) or any(hook != ours for hook in after)


def decline_reason(optimizer: Optimizer) -> str | None:
    """Why `optimizer` cannot be part of a graph, or None where it can.

    Only torch's own classes qualify, not subclasses: those may override `step`.
    """
    if type(optimizer) not in (SGD, Adam, AdamW):
        return f"{type(optimizer).__name__} is not one of torch.optim.SGD, Adam, AdamW"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "the optimizer has step hooks"
    if _foreign_global_hooks():
        return "a step hook is registered for all optimizers"
    for number, group in enumerate(optimizer.param_groups):
        if group["differentiable"]:
            return f"parameter group {number} has differentiable=True"
        if any(parameter.is_complex() for parameter in group["params"]):
            return f"parameter group {number} holds a complex parameter"
        for name in ("lr", "weight_decay", "betas"):
            if any(_on_device(value) for value in _flat(group.get(name, 0.0))):
                return (
                    f"parameter group {number} keeps {name} in a device tensor, which the host would have to wait for"
                )
    return None


def rule_of(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    """The formula that `group` asks for. `optimizer` is one that `decline_reason` accepts."""
    if isinstance(optimizer, SGD):
        return UpdateRule(
            Family.SGD,
            maximize=bool(group["maximize"]),
            weight_decay=float(group["weight_decay"]) != 0,
            momentum=group["momentum"] != 0,
            nesterov=bool(group["nesterov"]),
        )
    return UpdateRule(
        Family.ADAM,
        maximize=bool(group["maximize"]),
        weight_decay=float(group["weight_decay"]) != 0,
        decoupled=bool(group["decoupled_weight_decay"]),
        amsgrad=bool(group["amsgrad"]),
        device_steps=_device_steps(group),
    )


def scalars(rule: UpdateRule, group: Mapping[str, Any], step: float) -> tuple[float, ...]:
    """The values of `rule.scalar_names`, in double precision.

    `step` is the counter after this step, 1 at the first one (ignored with device counters; SGD has none of its own
    and takes 1 for "no momentum buffer yet", anything else for "has one").
    """
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    if rule.family is Family.SGD:
        grad_weight = 1.0 if step == 1 else 1.0 - group["dampening"]
        return (-lr, weight_decay, float(group["momentum"]), grad_weight)
    beta1, beta2 = (float(beta) for beta in group["betas"])
    decay = 1 - lr * weight_decay if rule.decoupled else weight_decay
    if rule.device_steps:
        return (-lr, decay, beta1, 1 - beta1, beta2, 1 - beta2, group["eps"])
    neg_step_size = -lr / (1 - beta1**step)
    return (neg_step_size, decay, 1 - beta1, beta2, 1 - beta2, (1 - beta2**step) ** 0.5, group["eps"])


def updated(
    rule: UpdateRule,
    parameter: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    scalar: Sequence[Tensor],
    step: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The parameter and its state after one step, as new tensors of the dtypes that went in.

    Args:
        rule: the formula.
        parameter: of any shape and floating dtype; half precision is computed in float32 and rounded once at the end.
        grad: of the parameter's shape.
        state: by `rule.state_names`.
        scalar: 0-dim tensors in the order of `rule.scalar_names`.
        step: 0-dim counter before this step; only with `rule.device_steps`.
    """
    wide = torch.float32 if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype
    p, g = parameter.to(wide), grad.to(wide)
    moments = {name: tensor.to(wide) for name, tensor in state.items()}
    if rule.maximize:
        g = -g
    new_state: dict[str, Tensor] = {}
    if rule.family is Family.SGD:
        p, new = _sgd(rule, p, g, moments, scalar)
    else:
        if rule.device_steps:
            assert step is not None, "device_steps needs the step counter"
            new_state["step"] = step + 1
            scalar = _scalars_on_device(scalar, new_state["step"])
        p, new = _adam(rule, p, g, moments, scalar)
    new_state.update({name: tensor.to(state[name].dtype) for name, tensor in new.items()})
    return p.to(parameter.dtype), new_state


def clip_coefficient(grads: Sequence[Tensor], max_norm: float) -> Tensor:
    """What `torch.nn.utils.clip_grad_norm_` multiplies each gradient by: min(1, max_norm / (2-norm of all + 1e-6))."""
    first = grads[0].device
    norms = torch.stack([torch.linalg.vector_norm(grad).to(first) for grad in grads])
    return torch.clamp(max_norm / (torch.linalg.vector_norm(norms) + 1e-6), max=1.0)


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
        OptimizerSteps.count()
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


def _sgd(
    rule: UpdateRule, p: Tensor, g: Tensor, state: Mapping[str, Tensor], scalar: Sequence[Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    neg_lr, weight_decay, momentum, grad_weight = scalar
    if rule.weight_decay:
        g = g + p * weight_decay
    if not rule.momentum:
        return p + g * neg_lr, {}
    buffer = state["momentum_buffer"] * momentum + g * grad_weight
    g = g + buffer * momentum if rule.nesterov else buffer
    return p + g * neg_lr, {"momentum_buffer": buffer}


def _adam(
    rule: UpdateRule, p: Tensor, g: Tensor, state: Mapping[str, Tensor], scalar: Sequence[Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    neg_step_size, decay, grad_weight, beta2, square_weight, bias_correction2_sqrt, eps = scalar
    if rule.weight_decay:
        if rule.decoupled:
            p = p * decay
        else:
            g = g + p * decay
    mean = state["exp_avg"] + (g - state["exp_avg"]) * grad_weight
    square = state["exp_avg_sq"] * beta2 + (g * square_weight) * g
    new = {"exp_avg": mean, "exp_avg_sq": square}
    if rule.amsgrad:
        square = torch.maximum(state["max_exp_avg_sq"], square)
        new["max_exp_avg_sq"] = square
    denominator = square.sqrt() / bias_correction2_sqrt + eps
    return p + (mean * neg_step_size) / denominator, new


def _scalars_on_device(scalar: Sequence[Tensor], step: Tensor) -> tuple[Tensor, ...]:
    """What `scalars` computes with host counters, from a counter (after this step) that stays on its device."""
    neg_lr, decay, beta1, grad_weight, beta2, square_weight, eps = scalar
    neg_step_size = neg_lr / (1 - beta1**step)
    return (neg_step_size, decay, grad_weight, beta2, square_weight, (1 - beta2**step).sqrt(), eps)


def _device_steps(group: Mapping[str, Any]) -> bool:
    """True where torch keeps the group's step counters beside the parameters, and those are not on the CPU."""
    beside = bool(group["capturable"]) or bool(group["fused"])
    return beside and any(parameter.device.type != "cpu" for parameter in group["params"])


def _flat(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _counter_dtype() -> torch.dtype:
    return torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
