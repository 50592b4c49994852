"""The comparison's error rates on times whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fusewright.autotune.stats import Comparison, Floats, Verdict, bootstrap_log_ratio, compare, interval, noise

ROUNDS = 20


def draw_pair(rng: np.random.Generator, gain: float, bias: float, spread: float = 0.01) -> tuple[Floats, Floats]:
    """One pair of processes: a bias each, heavy-tailed noise (Student's t, 3 degrees) at times a 50 % stall."""
    times = []
    for speed in (1.0, 1.0 + gain):
        tail = spread * rng.standard_t(3, ROUNDS) / np.sqrt(3)
        stall = (rng.random(ROUNDS) < 0.03) * rng.random(ROUNDS) * 0.5
        times.append(0.01 / speed * np.exp(rng.normal(0, bias) + tail + stall))
    return times[0], times[1]


def measure(seed: int, gain: float, bias: float, most: int = 12) -> Comparison:
    """What a run does: at least 3 pairs, more until the interval is narrow enough."""
    rng = np.random.default_rng(seed)
    base, cand = [], []
    for pairs in range(1, most + 1):
        b, c = draw_pair(rng, gain, bias)
        base.append(b)
        cand.append(c)
        found = compare(base, cand, resamples=300, seed=seed)
        if pairs >= 3 and found.half_width() <= 0.01:
            break
    return found


@pytest.mark.parametrize("bias", [0.003, 0.01])
def test_identical_programs_are_almost_never_told_apart(bias: float) -> None:
    found = [measure(seed, 0.0, bias) for seed in range(300)]
    assert sum(f.verdict is Verdict.FASTER for f in found) <= 3
    assert sum(f.verdict is Verdict.SLOWER for f in found) <= 3
    assert sum(f.proves_gain(0.02) for f in found) <= 1


@pytest.mark.parametrize("bias", [0.003, 0.01])
def test_a_gain_of_5_percent_is_found(bias: float) -> None:
    found = [measure(seed, 0.05, bias) for seed in range(100)]
    assert sum(f.verdict is Verdict.FASTER for f in found) >= 90
    lost = [measure(seed, -0.05, bias) for seed in range(100)]
    assert sum(f.verdict is Verdict.SLOWER for f in lost) >= 90


def test_the_interval_covers_the_truth() -> None:
    found = [measure(seed, 0.03, 0.005) for seed in range(300)]
    covered = sum(f.ci_low <= 1.03 <= f.ci_high for f in found)
    assert covered >= 0.93 * 300
    assert np.mean([f.half_width() for f in found]) <= 0.01  # and is not merely wide


def test_three_pairs_that_agree_by_chance_do_not_prove_precision() -> None:
    same = [np.full(ROUNDS, 0.01)] * 3
    assert interval(same)[1] > 0.002


def test_fewer_than_three_pairs_prove_nothing() -> None:
    base, cand = [np.full(ROUNDS, 2.0)] * 2, [np.full(ROUNDS, 1.0)] * 2
    found = compare(base, cand)
    assert found.verdict is Verdict.UNDECIDED
    assert found.ratio == pytest.approx(2.0)
    assert not found.proves_gain(0.02)
    assert compare(base[:1], cand[:1]).ci_high == math.inf


def test_a_wide_interval_is_undecided_and_never_same() -> None:
    rng = np.random.default_rng(0)
    pairs = [draw_pair(rng, 0.0, 0.05) for _ in range(3)]
    assert compare([p[0] for p in pairs], [p[1] for p in pairs]).verdict is Verdict.UNDECIDED


def test_the_spread_between_pairs_counts_and_not_only_that_between_rounds() -> None:
    quiet = [np.full(200, 0.0), np.full(200, 0.04), np.full(200, -0.04)]
    assert np.std(bootstrap_log_ratio(quiet)) > 0.015


def test_the_bootstrap_is_repeatable_and_takes_pairs_of_unequal_length() -> None:
    rng = np.random.default_rng(3)
    pairs = [rng.normal(0, 0.01, n) for n in (5, 20, 31)]
    assert np.array_equal(bootstrap_log_ratio(pairs, seed=1), bootstrap_log_ratio(pairs, seed=1))
    assert not np.array_equal(bootstrap_log_ratio(pairs, seed=1), bootstrap_log_ratio(pairs, seed=2))


def test_noise_is_the_error_of_the_median() -> None:
    rng = np.random.default_rng(0)
    draws = np.exp(rng.normal(0, 0.02, (2000, 2, 25)))
    medians = [np.median(np.log(b) - np.log(c)) for b, c in draws]
    assert np.mean([noise(b, c) for b, c in draws]) == pytest.approx(np.std(medians), rel=0.15)
