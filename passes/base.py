"""The contract of a pass: it rewrites a graph and counts; everything else belongs to the pipeline."""

from __future__ import annotations

import abc
import enum
import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import sympy
import torch
from torch import fx

from fusewright.capture.shapes import ShapeBucket
from fusewright.capture.values import tensor_of, value_of
from fusewright.config import Numerics

__all__ = ["Decline", "Pass", "PassContext", "Stage", "tensor_of", "value_of"]


class Stage(enum.Enum):
    """Where in the compilation a pass sees the graph."""

    FORWARD = "forward"  # the captured forward, before autograd: torch functions, methods and ATen operators
    JOINT = "joint"  # ATen, forward and backward in one graph (inference: forward only)
    POST_GRAD = "post_grad"  # ATen, after the split into forward and backward, before code generation


@dataclass(frozen=True)
class Decline:
    """One place a pass looked at and left alone."""

    pass_name: str
    node: str
    reason: str


@dataclass
class PassContext:
    """What a pass may read, and where it leaves its remarks.

    Attributes:
        bucket: the shape bucket that the graph is lowered for.
        device: the device type most tensors live on.
        training: whether gradients are asked for.
        frozen_weights: whether the user promised that parameters do not change.
        priced: whether a pass leaves alone what it expects to gain nothing; else it rewrites all that it can.
        sizes: what each symbol of the graph stands for when something is priced.
        limits: pass name -> the most rewrites it may make; a bisection sets them.
        allowed: names of the nodes at which the running pass was allowed a rewrite, in order.
    """

    bucket: ShapeBucket = field(default_factory=ShapeBucket)
    device: str = "cpu"
    training: bool = False
    frozen_weights: bool = False
    priced: bool = False
    sizes: Mapping[sympy.Symbol, int] = field(default_factory=dict)
    pass_name: str = ""
    declines: list[Decline] = field(default_factory=list)
    recognised: dict[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    allowed: list[str] = field(default_factory=list)

    def size(self, value: int | torch.SymInt) -> int | None:
        """A size to price something with, or None where a symbol is not known."""
        if isinstance(value, int):
            return value
        found = sympy.sympify(value.node.expr.xreplace(dict(self.sizes)))
        return int(found) if found.is_Integer else None

    def prices(self) -> str:
        """What `priced` and `sizes` decide by, as part of a key."""
        return str(sorted((str(symbol), size) for symbol, size in self.sizes.items())) if self.priced else "unpriced"

    def begin(self, name: str) -> None:
        """Start the remarks of the pass `name`."""
        self.pass_name, self.declines, self.recognised, self.allowed = name, [], {}, []

    def allow(self, node: fx.Node) -> bool:
        """Whether the running pass may make its next rewrite, at `node`; a pass asks when it would make it for sure.

        A rewrite that is not allowed is declined here; the pass only has to leave the place alone.
        """
        if self.pass_name in self.limits and len(self.allowed) >= self.limits[self.pass_name]:
            self.declined(node, f"limited to {self.limits[self.pass_name]} rewrites")
            return False
        self.allowed.append(node.name)
        return True

    def declined(self, node: fx.Node, reason: str) -> None:
        """Record that `node` was looked at and left alone, and why."""
        self.declines.append(Decline(self.pass_name, node.name, reason))

    def recognise(self, kind: str) -> None:
        """Record that a region of meaning `kind` (such as "attention") was found, rewritten or not."""
        self.recognised[kind] = self.recognised.get(kind, 0) + 1


class Pass(abc.ABC):
    """One rewrite of a graph.

    A subclass sets the class attributes and `run`. It must not time, print, dump, verify or catch: the pipeline does.
    `run` returns how many rewrites it made; 0 promises that the graph is untouched, and a second run must return 0.
    Before each rewrite it asks `ctx.allow(node)`, so that a bisection can find the one that is wrong.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage] = Stage.FORWARD
    numerics: ClassVar[Numerics] = Numerics.EXACT
    requires: ClassVar[tuple[str, ...]] = ()
    provides: ClassVar[tuple[str, ...]] = ()
    conflicts: ClassVar[tuple[str, ...]] = ()
    default: ClassVar[bool] = True  # False: runs only where a variant names it

    def applies(self, bucket: ShapeBucket, device: str) -> bool:
        """Whether the pass is worth running for `bucket` on `device` ("cpu", "cuda")."""
        return True

    @abc.abstractmethod
    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        """Rewrite `gm` in place and return the number of rewrites."""

    def digest_sources(self) -> Sequence[object]:
        """Modules, classes or functions beside the pass's own class whose sources decide what it does."""
        return ()

    def digest(self) -> str:
        """Hash of the pass's sources and options; a changed pass never meets a graph cached by its older self."""
        h = hashlib.sha256(self.name.encode())
        for thing in (type(self), *self.digest_sources()):
            module = thing if inspect.ismodule(thing) else inspect.getmodule(thing)
            assert module is not None, thing
            h.update(inspect.getsource(module).encode())
        h.update(repr(sorted((k, repr(v)) for k, v in vars(self).items())).encode())
        return h.hexdigest()
