"""The line through times by size finds the latency and the rate that made them, and its intervals hold them."""

from __future__ import annotations

import numpy as np
import pytest

from syncline.measure.fit import fit_line

SIZES = [1000 * 4**power for power in range(8)]


@pytest.mark.parametrize(("alpha", "beta"), [(50e-6, 8e-9), (1e-3, 1e-9), (2e-6, 1e-10)])
def test_exact_times_give_back_alpha_and_beta(alpha: float, beta: float) -> None:
    fit = fit_line(SIZES, [alpha + beta * size for size in SIZES])
    assert fit is not None
    assert fit.alpha_s == pytest.approx(alpha, rel=1e-9)
    assert fit.beta_s_per_byte == pytest.approx(beta, rel=1e-9)
    assert fit.bytes_per_s == pytest.approx(1 / beta)
    assert fit.worst_deviation < 1e-9
    assert fit.seconds(10**6) == pytest.approx(alpha + beta * 10**6)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    alpha, beta = 100e-6, 8e-9
    hits = np.zeros(2)
    for seed in range(300):
        noise = np.random.default_rng(seed).normal(1, 0.05, len(SIZES))
        fit = fit_line(SIZES, (alpha + beta * np.array(SIZES)) * noise)
        assert fit is not None
        hits += [
            fit.alpha_interval_s[0] <= alpha <= fit.alpha_interval_s[1],
            fit.beta_interval_s_per_byte[0] <= beta <= fit.beta_interval_s_per_byte[1],
        ]
        assert fit.alpha_interval_s[0] <= fit.alpha_s <= fit.alpha_interval_s[1]
    assert (hits / 300 > 0.90).all()
    assert (hits / 300 < 0.99).all(), "an interval that always holds the truth is too wide to say anything"


def test_no_part_takes_negative_time() -> None:
    pure_rate = fit_line(SIZES, [size * 1e-9 * (0.9 if size == SIZES[0] else 1) for size in SIZES])
    assert pure_rate is not None
    assert pure_rate.alpha_s == 0 == pure_rate.alpha_interval_s[0]
    assert pure_rate.beta_s_per_byte == pytest.approx(1e-9, rel=0.05)
    falling = fit_line([1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0])
    assert falling is not None
    assert falling.beta_s_per_byte == 0
    assert falling.bytes_per_s is None


def test_what_no_line_describes_shows_as_deviation() -> None:
    bent = fit_line(SIZES, [1e-4 if size < 10**6 else 1e-1 for size in SIZES])
    assert bent is not None
    assert bent.worst_deviation > 0.5


@pytest.mark.parametrize("sizes", [[], [1], [1, 2], [5, 5, 5]])
def test_too_few_sizes_give_no_fit(sizes: list[int]) -> None:
    assert fit_line(sizes, [1.0] * len(sizes)) is None
