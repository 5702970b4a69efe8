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
    """1 lies between the quartiles, or within half the spread of the median; of medians that were not measured side
    by side: their spreads overlap."""

    def __str__(self) -> str:
        return f"{self.median:.2f} ±{self.spread / 2:.2f}"


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Round by round, because what was measured side by side shares its noise; then the median and quartiles."""
    ratios = [top / bottom for top, bottom in zip(above, below, strict=True)]
    middle = statistics.median(ratios)
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else [middle] * 3
    # Also by what is printed, median ± half the spread: quartiles need not lie evenly around the median.
    within = quartiles[0] <= 1.0 <= quartiles[2] or abs(middle - 1.0) <= spread(ratios) / 2
    return Ratio(middle, spread(ratios), within)


def ratio_of_medians(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Of what was not measured side by side; the relative spreads add up."""
    top, bottom = statistics.median(above), statistics.median(below)
    relative = spread(above) / top + spread(below) / bottom
    return Ratio(top / bottom, top / bottom * relative, spreads_overlap(above, below))


def spreads_overlap(first: Sequence[float], second: Sequence[float]) -> bool:
    """Median ± half the interquartile range, as it is printed, reaches that of the other."""
    difference = abs(statistics.median(first) - statistics.median(second))
    return difference <= (spread(first) + spread(second)) / 2


def speedup(alone: Sequence[float], together: Sequence[float], *, work: float = 1.0) -> float:
    """T(1) / T(n), medians of the step times; `work`: samples of a step together over those of a step alone."""
    return work * statistics.median(alone) / statistics.median(together)


def spread(values: Sequence[float]) -> float:
    """The interquartile range; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return upper - lower
