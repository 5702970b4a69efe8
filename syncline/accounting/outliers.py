"""Steps that took far longer than the others: which, how long, and what they did meanwhile.

Means would spread them over all steps and so blame what every step does. They are left out of the means, and named.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from syncline.accounting.breakdown import RankBreakdown
from syncline.events import Step

FACTOR = 2.0
"""Times the median step: less is not called an outlier."""
FENCE = 3.0
"""Distances between the quartiles, above the upper one. Where a quarter of the steps is slow, that is what this loop
does, and none of them is an outlier."""
FEWEST = 5
"""Steps: of fewer, none is usual."""

Breakdowns = Sequence[Mapping[int, RankBreakdown]]


@dataclass(frozen=True)
class Outliers:
    """Outlier steps with one cause."""

    steps: list[int]
    counted: int
    """Steps that were looked at, these included."""
    part: str
    """Where the slowest rank spent most of the time that the usual step does not take."""
    rank: int
    """The slowest rank of most of them."""
    step_s: float
    """Median of these steps."""
    usual_s: float
    """Median of the others."""
    lost_s: float
    """What they cost beyond usual steps, spread over all steps."""
    loader_starts: bool
    """Each of them waited for a worker that a data loader had just started."""


def is_outlier(breakdowns: Breakdowns) -> list[bool]:
    """For each step; of the slowest rank's time."""
    times = [max(own.duration for own in by_rank.values()) for by_rank in breakdowns]
    if len(times) < FEWEST:
        return [False] * len(times)
    lower, middle, upper = statistics.quantiles(times, n=4, method="inclusive")
    limit = max(FACTOR * middle, upper + FENCE * (upper - lower))
    return [time > limit for time in times]


def find_outliers(steps: Sequence[Step], breakdowns: Breakdowns, loader_starts: set[int]) -> list[Outliers]:
    """By cause, the most expensive first. `loader_starts`: steps that need the first batch of a new loader worker."""
    flags = is_outlier(breakdowns)
    usual = [by_rank for by_rank, is_out in zip(breakdowns, flags, strict=True) if not is_out]
    by_cause: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for index in (index for index, is_out in enumerate(flags) if is_out):
        part = _cause(breakdowns[index], usual)
        by_cause[part, part == "data" and steps[index].number in loader_starts].append(index)
    found = [_describe(steps, breakdowns, usual, cause, indices) for cause, indices in by_cause.items()]
    return sorted(found, key=lambda outliers: -outliers.lost_s)


def _slowest(by_rank: Mapping[int, RankBreakdown]) -> RankBreakdown:
    """A rank that only waited for another one did not cause it."""
    return max(by_rank.values(), key=lambda own: own.duration - own.parts["wait"])


def _cause(by_rank: Mapping[int, RankBreakdown], usual: Breakdowns) -> str:
    own = _slowest(by_rank)
    excess = {part: spent - statistics.median(other[own.rank].parts[part] for other in usual)
              for part, spent in own.parts.items() if part != "wait"}  # fmt: skip
    return max(excess, key=lambda part: excess[part])


def _describe(
    steps: Sequence[Step], breakdowns: Breakdowns, usual: Breakdowns, cause: tuple[str, bool], indices: Sequence[int]
) -> Outliers:
    times = [max(own.duration for own in breakdowns[index].values()) / 1e9 for index in indices]
    usual_s = statistics.median(max(own.duration for own in by_rank.values()) for by_rank in usual) / 1e9
    return Outliers(
        steps=[steps[index].number for index in indices],
        counted=len(steps),
        part=cause[0],
        rank=statistics.mode(_slowest(breakdowns[index]).rank for index in indices),
        step_s=statistics.median(times),
        usual_s=usual_s,
        lost_s=sum(time - usual_s for time in times) / len(steps),
        loader_starts=cause[1],
    )
