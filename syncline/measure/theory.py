"""What an operation puts on a rank's link, from theory alone: bytes sent and received, by pattern. Pure.

Our own patterns are counted transfer by transfer on the schedule that runs. The backend's own operations follow from
the algorithm that Gloo uses: a ring for all-reduce (2(n-1)/n S) and all-gather ((n-1) S), a binomial tree for
broadcast, and everything through the root (rank 0) for gather and scatter.
"""

from __future__ import annotations

from dataclasses import dataclass

from syncline.collectives.execute import rank_rounds
from syncline.collectives.patterns import PATTERNS, make_schedule

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
    sent = sum(message.stop - message.start for one in rounds for message in one.sends)
    received = sum(message.stop - message.start for one in rounds for message in one.receives)
    return Wire(sent * wire_bytes, received * wire_bytes)


def _children(rank: int, world_size: int) -> int:
    """Ranks that a rank hands a broadcast on to: in round k, every rank below 2^k to the one 2^k above it."""
    distances = (1 << k for k in range(world_size.bit_length()))
    return sum(rank < distance and rank + distance < world_size for distance in distances)
