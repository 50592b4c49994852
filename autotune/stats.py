"""Paired comparison of two step times: one ratio, its interval and a verdict (PROTOCOLS T1, T3).

Legend: P pairs of processes, R rounds in a pair, B bootstrap resamples; `ratio` = baseline time / candidate time,
so above 1 the candidate is faster.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

Floats = NDArray[np.float64]

MIN_PAIRS = 3
RESAMPLES = 1000
CONFIDENCE = 0.95
# Two processes that run one program differ by a bias of their own. Its usual size, and how many pairs that knowledge is
# worth, steady the spread that only a few pairs can show: with 3 pairs alone it is by chance often far too small.
PRIOR_BIAS = 0.005
PRIOR_WEIGHT = 3.0


class Verdict(enum.Enum):
    """What a comparison proves about the candidate."""

    FASTER = "faster"
    SAME = "same"
    SLOWER = "slower"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Comparison:
    """A candidate against its baseline.

    Attributes:
        ratio: baseline time / candidate time.
        ci_low, ci_high: 95 % interval of `ratio`.
        rounds: rounds over all pairs.
        pairs: fresh pairs of processes.
        verdict: what the interval proves.
        candidate_s, baseline_s: median seconds of one call, for tables of this very run only.
    """

    ratio: float
    ci_low: float
    ci_high: float
    rounds: int
    pairs: int
    verdict: Verdict
    candidate_s: float = math.nan
    baseline_s: float = math.nan

    def half_width(self) -> float:
        """Half the interval's width relative to the ratio."""
        return (self.ci_high - self.ci_low) / 2 / self.ratio

    def proves_gain(self, gain: float) -> bool:
        """True where the lower end of the gain exceeds `gain` (0.02 is 2 %)."""
        return self.pairs >= MIN_PAIRS and self.ci_low > 1 + gain

    def settles(self, gain: float) -> bool:
        """True where the interval lies wholly above or wholly below a gain of `gain`."""
        return self.pairs >= MIN_PAIRS and not self.ci_low <= 1 + gain <= self.ci_high


def bootstrap_log_ratio(log_ratios: Sequence[Floats], *, resamples: int = RESAMPLES, seed: int = 0) -> Floats:
    """Resample pairs first, then the rounds of each drawn pair.

    Args:
        log_ratios: P arrays of R_p values log(baseline / candidate).

    Returns:
        B values of the statistic: the mean over drawn pairs of the median over drawn rounds.
    """
    rng = np.random.default_rng(seed)
    count = len(log_ratios)
    # bank[p, b] = median of the b-th resample of pair p; a pair drawn twice takes two different columns of its row.
    bank = np.empty((count, resamples))
    for p, values in enumerate(log_ratios):
        bank[p] = np.median(values[rng.integers(0, len(values), (resamples, len(values)))], axis=1)
    drawn = rng.integers(0, count, (resamples, count))
    columns = rng.integers(0, resamples, (resamples, count))
    return np.asarray(bank[drawn, columns].mean(axis=1), dtype=np.float64)


@functools.cache
def _t_quantile(confidence: float, freedom: float) -> float:
    return float(special.stdtrit(freedom, 0.5 + confidence / 2))


def interval(log_ratios: Sequence[Floats], *, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """Centre and half-width of the 95 % interval of the log-ratio.

    The bootstrap gives the standard error. With few pairs its plain quantiles are far too narrow (3 pairs: the interval
    ends at the smallest and largest pair, which both lie on one side of the truth in 1 case of 4), so the error is
    corrected by P / (P - 1) for the resampling of few pairs, steadied by the usual bias of a process, and widened by
    Student's t.
    """
    count = len(log_ratios)
    centre = float(np.mean([np.median(values) for values in log_ratios]))
    if count == 1:
        return centre, math.inf
    variance = float(np.var(bootstrap_log_ratio(log_ratios, resamples=resamples, seed=seed))) * count / (count - 1)
    prior = 2 * PRIOR_BIAS**2 / count  # a log-ratio carries the bias of two processes
    freedom = count - 1 + PRIOR_WEIGHT
    steadied = ((count - 1) * variance + PRIOR_WEIGHT * prior) / freedom
    return centre, _t_quantile(CONFIDENCE, freedom) * math.sqrt(max(steadied, variance if count < MIN_PAIRS else 0.0))


def compare(
    baseline_s: Sequence[Sequence[float]],
    candidate_s: Sequence[Sequence[float]],
    *,
    precision: float = 0.01,
    margin: float = 0.01,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Compare paired times.

    Args:
        baseline_s, candidate_s: seconds per call, one inner sequence per pair of processes; round r of one belongs
            to round r of the other.
        precision: half-width of the interval below which a comparison counts as settled.
        margin: a difference below it is none; an interval that is narrow and proves no more than it is `same`.
    """
    assert len(baseline_s) == len(candidate_s) > 0, (len(baseline_s), len(candidate_s))
    pairs = []
    for base, cand in zip(baseline_s, candidate_s, strict=True):
        assert len(base) == len(cand) > 0, (len(base), len(cand))
        pairs.append(np.log(np.asarray(base, dtype=np.float64)) - np.log(np.asarray(cand, dtype=np.float64)))
    centre, half = interval(pairs, resamples=resamples, seed=seed)
    low, high = (math.exp(centre - half), math.exp(centre + half)) if math.isfinite(half) else (0.0, math.inf)
    if len(pairs) < MIN_PAIRS:
        verdict = Verdict.UNDECIDED
    elif low > 1 + margin:
        verdict = Verdict.FASTER
    elif high < 1 - margin:
        verdict = Verdict.SLOWER
    else:
        verdict = Verdict.SAME if half <= precision else Verdict.UNDECIDED
    return Comparison(
        ratio=math.exp(centre),
        ci_low=low,
        ci_high=high,
        rounds=sum(map(len, pairs)),
        pairs=len(pairs),
        verdict=verdict,
        candidate_s=float(np.median(np.concatenate([np.asarray(c) for c in candidate_s]))),
        baseline_s=float(np.median(np.concatenate([np.asarray(b) for b in baseline_s]))),
    )


def noise(baseline_s: Sequence[float], candidate_s: Sequence[float]) -> float:
    """Standard error of the median log-ratio in one pair (1.2533: factor of a median; 1.4826: MAD to deviation)."""
    values = np.log(np.asarray(baseline_s)) - np.log(np.asarray(candidate_s))
    spread = 1.4826 * float(np.median(np.abs(values - np.median(values))))
    return 1.2533 * spread / math.sqrt(len(values))
