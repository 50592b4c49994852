"""A training step as a function of flat tensors that changes none of the live objects.

Every tensor that may change between two steps is an input (`Slot`); the module's own Python runs on the given tensors
through torch's autograd, so that hooks, checkpointing, autocast and custom autograd functions need no code here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fusewright.capture.step.optimizer_update import UpdateRule, clip_coefficient, updated
from fusewright.errors import CaptureError

Role = Literal["param", "buffer", "attribute", "grad", "state", "scalar", "scale", "argument"]


class Slot(NamedTuple):
    """One input of the graph: `number` counts parameters, buffers, ...; `name` tells states and scalars apart."""

    role: Role
    number: int
    name: str = ""


@dataclass(frozen=True)
class ParameterPlan:
    """What the step does with one parameter.

    Attributes:
        name: dotted name inside the module that is called; empty for one that only the optimizer knows.
        requires_grad: whether autograd computes a gradient for it.
        has_grad: whether `.grad` holds a gradient that the new one is added to.
        bucket: which entry of `StepPlan.buckets` updates it; None where the graph leaves it as it is.
    """

    name: str
    requires_grad: bool
    has_grad: bool
    bucket: int | None


@dataclass(frozen=True)
class StepPlan:
    """One step as data.

    Attributes:
        parameters: every parameter of the module and of the optimizer, each once.
        buffers: dotted names of the module's buffers, each once.
        attributes: modules and names of tensors that are plain attributes, neither parameter nor buffer.
        buckets: one update rule per set of scalars.
        arguments: how to rebuild the module's arguments from its tensors (spec) and the rest (constants).
        constants: leaves of the arguments; None where a tensor comes in.
        accumulate: the loss is divided by this.
        clip: largest 2-norm of all gradients that are applied, or None.
        scaled: whether the loss is multiplied by the slot "scale" before the backward pass.
    """

    parameters: tuple[ParameterPlan, ...]
    buffers: tuple[str, ...]
    attributes: tuple[tuple[nn.Module, str], ...]
    buckets: tuple[UpdateRule, ...]
    arguments: pytree.TreeSpec
    constants: tuple[Any, ...]
    accumulate: int = 1
    clip: float | None = None
    scaled: bool = False

    def slots(self) -> tuple[Slot, ...]:
        """Every tensor that the step may read, in the order of the traced function's arguments."""
        found = [Slot("param", i) for i in range(len(self.parameters))]
        found += [Slot("buffer", i) for i in range(len(self.buffers))]
        found += [Slot("attribute", i) for i in range(len(self.attributes))]
        for i, parameter in enumerate(self.parameters):
            if parameter.has_grad:
                found.append(Slot("grad", i))
            if parameter.bucket is not None:
                rule = self.buckets[parameter.bucket]
                found += [Slot("state", i, name) for name in rule.input_names]
        for i, rule in enumerate(self.buckets):
            found += [Slot("scalar", i, name) for name in rule.scalar_names]
        found += [Slot("scale", 0)] if self.scaled else []
        tensors = sum(constant is None for constant in self.constants)
        return tuple(found + [Slot("argument", i) for i in range(tensors)])


class StepFunction:
    """The step as a function of flat tensors, in the order of `plan.slots()`; it changes none of the live objects.

    Returns the loss (detached, divided by `accumulate`), new gradients of `grad_outputs`, and new values of `writes`;
    both lists are filled in by a call. Buffers are changed in place, as the module does it.

    Attributes:
        forward: computes the loss from the tensors of the slots, in the place of the module's Python, if not None.

    Raises:
        CaptureError: the module does something that a graph would lose, such as setting an attribute.
    """

    def __init__(self, module: nn.Module, plan: StepPlan, hooks: Mapping[int, Sequence[Callable[..., Any]]]) -> None:
        self._module = module
        self._plan = plan
        self._hooks = hooks
        self.forward: Callable[[Mapping[Slot, Tensor]], Tensor] | None = None
        self.slots = plan.slots()
        self.grad_outputs: tuple[int, ...] = ()
        self.writes: tuple[Slot, ...] = ()

    def __call__(self, *flat: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(self.slots, flat, strict=True))
        leaves = [
            values[Slot("param", i)].detach().requires_grad_(parameter.requires_grad)
            for i, parameter in enumerate(self._plan.parameters)
        ]
        for i, hooks in self._hooks.items():
            for hook in hooks:
                leaves[i].register_hook(hook)
        rebound: dict[Slot, Tensor] = {}
        with torch.enable_grad():
            loss, grads = self._loss_and_gradients(values, leaves, rebound)
        with torch.no_grad(), autocast_off({leaf.device.type for leaf in leaves}):
            new_grads, new_values = self._finish(values, grads)
        new_values |= {slot: value.detach() for slot, value in rebound.items()}
        self.grad_outputs = tuple(new_grads)
        self.writes = tuple(new_values)
        return (loss.detach(), *new_grads.values(), *new_values.values())

    def check_forward(self, *flat: Tensor) -> None:
        """Run the module's own Python, without autograd's backward pass, only to see that it sets nothing.

        Raises:
            CaptureError: it sets an attribute or puts another tensor in the place of a buffer.
        """
        values = dict(zip(self.slots, flat, strict=True))
        leaves = [values[Slot("param", i)] for i in range(len(self._plan.parameters))]
        rebound: dict[Slot, Tensor] = {}
        with torch.no_grad():
            self._scoped(values, leaves, rebound, self._module)
        if rebound:
            raise CaptureError("forward puts other tensors in the place of buffers")

    def _loss_and_gradients(
        self, values: Mapping[Slot, Tensor], leaves: Sequence[Tensor], rebound: dict[Slot, Tensor]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run the module on the given tensors, forward and backward; buffers that it replaces go to `rebound`.

        The backward pass is inside too, for modules that run again there (checkpointing).
        """

        def body(*arguments: Any) -> tuple[Tensor, dict[int, Tensor]]:
            if self.forward is None:
                loss = self._module(*arguments)
            else:
                loss = self.forward({**values, **{Slot("param", i): leaf for i, leaf in enumerate(leaves)}})
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise CaptureError("loss_fn did not return a tensor of one element")
            loss = loss / self._plan.accumulate if self._plan.accumulate > 1 else loss
            return loss, self._gradients(loss, values, leaves)

        result: tuple[Tensor, dict[int, Tensor]] = self._scoped(values, leaves, rebound, body)
        return result

    def _scoped(
        self,
        values: Mapping[Slot, Tensor],
        leaves: Sequence[Tensor],
        rebound: dict[Slot, Tensor],
        body: Callable[..., Any],
    ) -> Any:
        """Call `body` with the module's arguments while the module holds the given tensors."""
        plan = self._plan
        tensors = iter([value for slot, value in values.items() if slot.role == "argument"])
        flat = [next(tensors) if constant is None else constant.value for constant in plan.constants]
        arguments = pytree.tree_unflatten(flat, plan.arguments)
        buffers = {name: values[Slot("buffer", i)] for i, name in enumerate(plan.buffers)}
        named = {p.name: leaf for p, leaf in zip(plan.parameters, leaves, strict=True) if p.name} | buffers
        given = {_Scope.prefix + name: tensor for name, tensor in named.items()}
        given_attributes = [(*owned, values[Slot("attribute", i)]) for i, owned in enumerate(plan.attributes)]
        with frozen_attributes(self._module, given_attributes):
            # which leaves in `given` what the module put in place of a tensor
            result = torch.func.functional_call(_Scope(self._module), given, (functools.partial(body, *arguments),))
        for name, tensor in named.items():
            new = given[_Scope.prefix + name]
            if new is tensor:
                continue
            if name not in buffers or (new.shape, new.dtype, new.device) != (tensor.shape, tensor.dtype, tensor.device):
                raise CaptureError(f"forward replaces {name!r}, a parameter or a tensor of another kind")
            rebound[Slot("buffer", plan.buffers.index(name))] = new
        return result

    def _gradients(self, loss: Tensor, values: Mapping[Slot, Tensor], leaves: Sequence[Tensor]) -> dict[int, Tensor]:
        """The gradient of each parameter that has one after the backward pass, with what `.grad` held before."""
        trainable = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        scaled = loss * values[Slot("scale", 0)] if self._plan.scaled else loss
        found = torch.autograd.grad(scaled, [leaves[i] for i in trainable], allow_unused=True)
        new = {i: grad for i, grad in zip(trainable, found, strict=True) if grad is not None}
        grads: dict[int, Tensor] = {}
        for i, parameter in enumerate(self._plan.parameters):
            if i in new and new[i].layout is not torch.strided:
                raise CaptureError(f"the gradient of {parameter.name!r} is sparse")
            if parameter.has_grad:
                held = values[Slot("grad", i)]
                grads[i] = held + new[i] if i in new else held
            elif i in new:
                grads[i] = new[i]
        return grads

    def _finish(
        self, values: Mapping[Slot, Tensor], grads: Mapping[int, Tensor]
    ) -> tuple[dict[int, Tensor], dict[Slot, Tensor]]:
        """New gradients to hand out by parameter, and new values of slots."""
        plan = self._plan
        applied = {i: grad for i, grad in grads.items() if plan.parameters[i].bucket is not None}
        if plan.clip is not None and applied:
            coefficient = clip_coefficient(list(applied.values()), plan.clip)
            applied = {i: grad * coefficient.to(grad.device) for i, grad in applied.items()}
        new_grads: dict[int, Tensor] = {}
        new_values: dict[Slot, Tensor] = {}
        # `.grad` is added to in place later, so no two of them, and no input, may share memory
        handed_out = {value.untyped_storage()._cdata for value in values.values()}
        for i, grad in grads.items():
            bucket = plan.parameters[i].bucket
            if bucket is not None:
                rule = plan.buckets[bucket]
                state = {name: values[Slot("state", i, name)] for name in rule.input_names}
                scalars = [values[Slot("scalar", bucket, name)] for name in rule.scalar_names]
                parameter = values[Slot("param", i)]
                new, new_state = updated(rule, parameter, applied[i], state, scalars, state.pop("step", None))
                new_values[Slot("param", i)] = new
                new_values |= {Slot("state", i, name): value for name, value in new_state.items()}
            elif not plan.parameters[i].has_grad:
                storage = grad.untyped_storage()._cdata
                new_grads[i] = grad.clone() if storage in handed_out else grad
                handed_out.add(storage)
            elif grad is not values[Slot("grad", i)]:
                new_values[Slot("grad", i)] = grad
        return new_grads, new_values


class _Scope(nn.Module):
    """Calls a function while `functional_call` holds other tensors in the places of the module's own."""

    prefix = "module."

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, body: Callable[[], Any]) -> Any:
        return body()


def tensor_key(tensor: Tensor) -> tuple[Hashable, ...]:
    """What a graph assumes about one tensor."""
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, type(tensor))


class Constant(NamedTuple):
    """A leaf of the arguments that is no tensor; part of the graph."""

    value: Any


@contextlib.contextmanager
def autocast_off(device_types: Collection[str]) -> Iterator[None]:
    """Run what is inside with the dtypes that are written there."""
    with contextlib.ExitStack() as stack:
        for device_type in sorted(device_types):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


@contextlib.contextmanager
def frozen_attributes(module: nn.Module, given: Sequence[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Set the `given` attributes, raise where the code inside sets any (a graph would lose that), and put all back.

    Raises:
        CaptureError: naming the attribute.
    """
    original = [(name, vars(part), dict(vars(part))) for name, part in module.named_modules()]
    for owner, name, tensor in given:
        vars(owner)[name] = tensor
    expected = [dict(live) for _, live, _ in original]
    try:
        yield
        for (name, live, _), wanted in zip(original, expected, strict=True):
            for key in live.keys() | wanted.keys():
                if key not in live or key not in wanted or live[key] is not wanted[key]:
                    raise CaptureError(f"forward sets attribute {key!r} of {name or 'the module'}")
    finally:
        for _, live, old in original:
            live.clear()
            live.update(old)
