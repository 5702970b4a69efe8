"""Least-squares fits with 95 % intervals: latency and rate of a link, and the serial share of a scaling curve. Pure.

Latency and rate come from times by size: t = alpha + beta x bytes.
Errors are relative (a time twice as long is twice as uncertain), so that the smallest messages say what the
latency is and the largest what the rate is. The intervals come from how well the line fits; they say nothing about
what the line cannot describe, so the largest deviation is given too.

Amdahl, at one global batch (strong): T(n) = T(1) (s + (1 - s) / n), so the speed-up ends at 1 / s.
Gustafson, at one batch per node (weak): speed-up(n) = n - s (n - 1).

Both have one unknown, s, fitted by least squares against the measured one-node time. Neither law knows a share that
grows with n, as an exchange over more nodes does: where the largest deviation is above `POOR`, the law does not hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Fit:
    """`alpha_s` seconds for any message, `beta_s_per_byte` for each byte of it."""

    alpha_s: float
    alpha_interval_s: tuple[float, float]
    beta_s_per_byte: float
    beta_interval_s_per_byte: tuple[float, float]
    worst_deviation: float
    """Largest distance of a measured time from the line, as a share of the line."""

    @property
    def bytes_per_s(self) -> float | None:
        """None where no size took longer than another: that is no rate."""
        return 1 / self.beta_s_per_byte if self.beta_s_per_byte > 0 else None

    def seconds(self, num_bytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * num_bytes


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Fit | None:
    """The line through the medians; None for fewer than three sizes, where no interval can be given.

    Neither part of a real transfer takes negative time: where the best line says so, that part is 0 and the other is
    fitted alone.
    """
    if len(set(sizes)) < 3:
        return None
    x, y = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    estimates, errors = _least_squares(np.stack([np.ones_like(x), x]), y)
    margins = errors * float(stats.t.ppf((1 + CONFIDENCE) / 2, len(x) - 2))
    alpha, beta = estimates
    if alpha < 0:
        alpha, beta = 0.0, _least_squares(x[None], y)[0][0]
    elif beta < 0:
        alpha, beta = _least_squares(np.ones_like(x)[None], y)[0][0], 0.0
    line = alpha + beta * x
    return Fit(
        alpha_s=float(alpha),
        alpha_interval_s=_interval(float(alpha), float(estimates[0]), float(margins[0])),
        beta_s_per_byte=float(beta),
        beta_interval_s_per_byte=_interval(float(beta), float(estimates[1]), float(margins[1])),
        worst_deviation=float(np.abs(y / line - 1).max()),
    )


def _interval(value: float, estimate: float, margin: float) -> tuple[float, float]:
    """Around the free estimate, cut at 0, and always including the value used."""
    return min(value, max(0.0, estimate - margin)), max(value, estimate + margin)


def _least_squares(terms: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients of the terms (one row each) and their standard errors, all relative to the measured seconds."""
    design = (terms / seconds).T
    scale = np.linalg.norm(design, axis=0)  # bytes and 1 differ by many orders of magnitude
    scaled = design / scale
    solution, _, _, _ = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)
    left = np.ones(len(seconds)) - scaled @ solution
    variance = float(left @ left) / max(1, len(seconds) - len(terms))
    covariance = variance * np.linalg.inv(scaled.T @ scaled)
    return solution / scale, np.sqrt(np.diag(covariance)) / scale


# The laws of Amdahl and Gustafson.

POOR = 0.10
"""The largest deviation from a law, as a share of what it says, with which it still describes a measurement."""
Law = Literal["amdahl", "gustafson"]
NAMES: dict[Law, str] = {"amdahl": "Amdahl", "gustafson": "Gustafson"}


@dataclass(frozen=True)
class SerialFit:
    law: Law
    share: float
    """s, between 0 and 1."""
    interval: tuple[float, float] | None
    """Holds s with 95 %; None below three sizes besides one node."""
    worst_deviation: float
    """Largest distance of a measured speed-up from the law, as a share of the law's."""

    @property
    def poor(self) -> bool:
        return self.worst_deviation > POOR

    @property
    def limit(self) -> float | None:
        """Of the speed-up on ever more nodes by Amdahl's law; None where there is none."""
        return 1 / self.share if self.law == "amdahl" and self.share > 0 else None

    def speedup(self, n: float) -> float:
        if self.law == "amdahl":
            return 1 / (self.share + (1 - self.share) / n)
        return n - self.share * (n - 1)


def describe(fit: SerialFit) -> str:
    """In words: the serial share and what follows from it, or that the law does not hold."""
    if fit.poor:
        return (
            f"no serial share fits (the closest, {fit.share:.0%}, is off by up to {fit.worst_deviation:.0%}): the "
            "part that does not shrink changes with the number of nodes"
        )
    between = f" ({fit.interval[0]:.0%} to {fit.interval[1]:.0%})" if fit.interval else ""
    text = (
        f"{fit.share:.1%}{between} of the step is serial, and no point is off by more than {fit.worst_deviation:.0%}"
    )
    return f"{text}; however many nodes there are, the speed-up stays below {fit.limit:.1f}" if fit.limit else text


def fit_law(law: Law, speedups: Mapping[int, float]) -> SerialFit | None:
    """Through the speed-ups by number of nodes; None below two sizes above one: any law goes through one."""
    sizes = sorted(n for n in speedups if n > 1)
    if len(sizes) < 2:
        return None
    n, measured = np.array(sizes, dtype=float), np.array([speedups[size] for size in sizes])
    if law == "amdahl":
        known, term, times = 1 / n, 1 - 1 / n, 1 / measured  # T(n) / T(1) = 1/n + s (1 - 1/n)
        free, margin = _one_unknown(term, times - known)
    else:
        free, margin = _one_unknown(n - 1, n - measured)
    share = min(max(free, 0.0), 1.0)
    interval = None if margin is None else (max(0.0, min(share, free - margin)), min(1.0, max(share, free + margin)))
    fit = SerialFit(law, share, interval, 0.0)
    worst = max(abs(speedup / fit.speedup(size) - 1) for size, speedup in zip(sizes, measured, strict=True))
    return SerialFit(law, share, interval, float(worst))


def _one_unknown(terms: np.ndarray, values: np.ndarray) -> tuple[float, float | None]:
    """values = s x terms by least squares: s, and half of its interval where there are enough values."""
    share = float(terms @ values / (terms @ terms))
    if len(terms) < 3:
        return share, None
    left = values - share * terms
    error = float(np.sqrt((left @ left) / (len(terms) - 1) / (terms @ terms)))
    return share, error * float(stats.t.ppf((1 + CONFIDENCE) / 2, len(terms) - 1))
