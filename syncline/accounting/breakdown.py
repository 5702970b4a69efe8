"""Where a step's time went, on each rank: nine parts that add up to the step exactly.

Backward ends when this rank's last gradient is ready, not when `backward()` returns. From there to the end of
synchronisation is the exposed window. In it an instant is

    pack   while the computing thread copies or divides gradients, or nothing is pending any more
    wire   if any pending bucket (ready here, not yet ended here) is ready on all ranks
    wait   otherwise: until the first pending bucket is ready everywhere, charged to the last rank and that bucket

A rank that sends nothing before its last gradient is ready (the methods after backward) offers its buckets only then:
that is when they count as ready. Copying inside backward is pack, too. What no phase covers is other. Transfers under
way before the window are hidden communication, which is not one of the parts. Times are nanoseconds.

What is sent inside forward (buffers, batch-norm statistics) holds it up: that time is wire and wait, and not forward.
A step with several averages has a window for each of them (see pieces.py).
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from syncline.accounting.pieces import pieces
from syncline.events import RankStep, Step, Transfer

PARTS = ("data", "copy", "forward", "backward", "pack", "wait", "wire", "update", "other")
PART_OF = {"data": "data", "copy": "copy", "forward": "forward", "score": "forward", "update": "update"}
"""The part that a phase counts as; loss and accuracy are read from forward's result."""
COMPUTE = ("forward", "backward", "update")
COMMUNICATION = ("pack", "wait", "wire")
"""Exposed; what is hidden lies beside the step."""


@dataclass(frozen=True)
class Bucket:
    """What one rank sends under one label in a step, be it one operation or a gather and a scatter."""

    label: str
    num_bytes: int
    ready: int
    start: int
    end: int
    in_forward: bool = False
    """No gradients: forward waits for it."""


@dataclass(frozen=True)
class Wait:
    """Nanoseconds in which this rank waited for another one's bucket."""

    rank: int
    bucket: str
    duration: int


@dataclass(frozen=True)
class RankBreakdown:
    rank: int
    duration: int
    parts: dict[str, int]
    """Adds up to the duration."""
    last_ready: int
    """When the last gradient of this rank was ready; the end of backward where nothing is sent."""
    waits: tuple[Wait, ...] = ()
    wire: dict[str, int] = field(default_factory=dict)
    """The exposed wire by bucket: an instant counts for the bucket under way that ends first."""
    hidden: int = 0
    """Time before the last gradient in which a transfer was under way."""
    first_ready: int | None = None
    """When this rank came to the first transfer inside forward; None where there is none."""


def break_down(step: Step) -> dict[int, RankBreakdown]:
    """Every rank's breakdown of a step that all ranks have finished."""
    found = []
    for piece in pieces(step):
        buckets = offered(piece)
        found.append({rank: _break_down(own, buckets) for rank, own in piece.ranks.items()})
    return found[0] if len(found) == 1 else {rank: _whole([by_rank[rank] for by_rank in found]) for rank in found[0]}


def _whole(parts: Sequence[RankBreakdown]) -> RankBreakdown:
    wire: Counter[str] = Counter()
    for part in parts:
        wire.update(part.wire)
    return RankBreakdown(
        rank=parts[-1].rank,
        duration=sum(part.duration for part in parts),
        parts={name: sum(part.parts[name] for part in parts) for name in PARTS},
        last_ready=parts[-1].last_ready,
        waits=tuple(wait for part in parts for wait in part.waits),
        wire=dict(wire),
        hidden=sum(part.hidden for part in parts),
        first_ready=parts[0].first_ready,
    )


def offered(step: Step) -> dict[int, dict[str, Bucket]]:
    """Every rank's buckets, ready when the rank would send them: after backward, if it sends none before."""
    return {rank: _offered(buckets_of(rank_step)) for rank, rank_step in step.ranks.items()}


def _offered(own: dict[str, Bucket]) -> dict[str, Bucket]:
    gradients = _gradients(own.values())
    last_ready = max((bucket.ready for bucket in gradients), default=0)
    if any(bucket.start < last_ready for bucket in gradients):
        return own
    return own | {bucket.label: replace(bucket, ready=last_ready) for bucket in gradients}


def _gradients(buckets: Iterable[Bucket]) -> list[Bucket]:
    return [bucket for bucket in buckets if not bucket.in_forward]


def buckets_of(rank_step: RankStep) -> dict[str, Bucket]:
    """In order of readiness."""
    forwards = [phase for phase in rank_step.phases if phase.name == "forward"]
    groups: dict[str, list[Transfer]] = defaultdict(list)
    in_forward: dict[str, bool] = {}
    for transfer in rank_step.transfers:
        label = _bucket_name(transfer.label)
        inside = [
            n for n, phase in enumerate(forwards) if phase.start <= transfer.start and transfer.end <= phase.end
        ]
        label += f", forward {inside[0]}" if any(inside) else ""
        in_forward[label] = in_forward.get(label, True) and bool(inside)
        groups[label].append(transfer)
    buckets = [
        Bucket(
            label,
            max(transfer.num_bytes for transfer in group),
            min(transfer.ready for transfer in group),
            min(transfer.start for transfer in group),
            max(transfer.end for transfer in group),
            in_forward[label],
        )
        for label, group in groups.items()
    ]
    return {bucket.label: bucket for bucket in sorted(buckets, key=lambda bucket: bucket.ready)}


def _bucket_name(label: str) -> str:
    """'ring bucket 0' on a rank that sends is 'bucket 0' on one that only meets its leader in shared memory."""
    return label[label.rfind("bucket ") :] if "bucket " in label else label


def last_to_be_ready(label: str, buckets: Mapping[int, Mapping[str, Bucket]]) -> tuple[int, int]:
    """(when a bucket was ready on all ranks that have it, which rank was the last)."""
    return max((own[label].ready, rank) for rank, own in buckets.items() if label in own)


def _break_down(own: RankStep, buckets: Mapping[int, Mapping[str, Bucket]]) -> RankBreakdown:
    mine = _gradients(buckets[own.rank].values())
    window = _exposed_window(own, mine)
    free = Claims(own.start, own.end)
    parts = dict.fromkeys(PARTS, 0)
    waits: list[Wait] = []
    wire: dict[str, int] = {}
    last_ready = max((bucket.ready for bucket in mine), default=window[0] if window else own.end)
    if window is not None:
        exposed = Claims(*window)
        solid = [pack for pack in own.packs if pack.busy >= pack.end - pack.start]
        parts["pack"] += sum(exposed.take(pack.start, pack.end) for pack in solid)
        wire, waits = _claim_transfers(exposed, mine, buckets)
        parts["pack"] += exposed.take(*window)
        free.take(*window)
    in_forward = [bucket for bucket in buckets[own.rank].values() if bucket.in_forward]
    wire_in_forward, waits_in_forward = _claim_transfers(free, in_forward, buckets)
    wire, waits = wire | wire_in_forward, waits_in_forward + waits
    for stall in own.stalls:
        wire[stall.name] = wire.get(stall.name, 0) + free.take(stall.start, stall.end)
    parts["wire"], parts["wait"] = sum(wire.values()), sum(wait.duration for wait in waits)
    # The shorter first: an update inside forward (method ahead) is update.
    for phase in sorted(own.phases, key=lambda phase: phase.end - phase.start):
        part = "backward" if phase.name == "backward" else PART_OF.get(phase.name)
        if part is not None:
            parts[part] += free.take(phase.start, phase.end)
    packed = min(_packed_in_backward(own, window), parts["backward"])
    parts["backward"] -= packed
    parts["pack"] += packed
    parts["other"] = own.duration - sum(parts.values())
    first_ready = min((bucket.ready for bucket in in_forward), default=None)
    hidden = _hidden(own, window, buckets)
    return RankBreakdown(own.rank, own.duration, parts, last_ready, tuple(waits), wire, hidden, first_ready)


def _exposed_window(own: RankStep, mine: Sequence[Bucket]) -> tuple[int, int] | None:
    """From the last gradient to the end of synchronisation."""
    backward, sync = own.phase("backward"), own.phase("sync")
    if backward is None and sync is None:
        return None
    end = min(max(phase.end for phase in (backward, sync) if phase is not None), own.end)
    if backward is None:
        start = sync.start if sync is not None else end
    else:
        ready = max((bucket.ready for bucket in mine), default=backward.end)
        start = min(max(ready, backward.start), backward.end)
    return (min(max(start, own.start), end), end)


def _claim_transfers(
    exposed: Claims, mine: Sequence[Bucket], buckets: Mapping[int, Mapping[str, Bucket]]
) -> tuple[dict[str, int], list[Wait]]:
    everywhere = {bucket.label: last_to_be_ready(bucket.label, buckets) for bucket in mine}
    wire = {
        bucket.label: claimed
        for bucket in sorted(mine, key=lambda bucket: bucket.end)
        if (claimed := exposed.take(max(bucket.ready, everywhere[bucket.label][0]), bucket.end))
    }
    waits = [
        Wait(everywhere[bucket.label][1], bucket.label, claimed)
        for bucket in sorted(mine, key=lambda bucket: (everywhere[bucket.label], bucket.start))
        if (claimed := exposed.take(bucket.ready, min(everywhere[bucket.label][0], bucket.end)))
    ]
    return wire, waits


def _packed_in_backward(own: RankStep, window: tuple[int, int] | None) -> int:
    """Records of copying that was added up, and what of the others lies before the window."""
    start = window[0] if window else own.end
    total = 0
    for pack in own.packs:
        solid = pack.busy >= pack.end - pack.start
        total += max(0, min(pack.end, start) - pack.start) if solid else pack.busy
    return total


def _hidden(own: RankStep, window: tuple[int, int] | None, buckets: Mapping[int, Mapping[str, Bucket]]) -> int:
    """A transfer is under way from when the last rank has started it. Where forward stands still for it, it shows."""
    before = Claims(own.start, window[0] if window else own.end)
    for stall in own.stalls:
        before.take(stall.start, stall.end)
    carried = sum(before.take(transfer.start, transfer.end) for transfer in own.carried)
    return carried + sum(
        before.take(max(others[label].start for others in buckets.values() if label in others), bucket.end)
        for label, bucket in buckets[own.rank].items()
        if not bucket.in_forward
    )


class Claims:
    """A stretch of time that is given away piece by piece: no instant twice."""

    def __init__(self, start: int, end: int) -> None:
        self._free = [(start, end)] if start < end else []

    def take(self, start: int, end: int) -> int:
        """How much between start and end was still free; now it is not."""
        claimed, left = 0, []
        for low, high in self._free:
            first, last = max(low, start), min(high, end)
            if first >= last:
                left.append((low, high))
                continue
            claimed += last - first
            left += [piece for piece in ((low, first), (last, high)) if piece[0] < piece[1]]
        self._free = left
        return claimed


# Means over steps and ranks.


@dataclass(frozen=True)
class RankMeans:
    rank: int
    step_s: float
    parts_s: dict[str, float]
    hidden_s: float


@dataclass(frozen=True)
class WaitMean:
    """What all ranks together waited for one rank's bucket, per step and rank."""

    rank: int
    bucket: str
    seconds: float


@dataclass(frozen=True)
class BucketMeans:
    label: str
    num_bytes: int
    wire_s: float
    """Exposed, per step and rank."""
    duration_s: float
    """From ready on all ranks to the end."""


@dataclass(frozen=True)
class Breakdown:
    """Means over the counted steps; parts add up to `step_s`, for each rank and over all of them."""

    steps: int
    step_s: float
    median_s: float
    """Of the slowest rank, as a comparison prints it."""
    parts_s: dict[str, float]
    hidden_s: float
    overlap: float | None
    """Hidden / (hidden + exposed wire); None where nothing is sent."""
    ranks: list[RankMeans]
    waits: list[WaitMean]
    """Largest first."""
    buckets: list[BucketMeans]
    """Of gradients, in order of readiness."""

    def share(self, *parts: str) -> float:
        return sum(self.parts_s[part] for part in parts) / self.step_s if self.step_s else 0.0


def overlap(hidden: float, wire: float) -> float | None:
    """The share of communication that backward hides; None where nothing is sent."""
    return hidden / (hidden + wire) if hidden + wire else None


def summarise(steps: Sequence[Step], breakdowns: Sequence[Mapping[int, RankBreakdown]]) -> Breakdown | None:
    """None if there is no step to count."""
    if not breakdowns:
        return None
    ranks = [_rank_means([by_rank[rank] for by_rank in breakdowns]) for rank in sorted(breakdowns[0])]
    count = len(breakdowns) * len(ranks)
    waits: dict[tuple[int, str], int] = defaultdict(int)
    for by_rank in breakdowns:
        for wait in (wait for own in by_rank.values() for wait in own.waits):
            waits[wait.rank, wait.bucket] += wait.duration
    parts = {part: statistics.fmean(rank.parts_s[part] for rank in ranks) for part in PARTS}
    hidden = statistics.fmean(rank.hidden_s for rank in ranks)
    return Breakdown(
        steps=len(breakdowns),
        step_s=statistics.fmean(rank.step_s for rank in ranks),
        median_s=statistics.median(max(own.duration for own in by_rank.values()) for by_rank in breakdowns) / 1e9,
        parts_s=parts,
        hidden_s=hidden,
        overlap=overlap(hidden, parts["wire"]),
        ranks=ranks,
        waits=sorted(
            (WaitMean(rank, bucket, total / count / 1e9) for (rank, bucket), total in waits.items()),
            key=lambda wait: -wait.seconds,
        ),
        buckets=_bucket_means(steps, breakdowns),
    )


def _rank_means(breakdowns: Sequence[RankBreakdown]) -> RankMeans:
    return RankMeans(
        rank=breakdowns[0].rank,
        step_s=statistics.fmean(breakdown.duration for breakdown in breakdowns) / 1e9,
        parts_s={part: statistics.fmean(breakdown.parts[part] for breakdown in breakdowns) / 1e9 for part in PARTS},
        hidden_s=statistics.fmean(breakdown.hidden for breakdown in breakdowns) / 1e9,
    )


def _bucket_means(steps: Sequence[Step], breakdowns: Sequence[Mapping[int, RankBreakdown]]) -> list[BucketMeans]:
    """Of the labels of the last step: the first may have others."""
    durations: dict[str, list[int]] = defaultdict(list)
    wire: dict[str, int] = defaultdict(int)
    rank_steps: Counter[str] = Counter()
    for step, by_rank in zip(steps, breakdowns, strict=True):
        for buckets in map(offered, pieces(step)):
            for own in buckets.values():
                for label, bucket in own.items():
                    ready, _ = last_to_be_ready(label, buckets)
                    durations[label].append(max(0, bucket.end - ready))
        for rank, rank_step in step.ranks.items():
            for label in buckets_of(rank_step):
                wire[label] += by_rank[rank].wire.get(label, 0)
                rank_steps[label] += 1
    last = steps[-1].ranks
    return [
        BucketMeans(
            label,
            bucket.num_bytes,
            wire[label] / rank_steps[label] / 1e9,
            statistics.fmean(durations[label]) / 1e9,
        )
        for label, bucket in buckets_of(last[min(last)]).items()
        if not bucket.in_forward
    ]
