"""One step of all ranks as lanes of spans, from the event log."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from syncline.events import Events, RankStep, Step
from syncline.units import format_bytes

COMPUTE, COMMUNICATION = "compute", "communication"


@dataclass(frozen=True)
class Bar:
    lane: str
    name: str
    start_ms: float
    length_ms: float
    text: str


@dataclass(frozen=True)
class Timeline:
    title: str
    lanes: list[str]
    spans: list[Bar]
    note: str = ""

    @property
    def text(self) -> str:
        """In words: how long each rank's phases took."""
        compute = [bar for bar in self.spans if bar.lane.endswith(COMPUTE)]
        told = [f"{bar.lane} {bar.name} {bar.length_ms:.1f} ms" for bar in compute]
        return f"{self.title}: {'; '.join(told)}."


def timeline_of(events: Events, method: str, *, warmup: int = 0) -> Timeline | None:
    """The step whose length is the median of the method's steps after the warm-up: a typical one."""
    steps = events.complete(method)[warmup:]
    if not steps:
        return None
    lengths = [max(rank.duration for rank in step.ranks.values()) for step in steps]
    middle = statistics.median_low(lengths)
    step = steps[lengths.index(middle)]
    start = min(rank.start for rank in step.ranks.values())
    lanes = [f"rank {rank} {kind}" for rank in sorted(step.ranks) for kind in (COMPUTE, COMMUNICATION)]
    bars = [bar for rank in sorted(step.ranks) for bar in _bars(step.ranks[rank], start)]
    return Timeline(f"Step {step.number} of {method or 'the run'}", lanes, bars, note=_note(step))


def _bars(rank: RankStep, start: int) -> Iterator[Bar]:
    for phase in rank.phases:
        yield _bar(f"rank {rank.rank} {COMPUTE}", phase.name, phase.start, phase.end, start)
    for transfer in rank.transfers:
        told = f"{transfer.label or transfer.name}, {format_bytes(transfer.num_bytes)}"
        lane = f"rank {rank.rank} {COMMUNICATION}"
        yield _bar(lane, "transfer", transfer.start, transfer.end, start, f"{transfer.name}: {told}")


def _bar(lane: str, name: str, begin: int, end: int, start: int, told: str = "") -> Bar:
    length = (end - begin) / 1e6
    return Bar(lane, name, (begin - start) / 1e6, length, f"{told or name}: {length:.2f} ms")


def _note(step: Step) -> str:
    longest = max(rank.duration for rank in step.ranks.values()) / 1e6
    return f"A typical step: {longest:.0f} ms on its slowest rank."
