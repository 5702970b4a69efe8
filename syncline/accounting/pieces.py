"""A step with several averages, cut into pieces with one average each.

A loop that calls `backward()` several times before one update averages each time unless it uses `no_sync`. The same
buckets then travel several times in one step: what belongs to which average is told by when each one ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

from syncline.events import Pack, Phase, RankStep, Step, Transfer

Record = TypeVar("Record", Phase, Transfer, Pack)


def pieces(step: Step) -> list[Step]:
    """In order of time. One, where the step has one average, or where ranks do not agree on how many it has."""
    cuts = {rank: _cuts(own) for rank, own in step.ranks.items()}
    counts = {len(own) for own in cuts.values()}
    if counts != {max(counts, default=0)} or counts == {0}:
        return [step]
    by_rank = {rank: _cut(own, cuts[rank]) for rank, own in step.ranks.items()}
    count = counts.pop() + 1
    return [replace(step, ranks={rank: own[number] for rank, own in by_rank.items()}) for number in range(count)]


def _cuts(own: RankStep) -> list[int]:
    """Ends of synchronisations that sent something, without the last: what follows it belongs to it."""
    ends = sorted({phase.end for phase in own.phases if phase.name == "sync" and own.start < phase.end < own.end})
    averages = {bisect_left(ends, transfer.end) for transfer in own.transfers}
    return [ends[number] for number in sorted(averages) if number < len(ends)][:-1]


def _cut(own: RankStep, cuts: Sequence[int]) -> list[RankStep]:
    return [
        RankStep(
            own.rank, start, end, _ended(own.phases, start, end), _ended(own.transfers, start, end),
            _ended(own.packs, start, end),
        )
        for start, end in pairwise([own.start, *cuts, own.end])
    ]  # fmt: skip


def _ended(records: Sequence[Record], start: int, end: int) -> tuple[Record, ...]:
    return tuple(record for record in records if start < record.end <= end)
