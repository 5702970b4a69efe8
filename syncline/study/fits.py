"""Amdahl's and Gustafson's laws through measured scaling: the serial share, with its interval, and how well the law
describes the measurement. Pure.

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

from syncline.measure.line_fit import CONFIDENCE
from syncline.study.rows import Row, baseline_of, speedup_over

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
    """Holds s with 95 %; None below three sizes beside one node, where it cannot be told."""
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
    worst = max(abs(one / fit.speedup(size) - 1) for size, one in zip(sizes, measured, strict=True))
    return SerialFit(law, share, interval, float(worst))


def _one_unknown(terms: np.ndarray, values: np.ndarray) -> tuple[float, float | None]:
    """values = s x terms by least squares: s, and half of its interval where there are enough values."""
    share = float(terms @ values / (terms @ terms))
    if len(terms) < 3:
        return share, None
    left = values - share * terms
    error = float(np.sqrt((left @ left) / (len(terms) - 1) / (terms @ terms)))
    return share, error * float(stats.t.ppf((1 + CONFIDENCE) / 2, len(terms) - 1))


def fit_rows(law: Law, row: Row, rows: Sequence[Row]) -> SerialFit | None:
    """The law through all rows of this row's stage, model and method."""
    return fit_law(law, speedups_beside(row, rows))


def speedups_beside(row: Row, rows: Sequence[Row]) -> dict[int, float]:
    """Speed-up by number of nodes (or workers, where the study has no nodes) of the curve that a row lies on."""
    found: dict[int, float] = {}
    for one in rows:
        if one.stage == row.stage and one.method == row.method and one.point.get("model") == row.point.get("model"):
            base = baseline_of(one, rows)
            if base is not None and base.seconds and one.seconds:
                found[one.workers // base.workers] = speedup_over(base, one)
    return found
