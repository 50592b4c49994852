"""Pure data that says how one fragment runs in one bucket; nothing here runs anything."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from fusewright.config import to_enum
from fusewright.errors import UserInputError

Scalar = str | int | float | bool


class Lowering(enum.Enum):
    """What turns the rewritten graph into a callable."""

    EAGER = "eager"
    AOT_EAGER = "aot_eager"
    INDUCTOR = "inductor"


class Launch(enum.Enum):
    """How the kernels of a compiled graph are started."""

    PLAIN = "plain"
    CUDA_GRAPHS = "cuda_graphs"


@dataclass(frozen=True)
class GraphVariant:
    """How one fragment runs in one shape bucket.

    Attributes:
        passes: names of the passes that may run, in any order (the pipeline's order rules); `None`: the default set.
        lowering: what compiles the rewritten graph.
        options: sorted pairs handed to the lowering, such as `("max_autotune", True)` for Inductor.
        launch: one by one, or captured into CUDA graphs and replayed (Inductor, CUDA, inference).

    Raises:
        UserInputError: a lowering or option that CUDA graphs cannot be captured from.
    """

    passes: tuple[str, ...] | None = None
    lowering: Lowering = Lowering.INDUCTOR
    options: tuple[tuple[str, Scalar], ...] = ()
    launch: Launch = Launch.PLAIN

    def __post_init__(self) -> None:
        object.__setattr__(self, "lowering", to_enum(Lowering, self.lowering, "lowering"))
        object.__setattr__(self, "launch", to_enum(Launch, self.launch, "launch"))
        if self.launch is Launch.CUDA_GRAPHS and self.lowering is not Lowering.INDUCTOR:
            raise UserInputError(f"launch: cuda_graphs needs the lowering inductor, not {self.lowering.value}.")
        if self.launch is Launch.CUDA_GRAPHS and ("cpp_wrapper", True) in self.options:
            raise UserInputError("launch: cuda_graphs captures parts of a graph, which cpp_wrapper=True does not make.")
        if self.passes is not None:
            object.__setattr__(self, "passes", tuple(sorted(set(self.passes))))
        object.__setattr__(self, "options", tuple(sorted((str(k), v) for k, v in self.options)))

    def complexity(self) -> tuple[int, int, int, int]:
        """Order by simplicity: a tie in time goes to the smaller one."""
        passes = 0 if self.passes is None else len(self.passes)
        return (list(Lowering).index(self.lowering), list(Launch).index(self.launch), len(self.options), passes)

    def to_json(self) -> str:
        """One line of JSON with sorted keys; `from_json` gives back an equal variant."""
        record = asdict(self) | {"lowering": self.lowering.value, "launch": self.launch.value}
        return json.dumps(record, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> GraphVariant:
        """Read what `to_json` wrote, also before variants had a launch.

        Raises:
            UserInputError: the text is no variant.
        """
        record = json.loads(text)
        if not isinstance(record, Mapping) or set(record) | {"launch"} != {"passes", "lowering", "options", "launch"}:
            raise UserInputError(f"not a GraphVariant: {text!r}")
        return cls(
            passes=None if record["passes"] is None else tuple(record["passes"]),
            lowering=to_enum(Lowering, record["lowering"], "lowering"),
            options=tuple((str(k), v) for k, v in record["options"]),
            launch=to_enum(Launch, record.get("launch", Launch.PLAIN), "launch"),
        )

    def label(self) -> str:
        """A short name for tables, such as `inductor(max_autotune) -fuse_attention`."""
        options = ",".join(k if v is True else f"{k}={v}" for k, v in self.options)
        text = self.lowering.value + (f"({options})" if options else "")
        text += " cuda_graphs" if self.launch is Launch.CUDA_GRAPHS else ""
        return text if self.passes is None else f"{text} [{'+'.join(self.passes) or 'no passes'}]"


DEFAULT_VARIANT = GraphVariant()
