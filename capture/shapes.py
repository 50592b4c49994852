"""Named dynamic dimensions and the buckets that cut their ranges."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from fusewright.errors import DimsError

Dims = Mapping[str, Mapping[int, str]]
UNBOUNDED = (
    2**31 - 1
)  # the largest length a bucket may hold; sizes are 64-bit but index arithmetic of many kernels is not


@dataclass(frozen=True, order=True)
class DimRange:
    """Closed range `low..high` of one named dimension, in elements."""

    name: str
    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise DimsError(f"buckets: range {self.low}..{self.high} of {self.name!r} is empty.")

    def __contains__(self, size: int) -> bool:
        return self.low <= size <= self.high

    def __str__(self) -> str:
        if self.high == UNBOUNDED:
            return f"{self.name}>={self.low}"
        return f"{self.name}={self.low}" if self.low == self.high else f"{self.name}={self.low}..{self.high}"


@dataclass(frozen=True)
class ShapeBucket:
    """One cell of the table: a range for every named dynamic dimension; no ranges means a static graph."""

    ranges: tuple[DimRange, ...] = ()

    def __str__(self) -> str:
        return " ".join(map(str, self.ranges)) or "static"

    def to_json(self) -> list[list[str | int]]:
        """`[[name, low, high], ...]`."""
        return [[r.name, r.low, r.high] for r in self.ranges]

    @classmethod
    def from_json(cls, record: Sequence[Sequence[str | int]]) -> ShapeBucket:
        """Read what `to_json` wrote."""
        return cls(tuple(DimRange(str(n), int(a), int(b)) for n, a, b in record))

    def range_of(self, name: str) -> DimRange | None:
        """The range of `name`, or None where the bucket does not bound it."""
        return next((r for r in self.ranges if r.name == name), None)


@dataclass(frozen=True)
class Axis:
    """The buckets of one named dimension: `edges[i]` is the largest size of bucket `i`, ascending."""

    name: str
    edges: tuple[int, ...]

    def index(self, size: int) -> int:
        """Number of the bucket that holds `size`; `len(edges)` where it is above the last edge."""
        return bisect.bisect_left(self.edges, size)

    def range(self, index: int) -> DimRange:
        """The range of bucket `index`; sizes 0 and 1 belong to no bucket because torch specialises on them."""
        low = 2 if index == 0 else self.edges[index - 1] + 1
        return DimRange(self.name, low, self.edges[index])


@dataclass(frozen=True)
class Buckets:
    """The axes of the bucket table, one per named dimension, sorted by name."""

    axes: tuple[Axis, ...] = ()

    def axis(self, name: str) -> Axis:
        """The axis of `name`; a name without edges is one open bucket."""
        return next((a for a in self.axes if a.name == name), Axis(name, (UNBOUNDED,)))


def check_dims(dims: Dims | None, parameters: Sequence[str] | None) -> dict[str, dict[int, str]]:
    """Check `dims` as given to `optimize` and return plain dicts.

    Args:
        dims: argument name -> dimension number (>= 0) -> name of the dynamic dimension.
        parameters: names that forward takes, or None where it takes `**kwargs`.

    Raises:
        DimsError: naming the entry that is wrong and what was expected.
    """
    out: dict[str, dict[int, str]] = {}
    if dims is not None and not isinstance(dims, Mapping):
        raise DimsError(f"dims: expected {{argument: {{dimension: name}}}}, got {type(dims).__name__}.")
    for argument, named in (dims or {}).items():
        if parameters is not None and argument not in parameters:
            raise DimsError(f"dims: forward has no argument {argument!r}; it takes {', '.join(parameters) or 'none'}.")
        if not isinstance(named, Mapping):
            raise DimsError(f"dims[{argument!r}]: expected {{dimension: name}}, got {type(named).__name__}.")
        for dim, name in named.items():
            if not isinstance(dim, int) or isinstance(dim, bool) or dim < 0:
                raise DimsError(f"dims[{argument!r}]: dimension {dim!r} must be an int >= 0.")
            if not isinstance(name, str) or not name.isidentifier():
                raise DimsError(f"dims[{argument!r}][{dim}]: {name!r} must be an identifier such as 'tokens'.")
        out[argument] = dict(named)
    return out


def _is_edge(cut: object) -> bool:
    if isinstance(cut, tuple | list):
        return len(cut) == 2 and all(type(end) is int for end in cut)
    return type(cut) is int


Cuts = Sequence[int | Sequence[int]] | Set[int]


def _edges_around(sizes: Set[int]) -> list[int]:
    """Edges that give each of `sizes` a bucket of its own; what lies between two of them shares one."""
    edges: list[int] = []
    for size in sorted(sizes):
        if size - 1 > (edges[-1] if edges else 1):
            edges.append(size - 1)
        edges.append(size)
    return edges


def check_buckets(buckets: Mapping[str, Cuts] | None, dims: Dims) -> Buckets:
    """Check `buckets` as given to `optimize`.

    Each value lists upper edges (`[128, 256, 512]`) or closed ranges (`[(2, 128), (129, 512)]`) that must join, or is a
    set of exact sizes (`{128, 256, 512}`).

    Raises:
        DimsError: empty, descending, overlapping or gapped edges, or a name that `dims` does not give.
    """
    names = {name for named in dims.values() for name in named.values()}
    axes = []
    for name, cuts in sorted((buckets or {}).items()):
        if name not in names:
            raise DimsError(
                f"buckets: {name!r} is not named in dims; dims names {', '.join(sorted(names)) or 'nothing'}."
            )
        edges: list[int] = []
        if isinstance(cuts, Set) and all(type(size) is int for size in cuts):
            cuts = _edges_around(cuts)
        if not isinstance(cuts, Sequence) or isinstance(cuts, str):
            raise DimsError(f"buckets[{name!r}]: expected a list of upper edges such as [128, 256], got {cuts!r}.")
        for cut in cuts:
            if not _is_edge(cut):
                raise DimsError(f"buckets[{name!r}]: an edge is an int and a range is (low, high), got {cut!r}.")
            if isinstance(cut, Sequence):
                low, high = int(cut[0]), int(cut[1])
                if low > high:
                    raise DimsError(f"buckets[{name!r}]: range ({low}, {high}) is empty.")
                if edges and low != edges[-1] + 1:
                    kind = "overlaps the one before" if low <= edges[-1] else "leaves a gap"
                    raise DimsError(
                        f"buckets[{name!r}]: range ({low}, {high}) {kind}; it should start at {edges[-1] + 1}."
                    )
            else:
                high = int(cut)
            if high < 2:
                raise DimsError(f"buckets[{name!r}]: edge {high} is below 2, the smallest size a bucket can hold.")
            if edges and high <= edges[-1]:
                raise DimsError(f"buckets[{name!r}]: edges must ascend, {high} follows {edges[-1]}.")
            edges.append(high)
        if not edges:
            raise DimsError(f"buckets[{name!r}] is empty; give upper edges such as [128, 256].")
        axes.append(Axis(name, tuple(edges)))
    return Buckets(tuple(axes))
