"""What a tuning result is valid for: a change of any field makes a new key, and each field says why."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self, get_type_hints

from fusewright.capture.shapes import ShapeBucket
from fusewright.config import Numerics
from fusewright.errors import UserInputError

if TYPE_CHECKING:
    import torch  # only where a key is made: to read a store takes a tenth of the time that torch takes to load

# Whatever decides which code runs. Statistics, store and reports may change without making a measurement wrong.
SOURCES = ("capture", "passes", "fusion", "pipeline", "runtime")

NOT_IN_KEY: Mapping[str, str] = {
    "host name, user, folder, process id": "change neither code nor speed; a fleet of equal machines shares results",
    "worker id, rank": "all ranks must pick one variant",
    "parameter values": "change no code; where weights are frozen into it, that is a field",
    "random seed": "changes values only",
    "time, load of the machine": "ratios are measured in turns; they are in the evidence of each measurement",
    "environment variables": "those that change code change a field (threads) or the fingerprint",
    "Python version": "touches the host's overhead alike for every variant",
    "C++ compiler version": "a winner stays correct and is re-proven on the next tuning; asking for it costs a process",
    "amount of memory": "a variant that does not fit fails and is recorded",
}


@dataclass(frozen=True)
class KeyContext:
    """Everything in a key that holds for a whole process and mode."""

    mode: Annotated[str, "a training graph saves activations and has a backward; another program"]
    device: Annotated[str, "kernels rank differently on another chip"]
    autocast: Annotated[str, "casts operators below the captured graph's dtypes"]
    threads: Annotated[int, "with more threads another variant wins; overhead weighs more with few"]
    cpu_capability: Annotated[str, "the vector width that ATen and Inductor compile for"]
    matmul_precision: Annotated[str, "chooses other matmul kernels for float32"]
    deterministic: Annotated[bool, "forbids some kernels"]
    torch_version: Annotated[str, "another compiler, other kernels"]
    triton_version: Annotated[str, "compiles our kernels and Inductor's"]
    numerics: Annotated[str, "limits which rewrites may run"]
    frozen_weights: Annotated[bool, "allows rewrites that fold weights"]
    user_passes: Annotated[str, "digest of passes from outside; they are part of the program"]
    sources: Annotated[str, "digest of the code that captures, rewrites and lowers"]

    @classmethod
    def current(
        cls,
        device: torch.device | str = "cpu",
        *,
        numerics: Numerics = Numerics.REASSOCIATED,
        frozen_weights: bool = False,
        user_passes: str = "",
    ) -> Self:
        """The context of this thread at this moment; mode and autocast are read where the graph is lowered."""
        import torch

        device = torch.device(device)
        return cls(
            mode="training" if torch.is_grad_enabled() else "inference",
            device=device_name(device),
            autocast=_autocast(device.type),
            threads=torch.get_num_threads(),
            cpu_capability=torch.backends.cpu.get_cpu_capability(),
            matmul_precision=torch.get_float32_matmul_precision(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            torch_version=torch.__version__,
            triton_version=_triton_version(),
            numerics=numerics.value,
            frozen_weights=frozen_weights,
            user_passes=user_passes,
            sources=source_digest(),
        )


@dataclass(frozen=True)
class TuningKey:
    """Names one decision."""

    fingerprint: Annotated[str, "the graph itself: edges, constants, dtypes, strides, aliases, symbolic constraints"]
    bucket: Annotated[ShapeBucket, "sizes decide which variant wins"]
    context: Annotated[KeyContext, "see its fields"]

    def digest(self) -> str:
        """32 hexadecimal digits; equal in every process."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON with all fields on one level."""
        context = dataclasses.asdict(self.context)
        return {"fingerprint": self.fingerprint, "bucket": self.bucket.to_json(), **context}

    def to_json(self) -> str:
        """One line of JSON with sorted keys; `from_json` gives back an equal key."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Read what `to_dict` made.

        Raises:
            UserInputError: the record is no key of this version.
        """
        names = {f.name for f in dataclasses.fields(KeyContext)}
        if not isinstance(record, Mapping) or set(record) != names | {"fingerprint", "bucket"}:
            raise UserInputError(f"not a TuningKey of this version: {record!r}")
        bucket = ShapeBucket.from_json(record["bucket"])
        return cls(record["fingerprint"], bucket, KeyContext(**{name: record[name] for name in names}))


def reasons() -> dict[str, str]:
    """Field -> why it is in the key."""
    hints = get_type_hints(TuningKey, include_extras=True) | get_type_hints(KeyContext, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if name != "context"}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Why `new` is another key than `old` (both from `to_dict`): one line a field, with the field's reason."""
    why = reasons()
    return [
        f"{name}: {old.get(name)!r} -> {new.get(name)!r} ({why.get(name, 'a field of another version')})"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def device_name(device: torch.device) -> str:
    """The kind of chip, not its number: `cuda NVIDIA H200 sm_90`, `cpu AMD EPYC 9654`."""
    if device.type == "cuda":
        import torch

        major, minor = torch.cuda.get_device_capability(device)
        return f"cuda {torch.cuda.get_device_name(device)} sm_{major}{minor}"
    return f"{device.type} {_cpu_model()}" if device.type == "cpu" else device.type


@functools.cache
def _cpu_model() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:  # not Linux
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _autocast(device_type: str) -> str:
    import torch

    enabled = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.") if enabled else "off"


@functools.cache
def _triton_version() -> str:
    try:
        import triton
    except ModuleNotFoundError:
        return "none"
    return str(triton.__version__)


@functools.cache
def source_digest(root: pathlib.Path | None = None) -> str:
    """Hash of the names and contents of our own sources in `SOURCES`; `root` is the package's folder."""
    root = root or pathlib.Path(__file__).parent.parent
    h = hashlib.sha256()
    for folder in SOURCES:
        for file in sorted((root / folder).rglob("*.py")):
            content = file.read_bytes()
            h.update(f"{file.relative_to(root).as_posix()} {len(content)}\n".encode())
            h.update(content)
    return h.hexdigest()[:32]
