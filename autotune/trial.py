"""The plain records that travel between the tuner and its worker processes."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fusewright.errors import UserInputError

Json = None | bool | int | float | str | list[Any] | dict[str, Any]


class Role(enum.Enum):
    """Which computation `Subject.outputs` runs: the candidate or one of its references."""

    CANDIDATE = "candidate"
    EAGER = "eager"
    FLOAT64 = "float64"


class Subject(Protocol):
    """What a provider's factory returns inside a worker process.

    It may also define `facts() -> dict` (JSON), called after the warm-up: tuning keys met, counters, proof that
    settings took; and `costs() -> dict`: `peak_mb`, the most that one step holds (MiB above what lives before it), and
    `flops` of an eager step.
    """

    def step(self) -> object:
        """One inference or training step; returns only when the device has finished it."""

    def outputs(self, seed: int, role: Role) -> Mapping[str, Any]:
        """Tree of tensors that one step on the inputs of `seed` leaves behind, from one starting state for every role.

        Outputs, and in training also the gradients of parameters and inputs, buffers, and parameters after the step.
        """


@dataclass(frozen=True)
class Provider:
    """How a worker gets its subject: an importable factory, the JSON arguments it is called with, and its environment.

    Attributes:
        factory: "module:function".
        kwargs: plain JSON.
        env: added to the environment of the process.
    """

    factory: str
    kwargs: Mapping[str, Json] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        module, _, function = self.factory.partition(":")
        if not module or not function:
            raise UserInputError(f"provider factory must read 'module:function', not {self.factory!r}.")
        try:
            json.dumps(dict(self.kwargs), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserInputError(f"arguments of provider {self.factory} must be plain JSON: {error}.") from error


@dataclass(frozen=True)
class Progress:
    """One step of a long job, for whoever draws it.

    Attributes:
        stage: what is going on, as "accuracy" or "timing".
        subject: what it is going on with.
        done, total: how far it is, in the stage's own unit.
        spent_s, budget_s: seconds of the stage so far, and the most it may take.
    """

    stage: str
    subject: str
    done: int
    total: int
    spent_s: float = 0.0
    budget_s: float = 0.0


def no_progress(progress: Progress) -> None:
    """Draws nothing."""


class FailureKind(enum.Enum):
    """Every way in which a candidate drops out."""

    EXCEPTION = "exception"  # the provider raised
    SIGNAL = "signal"  # the process died of a signal, such as SIGSEGV
    EXIT = "exit"  # the process left by itself
    BUILD_TIMEOUT = "build_timeout"
    RUN_TIMEOUT = "run_timeout"
    OUT_OF_MEMORY = "out_of_memory"
    INACCURATE = "inaccurate"  # it ran, and its numbers are wrong
    DUPLICATE = "duplicate"  # it is accurate, and makes the same graphs as an earlier one


@dataclass(frozen=True)
class Failure:
    """Why a candidate dropped out; `detail` is for people: a traceback, a signal, the last lines it printed."""

    kind: FailureKind
    detail: str

    def __str__(self) -> str:
        lines = self.detail.strip().splitlines() or ["no detail"]
        # A traceback says what happened in its last line, everything else in its first.
        return f"{self.kind.value}: {lines[-1 if self.kind is FailureKind.EXCEPTION else 0]}"
