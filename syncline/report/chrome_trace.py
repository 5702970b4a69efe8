"""A run as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing.

One process per rank, with a track for compute (the step and its phases) and one for communication. Operations that
are in flight together get further tracks, because slices of one track must lie inside each other or apart. Inside an
operation, `wait` lasts until the last rank was ready, and `wire` is what follows. A transfer that goes on into the
next step is drawn as long as it lasts, and where forward waits for it, the compute track says so. All times are on
rank 0's clock, in whole microseconds from the first step that is shown: viewers add start and duration up, and where
fractions did not add up to the same end, a slice would seem to end after the one that it is in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from syncline.events import NO_STEPS, Events, RankStep, Step, Transfer

COMPUTE, COMMUNICATION = 0, 1
NANOSECONDS = 1000
"""In a microsecond."""

TraceEvent = dict[str, Any]
Key = tuple[str, str]


def chrome_trace(events: Events, method: str, *, first: int = 0, last: int | None = None) -> dict[str, Any]:
    """The steps `first` to `last` (both shown) of a method. What a rank did in a step that others never ended is
    shown too."""
    every = events.steps.get(method, NO_STEPS)
    shown = (every.numbers >= first) & (last is None or every.numbers <= last)
    steps = list(every.chosen(shown))
    origin = min((own.start for step in steps for own in step.ranks.values()), default=0)
    slices: list[TraceEvent] = []
    tracks: dict[int, int] = {}
    for rank in sorted({rank for step in steps for rank in step.ranks}):
        for step in steps:
            if rank in step.ranks:
                slices += _compute(step.ranks[rank], step.number)
        slices_of_rank, tracks[rank] = _communication(rank, steps)
        slices += slices_of_rank
    for event in slices:
        start, end = event["ts"] - origin, event["ts"] + event["dur"] - origin
        event["ts"] = start // NANOSECONDS
        event["dur"] = end // NANOSECONDS - event["ts"]
    return {
        "traceEvents": [*_names(events, tracks), *slices],
        "displayTimeUnit": "ms",
        "otherData": {"method": method, "world_size": events.world_size},
    }


def _names(events: Events, tracks: dict[int, int]) -> Iterator[TraceEvent]:
    for rank, count in tracks.items():
        host = events.ranks[rank].host if rank in events.ranks else 0
        several = len({info.host for info in events.ranks.values()}) > 1
        yield _name("process_name", rank, 0, f"rank {rank}, host {host}" if several else f"rank {rank}")
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        yield _name("thread_name", rank, COMPUTE, "compute")
        for track in range(count):
            name = "communication" if track == 0 else f"communication {track + 1}"
            yield _name("thread_name", rank, COMMUNICATION + track, name)
        for track in range(count + 1):
            yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": track, "args": {"sort_index": track}}


def _name(kind: str, rank: int, track: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": {"name": name}}


def _slice(name: str, category: str, rank: int, track: int, start: int, end: int, **args: Any) -> TraceEvent:
    """Still in nanoseconds."""
    return {
        "ph": "X", "name": name, "cat": category, "pid": rank, "tid": track, "ts": start, "dur": max(0, end - start),
        "args": args,
    }  # fmt: skip


def _compute(step: RankStep, number: int) -> Iterator[TraceEvent]:
    yield _slice(f"step {number}", "step", step.rank, COMPUTE, step.start, step.end, step=number)
    for phase in step.phases:
        start, end = max(phase.start, step.start), min(phase.end, step.end)
        yield _slice(phase.name, "phase", step.rank, COMPUTE, start, end, step=number)
    for stall in step.stalls:
        yield _slice(f"wait for {stall.name}", "stall", step.rank, COMPUTE, stall.start, stall.end, step=number)


def _communication(rank: int, steps: Sequence[Step]) -> tuple[list[TraceEvent], int]:
    """The slices, and how many tracks they need: each operation takes the first track that is free."""
    slices: list[TraceEvent] = []
    free_at: list[int] = []
    if steps and rank in steps[0].ranks:  # what came over from a step that is not shown
        own = steps[0].ranks[rank]
        for transfer in sorted(own.carried, key=_begin):
            track, late = (
                _track(free_at, own.start, transfer.end),
                replace(transfer, ready=own.start, start=own.start),
            )
            slices += _operation(late, rank, COMMUNICATION + track, steps[0].number - 1, own.start, rank)
    for step in steps:
        if rank not in step.ranks:
            continue
        all_ready = _ready_on_all(step)
        for transfer in sorted(step.ranks[rank].transfers, key=_begin):
            track = _track(free_at, _begin(transfer), transfer.end)
            ready_at, last_rank = all_ready[transfer.name, transfer.label]
            slices += _operation(transfer, rank, COMMUNICATION + track, step.number, ready_at, last_rank)
    return slices, max(1, len(free_at))


def _track(free_at: list[int], begin: int, end: int) -> int:
    """The first track that is free, which it then is not until `end`."""
    track = next((number for number, free in enumerate(free_at) if free <= begin), len(free_at))
    if track == len(free_at):
        free_at.append(0)
    free_at[track] = max(begin, end)
    return track


def _begin(transfer: Transfer) -> int:
    """In shared memory all ranks meet before the start that is noted: the meeting is part of it."""
    return min(transfer.ready, transfer.start) if transfer.name == "shared_memory" else transfer.start


def _ready_on_all(step: Step) -> dict[Key, tuple[int, int]]:
    """When the last rank was ready for each operation, and which one that was."""
    last_ready: dict[Key, tuple[int, int]] = {}
    for rank, rank_step in step.ranks.items():
        for transfer in rank_step.transfers:
            before = last_ready.get((transfer.name, transfer.label))
            if before is None or transfer.ready > before[0]:
                last_ready[transfer.name, transfer.label] = (transfer.ready, rank)
    return last_ready


def _operation(
    transfer: Transfer, rank: int, track: int, step: int, ready_at: int, last_rank: int
) -> Iterator[TraceEvent]:
    begin, end = _begin(transfer), transfer.end
    turn = min(max(ready_at, begin), end)
    name = f"{transfer.name} {transfer.label}".strip()
    yield _slice(
        name, "operation", rank, track, begin, end, step=step, bytes=transfer.num_bytes, label=transfer.label,
        queued_ms=max(0, transfer.start - transfer.ready) / 1e6, waits_for_rank=last_rank,
    )  # fmt: skip
    if turn > begin:
        yield _slice(f"wait for rank {last_rank}", "wait", rank, track, begin, turn, step=step)
    if end > turn:
        yield _slice("wire", "wire", rank, track, turn, end, step=step, bytes=transfer.num_bytes)
