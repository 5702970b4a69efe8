"""Ranks that the others wait for: which, in what, how late, how often; and ranks whose own step times disagree.

A rank is late by the time from the moment when half of the other ranks had their last gradient ready to the moment
when it had its own. Where ranks send something inside forward, the others may wait there already: then it is late by
the same distance there. What made it late is the phase in which it took longest beyond the median of the others; a
rank that started the step late was held up between steps, or in the update before.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from syncline.accounting.breakdown import RankBreakdown
from syncline.events import RankInfo, RankStep, Step

LATE = 0.05
"""Of a step: less is not called late."""
OFTEN = 0.2
"""Of the steps: less is not called a habit."""
FEWEST = 3
"""Steps: one or two are chance."""
MOSTLY = 2 / 3
"""Of all lateness: where every rank is late now and then, none is the straggler."""
WAITED = 0.01
"""Of a step: a rank that the others wait less for costs them nothing, however late it is."""
DISAGREE = 0.1
"""Of the longest: how far ranks' own step times may lie apart."""
BETWEEN = "between steps"


@dataclass(frozen=True)
class Straggler:
    rank: int
    phase: str
    """data, forward, backward, update (of the step before) or between steps."""
    late_s: float
    """Median over the steps in which it was late."""
    late_steps: int
    steps: int
    waited_s: float
    """What each other rank waits for it, per step."""
    waited_share: float
    """The same as a share of the step."""
    saves_s: float
    """Most that a step could gain: to the next rank that would be last, per step."""
    threads: int | None = None
    others_threads: int | None = None

    @property
    def has_fewer_threads(self) -> bool:
        return self.threads is not None and self.others_threads is not None and self.threads < self.others_threads


@dataclass(frozen=True)
class Disagreement:
    """Ranks' own times for the same steps lie apart."""

    longest_rank: int
    longest_s: float
    shortest_rank: int
    shortest_s: float
    part: str
    """Where most of the difference lies."""
    difference_s: float
    """In that part."""


@dataclass(frozen=True)
class _Late:
    rank: int
    phase: str
    late: int
    saves: int


def find_stragglers(
    steps: Sequence[Step], breakdowns: Sequence[Mapping[int, RankBreakdown]], infos: Mapping[int, RankInfo]
) -> list[Straggler]:
    if not steps or len(steps[0].ranks) < 2:
        return []
    lates = []
    for number, (step, by_rank) in enumerate(zip(steps, breakdowns, strict=True)):
        before = steps[number - 1] if number and _follows(steps[number - 1], step) else None
        late = _late_rank(step, by_rank, before)
        if late is not None:
            lates.append(late)
    by_cause: dict[tuple[int, str], list[_Late]] = defaultdict(list)
    for late in lates:
        by_cause[late.rank, late.phase].append(late)
    least = max(OFTEN * len(steps), min(FEWEST, len(steps)))
    stragglers = [
        _describe(rank, phase, own, steps, breakdowns, infos)
        for (rank, phase), own in by_cause.items()
        if len(own) >= least and sum(late.late for late in own) >= MOSTLY * sum(late.late for late in lates)
    ]
    costly = [straggler for straggler in stragglers if straggler.waited_share >= WAITED]
    return sorted(costly, key=lambda straggler: -straggler.waited_s)


def find_disagreement(breakdowns: Sequence[Mapping[int, RankBreakdown]]) -> Disagreement | None:
    if not breakdowns or len(breakdowns[0]) < 2:
        return None
    means = {rank: statistics.fmean(by_rank[rank].duration for by_rank in breakdowns) for rank in breakdowns[0]}
    longest, shortest = max(means, key=lambda rank: means[rank]), min(means, key=lambda rank: means[rank])
    if means[longest] - means[shortest] <= DISAGREE * means[longest]:
        return None
    apart = {
        part: statistics.fmean(by_rank[longest].parts[part] - by_rank[shortest].parts[part] for by_rank in breakdowns)
        for part in breakdowns[0][longest].parts
    }
    part = max(apart, key=lambda part: apart[part])
    return Disagreement(longest, means[longest] / 1e9, shortest, means[shortest] / 1e9, part, apart[part] / 1e9)


def _follows(before: Step, step: Step) -> bool:
    return before.session == step.session and before.number + 1 == step.number


def _late_rank(step: Step, by_rank: Mapping[int, RankBreakdown], before: Step | None) -> _Late | None:
    """The last rank of a step and what made it late, if that is worth a word."""
    arrivals = {rank: own.last_ready for rank, own in by_rank.items()}
    in_forward = {rank: own.first_ready for rank, own in by_rank.items() if own.first_ready is not None}
    # What is sent inside forward lets the others wait there already, and then all go on together.
    early = in_forward if len(in_forward) == len(by_rank) and _lateness(in_forward) > _lateness(arrivals) else None
    last = max(early or arrivals, key=lambda rank: (early or arrivals)[rank])
    late = _lateness(early or arrivals)
    if late < LATE * statistics.median(own.duration for own in by_rank.values()):
        return None
    others = [arrival for rank, arrival in (early or arrivals).items() if rank != last]
    cause = _cause(step, by_rank, before, last, until_forward=early is not None)
    return _Late(last, cause, round(late), (early or arrivals)[last] - max(others))


def _lateness(arrivals: Mapping[int, int]) -> float:
    """From when half of the others were there to the last."""
    *others, last = sorted(arrivals.values())
    return last - statistics.median(others)


def _cause(
    step: Step, by_rank: Mapping[int, RankBreakdown], before: Step | None, last: int, *, until_forward: bool
) -> str:
    def excess(values: Mapping[int, float]) -> float:
        return values[last] - statistics.median(value for rank, value in values.items() if rank != last)

    spent = {
        part: excess({rank: own.parts[part] for rank, own in by_rank.items()}) for part in ("data", "forward", "copy")
    }
    if until_forward:
        del spent["forward"]
    else:
        spent["backward"] = excess({rank: _backward(step.ranks[rank], own) for rank, own in by_rank.items()})
    started = excess({rank: own.start for rank, own in step.ranks.items()})
    if before is not None and last in before.ranks:
        spent["update"] = min(started, excess({rank: _update(own) for rank, own in before.ranks.items()}))
    spent[BETWEEN] = started - max(0.0, spent.get("update", 0.0))
    return max(spent, key=lambda phase: spent[phase])


def _backward(own: RankStep, breakdown: RankBreakdown) -> int:
    """With the copying in it."""
    phase = own.phase("backward")
    return breakdown.last_ready - phase.start if phase is not None else 0


def _update(own: RankStep) -> int:
    phase = own.phase("update")
    return phase.end - phase.start if phase is not None else 0


def _describe(
    rank: int,
    phase: str,
    lates: Sequence[_Late],
    steps: Sequence[Step],
    breakdowns: Sequence[Mapping[int, RankBreakdown]],
    infos: Mapping[int, RankInfo],
) -> Straggler:
    others = [own for by_rank in breakdowns for other, own in by_rank.items() if other != rank]
    waited = statistics.fmean(sum(wait.duration for wait in own.waits if wait.rank == rank) for own in others)
    threads = [infos[other].threads for other in breakdowns[0] if other != rank and other in infos]
    known = [count for count in threads if count is not None]
    return Straggler(
        rank=rank,
        phase=phase,
        late_s=statistics.median(late.late for late in lates) / 1e9,
        late_steps=len(lates),
        steps=len(steps),
        waited_s=waited / 1e9,
        waited_share=waited / statistics.fmean(own.duration for own in others),
        saves_s=sum(late.saves for late in lates) / len(steps) / 1e9,
        threads=infos[rank].threads if rank in infos else None,
        others_threads=round(statistics.median(known)) if known else None,
    )
