"""Which of several is fastest: one rule for reports, `explain` and `compare`.

Step times are held against each other round by round where they were measured side by side, because such steps share
their noise. Whoever lies within the spread of the fastest is named with it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from syncline.accounting.statistics import Ratio, paired_ratio

T = TypeVar("T")


@dataclass(frozen=True)
class Ranking(Generic[T]):
    fastest: list[T]
    """The one with the shortest times first; the others show no difference from it."""
    closest: list[Ratio]
    """Times of those others over the first one's."""
    slower: list[tuple[T, Ratio]]
    """And of all the rest, in order."""

    @property
    def all_equal(self) -> bool:
        return not self.slower


def rank(items: Sequence[T], ratio: Callable[[T, T], Ratio]) -> Ranking[T]:
    """`ratio` gives one item's times over another's. At least one item."""
    first = min(items, key=lambda item: _against_all(item, items, ratio))
    others = [(item, ratio(item, first)) for item in items if item is not first]
    others.sort(key=lambda pair: pair[1].median)
    equal = [(item, found) for item, found in others if found.no_difference or found.median <= 1]
    slower = [pair for pair in others if pair not in equal]
    return Ranking([first, *(item for item, _ in equal)], [found for _, found in equal], slower)


def _against_all(item: T, items: Sequence[T], ratio: Callable[[T, T], Ratio]) -> float:
    """The mean logarithm of its ratios to the others: a single odd opponent does not decide."""
    return statistics.fmean(math.log(ratio(item, other).median) if other is not item else 0.0 for other in items)


def rank_times(times: Mapping[str, Sequence[float]]) -> Ranking[str]:
    """By name, of times that were measured side by side: as many of each, in the same order."""
    return rank(list(times), lambda one, other: paired_ratio(times[one], times[other]))


def describe(ranking: Ranking[T], name: Callable[[T], str]) -> str:
    """A sentence without its full stop: who is fastest, and how much longer the slowest takes."""
    names = [name(item) for item in ranking.fastest]
    if ranking.all_equal and len(names) > 1:
        return f"no difference between {listed(names)}: their times differ by less than the spread"
    text = f"{names[0]} is fastest"
    if len(names) > 1:
        text = f"{listed(names)} are fastest, with no difference between them"
    if ranking.slower:
        slowest, found = ranking.slower[-1]
        text += f"; {name(slowest)} takes {found} times as long as {names[0]}"
    return text


def sentence(ranking: Ranking[str]) -> str:
    """The same where nothing comes before it: method names keep their letters."""
    text = describe(ranking, str)
    return text[0].upper() + text[1:] if ranking.all_equal and len(ranking.fastest) > 1 else text


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
