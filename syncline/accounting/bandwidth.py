"""Bytes and bandwidth of a run's steps: from theory, as the kernel counted them, and by bucket against the link.

If theory and count differ by more than headers explain, the report says so: the theory is wrong, or something else
used the sockets.

Theory: our own patterns are counted transfer by transfer on the schedule that runs. The backend's own operations
follow from the algorithm that Gloo uses: a ring for all-reduce (2(n-1)/n S) and all-gather ((n-1) S), a binomial tree
for broadcast, and everything through the root (rank 0) for gather and scatter.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from syncline.accounting.pieces import pieces
from syncline.collectives.patterns import PATTERNS, make_schedule
from syncline.collectives.schedule import rank_rounds
from syncline.errors import RunFolderError
from syncline.events import Events, Step, Transfer
from syncline.methods import method_of
from syncline.plan import Plan
from syncline.store import Run, list_runs

ELEMENT_BYTES = 4
"""Gradients are 32-bit numbers; what is sent of them may be shorter."""


@dataclass(frozen=True)
class Wire:
    """Bytes that one rank sends and receives."""

    sent: float = 0.0
    received: float = 0.0

    def __add__(self, other: Wire) -> Wire:
        return Wire(self.sent + other.sent, self.received + other.received)


def wire_of(
    name: str, label: str, num_bytes: int, *, rank: int, world_size: int, wire_bytes: int = ELEMENT_BYTES
) -> Wire | None:
    """One operation on one rank; None where there is no theory for it. `wire_bytes`: of one element as it travels."""
    if name == "schedule":
        return _of_schedule(label.partition(" ")[0], num_bytes, rank, world_size, wire_bytes)
    share, others = num_bytes / world_size, world_size - 1
    if name == "all_reduce":
        return Wire(2 * others * share, 2 * others * share)
    if name == "all_gather":
        return Wire(others * num_bytes, others * num_bytes)
    if name == "broadcast":
        return Wire(_children(rank, world_size) * num_bytes, num_bytes if rank else 0)
    if name in ("gather", "scatter"):
        through_root = Wire(0, others * num_bytes) if rank == 0 else Wire(num_bytes, 0)
        return through_root if name == "gather" else Wire(through_root.received, through_root.sent)
    if name in ("send", "receive"):
        return Wire(num_bytes, 0) if name == "send" else Wire(0, num_bytes)
    return Wire() if name == "shared_memory" else None


def _of_schedule(pattern: str, num_bytes: int, rank: int, world_size: int, wire_bytes: int) -> Wire | None:
    if pattern not in PATTERNS:
        return None
    rounds = rank_rounds(make_schedule(pattern, world_size), rank, num_bytes // ELEMENT_BYTES)
    sent = sum(message.stop - message.start for exchange in rounds for message in exchange.sends)
    received = sum(message.stop - message.start for exchange in rounds for message in exchange.receives)
    return Wire(sent * wire_bytes, received * wire_bytes)


def _children(rank: int, world_size: int) -> int:
    """Ranks that a rank hands a broadcast on to: in round k, every rank below 2^k to the one 2^k above it."""
    distances = (1 << k for k in range(world_size.bit_length()))
    return sum(rank < distance and rank + distance < world_size for distance in distances)


# Counted bytes and rates of a run.

TOLERANCE = 0.02
HEADER_BYTES = 200
"""Allowed on top of theory, for each operation and rank: what a backend writes before its messages."""
Theory = Callable[..., Wire | None]


@dataclass(frozen=True)
class RankBytes:
    """One rank's bytes in a step, the median over steps. Theory is None where an operation has none."""

    rank: int
    theory: Wire | None
    counted: Wire | None
    """On the rank's own sockets; None where nothing was counted."""
    interface: Wire | None
    """On the interfaces of the rank's host, all its ranks and headers included; None where hosts share loopback."""
    agrees: bool | None
    """False: the count does not fit the theory. None: there is nothing to compare."""


@dataclass(frozen=True)
class BucketRate:
    """One bucket or parameter. `seconds`: from when it was ready and had started on all ranks, to its last end."""

    label: str
    name: str
    num_bytes: int
    seconds: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float | None
    """None where nothing is sent."""
    utilisation: float | None
    """Of the probed link; None where there is no probe."""


@dataclass(frozen=True)
class Bandwidth:
    ranks: list[RankBytes]
    buckets: list[BucketRate]
    link_bytes_per_s: float | None
    link_source: str
    """Which probe the link rate is from, or why there is none."""
    note: str
    """What does not fit, in a sentence; empty if all does."""


def bandwidth(
    events: Events, method: str, plan: Plan, steps: Sequence[Step], *,
    link: tuple[float, str] | None = None, theory: Theory = wire_of,
) -> Bandwidth | None:  # fmt: skip
    """Of these steps; None if there is none. `method` is as in the log."""
    if not steps:
        return None
    ranks = events.taking_part(method)
    # MPI sends inside a host through memory of its own, Spark through files and a JVM: our sockets carry other
    # things.
    elsewhere = method_of(method).world in ("mpiexec", "tasks")
    counters = {} if elsewhere else _counters(events, method, steps)
    wire_bytes = 2 if plan.options_for(method).get("transfer_dtype") else ELEMENT_BYTES
    own_interface = len({events.ranks[rank].host for rank in ranks if rank in events.ranks}) > 1
    by_rank = [_rank_bytes(rank, steps, counters, wire_bytes, theory, own_interface=own_interface) for rank in ranks]
    rate = link[0] if link else None
    return Bandwidth(
        ranks=by_rank,
        buckets=_bucket_rates(steps, rate),
        link_bytes_per_s=rate,
        link_source=link[1] if link else "no probe matches these ranks; run `syncline probe`",
        note=_note(by_rank),
    )


def _rank_bytes(
    rank: int, steps: Sequence[Step], counters: Mapping[tuple[int, int], dict[str, Any]], wire_bytes: int,
    theory: Theory, *, own_interface: bool,
) -> RankBytes:  # fmt: skip
    expected = [_step_wire(step, rank, wire_bytes, theory) for step in steps]
    records = [counters[rank, step.number] for step in steps if (rank, step.number) in counters]
    counted = _median_wire([Wire(record["sent"], record["received"]) for record in records])
    interface = _median_wire([Wire(record["interface_sent"], record["interface_received"]) for record in records])
    wires = [wire for wire in expected if wire is not None]
    predicted = _median_wire(wires) if len(wires) == len(expected) else None
    messages = statistics.median(len(step.ranks) * len(step.ranks[rank].transfers) for step in steps)
    return RankBytes(
        rank, predicted, counted, interface if own_interface else None,
        None if predicted is None or counted is None else _fits(predicted, counted, messages),
    )  # fmt: skip


def _step_wire(step: Step, rank: int, wire_bytes: int, theory: Theory) -> Wire | None:
    total, sharing = Wire(), _sharing(step)
    for transfer in step.ranks[rank].transfers:
        ranks = sharing[transfer.name, transfer.label]
        place = {"rank": ranks.index(rank), "world_size": len(ranks)}
        wire = theory(transfer.name, transfer.label, transfer.num_bytes, **place, wire_bytes=wire_bytes)
        if wire is None:
            return None
        total += wire
    return total


def _sharing(step: Step) -> dict[tuple[str, str], list[int]]:
    """The ranks that take part in each operation: all, or one leader of each host."""
    ranks_of: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, rank_step in sorted(step.ranks.items()):
        for key in {(transfer.name, transfer.label) for transfer in rank_step.transfers}:
            ranks_of[key].append(rank)
    return ranks_of


def _fits(theory: Wire, counted: Wire, messages: float) -> bool:
    """More by a header for each message is right; less is not, but for a moment's delay between steps."""
    for expected, actual in ((theory.sent, counted.sent), (theory.received, counted.received)):
        slack = TOLERANCE * expected + HEADER_BYTES
        if not -slack <= actual - expected <= slack + HEADER_BYTES * messages:
            return False
    return True


def _note(ranks: Sequence[RankBytes]) -> str:
    wrong = [
        (rank.rank, rank.theory, rank.counted)
        for rank in ranks
        if rank.agrees is False and rank.theory is not None and rank.counted is not None
    ]
    if not wrong:
        return ""
    rank, theory, counted = max(wrong, key=lambda case: abs(case[2].sent - case[1].sent))
    return (
        f"the bytes counted do not fit the theory: rank {rank} should send {theory.sent:.0f} and receive "
        f"{theory.received:.0f} bytes a step, but sent {counted.sent:.0f} and received {counted.received:.0f}"
    )


def _counters(events: Events, method: str, steps: Sequence[Step]) -> dict[tuple[int, int], dict[str, Any]]:
    """By rank and step; of a repeated step, the last time counts."""
    wanted = {step.number for step in steps}
    return {
        (rank, int(record["step"])): record
        for rank, record in events.of_kind("counter")
        if record.get("method", "") == method and record["step"] in wanted
    }


def _median_wire(wires: Sequence[Wire]) -> Wire | None:
    if not wires:
        return None
    return Wire(statistics.median(wire.sent for wire in wires), statistics.median(wire.received for wire in wires))


def _bucket_rates(steps: Sequence[Step], link: float | None) -> list[BucketRate]:
    durations: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    sharing: dict[tuple[str, str], list[int]] = {}
    for piece in (piece for step in steps for piece in pieces(step)):
        sharing |= _sharing(piece)
        for key, duration in transfer_seconds(piece).items():
            durations[key].append(duration)
    rates = []
    for (name, label, num_bytes), seconds in durations.items():
        middle = statistics.median(seconds)
        factor = _bus_factor(name, len(sharing[name, label]))
        algorithm = num_bytes / middle if middle > 0 else 0.0
        bus = None if factor is None else algorithm * factor
        used = bus / link if bus is not None and link else None
        rates.append(BucketRate(label, name, num_bytes, middle, algorithm, bus, used))
    return rates


def transfer_seconds(step: Step) -> dict[tuple[str, str, int], float]:
    """By operation, label and bytes: from the last rank's being ready and having started it, to the last end."""
    operations: dict[tuple[str, str, int], list[Transfer]] = defaultdict(list)
    for rank_step in step.ranks.values():
        for transfer in rank_step.transfers:
            operations[transfer.name, transfer.label, transfer.num_bytes].append(transfer)
    return {
        key: max(0, max(part.end for part in parts) - max(max(part.ready, part.start) for part in parts)) / 1e9
        for key, parts in operations.items()
    }


def _bus_factor(name: str, world_size: int) -> float | None:
    if name == "shared_memory":
        return None
    return bus_factor("all_reduce" if name == "schedule" else name, world_size)


def find_link(run: Run, *, backend: str = "gloo", probe: Run | None = None) -> tuple[float, str] | None:
    """The link rate for a run, and where it is from: the probe that is given, or the newest one beside the run that
    had as many ranks on as many hosts over the same links on the same kind of machine."""
    if probe is not None:
        candidates = [probe]
    else:
        beside = [Run(folder.path) for folder in list_runs(run.path.parent)]
        candidates = [other for other in beside if _is_probe_for(other, run)]
    for candidate in reversed(candidates):
        rate = link_rate(candidate.summary, backend)
        if rate is not None:
            return rate, str(candidate.path)
    return None


def _is_probe_for(probe: Run, run: Run) -> bool:
    try:
        summary = probe.summary
    except RunFolderError:
        return False  # damaged, and none of this run's
    if probe.kind != "probe" or probe.status != "finished" or not summary:
        return False
    if any(probe.machine.get(key) != run.machine.get(key) for key in ("processor", "cores")):
        return False
    about = (run.plan.workers, run.plan.hosts, run.plan.link)
    return about == (summary.get("workers"), summary.get("hosts", 1), summary.get("link"))


def bus_factor(operation: str, world_size: int) -> float:
    """What the busiest link carries, as a multiple of the message, when the pattern is the best one."""
    if operation == "all_reduce":
        return 2 * (world_size - 1) / world_size
    return float(world_size - 1) if operation in ("gather", "scatter") else 1.0


def link_rate(probe: dict[str, Any], backend: str = "gloo") -> float | None:
    """Bytes per second that one link carries one way: the denominator of utilisation."""
    link = probe.get("links", {}).get(backend)
    return float(link["bytes_per_s"]) if link else None
