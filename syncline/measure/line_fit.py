"""Latency and rate of a link from times by size: t = alpha + beta x bytes, with intervals. Pure.

Errors are relative (a time twice as long is twice as uncertain), so that the smallest messages say what the
latency is and the largest what the rate is. The intervals hold 95 % and come from how well the line fits; they say
nothing about what the line cannot describe, which is why the largest deviation stands beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def _interval(taken: float, estimate: float, margin: float) -> tuple[float, float]:
    """Around the free estimate, cut at 0, and never without the value that was taken."""
    return min(taken, max(0.0, estimate - margin)), max(taken, estimate + margin)


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
