"""Judge whether an optimised result is as right as eager, against float64, with numbers and not only a verdict.

The rule for one floating tensor, with `res` the optimised result, `ref` eager at the working dtype and `r64` eager in
float64 (after the accuracy check of torch's own benchmark runner, `torch._dynamo.utils.same`):

    pass  if  |res - ref| <= tol + tol * |ref|  everywhere
    else  if  RMSE(res, r64) <= m * RMSE(ref, r64) + tol / 10
    where float64 cannot run: cosine(res, ref) >= 0.99, and the record says so

NaN and infinity must stand in the same places; integers, booleans and everything that is no number must be equal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from fusewright.errors import UserInputError
from fusewright.trees import Container, Tree, kind_name, plain, same_value, shape_problem, walk

Rule: TypeAlias = Literal["exact", "allclose", "float64", "cosine", "structure"]

COSINE_FLOOR = 0.99
"""Least cosine between `res` and `ref` that passes where no float64 reference exists."""

SMALL_NUMEL = 1000
"""Below this many elements an RMSE is itself noisy, so the multiplier is at least `SMALL_MULTIPLIER`."""
SMALL_MULTIPLIER = 3.0

_CHUNK = 1 << 21
"""Elements widened to float64 at a time (16 MiB each), so that comparing never doubles the memory of a large tensor."""


@dataclass(frozen=True)
class Tolerance:
    """How far `res` may be off: `tol` is absolute and relative, `multiplier` is m of the RMSE rule."""

    tol: float
    multiplier: float

    def __post_init__(self) -> None:
        if not (self.tol >= 0 and self.multiplier >= 1):
            raise UserInputError(
                f"Tolerance needs tol >= 0 and multiplier >= 1, not tol={self.tol}, m={self.multiplier}."
            )


# (inference, training); float64 has no rule of its own and takes float32's. float8 is judged like half precision.
_FULL = (Tolerance(1e-4, 2.0), Tolerance(1e-3, 2.0))
_HALF = (Tolerance(1e-2, 3.0), Tolerance(1e-2, 3.0))
TOLERANCES: Mapping[torch.dtype, tuple[Tolerance, Tolerance]] = {
    torch.float64: _FULL,
    torch.float32: _FULL,
    torch.complex128: _FULL,
    torch.complex64: _FULL,
    torch.float16: _HALF,
    torch.bfloat16: _HALF,
    torch.float8_e4m3fn: _HALF,
    torch.float8_e5m2: _HALF,
}


def tolerance_for(dtype: torch.dtype, numel: int, *, training: bool) -> Tolerance:
    """The tolerance of a tensor of `dtype` with `numel` elements, for a training step or for inference.

    Raises:
        UserInputError: no tolerance is defined for `dtype` (integers and booleans are compared exactly).
    """
    if dtype not in TOLERANCES:
        raise UserInputError(f"no tolerance is defined for {dtype}; pass `tolerance`, or cast before comparing.")
    chosen = TOLERANCES[dtype][1 if training else 0]
    if numel < SMALL_NUMEL:
        return Tolerance(chosen.tol, max(chosen.multiplier, SMALL_MULTIPLIER))
    return chosen


@dataclass(frozen=True)
class Comparison:
    """One leaf of a result against eager's.

    `severity` orders differences: the largest |res - ref| / (tol + tol * |ref|), so 0 is equal and 1 is the edge of
    allclose; infinite where no number describes the difference. Errors are in the tensor's own unit, and None where
    they were not needed or have no meaning.
    """

    path: str
    ok: bool
    rule: Rule
    reason: str
    severity: float
    dtype: str = ""
    numel: int = 0
    tol: float = 0.0
    multiplier: float = 1.0
    max_abs_error: float | None = None
    rmse_res: float | None = None
    rmse_ref: float | None = None
    cosine: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain Python values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class TreeComparison:
    """All leaves of two trees, in the order of the reference."""

    leaves: tuple[Comparison, ...]

    @property
    def ok(self) -> bool:
        """True where every leaf passes."""
        return all(leaf.ok for leaf in self.leaves)

    @property
    def first(self) -> Comparison | None:
        """The first leaf that fails, or None."""
        return next((leaf for leaf in self.leaves if not leaf.ok), None)

    @property
    def worst(self) -> Comparison | None:
        """The leaf that is furthest off, a failing one before a passing one; None for an empty tree."""
        return max(self.leaves, key=lambda leaf: (not leaf.ok, leaf.severity), default=None)

    @property
    def reason(self) -> str:
        """One line for people: what differs first and worst, or that nothing does."""
        first, worst = self.first, self.worst
        if first is None or worst is None:
            return f"{len(self.leaves)} leaves agree"
        failed = sum(not leaf.ok for leaf in self.leaves)
        tail = "" if worst is first else f"; worst: {worst.path}: {worst.reason}"
        return f"{failed} of {len(self.leaves)} leaves differ; first: {first.path}: {first.reason}{tail}"

    def to_dict(self) -> dict[str, Any]:
        """Verdict, reason, and every leaf, as plain Python values."""
        return {"ok": self.ok, "reason": self.reason, "leaves": [leaf.to_dict() for leaf in self.leaves]}


def compare(
    res: Tensor,
    ref: Tensor,
    ref64: Tensor | Callable[[], Tensor | None] | None,
    *,
    training: bool,
    tolerance: Tolerance | None = None,
    path: str = "",
) -> Comparison:
    """Compare one tensor with eager's.

    Args:
        res: the optimised result; any device and strides, but the shape and dtype of `ref`.
        ref: eager's result at the working dtype.
        ref64: eager's result in float64, or a function returning it, called only where allclose fails. None (from
            either) means that float64 cannot run; so does a `RuntimeError` of the function, which the record names.
        training: True for a training step (outputs as well as gradients).
        tolerance: replaces the rule's tolerance.
        path: name of the leaf, for the record.
    """
    problem = shape_problem(res, ref)
    if problem:
        return Comparison(path, False, "structure", problem, math.inf, str(ref.dtype), ref.numel())
    res, ref = plain(res), plain(ref)
    if not (ref.is_floating_point() or ref.is_complex()):
        return _compare_exact(res, ref, path)
    tolerance = tolerance or tolerance_for(ref.dtype, ref.numel(), training=training)
    close = _closeness(res, ref, tolerance.tol)

    def judged(ok: bool, rule: Rule, reason: str, rmse: tuple[float, float] | None = None) -> Comparison:
        return Comparison(
            path, ok, rule, reason, math.inf if close.misplaced else close.severity, str(ref.dtype), ref.numel(),
            tolerance.tol, tolerance.multiplier, close.max_abs_error,
            rmse[0] if rmse else None, rmse[1] if rmse else None, close.cosine,
        )  # fmt: skip

    if close.misplaced:
        return judged(False, "allclose", f"NaN or infinity in other places than eager's ({close.misplaced} elements)")
    if close.severity <= 1:
        return judged(True, "allclose", "within tolerance")
    r64, why_not = _evaluate(ref64)
    if r64 is None:
        ok = close.cosine >= COSINE_FLOOR
        return judged(ok, "cosine", f"{why_not}; cosine {close.cosine:.6f}, at least {COSINE_FLOOR} needed")
    assert r64.shape == ref.shape, (
        f"float64 reference of {path!r} has shape {tuple(r64.shape)}, eager's {tuple(ref.shape)}"
    )
    rmse = _rmse(res, ref, plain(r64))
    bound = tolerance.multiplier * rmse[1] + tolerance.tol / 10
    ok = rmse[0] <= bound  # False for a NaN: a float64 reference that overflows proves nothing
    reason = f"RMSE to float64 {rmse[0]:.3g}, eager's own {rmse[1]:.3g}, bound {bound:.3g}"
    return judged(ok, "float64", f"{reason}, largest error {close.max_abs_error:.3g}", rmse)


def compare_trees(
    res: Tree,
    ref: Tree,
    ref64: Tree | Callable[[], Tree] | None,
    *,
    training: bool,
    tolerance: Tolerance | None = None,
) -> TreeComparison:
    """Compare nested results (see `trees.Tree`) leaf by leaf.

    Arguments as for `compare`, each a tree of one structure. A function for `ref64` is called at most once, and only
    where needed. A leaf that is missing from the float64 tree is judged as if float64 could not run.
    """
    lazy = _Lazy64(ref64)
    res_nodes, ref_nodes = dict(walk(res)), dict(walk(ref))
    leaves: list[Comparison] = []
    for path, wanted in ref_nodes.items():
        if path not in res_nodes:
            leaves.append(Comparison(path, False, "structure", "missing from the result", math.inf))
            continue
        found = _compare_node(path, res_nodes[path], wanted, lazy, training, tolerance)
        if found is not None:
            leaves.append(found)
    leaves += [
        Comparison(path, False, "structure", "not in eager's result", math.inf)
        for path in res_nodes
        if path not in ref_nodes
    ]
    return TreeComparison(tuple(leaves))


class _Lazy64:
    """The float64 tree, made when it is first asked for."""

    def __init__(self, source: Tree | Callable[[], Tree] | None) -> None:
        self._source = source
        self._nodes: dict[str, Any] | None = None
        self._why_not = ""

    def at(self, path: str) -> Callable[[], Tensor | None]:
        def fetch() -> Tensor | None:
            if self._nodes is None:
                tree, self._why_not = _evaluate(self._source)
                self._nodes = {} if tree is None else dict(walk(tree))
            if self._why_not:
                raise _No64Error(self._why_not)
            found = self._nodes.get(path)
            if isinstance(found, float):
                return torch.tensor(found, dtype=torch.float64)
            return found if isinstance(found, Tensor) else None

        return fetch


class _No64Error(RuntimeError):
    """Carries the reason for a missing float64 reference from the tree to each leaf."""


def _evaluate(source: Any) -> tuple[Any, str]:
    """The float64 reference, or None and why there is none."""
    if not callable(source) or isinstance(source, Tensor):
        return source, "" if source is not None else "no float64 reference"
    try:
        value = source()
    except _No64Error as error:
        return None, str(error)
    except RuntimeError as error:  # no float64 kernel, or no memory for it: the rule has an answer for that
        return None, f"float64 reference failed ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    return value, "" if value is not None else "no float64 reference"


def _compare_node(
    path: str, res: Any, ref: Any, lazy: _Lazy64, training: bool, tolerance: Tolerance | None
) -> Comparison | None:
    """Compare one node of a walk; None for two equal containers, which are no leaves."""
    if isinstance(res, Tensor) and isinstance(ref, Tensor):
        return compare(res, ref, lazy.at(path), training=training, tolerance=tolerance, path=path)
    if type(res) is not type(ref):
        return Comparison(path, False, "structure", f"{kind_name(res)} instead of {kind_name(ref)}", math.inf)
    if isinstance(ref, Container):
        return (
            None
            if res == ref
            else Comparison(path, False, "structure", f"{kind_name(res)} instead of {kind_name(ref)}", math.inf)
        )
    if isinstance(ref, float):
        got, wanted = torch.tensor(res, dtype=torch.float64), torch.tensor(ref, dtype=torch.float64)
        return compare(got, wanted, lazy.at(path), training=training, tolerance=tolerance, path=path)
    equal = same_value(res, ref)
    return Comparison(
        path,
        equal,
        "exact",
        "equal" if equal else f"{res!r} instead of {ref!r}",
        0.0 if equal else math.inf,
        kind_name(ref),
        1,
    )


def _compare_exact(res: Tensor, ref: Tensor, path: str) -> Comparison:
    """Integers and booleans: every element equal."""
    wrong = int((res != ref.to(res.device)).sum())
    reason = f"{wrong} of {ref.numel()} elements differ" if wrong else "equal"
    largest = float((res.double() - ref.to(res.device).double()).abs().max()) if wrong else 0.0
    return Comparison(
        path, not wrong, "exact", reason, math.inf if wrong else 0.0, str(ref.dtype), ref.numel(), max_abs_error=largest
    )


@dataclass(frozen=True)
class _Closeness:
    """What one pass over `res` and `ref` finds; elements where both are the same NaN or infinity count in no number."""

    severity: float
    max_abs_error: float
    cosine: float
    misplaced: int


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Pieces of `_CHUNK` elements of equally shaped tensors, as float64 on the first's device; complex as two reals."""
    device = tensors[0].device
    flat = [(torch.view_as_real(t) if t.is_complex() else t).reshape(-1) for t in tensors]
    for start in range(0, flat[0].numel(), _CHUNK):
        yield tuple(t[start : start + _CHUNK].to(device=device, dtype=torch.float64) for t in flat)


def _closeness(res: Tensor, ref: Tensor, tol: float) -> _Closeness:
    """One pass; sums stay on the device until the end, so that a GPU is waited for once."""
    zero = torch.zeros((), dtype=torch.float64, device=res.device)
    severity, largest, dot, norm_res, norm_ref, misplaced = (zero.clone() for _ in range(6))
    for a, b in _chunks(res, ref):
        finite = a.isfinite() & b.isfinite()
        misplaced += (~(finite | (a == b) | (a.isnan() & b.isnan()))).sum()
        a, b = a.where(finite, zero), b.where(finite, zero)
        error = (a - b).abs()
        largest = torch.maximum(largest, error.max())
        severity = torch.maximum(severity, (error / (tol + tol * b.abs()).clamp_min(1e-300)).max())
        dot += a @ b
        norm_res += a @ a
        norm_ref += b @ b
    total = (norm_res * norm_ref).sqrt()
    cosine = torch.where(total > 0, dot / total, (norm_res == norm_ref).double())
    return _Closeness(severity.item(), largest.item(), cosine.item(), int(misplaced.item()))


def _rmse(res: Tensor, ref: Tensor, r64: Tensor) -> tuple[float, float]:
    """Root mean square errors of `res` and of `ref` to `r64`, over the elements where `ref` is finite."""
    zero = torch.zeros((), dtype=torch.float64, device=res.device)
    square_res, square_ref, count = (zero.clone() for _ in range(3))
    for a, b, exact in _chunks(res, ref, r64):
        finite = b.isfinite()
        square_res += (a - exact).square().where(finite, zero).sum()
        square_ref += (b - exact).square().where(finite, zero).sum()
        count += finite.sum()
    count = count.clamp_min(1)
    return (square_res / count).sqrt().item(), (square_ref / count).sqrt().item()
