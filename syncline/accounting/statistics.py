"""Numbers from samples: medians, spreads, ratios and speed-ups, of what is left after the warm-up."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Step times in seconds. `spread_s` is the interquartile range."""

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


@dataclass(frozen=True)
class Ratio:
    median: float
    spread: float
    no_difference: bool
    """1 lies between the quartiles."""


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Round by round, because what was measured side by side shares its noise; then the median and quartiles."""
    ratios = [top / bottom for top, bottom in zip(above, below, strict=True)]
    middle = statistics.median(ratios)
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else [middle] * 3
    return Ratio(middle, spread(ratios), quartiles[0] <= 1.0 <= quartiles[2])


def speedup(alone: Sequence[float], together: Sequence[float], *, work: float = 1.0) -> float:
    """T(1) / T(n), medians of the step times; `work`: samples of a step together over those of a step alone."""
    return work * statistics.median(alone) / statistics.median(together)


def spread(values: Sequence[float]) -> float:
    """The interquartile range; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return upper - lower
