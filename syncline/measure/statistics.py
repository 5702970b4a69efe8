"""Numbers from samples: the median and its spread, over what is left after the warm-up."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Step times in seconds. `spread_s` is the distance between the quartiles."""

    median_s: float
    mean_s: float
    spread_s: float
    counted: int
    warmup: int


def timing(seconds: Sequence[float], *, warmup: int, window: int | None = None) -> Timing | None:
    """Statistics of the steps after the warm-up, at most `window` of them; None if no step is left."""
    left = counted(seconds, warmup=warmup, window=window)
    if not left:
        return None
    return Timing(
        median_s=statistics.median(left),
        mean_s=statistics.fmean(left),
        spread_s=spread(left),
        counted=len(left),
        warmup=warmup,
    )


def counted(seconds: Sequence[float], *, warmup: int, window: int | None = None) -> list[float]:
    """The steps after the warm-up, at most `window` of them."""
    return list(seconds[warmup:] if window is None else seconds[warmup : warmup + window])


def spread(values: Sequence[float]) -> float:
    """Distance between the quartiles; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return upper - lower
