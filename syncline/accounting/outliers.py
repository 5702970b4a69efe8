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


def is_outlier(times: Sequence[int]) -> list[bool]:
    """For each step, by the slowest rank's time."""
    if len(times) < FEWEST:
        return [False] * len(times)
    lower, middle, upper = statistics.quantiles(times, n=4, method="inclusive")
    limit = max(FACTOR * middle, upper + FENCE * (upper - lower))
    return [time > limit for time in times]


def find_outliers(
    slow: Sequence[tuple[Step, Mapping[int, RankBreakdown]]], usual: Breakdowns, loader_starts: set[int], *,
    counted: int, usual_s: float,
) -> list[Outliers]:  # fmt: skip
    """By cause, the most expensive first. `slow`: the outliers; `loader_starts`: steps that need the first batch of a
    new loader worker; `counted`: steps that were looked at; `usual_s`: what one of them usually takes."""
    if not slow:
        return []
    usually = {
        rank: {
            part: statistics.median(by_rank[rank].parts[part] for by_rank in usual) for part in usual[0][rank].parts
        }
        for rank in usual[0]
    }
    by_cause: dict[tuple[str, bool], list[tuple[Step, Mapping[int, RankBreakdown]]]] = defaultdict(list)
    for step, by_rank in slow:
        part = _cause(by_rank, usually)
        by_cause[part, part == "data" and step.number in loader_starts].append((step, by_rank))
    found = [_describe(own, cause, counted, usual_s) for cause, own in by_cause.items()]
    return sorted(found, key=lambda outliers: -outliers.lost_s)


def _slowest(by_rank: Mapping[int, RankBreakdown]) -> RankBreakdown:
    """A rank that only waited for another one did not cause it."""
    return max(by_rank.values(), key=lambda own: own.duration - own.parts["wait"])


def _cause(by_rank: Mapping[int, RankBreakdown], usually: Mapping[int, Mapping[str, float]]) -> str:
    own = _slowest(by_rank)
    excess = {part: spent - usually[own.rank][part] for part, spent in own.parts.items() if part != "wait"}
    return max(excess, key=lambda part: excess[part])


def _describe(
    slow: Sequence[tuple[Step, Mapping[int, RankBreakdown]]], cause: tuple[str, bool], counted: int, usual_s: float
) -> Outliers:
    times = [max(own.duration for own in by_rank.values()) / 1e9 for _, by_rank in slow]
    return Outliers(
        steps=[step.number for step, _ in slow],
        counted=counted,
        part=cause[0],
        rank=statistics.mode(_slowest(by_rank).rank for _, by_rank in slow),
        step_s=statistics.median(times),
        usual_s=usual_s,
        lost_s=sum(time - usual_s for time in times) / counted,
        loader_starts=cause[1],
    )
